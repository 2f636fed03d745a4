"""Checks of what a sample must be to be read at all: its identity, lengths, masks, ids, log-probs and
reward. They are always on. Each looks at the rows still alive and returns which of them fail.
"""

from __future__ import annotations

import math
import numbers
from typing import TYPE_CHECKING, Any

import numpy as np

from slime.data.number_list import NumberList
from slime.data.reasons import REASON_OF_VALUE, InvalidReason
from slime.data.rewards import value_problem
from slime.exceptions import RolloutDataError
from slime.gate.chunk import (
    STATUS_ABORTED,
    STATUS_FAILED,
    STATUS_UNKNOWN,
    Chunk,
    rows_in,
)
from slime.gate.config import MissingLogProbs
from slime.gate.token_columns import mask_array

if TYPE_CHECKING:
    from slime.data.sample import Sample

_SHORT_MASK = 256


def find_rejected_earlier(chunk: Chunk, rows: np.ndarray) -> np.ndarray:
    """Samples that other code marked invalid with a reason outside the gate's vocabulary, or whose
    mark is no bool.
    """
    if not chunk.config.trust_earlier_verdicts:
        return np.zeros(len(rows), dtype=bool)
    marked = [not _is_true(chunk.samples[row].valid) for row in rows.tolist()]
    return np.array(marked, dtype=bool)


def _is_true(value: object) -> bool:
    return value is True or (isinstance(value, np.bool_) and bool(value))


def find_failed(chunk: Chunk, rows: np.ndarray) -> np.ndarray:
    return (chunk.status[rows] == STATUS_FAILED) | (chunk.status[rows] == STATUS_UNKNOWN)


def find_no_identity(chunk: Chunk, rows: np.ndarray) -> np.ndarray:
    """Samples whose group, index or metadata is of a wrong type: the group whose baseline they
    belong to is unknown.
    """
    return rows_in(rows, chunk.identity_problems)


def find_aborted(chunk: Chunk, rows: np.ndarray) -> np.ndarray:
    return (chunk.status[rows] == STATUS_ABORTED) | (chunk.finish[rows] == 3)


def find_broken_lengths(chunk: Chunk, rows: np.ndarray) -> np.ndarray:
    """A response length that is no count or exceeds the tokens, or a mask of another length:
    nothing can be lined up.
    """
    response, total, mask = (
        chunk.response_lengths[rows],
        chunk.total_lengths[rows],
        chunk.mask_lengths[rows],
    )
    return (
        (response < 0)
        | ((total >= 0) & (response > total))
        | (mask == -2)
        | ((mask >= 0) & (mask != response))
    )


def find_broken_mask(chunk: Chunk, rows: np.ndarray) -> np.ndarray:
    """A loss mask that holds something else than 0 and 1."""
    broken = np.zeros(len(rows), dtype=bool)
    for position in np.flatnonzero(chunk.mask_lengths[rows] >= 0).tolist():
        row = int(rows[position])
        mask: Any = chunk.samples[row].loss_mask
        if (
            type(mask) in (list, NumberList)
            and len(mask) < _SHORT_MASK
            and mask.count(1) + mask.count(0) == len(mask)
        ):
            continue  # an array of a few numbers costs more than counting them
        problem = mask_array(mask)
        if isinstance(problem, str):
            broken[position] = True
            chunk.details[row] = problem
    return broken


def find_no_tokens(chunk: Chunk, rows: np.ndarray) -> np.ndarray:
    return chunk.total_lengths[rows] < 0


def find_log_prob_mismatch(chunk: Chunk, rows: np.ndarray) -> np.ndarray:
    """Log-probs that are absent under a policy that needs them, or not one per response token."""
    lengths, config = chunk.log_prob_lengths[rows], chunk.config
    missing = lengths == -1
    num_missing = int(np.count_nonzero(missing))
    chunk.counts["missing_log_probs"] += num_missing
    if num_missing:
        if config.log_prob_policy is MissingLogProbs.ERROR:
            position = int(rows[np.flatnonzero(missing)[0]])
            raise RolloutDataError(
                f"Sample {chunk.first_position + position} (index {chunk.samples[position].index}) "
                "has no rollout_log_probs and this "
                "run needs them. Make the engine return log-probs, or set --gate-missing-log-probs to mark, mask or allow."
            )
        if config.log_prob_policy is MissingLogProbs.MASK:
            for row in rows[missing].tolist():
                chunk.masks[row] = [0] * int(chunk.response_lengths[row])
    wrong = (lengths >= 0) & (lengths != chunk.response_lengths[rows])
    return wrong | (missing if config.log_prob_policy is MissingLogProbs.MARK else False)


def find_unreadable_tokens(chunk: Chunk, rows: np.ndarray) -> np.ndarray:
    return chunk.tokens(rows).place[rows] < 0


def find_bad_token(chunk: Chunk, rows: np.ndarray) -> np.ndarray:
    """Ids below zero or outside the vocabulary, in prompt or response."""
    gathered, size = chunk.tokens(rows), _vocab_size(chunk)
    lows, highs = gathered.ragged.row_extremes()
    return ((lows < 0) | (highs >= size))[gathered.place[rows]]


def _vocab_size(chunk: Chunk) -> int:
    """The number of valid ids; without a configured vocabulary size every id of 32 bits is valid,
    as in a list.
    """
    if chunk.config.vocab_size is not None:
        return chunk.config.vocab_size
    return chunk.codec.vocab_size if chunk.codec is not None else 2**31


def find_bad_log_prob(chunk: Chunk, rows: np.ndarray) -> np.ndarray:
    """NaN, infinite or positive log-probs (a probability above 1), or values that are
    no numbers.
    """
    gathered = chunk.log_probs(rows)
    unreadable = (gathered.place[rows] < 0) & (chunk.log_prob_lengths[rows] != -1)
    unreadable &= ~_repair_by_mask(chunk, rows, unreadable)
    lows, highs = gathered.ragged.row_extremes()
    # The tolerance in double precision, whatever the neighbours' precision makes of the column. NaN
    # fails the first.
    wrong = ~(highs <= np.float64(chunk.config.log_prob_tolerance)) | (lows == -np.inf)
    places = gathered.place[rows]
    # row -1, absent, is the one appended
    return unreadable | ((places >= 0) & np.append(wrong, False)[places])


def _repair_by_mask(chunk: Chunk, rows: np.ndarray, unreadable: np.ndarray) -> np.ndarray:
    """[len(rows)] rows whose only fault is None entries, under policy `mask`: those positions get
    no loss; the rest must be sound.
    """
    repaired = np.zeros(len(rows), dtype=bool)
    for position in np.flatnonzero(unreadable):
        row = int(rows[position])
        missing = chunk.missing_log_probs(row)
        if missing is None:
            continue
        chunk.counts["missing_log_prob_tokens"] += int(missing.sum())
        if chunk.config.log_prob_policy is MissingLogProbs.ERROR:
            raise RolloutDataError(
                f"Sample {chunk.first_position + row} (index {chunk.samples[row].index}) has "
                f"{int(missing.sum())} log-probs that are None, "
                f"the first at response token {int(np.argmax(missing))}. Fix the engine, or set --gate-missing-log-probs to mark or mask."
            )
        rest = [value for value in chunk.samples[row].rollout_log_probs or () if value is not None]
        sound = all(
            _is_number(value) and -math.inf < value <= chunk.config.log_prob_tolerance
            for value in rest
        )
        if chunk.config.log_prob_policy is MissingLogProbs.MASK and sound:
            chunk.masks[row] = (~missing).astype(int).tolist()
            chunk.details.pop(row, None)
            repaired[position] = True
    return repaired


def find_bad_reward(chunk: Chunk, rows: np.ndarray) -> np.ndarray:
    """After scoring: a reward that is None, no number, NaN or infinite, or a dict
    without the key.
    """
    result = np.zeros(len(rows), dtype=bool)
    if not chunk.config.rewards_expected:
        return result
    for position, row in enumerate(rows.tolist()):
        if chunk.penalized[row] and chunk.samples[row].reward is None:
            continue  # it gets the reward of a failure
        problem = reward_problem(chunk.samples[row].reward, chunk.config.reward_key)
        if problem is not None:
            result[position] = True
            chunk.details[row] = problem
    return result


def reward_problem(reward: object, reward_key: str | None) -> str | None:
    """A message about what is wrong with a reward; None if it is one finite number."""
    if reward_key:
        if not isinstance(reward, dict):
            return f"reward is {type(reward).__name__}, not a dict with key '{reward_key}'"
        if reward_key not in reward:
            return f"reward has keys {sorted(map(str, reward))}, not '{reward_key}' (--reward-key)"
        reward = reward[reward_key]
    elif isinstance(reward, dict):
        return f"reward is a dict with keys {sorted(map(str, reward))}; name one with --reward-key"
    return value_problem(reward)


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real)


def describe_lengths(chunk: Chunk, row: int) -> str:
    return (
        f"response_length {chunk.samples[row].response_length!r}, {chunk.total_lengths[row]} "
        "tokens, "
        f"{chunk.log_prob_lengths[row]} log-probs, {chunk.mask_lengths[row]} mask entries (-1: none, -2: no sequence)"
    )


def describe_bad_token(chunk: Chunk, row: int) -> str:
    ids = chunk.tokens(np.array([row])).ragged.row(chunk.tokens(np.array([row])).place[row])
    size = _vocab_size(chunk)
    wrong = (ids < 0) | (ids >= size)
    return (
        f"token {int(np.argmax(wrong))} has id {int(ids[np.argmax(wrong)])}, vocabulary size {size}"
    )


def describe_bad_log_prob(chunk: Chunk, row: int) -> str:
    place = chunk.log_probs(np.array([row])).place[row]
    if place < 0:
        return (
            f"log-probs of type {type(chunk.samples[row].rollout_log_probs).__name__} cannot be "
            "read as numbers"
        )
    values = chunk.log_probs(np.array([row])).ragged.row(place)
    wrong = ~(values <= np.float64(chunk.config.log_prob_tolerance)) | (values == -np.inf)
    return (
        f"log-prob of response token {int(np.argmax(wrong))} is {float(values[np.argmax(wrong)])}"
    )


def describe_status(chunk: Chunk, row: int) -> str:
    return f"status {chunk.samples[row].status!s}, finish reason {chunk.samples[row].finish_reason}"


def earlier_reason(sample: Sample) -> InvalidReason | None:
    """The gate's own earlier verdict on the sample, None if there is none."""
    marked = (
        isinstance(sample.valid, bool | np.bool_)
        and not sample.valid
        and isinstance(sample.invalid_reason, str)
    )
    return REASON_OF_VALUE.get(str(sample.invalid_reason)) if marked else None
