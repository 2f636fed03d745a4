"""Counters of the check before rewards, kept for the rollout's record, and the run's progress that
the check reads. Each gate owns one object.

`check_responses` runs inside the rollout function, group by group; `Gate.run` later sees samples
whose text already is the tokens' text and whose verdict already stands. Time spent, texts compared
and log-probs missed are therefore counted here and read by `Gate.run`, which in turn sets how far
the run is, for the schedule of levels.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slime.data.sample import Sample

# Metadata key of the text that the engine sent, on samples whose response was replaced by its
# tokens' text.
ENGINE_TEXT = "engine_text"
MISSING_LOG_PROBS = ("missing_log_probs", "missing_log_prob_tokens")
SHIFTED_IDS = "cause_shifted_ids"
FIRST_ROLLOUTS = 2
_COUNTS = ("compared", "mismatched", *MISSING_LOG_PROBS)


class ResponseTally:
    """Sums over the calls of `check_responses` since the last `take`, and how far the run is. The
    gate owns it and hands it to whoever checks responses. Safe to use from several threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: collections.Counter[str] = collections.Counter()
        self._seconds = 0.0
        self.rollout_id = self.first_rollout_id = 0
        self.bad_format_rate: float | None = None
        self.found_shifted_ids = False

    def add(self, counts: Mapping[str, int], seconds: float) -> None:
        """Adds one call's comparisons, the log-probs that it missed, and its time in seconds."""
        counted = {
            name: n for name, n in counts.items() if name in _COUNTS or name.startswith("cause_")
        }
        with self._lock:
            self._counts.update(counted)
            self._seconds += seconds
            self.found_shifted_ids = self.found_shifted_ids or bool(counted.get(SHIFTED_IDS, 0))

    def take(self) -> tuple[dict[str, int], float]:
        """(counts, seconds) since the last call; both start again at zero."""
        with self._lock:
            taken = dict(self._counts), self._seconds
            self._counts.clear()
            self._seconds = 0.0
        return taken

    def started(self, rollout_id: int) -> None:
        """Says that a run begins with this rollout."""
        self.first_rollout_id, self.found_shifted_ids = rollout_id, False
        self.reached(rollout_id, None)

    def compares_all(self, rollout_id: int) -> bool:
        """Whether the text of all samples is compared, and not of a few: in the run's first
        rollouts, and once a few have had other ids than their text's.
        """
        return self.found_shifted_ids or rollout_id < self.first_rollout_id + FIRST_ROLLOUTS

    def reached(self, rollout_id: int, bad_format_rate: float | None) -> None:
        """Says which rollout is generated from now on, and the last measured share of
        bad formats.
        """
        self.rollout_id, self.bad_format_rate = rollout_id, bad_format_rate


def with_engine_text(metadata: object, text: object) -> Any:
    """Metadata that keeps the engine's `text`, the first one where several passes replaced it;
    anything but a dictionary as it is.
    """
    return {ENGINE_TEXT: text, **metadata} if isinstance(metadata, dict) else metadata


def engine_text_of(sample: Sample) -> Any:
    """The response text as the engine sent it."""
    return (
        sample.metadata.get(ENGINE_TEXT, sample.response)
        if isinstance(sample.metadata, dict)
        else sample.response
    )
