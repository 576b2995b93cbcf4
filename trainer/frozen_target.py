"""The frozen target: loading it, and reading off what the draft learns from.

Shapes: S tokens of one row, h heads, kv key heads, d head size, H hidden size of the target.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM, GgufConfig, PreTrainedModel

from eagle3_llama.modeling_eagle3_llama import document_positions, repeat_heads


def load_target(
    name_or_path: str,
    *,
    revision: str | None = None,
    gguf_file: str | None = None,
    adapter: str | None = None,
    dtype: str | torch.dtype = torch.bfloat16,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """A causal language model by Hub name or folder, without gradients, in evaluation mode.

    Args:
        gguf_file: a GGUF file in that folder or repo; it is dequantised.
        adapter: a PEFT adapter (Hub name or folder) that is merged into the target.

    Raises:
        ValueError: not a Llama.
    """
    kwargs = {"quantization_config": GgufConfig(dequantize=True), "gguf_file": gguf_file} if gguf_file else {}
    target = AutoModelForCausalLM.from_pretrained(
        name_or_path,
        revision=revision,
        dtype=dtype,
        attn_implementation=attn_implementation,
        trust_remote_code=trust_remote_code,
        **kwargs,
    )
    if target.config.model_type != "llama":
        raise ValueError(
            f"the target {name_or_path} has model_type {target.config.model_type!r}; only 'llama' is supported"
        )
    if adapter is not None:
        from peft import PeftModel

        target = PeftModel.from_pretrained(target, adapter).merge_and_unload()
    return target.requires_grad_(False).eval()


@torch.no_grad()
def capture(
    target: PreTrainedModel,
    input_ids: Tensor,
    documents: list[int] | None,
    layer_ids: list[int],
    tokens_at_once: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the target's body on documents in one row [1,S] -> (captured states [1,S,3H] low to high, last [1,S,H]).

    The last state is after the final norm: the head applied to it gives the target's logits. Nothing is seen across
    the ends of documents (None: the row is one). With `tokens_at_once` the target reads whole documents, at most so
    many tokens in one pass.
    """
    parts, start = [], 0
    for group in group_documents([input_ids.shape[1]] if documents is None else documents, tokens_at_once):
        ids = input_ids[:, start : start + sum(group)]
        start += sum(group)
        with attention_by_document(target):
            # A list records only these entries (transformers >= 5.23), numbered as in `hidden_states`.
            output = target.get_decoder()(
                input_ids=ids,
                position_ids=document_positions(group, ids),
                use_cache=False,
                output_hidden_states=list(layer_ids),
                documents=group,
            )
        features = torch.cat([output.hidden_states[i] for i in layer_ids], dim=-1)
        parts.append((features, output.last_hidden_state))
    return tuple(x[0] if len(x) == 1 else torch.cat(x, dim=1) for x in zip(*parts, strict=True))


def group_documents(documents: list[int], tokens_at_once: int | None) -> list[list[int]]:
    """Consecutive documents, together at most `tokens_at_once` long; a longer one stands alone."""
    if tokens_at_once is None:
        return [documents]
    groups: list[list[int]] = []
    for length in documents:
        if not groups or sum(groups[-1]) + length > tokens_at_once:
            groups.append([])
        groups[-1].append(length)
    return groups


@contextlib.contextmanager
def attention_by_document(target: PreTrainedModel) -> Iterator[None]:
    """Within, sdpa and eager attention see one document each, without a mask; flash kernels do so by themselves.

    transformers 5.24 would give sdpa a mask [S,S] for such rows.
    """
    before = target.config._attn_implementation
    if before in ("sdpa", "eager"):
        target.config._attn_implementation = "eagle3_documents"
    try:
        yield
    finally:
        target.config._attn_implementation = before


def document_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, documents: list[int], **_: Any
) -> tuple[Tensor, None]:
    """Causal attention within each document: query [1,h,S,d], key and value [1,kv,S,d] -> [1,S,h,d]."""
    if query.is_cuda and query.dtype == torch.float32:  # its memory-efficient kernel does not share key heads
        key, value = repeat_heads(key, query), repeat_heads(value, query)
    grouped = key.shape[1] < query.shape[1]
    parts = zip(*(x.split(documents, dim=2) for x in (query, key, value)), strict=True)
    outputs = [
        F.scaled_dot_product_attention(*part, is_causal=True, enable_gqa=grouped, scale=module.scaling)
        for part in parts
    ]
    return torch.cat(outputs, dim=2).transpose(1, 2), None


AttentionInterface.register("eagle3_documents", document_attention)


def end_of_turn_ids(target: PreTrainedModel) -> list[int]:
    """The ids that end the target's answer."""
    ids = target.generation_config.eos_token_id
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)
