"""The five-task comparison: a target alone and with its draft, on the same prompts.

    python evaluation/bench.py --target HuggingFaceTB/SmolLM2-135M-Instruct --draft outputs/smollm2-eagle3 \
        --limit 10 --num_draft_tokens 3 5 --tree --temperature 0 1

Rows of every task: `baseline` (plain generate), `chain K` for each --num_draft_tokens, and with --tree the tree of
certificate.py. A prompt goes through all rows before the next one, so that noise of the machine meets them alike. The
second turn of MT-bench follows the baseline's first answer in every row: the prompts stay the same.

    latency      mean seconds of an answer, the prompt's pass included
    tokens/s     new tokens / seconds, over all answers
    tau          new tokens / target passes, both without the prompt's pass and the token it gives (plain: 1)
    acceptance   share of these passes in which draft token i and all before it were accepted
    accuracy     share of right answers (tasks.py says how they are judged); HumanEval needs --allow_code_execution
    identical    questions answered token for token as by the baseline; greedy only (temperature 0)

Temperature above 0 samples from the target's whole distribution, seeded by question. Writes OUTPUT.jsonl as results
come, one line a question and row, and at the end OUTPUT.json, OUTPUT.md and OUTPUT.png. The same command goes on where
it was stopped; with more rows, temperatures or tasks it adds those. OUTPUT.json keeps the records: compare.py reads
them.
"""

import argparse
import json
import os
import sys
import time
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import snapshot_download
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from eagle3_llama.evaluation.acceptance import DEFINITION
from eagle3_llama.evaluation.certificate import TREE, load_all
from eagle3_llama.evaluation.tasks import TASKS, Question, is_correct, load_task
from eagle3_llama.trainer.hub import provenance, weights_digest

Key = tuple[float, str, str, str]  # temperature, task, question_id, row
BASELINE = "baseline"


class Models(NamedTuple):
    """The tokenizer, the target, its draft, and the folder with the draft's custom_generate."""

    tokenizer: PreTrainedTokenizerBase
    target: PreTrainedModel
    draft: PreTrainedModel
    folder: str


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare a target with and without its draft on five tasks.")
    parser.add_argument("--target", required=True, help="Hub name or folder")
    parser.add_argument("--target_gguf_file", help="GGUF file in that folder")
    parser.add_argument("--draft", required=True, help="Hub name or folder")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), help="default all five")
    parser.add_argument("--tasks_dir", help="folder with TASK.jsonl files (default: the tasks' data sets of the Hub)")
    parser.add_argument("--limit", type=int, help="questions of a task, evenly spread over it (default all)")
    parser.add_argument("--num_draft_tokens", type=int, nargs="+", default=[3], help="lengths of chains (default 3)")
    parser.add_argument("--tree", action="store_true", help="a tree too")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0], help="0 is greedy (default 0)")
    parser.add_argument("--max_new_tokens", type=int, default=128, help="of an answer (default 128)")
    parser.add_argument("--dtype", default="float32", help="of target and draft (default float32)")
    parser.add_argument("--allow_code_execution", action="store_true", help="run what the target writes for HumanEval")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", default="outputs/bench", help="writes this .jsonl, .json, .md and .png")
    args = parser.parse_args()
    if min(args.num_draft_tokens) < 1 or min(args.temperature) < 0 or args.max_new_tokens < 1:
        parser.error("--num_draft_tokens and --max_new_tokens must be 1 or more, --temperature 0 or more")
    return args


def proposals(chains: list[int], tree: bool) -> dict[str, dict | None]:
    """What every row passes to generate; None for the baseline, which comes first."""
    rows = {BASELINE: None} | {f"chain {k}": {"num_draft_tokens": k} for k in chains}
    return rows | {"tree": {"tree": TREE}} if tree else rows


def depth(proposal: dict | None) -> int:
    return 0 if proposal is None else proposal.get("num_draft_tokens") or proposal["tree"]["depth"]


# ---- decoding ----


def now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


@torch.no_grad()
def decode(
    models: Models, messages: list[dict], proposal: dict | None, temperature: float, max_new_tokens: int
) -> tuple[list[int], list[int], float]:
    """New tokens of one answer, the draft tokens accepted by each target pass after the prompt's, and seconds."""
    tokenizer, target, draft, folder = models
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    ).to(target.device)
    options: dict[str, Any] = {"do_sample": False}
    if temperature:
        options = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    if proposal is not None:
        options |= proposal | dict(custom_generate=folder, trust_remote_code=True, assistant_model=draft)
    options |= dict(max_new_tokens=max_new_tokens, pad_token_id=tokenizer.pad_token_id, return_dict_in_generate=True)
    start = now()
    output = target.generate(**inputs, **options)
    seconds = now() - start
    tokens = output.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    accepted = [0] * (len(tokens) - 1) if proposal is None else output.acceptance["accepted"][0]
    return tokens, accepted, seconds


def ask(
    models: Models,
    question: Question,
    row: str,
    proposal: dict | None,
    baseline: dict | None,
    temperature: float,
    args: argparse.Namespace,
) -> dict[str, Any]:
    """The record of one question in one row; `baseline` is that row's record, None when this is it."""
    messages, turns, accepted, seconds, text = [], [], [], 0.0, ""
    for i, turn in enumerate(question.turns):
        messages.append({"role": "user", "content": turn})
        torch.manual_seed(zlib.crc32(f"{args.seed} {question.task} {question.question_id} {i}".encode()))
        tokens, kept, took = decode(models, messages, proposal, temperature, args.max_new_tokens)
        turns, accepted, seconds = [*turns, tokens], accepted + kept, seconds + took
        text = models.tokenizer.decode(tokens, skip_special_tokens=True)
        history = tokens if baseline is None else baseline["tokens"][i]
        answer = models.tokenizer.decode(history, skip_special_tokens=True)
        messages.append({"role": "assistant", "content": answer})
    return {
        "task": question.task,
        "question_id": question.question_id,
        "prompt": prompt_of(question),
        "row": row,
        "temperature": temperature,
        "answers": len(turns),
        "seconds": seconds,
        "new_tokens": sum(map(len, turns)),
        "passes": len(accepted),
        "accepted_at": [sum(count > i for count in accepted) for i in range(depth(proposal))],
        "correct": is_correct(question, text, args.allow_code_execution),
        "identical": turns == baseline["tokens"] if baseline is not None and not temperature else None,
        "tokens": turns,
    }


def run(
    models: Models,
    questions: list[Question],
    rows: dict[str, dict | None],
    args: argparse.Namespace,
    done: dict[Key, dict],
    path: Path,
) -> None:
    """Ask what is not yet in `done`, add it there, and append it to the file. ValueError: a question has changed."""
    units = [(t, question, row) for t in dict.fromkeys(args.temperature) for question in questions for row in rows]
    for temperature, question, row in units:
        record = done.get(key(question.task, question.question_id, row, temperature))
        if record is not None and record["prompt"] != prompt_of(question):
            where = f"question {question.question_id} of {question.task}"
            raise ValueError(f"{path} has results of another {where}: give another --output, or remove that file")
    left = [unit for unit in units if key(unit[1].task, unit[1].question_id, unit[2], unit[0]) not in done]
    for row in {unit[2]: None for unit in left}:  # the first call of each row would pay for loading code
        decode(models, [{"role": "user", "content": questions[0].turns[0]}], rows[row], 0.0, 4)
    with path.open("a", encoding="utf-8") as file, tqdm(total=len(units), initial=len(units) - len(left)) as bar:
        for temperature, question, row in left:
            bar.set_description(f"{question.task}, {row}")
            names = question.task, question.question_id
            baseline = done[key(*names, BASELINE, temperature)] if row != BASELINE else None
            record = ask(models, question, row, rows[row], baseline, temperature, args)
            done[key(*names, row, temperature)] = record
            file.write(json.dumps(record) + "\n")
            file.flush()
            bar.update()


# ---- going on where a run was stopped ----


def key(task: str, question_id: int | str, row: str, temperature: float) -> Key:
    return temperature, task, str(question_id), row


def prompt_of(question: Question) -> str:
    """A mark of the question's text: the same id is another question in another source."""
    return f"{zlib.crc32(json.dumps(question.turns).encode()):08x}"


def settings_of(args: argparse.Namespace, draft: PreTrainedModel) -> dict[str, Any]:
    """What must be the same in all records of a file. Folders by their last name: paths mean nothing elsewhere."""
    names = {
        name: Path(value).resolve().name if value and os.path.exists(value) else value
        for name, value in (("target", args.target), ("draft", args.draft), ("tasks_dir", args.tasks_dir))
    }
    where = provenance()
    return names | {
        "target_gguf_file": args.target_gguf_file,
        "draft_weights": weights_digest(draft),
        "dtype": args.dtype,
        "max_new_tokens": args.max_new_tokens,
        "limit": args.limit,
        "seed": args.seed,
        "allow_code_execution": args.allow_code_execution,
        "machine": where["machine"],
        "versions": where["versions"],
    }


def resume(path: Path, settings: dict[str, Any]) -> dict[Key, dict]:
    """The records of an earlier run in the file, which is made when there is none.

    A last line without its end, from a run that was killed while writing, is cut off.

    Raises:
        ValueError: a broken line, or records made with other settings; names what differs.
    """
    content = path.read_bytes() if path.exists() else b""
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        os.truncate(path, len(whole))
    try:
        lines = [json.loads(line) for line in whole.splitlines()]
        found = lines[0]["settings"] if lines else settings
        records = {key(r["task"], r["question_id"], r["row"], r["temperature"]): r for r in lines[1:]}
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a file of this command ({error!r}): give another --output") from error
    names = (name for name in found | settings if found.get(name) != settings.get(name))
    different = [f"{name} {found.get(name)!r}, now {settings.get(name)!r}" for name in names]
    if different:
        raise ValueError(f"{path} has results with {'; '.join(different)}: give another --output, or remove that file")
    if not lines:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"settings": settings}) + "\n", encoding="utf-8")
    return records


# ---- what comes out ----


def summarise(records: list[dict]) -> dict[str, Any]:
    """Figures of the records of one task, row and temperature; None where there is nothing to measure."""
    total = {name: sum(r[name] for r in records) for name in ("answers", "seconds", "new_tokens", "passes")}
    judged = [r["correct"] for r in records if r["correct"] is not None]
    compared = [r["identical"] for r in records if r["identical"] is not None]
    passes = total["passes"]
    return {
        **{name: records[0][name] for name in ("task", "row", "temperature")},
        "questions": len(records),
        "answers": total["answers"],
        "latency": total["seconds"] / total["answers"],
        "tokens_per_second": total["new_tokens"] / total["seconds"],
        "tau": (total["new_tokens"] - total["answers"]) / passes if passes else None,
        "acceptance_per_position": [
            sum(column) / passes for column in zip(*(r["accepted_at"] for r in records), strict=True) if passes
        ],
        "accuracy": sum(judged) / len(judged) if judged else None,
        "identical": sum(compared) if compared else None,
        "new_tokens": total["new_tokens"],
        "target_passes": passes,
    }


def notes_on(questions: list[Question], args: argparse.Namespace) -> dict[str, str]:
    """Why a task has no accuracy."""
    notes = {}
    for task in dict.fromkeys(question.task for question in questions):
        of_task = [question for question in questions if question.task == task]
        if task == "mtbench":
            notes[task] = "no accuracy: its answers need a judge"
        elif task == "humaneval" and not all(question.test and question.entry_point for question in of_task):
            notes[task] = "no accuracy: not all questions have tests (fields test and entry_point; the Hub has them)"
        elif task == "humaneval" and not args.allow_code_execution:
            notes[task] = "no accuracy: --allow_code_execution was not given"
        elif task != "humaneval" and not all(question.answer for question in of_task):
            notes[task] = "accuracy only over the questions that have an answer"
    return notes


def markdown(report: dict[str, Any]) -> str:
    """One table a temperature."""
    settings, parts = report["settings"], []
    for temperature in dict.fromkeys(entry["temperature"] for entry in report["results"]):
        how = f"sampled at temperature {temperature:g}" if temperature else "greedy (temperature 0)"
        lines = [f"## {settings['target']} with {settings['draft']}, {how}", ""]
        lines += ["| task | row | latency s | tokens/s | tau | acceptance per position | accuracy | identical |"]
        lines += ["|---|---|---|---|---|---|---|---|"]
        lines += [cells(entry) for entry in report["results"] if entry["temperature"] == temperature]
        parts.append("\n".join(lines))
    parts += ["\n".join(f"- {task}: {note}" for task, note in report["notes"].items())]
    parts += [f"{report['definition']}. {report['mode']}, {settings['dtype']}, seed {settings['seed']}."]
    parts += ["{machine}; {versions}; commit {commit}\n\n    {command}".format(**report["provenance"])]
    return "\n\n".join(filter(None, parts)) + "\n"


def cells(entry: dict[str, Any]) -> str:
    def show(value: float | None, digits: int) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    shares = " ".join(f"{share:.2f}" for share in entry["acceptance_per_position"]) or "-"
    same = "-" if entry["identical"] is None else f"{entry['identical']}/{entry['questions']}"
    values = [entry["task"], entry["row"], show(entry["latency"], 2), show(entry["tokens_per_second"], 1)]
    values += [show(entry["tau"], 3), shares, show(entry["accuracy"], 3), same]
    return f"| {' | '.join(values)} |"


def draw(report: dict[str, Any], path: Path) -> None:
    """tau of every task and row; acceptance per position of every task in the first speculative row."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    first = report["results"][0]["temperature"]
    entries = [e for e in report["results"] if e["temperature"] == first and e["row"] != BASELINE]
    tasks, rows = (list(dict.fromkeys(e[name] for e in entries)) for name in ("task", "row"))
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    width = 0.8 / len(rows)
    for i, row in enumerate(rows):
        places = [tasks.index(e["task"]) + (i - (len(rows) - 1) / 2) * width for e in entries if e["row"] == row]
        bars = left.bar(places, [e["tau"] or 0 for e in entries if e["row"] == row], 0.92 * width, label=row)
        left.bar_label(bars, fmt="%.2f", fontsize=8 if len(rows) < 3 else 6)
    left.axhline(1, color="black", linewidth=0.8, linestyle="--")  # without a draft
    left.set_xticks(range(len(tasks)), tasks)
    left.set(ylabel="tau (tokens per target pass)", title="Acceptance length (dashed: without a draft)")
    left.margins(y=0.22)
    left.legend(ncols=len(rows), loc="upper center", frameon=False)
    for e in (e for e in entries if e["row"] == rows[0]):
        shares = e["acceptance_per_position"]
        right.plot(range(1, len(shares) + 1), shares, marker="o", label=e["task"])
    right.set(xlabel="position in the proposal", ylabel="share accepted, with all before", ylim=(0, None))
    right.set_title(f"Acceptance per position, {rows[0]}")
    right.xaxis.get_major_locator().set_params(integer=True)
    right.grid(alpha=0.3)
    right.legend(frameon=False)
    settings = report["settings"]
    figure.suptitle(f"{settings['target']} with {settings['draft']}, {settings['dtype']}, temperature {first:g}")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def make_report(
    questions: list[Question],
    rows: dict[str, dict | None],
    args: argparse.Namespace,
    done: dict[Key, dict],
    settings: dict[str, Any],
) -> dict[str, Any]:
    """What OUTPUT.json holds: how it was measured, the figures (`results`), and the records they are made of."""
    results, records = [], []
    for temperature in dict.fromkeys(args.temperature):
        for task in dict.fromkeys(question.task for question in questions):
            ids = [question.question_id for question in questions if question.task == task]
            for row in rows:
                of_row = [done[key(task, question_id, row, temperature)] for question_id in ids]
                results.append(summarise(of_row))
                records += [{name: r[name] for name in r if name != "tokens"} for r in of_row]
    mode = f"batch 1, at most {args.max_new_tokens} new tokens an answer (longer ones are cut and may count as wrong)"
    return {
        "settings": settings,
        "provenance": provenance(),
        "definition": DEFINITION,
        "mode": mode,
        "notes": notes_on(questions, args),
        "results": results,
        "records": records,
    }


def main() -> None:
    args = parse_arguments()
    stem = Path(args.output) / "bench" if Path(args.output).is_dir() else Path(args.output)
    jsonl, json_file, table, figure = (stem.parent / f"{stem.name}.{end}" for end in ("jsonl", "json", "md", "png"))
    questions = [q for task in dict.fromkeys(args.tasks) for q in load_task(task, args.tasks_dir, args.limit)]
    rows = proposals(args.num_draft_tokens, args.tree)
    for task, note in notes_on(questions, args).items():
        print(f"{task}: {note}")
    folder = args.draft
    if not os.path.isdir(folder):  # generate would ask the Hub for this code in every call
        folder = snapshot_download(args.draft, allow_patterns="custom_generate/*")
    models = Models(*load_all(args.target, args.target_gguf_file, args.draft, args.dtype), folder)
    settings = settings_of(args, models.draft)
    done = resume(jsonl, settings)
    try:
        run(models, questions, rows, args, done, jsonl)
    except KeyboardInterrupt:
        print(f"\nstopped; {len(done)} results are in {jsonl}, and the same command goes on from there")
        sys.exit(130)
    report = make_report(questions, rows, args, done, settings)
    json_file.write_text(json.dumps(report, indent=1), encoding="utf-8")
    table.write_text(markdown(report), encoding="utf-8")
    draw(report, figure)
    print(markdown(report), f"written: {json_file}, {table}, {figure}", sep="\n")


if __name__ == "__main__":
    main()
