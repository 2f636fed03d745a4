"""The heart of a process: a thread that counts up in the process's record, for the watch.

Without one (no watch, another machine) this costs nothing. A beat is eight bytes in memory that the
kernel shares with the reader: no system call, no disk.
"""

from __future__ import annotations

import mmap
import os
import threading

from slime.supervision import records
from slime.tracking.phases import show_phases

ROLLOUT_MANAGER = "the rollout manager"  # its role
BEAT_S = 0.5


class Heart:
    """The thread. It beats while Python code of this process can run at all: a thread that holds
    the interpreter, a stopped process or one whose memory is swapped out stops it.
    """

    def __init__(self, record: records.Record) -> None:
        with open(record.path, "r+b") as file:
            self._shared = mmap.mmap(file.fileno(), records.HEAD_AT)
        self._beats = 0
        self._lock = threading.Lock()
        self._phase = b""
        threading.Thread(target=self._beat_for_ever, name="heart", daemon=True).start()

    def show(self, phase: str) -> None:
        """What the process does from now on."""
        text = phase.encode(errors="replace")[: records.PHASE_BYTES]
        at = records.PULSE.size
        with self._lock:
            self._phase = text
            self._shared[at : at + len(text)] = text
            records.PULSE.pack_into(self._shared, 0, self._beats, len(text))

    def beat(self) -> None:
        """One sign of life."""
        with self._lock:
            self._beats += 1
            records.PULSE.pack_into(self._shared, 0, self._beats, len(self._phase))

    def _beat_for_ever(self) -> None:
        never = threading.Event()
        while not never.wait(BEAT_S):
            self.beat()


def start_heart(role: str) -> Heart | None:
    """Lists this process as `role` and lets its heart beat; None where nobody watches."""
    record = records.register(role, os.getpid(), has_heart=True)
    if record is None:
        return None
    heart = Heart(record)
    show_phases(heart.show)
    return heart
