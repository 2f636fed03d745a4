"""Rotary frequencies of every supported kind of scaling: one function for trainer and engine."""

from __future__ import annotations

import math

import torch

from slime.models.shape import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Returns float32 [head_dim / 2]. `llama3`: wavelengths above low_freq_factor are stretched by
    `factor`, those between blended.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.rope_type == "linear":
        return frequencies / rope.factor
    if rope.rope_type != "llama3":
        return frequencies
    wavelengths = 2 * math.pi / frequencies
    longest = rope.original_max_position_embeddings / rope.low_freq_factor
    shortest = rope.original_max_position_embeddings / rope.high_freq_factor
    smooth = (rope.original_max_position_embeddings / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - smooth) * frequencies / rope.factor + smooth * frequencies
    stretched = torch.where(wavelengths > longest, frequencies / rope.factor, frequencies)
    between = (wavelengths <= longest) & (wavelengths >= shortest)
    return torch.where(between, blended, stretched)
