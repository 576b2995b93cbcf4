"""The loss of the training-time test: soft cross entropy against the target, step by step along the chain.

Shapes: B batch, S slots, H hidden, V target vocabulary, D draft vocabulary, K TTT steps, n supervised tokens.
Alignment: the target's distribution at token t is for token t + 1. Slot p at step k predicts token p + 2 + k, so it
is compared with the distribution at token t = p + 1 + k, and supervised when tokens t and t + 1 are the assistant's.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

STEP_DECAY = 0.8  # weight of step k is 0.8^k (EAGLE-3, 2503.01840)
TARGET_CHUNK = 512  # supervised tokens whose full-vocabulary logits exist at one time


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


def predicted_tokens(assistant_mask: Tensor) -> Tensor:
    """[B,S] bool: token t and the one after it are the assistant's, so the target's distribution at t is learned."""
    mask = assistant_mask.bool()
    return F.pad(mask[:, :-1] & mask[:, 1:], (0, 1), value=False)


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
        # The maximum over V is several times cheaper than its index, which nothing needs outside of D.
        in_draft.append(kept.amax(-1) == logits.amax(-1))
        kept = kept.float()
        top1.append(kept.argmax(-1))
        probabilities.append(kept.softmax(-1))
    return torch.cat(probabilities), torch.cat(top1), torch.cat(in_draft)


def soft_cross_entropy(states: Tensor, head: Tensor, probabilities: Tensor) -> tuple[Tensor, Tensor]:
    """Draft states [n,H] and head [D,H] against target probabilities [n,D] -> (loss [n] in fp32, draft top-1 [n])."""
    logits = F.linear(states, head).float()
    return -(probabilities * logits.log_softmax(-1)).sum(-1), logits.detach().argmax(-1)


def chain_loss(
    states: tuple[Tensor, ...],
    head: Tensor,
    target_states: Tensor,
    target_head: Tensor,
    assistant_mask: Tensor,
    kept_ids: Tensor | None,
) -> ChainLoss:
    """Sum of the loss over all steps and supervised slots, and what the chain got right.

    Args:
        states: K normed draft states [B,S,H]. head: the draft's head [D,H].
        target_states: the target's last hidden state after its final norm [B,S,H]. target_head: [V,H].
        assistant_mask: [B,S], 1 on the assistant's tokens.
        kept_ids: target ids of the draft vocabulary [D], ascending; None when D = V.
    """
    wanted = predicted_tokens(assistant_mask)
    wanted[:, 0] = False  # no slot before token 0 could predict it
    row, token = wanted.nonzero(as_tuple=True)  # n supervised tokens
    probabilities, top1, in_draft = target_distribution(target_states[row, token], target_head, kept_ids)

    total = states[0].new_zeros((), dtype=torch.float32)
    alive = alive_supervised = torch.ones_like(wanted)
    counts = []
    for k, state in enumerate(states):
        slot = token - 1 - k
        real = slot >= 0
        rows, slots = row[real], slot[real]
        loss, predicted = soft_cross_entropy(state[rows, slots], head, probabilities[real])
        total = total + STEP_DECAY**k * (loss * in_draft[real]).sum()

        correct, supervised = torch.zeros_like(wanted), torch.zeros_like(wanted)  # [B,S] by slot
        correct[rows, slots] = (predicted == top1[real]) & in_draft[real]
        supervised[rows, slots] = True
        alive, alive_supervised = alive & correct, alive_supervised & supervised
        counts.append([x.sum() for x in (correct, supervised, alive & alive_supervised, alive_supervised)])
    return ChainLoss(total, *(torch.stack(column) for column in zip(*counts, strict=True)), in_draft.sum())
