"""The five tasks: read from files and from the Hub in the same form, and answers judged by rules that hold."""

import json
from pathlib import Path

import pytest

from eagle3_llama.evaluation.tasks import (
    TASKS,
    Question,
    chosen_option,
    is_correct,
    last_number,
    load_task,
    passes_tests,
)

SHARED = Path(__file__).parents[2] / "shared" / "bench"


def write(folder, name, rows):
    (folder / f"{name}.jsonl").write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows))


# ---- reading ----


@pytest.mark.skipif(not SHARED.is_dir(), reason="the folder of prompts is not here")
@pytest.mark.parametrize(("name", "count"), zip(TASKS, (80, 200, 80, 200, 104), strict=True))
def test_the_five_files_are_read(name, count):
    questions = load_task(name, str(SHARED))
    assert len(questions) == count == len({q.question_id for q in questions})
    assert {len(q.turns) for q in questions} == {2 if name == "mtbench" else 1}
    assert all((q.answer is None) == (name in ("mtbench", "humaneval")) for q in questions)
    for q in questions:  # a right answer is judged right, and a wrong one wrong
        text = f"\\boxed{{{q.answer}}}" if name == "math500" else f"The answer is {q.answer}"
        expected = None if q.answer is None else True
        assert is_correct(q, text) is expected, q
        assert is_correct(q, "I do not know.") is (None if q.answer is None else False)


def test_a_limit_takes_questions_evenly_and_always_the_same(tmp_path):
    write(tmp_path, "mtbench", [{"question_id": i, "category": i // 10, "turns": ["a", "b"]} for i in range(80)])
    ids = [q.question_id for q in load_task("mtbench", str(tmp_path), limit=10)]
    assert ids == [0, 8, 16, 24, 32, 40, 48, 56, 64, 72]
    assert len(load_task("mtbench", str(tmp_path), limit=81)) == 80
    with pytest.raises(ValueError, match="limit is 0"):
        load_task("mtbench", str(tmp_path), limit=0)


def test_broken_files_are_errors_that_say_where(tmp_path):
    with pytest.raises(ValueError, match=r"'mmlu' is not known: choose from mtbench, "):
        load_task("mmlu", str(tmp_path))
    with pytest.raises(ValueError, match=r"gsm8k\.jsonl is missing"):
        load_task("gsm8k", str(tmp_path))
    good = json.dumps({"question_id": 0, "turns": ["line \u2028 separator"]}, ensure_ascii=False)
    for bad in ('{"question_id": 1', '{"question_id": 1}', '{"question_id": 1, "turns": "text"}', "3", "[]"):
        (tmp_path / "gsm8k.jsonl").write_text(f"{good}\n\n{bad}\n")
        with pytest.raises(ValueError, match=r"gsm8k\.jsonl, line 3"):
            load_task("gsm8k", str(tmp_path))
    (tmp_path / "gsm8k.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="has no question"):
        load_task("gsm8k", str(tmp_path))


def add_data_set(hub, name, files):
    """A data set of the Hub; files: configuration -> split -> rows."""
    lines, content = ["---", "configs:"], {}
    for config, splits in files.items():
        lines += [f"- config_name: {config}", "  data_files:"]
        for split, rows in splits.items():
            lines += [f"  - split: {split}", f"    path: {config}/{split}.jsonl"]
            content[f"{config}/{split}.jsonl"] = "\n".join(map(json.dumps, rows)).encode()
    hub.add(f"datasets/{name}", {"README.md": "\n".join([*lines, "---", ""]).encode(), **content})


def test_the_hub_gives_the_same_wording_as_the_files(hub):
    ceval = {"id": 7, "question": "1+1=____", "A": "1", "B": "2", "C": "3", "D": "4", "answer": "B"}
    add_data_set(
        hub,
        "HuggingFaceH4/mt_bench_prompts",
        {"default": {"train": [{"category": "math", "prompt": ["one", "two"], "prompt_id": 5}]}},
    )
    gsm8k = {"question": "How many?", "answer": "1000 + 20\n#### 1,020"}
    add_data_set(hub, "openai/gsm8k", {"main": {"test": [gsm8k]}})
    humaneval = {"task_id": "HumanEval/0", "prompt": "def f():\n", "test": "check", "entry_point": "f"}
    add_data_set(hub, "openai/openai_humaneval", {"openai_humaneval": {"test": [humaneval]}})
    add_data_set(hub, "HuggingFaceH4/MATH-500", {"default": {"test": [{"problem": "$1+1$?", "answer": "2"}]}})
    subjects = {subject: {"val": [ceval], "test": [ceval | {"answer": ""}]} for subject in ("law", "physics")}
    add_data_set(hub, "ceval/ceval-exam", subjects)
    expected = {
        "mtbench": [Question("mtbench", 5, "math", ["one", "two"])],
        "gsm8k": [Question("gsm8k", 0, "math", ["How many?"], "1,020")],
        "humaneval": [
            Question("humaneval", 0, "code", ["Complete the code I provided.def f():\n"], None, "check", "f")
        ],
        "math500": [
            Question(
                "math500",
                0,
                "math",
                ["$1+1$?\nPlease reason step by step, and put your final answer within \\boxed{}."],
                "2",
            )
        ],
        "ceval": [
            Question(
                "ceval",
                f"{subject}-7",
                subject,
                [
                    f"以下是中国关于{subject}考试的单项选择题，请选出其中的正确答案。\n"
                    "1+1=____\nA. 1\nB. 2\nC. 3\nD. 4\n答案："
                ],
                "B",
            )
            for subject in ("law", "physics")
        ],
    }
    for name in TASKS:
        assert load_task(name) == expected[name]


# ---- judging ----


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("She makes 9 * 2 = $18 every day.", "18"),
        ("so $1,234,567.50 in all", "1234567.5"),
        ("x = -3", "-3"),
        ("10-7", "7"),
        ("first 1, then 2,3", "3"),
        ("about .5", "0.5"),
        ("18.0", "18"),
        ("none", None),
    ],
)
def test_the_last_number(text, number):
    found = last_number(text)
    assert found is None if number is None else found == last_number(number) and str(found.normalize()) == number


@pytest.mark.parametrize(
    ("text", "answer", "correct"),
    [
        (r"$\boxed{\dfrac{1}{2}}$", r"\frac{1}{2}", True),
        (r"\boxed{\frac12}", r"\frac{1}{2}", True),
        (r"\boxed{\frac{270}{7}}", r"\frac{270}7\text{ degrees}", True),
        (r"\boxed{\left(3, \frac{\pi}{2}\right)}.", r"\left( 3, \frac{\pi}{2} \right)", True),
        (r"\boxed{\text{east}}", r"\text{east}", True),
        (r"\boxed{x = 5}", "5", True),
        (r"\boxed{10,080}", r"10,\!080", True),
        (r"\boxed{145}", r"145^\circ", True),
        (r"\boxed{\$5.}", "5", True),
        (r"\boxed{11\sqrt{2}}", r"11\sqrt2", True),
        (r"\boxed{12\text{ cm}^2}", "12", True),
        (r"first \boxed{3}, then \boxed{4}", "4", True),
        (r"first \boxed{3}, then \boxed{4}", "3", False),
        (r"\boxed{\{1, 2\}}", r"\{1,2\}", True),
        (r"\boxed{1, 2}", "12", False),
        (r"\boxed{-2}", "2", False),
        (r"\boxed{\frac{1}{2", r"\frac{1}{2}", False),
        ("the answer is 4", "4", False),
    ],
)
def test_boxed_answers(text, answer, correct):
    assert is_correct(Question("math500", 0, "math", ["?"], answer), text) is correct


@pytest.mark.parametrize(
    ("text", "option"),
    [
        ("B", "B"),
        (" C. 紧缩与集中战略", "C"),
        ("**D**\n解析：选项A错误。", "D"),
        ("Ｂ．因为", "B"),
        ("正确答案是：**C**。", "C"),
        ("A和B都不对，答案是C", "C"),
        ("A. 一\nB. 二\nC. 三\nD. 四\n答案：D", "D"),
        ("本题考查税法，故选A。", "A"),
        ("The correct answer is (B) because A is wrong.", "B"),
        ("Answer: C", "C"),
        ("A company pays taxes. The answer is D.", "D"),
        ("A is correct", "A"),
        (r"$\boxed{B}$", "B"),
        ("应该选择 D 项", "D"),
        ("我认为 C 最合适", "C"),
        ("A company pays taxes.", None),
        ("答案不是A，而是B", None),
        ("A、B", None),
        ("Because", None),
        ("", None),
    ],
)
def test_the_option_that_is_given_as_the_answer(text, option):
    assert chosen_option(text) == option


FUNCTION = Question(
    "humaneval",
    0,
    "code",
    ['Complete the code I provided.from typing import List\n\n\ndef total(l: List[int]) -> int:\n    """ Sum. """\n'],
    test="def check(candidate):\n    assert candidate([1, 2]) == 3\n",
    entry_point="total",
)


@pytest.mark.parametrize(
    ("text", "correct"),
    [
        ("    return sum(l)\n", True),
        ("return sum(l)", True),
        ("Here:\n```python\ndef total(l: List[int]) -> int:\n    return sum(l)\n```\nIt sums.", True),
        ("```python\nprint(total([1]))\n```\nand\n```python\ndef total(l):\n    return sum(l)\n```", True),
        ("def total(l):\n    return sum(l)", True),
        ("    return 0\n", False),
        ("    import sys\n    sys.exit(0)\n", False),
        ("    return (\n", False),
    ],
)
def test_code_is_judged_by_its_tests(text, correct):
    assert is_correct(FUNCTION, text, allow_code_execution=True) is correct


def test_code_that_does_not_end_is_wrong():
    assert not passes_tests(FUNCTION, "    while True:\n        pass\n", timeout=1.0)


def test_code_runs_only_when_allowed_and_without_this_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    trace = tmp_path / "ran"
    code = f"    import os\n    open({str(trace)!r}, 'w').write(str(os.environ.get('HF_TOKEN')))\n    return sum(l)\n"
    assert is_correct(FUNCTION, code) is None
    assert not trace.exists()
    assert is_correct(FUNCTION, code, allow_code_execution=True) is True
    assert trace.read_text() == "None"


def test_code_without_tests_is_not_judged():
    question = Question("humaneval", 0, "code", FUNCTION.turns)
    assert is_correct(question, "    return sum(l)\n", allow_code_execution=True) is None
