"""config.json -> Megatron fields: the one place where a model's shape comes from."""

import json

import pytest

from slime.exceptions import ConfigError
from slime.models.hf_config import check_against_hf, megatron_fields_from_hf, read_hf_config

NUM_GPUS = 0

LLAMA = {
    "model_type": "llama", "num_hidden_layers": 16, "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True, "rope_theta": 500000.0, "hidden_act": "silu",
    "rope_scaling": {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 8192},
}  # fmt: skip
QWEN2 = {
    "model_type": "qwen2", "num_hidden_layers": 24, "hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14,
    "num_key_value_heads": 2, "vocab_size": 151936, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True, "rope_theta": 1000000.0, "use_sliding_window": False,
}  # fmt: skip
QWEN3_MOE = {
    "model_type": "qwen3_moe", "num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 16, "vocab_size": 100, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True, "decoder_sparse_step": 2,
    "mlp_only_layers": [3], "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
}  # fmt: skip


def test_a_llama_config_gives_its_shape_and_its_rotary_scaling():
    """Llama 3.2 1B's config gives tied embeddings, grouped queries and scaled frequencies."""
    fields = megatron_fields_from_hf(LLAMA)
    assert fields["num_query_groups"] == 8 and fields["group_query_attention"] is True
    assert fields["kv_channels"] == 64 and fields["ffn_hidden_size"] == 8192
    assert fields["untie_embeddings_and_output_weights"] is False
    assert (fields["rotary_base"], fields["use_rope_scaling"], fields["rope_scaling_factor"]) == (
        500000.0,
        True,
        32.0,
    )
    assert (
        fields["layernorm_epsilon"] == 1e-5
        and fields["add_qkv_bias"] is False
        and fields["qk_layernorm"] is False
    )


def test_qwen2_has_biased_queries_and_no_scaling_fields():
    """Qwen2.5 0.5B's config gives biased queries and the head size from hidden size and heads."""
    fields = megatron_fields_from_hf(QWEN2)
    assert fields["kv_channels"] == 64 and fields["add_qkv_bias"] is True
    assert "use_rope_scaling" not in fields


def test_a_moe_config_says_which_layers_have_experts():
    """With experts in every second layer and layer 3 listed as dense, only layer 1 has experts."""
    fields = megatron_fields_from_hf(QWEN3_MOE)
    assert fields["moe_layer_freq"] == [0, 1, 0, 0]
    assert (
        fields["num_moe_experts"],
        fields["moe_router_topk"],
        fields["moe_ffn_hidden_size"],
    ) == (8, 2, 32)
    assert fields["moe_router_pre_softmax"] is False and fields["qk_layernorm"] is True


@pytest.mark.parametrize(
    "change, words",
    [
        ({"model_type": "mamba"}, "'mamba'"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"use_sliding_window": True}, "sliding"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn'"),
        ({"rope_scaling": {**LLAMA["rope_scaling"], "low_freq_factor": 2.0}}, "low_freq_factor"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"attention_bias": True}, "attention_bias"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding"),
    ],
)
def test_what_megatron_would_compute_differently_is_refused(change, words):
    """A feature that Megatron would compute differently is refused; ignored, it would train another
    model than the engine serves."""
    with pytest.raises(ConfigError, match=words):
        megatron_fields_from_hf({**LLAMA, **change})


def test_flags_that_contradict_the_model_are_named_with_both_values():
    """All flags that contradict the model are named with both values; an absent flag and a longer
    context are no contradiction."""
    problems = check_against_hf(
        {
            "num_layers": 12,
            "rotary_base": 500000,
            "hidden_size": None,
            "max_position_embeddings": 4096,
            "vocab_size": 7,
        },
        LLAMA,
    )
    assert len(problems) == 2
    assert problems[0].startswith("--num-layers is 12, but the model's config.json says 16.")
    assert problems[1].startswith("--vocab-size is 7, ")


def test_a_missing_or_broken_config_file_is_named(tmp_path):
    """A missing or broken config.json is named."""
    with pytest.raises(ConfigError, match="does not exist"):
        read_hf_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        read_hf_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(QWEN2))
    assert read_hf_config(tmp_path) == QWEN2


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
