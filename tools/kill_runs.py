"""Kills real runs at random moments, resumes them, and asks `slime ledger` whether a sample was lost
or trained twice.

    python tools/kill_runs.py [--minutes 5] [--seed 0] [--folder DIR] [--loops local sync async partial]

Each run trains the addition example's tiny model for a few rollouts. Its driver is ended with
SIGKILL at a random moment after its first rollout began (generation, training, a checkpoint), and
it is started again with --load, until it is finished. Status 1 where any proof failed, or a process
was left.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from support import small_run  # noqa: E402

from slime.data.ledger_audit import Findings  # noqa: E402
from slime.files.ledger_file import FILE_NAME, read_books  # noqa: E402
from slime.harness.ledger import lines_of, prove  # noqa: E402
from slime.ray.cluster_folder import sweep  # noqa: E402

ROLLOUTS = 6
PATIENCE_S = 300.0  # for one start; this machine may be busy
LONGEST_S = 3.0  # from the moment at which a kill may come to the kill
FULLY_ASYNC = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"
LOOPS: dict[str, tuple[bool, tuple[str, ...]]] = {
    "local": (False, ("--local",)),
    "partial": (False, ("--local", "--over-sampling-batch-size", "12", "--partial-rollout")),
    "sync": (False, ("--over-sampling-batch-size", "12")),
    "async": (True, ()),
    "fully": (True, ("--rollout-function-path", FULLY_ASYNC)),
}


@dataclasses.dataclass
class Tally:
    """What happened over all runs."""

    runs: int = 0
    kills: int = 0
    phases: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    sampled: int = 0
    trained: int = 0
    problems: list[str] = dataclasses.field(default_factory=list)

    def add(self, found: Findings) -> None:
        self.runs += 1
        self.sampled += found.sampled
        self.trained += found.trained


def phase_of(save: Path) -> str:
    """What the run was doing, by what it has written last."""
    if list(save.glob(".iter_*.writing")):
        return "save"
    books = read_books(save / FILE_NAME)
    start = next(reversed(books.starts))
    handed = [rollout for name, rollout in books.rollouts if name == start]
    trained = [rollout for name, rollout in books.trained if name == start]
    return "training" if max(handed, default=-1) > max(trained, default=-1) else "generation"


def num_entries(save: Path) -> int:
    """Entries of rollouts so far."""
    try:
        return len(read_books(save / FILE_NAME).rollouts)
    except OSError:
        return 0


def one_start(
    words: list[str], run: Path, kill: tuple[int, float] | None
) -> tuple[int, str | None]:
    """(exit status, phase of the kill) of one process. kill: after so many more entries and so many
    seconds.
    """
    save = run / "ckpt"
    before = num_entries(save)
    process = small_run.launch(words, run)
    phase = None
    deadline = time.monotonic() + PATIENCE_S
    if kill is not None:
        while num_entries(save) < before + kill[0] and process.poll() is None:
            if time.monotonic() > deadline:
                raise SystemExit(f"no rollout within {PATIENCE_S} s in {run}")
            time.sleep(0.01)
        time.sleep(kill[1])
        if process.poll() is None:
            phase = phase_of(save)
            process.send_signal(signal.SIGKILL)
    process.communicate(timeout=PATIENCE_S)
    return process.returncode, phase


def kill_and_resume(loop: str, data: Path, run: Path, rng: random.Random, tally: Tally) -> None:
    """One run with two kills, to its end, and its proof."""
    asynchronous, options = LOOPS[loop]
    run.mkdir(parents=True)
    words = small_run.command(
        data, run, "--num-rollout", ROLLOUTS, "--save", run / "ckpt", "--load", run / "ckpt",
        "--save-interval", rng.choice([1, 2]), "--keep-checkpoints", 2, *options,
        asynchronous=asynchronous,
    )  # fmt: skip
    for _ in range(2):
        status, phase = one_start(
            words, run, (rng.randrange(1, 4), rng.random() * rng.random() * LONGEST_S)
        )
        if phase is None:
            break
        tally.kills += 1
        tally.phases[f"{loop}: {phase}"] += 1
    status, _ = one_start(words, run, None)
    sweep()
    proof = prove(run)
    tally.add(proof.found)
    if status or proof.found.culprits or proof.found.rollouts != ROLLOUTS:
        tally.problems.append("\n".join([f"{run}: status {status}", *lines_of(proof)]))
    left = [pid for pid in processes_of(run) if pid != os.getpid()]
    if left:
        tally.problems.append(f"{run}: processes {left} are left")


def processes_of(run: Path) -> list[int]:
    """Processes that have the run's folder in their environment, 5 s after its end."""
    mark = f"{small_run.RUN_VARIABLE}={run}".encode()
    deadline = time.monotonic() + 5.0
    while True:
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                continue
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.2)


def main(argv: list[str] | None = None) -> int:
    """Status 0 where every proof held and nothing was left."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="keep the runs here")
    parser.add_argument("--loops", nargs="+", choices=sorted(LOOPS), default=sorted(LOOPS))
    options = parser.parse_args(argv)
    rng, tally = random.Random(options.seed), Tally()
    end = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory() as temporary:
        root = options.folder or Path(temporary)
        root.mkdir(parents=True, exist_ok=True)
        subprocess.run(
            [sys.executable, "-m", "examples.addition.prepare", "--out", str(root / "data")],
            cwd=ROOT, check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        while time.monotonic() < end:
            loop = options.loops[tally.runs % len(options.loops)]
            kill_and_resume(loop, root / "data", root / f"{tally.runs:04d}-{loop}", rng, tally)
            print(
                f"{tally.runs} runs, {tally.kills} kills, {len(tally.problems)} problems",
                flush=True,
            )
    print(
        f"{tally.kills} kills of {tally.runs} runs: {tally.sampled} samples, {tally.trained} trained; "
        + ", ".join(f"{count} in {phase}" for phase, count in sorted(tally.phases.items()))
    )
    print(*tally.problems, f"{len(tally.problems)} problems", sep="\n")
    return int(bool(tally.problems))


if __name__ == "__main__":
    raise SystemExit(main())
