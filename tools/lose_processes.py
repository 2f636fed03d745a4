"""Kills or stops each kind of process of a real run, and prints what the run says about it.

    python tools/lose_processes.py [--only "engine 0"] [--signals KILL STOP] [--folder DIR]

Each cell is a run of `slime train` of its own on the addition example's data: Ray, one training
rank, an engine, the router and a grader. After its first training step one process gets the signal.
A row names who was lost, what the run did, after how many seconds the log named the process and the
run ended, its status, and what is left of it five seconds later. Exit 1 where a process was not
named, or something is left.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from support import small_run  # noqa: E402

from slime.supervision import records  # noqa: E402
from slime.supervision.heart import ROLLOUT_MANAGER  # noqa: E402
from slime.supervision.watch import CONTROL_STORE, NODE_MANAGER  # noqa: E402

KINDS = (
    CONTROL_STORE,
    NODE_MANAGER,
    ROLLOUT_MANAGER,
    "actor rank 0",
    "engine 0",
    "the lock of weight updates",
    "the router",
    "grader",
)
REPLACED = ("grader",)  # the run goes on without it
OPTIONS = (
    "--input-key prompt --label-key label --apply-chat-template "
    "--custom-rm-path tools.lose_processes.graded --rollout-batch-size 8 --n-samples-per-prompt 4 "
    "--global-batch-size 32 --micro-batch-size 8 --rollout-max-response-len 6 --lr 1e-3 "
    "--lr-decay-style constant --colocate --actor-num-gpus-per-node 1 --rollout-num-gpus 1 "
    "--num-cpus 2 --num-rollout 100000 --no-live-view --no-write-report --gate-keep-truncated "
    "--use-sglang-router"
).split()
START_S, END_S, LEFT_S = 300.0, 90.0, 5.0
GOES_ON_S = 12.0


async def graded(args: argparse.Namespace, sample: Any, **kwargs: object) -> float:
    """The share of even token ids in a response, after a grader process has graded something."""
    from slime.rollout.rm_hub.grader_pool import PoolSettings, shared_pool

    await shared_pool(PoolSettings(num_workers=1)).grade_async("math", "\\boxed{1}", "1")
    tokens = sample.tokens[-sample.response_length :]
    return sum(token % 2 == 0 for token in tokens) / max(1, len(tokens))


def cluster_folder_of(driver: int) -> Path | None:
    """The folder of the private cluster of a driver while it is there."""
    for owner in Path("/tmp").glob("slime-ray-*/owner.json"):
        with contextlib.suppress(OSError, ValueError):
            if json.loads(owner.read_text())["pid"] == driver:
                return owner.parent
    return None


def processes_below(driver: int) -> dict[str, int]:
    """role -> process id of everything that is watched now in the run of a driver."""
    folder = cluster_folder_of(driver)
    if folder is None or not (folder / "processes").is_dir():
        return {}
    found = [records.read_record(path) for path in (folder / "processes").iterdir()]
    return {record.role: record.pid for record in found if record is not None}


class WatchedRun:
    """A run of `slime train`, the lines that it prints with their times, and its processes."""

    def __init__(
        self,
        data: Path,
        folder: Path,
        *options: str,
        module: str = "slime.train",
        without: tuple[str, ...] = (),
        paths: tuple[Path, ...] = (),
    ) -> None:
        """options: come last and win; without: of OPTIONS; paths: of modules for its processes."""
        self.folder = folder
        words = ["--prompt-data", data / "train.jsonl", "--hf-checkpoint", data / "model"]
        words += ["--run-dir", folder, *(word for word in OPTIONS if word not in without)]
        command = [sys.executable, "-m", module, *map(str, words), *options]
        self.process = small_run.launch(command, folder, paths=paths)
        self.lines: list[tuple[float, str]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.monotonic(), line.rstrip()))

    @property
    def cluster_folder(self) -> Path | None:
        """The folder of the run's private cluster while it is there."""
        return cluster_folder_of(self.process.pid)

    def processes(self) -> dict[str, int]:
        """role -> process id of everything that is watched now."""
        return processes_below(self.process.pid)

    def num_trained(self) -> int:
        """Training steps that the metrics show."""
        path = self.folder / "metrics.jsonl"
        return path.read_text().count('"train/loss"') if path.exists() else 0

    def wait_until_trained(self, num_steps: int = 1, *, timeout_s: float = START_S) -> None:
        """Returns once the run has trained; RuntimeError with its words where it does not."""
        deadline = time.monotonic() + timeout_s
        while self.num_trained() < num_steps:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("the run does not train:\n" + self.text()[-4000:])
            time.sleep(0.1)

    def text(self) -> str:
        """What the run has printed."""
        return "\n".join(line for _, line in self.lines)

    def named_after(self, role: str, begun: float) -> float | None:
        """Seconds from `begun` until a line named the process; None where none did."""
        for at, line in list(self.lines):
            if at >= begun and role in line and (") has died" in line or ") is frozen" in line):
                return at - begun
        return None

    def finish(self, timeout_s: float = END_S) -> int | None:
        """The exit status; None where the run has not ended by itself."""
        try:
            status: int | None = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            status = None
        self._reader.join(5)
        return status

    def left(self, patience_s: float = LEFT_S) -> list[str]:
        """Processes and folders of the run that are still there after `patience_s`."""
        deadline = time.monotonic() + patience_s
        while (found := self._left()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return found

    def _left(self) -> list[str]:
        mark = f"{small_run.RUN_VARIABLE}={self.folder}".encode()
        found = [] if self.cluster_folder is None else [str(self.cluster_folder)]
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(f"{entry.name} {(entry / 'cmdline').read_bytes()[:60]!r}")
        return found

    def close(self) -> None:
        """Ends what has not ended by itself."""
        if self.process.poll() is None:
            self.process.terminate()
            self.finish(30)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


@dataclasses.dataclass(frozen=True)
class Cell:
    """What one lost process led to."""

    role: str
    sent: str
    outcome: str
    named_s: float | None
    ended_s: float | None
    status: int | None
    left: list[str]

    @property
    def is_good(self) -> bool:
        """Whether the process was named in time and the run did what it should."""
        bound = 1.0 if self.sent == "KILL" else 10.0
        is_named = self.role in REPLACED or (self.named_s is not None and self.named_s <= bound)
        ends = self.outcome == ("goes on" if self.role in REPLACED else "ended by its name")
        return is_named and ends and not self.left

    def __str__(self) -> str:
        def seconds(value: float | None) -> str:
            return "-" if value is None else f"{value:.1f}"

        left = "; ".join(self.left) or "nothing"
        status = "-" if self.status is None else self.status
        return (
            f"| {self.role} | {self.sent} | {self.outcome} | {seconds(self.named_s)} | "
            f"{seconds(self.ended_s)} | {status} | {left} |"
        )


def lose(run: WatchedRun, role: str, sent: str) -> Cell:
    """Sends the signal to a process of a run that trains, and waits for what follows."""
    pid = run.processes()[role]
    begun = time.monotonic()
    os.kill(pid, getattr(signal, f"SIG{sent}"))
    if role in REPLACED:
        num_trained = run.num_trained()
        time.sleep(GOES_ON_S)
        goes_on = run.process.poll() is None and run.num_trained() > num_trained
        run.close()
        outcome = "goes on" if goes_on else "stands still"
        if not _is_in_log(run, role, pid):
            outcome += ", not logged"
        return Cell(role, sent, outcome, None, None, None, run.left())
    status = run.finish()
    ended_s = None if status is None else time.monotonic() - begun
    error = next((line for _, line in run.lines if line.startswith("error: ")), "no error")
    by_name = error.startswith(f"error: {role} (process {pid}) ")
    outcome = "ended by its name" if by_name else f"ended by {error[:60]!r}"
    run.close()
    return Cell(role, sent, outcome, run.named_after(role, begun), ended_s, status, run.left())


def _is_in_log(run: WatchedRun, role: str, pid: int) -> bool:
    """Whether the driver's log names the process; only warnings are on the terminal."""
    path = run.folder / "logs" / "driver.log"
    return path.exists() and f"{role} (process {pid}) " in path.read_text()


def main(argv: list[str] | None = None) -> int:
    """Prints a row per kind and signal."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--signals", nargs="+", choices=("KILL", "STOP"), default=("KILL", "STOP"))
    parser.add_argument("--folder", help="for data and run folders; default: a temporary one")
    args = parser.parse_args(argv)
    from examples.addition.prepare import prepare

    with contextlib.ExitStack() as stack:
        folder = Path(args.folder or stack.enter_context(tempfile.TemporaryDirectory()))
        data = Path(prepare(folder / "data"))
        print("| process | signal | the run | named after s | over after s | status | left |")
        print("|---|---|---|---|---|---|---|")
        cells: list[Cell] = []
        for role in args.only:
            for sent in args.signals:
                run = WatchedRun(data, folder / f"run-{len(cells)}")
                try:
                    run.wait_until_trained()
                    cells.append(lose(run, role, sent))
                finally:
                    run.close()
                print(cells[-1], flush=True)
    return 0 if all(cell.is_good for cell in cells) else 1


if __name__ == "__main__":
    raise SystemExit(main())
