"""Where a new draft starts: as a short cut through its target, so that training begins with a rough guess.

`fc` passes on the highest captured state, each layer starts as one of the target's last layers, norm and head are the
target's. The half of q/k/v that reads the token embedding has no counterpart in the target and stays random.
"""

import torch
from torch import nn
from transformers import PreTrainedModel

from eagle3_llama.modeling_eagle3_llama import Eagle3Layer, LlamaForCausalLMEagle3


@torch.no_grad()
def initialise_from_target(draft: LlamaForCausalLMEagle3, target: PreTrainedModel, layers: bool) -> None:
    """Copy the target's head rows [D,H] and final norm into the draft and, with `layers`, its last layers too.

    Layer i of N starts as the target's layer n - 1 - N + i of n: the last one is left out, since it is the one that
    turns states into predictions of the *next* token, and the draft looks one token further.
    """
    head, kept_ids = target.get_output_embeddings().weight, draft.kept_ids()
    draft.lm_head.weight.copy_(head if kept_ids is None else head[kept_ids.to(head.device)])
    body = target.get_decoder()
    draft.norm.weight.copy_(body.norm.weight)
    if not layers:
        return
    hidden_size = draft.config.hidden_size
    # Not exactly the identity: the two lower states must be able to come in.
    draft.fc.weight.mul_(0.1)
    draft.fc.weight[:, -hidden_size:] += torch.eye(hidden_size)
    first = len(body.layers) - 1 - len(draft.layers)
    if first < 0:
        raise ValueError(
            f"init_layers needs more target layers than {len(body.layers)} for num_hidden_layers {len(draft.layers)}"
        )
    for ours, theirs in zip(draft.layers, body.layers[first:-1], strict=True):
        _copy_layer(ours, theirs, hidden_size)


def _copy_layer(ours: Eagle3Layer, theirs: nn.Module, hidden_size: int) -> None:
    for name in ("q_proj", "k_proj", "v_proj"):
        # The hidden state is the second half of the input of a layer that also reads the embedding.
        getattr(ours.self_attn, name).weight[:, -hidden_size:] = getattr(theirs.self_attn, name).weight
    ours.self_attn.o_proj.weight.copy_(theirs.self_attn.o_proj.weight)
    _copy_mlp(ours.mlp, theirs.mlp)
    ours.hidden_norm.weight.copy_(theirs.input_layernorm.weight)
    ours.post_attention_layernorm.weight.copy_(theirs.post_attention_layernorm.weight)


def _copy_mlp(ours: nn.Module, theirs: nn.Module) -> None:
    """The same function, in a wider MLP too: what its additional units (random) compute, down_proj multiplies by 0."""
    width, own = theirs.down_proj.weight.shape[1], ours.down_proj.weight.shape[1]
    if own < width:
        raise ValueError(f"init_layers needs the target's intermediate_size {width} or more; the draft's is {own}")
    ours.gate_proj.weight[:width] = theirs.gate_proj.weight
    ours.up_proj.weight[:width] = theirs.up_proj.weight
    ours.down_proj.weight.zero_()
    ours.down_proj.weight[:, :width] = theirs.down_proj.weight
