"""Acceptance length and speed of a draft: a plain greedy chain on real prompts, batch 1.

Definition: tau = new tokens / target forward passes of the decoding loop (the prompt's pass is not counted). It
includes the one token that the target itself adds in each pass, so decoding without a draft has tau 1.

Shapes: B batch (1), P prompt tokens, K draft tokens, H hidden.
"""

import time
from dataclasses import dataclass, field

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import DynamicCache, PreTrainedModel

DEFINITION = "tau = new tokens / target passes after the prompt's, the target's own token included (plain decoding: 1)"


@dataclass
class Chain:
    """One greedy generation: `tokens` new ids, `accepted` draft tokens of each target pass, seconds of the loop."""

    tokens: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    seconds: float = 0.0


def run_target(target: PreTrainedModel, ids: Tensor, cache: DynamicCache, layers: list[int]) -> tuple[Tensor, Tensor]:
    """Target pass over ids [B,S] -> (its greedy next tokens [B,S], captured states [B,S,3H])."""
    output = target(input_ids=ids, cache=cache, use_cache=True, output_hidden_states=layers)
    return output.logits.argmax(-1), torch.cat([output.hidden_states[i] for i in layers], dim=-1)


def propose(draft: PreTrainedModel, ids: Tensor, features: Tensor, cache: DynamicCache, num_tokens: int) -> Tensor:
    """Chain of K greedy draft tokens [B,K] after the newest token of ids [B,S], whose states are features [B,S,3H].

    Slot i pairs features[i] with ids[i], the token after it. The cache keeps these slots only.
    """
    output = draft(ids, features, cache=cache, use_cache=True)
    length = cache.get_seq_length()
    chain = [draft.to_target_ids(output.logits[:, -1:].argmax(-1))]
    for _ in range(num_tokens - 1):
        output = draft(chain[-1], output.hidden_states[:, -1:], cache=cache, use_cache=True)
        chain.append(draft.to_target_ids(output.logits[:, -1:].argmax(-1)))
    drop_newest(cache, cache.get_seq_length() - length)
    return torch.cat(chain, dim=1)


def drop_newest(cache: DynamicCache, count: int) -> None:
    """Remove the newest slots. A negative crop counts from the end; transformers 5.24 refuses a positive one."""
    if count:
        cache.crop(-count)


@torch.no_grad()
def greedy_chain(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    prompt: list[int],
    num_draft_tokens: int,
    max_new_tokens: int,
    eos_ids: list[int],
) -> Chain:
    """Generate greedily with the draft: the target's own tokens, in fewer passes."""
    layers = draft.config.eagle_aux_hidden_state_layer_ids
    target_cache, draft_cache, chain = DynamicCache(), DynamicCache(), Chain()
    ids = torch.tensor([prompt], device=target.device)
    next_ids, features = run_target(target, ids, target_cache, layers)
    newest = next_ids[:, -1:]
    chain.tokens.append(newest.item())
    paired = torch.cat([ids[:, 1:], newest], dim=1)  # the token after each captured state
    start = time.perf_counter()
    while chain.tokens[-1] not in eos_ids and len(chain.tokens) < max_new_tokens:
        proposal = propose(draft, paired, features, draft_cache, num_draft_tokens)
        verified, features = run_target(target, torch.cat([newest, proposal], 1), target_cache, layers)  # [B,K+1]
        accepted = int((proposal == verified[:, :-1]).long().cumprod(-1).sum())
        new = verified[0, : accepted + 1].tolist()  # the accepted ones and the target's own
        new = new[: max_new_tokens - len(chain.tokens)]
        stop = next((i for i, token in enumerate(new) if token in eos_ids), len(new) - 1)
        chain.tokens += new[: stop + 1]
        chain.accepted.append(min(accepted, stop + 1))
        drop_newest(target_cache, num_draft_tokens - accepted)
        paired, features = verified[:, : accepted + 1], features[:, : accepted + 1]
        newest = verified[:, accepted, None]
    chain.seconds = time.perf_counter() - start
    return chain


@torch.no_grad()
def greedy_plain(target: PreTrainedModel, prompt: list[int], max_new_tokens: int, eos_ids: list[int]) -> Chain:
    """The same without a draft: one target pass a token."""
    cache, chain = DynamicCache(), Chain()
    output = target(input_ids=torch.tensor([prompt], device=target.device), cache=cache, use_cache=True)
    chain.tokens.append(output.logits[0, -1].argmax().item())
    start = time.perf_counter()
    while chain.tokens[-1] not in eos_ids and len(chain.tokens) < max_new_tokens:
        ids = torch.tensor([chain.tokens[-1:]], device=target.device)
        output = target(input_ids=ids, cache=cache, use_cache=True)
        chain.tokens.append(output.logits[0, -1].argmax().item())
    chain.seconds = time.perf_counter() - start
    return chain


def measure(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    prompts: list[list[int]],
    num_draft_tokens: int = 3,
    max_new_tokens: int = 64,
    eos_ids: list[int] = (),
) -> dict[str, float | int | list[float] | str]:
    """Decode every prompt with and without the draft.

    Returns tau, acceptance per position (share of passes in which draft token i and all before it were accepted),
    tokens per second of both loops (prompt excluded), and how many outputs are the same.

    Raises:
        ValueError: no prompt, or none that needs a pass of the decoding loop.
    """
    if not prompts:
        raise ValueError("no held-out prompt to measure on: raise --eval_samples or --max_prompt_length")
    chains, plain = [], []
    for prompt in tqdm(prompts, desc="decoding held-out prompts"):
        chains.append(greedy_chain(target, draft, prompt, num_draft_tokens, max_new_tokens, eos_ids))
        plain.append(greedy_plain(target, prompt, max_new_tokens, eos_ids))
    accepted = torch.tensor([count for chain in chains for count in chain.accepted])
    if not len(accepted):
        raise ValueError("every answer ended at its first token: the prompts do not fit this target's chat template")
    new_tokens = sum(len(chain.tokens) - 1 for chain in chains)  # the prompt's pass made the first
    with_draft = new_tokens / sum(chain.seconds for chain in chains)
    without = sum(len(chain.tokens) - 1 for chain in plain) / sum(chain.seconds for chain in plain)
    return {
        "tau": new_tokens / len(accepted),
        "acceptance_per_position": [(accepted > i).float().mean().item() for i in range(num_draft_tokens)],
        "tokens_per_second": with_draft,
        "tokens_per_second_without_draft": without,
        "speedup": with_draft / without,
        "identical_outputs": sum(a.tokens == b.tokens for a, b in zip(chains, plain, strict=True)),
        "prompts": len(prompts),
        "new_tokens": new_tokens,
        "target_passes": len(accepted),
        "mode": f"greedy chain of {num_draft_tokens} draft tokens, batch 1, at most {max_new_tokens} new tokens",
        "dtype": str(target.dtype).removeprefix("torch."),
    }
