"""Checks of how well the model answered, from tokens: empty, short, long, cut, repeated. Each looks at
the rows still alive and returns which of them fail.
"""

from __future__ import annotations

import math

import numpy as np

from slime.gate.chunk import (
    STATUS_TRUNCATED,
    Chunk,
    rows_in,
)
from slime.gate.config import Level
from slime.gate.text import is_blank

_LENIENT_PERIOD = 8


def find_no_response(chunk: Chunk, rows: np.ndarray) -> np.ndarray:
    return chunk.response_lengths[rows] == 0


def find_too_short(chunk: Chunk, rows: np.ndarray) -> np.ndarray:
    return (
        chunk.response_lengths[rows]
        < chunk.per_task("min_response_tokens", chunk.config.min_response_tokens, 0)[rows]
    )


def usable_lengths(chunk: Chunk) -> np.ndarray:
    """[N] tokens a response may have: min(own maximum, context - prompt - margin). 2^62 where
    nothing limits it.
    """
    limit = chunk.per_task("max_response_tokens", chunk.config.max_response_tokens, 2**62)
    context = chunk.config.context_length
    if context is not None:
        prompts = chunk.total_lengths - chunk.response_lengths
        limit = np.minimum(limit, context - prompts - math.ceil(context * chunk.config.margin))
    return limit


def find_too_long(chunk: Chunk, rows: np.ndarray) -> np.ndarray:
    return chunk.response_lengths[rows] > usable_lengths(chunk)[rows]


def find_truncated(chunk: Chunk, rows: np.ndarray) -> np.ndarray:
    return (chunk.status[rows] == STATUS_TRUNCATED) | (chunk.finish[rows] == 2)


def find_blank(chunk: Chunk, rows: np.ndarray) -> np.ndarray:
    """Responses with nothing to see: special tokens are nothing, also where the text shows them. A
    visible token among the first few decides most rows; only the others are decoded.
    """
    blank = np.zeros(len(rows), dtype=bool)
    if chunk.codec is None:
        for position, row in enumerate(rows.tolist()):
            text = chunk.samples[row].response
            blank[position] = isinstance(text, str) and text != "" and is_blank(text)
        return blank
    gathered = chunk.tokens(rows)
    places = gathered.place[rows]
    ends = gathered.ragged.offsets[places + 1]
    starts = ends - chunk.response_lengths[rows]
    probe = np.minimum(starts[:, None] + np.arange(8), ends[:, None] - 1)
    seen = chunk.codec.proves_visible(gathered.ragged.values[probe]).any(axis=1)
    undecided = rows[~seen]
    undecided = undecided[
        [
            not chunk.codec.proves_visible(chunk.response_ids(row)).any()
            for row in undecided.tolist()
        ]
    ]
    if len(undecided):
        chunk.counts["decoded"] += len(undecided)
        texts = chunk.codec.decode(
            [chunk.response_ids(row) for row in undecided.tolist()], without=chunk.codec.unseen
        )
        hidden = {
            row for row, text in zip(undecided.tolist(), texts, strict=True) if is_blank(text)
        }
        blank = rows_in(rows, hidden)
    return blank


def find_repetitive(chunk: Chunk, rows: np.ndarray) -> np.ndarray:
    """Responses whose last `repetition_window` tokens are one phrase repeated without a difference.

    The phrase has at most `repetition_max_period` tokens (8 under `lenient`) and fits the window
    four times or more.
    """
    window, config = chunk.config.repetition_window, chunk.config
    result = np.zeros(len(rows), dtype=bool)
    long_enough = (
        np.flatnonzero(chunk.response_lengths[rows] >= window)
        if window
        else np.zeros(0, dtype=np.int64)
    )
    if not len(long_enough):
        return result
    longest = min(
        config.repetition_max_period
        if chunk.level("repetitive") is Level.STRICT
        else _LENIENT_PERIOD,
        window // 4,
    )
    gathered = chunk.tokens(rows)
    ends = gathered.ragged.offsets[gathered.place[rows[long_enough]] + 1]
    tails = gathered.ragged.values[ends[:, None] - window + np.arange(window)]
    # The last token of a phrase with period p stands in the tail every p tokens: few rows have it
    # that often.
    often = np.flatnonzero((tails == tails[:, -1:]).sum(axis=1) >= window // max(longest, 1))
    candidates = tails[often]
    for period in range(1, longest + 1):
        same = (candidates[:, period:] == candidates[:, :-period]).all(axis=1)
        result[long_enough[often[same]]] = True
    return result


def describe_too_short(chunk: Chunk, row: int) -> str:
    minimum = chunk.per_task("min_response_tokens", chunk.config.min_response_tokens, 0)[row]
    return f"{chunk.response_lengths[row]} response tokens, at least {minimum} expected"


def describe_too_long(chunk: Chunk, row: int) -> str:
    prompt = chunk.total_lengths[row] - chunk.response_lengths[row]
    return (
        f"{chunk.response_lengths[row]} response tokens, at most {usable_lengths(chunk)[row]} "
        f"usable after a prompt of {prompt}"
    )
