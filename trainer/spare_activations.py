"""Leaves out of memory what is cheaper to compute again: the inside of the norms, and the product within SwiGLU.

    spare_activations(draft)

Both are elementwise, a few per cent of a step's time, and nearly half of what the unroll would keep. The same
operations run again on the same numbers, so gradients are equal to the bit. `checkpoint_steps` goes further, and pays
for it with the matrix products of the forward pass.
"""

import functools

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm


def spare_activations(draft: nn.Module) -> None:
    """Replace the forward of every norm and MLP of the draft; parameters and results stay what they are."""
    for module in draft.modules():
        if isinstance(module, LlamaRMSNorm):
            module.forward = functools.partial(_norm, module)
        elif isinstance(module, LlamaMLP):
            module.forward = functools.partial(_mlp, module)


def _norm(norm: LlamaRMSNorm, x: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        return LlamaRMSNorm.forward(norm, x)
    return checkpoint(LlamaRMSNorm.forward, norm, x, use_reentrant=False, preserve_rng_state=False)


def _mlp(mlp: LlamaMLP, x: Tensor) -> Tensor:
    """down(silu(gate) * up), keeping gate and up. `down_proj` keeps its input for the gradient of its weight."""
    gate, up = mlp.gate_proj(x), mlp.up_proj(x)
    if not torch.is_grad_enabled():
        return mlp.down_proj(mlp.act_fn(gate) * up)

    def product(gate: Tensor, up: Tensor) -> Tensor:
        return mlp.act_fn(gate) * up

    inner = checkpoint(product, gate, up, use_reentrant=False, preserve_rng_state=False)
    storage, gate, up = inner.untyped_storage().data_ptr(), gate.detach(), up.detach()

    def pack(saved: Tensor) -> Tensor | torch.Size:
        return saved.shape if saved.untyped_storage().data_ptr() == storage else saved

    def unpack(kept: Tensor | torch.Size) -> Tensor:
        return kept if isinstance(kept, Tensor) else product(gate, up).view(kept)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return mlp.down_proj(inner)
