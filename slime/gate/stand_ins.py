"""Replaces unreadable fields of invalid samples by neutral values, so that later code can read a
marked sample that stays in the batch. Never changes a valid sample.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from typing import Any

import numpy as np

from slime.data.sample import Sample, Status
from slime.gate.token_columns import as_int, log_prob_array, mask_array, token_array

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 100


def is_identity(value: Any) -> bool:
    """True for None and for integers that fit 64 bits: what an index, a group or a rollout id may
    be.
    """
    # the first answers at once for nearly all
    whole = type(value) is int or isinstance(value, int | np.integer)
    return value is None or (whole and -(2**63) <= int(value) < 2**63)


def identity_problem(sample: Sample) -> str | None:
    """A message that names the identity field (group_index, index, rollout_id) that is of a wrong
    type; None if all are right.
    """
    for name in ("group_index", "index", "rollout_id"):
        if not is_identity(value := getattr(sample, name)):
            return f"{name} is {_REPR.repr(value)} of type {type(value).__name__}, not an integer"
    if not (sample.metadata is None or isinstance(sample.metadata, dict)):
        return (
            f"metadata is {_REPR.repr(sample.metadata)} of type "
            f"{type(sample.metadata).__name__}, not a dict"
        )
    return None


def _is_length(value: object) -> bool:
    number = as_int(value)
    return number is not None and 0 <= number < 2**31


def _are_log_probs(value: object) -> bool:
    values = log_prob_array(value)
    # a Python list may hold integers that no array does
    return (
        not isinstance(values, str)
        and not (np.isfinite(values) & (np.abs(values) >= np.float64(2.0**63))).any()
    )


_RULES: tuple[tuple[str, Callable[[Any], bool], Any], ...] = (
    ("group_index", is_identity, None),
    ("index", is_identity, None),
    ("rollout_id", is_identity, None),
    ("tokens", lambda value: not isinstance(token_array(value), str), ()),
    ("response_length", _is_length, 0),
    ("rollout_log_probs", lambda value: value is None or _are_log_probs(value), None),
    ("loss_mask", lambda value: value is None or not isinstance(mask_array(value), str), None),
    ("response", lambda value: isinstance(value, str), ""),
    ("finish_reason", lambda value: value is None or isinstance(value, str), None),
    ("status", lambda value: isinstance(value, Status), Status.FAILED),
    ("metadata", lambda value: value is None or isinstance(value, dict), None),
)


def stand_ins(sample: Sample, is_reward_bad: Callable[[Any], bool]) -> dict[str, Any]:
    """{field: stand-in} for the fields of an invalid sample that cannot be read; {} for most.

    The replaced value is kept as text under metadata["unreadable"], and unchanged in the raw
    snapshot. A reward that is no number becomes None.
    """
    found = {
        name: stand_in
        for name, is_readable, stand_in in _RULES
        if not is_readable(getattr(sample, name))
    }
    if sample.reward is not None and is_reward_bad(sample.reward):
        found["reward"] = None
    if not found:
        return found
    unreadable = {name: _REPR.repr(getattr(sample, name)) for name in found}
    if "tokens" in found:
        found.update(tokens=[], response_length=0)
    metadata = sample.metadata if isinstance(sample.metadata, dict) else {}
    return {**found, "metadata": {**metadata, "unreadable": unreadable}}
