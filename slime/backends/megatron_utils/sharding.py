"""One tensor cut over tensor-parallel ranks, and put together again. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def is_gated(name: str) -> bool:
    """True for the MLP's first matrix, whose halves (gate, up) are cut one by one, so that each
    rank holds a part of both.
    """
    return "linear_fc1.weight" in name or "linear_fc1.bias" in name


def shard(
    name: str, tensor: torch.Tensor, *, size: int, rank: int, dim: int, stride: int = 1
) -> torch.Tensor:
    """Rank `rank`'s part of a whole parameter, cut along `dim` into `size` parts (each of `stride`
    interleaved pieces).
    """
    if size == 1:
        return tensor
    if is_gated(name):
        stride = 2
    pieces = tensor.chunk(size * stride, dim=dim)
    if len(pieces) != size * stride:
        raise ValueError(
            f"{name} with {tensor.shape[dim]} rows cannot be cut into {size * stride} pieces."
        )
    return pieces[rank] if stride == 1 else torch.cat(pieces[rank::size], dim=dim)


def unshard(
    name: str, shards: Sequence[torch.Tensor], *, dim: int, stride: int = 1
) -> torch.Tensor:
    """The whole parameter from all ranks' parts, in rank order: the inverse of `shard`."""
    if len(shards) == 1:
        return shards[0]
    if is_gated(name):
        stride = 2
    pieces = [part.chunk(stride, dim=dim) for part in shards]
    return torch.cat([piece[index] for index in range(stride) for piece in pieces], dim=dim)
