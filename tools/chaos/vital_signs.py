"""What a process needs, read from /proc: memory, descriptors, threads, shared memory, and how long
its threads waited for a processor.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterable
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class VitalSigns:
    """Sizes in bytes."""

    resident: int
    descriptors: int
    threads: int


def vital_signs(pid: int) -> VitalSigns:
    """Those of a process. OSError where there is none."""
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    resident = int(status["VmRSS"].split()[0]) * 1024
    return VitalSigns(resident, len(os.listdir(f"/proc/{pid}/fd")), int(status["Threads"]))


def waits_for_processor(pid: int) -> dict[int, float]:
    """{thread: seconds for which it was ready to run and got no processor} of a process."""
    found = {}
    for entry in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            found[int(entry.name)] = int((entry / "schedstat").read_text().split()[1]) / 1e9
    return found


def private_bytes(pid: int) -> int:
    """Memory that the process has for itself: written pages, and those that were swapped out."""
    found = 0
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith(("Private_Dirty:", "Private_Hugetlb:", "SwapPss:")):
            found += int(line.split()[1]) * 1024
    return found


def shared_files(pids: Iterable[int]) -> set[str]:
    """Files in /dev/shm that these processes have open or mapped, those that were removed too."""
    found: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
            found.update(line.split(maxsplit=5)[-1] for line in maps if "/dev/shm/" in line)
        with contextlib.suppress(OSError):
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    found.add(os.readlink(entry))
    return {name for name in found if name.startswith("/dev/shm/")}
