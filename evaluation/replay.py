"""tau without decoding: which draft tokens the target would accept, by teacher forcing on its own greedy text.

    answers = greedy_answers(target, prompts, max_new_tokens=64, eos_ids=end_of_turn_ids(target))  # once a target
    accepted = replay(target, draft, prompts, answers, num_draft_tokens=3)                         # every draft
    figures = tau_of(accepted, answers, num_draft_tokens=3)

One target pass over prompt and answer, and one unroll of K draft steps, instead of a pass for every few tokens. That
is exact: as long as all earlier draft tokens were right, the tokens fed by the unroll are those the draft proposed
itself, and the unroll equals K cached steps from every slot. In fp32 `acceptance.greedy_chain` counts the same; in
bf16 passes of another shape round differently, and a near-tie may fall the other way.

Definition: as in acceptance.py, tau = new tokens / target passes after the prompt's.

Shapes: B batch, P prompt tokens, n answer tokens, S = P + n, H hidden, D draft vocabulary, K draft tokens.
"""

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, PreTrainedModel

from eagle3_llama.trainer.frozen_target import capture


@torch.no_grad()
def greedy_answers(
    target: PreTrainedModel, prompts: list[list[int]], max_new_tokens: int, eos_ids: list[int], batch_size: int = 8
) -> list[list[int]]:
    """The target's greedy tokens after every prompt, up to and including the end of the turn.

    In batches, padded on the left: a near-tie may fall otherwise than alone, but the text is the target's either way.
    Not `target.generate`, which would apply the penalties of the target's generation_config; `greedy_chain` has none.
    """
    answers = []
    for start in range(0, len(prompts), batch_size):
        answers += greedy_batch(target, prompts[start : start + batch_size], max_new_tokens, eos_ids)
    return answers


def greedy_batch(
    target: PreTrainedModel, prompts: list[list[int]], max_new_tokens: int, eos_ids: list[int]
) -> list[list[int]]:
    """Greedy answers of one batch."""
    ids, mask = (
        pad_sequence(rows, batch_first=True, padding_side="left").to(target.device)  # [B,P]
        for rows in ([torch.tensor(p) for p in prompts], [torch.ones(len(p), dtype=torch.long) for p in prompts])
    )
    positions, cache, tokens = (mask.cumsum(-1) - 1).clamp(min=0), DynamicCache(), []
    ended, ends = torch.zeros_like(mask[:, 0], dtype=torch.bool), torch.tensor(list(eos_ids), device=target.device)
    while len(tokens) < max_new_tokens and not ended.all():
        output = target(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            cache=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        ids = output.logits[:, -1:].argmax(-1)  # [B,1]
        tokens.append(ids[:, 0])
        ended |= torch.isin(ids[:, 0], ends)
        mask, positions = torch.cat([mask, torch.ones_like(ids)], dim=1), positions[:, -1:] + 1
    rows = torch.stack(tokens, dim=1).tolist()
    stops = (next((i + 1 for i, token in enumerate(row) if token in eos_ids), len(row)) for row in rows)
    return [row[:stop] for row, stop in zip(rows, stops, strict=True)]


@torch.no_grad()
def replay(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    prompts: list[list[int]],
    answers: list[list[int]],
    num_draft_tokens: int,
    features: list[Tensor] | None = None,
) -> list[list[int]]:
    """Accepted draft tokens of every target pass, a list a prompt, if its answer were decoded by a greedy chain.

    `features` are `captured_states` of the same answers, which serve every draft that captures these layers.
    """
    if features is None:
        features = captured_states(target, draft.config.eagle_aux_hidden_state_layer_ids, prompts, answers)
    return [
        walk(acceptable(draft, prompt, answer, num_draft_tokens, states).tolist())
        for prompt, answer, states in zip(prompts, answers, features, strict=True)
    ]


@torch.no_grad()
def captured_states(
    target: PreTrainedModel, layers: list[int], prompts: list[list[int]], answers: list[list[int]]
) -> list[Tensor]:
    """Captured states [1,S,3H] of the target over each prompt and its answer."""
    rows = (
        torch.tensor([prompt + answer], device=target.device) for prompt, answer in zip(prompts, answers, strict=True)
    )
    return [capture(target, ids, None, layers)[0] for ids in rows]


def acceptable(
    draft: PreTrainedModel, prompt: list[int], answer: list[int], num_draft_tokens: int, features: Tensor
) -> Tensor:
    """How many tokens of a chain after answer token i the target would accept, for all but the last of them [n-1]."""
    slots, right, features = len(answer) - 1, [], features.to(draft.device)
    ids = torch.tensor([prompt + answer], device=draft.device)  # [1,S]
    states = draft(ids, features, ttt_steps=num_draft_tokens).hidden_states  # K of [1,S,H]
    for k, state in enumerate(states):
        # After answer token i the chain starts at slot P - 1 + i; its token k is compared with answer token i + 1 + k.
        # Past the end of the answer nothing counts.
        tokens = ids[0, len(prompt) + 1 + k :]
        first = len(prompt) - 1
        drafted = draft.to_target_ids(draft.lm_head(state[0, first : first + len(tokens)]).argmax(-1))
        right.append(torch.nn.functional.pad(drafted == tokens, (0, slots - len(tokens))))
    return torch.stack(right).long().cumprod(0).sum(0)


def walk(acceptable: list[int]) -> list[int]:
    """The passes that a decoding loop makes: from the first token on by accepted + 1."""
    accepted, i = [], 0
    while i < len(acceptable):
        accepted.append(acceptable[i])
        i += acceptable[i] + 1
    return accepted


def tau_of(
    accepted: list[list[int]], answers: list[list[int]], num_draft_tokens: int
) -> dict[str, float | int | list[float]]:
    """tau, acceptance per position, target passes and new tokens, as `acceptance.measure` defines them.

    Raises:
        ValueError: no answer needs a pass of the decoding loop.
    """
    counts = torch.tensor([count for passes in accepted for count in passes])
    if not len(counts):
        raise ValueError("every answer ended at its first token: the prompts do not fit this target's chat template")
    new_tokens = sum(len(answer) - 1 for answer in answers)  # the prompt's pass made the first
    return {
        "tau": new_tokens / len(counts),
        "acceptance_per_position": [(counts > i).float().mean().item() for i in range(num_draft_tokens)],
        "target_passes": len(counts),
        "new_tokens": new_tokens,
    }
