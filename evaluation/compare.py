"""Two drafts (or one target in two runs) on the same questions: the table of two files of bench.py.

    python evaluation/compare.py outputs/bench-first.json outputs/bench-all.json --row "chain 3"

Per task latency (seconds an answer), throughput (new tokens a second), accept length (tau, the target's own token
included) and accuracy of both files, and the difference of B from A in per cent (accuracy: in percentage points), with
its 95 % interval: the percentiles of 2000 bootstrap resamples of the questions. A question that both files have is
resampled as a pair, and only such questions count. Figures are ratios of sums over the questions, as in bench.py.

Shapes: R resamples, Q questions.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

RESAMPLES = 2000
FIGURES = {"latency": ("s", 2), "throughput": ("tok/s", 1), "accept length": ("tau", 3), "accuracy": ("%", 1)}


def read(path: str) -> dict[str, Any]:
    """A report of bench.py; ValueError when the file is none."""
    try:
        report = json.loads(Path(path).read_text(encoding="utf-8"))
        if {"settings", "records"} <= set(report):
            return report
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} cannot be read ({error}): give a .json file of evaluation/bench.py") from error
    raise ValueError(f"{path} has no settings and records: give a .json file of evaluation/bench.py")


def select(report: dict[str, Any], path: str, row: str, temperature: float) -> dict[str, dict[str, dict]]:
    """Records of a row, task -> question -> record; ValueError with what is there instead when it has none."""
    tasks: dict[str, dict[str, dict]] = {}
    for record in report["records"]:
        if (record["row"], record["temperature"]) == (row, temperature):
            tasks.setdefault(record["task"], {})[str(record["question_id"])] = record
    if not tasks:
        there = sorted({f"{r['row']!r} at temperature {r['temperature']:g}" for r in report["records"]})
        raise ValueError(f"{path} has no row {row!r} at temperature {temperature:g}; it has {', '.join(there)}")
    return tasks


def default_row(a: dict[str, Any], b: dict[str, Any]) -> str:
    """The first row with a draft that both have; ValueError with the rows when there is none."""
    rows = [list(dict.fromkeys(r["row"] for r in report["records"] if r["row"] != "baseline")) for report in (a, b)]
    common = [row for row in rows[0] if row in rows[1]]
    if not common:
        raise ValueError(f"the files have no row with a draft in common: A has {rows[0]}, B has {rows[1]}")
    return common[0]


def pair(a: dict[str, dict], b: dict[str, dict]) -> dict[str, list[tuple[dict, dict]]]:
    """The questions that both have, by id and text, of every task.

    Raises:
        ValueError: a task is in one of them only, or they have no question of it in common.
    """
    if set(a) != set(b):
        raise ValueError(f"the files have different tasks: A has {', '.join(a)}; B has {', '.join(b)}")
    pairs = {}
    for task in a:
        candidates = ((record, b[task].get(name)) for name, record in a[task].items())
        found = pairs[task] = [(r, other) for r, other in candidates if other and other["prompt"] == r["prompt"]]
        if not found:
            raise ValueError(f"the files have no question of {task} in common: A has {len(a[task])}, B {len(b[task])}")
    return pairs


def sums(records: list[dict], chosen: np.ndarray) -> dict[str, np.ndarray]:
    """The figures [R] of the records at indices chosen [R,Q]; NaN where there is nothing to measure."""

    def total(values: list[float]) -> np.ndarray:
        return np.asarray(values, dtype=float)[chosen].sum(-1)

    seconds, answers, tokens = (total([r[name] for r in records]) for name in ("seconds", "answers", "new_tokens"))
    passes = total([r["passes"] for r in records])
    judged = total([r["correct"] is not None for r in records])
    right = total([r["correct"] is True for r in records])
    with np.errstate(divide="ignore", invalid="ignore"):
        values = seconds / answers, tokens / seconds, (tokens - answers) / passes, 100 * right / judged
    return dict(zip(FIGURES, values, strict=True))


def differences(pairs: list[tuple[dict, dict]], seed: int = 0) -> dict[str, dict[str, float]]:
    """Of one task: for every figure its values a and b, the difference of b from a, and the interval low to high.

    Differences are per cent of a; those of accuracy are percentage points. NaN stands for what cannot be measured, and
    for the interval of a single question.
    """
    a, b = ([p[i] for p in pairs] for i in (0, 1))
    everything = np.arange(len(pairs))[None]
    resampled = np.random.default_rng(seed).integers(len(pairs), size=(RESAMPLES, len(pairs)))
    result = {}
    for name in FIGURES:
        (value_a, value_b), again = ([sums(r, c)[name] for r in (a, b)] for c in (everything, resampled))
        low, high = np.nan, np.nan
        if len(pairs) > 1:
            low, high = np.percentile(difference(name, *again), [2.5, 97.5])
        values = value_a[0], value_b[0], difference(name, value_a, value_b)[0], low, high
        result[name] = dict(zip(("a", "b", "difference", "low", "high"), map(float, values), strict=True))
    return result


def difference(name: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return b - a if name == "accuracy" else 100 * (b / a - 1)


def show(value: float, digits: int, sign: str = "") -> str:
    return "-" if np.isnan(value) else f"{value:{sign}.{digits}f}"


def make_table(pairs: dict[str, list[tuple[dict, dict]]], title: str, seed: int) -> Table:
    """The table to print; n is the number of questions."""
    table = Table(title=title, box=SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in ("task", "n", "figure", "A", "B", "difference", "95 % interval"):
        table.add_column(heading, justify="left" if heading in ("task", "figure") else "right")
    for task, of_task in pairs.items():
        start = [task, str(len(of_task))]
        for name, values in differences(of_task, seed).items():
            unit, digits = FIGURES[name]
            change = "points" if name == "accuracy" else "%"
            figures = [show(values[side], digits) for side in ("a", "b")]
            delta, low, high = (show(values[side], 1, "+") for side in ("difference", "low", "high"))
            delta = delta if delta == "-" else f"{delta} {change}"
            interval = "-" if low == "-" else f"{low} to {high}"
            table.add_row(*start, f"{name}, {unit}", *figures, delta, interval)
            start = ["", ""]
        table.add_section()
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare two files of bench.py, with intervals over the questions.")
    parser.add_argument("a", metavar="A.json")
    parser.add_argument("b", metavar="B.json")
    parser.add_argument("--row", help="such as 'chain 3', tree, baseline (default: the first with a draft in both)")
    parser.add_argument("--temperature", type=float, default=0.0, help="default 0 (greedy)")
    parser.add_argument("--seed", type=int, default=0, help="of the resamples")
    args = parser.parse_args()
    a, b = read(args.a), read(args.b)
    row = args.row or default_row(a, b)
    pairs = pair(*(select(r, path, row, args.temperature) for r, path in ((a, args.a), (b, args.b))))
    console = Console()
    console.print(make_table(pairs, f"{row}, temperature {args.temperature:g}", args.seed))
    for label, report in (("A", a), ("B", b)):
        console.print(f"{label}: {report['settings']['target']} with {report['settings']['draft']}", highlight=False)
    for name, value in a["settings"].items():
        if name not in ("target", "draft", "draft_weights") and value != (other := b["settings"].get(name)):
            console.print(f"different {name}: A {value!r}, B {other!r}", highlight=False, markup=False)


if __name__ == "__main__":
    main()
