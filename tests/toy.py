"""Toy targets and drafts: the real classes at sizes that run in milliseconds."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from eagle3_llama.configuration_eagle3_llama import Eagle3LlamaConfig
from eagle3_llama.modeling_eagle3_llama import LlamaForCausalLMEagle3

ALL_SHAPES = [(layers, fusion) for layers in (1, 2, 3) for fusion in ("first", "all")]


def toy_target(seed: int = 0, **overrides) -> LlamaForCausalLM:
    """A random Llama of 8 layers, H 32, V 64."""
    torch.manual_seed(seed)
    values = dict(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    return LlamaForCausalLM(LlamaConfig(**(values | overrides))).eval()


def toy_draft(target: LlamaForCausalLM, seed: int = 1, **overrides) -> LlamaForCausalLMEagle3:
    """A random draft of the target, bound to it, with a scattered draft vocabulary of 40."""
    torch.manual_seed(seed)
    config = Eagle3LlamaConfig.from_target(target.config, **({"draft_vocab_size": 40} | overrides))
    draft = LlamaForCausalLMEagle3(config).eval()
    for name, parameter in draft.named_parameters():
        if name.endswith("norm.weight"):  # ones would hide an exchanged norm
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    if config.draft_vocab_size < config.vocab_size:
        kept = torch.randperm(config.vocab_size)[: config.draft_vocab_size].sort().values
        t2d = torch.zeros(config.vocab_size, dtype=torch.bool)
        t2d[kept] = True
        draft.set_draft_vocabulary(kept - torch.arange(len(kept)), t2d)
    return draft.bind_target(target)


def capture(target: LlamaForCausalLM, input_ids, layer_ids, attention_mask=None):
    """Captured states [B,S,3H], read from all hidden states."""
    states = target(input_ids, attention_mask=attention_mask, output_hidden_states=True).hidden_states
    return torch.cat([states[i] for i in layer_ids], dim=-1)
