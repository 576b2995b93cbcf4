"""The loss of the training-time test: soft cross entropy against the target, step by step along the chain.

The logits of the draft and the target exist for one chunk of supervised tokens at a time: the chunk's target
distribution is computed once, then loss and gradient of all K steps against it. What stays is the gradient of the
states and the sum over chunks of the head's.

Shapes: B batch, S slots, H hidden, V target vocabulary, D draft vocabulary, K TTT steps, n supervised tokens, c tokens
of a chunk whose target top-1 lies in the draft vocabulary.
Alignment: the target's distribution at token t is for token t + 1. Slot p at step k predicts token p + 2 + k, so it
is compared with the distribution at token t = p + 1 + k, and supervised when tokens t and t + 1 are the assistant's.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from eagle3_llama.modeling_eagle3_llama import document_positions

STEP_DECAY = 0.8  # weight of step k is 0.8^k (EAGLE-3, 2503.01840)
TARGET_CHUNK = 256  # supervised tokens whose full-vocabulary logits exist at one time
# Bytes of one chunk of draft logits in fp32. On the CPU blocks of 32 MB and more are mapped anew, page by page, at
# every allocation, which costs more than the softmax over them. On an accelerator a larger chunk saves passes over the
# head's gradient.
LOGITS_BYTES = {"cpu": 16 << 20, "accelerator": 256 << 20}


@dataclass
class ChainLoss:
    """Sums over this batch, all of them tensors: divide by counts gathered over batches and processes.

    loss: scalar with gradient. correct, supervised [K]: right and all supervised slots of each step. joint,
    joint_supervised [K]: slots right at all steps 0..k, and slots supervised at all of them. covered: supervised
    tokens whose target top-1 lies in the draft vocabulary, of `supervised[0]`.
    """

    loss: Tensor
    correct: Tensor
    supervised: Tensor
    joint: Tensor
    joint_supervised: Tensor
    covered: Tensor


def document_places(mask: Tensor, documents: list[int] | None) -> Tensor:
    """[S]: each token's place in its document, from 0. mask [B,S]."""
    if documents is None:
        return torch.arange(mask.shape[1], device=mask.device)
    return document_positions(documents, mask)[0]


def predicted_tokens(assistant_mask: Tensor, documents: list[int] | None = None) -> Tensor:
    """[B,S] bool: token t and the one after it are the assistant's, so the target's distribution at t is learned.

    Not at a document's first token, since no slot lies before it, nor at its last.
    """
    mask, inner = assistant_mask.bool(), document_places(assistant_mask, documents) > 0
    return F.pad(mask[:, :-1] & mask[:, 1:] & inner[:-1] & inner[1:], (0, 1), value=False)


@torch.no_grad()
def target_distribution(states: Tensor, head: Tensor, kept_ids: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The target at n tokens, from its states [n,H] and head [V,H], seen through the draft vocabulary.

    Returns its probabilities renormalised over the draft vocabulary [n,D] (fp32), its most likely draft id [n], and
    whether that is its top-1 over all V [n].
    """
    probabilities, top1, in_draft = [], [], []
    for chunk in states.split(TARGET_CHUNK):
        # As the target itself computes it, also inside of an autocast region.
        with torch.autocast(chunk.device.type, enabled=False):
            logits = F.linear(chunk, head)  # [chunk,V]
        kept = logits if kept_ids is None else logits.index_select(1, kept_ids)  # [chunk,D]
        best = row_argmax(kept)
        # The maximum over V is several times cheaper than its index, which nothing needs outside of D. A NaN is not
        # less than anything: it stays in, and shows in the loss.
        in_draft.append(~(kept.gather(1, best[:, None])[:, 0] < logits.amax(-1)))
        top1.append(best)
        probabilities.append(kept.softmax(-1, dtype=torch.float32))
    return torch.cat(probabilities), torch.cat(top1), torch.cat(in_draft)


def row_argmax(x: Tensor) -> Tensor:
    """Index [n] of the first maximum of each row of x [n,D]."""
    # On the CPU argmax runs without vector instructions (torch 2.13), amax with them: find the block of 64 that holds
    # the maximum, then its place there.
    if x.shape[1] % 64 or x.device.type != "cpu":
        return x.argmax(-1)
    blocks = x.unflatten(1, (-1, 64))
    block = blocks.amax(-1).argmax(-1)  # [n]
    return block * 64 + blocks[torch.arange(len(x)), block].argmax(-1)


class SoftCrossEntropy(torch.autograd.Function):
    """Loss and gradients of the whole chain, chunk by chunk over the supervised tokens.

    Inputs: whether gradients are wanted; rows, tokens and places in their documents of the supervised [n], places
    ascending; target_states [B,S,H], target_head [V,H], kept_ids [D] or None, head [D,H], K states [B,S,H].
    Outputs: the weighted sum of the loss in fp32; hits [K,n]: the draft's top-1 is the target's; in_draft [n]: the
    target's top-1 lies in the draft vocabulary.
    """

    @staticmethod
    def forward(
        ctx: Any,
        training: bool,
        row: Tensor,
        token: Tensor,
        place: Tensor,
        target_states: Tensor,
        target_head: Tensor,
        kept_ids: Tensor | None,
        head: Tensor,
        *states: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        device = head.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else head.dtype
        weight = head.to(dtype)
        total = torch.zeros((), dtype=torch.float32, device=head.device)
        hits = torch.zeros(len(states), len(row), dtype=torch.bool, device=head.device)
        in_draft = torch.zeros(len(row), dtype=torch.bool, device=head.device)
        d_head = torch.zeros_like(head, dtype=torch.float32) if training and ctx.needs_input_grad[7] else None
        d_states = [torch.zeros_like(state) if training else None for state in states]

        steps = torch.arange(len(states), device=head.device)
        budget = LOGITS_BYTES["cpu" if device == "cpu" else "accelerator"]
        size = max(1, budget // (4 * len(head)))
        for chunk in torch.arange(len(row), device=head.device).split(size):
            probabilities, top1, covered = target_distribution(
                target_states[row[chunk], token[chunk]], target_head, kept_ids
            )
            in_draft[chunk] = covered
            if not covered.all():
                chunk, probabilities, top1 = chunk[covered], probabilities[covered], top1[covered]
            # Step k has no slot for a document's tokens 0..k; they come first.
            skipped = (place[chunk, None] <= steps).sum(0).tolist()
            for k, (state, d_state) in enumerate(zip(states, d_states, strict=True)):
                tokens, wanted, decay = chunk[skipped[k] :], probabilities[skipped[k] :], STEP_DECAY**k
                slots = row[tokens], token[tokens] - 1 - k
                x = state[slots].to(dtype)  # [c,H]
                logits = F.linear(x, weight).float()  # [c,D]
                best = row_argmax(logits)[:, None]
                hits[k, tokens] = best[:, 0] == top1[skipped[k] :]
                logits -= logits.gather(1, best)
                drafted = logits.softmax(-1)
                # log_softmax is logits + log(drafted at best): the row's maximum is 0 now.
                total -= decay * (drafted.gather(1, best).log().sum() + logits.mul_(wanted).sum())
                if d_state is not None:
                    d_logits = drafted.sub_(wanted).to(dtype)
                    d_state[slots] = (d_logits @ weight).mul_(decay).to(d_state.dtype)
                if d_head is not None and dtype == d_head.dtype:
                    d_head.addmm_(d_logits.T, x, alpha=decay)
                elif d_head is not None:
                    d_head.add_(d_logits.T @ x, alpha=decay)
        ctx.mark_non_differentiable(hits, in_draft)
        ctx.save_for_backward(d_head, *d_states)
        ctx.head_dtype = head.dtype
        return total, hits, in_draft

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_total: Tensor, *_: None) -> tuple[Tensor | None, ...]:
        d_head, *d_states = ctx.saved_tensors
        # In place: a second backward through the same graph is autograd's error, not a wrong gradient.
        d_states = [d_state.mul_(d_total) for d_state in d_states]
        return *[None] * 7, None if d_head is None else d_head.mul_(d_total).to(ctx.head_dtype), *d_states


def chain_loss(
    states: tuple[Tensor, ...],
    head: Tensor,
    target_states: Tensor,
    target_head: Tensor,
    assistant_mask: Tensor,
    kept_ids: Tensor | None,
    documents: list[int] | None = None,
) -> ChainLoss:
    """Sum of the loss over all steps and supervised slots, and what the chain got right.

    Args:
        states: K normed draft states [B,S,H]. head: the draft's head [D,H].
        target_states: the target's last hidden state after its final norm [B,S,H]. target_head: [V,H].
        assistant_mask: [B,S], 1 on the assistant's tokens.
        kept_ids: target ids of the draft vocabulary [D], ascending; None when D = V.
        documents: lengths of the documents that the one row [1,S] consists of; the row is one when None.
    """
    wanted, places = predicted_tokens(assistant_mask, documents), document_places(assistant_mask, documents)
    row, token = wanted.nonzero(as_tuple=True)
    by_place = places[token].argsort(stable=True)
    row, token = row[by_place], token[by_place]
    place = places[token]  # n supervised tokens, ascending
    total, hits, in_draft = SoftCrossEntropy.apply(
        torch.is_grad_enabled(), row, token, place, target_states, target_head, kept_ids, head, *states
    )
    alive = alive_supervised = torch.ones_like(wanted)
    counts = []
    for k in range(len(states)):
        real = place > k
        rows, slots = row[real], token[real] - 1 - k
        correct, supervised = torch.zeros_like(wanted), torch.zeros_like(wanted)  # [B,S] by slot
        correct[rows, slots] = hits[k, real]
        supervised[rows, slots] = True
        alive, alive_supervised = alive & correct, alive_supervised & supervised
        counts.append([x.sum() for x in (correct, supervised, alive & alive_supervised, alive_supervised)])
    return ChainLoss(total, *(torch.stack(column) for column in zip(*counts, strict=True)), in_draft.sum())
