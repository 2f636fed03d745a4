"""The shape of a model under the names of Megatron-core's options, and options that contradict it.
Pure: no torch, no `args`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from slime.models.shape import ModelShape

# Options that may differ from config.json: they are chosen for the training run.
_FREE = ("attention_dropout", "hidden_dropout", "max_position_embeddings")


def megatron_fields(shape: ModelShape) -> dict[str, Any]:
    """Returns the model-shape options that follow from `shape`; the `moe_` options only for a model
    with experts.
    """
    fields: dict[str, Any] = {
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "ffn_hidden_size": shape.intermediate_size,
        "num_attention_heads": shape.num_heads,
        "num_query_groups": shape.num_kv_heads,
        "group_query_attention": shape.num_kv_heads != shape.num_heads,
        "kv_channels": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_position_embeddings,
        "untie_embeddings_and_output_weights": not shape.tie_word_embeddings,
        "position_embedding_type": "rope",
        "rotary_base": shape.rope.theta,
        "rotary_percent": 1.0,
        "use_rope_scaling": shape.rope.rope_type == "llama3",
        "rope_scaling_factor": shape.rope.factor,
        "normalization": "RMSNorm",
        "layernorm_epsilon": shape.rms_norm_eps,
        "swiglu": True,
        "disable_bias_linear": not shape.linear_bias,
        "add_qkv_bias": shape.qkv_bias,
        "qk_layernorm": shape.qk_norm,
        "attention_dropout": shape.attention_dropout,
        "hidden_dropout": 0.0,
    }
    if shape.num_experts:
        pattern = [int(layer in shape.sparse_layers) for layer in range(shape.num_layers)]
        fields |= {
            "num_moe_experts": shape.num_experts,
            "moe_ffn_hidden_size": shape.moe_intermediate_size,
            "moe_router_topk": shape.num_experts_per_token,
            "moe_layer_freq": 1 if all(pattern) else pattern,
            # Megatron normalizes the chosen experts' weights iff the softmax runs after the choice.
            "moe_router_pre_softmax": not shape.norm_topk_prob,
        }
    return fields


def contradictions(options: Mapping[str, Any], shape: ModelShape) -> list[str]:
    """Returns one sentence per option that is given (not None) and contradicts `shape`; empty if
    none does.
    """
    problems = []
    for name, expected in megatron_fields(shape).items():
        given = options.get(name)
        if given is None or name in _FREE or _same(name, given, expected, shape.num_layers):
            continue
        flag = "--" + name.replace("_", "-")
        problems.append(
            f"{flag} is {given!r}, but the model's config.json says {expected!r}. Drop the flag "
            f"or use {expected!r}."
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


def _same(name: str, given: Any, expected: Any, num_layers: int) -> bool:
    if name == "moe_layer_freq":
        return layer_pattern(given, num_layers) == layer_pattern(expected, num_layers)
    if isinstance(expected, float):
        return math.isclose(given, expected, rel_tol=1e-9)
    return given == expected
