"""Where the tokens of a packed micro-batch lie on one context-parallel rank, as index arrays. Pure:
no process group is asked.

Zigzag: a sequence of T tokens is padded to 2c chunks of ceil(T / 2c) tokens and rank r of c owns
chunks r and 2c-1-r, so that under causal attention each rank has the same work. A packed row holds,
sample after sample, this rank's two chunks. The logit at position p predicts token p+1, so response
token j of a prompt of P tokens reads the logit at position P-1+j.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np
import torch

from slime.exceptions import RolloutDataError

Range = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class ResponseLayout:
    """The response tokens that one rank owns in one packed row, in sample order. Index tensors are
    int64 on CPU, [L] = owned tokens.

    row_indices: row of the packed logits that predicts the token. token_indices: the token's place
    in the concatenation of all full sequences. response_indices: its place in the concatenation of
    all full responses. sample_indices: which sample it is of. local_lengths: owned response tokens
    per sample [N]. response_lengths: full ones [N]. whole: this rank owns every response token.
    """

    row_indices: torch.Tensor
    token_indices: torch.Tensor
    response_indices: torch.Tensor
    sample_indices: torch.Tensor
    local_lengths: tuple[int, ...]
    response_lengths: tuple[int, ...]
    whole: bool

    @property
    def num_local_tokens(self) -> int:
        return self.row_indices.numel()

    @property
    def num_response_tokens(self) -> int:
        return sum(self.response_lengths)


def compute_chunk_size(total_length: int, cp_size: int) -> int:
    """Returns the tokens of one zigzag chunk: ceil(total_length / (2 * cp_size))."""
    return -(-total_length // (2 * cp_size))


def compute_zigzag_ranges(
    total_length: int, response_length: int, *, cp_size: int, cp_rank: int
) -> tuple[int, tuple[Range, Range], tuple[Range, Range], tuple[Range, Range]]:
    """Returns (chunk size, chunks, logits, tokens): half-open ranges in tokens from the start of
    the prompt, two per rank.

    logits[k] is the part of chunk k whose logits predict response tokens, tokens[k] the tokens they
    predict; (0, 0) where none.
    """
    chunk = compute_chunk_size(total_length, cp_size)
    mirrored = 2 * cp_size - 1 - cp_rank
    chunks = (cp_rank * chunk, (cp_rank + 1) * chunk), (mirrored * chunk, (mirrored + 1) * chunk)
    first_logit = total_length - response_length - 1

    def cut(piece: Range) -> Range:
        low, high = max(piece[0], first_logit), min(piece[1], total_length - 1)
        return (low, high) if low < high else (0, 0)

    def shift(piece: Range) -> Range:
        return (piece[0] + 1, piece[1] + 1) if piece[0] < piece[1] else (0, 0)

    logits = cut(chunks[0]), cut(chunks[1])
    return chunk, chunks, logits, (shift(logits[0]), shift(logits[1]))


def plan_response_layout(
    total_lengths: Sequence[int] | np.ndarray,
    response_lengths: Sequence[int] | np.ndarray,
    *,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> ResponseLayout:
    """Returns the zigzag layout of rank `cp_rank`. `total_lengths` [N] and `response_lengths` [N]
    are in tokens.

    Raises RolloutDataError naming the sample when a response is longer than its sequence or has no
    prompt token before it.
    """
    return _plan_zigzag(_as_ints(total_lengths), _as_ints(response_lengths), cp_size, cp_rank)


def plan_contiguous_layout(
    total_lengths: Sequence[int], response_lengths: Sequence[int], *, num_rows: int, cp_rank: int
) -> ResponseLayout:
    """Returns the layout of a stream of unpadded samples that is split contiguously, `num_rows`
    rows per rank ("allgather CP").
    """
    total_T, response_T = _as_ints(total_lengths), _as_ints(response_lengths)
    _check_lengths(total_T, response_T)
    totals, responses = np.asarray(total_T, np.int64), np.asarray(response_T, np.int64)
    offsets = np.cumsum(totals) - totals
    begin = offsets + totals - responses - 1
    low = np.maximum(begin, cp_rank * num_rows)
    high = np.minimum(begin + responses, (cp_rank + 1) * num_rows)
    counts = np.maximum(high - low, 0)
    return _build_layout(low - cp_rank * num_rows, low - offsets, counts, 1, (total_T, response_T))


def _as_ints(values: Sequence[int] | np.ndarray) -> tuple[int, ...]:
    return (
        tuple(values.tolist())
        if hasattr(values, "tolist")
        else tuple(int(value) for value in values)
    )


def _check_lengths(total_lengths: tuple[int, ...], response_lengths: tuple[int, ...]) -> None:
    if len(total_lengths) != len(response_lengths):
        raise RolloutDataError(
            f"{len(total_lengths)} total lengths but {len(response_lengths)} response lengths in "
            "one micro-batch: "
            "both need one entry per sample."
        )
    for index, (total, response) in enumerate(zip(total_lengths, response_lengths, strict=True)):
        if response < 0 or response > total or (response == total and response > 0):
            raise RolloutDataError(
                f"sample {index} of the micro-batch has {total} tokens of which {response} are "
                "response: every response token "
                "needs a token before it that predicts it. Give the sample at least one prompt token."
            )


@functools.lru_cache(maxsize=32)
def _plan_zigzag(
    total_lengths: tuple[int, ...], response_lengths: tuple[int, ...], cp_size: int, cp_rank: int
) -> ResponseLayout:
    # Cached: the reducer, the log-probs and the losses of one micro-batch all ask for the same
    # layout.
    _check_lengths(total_lengths, response_lengths)
    totals, responses = np.asarray(total_lengths, np.int64), np.asarray(response_lengths, np.int64)
    first_logits = totals - responses - 1
    if cp_size == 1:
        offsets = np.cumsum(totals) - totals
        return _build_layout(
            offsets + first_logits, first_logits, responses, 1, (total_lengths, response_lengths)
        )
    chunks = -(-totals // (2 * cp_size))
    offsets = np.cumsum(2 * chunks) - 2 * chunks
    rows, positions, counts = [], [], []
    for half, chunk_index in enumerate((cp_rank, 2 * cp_size - 1 - cp_rank)):
        low = np.maximum(first_logits, chunk_index * chunks)
        high = np.minimum(totals - 1, (chunk_index + 1) * chunks)
        rows.append(offsets + half * chunks + low - chunk_index * chunks)
        positions.append(low)
        counts.append(np.maximum(high - low, 0))
    first_rows, first_positions, run_counts = (
        np.stack(pair, axis=1).reshape(-1) for pair in (rows, positions, counts)
    )
    return _build_layout(
        first_rows, first_positions, run_counts, 2, (total_lengths, response_lengths)
    )


def _build_layout(
    first_rows: np.ndarray,
    first_positions: np.ndarray,
    counts: np.ndarray,
    runs_per_sample: int,
    lengths: tuple[tuple, tuple],
) -> ResponseLayout:
    """Expands runs (first row, first logit position in the sequence, count), `runs_per_sample` of
    them per sample.
    """
    total_lengths, response_lengths = lengths
    totals, responses = np.asarray(total_lengths, np.int64), np.asarray(response_lengths, np.int64)
    samples = np.repeat(np.arange(totals.size), runs_per_sample)
    token_starts = np.repeat(np.cumsum(totals) - totals, runs_per_sample)
    response_starts = np.repeat(
        np.cumsum(responses) - responses - (totals - responses - 1), runs_per_sample
    )
    within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    local_lengths = tuple(counts.reshape(totals.size, runs_per_sample).sum(axis=1).tolist())

    def expand(starts: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.repeat(starts, counts) + within)

    return ResponseLayout(
        row_indices=expand(first_rows),
        token_indices=expand(token_starts + first_positions + 1),
        response_indices=expand(response_starts + first_positions),
        sample_indices=torch.from_numpy(np.repeat(samples, counts)),
        local_lengths=local_lengths,
        response_lengths=response_lengths,
        whole=local_lengths == response_lengths,
    )
