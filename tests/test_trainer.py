"""Eagle3Trainer: what it learns, and that accumulation, interruption and bad input behave."""

import copy
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from toy import toy_draft, toy_rows, toy_target, toy_tokenizer
from transformers import TrainerCallback

from eagle3_llama.modeling_eagle3_llama import LlamaForCausalLMEagle3
from eagle3_llama.trainer.eagle3_config import Eagle3Config
from eagle3_llama.trainer.eagle3_trainer import Eagle3Trainer
from eagle3_llama.trainer.frozen_target import load_target


def config(folder, **overrides) -> Eagle3Config:
    values = dict(
        output_dir=str(folder),
        draft_vocab_size=50,
        ttt_steps=3,
        max_length=64,
        per_device_train_batch_size=4,
        max_steps=6,
        learning_rate=1e-2,
        logging_steps=2,
        bf16=False,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    return Eagle3Config(**(values | overrides))


def trainer_for(folder, target=None, rows=None, model=None, callbacks=None, **overrides) -> Eagle3Trainer:
    return Eagle3Trainer(
        target=target or toy_target(),
        args=config(folder, **overrides),
        train_dataset=rows or toy_rows(32),
        eval_dataset=toy_rows(8, seed=9),
        processing_class=toy_tokenizer(),
        model=model,
        callbacks=callbacks,
    )


def same_weights(a, b) -> bool:
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(("layers", "fusion", "bf16"), [(1, "first", True), (2, "all", False), (2, "first", False)])
def test_training_moves_every_parameter_and_lowers_the_loss(tmp_path, layers, fusion, bf16):
    trainer = trainer_for(tmp_path, max_steps=40, num_hidden_layers=layers, embed_fusion=fusion, bf16=bf16)
    before, frozen = copy.deepcopy(trainer.draft.state_dict()), copy.deepcopy(trainer.target.state_dict())
    loss_before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < 0.9 * loss_before
    moved = {name: not torch.equal(value, before[name]) for name, value in trainer.draft.state_dict().items()}
    assert all(moved[name] for name, _ in trainer.draft.named_parameters())
    assert not moved["d2t"] and not moved["t2d"]
    assert all(torch.equal(value, frozen[name]) for name, value in trainer.target.state_dict().items())
    assert trainer.draft.lm_head.weight.dtype == torch.float32  # fp32 masters


def test_every_step_logs_the_chain(tmp_path):
    trainer = trainer_for(tmp_path, logging_steps=1, max_steps=2)
    trainer.train()
    entry = trainer.state.log_history[0]
    for name in ("loss", "supervised_share", "vocabulary_coverage", "tokens_per_second", "grad_norm"):
        assert entry[name] > 0
    joint = [entry[f"joint_acceptance/{k}"] for k in range(3)]
    assert joint == sorted(joint, reverse=True) and joint[0] == entry["accuracy/0"]
    assert entry["estimated_tau"] == pytest.approx(1 + sum(joint), abs=1e-5)
    assert 0 < entry["supervised_share"] < 1


def test_head_and_norm_start_from_the_target(tmp_path):
    for tied in (True, False):
        target = toy_target(tie_word_embeddings=tied)
        torch.nn.init.uniform_(target.model.norm.weight)
        draft = trainer_for(tmp_path / str(tied), target=target).draft
        assert torch.equal(draft.lm_head.weight, target.get_output_embeddings().weight[draft.t2d])
        assert torch.equal(draft.norm.weight, target.model.norm.weight)
        assert draft.config.tie_word_embeddings is False


@pytest.mark.parametrize(("layers", "fusion"), [(1, "first"), (3, "first"), (2, "all")])
def test_layers_can_start_from_the_targets_last_ones(tmp_path, layers, fusion):
    """Fed the state before them and nothing of the embedding, the draft's layers compute what the target's do."""
    target = toy_target()
    draft = trainer_for(tmp_path, target, num_hidden_layers=layers, embed_fusion=fusion, init_layers=True).draft
    torch.testing.assert_close(draft.fc.weight[:, -32:], torch.eye(32), atol=0.1, rtol=0)
    for layer in draft.layers:
        if layer.reads_embeddings:
            layer.input_layernorm.weight.data.zero_()
    ids = torch.arange(10)[None]
    with torch.no_grad():
        states = target(ids, output_hidden_states=True).hidden_states
        _, ours = draft.step(states[7 - layers], ids, ids, draft._cached_attend(states[0], None, None, 0))
    torch.testing.assert_close(ours, states[7], atol=1e-5, rtol=1e-5)


def test_special_and_end_of_turn_tokens_are_in_the_draft_vocabulary(tmp_path):
    target = toy_target()
    target.generation_config.eos_token_id = [2, 61]
    draft = trainer_for(tmp_path, target=target, draft_vocab_size=20).draft
    assert draft.t2d[torch.tensor([0, 1, 2, 3, 4, 5, 61])].all()


@pytest.mark.parametrize(("rows", "steps"), [(1, 8), (2, 4)])
def test_accumulation_changes_nothing(tmp_path, rows, steps):
    """8 rows at once = 8 times 1 row: the loss is over the tokens of the global batch, however uneven the rows."""
    drafts = []
    for name, size, accumulation in (("whole", 8, 1), ("parts", rows, steps)):
        trainer = trainer_for(
            tmp_path / name,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=accumulation,
            max_steps=2,
            max_grad_norm=0.0,  # compare raw gradients: with SGD the weights are linear in them
            optim="sgd",
            logging_steps=1,
        )
        trainer.train()
        drafts.append((trainer.draft, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]))
    for (name, a), b in zip(drafts[0][0].named_parameters(), drafts[1][0].parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5, msg=lambda m, name=name: f"{name}: {m}")
    assert drafts[0][1] == pytest.approx(drafts[1][1], rel=1e-4)


class StopAt(TrainerCallback):
    """Ends the training as Ctrl-C would, in the middle between two checkpoints."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise KeyboardInterrupt


@pytest.mark.parametrize("bf16", [False, True])
def test_an_interrupted_run_ends_with_the_same_weights_bit_for_bit(tmp_path, bf16):
    options = dict(max_steps=10, save_steps=3, bf16=bf16, gradient_accumulation_steps=2)
    straight = trainer_for(tmp_path / "straight", **options)
    straight.train()
    with pytest.raises(KeyboardInterrupt):
        trainer_for(tmp_path / "stopped", callbacks=[StopAt(8)], **options).train()
    resumed = trainer_for(tmp_path / "stopped", **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "stopped" / "checkpoint-6"))
    assert resumed.state.global_step == 10
    assert same_weights(straight.draft, resumed.draft)


def test_a_checkpoint_is_a_draft(tmp_path):
    trainer = trainer_for(tmp_path, max_steps=2, save_steps=2, num_hidden_layers=2)
    trainer.train()
    loaded = LlamaForCausalLMEagle3.from_pretrained(tmp_path / "checkpoint-2")
    assert same_weights(loaded, trainer.draft)


def test_training_goes_on_from_a_given_draft(tmp_path):
    target = toy_target()
    draft = toy_draft(target)
    before = copy.deepcopy(draft.state_dict())
    trainer_for(tmp_path, target=target, model=draft, max_steps=2, draft_vocab_size=None).train()
    assert torch.equal(draft.d2t, before["d2t"]) and not torch.equal(draft.fc.weight, before["fc.weight"])


def test_options_that_contradict_a_given_draft_are_refused(tmp_path):
    target = toy_target()
    for option in ({"num_hidden_layers": 2}, {"embed_fusion": "all"}, {"init_layers": True}, {"draft_vocab_size": 50}):
        options = {"draft_vocab_size": None} | option
        with pytest.raises(ValueError, match=f"{next(iter(option))} is .* given draft has"):
            trainer_for(tmp_path, target, model=toy_draft(target), **options)


def test_rows_of_single_answer_tokens_teach_nothing_and_are_refused(tmp_path):
    def only_one(row):
        return {"assistant_masks": [int(i == 8) for i in range(len(row["input_ids"]))]}

    with pytest.raises(ValueError, match="supervised"):
        trainer_for(tmp_path, rows=toy_rows(4).map(only_one))


def test_raw_conversations_are_tokenised_by_the_trainer(tmp_path, caplog):
    turns = [{"role": "user", "content": "a1"}, {"role": "assistant", "content": "a2 a3 a4 a5"}]
    rows = Dataset.from_list([{"messages": turns}] * 8 + [{"messages": turns[:1]}])
    with caplog.at_level("WARNING"):
        trainer_for(tmp_path, rows=rows, max_steps=1).train()
    assert "8 rows to train on, dropped: 1 (no assistant turn)" in caplog.text


@pytest.mark.slow
def test_two_processes_train_one_draft(tmp_path):
    """By DDP, in a process group of its own: both end with the same weights as one process with both batches."""
    code = """
    import sys, torch
    sys.path.insert(0, sys.argv[1])
    from test_trainer import trainer_for
    trainer = trainer_for(sys.argv[2], max_steps=2, per_device_train_batch_size=2, optim="sgd", max_grad_norm=0.0)
    trainer.train()
    torch.save(trainer.draft.state_dict(), f"{sys.argv[2]}/rank{trainer.args.process_index}.pt")
    trainer.accelerator.end_training()
    """
    (tmp_path / "script.py").write_text(textwrap.dedent(code))
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += [tmp_path / "script.py", Path(__file__).parent, tmp_path / "two"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *map(str, command)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    one = trainer_for(tmp_path / "one", max_steps=2, per_device_train_batch_size=4, optim="sgd", max_grad_norm=0.0)
    one.train()
    for rank in range(2):
        weights = torch.load(tmp_path / "two" / f"rank{rank}.pt")
        for name, value in one.draft.state_dict().items():
            torch.testing.assert_close(weights[name], value, atol=1e-6, rtol=1e-5)


def test_a_draft_of_another_target_is_refused(tmp_path):
    with pytest.raises(ValueError, match="hidden_size 32.* 64"):
        trainer_for(tmp_path, toy_target(hidden_size=64), model=toy_draft(toy_target()), draft_vocab_size=None)


def test_data_without_a_supervised_token_stops_before_the_first_step(tmp_path):
    rows = toy_rows(4).map(lambda row: {"assistant_masks": [0] * len(row["input_ids"])})
    target = toy_target()
    for model in (None, toy_draft(target)):
        with pytest.raises(ValueError, match="supervised"):
            trainer_for(tmp_path, target, rows, model, draft_vocab_size=None)


def test_a_tokenizer_of_another_target_is_refused(tmp_path):
    tokenizer = toy_tokenizer()
    tokenizer.add_tokens(["more"])
    for wrong, message in ((tokenizer, "one of 65 tokens, the target has 64"), (None, "processing_class is none")):
        with pytest.raises(ValueError, match=message):
            Eagle3Trainer(toy_target(), config(tmp_path), toy_rows(4), processing_class=wrong)


def test_a_loss_that_is_not_finite_stops_the_training_and_says_where(tmp_path):
    target = toy_target()
    target.lm_head.weight.data[7] = float("nan")
    with pytest.raises(ValueError, match="loss is nan at step 0.*learning_rate"):
        trainer_for(tmp_path, target=target).train()


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"ttt_steps": 0}, "ttt_steps is 0"),
        ({"max_length": 4}, "max_length 4.*raise it to 5"),
        ({"gradient_checkpointing": True}, "gradient_checkpointing is not available"),
        ({"embed_fusion": "none"}, "embed_fusion is 'none'"),
    ],
)
def test_an_impossible_option_is_refused(tmp_path, option, message):
    with pytest.raises(ValueError, match=message):
        trainer_for(tmp_path, **option)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shards", ["1GB", "20KB"])
def test_a_target_loads_from_one_file_or_shards_with_tied_or_untied_head(tmp_path, tied, shards):
    target = toy_target(tie_word_embeddings=tied)
    target.save_pretrained(tmp_path, max_shard_size=shards)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1 or shards == "1GB"
    loaded = load_target(str(tmp_path), dtype="float32", attn_implementation="eager")
    assert same_weights(loaded, target) and not any(p.requires_grad for p in loaded.parameters())
    trainer = trainer_for(tmp_path / "draft", target=loaded, max_steps=1)
    trainer.train()


def test_a_target_that_is_no_llama_is_refused(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=16)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="'gpt2'; only 'llama'"):
        load_target(str(tmp_path))


def test_tensorboard_gets_the_metrics(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trainer_for(tmp_path, report_to="tensorboard", max_steps=2, logging_steps=1).train()
    folders = {path.parent for path in tmp_path.rglob("events.out.tfevents*")}
    tags = set()
    for folder in folders:
        tags |= set(EventAccumulator(str(folder)).Reload().Tags()["scalars"])
    assert "train/estimated_tau" in tags and "train/tokens_per_second" in tags
    shutil.rmtree(tmp_path)
