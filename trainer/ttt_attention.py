"""Attention of the training-time test in linear memory: a drop-in for the draft's dense `ttt_attention`.

    draft.ttt_attention = flash_ttt_attention

The scores of step k are a causal block (queries of step k, keys of step 0) and k diagonals (own-slot keys of steps
1..k). A flash kernel computes the block and its log-sum-exp, the diagonals are elementwise, and log-sum-exp merges
them exactly. Backward, a flash kernel that is handed the *merged* output and log-sum-exp returns the exact gradients
of the block, as in ring attention; those of the diagonals are elementwise again.

    device, dtype      kernel                key heads        left padding and holes
    CPU                flash                 not repeated     additive [B,1,1,S], broadcast
    CUDA, bf16, fp16   flash                 not repeated     the efficient kernel, with the same mask
    CUDA, fp32         memory-efficient      repeated         additive [B,1,1,S], broadcast
    any other          the dense reference, [S,S]

Documents in one row are a kernel call each: the same work as apart, without padding. The diagonals know no neighbours.

Right padding needs no mask: a real slot never sees a later one. What padding slots get is finite and means nothing.

Shapes: B batch, S slots, h heads, g key heads, r = h / g queries a key head, d head size, k TTT step.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from eagle3_llama.modeling_eagle3_llama import repeat_heads, ttt_attention

aten = torch.ops.aten


def flash_ttt_attention(
    query: Tensor,
    keys: list[Tensor],
    values: list[Tensor],
    attention_mask: Tensor | None,
    documents: list[int] | None = None,
) -> Tensor:
    """Attention of TTT step k: step-0 keys causally, own slot's keys of steps 1..k.

    query [B,h,S,d]; keys and values: k + 1 tensors [B,g,S,d], step 0 first; attention_mask [B,S], 0 on padding;
    documents: lengths of the documents that S slots consist of, each of which sees only itself.

    Raises:
        ValueError: a device without these kernels.
    """
    if query.device.type not in ("cpu", "cuda"):
        raise ValueError(f"no flash kernel on {query.device.type!r}: set ttt_attention to 'eager' or 'auto'")
    documents = [query.shape[2]] if documents is None else documents
    return TTTAttention.apply(query, padding_bias(attention_mask, query), documents, *keys, *values)


def choose_ttt_attention(name: str, device: torch.device) -> Callable[..., Tensor]:
    """The attention for "flash", "eager", or "auto": flash where the device has its kernels."""
    if name == "auto":
        name = "flash" if device.type in ("cpu", "cuda") else "eager"
    return {"flash": flash_ttt_attention, "eager": ttt_attention}[name]


def padding_bias(attention_mask: Tensor | None, query: Tensor) -> Tensor | None:
    """Additive mask [B,1,1,S] on padding; None when all of it lies on the right."""
    if attention_mask is None or (attention_mask[:, 1:] <= attention_mask[:, :-1]).all():
        return None
    # CUDA's kernels read rows that start at multiples of 16 elements.
    padded = F.pad(attention_mask.bool(), (0, -attention_mask.shape[1] % 16))[:, None, None]
    bias = torch.zeros(padded.shape, dtype=query.dtype, device=query.device)
    # Not -inf: a padding slot may see nothing, and a softmax over nothing is NaN.
    return bias.masked_fill(~padded, torch.finfo(query.dtype).min / 2)[..., : query.shape[2]]


def uses_efficient_kernel(query: Tensor, bias: Tensor | None) -> bool:
    return query.device.type == "cuda" and (bias is not None or query.dtype == torch.float32)


def causal_block(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, tuple]:
    """Causal attention -> (output [B,h,S,d], log-sum-exp [B,h,S] in fp32, what its backward needs besides)."""
    if query.device.type == "cpu":
        return *aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, True, attn_mask=bias), ()
    if uses_efficient_kernel(query, bias):
        key, value = repeat_heads(key, query), repeat_heads(value, query)
        bias = None if bias is None else bias.expand(*query.shape[:3], -1)
        output, lse, *random_state = aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, True, 0.0, True
        )
        return output, lse[..., : query.shape[2]], tuple(random_state)  # its rows are padded to multiples of 32
    output, lse, *extra = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True)
    return output, lse, tuple(extra[:6])  # sequence offsets and lengths, random state


def causal_block_backward(
    d_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    extra: tuple,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value through the block, given the output and log-sum-exp of *all* keys."""
    if query.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            d_output, query, key, value, output, lse, 0.0, True, attn_mask=bias
        )
    lse = lse.contiguous()  # a document's part of a row is not, and these kernels read it as if it were
    if d_output.stride(-1) != 1:  # CUDA's kernels refuse the gradient of a sum, which is one number expanded
        d_output = d_output.contiguous()
    if uses_efficient_kernel(query, bias):
        groups, bias = key.shape[1], None if bias is None else bias.expand(*query.shape[:3], -1)
        key, value = repeat_heads(key, query), repeat_heads(value, query)
        lse = F.pad(lse, (0, -lse.shape[2] % 32), value=float("inf"))  # rows past the end have no weight
        d_query, d_key, d_value, _ = aten._scaled_dot_product_efficient_attention_backward(
            d_output, query, key, value, bias, output, lse, *extra, 0.0, [True, True, True, False], True
        )
        return d_query, d_key.unflatten(1, (groups, -1)).sum(2), d_value.unflatten(1, (groups, -1)).sum(2)
    return aten._scaled_dot_product_flash_attention_backward(
        d_output, query, key, value, output, lse, *extra[:4], 0.0, True, *extra[4:]
    )


class TTTAttention(torch.autograd.Function):
    """(query, bias, documents, k + 1 keys, k + 1 values) -> output [B,h,S,d]. The merge is in fp32 in any dtype."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, bias: Tensor | None, documents: list[int], *keys_values: Tensor) -> Tensor:
        steps = len(keys_values) // 2
        keys, values = keys_values[:steps], keys_values[steps:]
        parts = split_slots(documents, query, keys[0], values[0])
        outputs, lses, ctx.extras = zip(*(causal_block(*part, bias) for part in parts), strict=True)
        output, lse = join_slots(outputs), join_slots(lses)
        weights = None
        if steps > 1:
            grouped = by_group(query.float(), keys[0])  # [B,g,r,S,d]
            scale = query.shape[-1] ** -0.5
            own = [(grouped * key[:, :, None].float()).sum(-1).flatten(1, 2) * scale for key in keys[1:]]
            scores = torch.stack([lse, *own])  # [k+1,B,h,S]
            lse = scores.logsumexp(0)
            weights = (scores - lse).exp()
            # In place: it keeps the kernel's layout [B,S,h,d], which o_proj reads without a copy.
            output = by_group(output.float().mul_(weights[0, ..., None]), keys[0])
            for weight, value in zip(weights[1:], values[1:], strict=True):
                output.addcmul_(by_group(weight[..., None], value), value[:, :, None].float())
            output = output.flatten(1, 2).to(query.dtype)
        ctx.documents = documents
        ctx.save_for_backward(query, bias, output, lse, weights, *keys_values)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_output: Tensor) -> tuple[Tensor | None, ...]:
        query, bias, output, lse, weights, *keys_values = ctx.saved_tensors
        steps = len(keys_values) // 2
        keys, values = keys_values[:steps], keys_values[steps:]
        parts = split_slots(ctx.documents, d_output, query, keys[0], values[0], output, lse)
        blocks = [causal_block_backward(*part, bias, extra) for part, extra in zip(parts, ctx.extras, strict=True)]
        d_query, *block = (join_slots(gradients) for gradients in zip(*blocks, strict=True))
        d_keys, d_values = block[:1], block[1:]
        if steps > 1:
            scale = query.shape[-1] ** -0.5
            grouped, d_grouped = by_group(query.float(), keys[0]), by_group(d_output.float(), keys[0])
            d_query = by_group(d_query.float(), keys[0])
            delta = (d_grouped * by_group(output, keys[0])).sum(-1)  # [B,g,r,S]
            for weight, key, value in zip(weights[1:], keys[1:], values[1:], strict=True):
                weight = by_group(weight, key)
                d_score = (d_grouped * value[:, :, None].float()).sum(-1).sub_(delta).mul_(weight).mul_(scale)
                d_query.addcmul_(d_score[..., None], key[:, :, None].float())
                d_keys.append((d_score[..., None] * grouped).sum(2).to(key.dtype))
                d_values.append((weight[..., None] * d_grouped).sum(2).to(value.dtype))
            d_query = d_query.flatten(1, 2).to(query.dtype)
        return d_query, None, None, *d_keys, *d_values


def split_slots(documents: list[int], *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The tensors [B,heads,S,...] of one document after the other."""
    return zip(*(x.split(documents, dim=2) for x in tensors), strict=True)


def join_slots(parts: Sequence[Tensor]) -> Tensor:
    """The inverse, laid out as [B,S,heads,...] in memory, as the kernels do."""
    return parts[0] if len(parts) == 1 else torch.cat([x.transpose(1, 2) for x in parts], dim=1).transpose(1, 2)


def by_group(x: Tensor, key: Tensor) -> Tensor:
    """View [B,h,...] as [B,g,r,...], the heads that share a key head together."""
    return x.unflatten(1, (key.shape[1], -1))
