"""`slime doctor --security RUN`: who could reach a run and what lies in its folder.

Reads /proc, file modes and the first bytes of files; sends nothing and opens no pickle.
"""

from __future__ import annotations

import dataclasses
import os
import stat
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from slime.commands.findings import Finding, ok, warn
from slime.config.specs import slime_specs
from slime.config.yaml_file import read_option_file
from slime.exceptions import ConfigError

# As /proc/net/tcp and tcp6 write them: 127.0.0.1, ::1, ::ffff:127.0.0.1
LOOPBACK = frozenset(
    {
        "0100007F",
        "00000000000000000000000001000000",
        "0000000000000000FFFF00000100007F",
    }
)
SHOWN = 3
# Files of the distributed checkpoint format, which slime takes apart as data.
CHECKPOINT_PICKLES = (".metadata", "common.pt")
PICKLE_STARTS = tuple(bytes([0x80, protocol]) for protocol in range(2, 6))


@dataclasses.dataclass(frozen=True)
class Port:
    """A TCP port and the processes that listen on it."""

    number: int
    is_loopback: bool
    pids: tuple[int, ...]


def listening_ports(pids: Iterable[int]) -> list[Port]:
    """The ports on which processes listen, ascending; of ended ones none."""
    owners: dict[str, set[int]] = {}
    for pid in pids:
        for target in _open_files(pid):
            if target.startswith("socket:["):
                owners.setdefault(target[8:-1], set()).add(pid)
    found = []
    for table in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        except OSError:  # no IPv6, or no /proc
            continue
        for line in lines:
            words = line.split()
            if words[3] == "0A" and words[9] in owners:
                address, port = words[1].split(":")
                found.append(
                    Port(int(port, 16), address in LOOPBACK, tuple(sorted(owners[words[9]])))
                )
    return sorted(found, key=lambda port: (port.number, port.is_loopback))


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


def processes_with_files_in(folder: Path) -> set[int]:
    """The other processes that have a file below `folder` open, and every process below those: a
    live run.
    """
    prefix = f"{folder.resolve()}{os.sep}"
    found: set[int] = set()
    for entry in Path("/proc").glob("[0-9]*"):
        pid = int(entry.name)
        if pid != os.getpid() and any(name.startswith(prefix) for name in _open_files(pid)):
            found.update(descendants(pid))
    return found


def _open_files(pid: int) -> Iterator[str]:
    try:
        entries = os.listdir(f"/proc/{pid}/fd")
    except OSError:  # ended, or another user's
        return
    for entry in entries:
        try:
            yield os.readlink(f"/proc/{pid}/fd/{entry}")
        except OSError:
            continue


def check_open_ports(folder: Path) -> Finding:
    """Where the processes of a live run listen."""
    name = "Open ports"
    pids = processes_with_files_in(folder)
    if not pids:
        return ok(name, "no process has a file of this run open: it is over, or elsewhere")
    ports = listening_ports(pids)
    shown = ", ".join(f"{port.number} ({_name_of(port.pids[0])})" for port in ports)
    outside = [port for port in ports if not port.is_loopback]
    if not outside:
        return ok(name, f"{len(ports)}, all on loopback: {shown}")
    return warn(
        name,
        f"{len(outside)} of {len(ports)} can be reached from other machines: "
        + ", ".join(f"{port.number} ({_name_of(port.pids[0])})" for port in outside),
        "bind to 127.0.0.1 (--sglang-host), or let a firewall close them.",
    )


def _name_of(pid: int) -> str:
    try:
        return f"{Path(f'/proc/{pid}/comm').read_text().strip()} {pid}"
    except OSError:
        return str(pid)


def check_keys(folder: Path) -> Finding:
    """Whether the run's engines ask for a key, by its recorded options."""
    name, path = "Keys", folder / "config.yaml"
    if not path.is_file():
        return warn(name, f"{path} is missing", "look at the command that started the run.")
    options = read_option_file(str(path), {s.name: s for s in slime_specs()}, strict=False).known
    if options.get("rollout_external_engine_addrs"):
        return ok(name, "the engines are external: they ask for the key that they were given")
    if options.get("no_api_key") or options.get("sglang_api_key") == "":
        return warn(
            name,
            "the engines ask for none: any process of the machine can replace their weights",
            "leave out --no-api-key.",
        )
    return ok(name, "engines and router ask for the run's key, which is recorded nowhere")


def check_modes(folder: Path) -> Finding:
    """What other users may change below the folder."""
    name = "File modes"
    paths = [folder, *(path for path in folder.rglob("*") if not path.is_symlink())]
    open_ones = [path for path in paths if path.lstat().st_mode & (stat.S_IWGRP | stat.S_IWOTH)]
    mode = stat.filemode(folder.lstat().st_mode)
    if not open_ones:
        readers = "others may read it" if folder.lstat().st_mode & stat.S_IROTH else "closed"
        return ok(name, f"{mode} ({readers}); nothing below is writable for others")
    return warn(
        name,
        f"{mode}; {len(open_ones)} of {len(paths)} files and folders are writable for others: "
        + _some(open_ones, folder),
        f"chmod -R go-w {folder}",
    )


def check_pickles(folder: Path) -> Finding:
    """Files that run code in programs that unpickle them."""
    name = "Pickles"
    found = [path for path in folder.rglob("*") if path.is_file() and holds_pickle(path)]
    foreign = [
        path for path in found if path.name not in CHECKPOINT_PICKLES and path.suffix != ".distcp"
    ]
    if not foreign:
        return ok(
            name,
            f"{len(found)} files of the distributed checkpoint format, which slime reads as data; "
            "torch.load of them only with weights_only=True"
            if found
            else "none",
        )
    return warn(
        name,
        f"{len(foreign)} beside the checkpoints' {len(found) - len(foreign)}: "
        + _some(foreign, folder),
        "load them with weights_only=True, and only where you trust who wrote them.",
    )


def holds_pickle(path: Path) -> bool:
    """Whether a file begins as a pickle does, or is an archive of torch.save."""
    try:
        with open(path, "rb") as file:
            start = file.read(4)
        if start[:2] in PICKLE_STARTS:
            return True
        if start[:2] != b"PK":
            return False
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith(".pkl") for name in archive.namelist())
    except (OSError, zipfile.BadZipFile):
        # .distcp: archives one after the other
        return path.suffix == ".distcp"


def _some(paths: list[Path], folder: Path) -> str:
    shown = ", ".join(str(path.relative_to(folder)) for path in sorted(paths)[:SHOWN])
    return shown + (f", and {len(paths) - SHOWN} more" if len(paths) > SHOWN else "")


def security_findings(run: str) -> list[Finding]:
    """Every check of one run folder. `ConfigError` where there is none."""
    folder = Path(run)
    if not folder.is_dir():
        raise ConfigError(f"--security {run}: there is no such folder. Give a run's.")
    return [
        check_open_ports(folder),
        check_keys(folder),
        check_modes(folder),
        check_pickles(folder),
    ]
