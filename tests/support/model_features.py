"""A table of things that a config.json may say, and whether trainer, engine and converters take
them. Rows change one of `CONFIGS`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

_COMMON = {
    "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 104, "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "hidden_act": "silu", "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**_COMMON, "model_type": "llama"},
    "qwen2": {**_COMMON, "model_type": "qwen2"},
    "qwen3": {**_COMMON, "model_type": "qwen3", "head_dim": 8},
    "qwen3_moe": {
        **_COMMON, "model_type": "qwen3_moe", "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "norm_topk_prob": True,
    },
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
MISSING = object()


@dataclasses.dataclass(frozen=True)
class Feature:
    """A change of a config. words: what the refusal says (key and value, then what is supported);
    None where it is taken.
    """

    name: str
    family: str
    changes: dict[str, Any]
    words: tuple[str, ...] | None = None

    def config(self) -> dict[str, Any]:
        """The changed config."""
        merged = {**CONFIGS[self.family], **self.changes}
        return {key: value for key, value in merged.items() if value is not MISSING}


def _taken(name: str, family: str, **changes: Any) -> Feature:
    return Feature(name, family, changes)


def _refused(name: str, family: str, *words: str, **changes: Any) -> Feature:
    return Feature(name, family, changes, words)


_SLIDING = {"use_sliding_window": True, "sliding_window": 64}
FEATURES = (
    *(_taken(f"{family} as it is", family) for family in CONFIGS),
    # which model
    _refused("unknown type", "qwen3", "model_type 'gpt2'", "llama, qwen2, qwen3, qwen3_moe", model_type="gpt2"),
    _refused("no type", "qwen3", "model_type is missing", model_type=MISSING),
    _refused("type that is no text", "qwen3", "model_type ['qwen3']", model_type=["qwen3"]),
    _refused("language model inside another", "qwen3", "text_config {", "null", text_config=CONFIGS["qwen3"]),
    _refused("multimodal type", "qwen3", "model_type 'qwen3_vl'", model_type="qwen3_vl", text_config=CONFIGS["qwen3"]),
    _taken("its own head", "qwen3", architectures=["Qwen3ForCausalLM"]),
    _refused("classifier", "qwen3", "architectures ['Qwen3ForSequenceClassification']", "Qwen3ForCausalLM",
             architectures=["Qwen3ForSequenceClassification"]),
    _refused("architectures that are no list", "qwen3", "architectures 'Qwen3ForCausalLM'", architectures="Qwen3ForCausalLM"),
    # rotary positions
    _taken("llama3 scaling", "llama", rope_scaling=LLAMA3),
    _taken("llama3 scaling, new section", "llama", rope_parameters={**LLAMA3, "rope_theta": 5e5}, rope_theta=MISSING),
    _taken("llama3 scaling by the old key", "llama", rope_scaling={**LLAMA3, "rope_type": None, "type": "llama3"}),
    _taken("llama3 scaling with constants of its own", "llama", rope_scaling={**LLAMA3, "low_freq_factor": 2.0, "original_max_position_embeddings": 64}),
    _refused("llama3 scaling without a factor", "llama", "rope_scaling.factor is missing", "above 0", rope_scaling={**LLAMA3, "factor": None}),
    _refused("llama3 scaling with equal bounds", "llama", "rope_scaling.high_freq_factor 1.0", "more than", rope_scaling={**LLAMA3, "high_freq_factor": 1.0}),
    _taken("linear scaling", "qwen3", rope_scaling={"type": "linear", "factor": 2.0}),
    _refused("linear scaling by zero", "qwen3", "rope_scaling.factor 0", rope_scaling={"type": "linear", "factor": 0}),
    _refused("linear scaling by text", "qwen3", "rope_scaling.factor '2'", rope_scaling={"type": "linear", "factor": "2"}),
    _refused("yarn", "qwen3", "rope_scaling.rope_type 'yarn'", "default, linear, llama3", rope_scaling={"rope_type": "yarn", "factor": 4.0}),
    _refused("dynamic", "qwen2", "rope_scaling.type 'dynamic'", rope_scaling={"type": "dynamic", "factor": 4.0}),
    _refused("longrope", "llama", "rope_parameters.rope_type 'longrope'", rope_parameters={"rope_type": "longrope", "factor": 4.0}),
    _refused("unknown key of scaling", "qwen2", "rope_scaling.mrope_section [16, 24, 24]", rope_scaling={"type": "default", "mrope_section": [16, 24, 24]}),
    _refused("scaling by layer type", "qwen3", "rope_parameters.full_attention {", rope_parameters={"full_attention": {"rope_type": "default"}}),
    _refused("two sections that differ", "qwen3", "rope_scaling.factor 2.0", "rope_parameters.factor 4.0",
             rope_scaling={"rope_type": "linear", "factor": 2.0}, rope_parameters={"rope_type": "linear", "factor": 4.0}),
    _taken("two sections that agree", "qwen3", rope_scaling={"rope_type": "linear", "factor": 2.0},
           rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}),
    _refused("scaling that is no object", "qwen3", "rope_scaling 'linear'", "an object", rope_scaling="linear"),
    _taken("null scaling", "qwen3", rope_scaling=None, rope_parameters=None),
    _refused("base of zero", "qwen3", "rope_theta 0", rope_theta=0),
    _refused("infinite base", "qwen3", "rope_theta inf", rope_theta=float("inf")),
    _refused("base beyond a float", "qwen3", "rope_theta 1000", rope_theta=10**400),
    _refused("base as text", "qwen3", "rope_theta '10000'", rope_theta="10000"),
    _taken("whole base", "qwen3", rope_theta=10000),
    _taken("all of the head turned", "qwen3", partial_rotary_factor=1.0),
    _refused("half of the head turned", "qwen3", "partial_rotary_factor 0.5", "1.0", partial_rotary_factor=0.5),
    _refused("half of the head turned, new section", "qwen3", "rope_parameters.partial_rotary_factor 0.5", "1.0",
             rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.5}),
    _refused("layers without positions", "llama", "no_rope_layers [1, 0]", no_rope_layers=[1, 0]),
    # attention
    _taken("full attention by name", "qwen3", layer_types=["full_attention"] * 2),
    _refused("chunked attention", "llama", "layer_types has 'chunked_attention'", "full_attention", layer_types=["full_attention", "chunked_attention"]),
    _refused("linear attention", "qwen3", "layer_types has 'linear_attention'", layer_types=["linear_attention", "full_attention"]),
    _refused("sliding attention", "qwen3", "layer_types has 'sliding_attention'", layer_types=["sliding_attention"] * 2),
    _refused("unknown attention", "qwen2", "layer_types has 7", layer_types=[7, 7]),
    _refused("layer types as text", "qwen3", "layer_types 'full_attention'", layer_types="full_attention"),
    _refused("chunks", "llama", "attention_chunk_size 8192", "chunked attention", attention_chunk_size=8192),
    _refused("window in the upper layer", "qwen2", "sliding_window 64", "use_sliding_window false", **_SLIDING, max_window_layers=1),
    _taken("window above the last layer", "qwen2", **_SLIDING, max_window_layers=2),
    _taken("window above the last layer by default", "qwen3", **_SLIDING),
    _taken("window that no layer type uses", "qwen3", **_SLIDING, max_window_layers=0, layer_types=["full_attention"] * 2),
    _refused("window of default size", "qwen2", "default size", use_sliding_window=True, max_window_layers=0),
    _taken("window without a size", "qwen2", use_sliding_window=True, sliding_window=None, max_window_layers=0),
    _refused("window in a model with experts", "qwen3_moe", "sliding_window 64", **_SLIDING, max_window_layers=2),
    _taken("window that is off", "qwen3_moe", use_sliding_window=False, sliding_window=64),
    _refused("window switch as text", "qwen2", "use_sliding_window 'false'", "true or false", use_sliding_window="false"),
    _taken("all biases", "llama", attention_bias=True, mlp_bias=True),
    _refused("biases of attention alone", "llama", "attention_bias True with mlp_bias False", "both", attention_bias=True),
    _refused("biases of the MLP alone", "llama", "attention_bias False with mlp_bias True", mlp_bias=True),
    _refused("biases that qwen3 lacks in Megatron", "qwen3", "attention_bias True", "false", attention_bias=True),
    _refused("biases beside experts", "qwen3_moe", "attention_bias True", attention_bias=True),
    _taken("a key that qwen2 does not read", "qwen2", attention_bias=True),
    _refused("MLP biases of qwen2", "qwen2", "mlp_bias True", "false", mlp_bias=True),
    _refused("bias as a number", "llama", "attention_bias 1", "true or false", attention_bias=1),
    _refused("latent attention", "qwen3", "kv_lora_rank 512", "multi-head latent attention", kv_lora_rank=512),
    _refused("capped scores", "qwen3", "attn_logit_softcapping 50.0", attn_logit_softcapping=50.0),
    _taken("null heads", "qwen3", num_key_value_heads=None),
    _taken("no key/value heads", "llama", num_key_value_heads=MISSING),
    _refused("zero key/value heads", "llama", "num_key_value_heads 0", "from 1", num_key_value_heads=0),
    _refused("heads that do not divide", "llama", "not a multiple of num_key_value_heads 3", num_key_value_heads=3),
    _taken("null head size", "qwen3", head_dim=None),
    _refused("odd head size", "qwen3", "head_dim 7 is odd", "even", head_dim=7),
    _refused("head size of zero", "qwen3", "head_dim 0", head_dim=0),
    _refused("hidden size that heads do not divide", "llama", "hidden_size 30 is not a multiple", hidden_size=30),
    # MLP, head, weights
    _refused("another activation", "qwen3", "hidden_act 'gelu'", "silu", hidden_act="gelu"),
    _taken("no activation", "qwen3", hidden_act=MISSING),
    _taken("tied", "qwen2", tie_word_embeddings=True),
    _taken("null ties", "qwen2", tie_word_embeddings=None),
    _refused("ties as text", "qwen2", "tie_word_embeddings 'false'", "true or false", tie_word_embeddings="false"),
    _refused("ties as a number", "qwen2", "tie_word_embeddings 0", tie_word_embeddings=0),
    _refused("capped logits", "qwen3", "final_logit_softcapping 30.0", final_logit_softcapping=30.0),
    _refused("quantized", "qwen3", "quantization_config {'quant_method': 'fp8'}", "null", quantization_config={"quant_method": "fp8"}),
    _refused("unknown quantization", "qwen3", "quantization_config 'int3'", quantization_config="int3"),
    _taken("no quantization", "qwen3", quantization_config=None),
    _refused("multi-token prediction", "qwen3", "num_nextn_predict_layers 1", "multi-token prediction", num_nextn_predict_layers=1),
    _taken("no multi-token prediction", "qwen3", num_nextn_predict_layers=0),
    _taken("half precision", "qwen3", torch_dtype="bfloat16"),
    _taken("half precision, new key", "qwen3", dtype="torch.float16"),
    _refused("double precision", "qwen3", "torch_dtype 'float64'", "float32, bfloat16, float16", torch_dtype="float64"),
    # experts
    _taken("choice not normalized", "qwen3_moe", norm_topk_prob=False),
    _taken("no word on normalization", "qwen3_moe", norm_topk_prob=MISSING),
    _refused("normalization as a number", "qwen3_moe", "norm_topk_prob 1", norm_topk_prob=1),
    _taken("experts by the other key", "qwen3_moe", num_experts=MISSING, num_local_experts=4),
    _refused("two numbers of experts", "qwen3_moe", "num_local_experts 8", "4, as num_experts", num_local_experts=8),
    _refused("no experts", "qwen3_moe", "num_experts is missing", num_experts=MISSING),
    _refused("zero experts", "qwen3_moe", "num_experts 0", num_experts=0),
    _refused("more choices than experts", "qwen3_moe", "num_experts_per_tok 5", "from 1 to 4", num_experts_per_tok=5),
    _taken("a dense layer", "qwen3_moe", mlp_only_layers=[0]),
    _taken("experts in every second layer", "qwen3_moe", decoder_sparse_step=2),
    _refused("experts in every zeroth layer", "qwen3_moe", "decoder_sparse_step 0", decoder_sparse_step=0),
    _refused("dense layers as a number", "qwen3_moe", "mlp_only_layers 0", mlp_only_layers=0),
    _refused("shared experts", "qwen3_moe", "shared_expert_intermediate_size 32", "shared experts", shared_expert_intermediate_size=32),
    _refused("experts in a dense family", "llama", "num_local_experts 8", "null", num_local_experts=8),
    # values
    _refused("half a layer", "qwen3", "num_hidden_layers 2.5", "a whole number", num_hidden_layers=2.5),
    _refused("two layers as a float", "qwen3", "num_hidden_layers 2.0", num_hidden_layers=2.0),
    _refused("true for one", "qwen3", "num_hidden_layers True", num_hidden_layers=True),
    _refused("layers as text", "qwen3", "num_hidden_layers '2'", num_hidden_layers="2"),
    _refused("null layers", "qwen3", "num_hidden_layers None", num_hidden_layers=None),
    _refused("no layers", "qwen3", "num_hidden_layers is missing", num_hidden_layers=MISSING),
    _refused("minus one layer", "qwen3", "num_hidden_layers -1", num_hidden_layers=-1),
    _refused("more layers than memory", "qwen3_moe", "num_hidden_layers 1000000000000", num_hidden_layers=10**12),
    _refused("a list of heads", "qwen3", "num_attention_heads [4, 4]", num_attention_heads=[4, 4]),
    _refused("no vocabulary", "qwen3", "vocab_size is missing", vocab_size=MISSING),
    _refused("huge vocabulary", "qwen3", "vocab_size 1000", vocab_size=10**100),
    _refused("no positions", "qwen3", "max_position_embeddings is missing", max_position_embeddings=MISSING),
    _refused("no hidden size", "qwen3", "hidden_size is missing", hidden_size=MISSING),
    _refused("no MLP size", "qwen3", "intermediate_size is missing", intermediate_size=MISSING),
    _refused("epsilon as text", "qwen3", "rms_norm_eps '1e-6'", rms_norm_eps="1e-6"),
    _refused("epsilon that is no number", "qwen3", "rms_norm_eps nan", rms_norm_eps=float("nan")),
    _taken("no epsilon", "qwen3", rms_norm_eps=MISSING),
    _refused("dropout of one", "qwen3", "attention_dropout 1", attention_dropout=1),
    _taken("several ends", "qwen3", eos_token_id=[2, 4]),
    _taken("null end", "qwen3", eos_token_id=None),
    _refused("end as text", "qwen3", "eos_token_id '</s>'", "token id", eos_token_id="</s>"),
    _refused("end as a float", "qwen3", "eos_token_id 2.0", eos_token_id=2.0),
    _refused("ends with a bool", "qwen3", "eos_token_id [2, True]", eos_token_id=[2, True]),
)  # fmt: skip
