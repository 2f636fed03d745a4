"""Sends signals to processes of a real run in the middle of phases that they show to the watch."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from slime.supervision import records


def records_folder(driver: int) -> Path | None:
    """Where the run of this driver lists its processes; None before and after."""
    for owner in Path("/tmp").glob("slime-ray-*/owner.json"):
        with contextlib.suppress(OSError, ValueError):
            if json.loads(owner.read_text())["pid"] == driver:
                folder = owner.parent / "processes"
                return folder if folder.is_dir() else None
    return None


@dataclasses.dataclass
class Strike:
    """The signal `sent` ("KILL") for `role`, while `role`, or `shown_by`, shows a phase like
    `phase`. pid, seen, at: the process that got it, the phase, the time.
    """

    role: str
    phase: str
    sent: str = "KILL"
    shown_by: str | None = None
    pid: int | None = None
    seen: str = ""
    at: float = 0.0

    def look(self, folder: Path, struck: set[int]) -> bool:
        """Strikes where it is time; whether it did. struck: processes that had their signal."""
        for pid, phase in _shown(folder, self.shown_by or self.role):
            if not re.search(self.phase, phase):
                continue
            target = pid if self.shown_by is None else next(_shown(folder, self.role), (0, ""))[0]
            if target and target not in struck:
                self.pid, self.seen, self.at = target, phase, time.time()
                with contextlib.suppress(ProcessLookupError):
                    os.kill(target, getattr(signal, f"SIG{self.sent}"))
                return True
        return False


def _shown(folder: Path, role: str) -> Iterator[tuple[int, str]]:
    """(process id, phase) of each process of the role."""
    for path in folder.glob(f"{role.replace(' ', '-')}.*"):
        pulse = records.read_pulse(path)
        if pulse is not None:
            yield int(path.name.split(".")[-2]), pulse[1]


class Striker(threading.Thread):
    """Strikes at a run of this driver, one strike after the other."""

    def __init__(self, driver: int, strikes: Sequence[Strike]) -> None:
        super().__init__(daemon=True)
        self._driver, self._strikes = driver, strikes
        self.start()

    def run(self) -> None:
        folder, struck = None, set[int]()
        for strike in self._strikes:
            while os.path.exists(f"/proc/{self._driver}"):
                folder = folder or records_folder(self._driver)
                if folder is not None and strike.look(folder, struck):
                    struck.add(strike.pid or 0)
                    break
                time.sleep(0.0005 if folder else 0.05)
