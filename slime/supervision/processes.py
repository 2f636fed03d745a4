"""What /proc tells about a process: when it started, whether it runs, what it has used."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
ENDED = "ZX"
DISK = "D"  # waits for a disk, or for memory that was swapped out
STOPPED = "T"  # by SIGSTOP, SIGTSTP and their like; a debugger's stop is "t"


@dataclasses.dataclass(frozen=True)
class ProcessState:
    """One look at a process. `state`: the kernel's letter for its main thread. `is_runnable`: one
    of its threads runs or waits for a core.
    """

    state: str
    started: int
    cpu_s: float
    is_runnable: bool
    is_traced: bool


def _fields(path: str) -> list[str]:
    """The words of a stat file after the name, which may hold anything."""
    return Path(path).read_text(errors="replace").rpartition(")")[2].split()


def started_at(pid: int) -> int | None:
    """When a process was started, in the kernel's ticks since the boot; None where it has ended.
    With the id it names one process: ids are given again.
    """
    try:
        state, *numbers = _fields(f"/proc/{pid}/stat")
    except (OSError, ValueError):
        return None
    return None if state in ENDED else int(numbers[18])


def look_at(pid: int, *, closely: bool = True) -> ProcessState | None:
    """None where the process has ended. closely: also whether it is runnable and traced, a file per
    thread.
    """
    try:
        state, *numbers = _fields(f"/proc/{pid}/stat")
        status = Path(f"/proc/{pid}/status").read_text(errors="replace") if closely else ""
        threads = os.listdir(f"/proc/{pid}/task") if closely else []
    except (OSError, ValueError):
        return None
    if state in ENDED:
        return None
    return ProcessState(
        state=state,
        started=int(numbers[18]),
        cpu_s=(int(numbers[10]) + int(numbers[11])) / TICKS_PER_S,
        is_runnable=any(_is_runnable(f"/proc/{pid}/task/{thread}/stat") for thread in threads),
        is_traced=closely and "\nTracerPid:\t0\n" not in status,
    )


def _is_runnable(path: str) -> bool:
    try:
        return _fields(path)[0] == "R"
    except (OSError, IndexError):  # the thread has ended
        return False


def children_of(parent: int) -> list[int]:
    """The ids of a process's own children."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            try:
                if int(_fields(f"/proc/{entry}/stat")[1]) == parent:
                    found.append(int(entry))
            except (OSError, IndexError):
                continue
    return found


def command_of(pid: int) -> str:
    """The command line, or the title that the process has given itself; "" where it has ended."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ""
    return words.replace(b"\0", b" ").decode(errors="replace").strip()
