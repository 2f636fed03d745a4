"""One training run that is broken again and again, and continued with --load each time."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import time
from pathlib import Path

from lose_processes import WatchedRun

from chaos.vital_signs import shared_files, vital_signs
from slime.files.ledger_file import FILE_NAME, read_books
from slime.harness.ledger import prove

INSIDE = Path(__file__).resolve().parent / "inside"
CHAOS_VARIABLE = "SLIME_CHAOS_FOLDER"
START_S, END_S, LEFT_S = 180.0, 90.0, 5.0
SHARED = Path("/dev/shm")
TMPFS_BYTES = 192 * 2**20
MANY = 100_000  # rollouts; the run is ended by its faults


@dataclasses.dataclass(frozen=True)
class Loop:
    """A kind of run: its module, options that are added and those that are left out."""

    name: str
    module: str = "slime.train"
    options: tuple[str, ...] = ()
    without: tuple[str, ...] = ()


class Lineage:
    """The starts of one run in `folder`. Its run folder is a small file system of its own where
    mounting is allowed.
    """

    def __init__(self, loop: Loop, data: Path, folder: Path) -> None:
        self.loop, self._data = loop, data
        self.folder, self.orders = folder / "run", folder / "orders"
        self.run: WatchedRun | None = None
        self.started_s = 0.0
        self._begun_with = 0
        for path in (self.folder, self.orders):
            path.mkdir(parents=True)
        self.is_mounted = _mount(self.folder)
        self._shared: set[str] = set()  # files in memory that its processes have had

    @property
    def save(self) -> Path:
        """The folder of checkpoints, and of the ledger."""
        return self.folder / "ckpt"

    def start(self, *options: str) -> WatchedRun:
        """A start that continues what is there."""
        os.environ[CHAOS_VARIABLE] = str(self.orders)
        self._begun_with = self.num_trained()
        begun = time.monotonic()
        words = ["--num-rollout", str(MANY), "--save", str(self.save), "--load", str(self.save)]
        words += ["--save-interval", "1", "--keep-checkpoints", "2"]
        self.run = WatchedRun(
            self._data, self.folder, *words, *self.loop.options, *options,
            module=self.loop.module, without=self.loop.without, paths=(INSIDE,),
        )  # fmt: skip
        self.started_s = begun
        return self.run

    def num_trained(self) -> int:
        """Rollouts that have trained, over all starts."""
        try:
            return len(read_books(self.save / FILE_NAME).trained)
        except OSError:
            return 0

    def is_alive(self) -> bool:
        """Whether the present start runs."""
        return self.run is not None and self.run.process.poll() is None

    def wait_for_rollouts(self, count: int, *, timeout_s: float) -> bool:
        """Whether `count` more rollouts train in time, and the run goes on."""
        target, deadline = self.num_trained() + count, time.monotonic() + timeout_s
        while self.num_trained() < target:
            if not self.is_alive() or time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        return self.is_alive()

    def wait_until_it_trains(self) -> None:
        """RuntimeError with what the start printed where it trains nothing."""
        assert self.run is not None
        deadline = time.monotonic() + START_S
        while self.num_trained() <= self._begun_with:
            if not self.is_alive() or time.monotonic() > deadline:
                raise RuntimeError("the run does not train:\n" + self.run.text()[-3000:])
            time.sleep(0.1)
        self.note_shared_files()

    def note_shared_files(self) -> None:
        """What the processes of the run have in /dev/shm now must be gone after its end."""
        assert self.run is not None
        self._shared |= shared_files(self.run.processes().values())
        if (folder := self.run.cluster_folder) is not None:
            self._shared.add(f"{SHARED}/{folder.name}")

    def culprits(self) -> list[str]:
        """What `slime ledger` finds, while nothing runs."""
        proof = prove(self.folder)
        return [culprit.message for culprit in proof.found.culprits]

    def left(self) -> list[str]:
        """Processes, folders and shared memory of the run five seconds after its end."""
        assert self.run is not None
        found = self.run.left(LEFT_S)
        found += sorted(name for name in self._shared if os.path.exists(name))
        return found

    def largest(self) -> tuple[str, int]:
        """(role, process id) of the process with the most memory."""
        assert self.run is not None
        sizes = {}
        for role, pid in self.run.processes().items():
            with contextlib.suppress(OSError):
                sizes[role, pid] = vital_signs(pid).resident
        return max(sizes, key=lambda key: sizes[key])

    def close_run(self) -> None:
        """Ends the present start as SIGTERM does, by force where it does not listen."""
        if self.run is not None:
            self.run.close()
            self.run.finish(1)

    def close(self) -> None:
        """Ends the run and removes its file system."""
        self.close_run()
        if self.is_mounted:
            subprocess.run(["umount", "-l", str(self.folder)], check=False)


def _mount(folder: Path) -> bool:
    """A file system of TMPFS_BYTES at `folder`; False where that is not allowed."""
    words = ["mount", "-t", "tmpfs", "-o", f"size={TMPFS_BYTES}", "chaos", str(folder)]
    try:
        return subprocess.run(words, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def thaw(pid: int) -> None:
    """A stopped process goes on."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
