"""How many layers should a draft have, and should the later ones read the token embeddings? An ablation.

    python evaluation/ablate.py --recipe trainer/recipes/smollm2_135m.yaml --depths 1 2 3 --fusions first all --seeds 3

Options that are not this script's own go to trainer/run.py, for each cell: `--max_steps 150 --dataset_name chat.json`.

Every cell (depth, fusion, seed) is trained by trainer/run.py. With one layer both fusions are the same network, so
that is one cell, the control. A seed decides the split of the data, the order of the rows and the random weights: all
cells of a seed see the same tokens in the same order, which is checked before anything is compared. `--wide` adds a
cell of one layer whose MLP is so wide that it has as many parameters as the deepest draft of "first".

Stopped at any moment and started again with the same command it goes on, inside the cell too. Seed by seed, so that
what is there can be compared; the report is written again after each cell, and by `--report` alone.

Definitions: tau as in acceptance.py, by replay (evaluation/replay.py) of the target's own greedy answers; of a task it
is new tokens / target passes of all its questions, "mean" is the plain mean over tasks. Intervals are 95 % of a
bootstrap that draws seeds and, within each task, questions, the same ones for all cells. A difference counts as shown
when its interval, and Student's over the seeds alone, exclude zero: with two seeds hardly ever. Projected tokens per
second are tau / (a target pass over K+1 tokens + a chain of K draft tokens): at batch 1, nothing else counted. Seconds
of training are tokens / median tokens per second of the log. Latencies and tau are in `--dtype`.

Shapes: C cells, T tasks, Q questions of a task, R resamples, K draft tokens.
"""

import argparse
import contextlib
import copy
import fcntl
import hashlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from tqdm.auto import tqdm
from transformers import AutoTokenizer, DynamicCache, PreTrainedModel
from trl import TrlParser

from eagle3_llama.configuration_eagle3_llama import Eagle3LlamaConfig
from eagle3_llama.evaluation.acceptance import drop_newest, greedy_chain, propose
from eagle3_llama.evaluation.bench_decode import seconds
from eagle3_llama.evaluation.replay import captured_states, greedy_answers, replay
from eagle3_llama.evaluation.tasks import TASKS, load_task
from eagle3_llama.modeling_eagle3_llama import LlamaForCausalLMEagle3
from eagle3_llama.trainer import run
from eagle3_llama.trainer.conversations import DATE
from eagle3_llama.trainer.eagle3_config import Eagle3Config
from eagle3_llama.trainer.eagle3_trainer import DRAFT_OPTIONS, draft_config
from eagle3_llama.trainer.frozen_target import end_of_turn_ids, load_target
from eagle3_llama.trainer.hub import RECIPE, plain, provenance

OWN = ("num_hidden_layers", "embed_fusion", "intermediate_size", "seed", "output_dir")  # what a cell sets itself
CONTEXT = 256  # tokens in the caches while passes are timed
RESAMPLES = 4000
# 97.5 % quantiles of Student's t, for 1 to 9 degrees of freedom; more get the last.
STUDENT_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
NOT_SHOWN = "no difference shown"
SAME_TOKENS = ("tokens", "order", "data", "vocabulary")  # what the cells of a seed must have in common


@dataclass(frozen=True)
class Cell:
    """One draft to train; `width` is the MLP's, None for the target's."""

    layers: int
    fusion: str
    seed: int
    width: int | None = None

    @property
    def shape(self) -> str:
        """The name under which seeds are put together; the fusion of one layer means nothing."""
        if self.layers == 1:
            return "1" if self.width is None else "1 wide"
        return f"{self.layers} {self.fusion}"

    @property
    def folder(self) -> str:
        return f"cells/{self.layers}-{self.fusion if self.width is None else 'wide'}-seed{self.seed}"


def plan_cells(depths: list[int], fusions: list[str], seeds: int, width: int | None) -> list[Cell]:
    """All cells, seed by seed; one layer once a seed."""
    cells = []
    for seed in range(1, seeds + 1):
        for layers in sorted(set(depths)):
            cells += [Cell(layers, fusion, seed) for fusion in (["first"] if layers == 1 else fusions)]
        cells += [Cell(1, "first", seed, width)] if width else []
    return cells


# ---- training ----


def training_command(recipe: str, extra: list[str], cell: Cell, output_dir: str) -> list[str]:
    """The command that trains a cell, or goes on with it."""
    options = {"num_hidden_layers": cell.layers, "embed_fusion": cell.fusion, "seed": cell.seed}
    options |= {"intermediate_size": cell.width} if cell.width else {}
    options |= {"output_dir": f"{output_dir}/{cell.folder}", "measure_prompts": 0}
    options |= {"include_num_input_tokens_seen": "true"}
    words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    return [sys.executable, run.__file__, "--config", recipe, *extra, *words]


def parse_training(command: list[str]) -> tuple[run.ScriptArguments, Eagle3Config]:
    """The options as trainer/run.py understands them. Raises ValueError for those that an ablation cannot have."""
    script, args = TrlParser((run.ScriptArguments, Eagle3Config)).parse_args_and_config(command[2:])
    if script.draft_name_or_path is not None:
        raise ValueError("--draft_name_or_path: every cell starts from a new draft; remove it")
    if args.push_to_hub:
        raise ValueError("--push_to_hub: the drafts of an ablation are not pushed; remove it")
    if plain(args.save_strategy) == "no" or args.save_only_model:
        raise ValueError("a cell needs checkpoints to go on from: remove --save_strategy no and --save_only_model")
    return script, args


def train(command: list[str], folder: Path, max_minutes: float | None, lock: int) -> bool:
    """Train a cell to its end; False when its minutes, all sessions together, are spent."""
    if (folder / "trained.json").exists():
        return True
    folder.mkdir(parents=True, exist_ok=True)
    clock = folder / "spent_seconds.json"
    spent = json.loads(clock.read_text()) if clock.exists() else 0.0
    left = None if max_minutes is None else 60 * max_minutes - spent
    if left is not None and left <= 0:
        return False
    start = time.perf_counter()
    try:
        finished = run_training(command, folder / "train.log", left, lock)
    finally:
        write(clock, json.dumps(spent + time.perf_counter() - start))
    if finished:
        write(folder / "trained.json", json.dumps(training_record(folder), indent=1))
    return finished


def run_training(command: list[str], log: Path, limit: float | None, lock: int) -> bool:
    """Run the command with its output in `log`; stop it after `limit` seconds: False.

    Raises:
        RuntimeError: it failed; says with what.
    """
    with log.open("a") as output:
        # In a session of its own: Ctrl-C reaches it once, through us. It keeps the lock: should this process be
        # killed, no second trainer starts in the folder while it still runs.
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, pass_fds=[lock]
        )
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            return False
        finally:
            stop(process)
    if status:
        end = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        raise RuntimeError(f"training failed with status {status}; {log} ends with:\n{end}")
    return True


def stop(process: subprocess.Popen) -> None:
    """End a trainer; its last checkpoint is what it goes on from."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def trainer_state(folder: Path) -> dict:
    """trainer_state.json of the last checkpoint; nothing trained when there is none."""
    checkpoint = run.last_checkpoint(str(folder))
    if checkpoint is None:
        return {"global_step": 0, "max_steps": None}
    return json.loads((Path(checkpoint) / "trainer_state.json").read_text())


def training_record(folder: Path) -> dict:
    """What a finished cell was trained on: tokens, a hash of their number at each log entry, seconds."""
    state = trainer_state(folder)
    entries = [entry for entry in state["log_history"] if "tokens_per_second" in entry]
    if not entries:
        raise ValueError(f"{folder} was trained without a log entry: lower --logging_steps")
    seen = [(entry["step"], entry["num_input_tokens_seen"]) for entry in entries]
    tokens = state["num_input_tokens_seen"]
    return {
        "steps": state["global_step"],
        "tokens": tokens,
        "training_seconds": tokens / statistics.median(entry["tokens_per_second"] for entry in entries),
        "order": digest(seen),
        "data": [path.stem for path in sorted(folder.glob("draft-vocabulary-*.safetensors"))],  # named by content
    }


# ---- measuring ----


def task_answers(
    target: PreTrainedModel, tokenizer, task: str, tasks_dir: str | None, limit: int | None, max_new_tokens: int
) -> list[dict]:
    """Questions of a task with prompts and the target's greedy answers, one of each a turn.

    The history of a second turn is the target's own first answer. Questions whose answers need no pass are left out.
    """
    questions = load_task(task, tasks_dir, limit)
    records = [{"question_id": question.question_id, "prompts": [], "answers": []} for question in questions]
    histories: list[list[dict]] = [[] for _ in questions]
    for turn in range(max(len(question.turns) for question in questions)):
        asked = [i for i, question in enumerate(questions) if turn < len(question.turns)]
        for i in asked:
            histories[i].append({"role": "user", "content": questions[i].turns[turn]})
        prompts = [prompt_ids(tokenizer, histories[i]) for i in asked]
        answers = greedy_answers(target, prompts, max_new_tokens, end_of_turn_ids(target))
        for i, prompt, answer in zip(asked, prompts, answers, strict=True):
            records[i]["prompts"].append(prompt)
            records[i]["answers"].append(answer)
            histories[i].append({"role": "assistant", "content": tokenizer.decode(answer, skip_special_tokens=True)})
    kept = [record for record in records if any(len(answer) > 1 for answer in record["answers"])]
    if not kept:
        raise ValueError(f"{task}: every answer ended at its first token: the prompts do not fit the chat template")
    return kept


def prompt_ids(tokenizer, messages: list[dict]) -> list[int]:
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, date_string=DATE)["input_ids"]


def cached_answers(path: Path, key: str, target: PreTrainedModel, tokenizer, args: argparse.Namespace) -> dict:
    """`task_answers` of every task, from `path` if it was written under this key."""
    if path.exists() and (saved := json.loads(path.read_text()))["key"] == key:
        return saved["answers"]
    options = (args.tasks_dir, args.limit, args.max_new_tokens)
    tasks = tqdm(args.tasks, desc="the target's answers", leave=False)
    answers = {task: task_answers(target, tokenizer, task, *options) for task in tasks}
    write(path, json.dumps({"key": key, "answers": answers}))
    return answers


def measure(
    target: PreTrainedModel, draft: PreTrainedModel, answers: dict, num_draft_tokens: int, features: dict
) -> dict:
    """By task and question: new tokens, target passes, and passes that accepted at least 1..K draft tokens.

    `features` keeps the target's states of every question: they are the same for all cells, and most of the time.
    The first question of each task is decoded as well: `decoded_the_same` of `decoded` had the replay's passes.
    """
    figures, same = {}, 0
    eos = end_of_turn_ids(target)
    for task, records in answers.items():
        new, accepted = [], []
        for record in records:
            texts, question = (record["prompts"], record["answers"]), (task, record["question_id"])
            if question not in features:
                layers = draft.config.eagle_aux_hidden_state_layer_ids
                features[question] = [states.cpu() for states in captured_states(target, layers, *texts)]
            passes = replay(target, draft, *texts, num_draft_tokens, features[question])
            accepted.append([count for turn in passes for count in turn])
            new.append(sum(len(answer) - 1 for answer in record["answers"]))  # the prompt's pass made the first
            if record is records[0]:
                length = len(record["answers"][0])
                chain = greedy_chain(target, draft, record["prompts"][0], num_draft_tokens, length, eos)
                same += chain.accepted == passes[0]
        figures[task] = {
            "question_ids": [record["question_id"] for record in records],
            "new": new,
            "passes": [len(counts) for counts in accepted],
            "accepted": [[sum(c > i for c in counts) for i in range(num_draft_tokens)] for counts in accepted],
        }
    return {"tasks": figures, "decoded": len(answers), "decoded_the_same": same}


def cell_config(target: PreTrainedModel, args: Eagle3Config, cell: Cell) -> Eagle3LlamaConfig:
    """The configuration that the trainer gives this cell's draft."""
    args = copy.copy(args)
    args.num_hidden_layers, args.embed_fusion, args.intermediate_size = cell.layers, cell.fusion, cell.width
    return draft_config(target, args)


def count_parameters(config: Eagle3LlamaConfig) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in LlamaForCausalLMEagle3(config).parameters())


def matched_width(target: PreTrainedModel, args: Eagle3Config, layers: int) -> int:
    """MLP width at which one layer has the parameters of that many layers of "first", to within half a unit."""
    deep, flat = (count_parameters(cell_config(target, args, Cell(n, "first", 0))) for n in (layers, 1))
    return target.config.intermediate_size + round((deep - flat) / (3 * target.config.hidden_size))


@torch.no_grad()
def latencies(target: PreTrainedModel, configs: dict[str, Eagle3LlamaConfig], num_draft_tokens: int) -> dict:
    """Median milliseconds at batch 1 with CONTEXT tokens cached, drafts and target in turns.

    "target": {width: pass}; of a draft "step": one draft step, "chain": a chain of K after w = 1..K+1 new tokens.
    """
    calls, widths = {}, range(1, num_draft_tokens + 2)
    ids = torch.randint(10, min(1000, target.config.vocab_size), (1, CONTEXT), device=target.device)
    features = torch.randn(1, CONTEXT, 3 * target.config.hidden_size, device=target.device, dtype=target.dtype)
    cache = DynamicCache()
    layers = next(iter(configs.values())).eagle_aux_hidden_state_layer_ids
    target(ids, cache=cache, use_cache=True)

    def target_pass(width: int) -> None:
        target(ids[:, :width], cache=cache, use_cache=True, output_hidden_states=layers)
        drop_newest(cache, width)

    calls |= {("target", width): lambda width=width: target_pass(width) for width in (1, num_draft_tokens + 1)}
    for name, config in configs.items():
        draft = LlamaForCausalLMEagle3(config).to(target.device, target.dtype).bind_target(target).eval()
        filled = draft(ids, features, use_cache=True).cache

        def step(draft=draft, filled=filled) -> None:
            draft(ids[:, :1], features[:, :1, : draft.config.hidden_size], cache=filled, use_cache=True)
            drop_newest(filled, 1)

        def chain(width: int, draft=draft, filled=filled) -> None:
            propose(draft, ids[:, :width], features[:, :width], filled, num_draft_tokens)
            drop_newest(filled, width)

        calls[name, "step"] = step
        calls |= {(name, width): lambda width=width, chain=chain: chain(width) for width in widths}
    times = defaultdict(list)
    for _ in tqdm(range(9), desc="latencies", leave=False):
        for key, call in calls.items():
            times[key].append(1000 * seconds(call, repeats=3))
    median = {key: statistics.median(values) for key, values in times.items()}
    result = {"target": {str(width): median["target", width] for width in (1, num_draft_tokens + 1)}}
    for name in configs:
        result[name] = {"step": median[name, "step"], "chain": [median[name, width] for width in widths]}
    return result


def cached_latencies(path: Path, key: str, target: PreTrainedModel, configs: dict, num_draft_tokens: int) -> None:
    """Write `latencies` to `path`, unless they are there under this key: all of one sitting."""
    if not path.exists() or json.loads(path.read_text())["key"] != key:
        write(path, json.dumps({"key": key, **latencies(target, configs, num_draft_tokens)}, indent=1))


# ---- statistics ----


def check_same_tokens(results: list[dict]) -> None:
    """Raise ValueError unless all cells of a seed were trained on the same tokens in the same order."""
    for a, b in combinations(results, 2):
        for key in SAME_TOKENS:
            if a["seed"] == b["seed"] and a[key] != b[key]:
                raise ValueError(
                    f"cells {a['shape']} and {b['shape']} of seed {a['seed']} cannot be compared: {key} is {a[key]} "
                    f"in one and {b[key]} in the other; remove the folder of one of them and run it again"
                )


def counts(result: dict) -> list[tuple[np.ndarray, np.ndarray]]:
    """For each task: new tokens [Q] and target passes [Q]."""
    return [(np.array(task["new"]), np.array(task["passes"])) for task in result["tasks"].values()]


def tau_per_task(result: dict) -> np.ndarray:
    """tau [T]."""
    return np.array([new.sum() / passes.sum() for new, passes in counts(result)])


def resample(cells: list[list[dict]], resamples: int = RESAMPLES) -> np.ndarray:
    """tau [C,R,T] of C cells, each a list of the same seeds' results, over resamples of seeds and questions.

    Every cell sees the same draws, so that their differences are paired.
    """
    random, num_seeds = np.random.default_rng(0), len(cells[0])
    seeds = random.multinomial(num_seeds, np.full(num_seeds, 1 / num_seeds), size=resamples) / num_seeds  # [R,S]
    data = [[counts(result) for result in cell] for cell in cells]
    taus = np.zeros((len(cells), resamples, len(data[0][0])))
    for task in range(taus.shape[2]):
        size = len(data[0][0][task][0])
        weights = random.multinomial(size, np.full(size, 1 / size), size=resamples)  # [R,Q]
        for cell, by_seed in enumerate(data):
            for share, tasks in zip(seeds.T, by_seed, strict=True):
                new, passes = tasks[task]
                taus[cell, :, task] += share * (weights @ new) / (weights @ passes)
    return taus


def interval(values: np.ndarray) -> list[float]:
    """95 % of the resamples [R] -> [low, high]."""
    return np.quantile(values, [0.025, 0.975]).tolist()


def t_interval(differences: np.ndarray) -> list[float] | None:
    """95 % of Student's t over seeds -> [low, high]; None of one seed.

    A bootstrap of two or three seeds is far too narrow: of pure noise it calls every second to fourth a difference.
    """
    seeds = len(differences)
    if seeds == 1:
        return None
    half = STUDENT_T[min(seeds - 1, len(STUDENT_T)) - 1] * differences.std(ddof=1) / seeds**0.5
    return [differences.mean() - half, differences.mean() + half]


def step_milliseconds(latency: dict, shape: str, tau: float) -> float:
    """One step of the decoding loop: a pass over K+1 tokens, a chain after round(tau) new ones."""
    chain = latency[shape]["chain"]
    return latency["target"][str(len(chain))] + chain[min(len(chain), max(1, round(tau))) - 1]


def compare(a: list[dict], b: list[dict], latency: dict | None) -> dict:
    """Differences in tau between two shapes over the seeds that both have, and the ratio of projected speeds."""
    shared = sorted({result["seed"] for result in a} & {result["seed"] for result in b})
    if not shared:
        return {}
    a, b = ([result for result in cell if result["seed"] in shared] for cell in (a, b))
    drawn_a, drawn_b = resample([a, b])
    taus_a, taus_b = (np.array([tau_per_task(result) for result in cell]) for cell in (a, b))  # [seeds,T]
    means_a, means_b = taus_a.mean(axis=0), taus_b.mean(axis=0)
    figures = {
        "a": a[0]["shape"],
        "b": b[0]["shape"],
        "seeds": shared,
        "difference": (means_a - means_b).mean(),
        "interval": interval((drawn_a - drawn_b).mean(-1)),
        "by_seed": (taus_a - taus_b).mean(axis=1).tolist(),
        "seed_interval": t_interval((taus_a - taus_b).mean(axis=1)),
        "per_task": {
            task: {"difference": means_a[i] - means_b[i], "interval": interval(drawn_a[:, i] - drawn_b[:, i])}
            for i, task in enumerate(a[0]["tasks"])
        },
    }
    if latency:
        # The lengths of a step are those of the measured tau: only tau is drawn.
        times = [step_milliseconds(latency, cell[0]["shape"], m.mean()) for cell, m in ((a, means_a), (b, means_b))]
        figures["speed_ratio"] = means_a.mean() / means_b.mean() * times[1] / times[0]
        figures["speed_interval"] = interval(drawn_a.mean(-1) / drawn_b.mean(-1) * times[1] / times[0])
    return figures


def compared_pairs(shapes: list[str]) -> list[tuple[str, str]]:
    """Each against the control, first against all, the deepest against its wide match; as far as they are there."""
    deepest = [shape for shape in shapes if shape.endswith("first")][-1:]
    pairs = [(shape, "1") for shape in shapes if shape != "1"]
    pairs += [(shape, shape.replace("first", "all")) for shape in shapes if shape.endswith("first")]
    pairs += [(shape, "1 wide") for shape in deepest]
    return [pair for pair in pairs if set(pair) <= set(shapes)]


def in_words(shape: str) -> str:
    layers, _, kind = shape.partition(" ")
    return f"{layers} {'layer' if layers == '1' else 'layers'} {kind}".strip()


def conclude(figures: dict) -> str:
    """A comparison in words."""
    a, b, (low, high) = in_words(figures["a"]), in_words(figures["b"]), figures["interval"]
    least, most = figures["seed_interval"] or (-1, 1)
    verdict = f"{a} accepts more" if min(low, least) > 0 else f"{b} accepts more" if max(high, most) < 0 else NOT_SHOWN
    by_seed = " ".join(f"{difference:+.3f}" for difference in figures["by_seed"])
    line = f"{a} - {b}: tau {figures['difference']:+.3f} [{low:+.3f}, {high:+.3f}], by seed {by_seed}: {verdict}"
    if "speed_ratio" in figures:
        low, high = figures["speed_interval"]
        faster = f"{a} is faster" if low > 1 else f"{b} is faster" if high < 1 else NOT_SHOWN
        line += f"; projected speed x {figures['speed_ratio']:.3f} [{low:.3f}, {high:.3f}]: {faster}"
    return line


# ---- report ----


def report(folder: Path) -> str:
    """Write ablation.json, .md and .png from the finished cells; returns the Markdown, empty when there is none."""
    plan = json.loads((folder / "plan.json").read_text())
    cells = [Cell(**values) for values in plan["cells"]]
    results, unfinished = [], []
    for cell in cells:
        result = read_result(folder / cell.folder, plan["key"])
        if result:
            results.append(result)
        else:
            state = trainer_state(folder / cell.folder)
            of = f" of {state['max_steps']}" if state["max_steps"] else ""
            unfinished.append(f"{cell.shape}, seed {cell.seed}: {state['global_step']} steps{of}, not compared")
    if not results:
        return ""
    check_same_tokens(results)
    path = folder / "latency.json"
    latency = json.loads(path.read_text()) if path.exists() else None
    shapes = {shape: [r for r in results if r["shape"] == shape] for shape in dict.fromkeys(c.shape for c in cells)}
    shapes = {shape: found for shape, found in shapes.items() if found}
    latency = latency if latency and set(shapes) <= set(latency) else None
    rows = {shape: summarise(found, latency) for shape, found in shapes.items()}
    compared = [compare(shapes[a], shapes[b], latency) for a, b in compared_pairs(list(shapes))]
    compared = [figures for figures in compared if figures]
    content = {
        "cells": rows,
        "comparisons": compared,
        "conclusions": [conclude(figures) for figures in compared],
        "unfinished": unfinished,
        "latency_ms": latency,
        "options": plan["options"],
        "training": plan["training"],
        "results": results,
        **results[-1]["provenance"],
    }
    write(folder / "ablation.json", json.dumps(content, indent=1))
    text = markdown(content)
    write(folder / "ablation.md", text)
    draw(rows, folder / "ablation.png")
    return text


def read_result(folder: Path, key: str) -> dict | None:
    """result.json of a cell if it was measured under this key."""
    path = folder / "result.json"
    result = json.loads(path.read_text()) if path.exists() else None
    return result if result and result["key"] == key else None


def summarise(found: list[dict], latency: dict | None) -> dict:
    """One row of the table: a shape over its finished seeds."""
    taus, drawn = np.array([tau_per_task(result) for result in found]), resample([found])[0]  # [seeds,T], [R,T]
    passes = sum(np.sum(task["passes"]) for result in found for task in result["tasks"].values())
    accepted = sum(np.sum(task["accepted"], axis=0) for result in found for task in result["tasks"].values())
    row = {
        "seeds": [result["seed"] for result in found],
        "parameters": found[0]["parameters"],
        "tokens": [result["tokens"] for result in found],
        "training_seconds": statistics.mean(result["training_seconds"] for result in found),
        "tau": {
            task: {"mean": taus[:, i].mean(), "seeds": taus[:, i].tolist(), "interval": interval(drawn[:, i])}
            for i, task in enumerate(found[0]["tasks"])
        },
        "mean_tau": {
            "mean": taus.mean(),
            "seeds": taus.mean(axis=1).tolist(),
            "interval": interval(drawn.mean(axis=-1)),
        },
        "acceptance_per_position": (accepted / passes).tolist(),
        "decoded": sum(result["decoded"] for result in found),
        "decoded_the_same": sum(result["decoded_the_same"] for result in found),
    }
    if latency:
        row["draft_step_ms"] = latency[found[0]["shape"]]["step"]
        row["tokens_per_second"] = 1000 * taus.mean() / step_milliseconds(latency, found[0]["shape"], taus.mean())
        row["speedup"] = row["tokens_per_second"] * latency["target"]["1"] / 1000
    return row


def markdown(content: dict) -> str:
    rows, options, latency = content["cells"], content["options"], content["latency_ms"]
    tasks = list(next(iter(rows.values()))["tau"])
    names = ["cell", "seeds", "parameters", "tokens", "training s", *(f"tau {task}" for task in tasks)]
    names += ["mean tau", "accepted per position", "draft step ms", "projected tokens/s (x plain)"]
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for shape, row in rows.items():
        low, high = row["mean_tau"]["interval"]
        millions = f"{row['parameters'] / 1e6:.2f} M" if row["parameters"] >= 1e6 else f"{row['parameters']}"
        cells = [shape, str(len(row["seeds"])), millions]
        cells += [f"{statistics.mean(row['tokens']):.0f}", f"{row['training_seconds']:.0f}"]
        cells += [f"{row['tau'][task]['mean']:.3f}" for task in tasks]
        cells += [f"{row['mean_tau']['mean']:.3f} [{low:.3f}, {high:.3f}]"]
        cells += [" ".join(f"{share:.3f}" for share in row["acceptance_per_position"])]
        fast = f"{row['tokens_per_second']:.1f} ({row['speedup']:.2f})" if latency else "-"
        cells += [f"{row['draft_step_ms']:.2f}" if latency else "-", fast]
        lines.append(f"| {' | '.join(cells)} |")
    same, decoded = (sum(row[key] for row in rows.values()) for key in ("decoded_the_same", "decoded"))
    notes = [
        "tau: new tokens / target passes, the target's own token included (plain decoding: 1). Greedy chain of "
        f"{options['num_draft_tokens']}, {options['limit']} questions a task, at most {options['max_new_tokens']} new "
        f"tokens, {options['dtype']}, by replay ({same} of {decoded} answers that were also decoded had the same "
        f"passes). Intervals: 95 %, bootstrap over seeds and questions.{weakness(rows)}",
        "\n".join(f"- {line}" for line in content["conclusions"]),
        *([f"Unfinished: {'; '.join(content['unfinished'])}"] if content["unfinished"] else []),
    ]
    if latency:
        widths = ", ".join(f"{value:.2f} ms over {width}" for width, value in latency["target"].items())
        notes.insert(1, f"Target pass, batch 1, {CONTEXT} tokens cached: {widths} tokens.")
    where = f"`{content['command']}`; {content['machine']}; {content['versions']}; commit {content['commit']}"
    return "\n".join(lines) + "\n\n" + "\n\n".join([*notes, where]) + "\n"


def weakness(rows: dict) -> str:
    fewest = min(len(row["seeds"]) for row in rows.values())
    if fewest == 1:
        return " With one seed they say nothing about other seeds."
    if fewest >= 5:
        return ""
    return (
        f" {fewest} seeds say little about other seeds: those intervals are too narrow, and a difference counts "
        "as shown only when Student's interval over the seeds excludes zero as well."
    )


def draw(rows: dict, path: Path) -> None:
    """tau of every cell with its interval, dots for the seeds: the mean over tasks, and each task."""
    tasks = list(next(iter(rows.values()))["tau"])
    panels = {"mean of the tasks": [row["mean_tau"] for row in rows.values()]}
    panels |= {task: [row["tau"][task] for row in rows.values()] for task in tasks}
    columns = min(3, len(panels))
    figure = Figure(figsize=(4 * columns, 3 * -(-len(panels) // columns)), layout="constrained")
    axes = figure.subplots(-(-len(panels) // columns), columns, squeeze=False).flat
    colours = ["tab:blue" if "first" in shape else "tab:orange" if "all" in shape else "0.3" for shape in rows]
    for axis, (title, values) in zip(axes, panels.items(), strict=False):
        for x, (value, colour) in enumerate(zip(values, colours, strict=True)):
            low, high = value["interval"]
            axis.vlines(x, low, high, color=colour, linewidth=2)
            axis.plot(x, value["mean"], "o", color=colour, markersize=7)
            axis.plot([x + 0.18] * len(value["seeds"]), value["seeds"], ".", color=colour, alpha=0.5, markersize=5)
        axis.set_title(title, fontsize=10)
        axis.set_xticks(range(len(rows)), list(rows), fontsize=9)
        axis.set_xlim(-0.5, len(rows) - 0.5)
        axis.grid(axis="y", alpha=0.3)
        axis.set_ylabel("tau", fontsize=9)
    for axis in list(axes):
        axis.remove()
    caption = (
        "layers and fusion; bar: 95 % over seeds and questions, small dots: seeds; compare by the paired differences"
    )
    figure.supxlabel(caption, fontsize=9)
    figure.savefig(path, dpi=150)


# ---- the command ----


def digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def write(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    os.replace(part, path)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[int]:
    """A lock on the folder until this process and its trainer have ended. ValueError when another holds it."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield lock
    except BlockingIOError:
        raise ValueError(f"an ablation or a trainer it left behind still runs in {folder}: wait for its end") from None
    finally:
        os.close(lock)


def save_plan(folder: Path, plan: dict) -> None:
    """Write plan.json; a ValueError if the folder holds cells that were trained by another recipe."""
    path = folder / "plan.json"
    if path.exists() and any(folder.glob("cells/*/trained.json")):
        before = json.loads(path.read_text())["training"]
        if changed := [key for key in plan["training"] if before.get(key) != plan["training"][key]]:
            changes = ", ".join(f"{key}: {before.get(key)} -> {plan['training'][key]}" for key in changed)
            raise ValueError(f"{folder} holds cells of another recipe ({changes}); take another --output_dir")
    write(path, json.dumps(plan, indent=1))


def training_options(script: run.ScriptArguments, args: Eagle3Config) -> dict:
    """All that shapes the training of every cell."""
    options = asdict(script) | {key: plain(getattr(args, key)) for key in (*DRAFT_OPTIONS, *RECIPE)}
    keep = {key: value for key, value in options.items() if key not in OWN and not key.startswith("measure_")}
    return json.loads(json.dumps(keep, default=str))


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description="Train and compare drafts of several depths and fusions. Other options go to trainer/run.py.",
        allow_abbrev=False,
    )
    parser.add_argument("--recipe", required=True, help="recipe of trainer/run.py")
    parser.add_argument("--depths", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--fusions", nargs="+", choices=["first", "all"], default=["first", "all"])
    parser.add_argument("--seeds", type=int, default=3, help="seeds 1 to this (default 3)")
    parser.add_argument("--wide", action="store_true", help="a cell of one wide layer, as large as the deepest first")
    parser.add_argument("--max_minutes", type=float, help="training of a cell, at most; then it is not compared")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--tasks_dir", help="folder of NAME.jsonl files; default: from the Hub")
    parser.add_argument("--limit", type=int, default=20, help="questions a task (default 20)")
    parser.add_argument("--max_new_tokens", type=int, default=96, help="of an answer (default 96)")
    parser.add_argument("--num_draft_tokens", type=int, default=3, help="length of the chain (default 3)")
    parser.add_argument("--dtype", default="float32", help="while measuring (default float32)")
    parser.add_argument("--output_dir", default="outputs/ablation")
    parser.add_argument("--report", action="store_true", help="only write the report again, from the finished cells")
    args, extra = parser.parse_known_args()
    if args.seeds < 1 or min(args.depths) < 1:
        raise ValueError(f"--seeds {args.seeds}, --depths {args.depths}: each must be 1 or more")
    if taken := [word for word in extra if word.split("=")[0].removeprefix("--") in OWN]:
        raise ValueError(f"{' '.join(taken)}: the ablation sets this for every cell; see --depths, --fusions, --seeds")
    return args, extra


@contextlib.contextmanager
def on_device(target: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """The target on the accelerator, where there is one, and back: trainers need its memory."""
    yield target.to("cuda" if torch.cuda.is_available() else "cpu")
    target.cpu()
    torch.cuda.empty_cache()


def prepare(args: argparse.Namespace, extra: list[str], folder: Path) -> tuple[list[Cell], PreTrainedModel, dict, str]:
    """The cells, the target, its answers, and the key of what is measured; writes the plan and the latencies."""
    script, options = parse_training(training_command(args.recipe, extra, Cell(1, "first", 1), args.output_dir))
    source = {"revision": script.target_revision, "trust_remote_code": script.trust_remote_code}
    source |= {"gguf_file": script.target_gguf_file} if script.target_gguf_file else {}
    print("loading the target", flush=True)
    tokenizer = AutoTokenizer.from_pretrained(script.target_name_or_path, **source)
    target = load_target(script.target_name_or_path, **source, adapter=script.target_adapter, dtype=args.dtype)
    width = matched_width(target, options, max(args.depths)) if args.wide else None
    cells = plan_cells(args.depths, args.fusions, args.seeds, width)
    questions = {task: [asdict(q) for q in load_task(task, args.tasks_dir, args.limit)] for task in args.tasks}
    name = (script.target_name_or_path, source, script.target_adapter, tokenizer.chat_template)
    shown = {name: getattr(args, name) for name in ("tasks", "limit", "max_new_tokens", "num_draft_tokens", "dtype")}
    answers_key = digest([name, args.dtype, args.max_new_tokens, questions])
    key = digest([answers_key, args.num_draft_tokens])
    plan = {"cells": [asdict(cell) for cell in cells], "key": key, "options": shown}
    save_plan(folder, plan | {"training": training_options(script, options)})
    configs = {cell.shape: cell_config(target, options, cell) for cell in cells}
    with on_device(target):
        answers = cached_answers(folder / "answers.json", answers_key, target, tokenizer, args)
        cached_latencies(folder / "latency.json", digest([key, list(configs)]), target, configs, args.num_draft_tokens)
    return cells, target, answers, key


def measure_cell(
    cell: Cell, folder: Path, target: PreTrainedModel, answers: dict, key: str, num_draft_tokens: int, features: dict
) -> None:
    """Measure a trained cell and write its result."""
    with on_device(target):
        draft = LlamaForCausalLMEagle3.from_pretrained(folder, dtype=target.dtype).to(target.device)
        figures = measure(target, draft.bind_target(target).eval(), answers, num_draft_tokens, features)
    kept = draft.kept_ids()
    result = {"shape": cell.shape, **asdict(cell), "key": key}
    result |= {"parameters": sum(parameter.numel() for parameter in draft.parameters())}
    result |= {"vocabulary": digest(None if kept is None else kept.tolist())}
    result |= json.loads((folder / "trained.json").read_text()) | figures | {"provenance": provenance()}
    write(folder / "result.json", json.dumps(result))


def ablate(args: argparse.Namespace, extra: list[str], lock: int) -> None:
    """Train and measure what is not done yet, with a report after each cell."""
    root = Path(args.output_dir)
    cells, target, answers, key = prepare(args, extra, root)
    minutes, features = [], {}
    for number, cell in enumerate(cells, 1):
        folder, title = root / cell.folder, f"[{number}/{len(cells)}] {cell.shape}, seed {cell.seed}"
        if read_result(folder, key) is None:
            rest = statistics.mean(minutes or [0]) * (len(cells) + 1 - number)
            left = f"about {rest:.0f} minutes left, " if minutes else ""
            print(f"{title}: training, {left}see {folder / 'train.log'}", flush=True)
            start = time.perf_counter()
            command = training_command(args.recipe, extra, cell, args.output_dir)
            if train(command, folder, args.max_minutes, lock):
                measure_cell(cell, folder, target, answers, key, args.num_draft_tokens, features)
            minutes.append((time.perf_counter() - start) / 60)
        result = read_result(folder, key)
        outcome = f"mean tau {tau_per_task(result).mean():.3f}" if result else "out of minutes"
        print(f"{title}: {outcome}", flush=True)
        report(root)


def main() -> None:
    args, extra = parse_arguments()
    if not args.report:
        with locked(Path(args.output_dir)) as lock:
            ablate(args, extra, lock)
    print(report(Path(args.output_dir)) or "no cell is finished yet", f"in {args.output_dir}", sep="\n")


if __name__ == "__main__":
    # Both end the trainer as well, in the background of a shell too, where the first would be ignored.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    try:
        main()
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on where it was", file=sys.stderr)
        sys.exit(130)
