"""Packed rows: the samples of a micro-batch side by side in one row, as index arrays over all
micro-batches of a rank at once.

Letters: c context-parallel ranks; T tokens of a sample, P of its prompt. Without context
parallelism a row holds the samples as they are. With it each sample is padded to 2c chunks and rank
r holds chunks r and 2c-1-r of each (zigzag, as in `slime.data.context_parallel`). A row ends in
padding up to a multiple of `pad_to`; the padding is a sequence of its own. A micro-batch without
samples is a row of padding.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from slime.data.ragged import concatenated_ranges


@dataclasses.dataclass(frozen=True)
class RowLayout:
    """The rows of one rank, one after the other. `row_offsets` [M + 1] bounds each micro-batch's
    row, in tokens of this rank.

    `cu_seqlens` (int32) holds every micro-batch's sequence bounds, over all context-parallel ranks;
    micro-batch m's are `cu_seqlens[cu_offsets[m] : cu_offsets[m + 1]]`. `max_seqlens` [M]: its
    longest sequence. `starts` [N]: where each sample starts.
    """

    row_offsets: np.ndarray
    cu_seqlens: np.ndarray
    cu_offsets: np.ndarray
    max_seqlens: list[int]
    starts: np.ndarray
    chunks: np.ndarray


@dataclasses.dataclass(frozen=True)
class RowIndices:
    """`places` [L] and `sources` [L]: the token at `sources` of the concatenated samples goes to
    `places` of the rows. `mask_places` and `mask_sources`: likewise for the loss mask, read from
    the concatenated responses, at the position whose logit predicts the token.
    """

    places: np.ndarray
    sources: np.ndarray
    mask_places: np.ndarray
    mask_sources: np.ndarray


@dataclasses.dataclass(frozen=True)
class RowShape:
    """How rows are cut: padded to a multiple of `pad_to` tokens on each rank. `contiguous`: the
    padded stream of all samples is cut into cp_size equal pieces ("allgather CP") and not into
    zigzag chunks.
    """

    pad_to: int
    cp_size: int = 1
    cp_rank: int = 0
    contiguous: bool = False

    @property
    def unit(self) -> int:
        """Tokens on this rank that a row is a multiple of; even under context parallelism, for
        padding has two chunks too.
        """
        return math.lcm(self.pad_to, 2) if self.cp_size > 1 else self.pad_to


def plan_rows(
    total_lengths: Sequence[int], micro_batches: Sequence[Sequence[int]], *, shape: RowShape
) -> RowLayout:
    """The rows of samples with these total lengths [N] in `micro_batches`, whose concatenation is
    0..N-1. Work per sample, not per token.
    """
    totals = np.asarray(total_lengths, dtype=np.int64)
    counts = np.array([len(indices) for indices in micro_batches], dtype=np.int64)
    contiguous = shape.contiguous and shape.cp_size > 1
    chunks = -(-totals // (2 * shape.cp_size))
    # tokens a sample takes in the row
    widths = totals if shape.cp_size == 1 or contiguous else 2 * chunks
    micro_batch_of = np.repeat(np.arange(len(counts)), counts)
    used = np.bincount(micro_batch_of, weights=widths, minlength=len(counts)).astype(np.int64)
    unit = shape.unit * (shape.cp_size if contiguous else 1)
    row_widths = np.maximum(unit, -(-used // unit) * unit)
    row_offsets = np.concatenate(([0], np.cumsum(row_widths)))
    starts = _starts_within(widths, micro_batch_of, used) + row_offsets[:-1][micro_batch_of]
    factor = 1 if contiguous else shape.cp_size
    cu_seqlens, cu_offsets, max_seqlens = _sequence_bounds(
        widths * factor, counts, (row_widths - used) * factor
    )
    if contiguous:
        row_offsets = row_offsets // shape.cp_size
    return RowLayout(row_offsets, cu_seqlens, cu_offsets, max_seqlens, starts, chunks)


def plan_row_indices(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    layout: RowLayout,
    *,
    shape: RowShape,
) -> RowIndices:
    """Where every token of the samples goes in the rows of `layout`."""
    totals, responses = (
        np.asarray(total_lengths, dtype=np.int64),
        np.asarray(response_lengths, dtype=np.int64),
    )
    contiguous = shape.contiguous and shape.cp_size > 1
    places, samples, positions = _token_places(
        totals, layout.starts, layout.chunks, shape, contiguous
    )
    mask_index = positions + 1 - (totals - responses)[samples]
    in_response = (mask_index >= 0) & (mask_index < responses[samples])
    sources = (np.cumsum(totals) - totals)[samples] + positions
    mask_sources = ((np.cumsum(responses) - responses)[samples] + mask_index)[in_response]
    mask_places = places[in_response]
    if contiguous:
        places, sources = _cut_rows(layout.row_offsets, places, sources, shape)
        mask_places, mask_sources = _cut_rows(layout.row_offsets, mask_places, mask_sources, shape)
    return RowIndices(places, sources, mask_places, mask_sources)


def _starts_within(widths: np.ndarray, micro_batch_of: np.ndarray, used: np.ndarray) -> np.ndarray:
    """Where each sample starts within its row [N]."""
    before_row = np.cumsum(used) - used
    return np.cumsum(widths) - widths - before_row[micro_batch_of]


def _token_places(
    totals: np.ndarray, starts: np.ndarray, chunks: np.ndarray, shape: RowShape, contiguous: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(place in the rows, sample, position in the sample) of every token this rank holds [L]."""
    samples = np.arange(len(totals))
    if shape.cp_size == 1 or contiguous:
        return (
            concatenated_ranges(starts, totals),
            np.repeat(samples, totals),
            concatenated_ranges(np.zeros_like(totals), totals),
        )
    firsts, lengths, places = [], [], []
    for half, chunk_index in enumerate((shape.cp_rank, 2 * shape.cp_size - 1 - shape.cp_rank)):
        first = chunk_index * chunks
        firsts.append(first)
        lengths.append(np.clip(totals - first, 0, chunks))
        places.append(starts + half * chunks)
    first, length, place = (
        np.stack(pair, axis=1).reshape(-1) for pair in (firsts, lengths, places)
    )
    return (
        concatenated_ranges(place, length),
        np.repeat(np.repeat(samples, 2), length),
        concatenated_ranges(first, length),
    )


def _cut_rows(
    row_offsets: np.ndarray, places: np.ndarray, sources: np.ndarray, shape: RowShape
) -> tuple[np.ndarray, np.ndarray]:
    """Keeps this rank's contiguous piece of every row; `places` are in whole rows before and in
    pieces after.
    """
    row = np.searchsorted(row_offsets * shape.cp_size, places, side="right") - 1
    pieces = np.diff(row_offsets)[row]
    local = places - row_offsets[row] * shape.cp_size - shape.cp_rank * pieces
    mine = (local >= 0) & (local < pieces)
    return (local + row_offsets[row])[mine], sources[mine]


def _sequence_bounds(
    seqlens: np.ndarray, counts: np.ndarray, padding: np.ndarray
) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Cumulative sequence bounds per micro-batch, its padding being a last sequence; where each
    micro-batch's start; the longest sequence.
    """
    padded = padding > 0
    offsets = np.concatenate(([0], np.cumsum(counts + padded + 1)))
    # per micro-batch a zero, its sequences, its padding
    lens = np.zeros(int(offsets[-1]), dtype=np.int64)
    lens[
        np.arange(len(seqlens)) + np.repeat(offsets[:-1] + 1 - (np.cumsum(counts) - counts), counts)
    ] = seqlens
    lens[offsets[1:][padded] - 1] = padding[padded]
    ends = np.cumsum(lens)
    cu = ends - np.repeat(ends[offsets[:-1]], np.diff(offsets))
    longest = np.maximum.reduceat(lens, offsets[:-1]).tolist() if len(counts) else []
    return cu.astype(np.int32), offsets, longest
