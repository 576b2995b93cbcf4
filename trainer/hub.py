"""The draft's way to the Hub: its card, and pushing exactly the files that belong to it.

The trainer writes the card. When evaluation/bench.py has measured the five tasks, this puts them into it:

    python trainer/hub.py --draft outputs/smollm2-eagle3 --bench outputs/bench.json
    python trainer/hub.py --draft outputs/smollm2-eagle3 --push_to_hub you/smollm2-eagle3

A card shows bench.json when there is one in the draft's folder, else the held-out prompts of the training. What the
trainer knew for it stays in card.json, which is not pushed.
"""

import argparse
import hashlib
import json
import logging
import os
import platform
import re
import shlex
import subprocess
import sys
from concurrent.futures import Future
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from huggingface_hub import CommitInfo, EvalResult, create_repo, upload_folder
from transformers import PreTrainedModel
from transformers.utils.hub import PushInProgress

from eagle3_llama.evaluation.tasks import HUB
from eagle3_llama.modeling_eagle3_llama import LlamaForCausalLMEagle3

if TYPE_CHECKING:
    from eagle3_llama.trainer.eagle3_trainer import Eagle3Trainer

logger = logging.getLogger(__name__)

# Whole names: the client's patterns also match inside folders, and checkpoints hold optimiser states.
DRAFT_FILES = re.compile(
    r"config\.json|generation_config\.json|adapter_config\.json|README\.md|acceptance\.(json|png)|bench\.json"
    r"|\w+\.py|custom_generate/\w+\.py"
    r"|(model|adapter_model)[\w-]*\.safetensors(\.index\.json)?"
)
RECIPE = (
    "optim learning_rate lr_scheduler_type warmup_steps adam_beta1 adam_beta2 weight_decay max_grad_norm max_length "
    "max_document_length packing train_sampling_strategy ttt_steps per_device_train_batch_size "
    "gradient_accumulation_steps max_steps num_train_epochs seed bf16"
).split()
FIGURES = ("tau", "acceptance_per_position", "tokens_per_second")


def is_hub_name(name: str | None) -> bool:
    """Whether this is `owner/name` and not a folder here; the Hub refuses cards that point to folders."""
    return bool(name) and re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None and not os.path.exists(name)


def machine() -> str:
    """What the figures were measured on, in words."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    model = (
        re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
        if os.path.exists("/proc/cpuinfo")
        else None
    )
    return f"{model[1] if model else platform.machine()}, {torch.get_num_threads()} cores"


def provenance() -> dict[str, str]:
    """What every published figure carries: command, machine, versions and commit."""
    here = Path(__file__).parent
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=False).stdout
    # Names of folders here mean nothing elsewhere.
    words = [Path(word).name if os.path.exists(word) or os.path.isabs(word) else word for word in sys.argv]
    return {
        "command": shlex.join(["python", *words]),
        "machine": machine(),
        "versions": f"transformers {transformers.__version__}, torch {torch.__version__}",
        "commit": commit.strip() or "unknown",
    }


# ---- the card ----


def write_card(trainer: "Eagle3Trainer", folder: str) -> None:
    """Write `folder`/README.md, its figure and card.json from what the trainer knows and `trainer.card`."""
    facts, draft, state = trainer.card, trainer.draft.config._name_or_path, trainer.state
    names = facts.get("datasets", [])
    best = state.best_global_step if trainer.args.load_best_model_at_end else None
    card = {
        "repo": trainer.hub_model_id or str(trainer.args.output_dir),
        "datasets": [name for name in (name.split(":")[0] for name in names) if is_hub_name(name)],
        "adapted_draft": draft if trainer.model is not trainer.draft else None,
        "revision": facts.get("target_revision"),
        "target_gguf_file": facts.get("target_gguf_file"),
        "target_adapter": facts.get("target_adapter"),
        "coverage": facts.get("coverage"),
        "measured": facts.get("measured"),
        "steps": best or state.global_step,
        "data": ", ".join(Path(name).name if os.path.exists(name) else name for name in names),
        "recipe": {key: plain(getattr(trainer.args, key)) for key in RECIPE},
        **provenance(),
    }
    Path(folder).mkdir(parents=True, exist_ok=True)
    try:
        bench = read_bench(Path(folder) / "bench.json", folder)
    except (ValueError, OSError) as error:  # the training is done, and its card must not fail
        logger.warning("bench.json is set aside as bench.old.json: %s", error)
        (Path(folder) / "bench.json").rename(Path(folder) / "bench.old.json")
        bench = None
    render_card(trainer.draft, folder, card, bench)


def render_card(draft: LlamaForCausalLMEagle3, folder: str, card: dict[str, Any], bench: dict | None) -> None:
    """README.md from hub_card.md, acceptance.png when something is measured, and `card` itself as card.json."""
    (Path(folder) / "card.json").write_text(json.dumps(card, indent=1), encoding="utf-8")
    rows, how = bench_figures(bench) if bench else held_out_figures(card)
    first = [row for row in rows if row["proposal"] == rows[0]["proposal"]]
    image = Path(folder) / "acceptance.png"
    if first:
        draw_acceptance(first, f"{Path(card['repo']).name}, {first[0]['proposal']}, {how['dtype']}", image)
    else:
        image.unlink(missing_ok=True)  # of an earlier card
    results = [result for row in first for result in eval_results(row)]
    draft.write_card(folder, eval_results=results, figures=rows, how=how, **card)


def held_out_figures(card: dict[str, Any]) -> tuple[list[dict], dict]:
    """Rows of the card's table, and how they were measured: on held-out prompts, if acceptance.py ran."""
    measured = card["measured"]
    if not measured:
        return [], {}
    row = {
        "dataset": "held-out conversations",
        "type": (card["datasets"] or ["conversations"])[0],
        "questions": measured["prompts"],
        "proposal": f"chain of {len(measured['acceptance_per_position'])}, greedy",
        "plain": measured["tokens_per_second_without_draft"],
        "identical": f"{measured['identical_outputs']} of {measured['prompts']}",
    }
    rows = [row | {key: measured[key] for key in FIGURES} | {"speedup": measured["speedup"]}]
    return rows, measured | {"speed": "new tokens / seconds of the decoding loop, without the prompt's pass"}


def bench_figures(bench: dict[str, Any]) -> tuple[list[dict], dict]:
    """The same of a file of bench.py: a row for every task, proposal and temperature."""
    plain = {(e["task"], e["temperature"]): e["tokens_per_second"] for e in bench["results"] if e["row"] == "baseline"}
    rows, settings = [], bench["settings"]
    for entry in bench["results"]:
        if entry["row"] == "baseline" or entry["tau"] is None:
            continue
        task, without = entry["task"], plain[entry["task"], entry["temperature"]]
        how = f"temperature {entry['temperature']:g}" if entry["temperature"] else "greedy"
        row = {
            "dataset": "mt_bench" if task == "mtbench" else task,
            "type": task if settings["tasks_dir"] else HUB[task],
            "questions": entry["questions"],
            "proposal": f"{entry['row'].replace('chain', 'chain of')}, {how}",
            "plain": without,
            "speedup": entry["tokens_per_second"] / without,
            "identical": None if entry["identical"] is None else f"{entry['identical']} of {entry['questions']}",
        }
        rows.append(row | {key: entry[key] for key in FIGURES})
    how = {key: bench[key] for key in ("definition", "mode")} | {key: settings[key] for key in ("dtype", "seed")}
    return rows, how | bench["provenance"] | {"speed": "new tokens / seconds of generate, the prompt's pass included"}


def eval_results(row: dict[str, Any]) -> list[EvalResult]:
    """tau and speed-up of one row, as metadata of the Hub."""
    where = {"task_type": "text-generation", "dataset_type": row["type"], "dataset_name": row["dataset"]}
    where["dataset_args"] = {"prompts": row["questions"]}
    metrics = {
        "acceptance_length": (row["tau"], f"acceptance length (tau, {row['proposal']})"),
        "speedup": (row["speedup"], f"speedup (tokens per second with / without the draft, {row['proposal']})"),
    }
    return [
        EvalResult(**where, metric_type=name, metric_value=round(value, 4), metric_name=words)
        for name, (value, words) in metrics.items()
    ]


def draw_acceptance(rows: list[dict], title: str, path: Path) -> None:
    """Bars: the share accepted at every position, side by side for each data set."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes, width = figure.subplots(), 0.8 / len(rows)
    for i, row in enumerate(rows):
        shares = row["acceptance_per_position"]
        places = [position + (i - (len(rows) - 1) / 2) * width for position in range(1, len(shares) + 1)]
        bars = axes.bar(places, shares, 0.92 * width, label=f"{row['dataset']}, tau {row['tau']:.2f}")
        if len(rows) == 1:
            axes.bar_label(bars, fmt="%.3f", padding=2)
    axes.set(xlabel="position in the proposal", ylabel="share accepted, with all before", title=title)
    axes.set_ylim(0, min(1.0, 1.25 * max(max(row["acceptance_per_position"]) for row in rows) + 0.01))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, dpi=150)


def read_bench(path: Path, folder: str) -> dict[str, Any] | None:
    """A file of bench.py without its records; None when there is none.

    Raises:
        ValueError: not such a file, or one that measured other weights than those in `folder`.
    """
    if not path.exists():
        return None
    try:
        bench = json.loads(path.read_text(encoding="utf-8"))
        measured, dtype = (bench["settings"][key] for key in ("draft_weights", "dtype"))
        bench_figures(bench)
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a .json file of evaluation/bench.py ({error!r})") from error
    found = weights_digest(LlamaForCausalLMEagle3.from_pretrained(folder, dtype=dtype))
    if measured != found:
        raise ValueError(
            f"{path} measured a draft with weights {measured}, but those in {folder} are {found}: run bench.py again"
        )
    return {key: value for key, value in bench.items() if key != "records"}


def weights_digest(draft: PreTrainedModel) -> str:
    """16 hexadecimal digits that stand for the draft's weights in their dtype."""
    digest = hashlib.sha256()
    for tensor in draft.state_dict().values():
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()[:16]


def plain(value: object) -> object:
    """An option as it stands in a recipe."""
    return value.value if isinstance(value, Enum) else value


# ---- pushing ----


def draft_files(folder: str) -> list[str]:
    """The files in `folder` that belong to the draft."""
    names = (str(path.relative_to(folder)) for path in Path(folder).rglob("*"))
    return sorted(name for name in names if DRAFT_FILES.fullmatch(name))


def push_draft(trainer: "Eagle3Trainer", folder: str, message: str, blocking: bool) -> CommitInfo | Future | None:
    """Push the draft in `folder` to the trainer's repo; without `blocking` in the background, skipped while one runs.

    Raises:
        RuntimeError: the Hub refused or was lost; says what is on disk and how to push it again.
    """
    repo = trainer.hub_model_id or trainer.args.hub_model_id or Path(trainer.args.output_dir).absolute().name
    files = draft_files(folder)
    again = f"hf upload {repo} {folder} . " + " ".join(f"--include {name}" for name in files)
    advice = f"the draft is complete in {folder}; push it by the same command, which trains no step twice, or: {again}"
    try:
        if trainer.hub_model_id is None:  # the trainer was made without push_to_hub
            trainer.init_hf_repo()
            repo = trainer.hub_model_id
        if not blocking and trainer.push_in_progress is not None and not trainer.push_in_progress.is_done():
            return None
        trainer._finish_current_push()
        done = upload_folder(
            repo_id=repo,
            folder_path=folder,
            commit_message=message,
            token=trainer.args.hub_token,
            revision=trainer.args.hub_revision,
            allow_patterns=files,
            run_as_future=not blocking,
        )
    except Exception as error:  # whatever the Hub's client raises: the user's result and the way out come first
        raise RuntimeError(f"pushing to {repo} failed ({type(error).__name__}: {error}); {advice}") from error
    if not blocking:
        trainer.push_in_progress = PushInProgress([done])
        done.add_done_callback(lambda future: _warn_of_failure(future, repo, advice))
    return done


def _warn_of_failure(future: Future, repo: str, advice: str) -> None:
    """A failed background push is otherwise silent (transformers 5.24); training goes on."""
    if error := future.exception():
        logger.warning("pushing to %s failed (%s: %s); %s", repo, type(error).__name__, error, advice)


# ---- the command ----


def renew_card(folder: str, bench_file: str | None = None, repo: str | None = None) -> None:
    """Write the card of a trained draft again, with the figures of `bench_file`, and push it to `repo`.

    Raises:
        ValueError: no card.json in the folder, or `bench_file` is missing, broken, or measured another draft.
    """
    known = Path(folder) / "card.json"
    if not known.exists():
        raise ValueError(
            f"{known} is missing: the command that trained this draft writes it, and trains no step twice"
        )
    card = json.loads(known.read_text(encoding="utf-8"))
    bench = read_bench(Path(bench_file or known.with_name("bench.json")), folder)
    if bench is not None:
        known.with_name("bench.json").write_text(json.dumps(bench, indent=1), encoding="utf-8")
    elif bench_file:
        raise ValueError(f"{bench_file} is missing: evaluation/bench.py writes it")
    card["repo"] = repo or card["repo"]
    render_card(LlamaForCausalLMEagle3.from_pretrained(card["adapted_draft"] or folder), folder, card, bench)
    if repo:
        create_repo(repo, exist_ok=True)
        upload_folder(
            repo_id=repo, folder_path=folder, commit_message="Renew the card", allow_patterns=draft_files(folder)
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the card of a trained draft again, and push the draft.")
    parser.add_argument("--draft", required=True, help="folder of a trained draft")
    parser.add_argument("--bench", help=".json file of evaluation/bench.py, measured with this draft")
    parser.add_argument("--push_to_hub", metavar="YOU/NAME", help="push the draft with its card")
    args = parser.parse_args()
    renew_card(args.draft, args.bench, args.push_to_hub)
    pushed = f", pushed to {args.push_to_hub}" if args.push_to_hub else ""
    print(f"written: {Path(args.draft) / 'README.md'}{pushed}")


if __name__ == "__main__":
    main()
