"""The ablation: the same tokens in every cell, cells that go on where they were, and intervals that can be trusted."""

import json
import random
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from toy import toy_draft, toy_target, toy_tokenizer

from eagle3_llama.configuration_eagle3_llama import Eagle3LlamaConfig
from eagle3_llama.evaluation import ablate
from eagle3_llama.evaluation.ablate import Cell
from eagle3_llama.evaluation.acceptance import greedy_chain
from eagle3_llama.modeling_eagle3_llama import LlamaForCausalLMEagle3
from eagle3_llama.trainer import run
from eagle3_llama.trainer.initialise import initialise_from_target


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A toy target, conversations, a recipe, and questions of two tasks, one of them with two turns."""
    path = tmp_path_factory.mktemp("ablation")
    target = toy_target()
    target.generation_config.eos_token_id = 2
    target.save_pretrained(path / "target")
    toy_tokenizer().save_pretrained(path / "target")
    generator = random.Random(0)
    rows = []
    for _ in range(30):
        first = generator.randrange(54)
        answer = " ".join(f"a{(first + i) % 54}" for i in range(generator.randrange(10, 20)))
        rows.append({"messages": [{"role": "user", "content": f"a{first}"}, {"role": "assistant", "content": answer}]})
    (path / "chat.jsonl").write_text("\n".join(map(json.dumps, rows)))
    values = dict(
        target_name_or_path=str(path / "target"),
        target_dtype="float32",
        dataset_name=[str(path / "chat.jsonl")],
        eval_samples=6,
        draft_vocab_size=50,
        ttt_steps=3,
        max_length=64,
        max_steps=4,
        save_steps=2,
        logging_steps=2,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        bf16=False,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    (path / "recipe.yaml").write_text(yaml.safe_dump(values))
    for task, turns in (("mtbench", ["a1 a2", "a3"]), ("gsm8k", ["a4 a5 a6"])):
        questions = [{"question_id": i, "turns": [f"{turn} a{i + 10}" for turn in turns]} for i in range(3)]
        (path / f"{task}.jsonl").write_text("\n".join(map(json.dumps, questions)))
    return path


@pytest.fixture
def command(folder, tmp_path, monkeypatch):
    """Run the ablation of that recipe into a new folder; it trains in this process unless `subprocesses`."""
    trained = []

    def train_here(command, log, limit, lock):
        trained.append(Path(command[command.index("--output_dir") + 1]).name)
        monkeypatch.setattr(sys, "argv", command[1:])
        run.main()
        return True

    def call(*options, subprocesses=False, train=train_here):
        words = ["--recipe", folder / "recipe.yaml", "--output_dir", tmp_path / "out", "--tasks_dir", folder]
        words += ["--tasks", "mtbench", "gsm8k", "--max_new_tokens", "12", "--seeds", "1", "--depths", "1", "2"]
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", ["ablate.py", *map(str, words), *options])
            patch.setattr(ablate, "RESAMPLES", 200)
            if not subprocesses:
                patch.setattr(ablate, "run_training", train)
            ablate.main()

    call.trained, call.out, call.train_here = trained, tmp_path / "out", train_here
    return call


def test_a_stopped_ablation_goes_on_and_its_report_compares_all_cells(command, capsys):
    def interrupted(cell_command, log, limit, lock):
        if "2-all" in str(log):
            raise KeyboardInterrupt
        return command.train_here(cell_command, log, limit, lock)

    with pytest.raises(KeyboardInterrupt):
        command(train=interrupted)
    assert command.trained == ["1-first-seed1", "2-first-seed1"]
    report = json.loads((command.out / "ablation.json").read_text())
    assert list(report["cells"]) == ["1", "2 first"]
    assert report["unfinished"] == ["2 all, seed 1: 0 steps, not compared"]
    command()
    assert command.trained == ["1-first-seed1", "2-first-seed1", "2-all-seed1"]  # each once
    report = json.loads((command.out / "ablation.json").read_text())
    assert [(figures["a"], figures["b"]) for figures in report["comparisons"]] == [
        ("2 first", "1"),
        ("2 all", "1"),
        ("2 first", "2 all"),
    ]
    row = report["cells"]["2 all"]
    assert row["decoded_the_same"] == row["decoded"] == 2 and row["mean_tau"]["mean"] >= 1
    assert row["tokens"] == report["cells"]["1"]["tokens"] and row["tokens_per_second"] > 0
    assert row["parameters"] > report["cells"]["2 first"]["parameters"] > report["cells"]["1"]["parameters"]
    assert "2 layers first - 2 layers all: tau" in (command.out / "ablation.md").read_text()
    assert not report["unfinished"]
    assert (command.out / "ablation.png").read_bytes().startswith(b"\x89PNG")
    # Other figures from the same drafts: nothing is trained again.
    command("--num_draft_tokens", "2")
    assert len(command.trained) == 3
    assert len(json.loads((command.out / "ablation.json").read_text())["cells"]["1"]["acceptance_per_position"]) == 2
    (command.out / "ablation.md").unlink()
    command("--report")
    assert (command.out / "ablation.md").exists() and "projected speed" in capsys.readouterr().out
    with pytest.raises(ValueError, match="another recipe.*max_steps: 4 -> 5"):
        command("--max_steps", "5")


@pytest.mark.slow
def test_ctrl_c_stops_the_trainer_and_the_next_run_goes_on_from_its_checkpoint(command, monkeypatch):
    cell = command.out / "cells" / "1-first-seed1"
    steps = ["--max_steps", "200", "--save_steps", "10"]

    def interrupt_after_a_checkpoint():
        while not list(cell.glob("checkpoint-*/trainer_state.json")) and time.monotonic() < deadline:
            time.sleep(0.05)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # where a terminal's Ctrl-C arrives

    deadline = time.monotonic() + 100
    threading.Thread(target=interrupt_after_a_checkpoint, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        command("--depths", "1", *steps, subprocesses=True)
    stopped_at = ablate.trainer_state(cell)["global_step"]
    assert 10 <= stopped_at < 200 and "the same command goes on" in (cell / "train.log").read_text()
    resumed = []
    last_checkpoint = run.last_checkpoint
    monkeypatch.setattr(run, "last_checkpoint", lambda path: resumed.append(last_checkpoint(path)) or resumed[-1])
    command("--depths", "1", *steps)
    assert any(path.endswith(f"checkpoint-{stopped_at}") for path in resumed)
    assert json.loads((cell / "trained.json").read_text())["steps"] == 200


def test_a_cell_out_of_minutes_is_reported_and_not_compared(command):
    def too_slow(cell_command, log, limit, lock):
        return "2-first" not in str(log) and command.train_here(cell_command, log, limit, lock)

    options = ["--fusions", "first", "--max_minutes"]
    command(*options, "9", train=too_slow)
    report = json.loads((command.out / "ablation.json").read_text())
    assert list(report["cells"]) == ["1"] and "2 first, seed 1: 0 steps" in report["unfinished"][0]
    (command.out / "cells" / "2-first-seed1" / "spent_seconds.json").write_text("600")
    command(*options, "9")  # its minutes are spent
    assert "2-first-seed1" not in command.trained
    command(*options, "11")
    assert "2-first-seed1" in command.trained


def test_a_trainer_is_stopped_at_its_limit_and_its_failure_is_told(tmp_path):
    with ablate.locked(tmp_path) as lock:
        slow = [sys.executable, "-c", "import time; time.sleep(60)"]
        start = time.monotonic()
        assert not ablate.run_training(slow, tmp_path / "log", 0.5, lock)
        assert time.monotonic() - start < 20
        with pytest.raises(RuntimeError, match="status 3(.|\n)*out of cheese"):
            code = "print('out of cheese'); raise SystemExit(3)"
            ablate.run_training([sys.executable, "-c", code], tmp_path / "log", None, lock)
        with pytest.raises(ValueError, match="still runs"), ablate.locked(tmp_path):
            pass
    with ablate.locked(tmp_path):
        pass


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--seed", "3"], "--seed: the ablation sets this"),
        (["--num_hidden_layers=3"], "num_hidden_layers"),
        (["--depths", "0"], "must be 1 or more"),
        (["--push_to_hub", "--hub_model_id", "a/b"], "push_to_hub"),
        (["--save_strategy", "no"], "checkpoints"),
        (["--draft_name_or_path", "x"], "new draft"),
        (["--limit", "0"], "limit is 0"),
    ],
)
def test_options_that_an_ablation_cannot_have_are_refused(command, options, message):
    with pytest.raises(ValueError, match=message):
        command(*options)
    assert not command.trained


def test_one_layer_is_one_cell_and_seeds_are_finished_one_by_one():
    cells = ablate.plan_cells([1, 2, 3], ["first", "all"], 2, width=99)
    shapes = ["1", "2 first", "2 all", "3 first", "3 all", "1 wide"]
    assert [cell.shape for cell in cells] == shapes * 2 and [cell.seed for cell in cells] == [1] * 6 + [2] * 6
    assert len({cell.folder for cell in cells}) == 12


# ---- statistics ----


def made_up(shape, gain, num_seeds=4, questions=40, seed=5):
    """Results with the same noise of seeds and questions for every shape; `gain` is the share of passes saved."""
    random = np.random.default_rng(seed)
    new = random.integers(60, 100, questions)
    own = np.random.default_rng(len(shape))
    results = []
    for number in range(num_seeds):
        share = 0.7 - gain + own.normal(0, 0.004) + random.normal(0, 0.03, questions)
        task = {"new": new.tolist(), "passes": (new * share).round().astype(int).tolist()}
        results.append({"shape": shape, "seed": number, "tasks": {"gsm8k": task}})
    return results


def test_a_planted_difference_is_found_and_none_is_not():
    better, same, control = made_up("2 first", 0.03), made_up("2 all", 0.0, seed=6), made_up("1", 0.0)
    found = ablate.compare(better, control, None)
    assert found["interval"][0] > 0.02 and found["difference"] == pytest.approx(0.064, abs=0.02)
    assert "2 layers first accepts more" in ablate.conclude(found)
    assert "1 layer - 2 layers first: tau -0.0" in (line := ablate.conclude(ablate.compare(control, better, None)))
    assert "2 layers first accepts more" in line
    assert "no difference shown" in ablate.conclude(ablate.compare(same, control, None))
    assert found["interval"][0] < found["difference"] < found["interval"][1]


def test_two_seeds_that_disagree_or_one_alone_show_no_difference():
    found = ablate.compare(made_up("2 first", 0.03), made_up("1", 0.0), None)
    assert found["seed_interval"][0] > 0
    assert "no difference shown" in ablate.conclude(
        found | {"seed_interval": ablate.t_interval(np.array([0.01, 0.05]))}
    )
    assert ablate.t_interval(np.array([0.030, 0.032]))[0] > 0
    assert "no difference shown" in ablate.conclude(found | {"seed_interval": ablate.t_interval(np.array([0.03]))})


def test_the_draws_are_paired_and_the_interval_knows_the_seeds():
    control = made_up("1", 0.0)
    assert np.ptp(np.subtract(*ablate.resample([control, control]))) == 0
    single = ablate.resample([control[:1]])[0]
    tasks = [{"gsm8k": {"new": [90] * 9, "passes": [passes] * 9}} for passes in (60, 70)]
    spread = [{**result, "tasks": task} for result, task in zip(control, tasks, strict=False)]
    assert np.std(single) > 0 and np.std(ablate.resample([spread])) > 0.05  # questions alone, seeds alone
    only_shared = ablate.compare(control[:3], control[2:], None)
    assert only_shared["seeds"] == [2] and only_shared["difference"] == 0
    assert ablate.compare(control[:1], control[1:], None) == {}


def test_a_slower_draft_loses_the_projected_speed():
    latency = {"target": {"1": 10.0, "4": 12.0}, "1": {"chain": [3] * 4}, "2": {"chain": [6] * 4}}
    same = made_up("1", 0.0), [{**result, "shape": "2"} for result in made_up("1", 0.0)]
    figures = ablate.compare(same[1], same[0], latency)
    assert figures["speed_ratio"] == pytest.approx(15 / 18) and "1 layer is faster" in ablate.conclude(figures)


def test_cells_of_other_tokens_are_not_compared():
    one = {"shape": "1", "seed": 1, "tokens": 100, "order": "x", "data": ["d"], "vocabulary": "v"}
    ablate.check_same_tokens([one, {**one, "shape": "2 all"}, {**one, "seed": 2, "tokens": 90}])
    for key, value in (("tokens", 90), ("order", "y"), ("data", ["e"]), ("vocabulary", "w")):
        with pytest.raises(ValueError, match=f"1 and 2 all of seed 1 cannot be compared: {key}"):
            ablate.check_same_tokens([one, {**one, "shape": "2 all", key: value}])


# ---- drafts ----


@pytest.mark.parametrize("fusion", ["first", "all"])
def test_a_wide_draft_starts_as_the_same_function(fusion):
    target = toy_target()
    shape = dict(num_hidden_layers=2, embed_fusion=fusion)
    narrow, wide = toy_draft(target, **shape), toy_draft(target, intermediate_size=112, **shape)
    sizes = {name: tensor.shape for name, tensor in wide.state_dict().items()}
    common = {name: tensor for name, tensor in narrow.state_dict().items() if sizes[name] == tensor.shape}
    wide.load_state_dict(common, strict=False)
    for draft in (narrow, wide):
        initialise_from_target(draft, target, layers=True)
    assert wide.layers[0].mlp.gate_proj.weight[48:].abs().min() > 0  # random, so that it can learn
    ids, features = torch.randint(64, (2, 9)), torch.randn(2, 9, 96)
    assert torch.allclose(narrow(ids, features).logits, wide(ids, features).logits, atol=1e-5)
    with pytest.raises(ValueError, match="intermediate_size 48 or more; the draft's is 40"):
        initialise_from_target(toy_draft(target, intermediate_size=40), target, layers=True)


def test_the_wide_cell_has_as_many_parameters_as_the_deepest(folder):
    words = ablate.training_command(str(folder / "recipe.yaml"), [], Cell(1, "first", 1), "out")
    _, options = ablate.parse_training(words)
    target = toy_target()
    width = ablate.matched_width(target, options, 3)
    counts = [
        ablate.count_parameters(ablate.cell_config(target, options, cell))
        for cell in (Cell(1, "first", 1, width), Cell(3, "first", 1))
    ]
    assert abs(counts[0] - counts[1]) <= 3 * 32 / 2 and width > 48
    config = Eagle3LlamaConfig.from_target(target.config, intermediate_size=width, draft_vocab_size=50)
    assert sum(parameter.numel() for parameter in LlamaForCausalLMEagle3(config).parameters()) == counts[0]
    words = ablate.training_command(str(folder / "recipe.yaml"), [], Cell(1, "first", 1, width), "out")
    assert ablate.parse_training(words)[1].intermediate_size == width


def test_counts_are_those_of_real_decoding(folder):
    target = toy_target()
    target.generation_config.eos_token_id = 2
    draft = toy_draft(target)
    answers = {"mtbench": ablate.task_answers(target, toy_tokenizer(), "mtbench", str(folder), 2, 12)}
    record = answers["mtbench"][1]
    assert len(record["prompts"]) == 2 and record["prompts"][1][: len(record["prompts"][0])] == record["prompts"][0]
    figures = ablate.measure(target, draft, answers, 3, {})
    chains = [greedy_chain(target, draft, prompt, 3, 12, [2]) for prompt in record["prompts"]]
    task = figures["tasks"]["mtbench"]
    assert task["new"][1] == sum(len(chain.tokens) - 1 for chain in chains)
    accepted = [count for chain in chains for count in chain.accepted]
    assert task["passes"][1] == len(accepted) and task["accepted"][1][0] == sum(count > 0 for count in accepted)
    assert figures["decoded_the_same"] == figures["decoded"] == 1
