"""A saved or pushed draft is complete: a stranger loads it by AutoModel and gets the same logits, bit for bit."""

import json

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file
from test_trainer import StopAt, config, trainer_for
from toy import ALL_SHAPES, toy_draft, toy_rows, toy_target, toy_tokenizer

from eagle3_llama.modeling_eagle3_llama import LlamaForCausalLMEagle3
from eagle3_llama.trainer.eagle3_trainer import Eagle3Trainer
from eagle3_llama.trainer.frozen_target import load_target

STRANGER = """
import sys, torch
from transformers import AutoModel, AutoModelForCausalLM
where, target, inputs, output = sys.argv[1:]
inputs = torch.load(inputs)
target = AutoModelForCausalLM.from_pretrained(target)
draft = AutoModel.from_pretrained(where, trust_remote_code=True).bind_target(target)
with torch.no_grad():
    torch.save(draft(**inputs).logits, output)
"""


@pytest.fixture
def stranger_logits(tmp_path, run_clean):
    """Logits of the draft at `where` (folder or repo) in a process without this package, and the same here."""

    def logits(where, target, draft):
        torch.manual_seed(7)
        target.save_pretrained(tmp_path / "target")
        inputs = {"input_ids": torch.randint(0, 64, (2, 6)), "hidden_states": torch.randn(2, 6, 96)}
        torch.save(inputs, tmp_path / "inputs.pt")
        run_clean(STRANGER, where, tmp_path / "target", tmp_path / "inputs.pt", tmp_path / "logits.pt")
        with torch.no_grad():
            return torch.load(tmp_path / "logits.pt"), draft.eval()(**inputs).logits

    return logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_saved_draft_gives_a_stranger_the_same_logits(tmp_path, stranger_logits, dtype):
    target = toy_target().to(dtype)
    draft = toy_draft(target, num_hidden_layers=2).to(dtype)
    draft.save_pretrained(tmp_path / "draft")
    theirs, ours = stranger_logits(tmp_path / "draft", target, draft)
    assert theirs.dtype == dtype and torch.equal(theirs, ours)


def test_a_draft_pushed_by_its_own_method_gives_a_stranger_the_same_logits(hub, tmp_path, stranger_logits):
    target = toy_target()
    draft = toy_draft(target, num_hidden_layers=3, embed_fusion="all", fc_norm=True)
    draft.config.target_name = "tester/target"
    draft.push_to_hub("tester/toy-eagle3")
    draft.save_pretrained(tmp_path / "toy-eagle3-too", push_to_hub=True)
    assert pushed(hub) == pushed(hub, "tester/toy-eagle3-too") == FILES
    card = hub.files("tester/toy-eagle3")["README.md"].decode()
    assert "base_model: tester/target" in card and 'from_pretrained("tester/toy-eagle3"' in card
    theirs, ours = stranger_logits("tester/toy-eagle3", target, draft)
    assert torch.equal(theirs, ours)


@pytest.mark.parametrize(("layers", "fusion"), ALL_SHAPES)
def test_the_file_has_exactly_the_names_that_the_engines_read(tmp_path, layers, fusion):
    draft = toy_draft(toy_target(), num_hidden_layers=layers, embed_fusion=fusion)
    draft.save_pretrained(tmp_path)
    expected = {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
    for i in range(layers):
        expected |= {f"layers.{i}.self_attn.{name}_proj.weight" for name in "qkvo"}
        expected |= {f"layers.{i}.mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
        norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        expected |= {f"layers.{i}.{name}.weight" for name in norms}
    weights = load_file(tmp_path / "model.safetensors")
    assert set(weights) == expected
    assert weights["d2t"].dtype == torch.int64 and weights["t2d"].dtype == torch.bool
    for i in range(1, layers):
        same = torch.equal(weights[f"layers.{i}.input_layernorm.weight"], weights[f"layers.{i}.hidden_norm.weight"])
        assert same == (fusion == "first")
    again = LlamaForCausalLMEagle3.from_pretrained(tmp_path)
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in draft.state_dict().items())


def test_without_a_draft_vocabulary_neither_map_is_written(tmp_path):
    toy_draft(toy_target(), draft_vocab_size=64).save_pretrained(tmp_path)
    assert not {"d2t", "t2d"} & set(load_file(tmp_path / "model.safetensors"))
    assert json.loads((tmp_path / "config.json").read_text())["draft_vocab_size"] == 64


@pytest.mark.parametrize("change", ["missing", "unexpected", "shape"])
def test_weights_that_do_not_fit_are_refused(tmp_path, change):
    from safetensors.torch import save_file

    toy_draft(toy_target(), num_hidden_layers=2).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    if change == "missing":
        del weights["layers.1.hidden_norm.weight"]
    else:
        weights["layers.0.extra.weight" if change == "unexpected" else "fc.weight"] = torch.zeros(3)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    name = {"missing": "layers.1.hidden_norm", "unexpected": "layers.0.extra", "shape": "fc.weight"}[change]
    with pytest.raises((ValueError, RuntimeError), match=name):
        LlamaForCausalLMEagle3.from_pretrained(tmp_path)


CODE = {"configuration_eagle3_llama.py", "modeling_eagle3_llama.py", "custom_generate/generate.py"}
FILES = {"config.json", "generation_config.json", "model.safetensors", "README.md"} | CODE


def pushed(hub, repo="tester/toy-eagle3") -> set[str]:
    return set(hub.files(repo)) - {".gitattributes"}


def test_training_pushes_complete_drafts_and_nothing_else(hub, tmp_path, stranger_logits):
    target = toy_target()
    trainer = trainer_for(
        tmp_path / "run", target, max_steps=4, save_steps=2, push_to_hub=True, hub_model_id="tester/toy-eagle3"
    )
    trainer.train()
    trainer._finish_current_push()
    during = hub.repos["tester/toy-eagle3"]
    assert len(during) > 1 and all(set(commit) - {".gitattributes"} == FILES for commit in during[1:])
    trainer.push_to_hub()
    assert pushed(hub) == FILES
    theirs, ours = stranger_logits("tester/toy-eagle3", target, trainer.draft)
    assert torch.equal(theirs, ours)


def test_the_card_names_the_target_and_how_to_load(hub, tmp_path):
    from huggingface_hub import ModelCard

    target = toy_target()
    target.config._name_or_path = "tester/target"
    trainer = trainer_for(tmp_path / "run", target, max_steps=1, push_to_hub=True, hub_model_id="tester/toy-eagle3")
    trainer.card["datasets"] = ["tester/chat", str(tmp_path)]
    trainer.push_to_hub()
    card = ModelCard(hub.files("tester/toy-eagle3")["README.md"].decode())
    assert card.data.base_model == "tester/target" and card.data.datasets == ["tester/chat"]
    assert {"eagle3", "speculative-decoding", "draft-model"} <= set(card.data.tags)
    assert card.data.library_name == "transformers" and card.data.pipeline_tag == "text-generation"
    assert 'AutoModel.from_pretrained("tester/toy-eagle3", trust_remote_code=True)' in card.text
    assert "learning_rate: 0.01" in card.text and str(tmp_path) not in card.text


def test_a_refused_token_stops_before_training(hub, tmp_path):
    hub.token = "hf_other"
    with pytest.raises(Exception, match="401"):
        trainer_for(tmp_path, push_to_hub=True, hub_model_id="tester/toy-eagle3")


@pytest.mark.parametrize("fault", ["token", "weights", "commit"])
def test_a_failed_push_keeps_the_result_and_says_how_to_push_again(hub, tmp_path, fault):
    trainer = trainer_for(
        tmp_path, max_steps=2, push_to_hub=True, hub_model_id="tester/toy-eagle3", save_strategy="no"
    )
    trainer.train()
    if fault == "token":
        hub.token = "hf_other"
    else:
        hub.fail_uploads_after({"weights": 0, "commit": 1}[fault])
    with pytest.raises(RuntimeError, match=f"(?s)complete in {tmp_path}.*hf upload tester/toy-eagle3"):
        trainer.push_to_hub()
    assert FILES <= {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
    loaded = LlamaForCausalLMEagle3.from_pretrained(tmp_path)
    assert torch.equal(loaded.fc.weight, trainer.draft.fc.weight)
    hub.token = "hf_test"
    hub.fail_uploads_after(None)
    trainer.push_to_hub()
    assert pushed(hub) == FILES


def test_a_push_lost_while_training_is_told_and_training_goes_on(hub, tmp_path, caplog):
    trainer = trainer_for(tmp_path, max_steps=4, save_steps=2, push_to_hub=True, hub_model_id="tester/toy-eagle3")
    hub.fail_uploads_after(0)
    trainer.train()
    trainer._finish_current_push()
    assert trainer.state.global_step == 4
    assert "pushing to tester/toy-eagle3 failed" in caplog.text


def adapter_trainer(folder, target, draft, **options):
    return Eagle3Trainer(
        target=target,
        args=config(folder, draft_vocab_size=None, **options),
        train_dataset=toy_rows(32),
        processing_class=toy_tokenizer(),
        model=draft,
        peft_config=LoraConfig(r=4, lora_alpha=8, target_modules=["fc", "q_proj", "v_proj", "up_proj"]),
    )


def test_a_lora_is_trained_pushed_and_loaded_by_automodel(hub, tmp_path, stranger_logits):
    target = toy_target()
    toy_draft(target, num_hidden_layers=2).push_to_hub("tester/toy-eagle3")
    draft = LlamaForCausalLMEagle3.from_pretrained("tester/toy-eagle3")
    frozen = draft.layers[1].mlp.down_proj.weight.clone()
    options = dict(max_steps=4, push_to_hub=True, hub_model_id="tester/toy-eagle3-lora", save_steps=2)
    trainer = adapter_trainer(tmp_path / "run", target, draft, **options)
    trainer.train()
    trainer.push_to_hub()
    assert pushed(hub, "tester/toy-eagle3-lora") == {"adapter_config.json", "adapter_model.safetensors", "README.md"}
    assert torch.equal(draft.layers[1].mlp.down_proj.weight, frozen)
    assert draft.fc.lora_B["default"].weight.abs().sum() > 0
    theirs, ours = stranger_logits("tester/toy-eagle3-lora", target, draft)
    torch.testing.assert_close(theirs, ours, atol=1e-6, rtol=1e-5)


def test_an_interrupted_lora_resumes_bit_for_bit(hub, tmp_path):
    target = toy_target()
    toy_draft(target).save_pretrained(tmp_path / "draft")

    def start(name, **kwargs):
        draft = LlamaForCausalLMEagle3.from_pretrained(tmp_path / "draft")
        trainer = adapter_trainer(tmp_path / name, target, draft, max_steps=6, save_steps=2)
        for callback in kwargs.get("callbacks", []):
            trainer.add_callback(callback)
        trainer.train(resume_from_checkpoint=kwargs.get("resume"))
        return trainer.draft.state_dict()

    straight = start("straight")
    with pytest.raises(KeyboardInterrupt):
        start("stopped", callbacks=[StopAt(5)])
    resumed = start("stopped", resume=str(tmp_path / "stopped" / "checkpoint-4"))
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)


def test_an_adapter_without_a_draft_or_on_the_head_is_refused(tmp_path):
    with pytest.raises(ValueError, match="draft_name_or_path"):
        adapter_trainer(tmp_path, toy_target(), None)
    target = toy_target()
    with pytest.raises(ValueError, match="lm_head"):
        Eagle3Trainer(
            target=target,
            args=config(tmp_path, draft_vocab_size=None),
            train_dataset=toy_rows(8),
            processing_class=toy_tokenizer(),
            model=toy_draft(target),
            peft_config=LoraConfig(target_modules=["lm_head"]),
        )


def test_a_pushed_adapter_must_name_its_draft_on_the_hub(hub, tmp_path):
    target = toy_target()
    toy_draft(target).save_pretrained(tmp_path / "draft")
    draft = LlamaForCausalLMEagle3.from_pretrained(tmp_path / "draft")
    with pytest.raises(ValueError, match="must name its draft on the Hub"):
        adapter_trainer(tmp_path / "run", target, draft, push_to_hub=True, hub_model_id="tester/toy-eagle3-lora")


def test_a_target_with_an_adapter_is_distilled_merged(hub, tmp_path):
    from peft import get_peft_model

    target = toy_target()
    target.push_to_hub("tester/target")
    adapted = get_peft_model(toy_target(), LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    adapted.push_to_hub("tester/target-lora")
    merged = load_target("tester/target", adapter="tester/target-lora", dtype="float32")
    ids = torch.arange(12)[None]
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, adapted(ids).logits, atol=1e-5, rtol=1e-5)
        assert not torch.allclose(merged(ids).logits, target(ids).logits, atol=1e-3)
    trainer_for(tmp_path, merged, max_steps=1).train()
