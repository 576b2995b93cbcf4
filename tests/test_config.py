"""Eagle3LlamaConfig: what it takes from the target, what it refuses, and the file that every engine accepts."""

import json

import pytest
from transformers import AutoConfig, LlamaConfig

from eagle3_llama.configuration_eagle3_llama import Eagle3LlamaConfig

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def llama31_8b(**overrides) -> LlamaConfig:
    values = dict(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_parameters=dict(LLAMA3_ROPE),
        bos_token_id=128000,
        eos_token_id=[128001, 128008, 128009],
        dtype="bfloat16",
    )
    return LlamaConfig(**(values | overrides))


def test_the_file_is_the_one_every_engine_accepts(tmp_path):
    Eagle3LlamaConfig.from_target(llama31_8b(), num_hidden_layers=2).save_pretrained(tmp_path)
    scaling = {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"}
    expected = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "auto_map": {
            "AutoConfig": "configuration_eagle3_llama.Eagle3LlamaConfig",
            "AutoModel": "modeling_eagle3_llama.LlamaForCausalLMEagle3",
            "AutoModelForCausalLM": "modeling_eagle3_llama.LlamaForCausalLMEagle3",
        },
        "embed_fusion": "first",
        "num_hidden_layers": 2,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "mlp_bias": False,
        "vocab_size": 128256,
        "draft_vocab_size": 32000,
        "target_hidden_size": 4096,
        "num_aux_hidden_states": 3,
        "eagle_aux_hidden_state_layer_ids": [2, 16, 29],
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [1, 15, 28],
            "next_layer_regular": True,
            "norm_before_fc": False,
        },
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "max_position_embeddings": 131072,
        "rope_parameters": LLAMA3_ROPE,
        "rope_theta": 500000.0,
        "rope_scaling": scaling,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }
    written = json.loads((tmp_path / "config.json").read_text())
    assert {key: written.get(key) for key in expected} == expected
    assert None not in [written[key] for key in ("target_hidden_size", "eagle_config", "draft_vocab_size")]
    assert "target_layer_ids" not in written


@pytest.mark.parametrize("how", [Eagle3LlamaConfig.from_pretrained, AutoConfig.from_pretrained])
def test_reading_the_file_back_gives_the_same_configuration(tmp_path, how):
    config = Eagle3LlamaConfig.from_target(llama31_8b(), embed_fusion="all", num_hidden_layers=3, fc_norm=True)
    config.save_pretrained(tmp_path)
    again = how(tmp_path, **({} if how == Eagle3LlamaConfig.from_pretrained else {"trust_remote_code": True}))
    assert again.to_diff_dict() == config.to_diff_dict()
    assert again.eagle_config["next_layer_regular"] is False


def test_without_remote_code_the_file_reads_as_a_llama_with_the_right_rope(tmp_path):
    Eagle3LlamaConfig.from_target(llama31_8b()).save_pretrained(tmp_path)
    plain = AutoConfig.from_pretrained(tmp_path)
    assert type(plain) is LlamaConfig and plain.rope_parameters == LLAMA3_ROPE


def test_from_target_takes_over_what_must_agree_and_not_the_tied_head():
    target = llama31_8b(tie_word_embeddings=True, hidden_size=2048, head_dim=64, num_hidden_layers=16, dtype="float16")
    config = Eagle3LlamaConfig.from_target(target)
    assert config.rope_parameters == LLAMA3_ROPE and config.max_position_embeddings == 131072
    assert (config.head_dim, config.num_key_value_heads, config.eos_token_id) == (64, 8, [128001, 128008, 128009])
    assert config.tie_word_embeddings is False
    assert config.eagle_aux_hidden_state_layer_ids == [2, 8, 13]
    assert Eagle3LlamaConfig.from_target(llama31_8b(vocab_size=5000)).draft_vocab_size == 5000


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0; .*at least 1"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers.*expected int.*'2'"),
        ({"embed_fusion": "last"}, "embed_fusion is 'last'; allowed are 'first' and 'all'"),
        ({"draft_vocab_size": 128257}, "draft_vocab_size is 128257; allowed is 1 to vocab_size = 128256"),
        ({"draft_vocab_size": 0}, "draft_vocab_size is 0"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 16, 32]}, r"\[2, 16, 32\].*1 to 31"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 16, 29]}, r"\[0, 16, 29\].*1 to 31"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 2, 29]}, r"\[2, 2, 29\].*three different"),
        ({"eagle_aux_hidden_state_layer_ids": [16, 2, 29]}, "ascending"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 16]}, "three"),
        ({"eagle_aux_hidden_state_layer_ids": 5}, "is 5; it must be a list"),
        ({"eagle_config": {"next_layer_regular": False}}, "eagle_config is .* but the other keys say"),
        ({"draft_vocab_size": True}, "draft_vocab_size is True"),
        ({"target_hidden_size": 64}, "hidden_size is 4096, target_hidden_size 64"),
        ({"num_key_value_heads": 5}, "num_key_value_heads 5"),
        ({"num_attention_heads": 30}, r"4096.*\(30\)"),
        ({"head_dim": 127}, "even.*head_dim"),
        ({"hidden_size": 2048}, "hidden_size is 2048, target_hidden_size 4096"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings must be False"),
        ({"norm_before_residual": True}, "norm_before_residual must be False"),
        ({"fc_norm": "yes"}, "fc_norm is 'yes'; allowed are true and false"),
        ({"embed_fuson": "all"}, r"unknown configuration keys \['embed_fuson'\]"),
    ],
)
def test_a_bad_value_is_refused_with_key_value_and_what_is_allowed(overrides, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        Eagle3LlamaConfig.from_target(llama31_8b(), **overrides)


def test_a_small_target_whose_default_layers_collide_is_refused_until_they_are_chosen():
    with pytest.raises(ValueError, match=r"\[2, 2, 1\].*by hand"):
        Eagle3LlamaConfig.from_target(llama31_8b(num_hidden_layers=4))
    config = Eagle3LlamaConfig.from_target(llama31_8b(num_hidden_layers=4), eagle_aux_hidden_state_layer_ids=[1, 2, 3])
    assert config.eagle_config["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]


def test_a_target_that_is_no_llama_is_refused():
    target = llama31_8b()
    target.__class__ = type("Other", (LlamaConfig,), {"model_type": "qwen3"})
    with pytest.raises(ValueError, match="'qwen3'; only 'llama'"):
        Eagle3LlamaConfig.from_target(target)
