"""Hugging Face config.json -> Megatron field names. Pure: json in, plain values out, no torch, no
`args`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime.exceptions import ConfigError

# model_type of config.json -> what differs between the families.
_QKV_BIAS = {"qwen2": True, "qwen3": False, "llama": False, "qwen3_moe": False}
_QK_NORM = {"qwen3", "qwen3_moe"}
SUPPORTED_MODEL_TYPES = tuple(_QKV_BIAS)

# The only rotary scaling that Megatron-core's RotaryEmbedding computes, with its fixed constants.
_LLAMA3_CONSTANTS = {
    "low_freq_factor": 1,
    "high_freq_factor": 4,
    "original_max_position_embeddings": 8192,
}


def read_hf_config(folder: str | Path) -> dict[str, Any]:
    """Returns `folder`/config.json as a dict. Raises `ConfigError` where there is none or it is not
    JSON.
    """
    path = Path(folder) / "config.json"
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(
            f"{path} does not exist. Give a Hugging Face model folder (--hf-checkpoint)."
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a config: `text_config` of multimodal models, else `config`
    itself.
    """
    return config.get("text_config") or config


def megatron_fields_from_hf(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the model-shape fields that a Hugging Face config implies, under Megatron's names.

    `use_rope_scaling` and `rope_scaling_factor` appear only where the config scales rotary
    frequencies (Llama 3). Raises `ConfigError` for a model type or a feature that has no Megatron
    counterpart here.
    """
    config = text_config(config)
    family = config.get("model_type")
    if family not in _QKV_BIAS:
        raise ConfigError(
            f"model_type {family!r} of config.json is not supported. Known: "
            f"{', '.join(SUPPORTED_MODEL_TYPES)}."
        )
    if config.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"hidden_act {config['hidden_act']!r} is not supported, only silu.")
    if config.get("use_sliding_window") or set(config.get("layer_types") or ()) - {
        "full_attention"
    }:
        raise ConfigError(
            "Some layers use sliding-window or linear attention, which is not supported."
        )
    if (config.get("attention_bias") and family != "qwen2") or config.get("mlp_bias"):
        raise ConfigError(
            "attention_bias or mlp_bias is true: biases in the output projection and the MLP are "
            "not supported."
        )
    heads = config["num_attention_heads"]
    groups = config.get("num_key_value_heads") or heads
    fields: dict[str, Any] = {
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "ffn_hidden_size": config["intermediate_size"],
        "num_attention_heads": heads,
        "num_query_groups": groups,
        "group_query_attention": groups != heads,
        "kv_channels": config.get("head_dim") or config["hidden_size"] // heads,
        "vocab_size": config["vocab_size"],
        "max_position_embeddings": config["max_position_embeddings"],
        "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", False),
        "position_embedding_type": "rope",
        "rotary_base": rope_theta(config),
        "rotary_percent": float(config.get("partial_rotary_factor") or 1.0),
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.get("rms_norm_eps", 1e-6),
        "swiglu": True,
        "disable_bias_linear": True,
        "add_qkv_bias": _QKV_BIAS[family],
        "qk_layernorm": family in _QK_NORM,
        "attention_dropout": float(config.get("attention_dropout") or 0.0),
        "hidden_dropout": 0.0,
    }
    fields.update(_rope_scaling_fields(config))
    if family == "qwen3_moe":
        fields.update(_moe_fields(config))
    return fields


def rope_theta(config: Mapping[str, Any]) -> float:
    """Base of the rotary frequencies: `rope_parameters.rope_theta` (transformers 5) before
    `rope_theta`.
    """
    parameters = config.get("rope_parameters") or {}
    value = parameters.get("rope_theta", config.get("rope_theta"))
    return float(value if value is not None else 10000.0)


def check_against_hf(args_fields: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """Returns one sentence per field of `args_fields` that is given (not None) and contradicts
    `config`; empty if none does.
    """
    problems = []
    for name, expected in megatron_fields_from_hf(config).items():
        given = args_fields.get(name)
        if given is None or name in (
            "attention_dropout",
            "hidden_dropout",
            "max_position_embeddings",
        ):
            continue
        if name == "moe_layer_freq":
            same = layer_pattern(given, config["num_hidden_layers"]) == layer_pattern(
                expected, config["num_hidden_layers"]
            )
        else:
            same = (
                math.isclose(given, expected, rel_tol=1e-9)
                if isinstance(expected, float)
                else given == expected
            )
        if not same:
            flag = "--" + name.replace("_", "-")
            problems.append(
                f"{flag} is {given!r}, but the model's config.json says {expected!r}. Drop the "
                f"flag or use {expected!r}."
            )
    return problems


def layer_pattern(frequency: int | list[int], num_layers: int) -> list[int]:
    """Returns 1 for each MoE layer and 0 for each dense one. A number n means every n-th layer from
    the first; a list says it itself.

    (3, num_layers=4) -> [1, 0, 0, 1]
    """
    if isinstance(frequency, list):
        return frequency
    return [int(frequency > 0 and layer % frequency == 0) for layer in range(num_layers)]


def _rope_scaling_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    parameters = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") or parameters
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return {}
    differing = {
        key: scaling.get(key)
        for key, value in _LLAMA3_CONSTANTS.items()
        if scaling.get(key) != value
    }
    if kind != "llama3" or differing:
        raise ConfigError(
            f"rope_scaling of type {kind!r} {differing or ''} is not supported; Megatron-core "
            f"computes llama3 with {_LLAMA3_CONSTANTS}."
        )
    return {"use_rope_scaling": True, "rope_scaling_factor": float(scaling["factor"])}


def _moe_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    num_layers = config["num_hidden_layers"]
    step = config.get("decoder_sparse_step", 1)
    dense = set(config.get("mlp_only_layers") or ())
    pattern = [int(layer not in dense and (layer + 1) % step == 0) for layer in range(num_layers)]
    return {
        "num_moe_experts": config.get("num_experts") or config["num_local_experts"],
        "moe_ffn_hidden_size": config["moe_intermediate_size"],
        "moe_router_topk": config["num_experts_per_tok"],
        "moe_layer_freq": 1 if all(pattern) else pattern,
        # Megatron normalizes the chosen experts' weights iff the softmax runs after the choice.
        "moe_router_pre_softmax": not config.get("norm_topk_prob", False),
    }
