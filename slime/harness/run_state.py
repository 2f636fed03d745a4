"""Whether a run goes on, has ended, or has died, and with which error: from the ends of its
progress.jsonl and of its driver's log.
"""

from __future__ import annotations

import dataclasses
import os
import re
import time
from pathlib import Path
from typing import Any

from slime.files.jsonl import JsonlTail
from slime.tracking import progress

RUNNING, QUIET, ENDED, FAILED, DIED, UNKNOWN = (
    "running", "quiet", "ended", "failed", "died", "unknown",
)  # fmt: skip
FRESH_S = 30.0
LOGS = ("driver.log", "local.log")  # of a run's driver; with --local, of its one process
INTERRUPTED = 130  # exit status
TAIL_BYTES = 1 << 16
_FINISHED = re.compile(r"finished with status (-?\d+) after")
_ERROR = re.compile(r"^(?:[\w.]+\.)?\w*(?:Error|Exception|Interrupt|Killed)\b.*")


@dataclasses.dataclass(frozen=True)
class State:
    """word: one of the constants above. note: the error, or since when nothing was written.
    phase: what the run does, with how much of it is done. at: the last record, seconds since the
    epoch.
    """

    word: str
    note: str = ""
    phase: str = ""
    at: float | None = None

    @property
    def is_live(self) -> bool:
        """Whether more may come."""
        return self.word in (RUNNING, QUIET)


def state_of(run: Path, *, now: float | None = None) -> State:
    """The state of the run in a folder."""
    now = time.time() if now is None else now
    last = _last_progress(run)
    at = last.get("time")
    at = float(at) if isinstance(at, int | float) else _mtime(run / "metrics.jsonl")
    phase = _phase(last)
    logs = [run / "logs" / name for name in LOGS]
    log = max(logs, key=lambda path: _mtime(path) or 0.0)
    lines = _tail(log).splitlines()
    finished = next((i for i in range(len(lines) - 1, -1, -1) if _FINISHED.search(lines[i])), None)
    logged_at = _mtime(log)
    if finished is not None and (at is None or logged_at is None or logged_at >= at - 1):
        match = _FINISHED.search(lines[finished])
        status = int(match[1]) if match else 0
        if status == 0:
            return State(ENDED, "", "", at)
        note = "interrupted" if status == INTERRUPTED else _error(lines)
        return State(FAILED, note or f"exit status {status}", "", at)
    if at is None:
        return State(UNKNOWN, "it has written neither progress nor metrics", "", None)
    if now - at < FRESH_S:
        return State(RUNNING, "", phase, at)
    pid = last.get("pid")
    if isinstance(pid, int) and _is_alive(pid):
        return State(QUIET, "", phase, at)
    why = _error(lines)
    return State(DIED, why or f"it stopped while: {phase or 'starting'}", "", at)


def _phase(record: dict[str, Any]) -> str:
    if not record:
        return ""
    total = record.get("total")
    share = f" {record.get('done')}/{total}" if total else ""
    return f"{record.get('phase')}{share}"[:120]


def _last_progress(run: Path) -> dict[str, Any]:
    tail = JsonlTail(run / progress.FILE_NAME)
    tail.skip_to_end(TAIL_BYTES)
    records = tail.read()
    return records[-1] if records else {}


def _error(lines: list[str]) -> str:
    found = next((line for line in reversed(lines) if _ERROR.match(line)), "")
    return found[:500]


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            return file.read(TAIL_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""


def _mtime(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
