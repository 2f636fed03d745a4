"""The folder in which the processes of a run are listed for the watch, one file a process.

    processes/actor-rank-1.4711.81523     role, process id, start: who it is
        bytes 0-7      beats, counted up by the process's heart (heart.py)
        bytes 8-9      length of the phase, then the phase
        bytes 1024-    {"role": "actor rank 1", "pid": 4711, ...}, zeros behind it

A process that ends on purpose is taken out first (`expect_end`); one that ends while its file is
there has died. The folder's path is in the environment of every process of a run; without it, and
on machines that do not have the folder, nothing is listed and nothing beats.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import os
import signal
import struct
import time
from collections.abc import Iterable
from pathlib import Path

from slime.files import atomic
from slime.supervision.processes import started_at
from slime.tracking.spans import boot_id

FOLDER_VARIABLE = "SLIME_WATCH_FOLDER"
PULSE = struct.Struct("<QH")
HEAD_AT = 1024
SIZE = 4096
PHASE_BYTES = HEAD_AT - PULSE.size
END_S = 15.0  # that a process may take to end after SIGKILL
POLL_S = 0.02
logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Record:
    """One process. `has_heart`: it beats by itself; of others the kernel's word must do."""

    role: str
    pid: int
    started: int
    node: str
    has_heart: bool
    path: Path

    def sign_off(self) -> None:
        """The process may end from now on."""
        self.path.unlink(missing_ok=True)


@functools.cache
def this_node() -> str:
    """What processes that can see each other's ids have in common."""
    try:
        return f"{boot_id()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return boot_id()


def _folder() -> Path | None:
    """Where this process's run keeps its records; None where nobody watches."""
    name = os.environ.get(FOLDER_VARIABLE)
    return Path(name) if name and os.path.isdir(name) else None


def _file_name(role: str) -> str:
    return role.replace(" ", "-").replace("/", "-")


def register(role: str, pid: int, *, has_heart: bool = False) -> Record | None:
    """Lists a process of this machine; None where nobody watches, or it has ended already."""
    folder, started = _folder(), started_at(pid)
    if folder is None or started is None:
        return None
    path = folder / f"{_file_name(role)}.{pid}.{started}"
    record = Record(role, pid, started, this_node(), has_heart, path)
    head = {name: value for name, value in vars(record).items() if name != "path"}
    content = PULSE.pack(0, 0).ljust(HEAD_AT, b"\0") + json.dumps(head).encode()
    try:
        atomic.write_bytes(path, content.ljust(SIZE, b"\0"), mode=0o600)
    except OSError as error:
        logger.warning("%s (process %d) is not watched: %s", role, pid, error)
        return None
    return record


def expect_end(role: str) -> None:
    """The processes of this role may end from now on: they are no longer watched."""
    folder = _folder()
    if folder is not None:
        for path in folder.glob(f"{_file_name(role)}.*"):
            path.unlink(missing_ok=True)


def end_by_force(roles: Iterable[str], *, patience_s: float = END_S) -> list[int]:
    """Takes the processes of these roles out, kills those of this machine, and returns the ids of
    those that are still there after `patience_s`.
    """
    mine = []
    for role in roles:
        mine += [one for one in _listed_as(role) if one.node == this_node()]
        expect_end(role)
    for record in mine:
        if started_at(record.pid) == record.started:
            with contextlib.suppress(ProcessLookupError):
                os.kill(record.pid, signal.SIGKILL)
    deadline = time.monotonic() + patience_s
    while left := [one.pid for one in mine if started_at(one.pid) == one.started]:
        if time.monotonic() > deadline:
            break
        time.sleep(POLL_S)
    return left


def _listed_as(role: str) -> list[Record]:
    folder = _folder()
    paths = [] if folder is None else folder.glob(f"{_file_name(role)}.*")
    return [record for record in map(read_record, paths) if record is not None]


def read_record(path: Path) -> Record | None:
    """None for a file that has gone or is none of ours."""
    try:
        head = json.loads(path.read_bytes()[HEAD_AT:].rstrip(b"\0"))
        return Record(
            str(head["role"]),
            int(head["pid"]),
            int(head["started"]),
            str(head["node"]),
            bool(head["has_heart"]),
            path,
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def read_pulse(path: Path) -> tuple[int, str] | None:
    """(beats, phase); None where the process has been taken out."""
    try:
        with open(path, "rb") as file:
            content = file.read(HEAD_AT)
        beats, length = PULSE.unpack_from(content)
    except (OSError, struct.error):
        return None
    return beats, content[PULSE.size : PULSE.size + length].decode(errors="replace")
