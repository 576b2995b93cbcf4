"""The command: from a folder with a target and a file of conversations to a measured draft, and every way it stops."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from toy import toy_draft, toy_target, toy_tokenizer
from transformers import AutoModel

from eagle3_llama.modeling_eagle3_llama import LlamaForCausalLMEagle3
from eagle3_llama.trainer import run

RUN = Path(run.__file__)


def conversation(generator):
    first = generator.randrange(54)
    answer = " ".join(f"a{(first + i) % 54}" for i in range(generator.randrange(10, 20)))
    return {"messages": [{"role": "user", "content": f"a{first}"}, {"role": "assistant", "content": answer}]}


@pytest.fixture
def recipe(tmp_path):
    """A recipe for a toy target; returns the arguments of the command."""
    target = toy_target()
    target.generation_config.eos_token_id = 2
    target.save_pretrained(tmp_path / "target")
    toy_tokenizer().save_pretrained(tmp_path / "target")
    generator = random.Random(0)
    rows = [conversation(generator) for _ in range(40)]
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, rows)))
    values = dict(
        target_name_or_path=str(tmp_path / "target"),
        target_dtype="float32",
        dataset_name=[str(tmp_path / "chat.jsonl")],
        output_dir=str(tmp_path / "draft"),
        eval_samples=6,
        draft_vocab_size=50,
        ttt_steps=3,
        max_length=64,
        max_steps=6,
        save_steps=2,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        measure_prompts=2,
        measure_new_tokens=8,
        bf16=False,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )

    def arguments(**overrides):
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(values | overrides))
        return ["--config", str(tmp_path / "recipe.yaml")]

    return arguments


def call(monkeypatch, arguments):
    monkeypatch.setattr(sys, "argv", [str(RUN), *arguments])
    run.main()


def test_the_whole_path(tmp_path, monkeypatch, recipe, capsys):
    options = dict(num_hidden_layers=2, embed_fusion="all", eval_strategy="steps", eval_steps=3, bf16=True)
    call(monkeypatch, recipe(**options))
    printed = capsys.readouterr().out
    assert "acceptance length" in printed and "trust_remote_code=True" in printed
    figures = json.loads((tmp_path / "draft" / "acceptance.json").read_text())
    assert figures["tau"] >= 1 and figures["identical_outputs"] == figures["prompts"] == 2
    card = (tmp_path / "draft" / "README.md").read_text()
    assert f"{figures['tau']:.3f}" in card
    draft = AutoModel.from_pretrained(tmp_path / "draft", trust_remote_code=True)
    assert draft.config.num_hidden_layers == 2 and draft.config.embed_fusion == "all"
    # The same command again trains no step and ends with the same draft.
    before = draft.fc.weight.clone()
    call(monkeypatch, recipe(**options))
    assert "resuming from" in capsys.readouterr().out
    again = LlamaForCausalLMEagle3.from_pretrained(tmp_path / "draft")
    assert torch.equal(again.fc.weight, before)


def test_ctrl_c_in_the_middle_and_the_same_command_again(tmp_path, monkeypatch, recipe):
    arguments = recipe(max_steps=400, save_steps=20, measure_prompts=0)
    # As many threads as here: sums of another order round differently.
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    command = [sys.executable, str(RUN), *arguments]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    while not list((tmp_path / "draft").glob("checkpoint-*/trainer_state.json")):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and "the same command goes on" in errors and "Traceback" not in errors
    # A checkpoint that was cut off while it was written does not count.
    (tmp_path / "draft" / "checkpoint-399").mkdir()
    resumed_from = run.last_checkpoint(str(tmp_path / "draft"))
    assert 20 <= int(resumed_from.split("-")[-1]) < 399
    call(monkeypatch, arguments)
    resumed = LlamaForCausalLMEagle3.from_pretrained(tmp_path / "draft")
    call(monkeypatch, recipe(max_steps=400, measure_prompts=0, output_dir=str(tmp_path / "straight")))
    straight = LlamaForCausalLMEagle3.from_pretrained(tmp_path / "straight")
    assert all(torch.equal(a, b) for a, b in zip(resumed.parameters(), straight.parameters(), strict=True))


def test_preview_marks_the_supervised_tokens_and_trains_nothing(tmp_path, monkeypatch, recipe, capsys):
    call(monkeypatch, [*recipe(), "--preview", "2"])
    printed = capsys.readouterr().out
    assert printed.count("⟦") == 2 and "<|assistant|>" in printed
    assert not (tmp_path / "draft").exists()


def test_another_recipe_in_the_same_folder_is_refused(monkeypatch, recipe):
    call(monkeypatch, recipe(measure_prompts=0))
    with pytest.raises(ValueError, match="another recipe.*learning_rate: 0.01 -> 0.02"):
        call(monkeypatch, recipe(measure_prompts=0, learning_rate=0.02))


def test_the_pushed_draft_carries_its_figures(hub, monkeypatch, recipe):
    call(monkeypatch, recipe(push_to_hub=True, hub_model_id="tester/toy-eagle3", target_name="tester/target"))
    files = hub.files("tester/toy-eagle3")
    figures = json.loads(files["acceptance.json"])
    assert f"{figures['tau']:.3f}" in files["README.md"].decode()
    assert b"base_model: tester/target" in files["README.md"]
    code = {"configuration_eagle3_llama.py", "modeling_eagle3_llama.py", "custom_generate/generate.py"}
    settings = {"config.json", "generation_config.json"}
    assert (
        set(files)
        == {".gitattributes", "README.md", "acceptance.json", "acceptance.png", "model.safetensors"} | settings | code
    )


def test_a_lora_by_flags(tmp_path, hub, monkeypatch, recipe):
    toy_draft(toy_target()).push_to_hub("tester/toy-eagle3")
    flags = ["--use_peft", "--lora_r", "4", "--draft_name_or_path", "tester/toy-eagle3"]
    call(monkeypatch, [*recipe(draft_vocab_size=40), *flags])
    adapter = json.loads((tmp_path / "draft" / "adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == "tester/toy-eagle3" and adapter["r"] == 4
    assert set(adapter["target_modules"]) == set(run.PROJECTIONS)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"embed_fuson": "all"}, "embed_fuson"),
        ({"dataset_name": []}, "dataset_name is missing"),
        ({"dataset_name": ["nowhere/chat.jsonl"]}, "nowhere/chat.jsonl"),
        ({"eval_samples": 40}, "eval_samples 40 leaves nothing"),
        ({"eval_samples": 0}, "raise --eval_samples"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"captured_layers": [1, 2, 9]}, "1 to 7"),
        ({"use_peft": True}, "draft_name_or_path"),
        ({"draft_vocab_size": 65}, "draft_vocab_size is 65"),
    ],
)
def test_a_wrong_recipe_is_refused_before_training(tmp_path, monkeypatch, recipe, overrides, message):
    with pytest.raises(ValueError, match=message):
        call(monkeypatch, recipe(**overrides))
    assert not list((tmp_path / "draft").glob("checkpoint-*"))


def test_broken_json_is_refused_by_file_byte_and_record_or_skipped(tmp_path, monkeypatch, recipe, capsys):
    with (tmp_path / "chat.jsonl").open("a") as file:
        file.write('\n{"messages": [{"role": "us')
    with pytest.raises(ValueError, match=r"chat.jsonl.*record 41.*skip_malformed"):
        call(monkeypatch, recipe())
    call(monkeypatch, [*recipe(measure_prompts=0), "--skip_malformed"])
    assert "1 malformed" in capsys.readouterr().out


def test_the_committed_recipes_name_only_known_options(monkeypatch):
    from trl import TrlParser

    from eagle3_llama.trainer.eagle3_config import Eagle3Config

    for path in sorted((RUN.parent / "recipes").glob("*.yaml")):
        arguments = ["--config", str(path), "--target_name_or_path", "x", "--dataset_name", "y", "--bf16", "false"]
        script, args = TrlParser((run.ScriptArguments, Eagle3Config)).parse_args_and_config(arguments)
        assert script.dataset_name == ["y"] and args.learning_rate > 0 and os.path.basename(args.output_dir)
