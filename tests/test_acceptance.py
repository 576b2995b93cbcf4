"""Measuring: the chain gives the target's own tokens, and tau counts what it says it counts."""

import pytest
import torch
from toy import toy_draft, toy_target

from eagle3_llama.evaluation.acceptance import greedy_chain, greedy_plain, measure
from eagle3_llama.modeling_eagle3_llama import Eagle3Output

PROMPTS = [[4, 7, 8, 9, 2, 5], [4, 20, 2, 5], [9], list(range(6, 60))]


def generate(target, prompt, max_new_tokens, eos):
    ids = torch.tensor([prompt])
    output = target.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_new_tokens, eos_token_id=eos
    )
    return output[0, len(prompt) :].tolist()


@pytest.mark.parametrize("num_draft_tokens", [1, 5])
@pytest.mark.parametrize(("layers", "fusion"), [(1, "first"), (2, "all"), (3, "first")])
def test_the_chain_gives_the_tokens_of_generate(layers, fusion, num_draft_tokens):
    target = toy_target()
    draft = toy_draft(target, num_hidden_layers=layers, embed_fusion=fusion)
    for prompt in PROMPTS:
        # An end-of-turn id that comes early in this answer, one in its middle, and none.
        answer = generate(target, prompt, 20, None)
        for eos in ([], [answer[0]], [answer[9]]):
            expected = generate(target, prompt, 20, eos or None)
            chain = greedy_chain(target, draft, prompt, num_draft_tokens, 20, eos)
            assert chain.tokens == expected
            assert chain.tokens == greedy_plain(target, prompt, 20, eos).tokens


class Oracle:
    """A draft that knows the answer: it proposes the target's own greedy future."""

    def __init__(self, config, sequence):
        self.config, self.sequence = config, sequence

    def to_target_ids(self, ids):
        return ids

    def __call__(self, ids, hidden, cache, use_cache):
        nothing = torch.zeros(1, 1, ids.shape[1], 1)
        cache.update(nothing, nothing, 0)
        position = cache.get_seq_length() + 1  # slot p predicts token p + 2
        logits = torch.zeros(1, ids.shape[1], 64)
        if position < len(self.sequence):
            logits[0, -1, self.sequence[position]] = 1
        return Eagle3Output(logits, torch.zeros(1, ids.shape[1], 32), cache)


@pytest.mark.parametrize("num_draft_tokens", [1, 3, 5])
def test_a_draft_that_knows_the_future_reaches_k_plus_one(num_draft_tokens):
    target = toy_target()
    prompt, steps = [4, 7, 8, 9, 2, 5], 6
    new_tokens = 1 + steps * (num_draft_tokens + 1)
    oracle = Oracle(toy_draft(target).config, prompt + generate(target, prompt, new_tokens, None))
    figures = measure(target, oracle, [prompt], num_draft_tokens, new_tokens, [])
    assert figures["tau"] == num_draft_tokens + 1
    assert figures["acceptance_per_position"] == [1.0] * num_draft_tokens
    assert figures["target_passes"] == steps and figures["identical_outputs"] == 1


def test_an_untrained_draft_costs_passes_but_changes_nothing():
    target = toy_target()
    figures = measure(target, toy_draft(target), PROMPTS, 3, 24, [])
    assert figures["identical_outputs"] == len(PROMPTS)
    assert 1 <= figures["tau"] < 1.5
    assert figures["tau"] == pytest.approx(1 + sum(figures["acceptance_per_position"]), abs=0.1)
    assert figures["tokens_per_second"] > 0 and figures["speedup"] > 0


def test_nothing_to_measure_is_an_error():
    target = toy_target()
    with pytest.raises(ValueError, match="eval_samples"):
        measure(target, toy_draft(target), [])
    first = generate(target, PROMPTS[0], 1, None)
    with pytest.raises(ValueError, match="first token"):
        measure(target, toy_draft(target), PROMPTS[:1], 3, 8, first)
