"""How far the current phase is, for the live view: throttled records in the run folder's
progress.jsonl.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from slime.files.jsonl import JsonlWriter

FILE_NAME = "progress.jsonl"


class ProgressReporter:
    """Writes at most one record per phase and `interval_s`; the first, the last and a change of
    phase are always written.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        *,
        interval_s: float = 0.5,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._writer = JsonlWriter(Path(run_dir) / FILE_NAME)
        self._interval_s = interval_s
        self._clock = clock
        self._lock = threading.Lock()
        self._last_phase: str | None = None
        self._last_time = float("-inf")

    def report(
        self, *, phase: str, done: int = 0, total: int | None = None, **fields: object
    ) -> bool:
        """Returns whether a record was written. A disk that is full loses the record, never the
        run.
        """
        now = self._clock()
        with self._lock:
            is_edge = phase != self._last_phase or done == 0 or done == total
            if not is_edge and now - self._last_time < self._interval_s:
                return False
            self._last_phase, self._last_time = phase, now
            record = {
                "time": now,
                "pid": os.getpid(),
                "phase": phase,
                "done": done,
                "total": total,
                **fields,
            }
            with contextlib.suppress(OSError):
                self._writer.write(record)
                return True
        return False


_reporter: ProgressReporter | None = None


def configure(run_dir: str | os.PathLike[str] | None) -> None:
    """Makes `report` write to `run_dir`; None turns it off. `init_tracking` calls it."""
    global _reporter
    _reporter = None if run_dir is None else ProgressReporter(run_dir)


def report(*, phase: str, done: int = 0, total: int | None = None, **fields: object) -> bool:
    """Says that `done` of `total` units of `phase` ("generate", "reward", "train", "publish",
    "evaluate", ...) are finished.

    Returns whether a record was written: False when it was throttled or this process has no run
    folder. Cheap enough to call per sample.
    """
    return (
        False
        if _reporter is None
        else _reporter.report(phase=phase, done=done, total=total, **fields)
    )
