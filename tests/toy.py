"""Toy targets and drafts: the real classes at sizes that run in milliseconds."""

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from eagle3_llama.configuration_eagle3_llama import Eagle3LlamaConfig
from eagle3_llama.modeling_eagle3_llama import LlamaForCausalLMEagle3

torch.set_num_threads(1)  # toy sizes: a second thread costs more than it brings

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


CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def toy_tokenizer() -> PreTrainedTokenizerFast:
    """Words a0..a53 and the marks of a chat template, 64 ids."""
    marks = ["<pad>", "<unk>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
    words = marks + [f"a{i}" for i in range(64 - len(marks))]
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", eos_token="<|end|>"
    )
    fast.add_special_tokens({"additional_special_tokens": marks[3:]})
    fast.chat_template = CHAT_TEMPLATE
    return fast


def toy_rows(count: int, length: int = 24, seed: int = 3) -> Dataset:
    """Tokenised conversations with a pattern to learn: in an answer each word is followed by its successor."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(count):
        prompt = torch.randint(6, 64, (5,), generator=generator).tolist()
        size = int(torch.randint(length // 2, length, (), generator=generator))
        first = int(torch.randint(6, 64, (), generator=generator))
        answer = [6 + (first + i) % 58 for i in range(size)] + [2]
        ids = [4, *prompt, 2, 5, *answer]
        rows.append({"input_ids": ids, "assistant_masks": [0] * (len(ids) - len(answer)) + [1] * len(answer)})
    return Dataset.from_list(rows)
