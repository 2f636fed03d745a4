"""A disk that fails at a chosen place, in this process: at the N-th operation on names (open for
writing, rename, remove, make a folder), or where a file grows beyond N bytes, in the middle of a
write. Libraries written in C meet the second kind too, since the system enforces it.

The process is ended there, as by a crash of the machine's power, or the operation is refused with
an `OSError`.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

KILL, REFUSE = "kill", "refuse"
OPERATION, BYTE = "operation", "byte"
ERRNOS = (errno.ENOSPC, errno.EIO)
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
# events of sys.audit, and which of their arguments are paths
_EVENTS: dict[str, tuple[int, ...]] = {
    "os.rename": (0, 1),
    "os.remove": (0,),
    "os.rmdir": (0,),
    "os.mkdir": (0,),
    "os.link": (0, 1),
    "os.symlink": (0, 1),
    "os.truncate": (0,),
}


@dataclasses.dataclass(frozen=True)
class DiskFault:
    """`action`: KILL or REFUSE, at the `number`-th OPERATION (from 1), or at BYTE `number`."""

    action: str
    place: str
    number: int
    errno: int = errno.ENOSPC

    @property
    def kind(self) -> str:
        """The column of the table that it belongs to."""
        return f"{self.action} at {self.place}"


def arm(fault: DiskFault, root: Path, on_fired: Callable[[], None]) -> None:
    """From now on this process meets `fault` in what it does below `root`, once; `on_fired` is
    called when an operation is refused. For a process that exists for this alone.
    """
    if fault.place == BYTE:
        _limit_files(fault, on_fired)
    else:
        _watch_operations(fault, root, on_fired)


def count_operations(root: Path) -> Callable[[], int]:
    """From now on this process counts the operations below `root`; the result tells how many."""
    below, count = f"{root}{os.sep}", 0

    def hook(event: str, values: tuple[Any, ...]) -> None:
        nonlocal count
        count += _changes(event, values, below)

    sys.addaudithook(hook)
    return lambda: count


def _limit_files(fault: DiskFault, on_fired: Callable[[], None]) -> None:
    """The system ends the process where a file grows too long, or refuses the write with EFBIG."""
    if fault.action == KILL:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    else:
        signal.signal(signal.SIGXFSZ, lambda *_: on_fired())
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (fault.number, hard))


def _watch_operations(fault: DiskFault, root: Path, on_fired: Callable[[], None]) -> None:
    below, left = f"{root}{os.sep}", fault.number

    def hook(event: str, values: tuple[Any, ...]) -> None:
        nonlocal left
        if left <= 0 or not _changes(event, values, below):
            return
        left -= 1
        if left:
            return
        if fault.action == KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        on_fired()
        raise OSError(fault.errno, os.strerror(fault.errno), str(values[0]))

    sys.addaudithook(hook)


def _changes(event: str, values: tuple[Any, ...], below: str) -> bool:
    if event == "open":
        path, mode, flags = values[:3]
        writes = isinstance(flags, int) and flags & _WRITES
        return bool(writes) and _is_below(path, below)
    return any(_is_below(values[place], below) for place in _EVENTS.get(event, ()))


def _is_below(path: Any, below: str) -> bool:
    return isinstance(path, str | os.PathLike) and os.fspath(path).startswith(below)
