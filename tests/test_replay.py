"""tau in training: replaying counts what decoding counts, and tau chooses the checkpoint and the end."""

import functools
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from test_run import call, recipe  # noqa: F401 (a fixture)
from test_trainer import StopAt, config, same_weights, trainer_for
from toy import ALL_SHAPES, toy_draft, toy_rows, toy_target, toy_tokenizer
from transformers import TrainerState

from eagle3_llama.evaluation.acceptance import greedy_chain, greedy_plain, measure
from eagle3_llama.evaluation.replay import greedy_answers, replay, tau_of
from eagle3_llama.modeling_eagle3_llama import LlamaForCausalLMEagle3
from eagle3_llama.trainer.eagle3_trainer import Eagle3Trainer
from eagle3_llama.trainer.frozen_target import capture
from eagle3_llama.trainer.loss import chain_loss
from eagle3_llama.trainer.training_tau import StopWhenTauFalls

PROMPTS = [[4, 7, 8, 9, 2, 5], [4, 20, 2, 5], [9], list(range(6, 60))]


@functools.cache
def taught(layers: int, fusion: str, seed: int = 0):
    """A target, and a draft that has half learned its answers to the prompts: some of its tokens are accepted."""
    target = toy_target(seed).requires_grad_(False)
    draft = toy_draft(target, num_hidden_layers=layers, embed_fusion=fusion)
    optimizer = torch.optim.Adam(draft.parameters(), lr=1e-2)
    rows = zip(PROMPTS, greedy_answers(target, PROMPTS, 40, []), strict=True)
    rows = [torch.tensor([prompt + answer]) for prompt, answer in rows]
    for ids in rows * 6:
        features, states = capture(target, ids, [ids.shape[1]], draft.config.eagle_aux_hidden_state_layer_ids)
        output = draft(ids, features, ttt_steps=3).hidden_states
        head = target.get_output_embeddings().weight
        loss = chain_loss(output, draft.lm_head.weight, states, head, torch.ones_like(ids), draft.kept_ids()).loss
        (loss / ids.shape[1]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return target, draft.eval()


@pytest.mark.parametrize("batch_size", [1, 3])
def test_the_answers_are_the_targets_greedy_text(batch_size):
    target = toy_target()
    alone = [greedy_plain(target, prompt, 20, []).tokens for prompt in PROMPTS]
    for eos in ([], [alone[0][0]], [alone[1][9], alone[3][5]]):
        expected = [greedy_plain(target, prompt, 20, eos).tokens for prompt in PROMPTS]
        assert greedy_answers(target, PROMPTS, 20, eos, batch_size) == expected


def test_penalties_of_the_targets_generation_config_do_not_reach_the_answers():
    target = toy_target()
    expected = greedy_answers(target, PROMPTS, 20, [])
    target.generation_config.update(repetition_penalty=5.0, suppress_tokens=[25])
    assert greedy_answers(target, PROMPTS, 20, []) == expected


@pytest.mark.parametrize(
    ("layers", "fusion", "num_draft_tokens"), [(*shape, 3) for shape in ALL_SHAPES] + [(2, "first", 1)]
)
def test_replaying_counts_every_pass_as_decoding_does(layers, fusion, num_draft_tokens):
    target, draft = taught(layers, fusion)
    text = greedy_answers(target, PROMPTS, 40, [])
    seen = set()
    # Ended by the length, by two ids in the middle of an answer, and by its very first token.
    for length, eos in ((1, []), (2, []), (23, []), (40, [text[1][19], text[3][11]]), (40, [text[0][0]])):
        answers = greedy_answers(target, PROMPTS, length, eos)
        chains = [greedy_chain(target, draft, prompt, num_draft_tokens, length, eos) for prompt in PROMPTS]
        assert [chain.tokens for chain in chains] == answers
        accepted = replay(target, draft, PROMPTS, answers, num_draft_tokens)
        assert accepted == [chain.accepted for chain in chains]
        seen |= {count for passes in accepted for count in passes}
    assert seen == set(range(num_draft_tokens + 1))  # from none to all of them


def test_replaying_gives_the_figures_of_measure():
    target, draft = taught(2, "first")
    figures = measure(target, draft, PROMPTS, 3, 40, [])
    answers = greedy_answers(target, PROMPTS, 40, [])
    replayed = tau_of(replay(target, draft, PROMPTS, answers, 3), answers, 3)
    assert replayed == {key: figures[key] for key in replayed} and replayed["tau"] > 1.2


def test_answers_of_one_token_give_no_tau():
    with pytest.raises(ValueError, match="first token"):
        tau_of([[], []], [[7], [9]], 3)


# ---- in training ----

TAU = dict(eval_strategy="steps", eval_steps=2, save_steps=2, eval_tau_prompts=2, eval_tau_new_tokens=8)
BEST = TAU | dict(metric_for_best_model="tau", load_best_model_at_end=True, eval_tau_patience=2)


def series(trainer, name="eval_tau"):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def give_out(monkeypatch, *taus):
    """The evaluations of all trainers to come measure these, in this order; returns the ones not yet given out."""
    left = list(taus)
    monkeypatch.setattr(Eagle3Trainer, "_measure_tau", lambda self: {"tau": left.pop(0)})
    return left


def test_decoded_and_replayed_tau_agree_as_the_draft_learns(tmp_path):
    options = dict(max_steps=60, eval_steps=30, save_steps=30, eval_tau_prompts=6, eval_tau_new_tokens=24)
    trainer = trainer_for(tmp_path, **(TAU | options))
    trainer.train()
    decoded, replayed = series(trainer), series(trainer, "eval_replayed_tau")
    assert decoded == pytest.approx(replayed, rel=0.02)
    assert len(decoded) == 2 and decoded[-1] > 1.1
    entry = next(x for x in trainer.state.log_history if "eval_tau" in x)
    assert entry["eval_acceptance/0"] >= entry["eval_acceptance/1"] >= entry["eval_acceptance/2"] >= 0


@pytest.mark.parametrize("bf16", [False, True])
def test_measuring_in_training_changes_neither_the_draft_nor_a_later_step(tmp_path, bf16):
    without = trainer_for(tmp_path / "without", bf16=bf16)
    without.train()
    trainer = trainer_for(tmp_path / "with", bf16=bf16, **TAU)
    trainer.train()
    assert len(series(trainer)) == 3 and same_weights(trainer.draft, without.draft)
    assert trainer.draft.lm_head.weight.dtype == torch.float32
    state = torch.get_rng_state()
    trainer._measure_tau()
    assert torch.equal(torch.get_rng_state(), state)


def test_it_measures_the_draft_as_it_will_be_used(tmp_path):
    """In the target's dtype and without the autocast of the training: the figures of `measure` on the saved draft."""
    target = toy_target()
    trainer = trainer_for(tmp_path, target, max_steps=20, bf16=True, **(TAU | dict(eval_steps=20, save_steps=20)))
    trainer.train()
    draft = LlamaForCausalLMEagle3.from_pretrained(tmp_path / "checkpoint-20").bind_target(target).eval()
    figures = measure(target, draft, trainer.tau_prompts, 3, 8, [2])
    assert series(trainer) == [pytest.approx(figures["tau"], abs=1e-6)]


def test_the_best_draft_by_tau_is_kept_and_training_stops_when_tau_falls(tmp_path, monkeypatch):
    left = give_out(monkeypatch, 1.5, 1.9, 1.8, 1.9, 2.5)
    trainer = trainer_for(tmp_path, max_steps=20, num_hidden_layers=2, save_total_limit=2, **BEST)
    trainer.train()
    assert trainer.state.global_step == 8 and left == [2.5]
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-4")
    best = LlamaForCausalLMEagle3.from_pretrained(tmp_path / "checkpoint-4")
    last = LlamaForCausalLMEagle3.from_pretrained(tmp_path / "checkpoint-8")
    assert same_weights(trainer.draft, best) and not same_weights(trainer.draft, last)


def test_a_run_that_stopped_ends_with_the_same_draft_when_it_is_started_again(tmp_path, monkeypatch):
    give_out(monkeypatch, 1.9, 1.8, 1.7)
    first = trainer_for(tmp_path, max_steps=20, **BEST)
    first.train()
    again = trainer_for(tmp_path, max_steps=20, **BEST)  # nothing is left to measure: it would raise
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert same_weights(first.draft, again.draft)
    assert not (tmp_path / "checkpoint-7").exists() and not (tmp_path / "checkpoint-8").exists()


def test_an_interrupted_run_stops_where_a_straight_one_does(tmp_path, monkeypatch):
    """The evaluations without a better tau are counted over the interruption."""
    give_out(monkeypatch, 1.9, 1.8, 1.7)
    straight = trainer_for(tmp_path / "straight", max_steps=20, **BEST)
    straight.train()
    left = give_out(monkeypatch, 1.9, 1.8, 1.7, 1.6)
    with pytest.raises(KeyboardInterrupt):
        trainer_for(tmp_path / "stopped", max_steps=20, callbacks=[StopAt(5)], **BEST).train()
    resumed = trainer_for(tmp_path / "stopped", max_steps=20, **BEST)
    resumed.train(resume_from_checkpoint=str(tmp_path / "stopped" / "checkpoint-4"))
    assert resumed.state.global_step == straight.state.global_step == 6 and left == [1.6]
    assert same_weights(straight.draft, resumed.draft)


def test_a_resumed_run_measures_and_ends_as_a_straight_one(tmp_path):
    options = BEST | dict(max_steps=8, eval_tau_patience=0, bf16=True)
    straight = trainer_for(tmp_path / "straight", **options)
    straight.train()
    with pytest.raises(KeyboardInterrupt):
        trainer_for(tmp_path / "stopped", callbacks=[StopAt(5)], **options).train()
    resumed = trainer_for(tmp_path / "stopped", **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "stopped" / "checkpoint-4"))
    assert series(resumed) == series(straight) and len(series(straight)) == 4
    assert same_weights(straight.draft, resumed.draft)


def test_the_best_adapter_by_tau_is_kept(tmp_path, monkeypatch):
    from peft import LoraConfig

    target = toy_target()
    options = BEST | dict(draft_vocab_size=None, max_steps=8)
    trainer = Eagle3Trainer(
        target=target,
        args=config(tmp_path, **options),
        train_dataset=toy_rows(32),
        eval_dataset=toy_rows(8, seed=9),
        processing_class=toy_tokenizer(),
        model=toy_draft(target),
        peft_config=LoraConfig(r=4, target_modules=["fc", "q_proj"]),
    )
    assert trainer._measure_tau()["tau"] >= 1
    give_out(monkeypatch, 1.9, 1.8, 1.7)
    trainer.train()
    best, last = (adapter_weights(tmp_path / f"checkpoint-{step}") for step in (2, 6))
    loaded = {name: value for name, value in trainer.model.state_dict().items() if "lora_" in name}
    assert {name.replace(".default", "") for name in loaded} == best.keys()
    assert all(torch.equal(value, best[name.replace(".default", "")]) for name, value in loaded.items())
    assert not all(torch.equal(best[name], last[name]) for name in best)


def adapter_weights(folder):
    from safetensors.torch import load_file

    return load_file(folder / "adapter_model.safetensors")


def test_the_command_keeps_the_best_draft_by_tau(tmp_path, monkeypatch, recipe):  # noqa: F811
    """By flags; what the output folder holds in the end is that draft, however often the command is given."""
    give_out(monkeypatch, 1.9, 1.8, 1.7, 1.9, 1.9)
    flags = "--metric_for_best_model tau --load_best_model_at_end --eval_tau_prompts 2 --eval_tau_patience 2".split()
    arguments = [*recipe(max_steps=20, eval_strategy="steps", eval_steps=2, measure_prompts=0), *flags]
    for _ in range(2):
        call(monkeypatch, arguments)
        state = json.loads((tmp_path / "draft" / "checkpoint-6" / "trainer_state.json").read_text())
        assert [x["eval_tau"] for x in state["log_history"] if "eval_tau" in x] == [1.9, 1.8, 1.7]
        drafts = (tmp_path / "draft", tmp_path / "draft" / "checkpoint-2", tmp_path / "draft" / "checkpoint-6")
        final, best, last = map(LlamaForCausalLMEagle3.from_pretrained, drafts)
        assert same_weights(final, best) and not same_weights(final, last)
        assert not (tmp_path / "draft" / "checkpoint-8").exists()


@pytest.mark.slow
def test_two_processes_measure_the_same_as_one(tmp_path):
    """Each its share of the prompts; three prompts for two."""
    code = """
    import json, sys
    from pathlib import Path
    sys.path.insert(0, sys.argv[1])
    from test_replay import TAU
    from test_trainer import trainer_for
    trainer = trainer_for(sys.argv[2], **(TAU | {"eval_tau_prompts": 3}))
    # Not to stdout, where the lines of two processes can run into one another.
    Path(sys.argv[2], f"rank{trainer.args.process_index}.json").write_text(json.dumps(trainer._measure_tau()))
    trainer.accelerator.end_training()
    """
    (tmp_path / "script.py").write_text(textwrap.dedent(code))
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += [tmp_path / "script.py", Path(__file__).parent, tmp_path]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *map(str, command)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    one = trainer_for(tmp_path, **(TAU | {"eval_tau_prompts": 3}))._measure_tau()
    assert [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1)] == [one, one]


@pytest.mark.parametrize(
    ("taus", "stops"),
    [
        ([], False),
        ([1.5, 1.4], False),
        ([1.5, 1.4, 1.5], True),
        ([1.5, 1.4, 1.6], False),
        ([1.5, 1.6, 1.4], False),
        ([1.5, 1.6, 1.4, 1.3], True),
    ],
)
def test_it_stops_after_two_evaluations_without_a_better_tau(tmp_path, taus, stops):
    history = [{"eval_tau": tau, "eval_replayed_tau": 9.0} for tau in taus] + [{"loss": 1.0}]
    assert StopWhenTauFalls(2).fell(config(tmp_path, **BEST), TrainerState(log_history=history)) == stops


def test_a_checkpoint_of_another_draft_is_refused_by_name(tmp_path):
    trainer_for(tmp_path, max_steps=2, save_steps=2, num_hidden_layers=2).train()
    with pytest.raises(ValueError, match="unexpected.*layers.1.mlp"):
        trainer_for(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eval_tau_prompts": 4}, "eval_tau_prompts is 4, but nothing is evaluated"),
        (BEST | {"eval_tau_prompts": 0}, "metric_for_best_model is 'tau': set eval_tau_prompts"),
        (BEST | {"greater_is_better": False}, "higher tau is better"),
        (BEST | {"save_steps": 4}, "save_steps 4.*eval_steps 2"),
        (TAU | {"eval_tau_prompt_length": 3}, "eval_tau_prompt_length 3"),
    ],
)
def test_options_of_tau_that_cannot_work_are_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        trainer_for(tmp_path, **options)


def test_tau_without_held_out_rows_is_refused(tmp_path):
    with pytest.raises(ValueError, match="give an eval_dataset"):
        Eagle3Trainer(toy_target(), config(tmp_path, **TAU), toy_rows(8), processing_class=toy_tokenizer())
