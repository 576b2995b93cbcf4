"""The five-task comparison on a toy target: its figures by independent means, stopping and going on, and comparing."""

import json
import os

import pytest
import torch
from toy import toy_draft, toy_target, toy_tokenizer

from eagle3_llama.evaluation import bench, compare
from eagle3_llama.evaluation.acceptance import measure
from eagle3_llama.evaluation.tasks import TASKS, is_correct, load_task

TEST = "def check(candidate):\n    assert candidate() == 3\n"
ROWS = {
    "mtbench": [{"question_id": i, "category": "toy", "turns": [f"a{i} a9", f"a{2 * i}"]} for i in range(2)],
    "gsm8k": [{"question_id": i, "turns": [f"a{i} a1 a{i + 7}"], "answer": str(i)} for i in range(3)],
    "humaneval": [{"question_id": 0, "turns": ["a5"], "test": TEST, "entry_point": "f"}],
    "math500": [{"question_id": 0, "turns": ["a6 a7"], "answer": "1"}],
    "ceval": [{"question_id": "law-1", "category": "law", "turns": ["a8"], "answer": "B"}],
}


@pytest.fixture(scope="module")
def toys(tmp_path_factory):
    """A folder with a target, a draft of it, and the five tasks."""
    folder = tmp_path_factory.mktemp("toys")
    target = toy_target()
    target.generation_config.eos_token_id = 2
    target.save_pretrained(folder / "target")
    toy_tokenizer().save_pretrained(folder / "target")
    toy_draft(target, seed=6).save_pretrained(folder / "draft")  # one that guesses right now and then
    (folder / "tasks").mkdir()
    for name, rows in ROWS.items():
        (folder / "tasks" / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


@pytest.fixture
def run(toys, tmp_path, monkeypatch):
    """Run the command with these arguments besides target, draft and tasks; returns the report it wrote."""
    draw = bench.draw

    def command(*args, draft="draft", output="bench", figure=False):
        monkeypatch.setattr(bench, "draw", draw if figure else lambda *args: None)
        words = ["bench.py", "--target", toys / "target", "--draft", toys / draft, "--tasks_dir", toys / "tasks"]
        words += ["--max_new_tokens", 8, "--output", tmp_path / "out" / output, *args]
        monkeypatch.setattr("sys.argv", list(map(str, words)))
        bench.main()
        return json.loads((tmp_path / "out" / f"{output}.json").read_text())

    return command


def lines(tmp_path, output="bench"):
    return [json.loads(line) for line in (tmp_path / "out" / f"{output}.jsonl").read_text().splitlines()][1:]


def counting(monkeypatch, stop_after=None):
    """Count the questions asked; Ctrl-C comes after `stop_after` of them."""
    asked, ask = [], bench.ask

    def counted(models, question, row, *args):
        if len(asked) == stop_after:
            raise KeyboardInterrupt
        asked.append((question.task, question.question_id, row))
        return ask(models, question, row, *args)

    monkeypatch.setattr(bench, "ask", counted)
    return asked


# ---- figures ----


def test_all_tasks_and_rows(run, tmp_path):
    report = run("--num_draft_tokens", 3, 5, "--tree", "--allow_code_execution", figure=True)
    rows = ["baseline", "chain 3", "chain 5", "tree"]
    assert [(e["task"], e["row"]) for e in report["results"]] == [(task, row) for task in TASKS for row in rows]
    for entry in report["results"]:
        count = len(ROWS[entry["task"]])
        assert entry["questions"] == count
        assert entry["identical"] == (None if entry["row"] == "baseline" else count)
        assert len(entry["acceptance_per_position"]) == bench.depth(bench.proposals([3, 5], True)[entry["row"]])
        assert entry["tau"] == pytest.approx(1 + sum(entry["acceptance_per_position"]))
        assert entry["tokens_per_second"] == pytest.approx(
            entry["new_tokens"] / entry["latency"] / entry["answers"], rel=1e-6
        )
        assert (entry["accuracy"] is None) == (entry["task"] == "mtbench")
    assert {"command", "machine", "versions", "commit"} == set(report["provenance"])
    assert report["settings"]["seed"] == 0 and report["settings"]["dtype"] == "float32"
    assert "tau = new tokens / target passes" in report["definition"]
    table = (tmp_path / "out" / "bench.md").read_text()
    assert sum(line.startswith("| ") for line in table.splitlines()) == 1 + 5 * 4
    assert "| gsm8k | chain 3 |" in table and "| 3/3 |" in table and report["provenance"]["command"] in table
    assert (tmp_path / "out" / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_tau_is_the_one_of_acceptance(run, toys, tmp_path):
    """evaluation/acceptance.py has a decoding loop of its own."""
    report = run("--tasks", "gsm8k", "--num_draft_tokens", 3)
    target = toy_target()
    tokenizer = toy_tokenizer()
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": row["turns"][0]}], add_generation_prompt=True)
        for row in ROWS["gsm8k"]
    ]
    measured = measure(target, toy_draft(target, seed=6), [prompt["input_ids"] for prompt in prompts], 3, 8, [2])
    entry = report["results"][1]
    assert entry["row"] == "chain 3" and entry["acceptance_per_position"][1] > 0
    assert entry["tau"] == pytest.approx(measured["tau"])
    assert entry["acceptance_per_position"] == pytest.approx(measured["acceptance_per_position"])
    assert entry["target_passes"] == measured["target_passes"]
    assert entry["new_tokens"] == measured["new_tokens"] + len(prompts)  # tau leaves out the first of each answer
    questions = load_task("gsm8k", str(toys / "tasks"))
    texts = [tokenizer.decode(line["tokens"][0], skip_special_tokens=True) for line in lines(tmp_path)[::2]]
    right = sum(is_correct(q, text) for q, text in zip(questions, texts, strict=True))
    assert entry["accuracy"] == right / len(questions)


def test_the_second_turn_follows_the_targets_own_first_answer(run, tmp_path):
    run("--tasks", "mtbench")
    target, tokenizer, found = toy_target(), toy_tokenizer(), lines(tmp_path)
    assert [(line["question_id"], line["row"]) for line in found] == [
        (0, "baseline"),
        (0, "chain 3"),
        (1, "baseline"),
        (1, "chain 3"),
    ]
    for row, line in zip([r for r in ROWS["mtbench"] for _ in range(2)], found, strict=True):
        messages = []
        for turn, tokens in zip(row["turns"], line["tokens"], strict=True):
            messages.append({"role": "user", "content": turn})
            inputs = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
            )
            output = target.generate(**inputs, do_sample=False, max_new_tokens=8, eos_token_id=2, pad_token_id=0)
            assert output[0, inputs["input_ids"].shape[1] :].tolist() == tokens
            messages.append({"role": "assistant", "content": tokenizer.decode(tokens, skip_special_tokens=True)})
        assert line["answers"] == 2 and line["new_tokens"] == sum(map(len, line["tokens"]))


def test_an_output_that_differs_is_counted(run, monkeypatch):
    decode = bench.decode

    def wrong(models, messages, proposal, *args):
        tokens, accepted, seconds = decode(models, messages, proposal, *args)
        if proposal is not None and messages[0]["content"].startswith("a2 "):
            tokens[-1] = (tokens[-1] + 1) % 64
        return tokens, accepted, seconds

    monkeypatch.setattr(bench, "decode", wrong)
    assert run("--tasks", "gsm8k")["results"][1]["identical"] == 2


def test_sampling_is_seeded_by_question_and_counts_no_identical_outputs(run, tmp_path):
    report = run("--tasks", "gsm8k", "--temperature", 0, 1)
    assert [(e["temperature"], e["row"], e["identical"]) for e in report["results"]] == [
        (0.0, "baseline", None),
        (0.0, "chain 3", 3),
        (1.0, "baseline", None),
        (1.0, "chain 3", None),
    ]
    run("--tasks", "gsm8k", "--temperature", 1, "--limit", 2, output="alone")
    run("--tasks", "gsm8k", "--temperature", 1, "--limit", 2, "--seed", 1, output="other")
    sampled = {(r["question_id"], r["row"]): r["tokens"] for r in lines(tmp_path) if r["temperature"] == 1}
    alone = {(r["question_id"], r["row"]): r["tokens"] for r in lines(tmp_path, "alone")}
    assert alone == {name: sampled[name] for name in alone} and len(alone) == 4
    assert alone != {(r["question_id"], r["row"]): r["tokens"] for r in lines(tmp_path, "other")}
    assert (tmp_path / "out" / "bench.md").read_text().count("| task | row |") == 2


def test_it_says_why_there_is_no_accuracy(run, toys, tmp_path, capsys):
    assert "--allow_code_execution was not given" in run("--tasks", "humaneval")["notes"]["humaneval"]
    (tmp_path / "humaneval.jsonl").write_text('{"question_id": 0, "turns": ["a5"]}\n')
    report = run("--tasks", "humaneval", "--tasks_dir", tmp_path, "--allow_code_execution", output="no-tests")
    assert "not all questions have tests" in report["notes"]["humaneval"]
    assert "not all questions have tests" in capsys.readouterr().out
    assert [entry["accuracy"] for entry in report["results"]] == [None, None]


def test_a_draft_of_the_hub_decodes_by_the_code_it_came_with(run, hub, toys):
    hub.add("tester/draft", toys / "draft")
    report = run("--tasks", "math500", "--draft", "tester/draft")
    assert report["settings"]["draft"] == "tester/draft"
    assert report["results"][1]["identical"] == 1
    asked = [request for request in hub.requests if "custom_generate" in request and request.startswith("GET")]
    assert len(asked) == 1  # not once for every answer


# ---- stopped, and going on ----


def test_a_stopped_run_goes_on_where_it_was(run, tmp_path, monkeypatch, capsys):
    run("--tasks", "mtbench", "gsm8k", output="straight")
    with monkeypatch.context() as patch:
        asked = counting(patch, stop_after=3)
        with pytest.raises(SystemExit) as stopped:
            run("--tasks", "mtbench", "gsm8k")
        assert stopped.value.code == 130 and len(asked) == 3
    assert "the same command goes on" in capsys.readouterr().out
    assert not (tmp_path / "out" / "bench.json").exists()
    file = tmp_path / "out" / "bench.jsonl"
    assert len(lines(tmp_path)) == 3
    os.truncate(file, file.stat().st_size - 20)  # killed while it wrote the third
    asked = counting(monkeypatch)
    run("--tasks", "mtbench", "gsm8k")
    assert len(asked) == 2 * 5 - 2 and asked[0] == ("mtbench", 1, "baseline")
    straight, resumed = lines(tmp_path, "straight"), lines(tmp_path)
    assert [line | {"seconds": 0} for line in straight] == [line | {"seconds": 0} for line in resumed]


def test_a_new_row_is_added_without_repeating_the_others(run, monkeypatch):
    run("--tasks", "gsm8k", "--limit", 2)
    asked = counting(monkeypatch)
    report = run("--tasks", "gsm8k", "--limit", 2, "--num_draft_tokens", 3, 5)
    assert asked == [("gsm8k", 0, "chain 5"), ("gsm8k", 1, "chain 5")]
    assert [entry["row"] for entry in report["results"]] == ["baseline", "chain 3", "chain 5"]
    assert report["results"][2]["identical"] == 2


def test_results_of_other_settings_are_refused_by_name(run, toys):
    run("--tasks", "gsm8k", "--limit", 1)
    with pytest.raises(ValueError, match=r"with max_new_tokens 8, now 6; seed 0, now 1: give another --output"):
        run("--tasks", "gsm8k", "--limit", 1, "--max_new_tokens", 6, "--seed", 1)
    target = toy_target()
    toy_draft(target, seed=2).save_pretrained(toys / "elsewhere" / "draft")
    with pytest.raises(ValueError, match=r"with draft_weights '\w+', now '\w+': give another --output"):
        run("--tasks", "gsm8k", "--limit", 1, draft="elsewhere/draft")  # the same name, other weights


def test_results_of_another_question_of_the_same_id_are_refused(run, tmp_path):
    for turn in ("a6", "a7"):
        file = tmp_path / turn / "tasks" / "math500.jsonl"
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps({"question_id": 0, "turns": [turn]}))
    run("--tasks", "math500", "--tasks_dir", tmp_path / "a6" / "tasks")
    with pytest.raises(ValueError, match="has results of another question 0 of math500"):
        run("--tasks", "math500", "--tasks_dir", tmp_path / "a7" / "tasks")


def test_a_file_of_something_else_is_refused_and_kept(run, tmp_path):
    (tmp_path / "out").mkdir()
    for content in ('{"a": 1}\n', "text\n", '{"settings": {}}\n{"task": \n'):
        (tmp_path / "out" / "bench.jsonl").write_text(content)
        with pytest.raises(ValueError, match="is not a file of this command"):
            run("--tasks", "gsm8k")
        assert (tmp_path / "out" / "bench.jsonl").read_text() == content


@pytest.mark.parametrize("words", [("--num_draft_tokens", 0), ("--temperature", -1), ("--max_new_tokens", 0)])
def test_impossible_options_are_refused_before_anything_is_loaded(run, words, capsys):
    with pytest.raises(SystemExit):
        run(*words)
    assert "must be 1 or more, --temperature 0 or more" in capsys.readouterr().err


# ---- comparing ----


def record(question, task="gsm8k", row="chain 3", seconds=2.0, new_tokens=21, passes=10, correct=True, prompt="p"):
    values = locals()
    return {"question_id": values.pop("question"), "temperature": 0.0, "answers": 1, **values}


def write(path, records):
    path.write_text(json.dumps({"settings": {"target": "T", "draft": path.stem, "dtype": "x"}, "records": records}))
    return str(path)


def test_differences_are_ratios_of_sums_and_intervals_are_of_pairs():
    generator = torch.Generator().manual_seed(0)
    seconds = (1 + 9 * torch.rand(40, generator=generator)).tolist()
    a = [record(i, seconds=s, passes=5 + i, new_tokens=41, correct=i < 10) for i, s in enumerate(seconds)]
    b = [r | {"seconds": r["seconds"] / 2, "passes": r["passes"] * 2, "correct": i < 20} for i, r in enumerate(a)]
    found = compare.differences(list(zip(a, b, strict=True)))
    assert found["latency"]["a"] == pytest.approx(sum(seconds) / 40)
    assert found["accept length"]["a"] == pytest.approx(40 * 40 / sum(r["passes"] for r in a))
    # Every pair has the same ratio, so the interval is a point, however much the questions differ.
    for name, expected in {"latency": -50, "throughput": 100, "accept length": -50}.items():
        assert [found[name][side] for side in ("difference", "low", "high")] == pytest.approx([expected] * 3)
    accuracy = found["accuracy"]
    assert (accuracy["a"], accuracy["b"], accuracy["difference"]) == (25, 50, 25)
    # A share of 10 in 40 pairs: 25 points, standard error 6.8.
    assert 8 <= accuracy["low"] <= 16 and 34 <= accuracy["high"] <= 42
    assert compare.differences(list(zip(a, b, strict=True))) == found


def test_the_comparison_prints_a_table(tmp_path, monkeypatch, capsys):
    a = write(tmp_path / "one.json", [record(i, passes=20) for i in range(3)] + [record(0, row="baseline")])
    b = write(tmp_path / "two.json", [record(i, passes=10, seconds=1.0, correct=False) for i in range(1, 5)])
    monkeypatch.setattr("sys.argv", ["compare.py", a, b])
    compare.main()
    text = capsys.readouterr().out
    cells = [line.split() for line in text.splitlines()]
    assert "chain 3, temperature 0" in text and "A: T with one" in text
    # Questions 1 and 2 are in both.
    assert "gsm8k 2 latency, s 2.00 1.00 -50.0 % -50.0 to -50.0".split() in cells
    assert "accept length, tau 1.000 2.000 +100.0 % +100.0 to +100.0".split() in cells
    assert "accuracy, % 100.0 0.0 -100.0 points -100.0 to -100.0".split() in cells


def test_files_that_do_not_fit_are_refused_with_what_is_there(tmp_path):
    a = compare.read(write(tmp_path / "a.json", [record(0), record(0, row="tree")]))
    with pytest.raises(
        ValueError, match=r"no row 'chain 7' at temperature 0; it has 'chain 3' at temperature 0, 'tree'"
    ):
        compare.select(a, "a.json", "chain 7", 0.0)
    other = compare.read(write(tmp_path / "b.json", [record(0, task="ceval", row="chain 5")]))
    with pytest.raises(ValueError, match=r"A has \['chain 3', 'tree'\], B has \['chain 5'\]"):
        compare.default_row(a, other)
    of_a, of_other = compare.select(a, "a", "tree", 0.0), compare.select(other, "b", "chain 5", 0.0)
    with pytest.raises(ValueError, match="different tasks: A has gsm8k; B has ceval"):
        compare.pair(of_a, of_other)
    with pytest.raises(ValueError, match="no question of gsm8k in common"):
        compare.pair(of_a, {"gsm8k": {"9": record(9), "0": record(0, prompt="of the same id")}})
    for content in ("[", "{}", "[]"):
        (tmp_path / "broken.json").write_text(content)
        with pytest.raises(ValueError, match=r"give a \.json file of evaluation/bench\.py"):
            compare.read(str(tmp_path / "broken.json"))
    with pytest.raises(ValueError, match=r"absent\.json cannot be read"):
        compare.read(str(tmp_path / "absent.json"))
