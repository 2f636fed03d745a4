"""What config.json of a Hugging Face folder says about a decoder, checked: an unknown feature is an
error, not a wrong model.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from slime.exceptions import ConfigError
from slime.models.hf_folder import read_json

SUPPORTED_MODEL_TYPES = ("llama", "qwen2", "qwen3", "qwen3_moe")
SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3")


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
class DecoderConfig:
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
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    checkpoint_dtype: str
    num_experts: int = 0
    num_experts_per_token: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    sparse_layers: tuple[int, ...] = ()

    @property
    def q_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads together, equal to that of the value heads."""
        return self.num_kv_heads * self.head_dim


def read_decoder_config(folder: str | Path) -> DecoderConfig:
    """Returns the decoder that `folder`/config.json describes. ConfigError if the file or one of
    its features is not supported.
    """
    path = Path(folder) / "config.json"
    return decoder_config_from_hf(read_json(path), source=str(path))


def decoder_config_from_hf(config: dict[str, Any], *, source: str = "config.json") -> DecoderConfig:
    """Returns the decoder described by the fields of a transformers config. ConfigError names the
    field that is not supported.
    """
    model_type = config.get("model_type")
    if model_type not in SUPPORTED_MODEL_TYPES:
        raise ConfigError(
            f"{source}: model_type {model_type!r} is not supported by the embedded engine "
            f"(supported: {', '.join(SUPPORTED_MODEL_TYPES)})."
            " Serve this model with SGLang and pass --rollout-external-engine-addrs."
        )
    _refuse_unsupported(config, source)
    num_heads = _positive(config, "num_attention_heads", source)
    hidden_size = _positive(config, "hidden_size", source)
    num_kv_heads = config.get("num_key_value_heads") or num_heads
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"{source}: num_attention_heads {num_heads} is not a multiple of num_key_value_heads "
            f"{num_kv_heads}."
        )
    head_dim = config.get("head_dim") or hidden_size // num_heads
    if head_dim % 2:
        raise ConfigError(
            f"{source}: head_dim {head_dim} is odd; rotary embedding needs an even one."
        )
    bias = bool(config.get("attention_bias", False))
    num_layers = _positive(config, "num_hidden_layers", source)
    decoder = DecoderConfig(
        model_type=model_type,
        vocab_size=_positive(config, "vocab_size", source),
        hidden_size=hidden_size,
        intermediate_size=_positive(config, "intermediate_size", source),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        max_position_embeddings=_positive(config, "max_position_embeddings", source),
        rope=_rope(config, source),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=model_type == "qwen2" or bias,
        o_bias=model_type != "qwen2" and bias,
        mlp_bias=model_type == "llama" and bool(config.get("mlp_bias", False)),
        qk_norm=model_type in ("qwen3", "qwen3_moe"),
        checkpoint_dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32").replace(
            "torch.", ""
        ),
    )
    return _with_experts(decoder, config, source) if model_type == "qwen3_moe" else decoder


def _with_experts(decoder: DecoderConfig, config: dict[str, Any], source: str) -> DecoderConfig:
    num_experts = _positive(
        config, "num_experts" if "num_experts" in config else "num_local_experts", source
    )
    dense = set(config.get("mlp_only_layers") or ())
    step = config.get("decoder_sparse_step", 1)
    return dataclasses.replace(
        decoder,
        num_experts=num_experts,
        num_experts_per_token=_positive(config, "num_experts_per_tok", source),
        moe_intermediate_size=_positive(config, "moe_intermediate_size", source),
        norm_topk_prob=bool(config.get("norm_topk_prob", False)),
        sparse_layers=tuple(
            i for i in range(decoder.num_layers) if i not in dense and (i + 1) % step == 0
        ),
    )


def _positive(config: dict[str, Any], name: str, source: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or value <= 0:
        raise ConfigError(f"{source}: {name} is {value!r}, expected a positive whole number.")
    return value


def _refuse_unsupported(config: dict[str, Any], source: str) -> None:
    if config.get("hidden_act", "silu") != "silu":
        raise ConfigError(
            f"{source}: hidden_act {config['hidden_act']!r} is not supported, only silu."
        )
    if config.get("quantization_config"):
        raise ConfigError(
            f"{source}: quantization_config is set; the embedded engine loads unquantized weights "
            "only."
        )
    if config.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError(
            f"{source}: partial_rotary_factor {config['partial_rotary_factor']} is not supported, "
            "only 1.0."
        )
    if config.get("use_sliding_window") and config.get("sliding_window"):
        raise ConfigError(
            f"{source}: sliding-window attention (sliding_window {config['sliding_window']}) is "
            "not supported."
        )
    if "sliding_attention" in (config.get("layer_types") or ()):
        raise ConfigError(f"{source}: layer_types has sliding_attention, which is not supported.")


def _rope(config: dict[str, Any], source: str) -> RopeConfig:
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(scaling.get("rope_theta") or config.get("rope_theta") or 10000.0)
    rope_type = scaling.get("rope_type") or scaling.get("type") or "default"
    if rope_type not in SUPPORTED_ROPE_TYPES:
        raise ConfigError(
            f"{source}: rope type {rope_type!r} is not supported (supported: "
            f"{', '.join(SUPPORTED_ROPE_TYPES)})."
        )
    if rope_type == "default":
        return RopeConfig(theta=theta)
    try:
        if rope_type == "linear":
            return RopeConfig(theta=theta, rope_type=rope_type, factor=float(scaling["factor"]))
        return RopeConfig(
            theta=theta,
            rope_type=rope_type,
            factor=float(scaling["factor"]),
            low_freq_factor=float(scaling["low_freq_factor"]),
            high_freq_factor=float(scaling["high_freq_factor"]),
            original_max_position_embeddings=int(scaling["original_max_position_embeddings"]),
        )
    except KeyError as error:
        raise ConfigError(
            f"{source}: rope type {rope_type} lacks the field {error.args[0]!r}."
        ) from None
