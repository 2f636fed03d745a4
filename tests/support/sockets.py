"""Which TCP sockets processes listen on, from /proc."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

# as /proc/net/tcp and tcp6 write them: 127.0.0.1, ::1, ::ffff:127.0.0.1
LOOPBACK = frozenset(
    {
        "0100007F",
        "00000000000000000000000001000000",
        "0000000000000000FFFF00000100007F",
    }
)


def listening_addresses(pids: Iterable[int]) -> dict[tuple[str, str], set[int]]:
    """{(address, port): process ids} of the TCP sockets on which `pids` listen; ended ones on
    none.
    """
    owners: dict[str, set[int]] = {}
    for pid in pids:
        try:
            entries = os.listdir(f"/proc/{pid}/fd")
        except OSError:
            continue
        for entry in entries:
            try:
                target = os.readlink(f"/proc/{pid}/fd/{entry}")
            except OSError:
                continue
            if target.startswith("socket:["):
                owners.setdefault(target[8:-1], set()).add(pid)
    found: dict[tuple[str, str], set[int]] = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in owners:
                address, port = words[1].split(":")
                found.setdefault((address, port), set()).update(owners[words[9]])
    return found


def descendants(root: int) -> list[int]:
    """`root` and every process below it."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
        children.setdefault(parent, []).append(int(entry.name))
    found, at = [root], 0
    while at < len(found):
        found += children.get(found[at], [])
        at += 1
    return found
