"""The shape of a model: config.json read once, checked, frozen. Trainer, engine and converters read
`ModelShape` and never the file, so what one of them accepts the others accept.

A feature that one of them does not compute is a ConfigError for all, in the same sentence: the
file, the key, its value and what is supported. The reference for what a key means is transformers'
code of the family. JSON only: no torch, no Megatron.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime.exceptions import ConfigError
from slime.models.config_fields import ConfigFields
from slime.models.families import FAMILIES, Family
from slime.models.hf_folder import check_regular_files, read_json

SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3")
SUPPORTED_DTYPES = ("float32", "bfloat16", "float16")
_ROPE_KEYS = frozenset(
    "rope_type type rope_theta factor low_freq_factor high_freq_factor "
    "original_max_position_embeddings partial_rotary_factor".split()
)
# Key of config.json that turns a feature on -> the feature. None of them is computed here; null,
# false, 0 and an empty list or object leave it off.
_UNSUPPORTED = {
    "text_config": "language model inside a multimodal one",
    "vision_config": "vision encoder",
    "audio_config": "audio encoder",
    "quantization_config": "quantized weights",
    "compression_config": "quantized weights",
    "kv_lora_rank": "multi-head latent attention",
    "q_lora_rank": "multi-head latent attention",
    "num_nextn_predict_layers": "multi-token prediction",
    "mtp_num_layers": "multi-token prediction",
    "mtp_num_hidden_layers": "multi-token prediction",
    "attention_chunk_size": "chunked attention",
    "no_rope_layers": "layers without rotary positions",
    "attn_logit_softcapping": "capped attention scores",
    "final_logit_softcapping": "capped logits",
    "n_shared_experts": "shared experts",
    "shared_expert_intermediate_size": "shared experts",
    "n_routed_experts": "experts of DeepSeek's kind",
}
# Two spellings of one number.
_EXPERT_COUNTS = ("num_experts", "num_local_experts")
# Fields that change what the same weights compute, and that no tensor's name or shape shows.
_INVISIBLE_IN_WEIGHTS = (
    "model_type",
    "num_heads",
    "num_kv_heads",
    "rms_norm_eps",
    "rope",
    "num_experts_per_token",
    "norm_topk_prob",
)


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: base and, for `llama3` and `linear`, how low frequencies are stretched."""

    theta: float
    rope_type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """Shape of a decoder-only transformer. Sizes are counts of elements; `num_experts == 0` means a
    dense MLP in every layer.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    tie_word_embeddings: bool
    # Biases of the query, key and value projections.
    qkv_bias: bool
    # Biases of attention's output projection and of the MLP.
    linear_bias: bool
    # RMSNorm on the queries and keys of each head.
    qk_norm: bool
    attention_dropout: float
    checkpoint_dtype: str
    num_experts: int = 0
    num_experts_per_token: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    # Numbers of the layers that have experts, ascending.
    sparse_layers: tuple[int, ...] = ()

    @property
    def family(self) -> Family:
        """What holds for every model of this type."""
        return FAMILIES[self.model_type]

    @property
    def q_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads together, equal to that of the value heads."""
        return self.num_kv_heads * self.head_dim

    def check_same_computation(self, other: ModelShape, source: str) -> None:
        """ConfigError where weights made for `other`, the config in `source`, would fit this model
        and compute something else in it.
        """
        for name in _INVISIBLE_IN_WEIGHTS:
            ours, theirs = getattr(self, name), getattr(other, name)
            if ours != theirs:
                raise ConfigError(f"{source} has {name} {theirs}, the model in use has {ours}.")


def read_model_shape(folder: str | Path) -> ModelShape:
    """Returns the model that `folder`/config.json describes. ConfigError if the file or one of its
    features is not supported.
    """
    check_regular_files(Path(folder))
    path = Path(folder) / "config.json"
    return model_shape(read_json(path), source=str(path))


def model_shape(config: Mapping[str, Any], *, source: str = "config.json") -> ModelShape:
    """Returns the model described by the keys of a transformers config. ConfigError names `source`,
    the key, its value and what is supported.
    """
    fields = ConfigFields(config, source)
    family = _family(fields)
    _refuse_unsupported(fields, family)
    num_layers = fields.count("num_hidden_layers", maximum=10_000)
    _check_attention_types(fields, family, num_layers)
    fields.token_ids("eos_token_id")
    num_heads, num_kv_heads = head_counts(fields)
    hidden_size = fields.count("hidden_size")
    qkv_bias, linear_bias = _biases(fields, family)
    return ModelShape(
        model_type=family.model_type,
        vocab_size=fields.count("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.count("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_head_dim(fields, hidden_size, num_heads),
        rms_norm_eps=fields.positive("rms_norm_eps", default=1e-6),
        max_position_embeddings=fields.count("max_position_embeddings", maximum=2**31 - 1),
        rope=_rope(fields),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        qkv_bias=qkv_bias,
        linear_bias=linear_bias,
        qk_norm=family.qk_norm,
        attention_dropout=fields.share("attention_dropout"),
        checkpoint_dtype=_checkpoint_dtype(fields),
        **(_experts(fields, num_layers) if family.is_moe else {}),
    )


def head_counts(fields: ConfigFields) -> tuple[int, int]:
    """Returns (query heads, key/value heads); without `num_key_value_heads` each query head has its
    own keys and values.
    """
    num_heads = fields.count("num_attention_heads")
    num_kv_heads = fields.count("num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise fields.error(
            f"num_attention_heads {num_heads} is not a multiple of num_key_value_heads "
            f"{num_kv_heads}; supported: a multiple."
        )
    return num_heads, num_kv_heads


def _family(fields: ConfigFields) -> Family:
    model_type = fields.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise fields.unsupported("model_type", ", ".join(FAMILIES))
    family = FAMILIES[model_type]
    architectures = fields.get("architectures")
    if architectures and not (
        isinstance(architectures, list)
        and any(name in architectures for name in family.architectures)
    ):
        raise fields.unsupported("architectures", ", ".join(family.architectures))
    return family


def _refuse_unsupported(fields: ConfigFields, family: Family) -> None:
    features = dict(_UNSUPPORTED)
    if not family.is_moe:
        features |= dict.fromkeys(_EXPERT_COUNTS, f"experts in a {family.model_type} model")
    for key, feature in features.items():
        if fields.get(key):
            raise fields.unsupported(key, f"null (no {feature})")
    if fields.get("hidden_act", "silu") != "silu":
        raise fields.unsupported("hidden_act", "silu")
    if fields.positive("partial_rotary_factor", default=1.0) != 1.0:
        raise fields.unsupported("partial_rotary_factor", "1.0")


def _check_attention_types(fields: ConfigFields, family: Family, num_layers: int) -> None:
    """Every layer must attend to the whole sequence. A sliding window that is set but switched off,
    or that begins above the last layer, is not in use.
    """
    kinds = fields.get("layer_types")
    if kinds is not None and not isinstance(kinds, list):
        raise fields.unsupported("layer_types", "a list of full_attention, one per layer")
    other = [kind for kind in kinds or () if kind != "full_attention"]
    if other:
        raise fields.error(
            f"layer_types has {other[0]!r}, which is not supported; supported: full_attention."
        )
    window = fields.get("sliding_window", "of transformers' default size")
    if not fields.flag("use_sliding_window") or window is None:
        return
    if family.max_window_layers is not None:
        first = fields.count("max_window_layers", default=family.max_window_layers, minimum=0)
        if kinds is not None or first >= num_layers:
            return
    raise fields.error(
        f"use_sliding_window True with sliding_window {window} is not supported; supported: "
        "use_sliding_window false (every layer attends to the whole sequence)."
    )


def _head_dim(fields: ConfigFields, hidden_size: int, num_heads: int) -> int:
    if fields.get("head_dim") is None and hidden_size % num_heads:
        raise fields.error(
            f"hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads}; "
            "supported: a multiple, or a head_dim."
        )
    head_dim = fields.count("head_dim", default=hidden_size // num_heads)
    if head_dim % 2:
        raise fields.error(
            f"head_dim {head_dim} is odd; supported: even ones (rotary positions turn pairs)."
        )
    return head_dim


def _biases(fields: ConfigFields, family: Family) -> tuple[bool, bool]:
    """Returns (biases of queries, keys and values; biases of the other linear layers)."""
    attention, mlp = fields.flag("attention_bias"), fields.flag("mlp_bias")
    if family.always_qkv_bias:
        attention = False  # transformers does not read it for this family
    if family.knows_linear_biases and attention != mlp:
        raise fields.error(
            f"attention_bias {attention} with mlp_bias {mlp} is not supported; supported: both "
            "true or both false."
        )
    if not family.knows_linear_biases and (attention or mlp):
        raise fields.unsupported("attention_bias" if attention else "mlp_bias", "false")
    return attention or family.always_qkv_bias, mlp


def _checkpoint_dtype(fields: ConfigFields) -> str:
    key = "dtype" if fields.get("dtype") is not None else "torch_dtype"
    name = fields.get(key)
    if name is None:
        return "float32"
    name = name.removeprefix("torch.") if isinstance(name, str) else name
    if name not in SUPPORTED_DTYPES:
        raise fields.unsupported(key, ", ".join(SUPPORTED_DTYPES))
    return name


def _rope(fields: ConfigFields) -> RopeConfig:
    old, new = fields.section("rope_scaling"), fields.section("rope_parameters")
    for key in sorted(set(old.values) & set(new.values)):
        if old.values[key] != new.values[key]:
            raise fields.error(
                f"rope_scaling.{key} {old.values[key]!r} contradicts rope_parameters.{key} "
                f"{new.values[key]!r}; supported: one of the two sections."
            )
    rope = old.with_defaults(new.values) if old.values else new
    for key in rope.values:
        if key not in _ROPE_KEYS:
            raise rope.unsupported(key, ", ".join(sorted(_ROPE_KEYS)))
    if rope.positive("partial_rotary_factor", default=1.0) != 1.0:
        raise rope.unsupported("partial_rotary_factor", "1.0")
    theta = rope.positive("rope_theta", default=fields.positive("rope_theta", default=10000.0))
    key = "rope_type" if rope.get("rope_type") is not None else "type"
    rope_type = rope.get(key) or "default"
    if rope_type not in SUPPORTED_ROPE_TYPES:
        raise rope.unsupported(key, ", ".join(SUPPORTED_ROPE_TYPES))
    if rope_type == "default":
        return RopeConfig(theta=theta)
    if rope_type == "linear":
        return RopeConfig(theta=theta, rope_type=rope_type, factor=rope.positive("factor"))
    low, high = rope.positive("low_freq_factor"), rope.positive("high_freq_factor")
    if low >= high:
        raise rope.unsupported("high_freq_factor", f"more than low_freq_factor {low}")
    return RopeConfig(
        theta=theta,
        rope_type=rope_type,
        factor=rope.positive("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=rope.count("original_max_position_embeddings"),
    )


def _experts(fields: ConfigFields, num_layers: int) -> dict[str, Any]:
    given = [key for key in _EXPERT_COUNTS if fields.get(key) is not None] or ["num_experts"]
    num_experts = fields.count(given[0], maximum=65_536)
    if len({fields.count(key) for key in given}) > 1:
        raise fields.unsupported(given[1], f"{num_experts}, as {given[0]}")
    dense = fields.layer_numbers("mlp_only_layers")
    step = fields.count("decoder_sparse_step", default=1)
    return {
        "num_experts": num_experts,
        "num_experts_per_token": fields.count("num_experts_per_tok", maximum=num_experts),
        "moe_intermediate_size": fields.count("moe_intermediate_size"),
        "norm_topk_prob": fields.flag("norm_topk_prob"),
        "sparse_layers": tuple(
            layer for layer in range(num_layers) if layer not in dense and (layer + 1) % step == 0
        ),
    }
