"""Rotary position embedding: cosines and sines by position, in the layout of transformers'
`rotate_half`.
"""

from __future__ import annotations

import torch

from slime.models.rope import inverse_frequencies
from slime.models.shape import RopeConfig


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
