"""Breaks the disk under everything that a run writes and reads back, and looks at what a restart
finds.

    python tools/chaos/storage.py [--seconds 60 | --cases 1000] [--seed 0] [--only checkpoint ...]
                                  [--kinds faults flips]

A fault: version 1 is saved; a process of its own begins to save version 2 and meets one fault, see
`faulty_disk`; then a restart must find version 1 or version 2 with exactly its values, version 2
where the save returned; and the saves of the run that continues, up to version 3, must succeed, be
read back and leave no temporary file.
A flip: a single bit of one file of version 1 is turned; reading must refuse the file by its name, or
give the same values.

Status 0 where nothing was lost. The table counts per target and fault: cases, those in which the
fault fired, and what the restart found. A case can be repeated: its seed is printed with a problem.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import importlib
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tools")]

from chaos.faulty_disk import (  # noqa: E402
    BYTE,
    ERRNOS,
    KILL,
    OPERATION,
    REFUSE,
    DiskFault,
    arm,
    count_operations,
)
from chaos.targets import Careless, Mixed, Target, targets_of  # noqa: E402
from slime.exceptions import SlimeError  # noqa: E402

FOLDERS = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
LIMIT_S = 60.0  # of one step of a case
FAULTS, FLIPS = KINDS = ("faults", "flips")
RETURNED, REFUSED, KILLED = "returned", "refused", "killed"


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a process of its own ended: `how`, whether the fault fired, and what it said."""

    how: str
    fired: bool
    said: str


def in_fork(action: Callable[[], object], fault: DiskFault | None, root: Path) -> Ended:
    """Runs `action` in a fork, under `fault`. What it says: the repr of its result, or its error.
    `Mixed` where it raises that, `AssertionError` for an error that is none of a disk.

    Everything that is tried runs in a fork: the process that forks has imported much and used none
    of it, so that no thread of a library is missing in its children.
    """
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read_end)
        _child(action, fault, root, write_end)
    os.close(write_end)
    with open(read_end, "rb") as pipe:
        has_ended = _wait(child)
        if not has_ended:
            os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)
        if not has_ended:
            raise AssertionError(f"no end within {LIMIT_S:.0f} s")
        lines = pipe.read().decode(errors="replace").splitlines()
    fired = "fired" in lines
    said = "\n".join(line for line in lines if line != "fired")
    if os.WIFSIGNALED(status[1]):
        number = os.WTERMSIG(status[1])
        if number not in (signal.SIGKILL, signal.SIGXFSZ):
            raise AssertionError(f"ended by signal {number}")
        return Ended(KILLED, True, said)
    code = os.waitstatus_to_exitcode(status[1])
    if code == 2:
        raise AssertionError(f"an error that no user understands:\n{said}")
    if code == 3:
        raise Mixed(said)
    return Ended(REFUSED if code else RETURNED, fired, said)


def _wait(child: int) -> bool:
    """Whether the process ends within the limit."""
    descriptor = os.pidfd_open(child)
    try:
        return bool(select.select([descriptor], [], [], LIMIT_S)[0])
    finally:
        os.close(descriptor)


def _child(
    action: Callable[[], object], fault: DiskFault | None, root: Path, write_end: int
) -> None:
    """Never returns. Status 0 after the action, 1 where it raised an error of a disk, 3 for `Mixed`,
    2 for another.
    """
    status = 2
    try:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)
        os.dup2(nothing, 2)
        if fault is not None:
            arm(fault, root, lambda: os.write(write_end, b"fired\n"))
        try:
            os.write(write_end, f"{action()!r}\n".encode())
            status = 0
        except (SlimeError, OSError) as error:
            os.write(write_end, f"{type(error).__name__}: {error}\n".encode())
            status = 1
        except Mixed as error:
            os.write(write_end, str(error).encode())
            status = 3
        except BaseException:  # noqa: BLE001 - told to the parent
            os.write(write_end, traceback.format_exc().encode())
    finally:
        os._exit(status)


def find(target: Target, folder: Path) -> int | None:
    """What a restart finds. `SlimeError` where it finds nothing that it can use."""
    ended = in_fork(lambda: target.read(folder), None, folder)
    if ended.how != RETURNED:
        raise SlimeError(ended.said)
    return None if ended.said == "None" else int(ended.said)


def save(target: Target, folder: Path, version: int) -> None:
    """An undisturbed save, in a process of its own as a run is."""
    ended = in_fork(lambda: target.write(folder, version), None, folder)
    if ended.how != RETURNED:
        raise AssertionError(f"an undisturbed save failed: {ended.said}")


def try_fault(target: Target, template: Path, folder: Path, fault: DiskFault) -> tuple[bool, str]:
    """(whether the fault fired, what the restart found) of one case. `AssertionError`, `Mixed` or a
    `SlimeError` where something was lost.
    """
    shutil.copytree(template, folder)
    ended = in_fork(lambda: target.write(folder, 2), fault, folder)
    found = find(target, folder)
    if found not in (1, 2):
        raise Mixed(f"the restart found version {found}")
    if ended.how == RETURNED and not (ended.fired or found == 2):
        raise Mixed(f"the save of version 2 returned, and the restart found {found}")
    for version in range(found + 1, 4):  # the run that continues does again what was not saved
        save(target, folder, version)
    if (again := find(target, folder)) != 3:
        raise Mixed(f"after the save of version 3 a restart found {again}")
    if left := temporary_files(folder):
        raise AssertionError(f"left behind: {', '.join(left)}")
    return ended.fired, f"{ended.how}, version {found}"


def temporary_files(folder: Path) -> list[str]:
    """Hidden files and folders that are not a format's own."""
    names = (path for path in folder.rglob(".*") if path.name != ".metadata")
    return sorted(str(path.relative_to(folder)) for path in names)


def try_flip(
    target: Target, template: Path, files: list[Path], folder: Path, rng: random.Random
) -> tuple[bool, str]:
    """(whether it was noticed, what happened) when one bit of one of `files` differs. `Mixed` where
    other values were read in silence.
    """
    shutil.copytree(template, folder)
    path = folder / rng.choice(files)
    content = bytearray(path.read_bytes())
    place = rng.randrange(len(content))
    content[place] ^= 1 << rng.randrange(8)
    path.write_bytes(content)
    where = f"{path.relative_to(folder)}, byte {place} of {len(content)}"
    try:
        found = find(target, folder)
    except Mixed as error:
        raise Mixed(f"{where}: read in silence: {error}") from None
    except SlimeError as error:
        if path.name not in str(error) and path.parent.name not in str(error):
            raise AssertionError(f"{where}: not named: {error}") from None
        return True, "refused by name"
    if target.appends:
        return True, "left out"
    if found != 1:
        raise Mixed(f"{where}: version {found} was read")
    return False, "same values"


def files_below(folder: Path) -> list[Path]:
    """Its files that are not empty, sorted."""
    paths = (path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    return sorted(path.relative_to(folder) for path in paths)


class Storage:
    """Cases of one target, in a folder of its own."""

    def __init__(self, target: Target, scratch: Path) -> None:
        self.target, self.scratch = target, scratch
        self.template = scratch / "template"
        self.template.mkdir(parents=True)
        in_fork(lambda: target.prepare(self.template), None, self.template)
        given = set(files_below(self.template))  # a user's, which no run writes
        for version in (0, 1):
            save(target, self.template, version)
        self.files = [path for path in files_below(self.template) if path not in given]
        self.largest = max((self.template / path).stat().st_size for path in self.files)
        self.num_operations = self._count_operations()

    def _count_operations(self) -> int:
        """Operations of one save."""
        folder = self.scratch / "counted"
        shutil.copytree(self.template, folder)

        def write() -> int:
            count = count_operations(folder)
            self.target.write(folder, 2)
            return count()

        return int(in_fork(write, None, folder).said)

    def draw(self, rng: random.Random) -> DiskFault:
        """A fault at a random place of a save."""
        action = rng.choice((KILL, REFUSE))
        if rng.random() < 0.6:
            number = rng.randint(1, self.num_operations)
            return DiskFault(action, OPERATION, number, rng.choice(ERRNOS))
        if self.target.appends:
            return DiskFault(action, BYTE, self.largest + rng.randrange(self.largest // 2))
        # most files are small: places near the beginning are as likely as all others
        number = int(self.largest ** rng.random()) if rng.random() < 0.5 else 0
        return DiskFault(action, BYTE, number or rng.randrange(self.largest))

    def run(self, seed: str, kind: str) -> tuple[str, bool, str]:
        """(column, fired, what was found) of the case of this seed."""
        rng, folder = random.Random(seed), self.scratch / "case"
        try:
            if kind == FLIPS:
                found = try_flip(self.target, self.template, self.files, folder, rng)
                return ("flipped bit", *found)
            fault = self.draw(rng)
            try:
                return (fault.kind, *try_fault(self.target, self.template, folder, fault))
            except (AssertionError, SlimeError, OSError) as error:
                raise type(error)(f"{fault}: {error}") from None
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def prove(storage: Storage) -> None:
    """What writes its file in place must be found out. `AssertionError` where it is not."""
    for action in (KILL, REFUSE):
        folder = storage.scratch / action
        try:
            try_fault(storage.target, storage.template, folder, DiskFault(action, BYTE, 50))
        except Mixed:
            continue
        raise AssertionError(f"{action}: half a file was taken for a whole one")


def run_cases(options: argparse.Namespace) -> tuple[dict, list[str]]:
    """({(target, column): counts of what was found}, one line per problem)."""
    table: dict[tuple[str, str], collections.Counter] = collections.defaultdict(collections.Counter)
    problems: list[str] = []
    targets = targets_of(options)
    for name in {name for target in targets for name in target.imports}:
        importlib.import_module(name)
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=FOLDERS)))
        prove(Storage(Careless(), scratch / "careless"))
        storages = [Storage(target, scratch / target.name.replace(" ", "_")) for target in targets]
        deadline = time.monotonic() + (options.seconds or float("inf"))
        number = 0
        while time.monotonic() < deadline and number < (options.cases or float("inf")):
            for storage in storages:
                seed = f"{options.seed}-{number}"
                name = storage.target.name
                for kind in options.kinds:
                    try:
                        column, fired, found = storage.run(seed, kind)
                        table[name, column].update(cases=1, fired=fired, **{found: 1})
                    except (AssertionError, SlimeError, OSError) as error:
                        table[name, "problems"].update(cases=1)
                        said = f"{type(error).__name__}: {error}"
                        problems.append(f"{name}, {kind} of case {seed}: {said}")
            number += 1
    return table, problems


def main(argv: list[str] | None = None) -> int:
    """Status 0 where nothing was lost."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", type=int, help="of each target")
    parser.add_argument("--seconds", type=float, help="for all; 60 where --cases is not given")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", help="targets whose name holds one of these words")
    parser.add_argument(
        "--kinds", nargs="+", choices=KINDS, default=KINDS, help="what is tried; default: both"
    )
    options = parser.parse_args(argv)
    if options.cases is None and options.seconds is None:
        options.seconds = 60.0
    if not targets_of(options):
        parser.error(f"no target is called {options.only}")
    started = time.monotonic()
    table, problems = run_cases(options)
    for line in problems[:20]:
        print(line)
    print(f"{'target':<24}{'fault':<20}{'cases':>7}{'fired':>7}  found")
    for (name, column), counts in sorted(table.items()):
        found = ", ".join(
            f"{word} {count}"
            for word, count in sorted(counts.items())
            if word not in ("cases", "fired")
        )
        print(f"{name:<24}{column:<20}{counts['cases']:>7}{counts['fired']:>7}  {found}")
    total = sum(counts["cases"] for counts in table.values())
    fired = sum(counts["fired"] for counts in table.values())
    print(
        f"{total} cases, {fired} faults fired, {len(problems)} problems, "
        f"{time.monotonic() - started:.0f} s"
    )
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
