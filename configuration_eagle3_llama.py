"""Configuration of an EAGLE-3 draft for a Llama target.

Notable facts:
- a LlamaConfig with `model_type: "llama"`: vLLM, SGLang and TensorRT-LLM read the same config.json as transformers
- RoPE, positions, head geometry and special tokens are the target's (`from_target`)
- captured layers are counted as in `hidden_states` of transformers (0 = embeddings, i = output of layer i - 1);
  SGLang counts one less, and reads its own copy in `eagle_config`
- `embed_fusion`: "first" = only layer 0 reads the token embeddings, "all" = every layer does
- what the engines need and a user cannot choose is written to the file by `to_dict`, and checked when read
- plain `__init__` instead of a dataclass: this file is also executed by engines that pin transformers 4.57
"""

import copy
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import LlamaConfig

# Fixed by the architecture. The engines' defaults disagree, so each is written out.
_FIXED = {
    "attention_bias": False,
    "mlp_bias": False,
    "norm_before_fc": False,
    "norm_before_residual": False,
    "num_aux_hidden_states": 3,
    "tie_word_embeddings": False,
}
_DERIVED = ("eagle_config", "auto_map", "architectures")
_INHERITED = (
    "vocab_size hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim hidden_act "
    "rms_norm_eps initializer_range max_position_embeddings rope_parameters bos_token_id eos_token_id "
    "pad_token_id dtype"
).split()


class Eagle3LlamaConfig(LlamaConfig):
    """Sizes and choices of one draft; the other keys are LlamaConfig's.

    Args:
        embed_fusion: "first" (layer 0 reads the token embeddings) or "all" (every layer does).
        draft_vocab_size: D, rows of the draft's head; None = min(32000, vocab_size).
        target_hidden_size: hidden size of the target, whose embeddings the draft reads; None = hidden_size.
        eagle_aux_hidden_state_layer_ids: the three captured entries of the target's `hidden_states`, ascending.
        fc_norm: an RMSNorm for each captured state before `fc` (EAGLE-3.1).
        norm_output: hand the normed state to the next draft step (EAGLE-3.1).
        target_name: the target on the Hub, for the card and for error messages.

    Raises:
        ValueError: names the key, its value and what is allowed.
    """

    def __init__(
        self,
        num_hidden_layers: int = 1,
        embed_fusion: str = "first",
        draft_vocab_size: int | None = None,
        target_hidden_size: int | None = None,
        eagle_aux_hidden_state_layer_ids: tuple[int, ...] | list[int] = (2, 16, 29),
        fc_norm: bool = False,
        norm_output: bool = False,
        target_name: str | None = None,
        **kwargs: Any,
    ):
        for key, value in _FIXED.items():
            if kwargs.pop(key, value) != value:
                raise ValueError(f"{key} must be {value} in an EAGLE-3 draft for these engines; remove it")
        given = {key: kwargs.pop(key, None) for key in _DERIVED}
        self.embed_fusion = embed_fusion
        self.draft_vocab_size = draft_vocab_size
        self.target_hidden_size = target_hidden_size
        check_captured_layers(eagle_aux_hidden_state_layer_ids)
        self.eagle_aux_hidden_state_layer_ids = list(eagle_aux_hidden_state_layer_ids)
        self.fc_norm = fc_norm
        self.norm_output = norm_output
        self.target_name = target_name
        try:
            super().__init__(num_hidden_layers=num_hidden_layers, **kwargs)
        except StrictDataclassError as error:
            raise ValueError(f"Eagle3LlamaConfig: {error}") from error
        if self.draft_vocab_size is None:
            self.draft_vocab_size = min(32000, self.vocab_size)
        if self.target_hidden_size is None:
            self.target_hidden_size = self.hidden_size
        for key, value in _FIXED.items():
            setattr(self, key, value)
        self.check()
        self.eagle_config = self._eagle_config()
        if given["eagle_config"] not in (None, self.eagle_config):
            raise ValueError(f"eagle_config is {given['eagle_config']}, but the other keys say {self.eagle_config}")
        self.auto_map = _auto_map()

    @classmethod
    def from_target(cls, target_config: LlamaConfig, **overrides: Any) -> "Eagle3LlamaConfig":
        """A draft for this target: what must agree is taken over, `overrides` are applied on top.

        Raises:
            ValueError: not a Llama, an unknown key, or captured layers that the target does not have.
        """
        if target_config.model_type != "llama":
            raise ValueError(f"the target's model_type is {target_config.model_type!r}; only 'llama' is supported")
        n = target_config.num_hidden_layers
        values = {key: copy.deepcopy(getattr(target_config, key)) for key in _INHERITED}
        known = {*cls().to_dict(), *values}
        if unknown := sorted(set(overrides) - known):
            raise ValueError(f"unknown configuration keys {unknown}; known are {sorted(known)}")
        values |= {"target_hidden_size": target_config.hidden_size}
        values |= {"eagle_aux_hidden_state_layer_ids": (2, n // 2, n - 3)}
        values |= {key: value for key, value in overrides.items() if value is not None}
        check_captured_layers(values["eagle_aux_hidden_state_layer_ids"], n)
        return cls(**values)

    def check(self) -> None:
        """Raise ValueError for a value that no draft can have."""
        if self.num_hidden_layers < 1:
            raise ValueError(f"num_hidden_layers is {self.num_hidden_layers}; a draft has at least 1 layer")
        if self.embed_fusion not in ("first", "all"):
            raise ValueError(f"embed_fusion is {self.embed_fusion!r}; allowed are 'first' and 'all'")
        if type(self.draft_vocab_size) is not int or not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise ValueError(
                f"draft_vocab_size is {self.draft_vocab_size!r}; allowed is 1 to vocab_size = {self.vocab_size}"
            )
        if self.target_hidden_size != self.hidden_size:
            raise ValueError(
                f"hidden_size is {self.hidden_size}, target_hidden_size {self.target_hidden_size}: "
                "the draft reads the target's embeddings, so they must be equal"
            )
        if (
            self.head_dim % 2
            or not 1 <= self.num_key_value_heads <= self.num_attention_heads
            or (self.num_attention_heads % self.num_key_value_heads)
        ):
            raise ValueError(
                f"head_dim is {self.head_dim}, num_attention_heads {self.num_attention_heads}, num_key_value_heads "
                f"{self.num_key_value_heads}: head_dim must be even, and the key heads must divide the heads"
            )
        for key in ("fc_norm", "norm_output"):
            if not isinstance(getattr(self, key), bool):
                raise ValueError(f"{key} is {getattr(self, key)!r}; allowed are true and false")
        check_captured_layers(self.eagle_aux_hidden_state_layer_ids)

    def _eagle_config(self) -> dict[str, Any]:
        return {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [i - 1 for i in self.eagle_aux_hidden_state_layer_ids],
            "next_layer_regular": self.embed_fusion == "first",
            "norm_before_fc": False,
        }

    def to_dict(self) -> dict[str, Any]:
        """LlamaConfig's dictionary, with the keys that only the engines read."""
        self.check()
        output = super().to_dict() | _FIXED
        return output | {"eagle_config": self._eagle_config(), "auto_map": _auto_map()}

    def to_diff_dict(self) -> dict[str, Any]:
        """The content of config.json: as `to_dict`, with both spellings of RoPE and dtype."""
        output = super().to_diff_dict()
        output["architectures"] = ["LlamaForCausalLMEagle3"]
        if "dtype" in output:
            output["torch_dtype"] = output["dtype"]
        # transformers 4.57 silently uses theta 10000 when it finds only `rope_parameters`.
        output["rope_theta"] = self.rope_parameters["rope_theta"]
        if self.rope_parameters["rope_type"] != "default":
            output["rope_scaling"] = {k: v for k, v in self.rope_parameters.items() if k != "rope_theta"}
        if self.target_name is None:
            del output["target_name"]
        return output


def check_captured_layers(layer_ids: list[int] | tuple[int, ...], num_target_layers: int | None = None) -> None:
    """Raise ValueError unless these are three ascending entries of `hidden_states` that a target of that depth has."""
    if not isinstance(layer_ids, list | tuple):
        raise ValueError(f"eagle_aux_hidden_state_layer_ids is {layer_ids!r}; it must be a list of three layers")
    highest = float("inf") if num_target_layers is None else num_target_layers - 1
    in_range = all(isinstance(i, int) and 1 <= i <= highest for i in layer_ids)
    if len(layer_ids) != 3 or not in_range or list(layer_ids) != sorted(set(layer_ids)):
        allowed = "1 or more" if num_target_layers is None else f"1 to {num_target_layers - 1}"
        raise ValueError(
            f"eagle_aux_hidden_state_layer_ids is {list(layer_ids)}; it must be three different layers, ascending, "
            f"each {allowed} (the last entry of hidden_states is past the final norm). Choose them by hand for a "
            "target of fewer than 7 layers"
        )


def _auto_map() -> dict[str, str]:
    model = "modeling_eagle3_llama.LlamaForCausalLMEagle3"
    config = "configuration_eagle3_llama.Eagle3LlamaConfig"
    return {"AutoConfig": config, "AutoModel": model, "AutoModelForCausalLM": model}


Eagle3LlamaConfig.register_for_auto_class()
