"""Rotary position embedding: cosines and sines by position, in the layout of transformers'
`rotate_half`.
"""

from __future__ import annotations

import math

import torch

from slime.models.model_config import RopeConfig


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


class RotaryTable:
    """Cosines and sines of positions 0..n, grown by doubling as longer sequences come."""

    def __init__(
        self, rope: RopeConfig, head_dim: int, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._frequencies = inverse_frequencies(rope, head_dim).to(device)
        self._dtype = dtype
        self._cos = torch.empty(0, head_dim, device=device, dtype=dtype)
        self._sin = torch.empty(0, head_dim, device=device, dtype=dtype)

    def lookup(
        self, positions: torch.Tensor, *, max_position: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (cos, sin), each [N, head_dim], at `positions` [N]; `max_position` bounds them
        (no device sync needed).
        """
        if max_position >= self._cos.shape[0]:
            # Always a power of two, and at least 64: each value is computed by the same vectorised
            # code path at any size.
            size = 1 << max(6, max_position.bit_length())
            angles = (
                torch.arange(size, device=self._frequencies.device, dtype=torch.float32)[:, None]
                * self._frequencies
            )
            angles = torch.cat((angles, angles), dim=-1)
            self._cos, self._sin = angles.cos().to(self._dtype), angles.sin().to(self._dtype)
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)


def apply_rotary(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Returns `states` [N, heads, head_dim] rotated by `cos`, `sin` [N, 1, head_dim]."""
    half = states.shape[-1] // 2
    rotated = torch.cat((-states[..., half:], states[..., :half]), dim=-1)
    return states * cos + rotated * sin
