"""How a packed (THD) row is laid out: positions of its tokens, and dense buckets of its sequences
for attention.

Letters: T tokens of this rank's row, B sequences of a bucket, L tokens of a bucket's longest
sequence (q: on this rank, k: over all context-parallel ranks), S sequences of the row.

Context-parallel layout (zigzag): a sequence of `length` tokens, a multiple of 2*cp, is 2*cp chunks;
rank r holds chunk r and chunk 2*cp-1-r, one after the other.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import torch

from slime.exceptions import RolloutDataError

# Sequences up to this length share one bucket whatever their lengths: an operation costs more than
# its padding.
SHORT_TOKENS = 64


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Sequences of similar length, padded to the longest.

    Padding repeats a sequence's last token, so a padded query is computed and thrown away, and a
    padded key comes after every real query.
    """

    # [B, Lq] local token of each query; None: the row is exactly [B, Lq] already
    query_rows: torch.Tensor | None
    # [B, Lk] token of each key among the gathered tokens of all ranks; None without CP
    key_rows: torch.Tensor | None
    # [B or 1, 1, Lq, Lk] True where the query may see the key; None: plain causal
    mask: torch.Tensor | None
    shape: tuple[int, int]  # (B, Lq)


class PackedPlan:
    """What attention and rotary embeddings need to know of one packed row; made once per
    micro-batch, used by every layer.
    """

    def __init__(
        self, lengths_S: np.ndarray, *, cp_size: int, cp_rank: int, device: torch.device
    ) -> None:
        if cp_size > 1 and (lengths_S % (2 * cp_size)).any():
            bad = int(lengths_S[lengths_S % (2 * cp_size) != 0][0])
            raise RolloutDataError(
                f"A packed sequence of {bad} tokens does not divide into the {2 * cp_size} chunks "
                "that context parallel size "
                f"{cp_size} needs. Pad every sequence to a multiple of {2 * cp_size} before packing."
            )
        self.cp_size, self.cp_rank, self.device = cp_size, cp_rank, device
        self.lengths_S = lengths_S
        self.local_lengths_S = lengths_S // cp_size
        self.local_starts_S = np.concatenate(([0], np.cumsum(self.local_lengths_S)[:-1])).astype(
            np.int64
        )
        self.num_local_tokens = int(self.local_lengths_S.sum())
        offsets_T = np.arange(self.num_local_tokens) - np.repeat(
            self.local_starts_S, self.local_lengths_S
        )
        self._offsets_T = offsets_T
        self.positions_T = self._to_device(
            self._positions(offsets_T, np.repeat(lengths_S, self.local_lengths_S))
        )
        self.buckets, self.restore_T = self._plan_buckets()
        self._rotary: tuple[Any, ...] | None = None

    def rotary_tables(
        self, freqs: torch.Tensor, mscale: float, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine of every token's angles, each `[T, 1, d]`, from `freqs` `[>= longest
        sequence, 1, 1, d]`.
        """
        if (
            self._rotary is None
            or self._rotary[0] is not freqs
            or self._rotary[1:3] != (mscale, dtype)
        ):
            angles = freqs[:, 0].index_select(0, self.positions_T)
            self._rotary = (
                freqs,
                mscale,
                dtype,
                (angles.cos() * mscale).to(dtype),
                (angles.sin() * mscale).to(dtype),
            )
        return self._rotary[3], self._rotary[4]

    def _positions(self, offsets: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Position in its sequence of the token at local `offsets` of a sequence of `lengths`
        tokens, on this rank.
        """
        if self.cp_size == 1:
            return offsets
        chunk = lengths // (2 * self.cp_size)
        in_second = offsets >= chunk
        return (
            np.where(in_second, (2 * self.cp_size - 2 - self.cp_rank) * chunk, self.cp_rank * chunk)
            + offsets
        )

    def _plan_buckets(self) -> tuple[list[Bucket], torch.Tensor | None]:
        lengths = self.local_lengths_S
        order = np.argsort(-lengths, kind="stable")
        order = order[lengths[order] > 0]
        groups: list[np.ndarray] = []
        start = 0
        while start < len(order):
            longest = lengths[order[start]]
            shortest_allowed = 0 if longest <= SHORT_TOKENS else longest // 2 + 1
            stop = start + int((lengths[order[start:]] >= shortest_allowed).sum())
            # Inside a bucket, the row's own order: equal lengths then need no gather at all.
            groups.append(np.sort(order[start:stop]))
            start = stop
        if len(groups) == 1 and len(groups[0]) == len(lengths) and (lengths == lengths[0]).all():
            return [self._bucket(groups[0], contiguous=True)], None
        flat_start_S = np.zeros(len(lengths), dtype=np.int64)
        base = 0
        for group in groups:
            width = int(lengths[group].max())
            flat_start_S[group] = base + np.arange(len(group)) * width
            base += len(group) * width
        restore_T = np.repeat(flat_start_S, lengths) + self._offsets_T
        return [self._bucket(group, contiguous=False) for group in groups], self._to_device(
            restore_T
        )

    def _bucket(self, group: np.ndarray, *, contiguous: bool) -> Bucket:
        local_lengths = self.local_lengths_S[group][:, None]
        width = int(local_lengths.max())
        offsets = np.minimum(np.arange(width)[None, :], local_lengths - 1)  # [B, Lq]
        query_rows = (
            None if contiguous else self._to_device(self.local_starts_S[group][:, None] + offsets)
        )
        shape = (len(group), width)
        if self.cp_size == 1:
            return Bucket(query_rows, None, None, shape)
        lengths = self.lengths_S[group][:, None]
        positions_k = np.arange(width * self.cp_size)[None, :]  # [1, Lk]
        inside = np.minimum(positions_k, lengths - 1)  # [B, Lk]
        chunk = lengths // (2 * self.cp_size)
        piece, rest = inside // chunk, inside % chunk
        first_half = piece < self.cp_size
        owner = np.where(first_half, piece, 2 * self.cp_size - 1 - piece)
        key_rows = (
            owner * self.num_local_tokens
            + self.local_starts_S[group][:, None]
            + rest
            + np.where(first_half, 0, chunk)
        )
        positions_q = self._positions(offsets, lengths)  # [B, Lq]
        if (lengths == lengths[0]).all():
            positions_q = positions_q[:1]
        mask = positions_q[:, None, :, None] >= positions_k[:, None, None, :]
        return Bucket(query_rows, self._to_device(key_rows), self._to_device(mask), shape)

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)


def packed_plan(cu_seqlens: torch.Tensor, *, cp_size: int, cp_rank: int) -> PackedPlan:
    """The plan of the row whose global (all CP ranks, padded) boundaries are `cu_seqlens` `[S +
    1]`.

    The tensor keeps its plan for the layers; equal boundaries share one over the passes of a
    rollout.
    """
    plans = cu_seqlens.__dict__.setdefault("_packed_plans", {})
    plan = plans.get((cp_size, cp_rank))
    if plan is None:
        bounds = cu_seqlens.detach().cpu().numpy().astype(np.int64)
        plan = plans[cp_size, cp_rank] = _plan_of_bounds(
            bounds.tobytes(), cp_size, cp_rank, cu_seqlens.device
        )
    return plan


@functools.lru_cache(maxsize=256)
def _plan_of_bounds(bounds: bytes, cp_size: int, cp_rank: int, device: torch.device) -> PackedPlan:
    lengths_S = np.diff(np.frombuffer(bounds, dtype=np.int64))
    return PackedPlan(lengths_S, cp_size=cp_size, cp_rank=cp_rank, device=device)
