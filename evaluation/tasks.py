"""The questions of the five tasks (MT-bench, GSM8K, HumanEval, MATH-500, C-Eval), and judging their answers.

    questions = load_task("mtbench", limit=10)                        # from the Hub, by the names in HUB
    questions = load_task("mtbench", tasks_dir="prompts", limit=10)   # from prompts/mtbench.jsonl
    is_correct(question, "... so the answer is 18.")                  # True, False, or None: nothing to judge it by

A line of such a file is a JSON object with `question_id`, `category`, `turns` (the user's turns), and where there is
one `answer`; for HumanEval also `test` and `entry_point`, without which its code cannot be judged. Data sets of the
Hub are brought into the same form, with the wording in which EAGLE's own evaluation asks these questions.

Judging: GSM8K by the last number of the text; MATH-500 by the last \\boxed{} after removing what is only notation;
C-Eval by the option letter that is given as the answer; HumanEval by running the code against its tests. Correct
answers in another form (0.5 for 1/2) count as wrong: accuracy compares rows of one table, not with a leaderboard.
"""

import json
import re
import subprocess
import sys
import tempfile
import textwrap
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

from datasets import get_dataset_config_names, load_dataset

TASKS = ("mtbench", "gsm8k", "humaneval", "math500", "ceval")
HUB = {
    "mtbench": "HuggingFaceH4/mt_bench_prompts",
    "gsm8k": "openai/gsm8k",
    "humaneval": "openai/openai_humaneval",
    "math500": "HuggingFaceH4/MATH-500",
    "ceval": "ceval/ceval-exam",
}
CODE_REQUEST = "Complete the code I provided."
MATH_REQUEST = "Please reason step by step, and put your final answer within \\boxed{}."


@dataclass(frozen=True)
class Question:
    """One question: the user's turns, and what its answer is judged by, as far as the source has it."""

    task: str
    question_id: int | str
    category: str
    turns: list[str]
    answer: str | None = None
    test: str | None = None  # of HumanEval: the code of check(candidate)
    entry_point: str | None = None  # and the name of the function that is asked for


def load_task(name: str, tasks_dir: str | None = None, limit: int | None = None) -> list[Question]:
    """Questions of a task, from tasks_dir/NAME.jsonl, or from the Hub.

    `limit` questions are taken at even distances over the whole file (index i * count // limit), always the same ones:
    these files are sorted by category, so the first ten questions of MT-bench are all of one kind.

    Raises:
        ValueError: an unknown task, no such file, a broken line of it, or a limit below 1.
    """
    if name not in TASKS:
        raise ValueError(f"task {name!r} is not known: choose from {', '.join(TASKS)}")
    if limit is not None and limit < 1:
        raise ValueError(f"limit is {limit}; it must be 1 or more")
    questions = read_file(name, Path(tasks_dir)) if tasks_dir else list(read_hub(name))
    if limit is None or limit >= len(questions):
        return questions
    return [questions[i * len(questions) // limit] for i in range(limit)]


def read_file(name: str, folder: Path) -> list[Question]:
    """The questions in folder/NAME.jsonl; ValueError with file and line when one is broken."""
    path, questions = folder / f"{name}.jsonl", []
    if not path.is_file():
        there = ", ".join(sorted(file.name for file in folder.glob("*.jsonl"))) or "no .jsonl file"
        raise ValueError(f"{path} is missing, {folder} has {there}; without --tasks_dir {name} comes from the Hub")
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if line.strip():
            questions.append(read_line(name, line, f"{path}, line {number}"))
    if not questions:
        raise ValueError(f"{path} has no question")
    return questions


def read_line(name: str, line: str, where: str) -> Question:
    try:
        row = json.loads(line)
        turns = row["turns"]
        optional = {key: row.get(key) for key in ("answer", "test", "entry_point")}
        question = Question(name, row["question_id"], row.get("category", name), turns, **optional)
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{where}: expected an object with question_id and turns ({error!r})") from error
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
        raise ValueError(f"{where}: turns must be a list of texts: {turns!r}")
    return question


def read_hub(name: str) -> Iterator[Question]:
    """The same from the Hub: the test split, the validation split of all subjects for C-Eval."""
    if name == "mtbench":
        for row in load_dataset(HUB[name], split="train"):
            yield Question(name, row["prompt_id"], row["category"], list(row["prompt"]))
    elif name == "gsm8k":
        for i, row in enumerate(load_dataset(HUB[name], "main", split="test")):
            yield Question(name, i, "math", [row["question"]], row["answer"].split("####")[-1].strip())
    elif name == "humaneval":
        for i, row in enumerate(load_dataset(HUB[name], split="test")):
            turns = [CODE_REQUEST + row["prompt"]]
            yield Question(name, i, "code", turns, test=row["test"], entry_point=row["entry_point"])
    elif name == "math500":
        for i, row in enumerate(load_dataset(HUB[name], split="test")):
            yield Question(name, i, "math", [f"{row['problem']}\n{MATH_REQUEST}"], row["answer"])
    else:
        for subject in get_dataset_config_names(HUB[name]):
            for row in load_dataset(HUB[name], subject, split="val"):
                turn = ceval_turn(subject, row)
                yield Question(name, f"{subject}-{row['id']}", subject, [turn], row["answer"])


def ceval_turn(subject: str, row: dict[str, str]) -> str:
    options = "\n".join(f"{letter}. {row[letter]}" for letter in "ABCD")
    return f"以下是中国关于{subject}考试的单项选择题，请选出其中的正确答案。\n{row['question']}\n{options}\n答案："


def is_correct(question: Question, text: str, allow_code_execution: bool = False) -> bool | None:
    """Whether an answer is right; None when there is nothing to judge it by, or when its code may not be run."""
    if question.task == "humaneval":
        runnable = allow_code_execution and question.test and question.entry_point
        return passes_tests(question, text) if runnable else None
    if question.answer is None or question.task == "mtbench":
        return None
    if question.task == "gsm8k":
        found, right = last_number(text), last_number(question.answer)
    elif question.task == "math500":
        found, right = last_boxed(text), normal_form(question.answer)
    else:
        found, right = chosen_option(text), question.answer.strip()
    return found is not None and found == right


def last_number(text: str) -> Decimal | None:
    """The last number of a text; dollar signs and the commas of thousands are no part of it."""
    text = re.sub(r"(?<=[0-9]),(?=[0-9]{3})", "", text.replace("$", ""))
    numbers = re.findall(r"(?:(?<![\w.)])-)?(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)", text)
    return Decimal(numbers[-1]) if numbers else None


def last_boxed(text: str) -> str | None:
    """The content of the last \\boxed{...} in its normal form; None without one, or when its braces do not close."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    start, depth = start + len("\\boxed{"), 1
    for end in range(start, len(text)):
        if text[end - 1] != "\\":
            depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return normal_form(text[start:end])
    return None


NOTATION = [(re.compile(pattern), new) for pattern, new in (
    (r"[.,\s]+$", ""),
    (r"\\(left|right|displaystyle)(?![a-zA-Z])|(?<!\\)\\[!,;: ]|\\?[$%]|\^\\circ|\^\{\\circ\}|~", ""),
    (r"\\[dt]frac", r"\\frac"),
    (r"(?<=.)\\(text|mbox)\{[^{}]*\}(\^\{?[23]\}?)?$", ""),  # a unit
    (r"\\(?:text|mbox|textbf|mathrm)\{([^{}]*)\}", r"\1"),
    (r"\s+", ""),
    (r"\\frac([0-9])", r"\\frac{\1}"),
    (r"(\\frac\{[^{}]*\})([0-9])", r"\1{\2}"),
    (r"\\sqrt([0-9a-z])", r"\\sqrt{\1}"),
    (r"^[a-zA-Z]=", ""),
    (r"(?<![0-9])\.(?=[0-9])", "0."),
)]  # fmt: skip


def normal_form(formula: str) -> str:
    """A formula without what is only notation: spaces, sizes of brackets, dollar signs, degrees, units, `x =`."""
    formula = formula.replace(",\\!", "")  # LaTeX's own comma of thousands
    for pattern, new in NOTATION:
        formula = pattern.sub(new, formula)
    return formula.replace(",", "") if re.fullmatch(r"-?[0-9]{1,3}(,[0-9]{3})+(\.[0-9]+)?", formula) else formula


OPTION = r"[\s(\[*:\"'{]*([A-D])(?![A-Za-z]|\s*[和与及或、,/]\s*[A-D])"
NO_ARTICLE = r"(?!\s+(?!is\b)[a-z])"  # "A company ..." names no option
ANNOUNCED = [
    re.compile(words + OPTION)
    for words in (
        r"(?:答案|[应故]选|所以选|因此选)(?:应该|应当|应|选择|选项|选|是|为|:|\s)*",
        r"(?i:answer|(?:correct|right)\s+(?:option|choice))(?:\s+(?:is|would be|should be))?",
        r"\\boxed",
        r"选择?",
    )
]


def chosen_option(text: str) -> str | None:
    """The option that a text gives as its answer; None when it names none, or several.

    A letter that opens the text counts, unless the text repeats the options first; then the first letter that is
    announced as the answer; then the only letter that stands alone in the text.
    """
    text = unicodedata.normalize("NFKC", text)  # full-width letters and marks
    listed = set(re.findall(r"^\W*([A-D])\s*[.、:)]", text, re.M))
    opening = re.match(OPTION + NO_ARTICLE, text)
    if opening and len(listed) < 2:
        return opening[1]
    for pattern in ANNOUNCED:
        if found := pattern.search(text):
            return found[1]
    alone = set(re.findall(r"(?<![A-Za-z])([A-D])(?![A-Za-z])" + NO_ARTICLE, text))
    return alone.pop() if len(alone) == 1 else None


def program(question: Question, text: str) -> str:
    """The code of an answer to HumanEval: a fenced block with the function, or a continuation of the prompt."""
    prompt, name = question.turns[0].removeprefix(CODE_REQUEST), question.entry_point
    fenced = re.findall(r"```[ \t]*(?:[Pp]ython3?|py)?[ \t]*\n(.*?)(?:```|\Z)", text, re.S)
    whole = [code for code in (*fenced, text) if re.search(rf"^def {name}\b", code, re.M)]
    if whole:
        return f"{prompt}\n    pass\n\n{whole[0]}"  # the prompt's imports and helpers stay
    body = fenced[0] if fenced else text
    indented = re.match(r"\s*\n[ \t]|[ \t]", body)
    return prompt + (body if indented else textwrap.indent(body, "    "))


def passes_tests(question: Question, text: str, timeout: float = 10.0) -> bool:
    """Whether the code of an answer passes its tests within `timeout` seconds.

    It runs in a process of its own, in a temporary folder and without this one's environment. That is no sandbox: the
    code may do what this user may do.
    """
    code = f"{program(question, text)}\n\n{question.test}\n\ncheck({question.entry_point})\nopen('passed', 'w')\n"
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "answer.py").write_text(code, encoding="utf-8")
        nothing = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        try:
            command = [sys.executable, "-I", "answer.py"]
            subprocess.run(command, cwd=folder, env={}, timeout=timeout, check=False, **nothing)
        except subprocess.TimeoutExpired:
            return False
        return Path(folder, "passed").exists()  # an exit status of 0 is also what sys.exit() before the tests gives
