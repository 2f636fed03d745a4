"""The table of checks, cheap before costly; which findings are kept or penalized.

To add a check: write `def find_x(chunk, rows) -> bool array [len(rows)]` in the module of its kind
(integrity_checks, quality_checks, text_checks), put
`Check(InvalidReason.X, find_x, describe_x)` where its cost belongs in CHECKS, and give `slime gate`
golden samples for it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import numpy as np

from slime.data.reasons import InvalidReason
from slime.gate.chunk import Chunk
from slime.gate.config import Level, Policy
from slime.gate.integrity_checks import (
    describe_bad_log_prob,
    describe_bad_token,
    describe_lengths,
    describe_status,
    find_aborted,
    find_bad_log_prob,
    find_bad_reward,
    find_bad_token,
    find_broken_lengths,
    find_broken_mask,
    find_failed,
    find_log_prob_mismatch,
    find_no_identity,
    find_no_tokens,
    find_rejected_earlier,
    find_unreadable_tokens,
)
from slime.gate.quality_checks import (
    describe_too_long,
    describe_too_short,
    find_blank,
    find_no_response,
    find_repetitive,
    find_too_long,
    find_too_short,
    find_truncated,
)
from slime.gate.text_checks import find_bad_format, find_misaligned

Find = Callable[[Chunk, np.ndarray], np.ndarray]


def is_kept(chunk: Chunk, reason: InvalidReason, rows: np.ndarray) -> np.ndarray:
    """[len(rows)] bool: a finding with `reason` is kept by policy; a cut also by level "off" or by
    the rules of the row's task.
    """
    by_policy = chunk.config.policy_of(reason) is Policy.KEEP
    if reason is not InvalidReason.TRUNCATED:
        return np.full(len(rows), by_policy)
    by_policy = by_policy or chunk.level("truncated") is Level.OFF
    return np.array(
        [by_policy if r.keep_truncated is None else r.keep_truncated for r in chunk.rules]
    )[chunk.rule_index[rows]]


def is_penalized(chunk: Chunk, reason: InvalidReason, rows: np.ndarray) -> np.ndarray:
    """[len(rows)] bool: a finding with `reason` is penalized by policy. A task's own rule for cuts,
    and level "off", come before the policy.
    """
    if chunk.config.policy_of(reason) is not Policy.PENALIZE:
        return np.zeros(len(rows), dtype=bool)
    if reason is not InvalidReason.TRUNCATED:
        return np.ones(len(rows), dtype=bool)
    by_policy = chunk.level("truncated") is not Level.OFF
    return np.array([by_policy and r.keep_truncated is None for r in chunk.rules])[
        chunk.rule_index[rows]
    ]


@dataclasses.dataclass(frozen=True)
class Check:
    """One test. `describe(chunk, row)` returns a message about what was found, unless the check
    left a detail itself.
    """

    reason: InvalidReason
    find: Find
    describe: Callable[[Chunk, int], str]
    quality: str | None = None  # the name under which it has a level; None: integrity, always on
    # False where the later checks and the trainer could not read the sample
    may_be_kept: bool = True

    @functools.cached_property
    def name(self) -> str:
        return self.find.__name__.removeprefix("find_")

    @functools.cached_property
    def counter(self) -> str:
        """The count of samples it looked at."""
        return f"checked_{self.name}"

    def is_on(self, chunk: Chunk) -> bool:
        """Whether the check is made. For a cut, `off` means that it trains and is marked; the
        check itself still runs.
        """
        return (
            self.quality in (None, "misaligned", "truncated")
            or chunk.level(self.quality) is not Level.OFF
        )


CHECKS: tuple[Check, ...] = (
    Check(
        InvalidReason.REJECTED,
        find_rejected_earlier,
        lambda c, r: f"marked before the gate: {c.samples[r].invalid_reason}",
    ),
    Check(InvalidReason.FAILED, find_failed, describe_status),
    Check(InvalidReason.FAILED, find_no_identity, lambda c, r: c.identity_problems[r]),
    Check(InvalidReason.ABORTED, find_aborted, describe_status),
    Check(
        InvalidReason.BAD_TOKEN,
        find_no_tokens,
        lambda c, r: f"tokens are {type(c.samples[r].tokens).__name__}, no sequence",
    ),
    Check(InvalidReason.MISALIGNED, find_broken_lengths, describe_lengths, may_be_kept=False),
    Check(
        InvalidReason.MISALIGNED,
        find_broken_mask,
        lambda c, r: "the loss mask cannot be read",
        may_be_kept=False,
    ),
    Check(InvalidReason.EMPTY, find_no_response, lambda c, r: "no response token"),
    Check(InvalidReason.TOO_SHORT, find_too_short, describe_too_short, "too_short"),
    Check(InvalidReason.TOO_LONG, find_too_long, describe_too_long, "too_long"),
    Check(InvalidReason.TRUNCATED, find_truncated, describe_status, "truncated"),
    Check(InvalidReason.LOGPROB_MISMATCH, find_log_prob_mismatch, describe_lengths),
    Check(InvalidReason.BAD_TOKEN, find_unreadable_tokens, lambda c, r: "tokens cannot be read"),
    Check(InvalidReason.BAD_TOKEN, find_bad_token, describe_bad_token),
    Check(InvalidReason.EMPTY, find_blank, lambda c, r: "nothing visible in the response"),
    Check(InvalidReason.BAD_LOGPROB, find_bad_log_prob, describe_bad_log_prob),
    Check(
        InvalidReason.REPETITIVE,
        find_repetitive,
        lambda c, r: "the response ends in one phrase repeated",
        "repetitive",
    ),
    Check(
        InvalidReason.MISALIGNED,
        find_misaligned,
        lambda c, r: "text and tokens differ",
        "misaligned",
    ),
    Check(InvalidReason.BAD_FORMAT, find_bad_format, lambda c, r: "bad format", "bad_format"),
    Check(InvalidReason.BAD_REWARD, find_bad_reward, lambda c, r: "bad reward"),
)
