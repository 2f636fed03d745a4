"""When a process counts as frozen.

Stopped, in a deadlock that holds the interpreter, swapped out: its heart does not beat, it uses no
processor, and it does not wait for one, for `FROZEN_S` on end, or a minute where it waits for a disk. One that computes in C code without
giving the interpreter back uses the processor; one that starves on a busy machine waits for it; one
that a debugger holds is meant to stand still. None of these is frozen.

    time       0    0.5  1.0  ...  8.0
    beats      17   17   17   ...  17       the last beat was seen at 0
    cpu_s      4.2  4.2  4.2  ...  4.2
    runnable   no   no   no   ...  no       -> frozen at 8.0
"""

from __future__ import annotations

import collections
import dataclasses
import math

from slime.supervision.processes import DISK, STOPPED

FROZEN_S = 8.0
# In the state D (waiting for a disk): a model that is read from a slow network disk, page by page,
# may hold the interpreter and use hardly any processor.
WAITING_FOR_DISK_S = 60.0
# Between two looks of a watch that was not held up itself. After a longer pause (Ctrl-Z, a suspended
# machine) everything is looked at anew.
GAP_S = 3.0
# What the threads of Ray use in FROZEN_S in a process whose interpreter is held is 0.02 to 0.05 s.
IDLE_CPU_S = 0.16
# Those threads are now and then seen waiting for a core; one that starves, nearly always.
STARVING_SHARE = 0.5


@dataclasses.dataclass(frozen=True)
class Reading:
    """One look. beats: None for a process without a heart, which is frozen when it is stopped."""

    time: float
    beats: int | None
    state: str
    cpu_s: float
    is_runnable: bool
    is_traced: bool = False


class Stillness:
    """How long one process has given no sign of life."""

    def __init__(self) -> None:
        self._since: Reading | None = None
        self._last_time = -math.inf
        self._runnable: collections.deque[tuple[float, bool]] = collections.deque()

    def add(self, reading: Reading) -> float | None:
        """Seconds without a sign of life where the process is frozen, else None."""
        since, gap = self._since, reading.time - self._last_time
        self._last_time = reading.time
        if since is None or gap > GAP_S or self._is_sign_of_life(since, reading):
            self._since = reading
            self._runnable.clear()
            return None
        self._runnable.append((reading.time, reading.is_runnable))
        while self._runnable[0][0] < reading.time - FROZEN_S:
            self._runnable.popleft()
        limit = WAITING_FOR_DISK_S if reading.state == DISK else FROZEN_S
        if reading.time - since.time < limit:
            return None
        num_runnable = sum(is_runnable for _, is_runnable in self._runnable)
        is_starving = num_runnable > STARVING_SHARE * len(self._runnable)
        return None if is_starving else reading.time - since.time

    @staticmethod
    def _is_sign_of_life(since: Reading, reading: Reading) -> bool:
        if reading.is_traced:
            return True
        if reading.beats is None:
            return reading.state != STOPPED
        return reading.beats != since.beats or reading.cpu_s - since.cpu_s > IDLE_CPU_S
