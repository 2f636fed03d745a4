"""Marks a sample whose generation or reward call failed, with the reason; counts such samples and
ends the run when there are too many.
"""

from __future__ import annotations

import bdb
import collections
import logging
import traceback
from collections.abc import Iterable, Sequence
from fractions import Fraction
from pathlib import Path

from slime.data.reasons import InvalidReason
from slime.data.sample import Sample
from slime.exceptions import (
    ConfigError,
    EngineError,
    NoEngineLeft,
    RolloutDataError,
    SlimeError,
)
from slime.plugins.watched_calls import CallTimeout

logger = logging.getLogger(__name__)

# Raised by a user's function, these end the run and are no sample's failure: a wrong option, engines
# that do not come back, and `quit` in a debugger.
ENDS_THE_RUN = (ConfigError, NoEngineLeft, bdb.BdbQuit)

# What was said with its stack already: (stage, type, file and line of the innermost call).
_said: set[tuple[str, str, str, int]] = set()


def describe_error(error: BaseException) -> str:
    """The error's type and the beginning of its text on one line, and where a user's code raised
    it.
    """
    text = " ".join(str(error).split())
    described = f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__
    place = "" if isinstance(error, SlimeError) else _place_of(error)
    return f"{described} ({place})" if place else described


def _place_of(error: BaseException) -> str:
    """ "file:line" of the innermost call outside installed packages; "" where the error has no
    stack.
    """
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "site-packages" not in frame.filename]
    return f"{Path(own[-1].filename).name}:{own[-1].lineno}" if own else ""


def log_cause(stage: str, sample: Sample, error: BaseException) -> None:
    """Logs the error with its stack, once per distinct cause (stage, type and the line that raised
    it); later ones at debug level.

    An engine's errors and exceeded limits are logged without a stack: their message is complete.
    """
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1] if frames else None
    cause = (
        stage,
        type(error).__name__,
        last.filename if last else "",
        (last.lineno or 0) if last else 0,
    )
    is_news = cause not in _said and not isinstance(error, EngineError | CallTimeout)
    _said.add(cause)
    logger.log(
        logging.WARNING if is_news else logging.DEBUG,
        "the %s of sample %s raised %s; the stack, once for this cause:",
        stage,
        sample.index,
        type(error).__name__,
        exc_info=error,
    )


def mark_failed(sample: Sample, stage: str, reason: str) -> Sample:
    """The sample with status FAILED, no reward, and metadata["failure"] = "<stage>: <reason>"; its
    tokens stay for a look.
    """
    sample.status = Sample.Status.FAILED
    sample.valid = False
    sample.invalid_reason = InvalidReason.FAILED.value
    sample.reward = None
    sample.metadata["failure"] = f"{stage}: {reason}"
    return sample


def fail(sample: Sample, stage: str, error: BaseException) -> Sample:
    """`mark_failed` for what an exception ended; its stack is logged once per distinct cause."""
    log_cause(stage, sample, error)
    return mark_failed(sample, stage, describe_error(error))


class FailureCounter:
    """Counts failed samples of one rollout and stops it when they are too many.

    `total` is the number of attempts that the rollout is to return; `max_ratio` the share of them
    that may fail. Of an attempt that emitted several samples that share fails that its failed
    samples have of it. Attempts beyond `total`, of groups that a filter dropped, count like the
    others.
    """

    def __init__(self, *, total: int, max_ratio: float) -> None:
        self.total = total
        self.max_ratio = max_ratio
        self.reasons: collections.Counter[str] = collections.Counter()
        self._num_attempts = self._num_samples = 0
        self._failed_attempts = Fraction(0)

    @property
    def count(self) -> int:
        """Failed samples."""
        return sum(self.reasons.values())

    @property
    def ratio(self) -> float:
        """The share of the rollout's attempts that failed."""
        return float(self._failed_attempts / max(1, self.total, self._num_attempts))

    def add(self, attempts: Iterable[Sequence[Sample]]) -> None:
        """Counts the failed among the samples that each of `attempts` emitted. RolloutDataError,
        with the reasons, as soon as the limit is passed.
        """
        for samples in attempts:
            failed = [sample for sample in samples if sample.status is Sample.Status.FAILED]
            self._num_attempts += 1
            self._num_samples += len(samples)
            self._failed_attempts += Fraction(len(failed), max(1, len(samples)))
            for sample in failed:
                self._note(sample)
        if self.ratio > self.max_ratio:
            listed = "; ".join(
                f"{count} x {reason}" for reason, count in self.reasons.most_common(5)
            )
            expected = max(self.total, self._num_attempts)
            share = f"{self.count} of {expected} samples of this rollout"
            if self._num_samples != self._num_attempts:
                share = (
                    f"{self.count} samples, {100 * self.ratio:.1f} % of this rollout's "
                    f"{expected} attempts,"
                )
            raise RolloutDataError(
                f"{share} failed, more than --max-failed-ratio {self.max_ratio} allows. Reasons: "
                f"{listed}"
            )

    def _note(self, sample: Sample) -> None:
        reason = sample.metadata.get("failure", "unknown: no reason was given")
        if reason not in self.reasons:
            logger.warning("sample %s failed: %s", sample.index, reason)
        self.reasons[reason] += 1

    def metrics(self) -> dict[str, float]:
        """{"rollout/failed_samples", "rollout/failed_ratio"}."""
        return {"rollout/failed_samples": self.count, "rollout/failed_ratio": self.ratio}
