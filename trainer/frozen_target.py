"""The frozen target: loading it, and reading off what the draft learns from.

Shapes: B batch, S sequence, H hidden size of the target.
"""

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GgufConfig, PreTrainedModel


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
    target: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor | None, layer_ids: list[int]
) -> tuple[Tensor, Tensor]:
    """Run the target's body on input_ids [B,S] -> (captured states [B,S,3H] low to high, last state [B,S,H]).

    The last state is after the final norm: the head applied to it gives the target's logits.
    """
    # A list records only these entries (transformers >= 5.23), numbered as in `hidden_states`.
    output = target.get_decoder()(
        input_ids=input_ids, attention_mask=attention_mask, use_cache=False, output_hidden_states=list(layer_ids)
    )
    return torch.cat([output.hidden_states[i] for i in layer_ids], dim=-1), output.last_hidden_state


def end_of_turn_ids(target: PreTrainedModel) -> list[int]:
    """The ids that end the target's answer."""
    ids = target.generation_config.eos_token_id
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)
