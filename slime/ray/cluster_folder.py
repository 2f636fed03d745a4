"""The folder of a private Ray cluster, the processes that live in it, and what a driver that was
killed has left of them.

    /tmp/slime-ray-k3j2/            mode 0700: what Ray opens to everybody below it stays closed
    /tmp/slime-ray-k3j2/owner.json  {"pid": 4711, "started": 81523}: the driver
    /tmp/slime-ray-k3j2/token       the cluster's token, mode 0600
    /tmp/slime-ray-k3j2/processes/  the run's processes, for the watch over them
    /tmp/slime-ray-k3j2/r/          Ray's own
    /dev/shm/slime-ray-k3j2/        what the run keeps in memory, with --recovery-interval

A small process (`guard`) waits for the end of the driver, however that comes, and takes away what is
left then; what outlives the guard too goes when this user's next run starts (`sweep`).
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from slime.supervision.processes import started_at

PLACE = Path("/tmp")  # short: Ray's unix sockets, whose paths end at about 100 characters
MEMORY = Path("/dev/shm")
PREFIX = "slime-ray-"
OWNER = "owner.json"
# a folder without an owner may be one that is just being made, or of an earlier version
UNOWNED_S = 3600.0
GUARD_PATIENCE_S = 1.5


def make_folder() -> str:
    """A new folder that only this user can enter, with this process as its owner."""
    folder = tempfile.mkdtemp(prefix=PREFIX, dir=PLACE)
    owner = {"pid": os.getpid(), "started": started_at(os.getpid())}
    Path(folder, OWNER).write_text(json.dumps(owner))
    return folder


def guard(folder: str) -> subprocess.Popen | None:
    """Starts the process that clears `folder` when this one has ended; None where the system cannot
    wait for another's child. `end_processes_of` ends it like the others that live in the folder.
    """
    if not hasattr(os, "pidfd_open"):
        return None
    return subprocess.Popen(
        [sys.executable, "-m", "slime.ray.cluster_folder", folder, str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def main(folder: str, driver: int) -> None:
    """Waits for the end of the driver and clears its folder."""
    with contextlib.suppress(ProcessLookupError):
        select.select([os.pidfd_open(driver)], [], [])
    if os.path.isdir(folder) and _is_left_over(Path(folder)):
        end_processes_of(folder, patience_s=GUARD_PATIENCE_S)
        remove_folder(folder)


def sweep(place: Path = PLACE) -> list[str]:
    """Ends the processes and removes the folders of clusters whose driver is gone, of this user
    only; returns the folders.
    """
    swept = []
    for folder in place.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if _is_left_over(folder):
                end_processes_of(str(folder))
                remove_folder(str(folder))
                swept.append(str(folder))
    return swept


def _is_left_over(folder: Path) -> bool:
    status = folder.lstat()
    if folder.is_symlink() or not folder.is_dir() or status.st_uid != os.getuid():
        return False
    try:
        owner = json.loads((folder / OWNER).read_text())
        pid, started = int(owner["pid"]), owner["started"]
    except (OSError, ValueError, KeyError, TypeError):
        is_old = time.time() - status.st_mtime > UNOWNED_S
        return is_old and not processes_of(str(folder))
    return started is not None and started_at(pid) != started


def processes_of(folder: str) -> list[int]:
    """Returns the ids of the other processes of the Ray session that lives in `folder`: those whose
    command line names it, and those of Ray that have a file below it open, since workers and agents
    change their title.
    """
    found, name = [], folder.encode()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int(entry.name) == os.getpid():
                continue
            command = (entry / "cmdline").read_bytes()
            if name in command or (command.startswith(b"ray::") and _has_open(entry, folder)):
                found.append(int(entry.name))
    return found


def _has_open(process: Path, folder: str) -> bool:
    for descriptor in (process / "fd").iterdir():
        with contextlib.suppress(OSError):
            if os.readlink(descriptor).startswith(f"{folder}/"):
                return True
    return False


def end_processes_of(folder: str, *, patience_s: float = 3.0) -> None:
    """Ends the processes of the Ray session in `folder`: asked first, killed after `patience_s`."""
    deadline = time.monotonic() + patience_s
    while left := processes_of(folder):
        number = signal.SIGTERM if time.monotonic() < deadline else signal.SIGKILL
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
        if number == signal.SIGKILL:
            return
        time.sleep(0.1)


def memory_folder(folder: str) -> Path | None:
    """Where the run of this folder may keep files in memory, made here; `remove_folder` removes it
    too. None where there is no such place, or somebody else has taken the name.
    """
    place = MEMORY / Path(folder).name
    try:
        place.mkdir(mode=0o700, exist_ok=True)
    except OSError:
        return None
    return place if _is_ours(place) else None


def _is_ours(place: Path) -> bool:
    """Whether it is a folder that this user has made for nobody else."""
    try:
        status = place.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and (status.st_uid, status.st_mode & 0o077) == (
        os.getuid(),
        0,
    )


def remove_folder(folder: str, *, patience_s: float = 3.0) -> None:
    """Removes the folder and that in memory, also while processes that are just ending still write
    into them.
    """
    deadline = time.monotonic() + patience_s
    places = [place for place in (MEMORY / Path(folder).name,) if _is_ours(place)]
    for place in (*places, Path(folder)):  # the one that a sweep finds goes last
        while place.exists() and time.monotonic() < deadline:
            shutil.rmtree(place, ignore_errors=True)
            time.sleep(0.05)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
