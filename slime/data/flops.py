"""Forward FLOPs of a transformer by sequence length: `linear * tokens + quadratic * tokens^2` per
sequence.

A multiply-add counts 2. Causal attention is counted half for QK^T and for AV. Padding is not
counted.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt


def calculate_qkv_projection_flops(
    seqlen: float, hidden_size: int, num_heads: int, num_query_groups: int, head_dim: int
) -> float:
    """Query, key and value projections of one layer."""
    return 2 * seqlen * hidden_size * (num_heads + 2 * num_query_groups) * head_dim


def calculate_attention_flops(
    seqlen: float, num_heads: int, qk_head_dim: int, v_head_dim: int | None = None
) -> float:
    """QK^T and AV of one layer under a causal mask."""
    return (
        seqlen
        * seqlen
        * num_heads
        * (qk_head_dim + (qk_head_dim if v_head_dim is None else v_head_dim))
    )


def calculate_output_flops(seqlen: float, hidden_size: int, num_heads: int, head_dim: int) -> float:
    """Output projection of one layer."""
    return 2 * seqlen * num_heads * head_dim * hidden_size


def calculate_mlp_flops(seqlen: float, hidden_size: int, ffn_hidden_size: int) -> float:
    """Three matrices (gate, up, down) of one layer's MLP."""
    return 2 * seqlen * hidden_size * ffn_hidden_size * 3


def calculate_lm_head_flops(seqlen: float, hidden_size: int, vocab_size: int) -> float:
    """Projection to the vocabulary."""
    return 2 * seqlen * hidden_size * vocab_size


@dataclasses.dataclass(frozen=True)
class FlopsModel:
    """Forward FLOPs of one sequence of s tokens: `linear * s + quadratic * s * s`."""

    linear: float
    quadratic: float

    def of(self, seqlens: npt.ArrayLike) -> np.ndarray:
        """Forward FLOPs of each sequence, float64 [N]."""
        lengths = np.asarray(seqlens, dtype=np.float64)
        return self.linear * lengths + self.quadratic * lengths * lengths

    @staticmethod
    def from_args(args: argparse.Namespace) -> FlopsModel:
        """The model of `args`: hidden_size, num_attention_heads, num_query_groups, vocab_size,
        ffn_hidden_size, num_experts, num_layers, kv_channels; MoE and MLA sizes where present
        (callers pass bare namespaces, so those are optional).
        """
        hidden = args.hidden_size
        head_dim = args.kv_channels or hidden // args.num_attention_heads
        qkv, attention, output = _attention_coefficients(args, hidden, head_dim)
        dense_layers, moe_layers = _count_layers(args)
        dense = calculate_mlp_flops(1, hidden, args.ffn_hidden_size)
        linear = (
            args.num_layers * (qkv + output)
            + dense_layers * dense
            + calculate_lm_head_flops(1, hidden, args.vocab_size)
        )
        if moe_layers:
            expert_size = getattr(args, "moe_ffn_hidden_size", None) or args.ffn_hidden_size
            shared = getattr(args, "moe_shared_expert_intermediate_size", None) or 0
            active = expert_size * (getattr(args, "moe_router_topk", None) or 1) + shared
            linear += moe_layers * (
                calculate_mlp_flops(1, hidden, active) + 2 * hidden * args.num_experts
            )
        return FlopsModel(linear=float(linear), quadratic=float(args.num_layers * attention))


def _attention_coefficients(
    args: argparse.Namespace, hidden: int, head_dim: int
) -> tuple[float, float, float]:
    """(FLOPs per token of QKV, per token^2 of attention, per token of the output projection) of one
    layer.
    """
    heads = args.num_attention_heads
    if not getattr(args, "multi_latent_attention", False):
        groups = args.num_query_groups or heads
        return (
            calculate_qkv_projection_flops(1, hidden, heads, groups, head_dim),
            calculate_attention_flops(1, heads, head_dim),
            calculate_output_flops(1, hidden, heads, head_dim),
        )
    q_dim = args.qk_head_dim + args.qk_pos_emb_head_dim
    q_rank = getattr(args, "q_lora_rank", None)
    query = 2 * hidden * heads * q_dim if q_rank is None else 2 * q_rank * (hidden + heads * q_dim)
    key_value = 2 * hidden * (
        args.kv_lora_rank + args.qk_pos_emb_head_dim
    ) + 2 * args.kv_lora_rank * heads * (args.qk_head_dim + args.v_head_dim)
    return (
        query + key_value,
        calculate_attention_flops(1, heads, q_dim, args.v_head_dim),
        calculate_output_flops(1, hidden, heads, args.v_head_dim),
    )


def _count_layers(args: argparse.Namespace) -> tuple[int, int]:
    """(dense layers, MoE layers)."""
    if not args.num_experts:
        return args.num_layers, 0
    frequency = getattr(args, "moe_layer_freq", None) or 1
    if isinstance(frequency, int):
        moe = sum(1 for layer in range(args.num_layers) if layer % frequency == 0)
    else:
        moe = sum(1 for flag in frequency if flag)
    return args.num_layers - moe, moe


def calculate_fwd_flops(seqlens: Iterable[int], args: argparse.Namespace) -> float:
    """Forward FLOPs of all sequences together, for the model sizes in `args` (see
    `FlopsModel.from_args`).
    """
    return float(FlopsModel.from_args(args).of(list(seqlens)).sum())
