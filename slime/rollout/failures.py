"""A sample whose generation or reward call failed: marked with its reason, counted, and a limit to how many there may be."""

from __future__ import annotations

import collections
import logging
from typing import Any

from slime.exceptions import RolloutDataError
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

# The gate's name for samples with status FAILED.
FAILED_REASON = "failed"


def describe_error(error: BaseException) -> str:
    """The error's type and the beginning of its text on one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


def mark_failed(sample: Sample, stage: str, reason: str) -> Sample:
    """The sample with status FAILED, no reward, and metadata["failure"] = "<stage>: <reason>"; its tokens stay for a look."""
    sample.status = Sample.Status.FAILED
    sample.valid = False
    sample.invalid_reason = FAILED_REASON
    sample.reward = None
    sample.metadata["failure"] = f"{stage}: {reason}"
    return sample


class FailureCounter:
    """Counts failed samples of one rollout and stops it when they are too many.

    `total` is the number of samples that the rollout is to return; `max_ratio` the share of it that may fail.
    """

    def __init__(self, *, total: int, max_ratio: float) -> None:
        self.total = total
        self.max_ratio = max_ratio
        self.reasons: collections.Counter[str] = collections.Counter()

    @property
    def count(self) -> int:
        return sum(self.reasons.values())

    def add(self, samples: Any) -> None:
        """Counts the failed among `samples`. RolloutDataError, with the reasons, as soon as the limit is passed."""
        for sample in samples:
            if sample.status is Sample.Status.FAILED:
                reason = sample.metadata.get("failure", "unknown: no reason was given")
                if reason not in self.reasons:
                    logger.warning("sample %s failed: %s", sample.index, reason)
                self.reasons[reason] += 1
        if self.count > self.max_ratio * self.total:
            listed = "; ".join(f"{count} x {reason}" for reason, count in self.reasons.most_common(5))
            raise RolloutDataError(
                f"{self.count} of {self.total} samples of this rollout failed, more than --max-failed-ratio "
                f"{self.max_ratio} allows. Reasons: {listed}"
            )

    def metrics(self) -> dict[str, float]:
        """{"rollout/failed_samples", "rollout/failed_ratio"}."""
        return {"rollout/failed_samples": self.count, "rollout/failed_ratio": self.count / max(1, self.total)}
