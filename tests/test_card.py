"""The model card: what it says, that the Hub takes its metadata, and that its code runs as it stands there."""

import json
import re
import shutil
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard, metadata_load
from peft import LoraConfig
from test_trainer import config, trainer_for
from toy import toy_draft, toy_rows, toy_target, toy_tokenizer

from eagle3_llama.evaluation import bench as bench_module
from eagle3_llama.modeling_eagle3_llama import LlamaForCausalLMEagle3
from eagle3_llama.trainer import hub as hub_module
from eagle3_llama.trainer.eagle3_trainer import Eagle3Trainer
from eagle3_llama.trainer.hub import provenance, renew_card, weights_digest, write_card

MEASURED = {
    "tau": 1.4713,
    "acceptance_per_position": [0.3478, 0.1057, 0.0306],
    "tokens_per_second": 12.68,
    "tokens_per_second_without_draft": 15.25,
    "speedup": 0.8317,
    "identical_outputs": 20,
    "prompts": 20,
    "mode": "greedy chain of 3 draft tokens, batch 1, at most 64 new tokens",
    "dtype": "float32",
    "seed": 42,
    "definition": "tau = new tokens / target passes",
    "command": "python run.py --config toy.yaml",
    "machine": "a machine",
    "versions": "transformers 5.24.0",
    "commit": "abc123",
}


def trained(folder, measured=MEASURED, **facts):
    """A trainer after no step, its draft saved in `folder` with a card."""
    target = toy_target()
    target.config._name_or_path = "tester/target"
    trainer = trainer_for(folder, target)
    trainer.card |= {"datasets": ["tester/chat:english"], "measured": measured} | facts
    trainer.save_model()
    return trainer


def entry(task, row, temperature=0.0, **values):
    plain = row == "baseline"
    shares = [] if plain else [0.5, 0.25, 0.125][: 4 if row == "tree" else int(row[-1])]
    same = None if plain or temperature else 2
    figures = dict(tau=1.0 if plain else 1.875, tokens_per_second=10.0 if plain else 15.0, identical=same)
    figures |= dict(task=task, row=row, temperature=temperature, questions=2, acceptance_per_position=shares)
    return figures | values


def bench_file(path, folder, results, **settings):
    """A file of bench.py that measured the draft in `folder`."""
    draft = LlamaForCausalLMEagle3.from_pretrained(folder, dtype="float32")
    settings = dict(draft_weights=weights_digest(draft), dtype="float32", seed=7, tasks_dir=None) | settings
    report = dict(settings=settings, definition="tau = ...", mode="batch 1", results=results, records=[{}])
    path.write_text(json.dumps(report | {"provenance": {**provenance(), "command": "python bench.py"}}))
    return path


def rows_of(text, heading) -> list[list[str]]:
    """The cells of the first table under a heading; fails when a line of it does not fit."""
    lines = text.split(f"## {heading}\n")[1].strip().split("\n")
    table = [line for line in lines[: lines.index("")] if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    assert len({len(row) for row in cells}) == 1 and set(table[1]) == {"|", "-"}
    return cells[2:]


def test_the_figures_are_in_table_metadata_and_picture(hub, tmp_path):
    trained(tmp_path)
    card = ModelCard.load(tmp_path / "README.md")
    assert "\n\n\n" not in card.text
    assert rows_of(card.text, "Measured") == [
        ["held-out conversations (20)", "chain of 3, greedy", "1.471", "0.348 0.106 0.031", "15.2", "12.7", "0.83 x"]
        + ["20 of 20"]
    ]
    for fact in ("definition", "mode", "dtype", "seed", "machine", "versions", "commit", "command"):
        assert str(MEASURED[fact]) in card.text
    assert "slower than without it** in 1 of 1" in card.text
    assert "![Share of draft tokens accepted at each position](acceptance.png)" in card.text
    assert (tmp_path / "acceptance.png").read_bytes().startswith(b"\x89PNG")
    tau, speed = card.data.eval_results
    assert (tau.task_type, tau.metric_type, tau.metric_value) == ("text-generation", "acceptance_length", 1.4713)
    assert tau.metric_name == "acceptance length (tau, chain of 3, greedy)" and tau.dataset_type == "tester/chat"
    assert (speed.metric_type, speed.metric_value) == ("speedup", 0.8317)
    assert metadata_load(tmp_path / "README.md")["model-index"][0]["name"] == tmp_path.name
    card.validate()


def test_a_draft_that_was_not_measured_says_so(hub, tmp_path):
    (tmp_path / "acceptance.png").touch()  # of an earlier card
    trained(tmp_path, measured=None)
    card = ModelCard.load(tmp_path / "README.md")
    assert "Not measured yet." in card.text and "acceptance.png" not in card.text and "slower" not in card.text
    assert card.data.eval_results is None and not (tmp_path / "acceptance.png").exists()
    card.validate()


def test_results_that_the_hub_cannot_read_are_refused_here_too(hub, tmp_path):
    trained(tmp_path)
    card = ModelCard.load(tmp_path / "README.md")
    card.data.eval_results[0].metric_value = "fast"
    with pytest.raises(ValueError, match="model-index"):
        card.validate()


def test_the_steps_are_those_of_the_best_draft(tmp_path):
    trainer = trained(tmp_path)
    trainer.state.global_step, trainer.state.best_global_step = 40, 30
    write_card(trainer, str(tmp_path))
    assert "after 40 optimiser steps" in (tmp_path / "README.md").read_text()
    trainer.args.load_best_model_at_end = True
    write_card(trainer, str(tmp_path))
    assert "after 30 optimiser steps" in (tmp_path / "README.md").read_text()
    trainer.state.best_global_step = None
    write_card(trainer, str(tmp_path))
    assert "after 40 optimiser steps" in (tmp_path / "README.md").read_text()


@pytest.mark.parametrize(
    ("shape", "refusing"),
    [
        (dict(), []),
        (dict(num_hidden_layers=2), ["llama.cpp"]),
        (dict(embed_fusion="all"), []),
        (dict(num_hidden_layers=2, embed_fusion="all"), ["vLLM", "SGLang", "llama.cpp"]),
        (dict(eagle_aux_hidden_state_layer_ids=(1, 4, 5)), ["llama.cpp"]),
        (dict(draft_vocab_size=64), []),
    ],
)
def test_the_engines_follow_from_the_configuration(tmp_path, shape, refusing):
    toy_draft(toy_target(), **shape).save_pretrained(tmp_path)
    text = (tmp_path / "README.md").read_text()
    serves = {row[0]: row[1] for row in rows_of(text, "Engines")}
    assert serves.pop("transformers, 5.24 or later") == "yes"
    assert [engine for engine, word in serves.items() if word.startswith("no: ")] == refusing
    rest = {word for engine, word in serves.items() if engine not in refusing}
    assert rest == {"expected from its loader, not run for this checkpoint"}
    assert ("vllm serve the-target" in text) == ("vLLM" not in refusing) and "\n\n\n" not in text


def snippet(text) -> str:
    return re.search(r"```python\n(.*?)```", text, re.S)[1]


def push_target(target) -> None:
    target.push_to_hub("tester/target")
    toy_tokenizer().push_to_hub("tester/target")
    target.config._name_or_path = "tester/target"


def plain_answer(target) -> str:
    """What the target alone answers to the card's question."""
    tokenizer = toy_tokenizer()
    messages = [{"role": "user", "content": "Why is the sky blue?"}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = target.generate(**inputs, max_new_tokens=128, do_sample=False)
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def test_the_code_on_the_card_runs_as_it_stands(hub, tmp_path, run_clean):
    target = toy_target()
    push_target(target)
    hub.branches["tester/target"]["v1"] = hub.files("tester/target")
    trainer = trainer_for(tmp_path, target, push_to_hub=True, hub_model_id="tester/toy-eagle3")
    trainer.card["target_revision"] = "v1"
    trainer.push_to_hub()
    text = hub.files("tester/toy-eagle3")["README.md"].decode()
    assert 'revision="v1"' in snippet(text) and "--revision v1" in text
    assert run_clean(snippet(text)).strip() == plain_answer(target) != ""


@pytest.mark.slow
def test_the_code_on_an_adapters_card_runs_too(hub, tmp_path, run_clean):
    target = toy_target()
    push_target(target)
    toy_draft(target).push_to_hub("tester/toy-eagle3")
    trainer = Eagle3Trainer(
        target=target,
        args=config(tmp_path, draft_vocab_size=None, push_to_hub=True, hub_model_id="tester/toy-eagle3-lora"),
        train_dataset=toy_rows(8),
        processing_class=toy_tokenizer(),
        model=LlamaForCausalLMEagle3.from_pretrained("tester/toy-eagle3"),
        peft_config=LoraConfig(r=4, target_modules=["fc", "q_proj"]),
    )
    trainer.push_to_hub()
    text = hub.files("tester/toy-eagle3-lora")["README.md"].decode()
    assert "vllm serve" not in text and "\n\n\n" not in text
    assert run_clean(snippet(text)).strip() == plain_answer(target) != ""


def test_five_tasks_come_into_the_card_of_a_finished_draft(hub, tmp_path):
    trained(tmp_path / "draft", coverage=0.9731, target_gguf_file="toy.gguf")
    before = (tmp_path / "draft" / "README.md").read_text()
    results = [entry("mtbench", row) for row in ("baseline", "chain 3", "chain 1")]
    results += [entry("gsm8k", "baseline"), entry("gsm8k", "chain 3", tokens_per_second=9.0)]
    results += [entry("gsm8k", row, temperature=1.0) for row in ("baseline", "chain 3")]
    results += [entry("ceval", "baseline"), entry("ceval", "chain 3", tau=None, acceptance_per_position=[])]
    path = bench_file(tmp_path / "bench.json", tmp_path / "draft", results)
    renew_card(str(tmp_path / "draft"), str(path), "tester/toy-eagle3")
    files = hub.files("tester/toy-eagle3")
    assert {"acceptance.png", "bench.json", "model.safetensors", "custom_generate/generate.py"} <= set(files)
    assert "card.json" not in files and "records" not in json.loads(files["bench.json"])
    card = ModelCard(files["README.md"].decode())
    assert [row[:3] + row[5:] for row in rows_of(card.text, "Measured")] == [
        ["mt_bench (2)", "chain of 3, greedy", "1.875", "15.0", "1.50 x", "2 of 2"],
        ["mt_bench (2)", "chain of 1, greedy", "1.875", "15.0", "1.50 x", "2 of 2"],
        ["gsm8k (2)", "chain of 3, greedy", "1.875", "9.0", "0.90 x", "2 of 2"],
        ["gsm8k (2)", "chain of 3, temperature 1", "1.875", "15.0", "1.50 x", "-"],
    ]
    assert "slower than without it** in 1 of 4" in card.text and "`python bench.py`" in card.text
    found = [(result.dataset_name, result.metric_type, result.metric_value) for result in card.data.eval_results]
    assert found == [("mt_bench", "acceptance_length", 1.875), ("mt_bench", "speedup", 1.5)] + [
        ("gsm8k", "acceptance_length", 1.875),
        ("gsm8k", "speedup", 0.9),
    ]
    # What the trainer knew is still there.
    for heading in ("Training", "Limits"):
        same = before.split(f"## {heading}\n")[1].split("- **Decoding")[0]
        assert same and same in card.text
    assert "97.3 %" in card.text and "toy.gguf" in card.text and 'from_pretrained("tester/toy-eagle3"' in card.text
    # A resumed run, or the command without --bench, keeps the figures of the tasks.
    renew_card(str(tmp_path / "draft"))
    assert "mt_bench (2)" in (tmp_path / "draft" / "README.md").read_text()


def test_only_a_measurement_of_this_draft_comes_into_its_card(tmp_path, caplog):
    folder = tmp_path / "draft"
    trainer = trained(folder)
    before = (folder / "README.md").read_text()
    results = [entry("gsm8k", row) for row in ("baseline", "chain 3")]
    other = bench_file(tmp_path / "other.json", folder, results, draft_weights="0123456789abcdef")
    with pytest.raises(ValueError, match="0123456789abcdef.*run bench.py again"):
        renew_card(str(folder), str(other))
    with pytest.raises(ValueError, match="nothing.json is missing"):
        renew_card(str(folder), str(tmp_path / "nothing.json"))
    (tmp_path / "broken.json").write_text('{"settings": {')
    with pytest.raises(ValueError, match="not a .json file of evaluation/bench.py"):
        renew_card(str(folder), str(tmp_path / "broken.json"))
    with pytest.raises(ValueError, match="not a .json file of evaluation/bench.py"):
        renew_card(str(folder), str(folder / "config.json"))
    assert (folder / "README.md").read_text() == before and not (folder / "bench.json").exists()
    # Trained on, the draft is another one.
    bench_file(folder / "bench.json", folder, results)
    with torch.no_grad():
        trainer.draft.fc.weight.add_(1)
    trainer.save_model()
    assert "run bench.py again" in caplog.text and (folder / "bench.old.json").exists()
    assert "held-out conversations" in (folder / "README.md").read_text() and not (folder / "bench.json").exists()


def test_a_folder_that_was_not_trained_here_has_no_facts(tmp_path):
    toy_draft(toy_target()).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="card.json is missing"):
        renew_card(str(tmp_path))


def test_bench_marks_the_weights_in_the_same_way(tmp_path):
    draft = toy_draft(toy_target())
    draft.save_pretrained(tmp_path)
    names = "target draft tasks_dir target_gguf_file dtype max_new_tokens limit seed allow_code_execution".split()
    settings = bench_module.settings_of(Namespace(**dict.fromkeys(names)), draft)
    assert settings["draft_weights"] == weights_digest(LlamaForCausalLMEagle3.from_pretrained(tmp_path))


def test_the_command(tmp_path):
    trained(tmp_path / "draft")
    path = bench_file(tmp_path / "b.json", tmp_path / "draft", [entry("gsm8k", r) for r in ("baseline", "chain 3")])
    shutil.move(tmp_path / "draft", tmp_path / "moved")
    command = [sys.executable, hub_module.__file__, "--draft", str(tmp_path / "moved"), "--bench", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "README.md" in done.stdout and "gsm8k (2)" in Path(tmp_path / "moved" / "README.md").read_text()
