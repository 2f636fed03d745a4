"""Kills processes of real runs at random moments, resumes the runs, and asks `slime ledger` whether a
sample was lost or trained twice.

    python tools/kill_runs.py [--minutes 5] [--seed 0] [--folder DIR] [--loops local sync heal ...]

Each run trains the addition example's tiny model for a few rollouts. Again and again one of its
processes - the driver, or any that the watch lists - is ended with SIGKILL at a random moment
(start, generation, training, a checkpoint), and the run is started again with --load, until it is
finished. At the end the ledger must add up, no process may be left, and where the loop is
deterministic the weights must be those of a run that nothing happened to, bit for bit. Status 1
where any proof failed.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tools")]

from lose_processes import processes_below  # noqa: E402
from support import small_run  # noqa: E402

from slime.data.ledger_audit import Findings  # noqa: E402
from slime.files.ledger_file import FILE_NAME, read_books  # noqa: E402
from slime.harness.ledger import lines_of, prove  # noqa: E402

ROLLOUTS = 6
KILLS = 4  # of a run
PATIENCE_S = 300.0  # for one start; this machine may be busy
LONGEST_S = 3.0  # from the moment at which a kill may come to the kill
DRIVER = "the driver"
FULLY_ASYNC = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"


@dataclasses.dataclass(frozen=True)
class Loop:
    """How a run is started. is_exact: equal options give equal weights, also over restarts. Groups
    that come first are taken before others (over-sampling), and rollouts that are in flight beside
    the training, are not made again with the same weights. heals: it survives most losses.
    """

    options: tuple[str, ...] = ()
    asynchronous: bool = False
    is_exact: bool = False
    heals: bool = False


LOOPS = {
    "local": Loop(("--local",), is_exact=True),
    "partial": Loop(("--local", "--over-sampling-batch-size", "12", "--partial-rollout")),
    "sync": Loop(is_exact=True),
    "heal": Loop(("--use-fault-tolerance", "--recovery-interval", "1"), is_exact=True, heals=True),
    "over": Loop(("--over-sampling-batch-size", "12")),
    "async": Loop(asynchronous=True),
    "fully": Loop(("--rollout-function-path", FULLY_ASYNC), asynchronous=True),
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


def one_start(words: list[str], run: Path, rng: random.Random, *, kills: int, tally: Tally) -> int:
    """The exit status of one start, in which up to `kills` processes are killed one after the
    other: while it starts, or after some more rollouts, at a random moment. More than one only
    where the run goes on.
    """
    process = small_run.launch(words, run)
    killed = 0
    while killed < kills and process.poll() is None:
        after = rng.choice((0, 1, 1, 2)) if killed == 0 else 1
        if not wait_for_entries(process, run / "ckpt", after):
            break
        time.sleep(rng.random() ** 2 * LONGEST_S * (1 if after else 2))
        phase = phase_of(run / "ckpt") if after else "start"
        if process.poll() is None and (role := kill_one(process.pid, rng)) is not None:
            killed += 1
            tally.kills += 1
            tally.phases[f"{role}: {phase}"] += 1
    output, _ = process.communicate(timeout=PATIENCE_S)
    (run / "output.txt").write_text(output)
    return process.returncode


def wait_for_entries(process: subprocess.Popen, save: Path, count: int) -> bool:
    """Whether the ledger gets so many more entries while the process lives."""
    before, deadline = num_entries(save), time.monotonic() + PATIENCE_S
    while num_entries(save) < before + count:
        if process.poll() is not None:
            return False
        if time.monotonic() > deadline:
            process.kill()
            raise SystemExit(f"no rollout within {PATIENCE_S} s: {save.parent}")
        time.sleep(0.01)
    return True


def kill_one(driver: int, rng: random.Random) -> str | None:
    """Ends a process of the run with SIGKILL; its role, None where it had ended by itself."""
    roles = {DRIVER: driver, **processes_below(driver)}
    role = rng.choice(sorted(roles))
    try:
        os.kill(roles[role], signal.SIGKILL)
    except ProcessLookupError:
        return None
    return role


def weights_of(run: Path) -> str:
    """A hash over the last checkpoint's tensors."""
    digest = hashlib.sha256()
    folder = max((run / "ckpt").glob("iter_*"))
    for path in sorted(folder.rglob("*.safetensors")):
        digest.update(str(path.relative_to(folder)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def command_of(loop: Loop, data: Path, run: Path) -> list[str]:
    """The command line of each start of a run."""
    return small_run.command(
        data, run, "--num-rollout", ROLLOUTS, "--save", run / "ckpt", "--load", run / "ckpt",
        "--save-interval", 1, "--keep-checkpoints", 2, *loop.options, asynchronous=loop.asynchronous,
    )  # fmt: skip


def undisturbed(loop: Loop, data: Path, run: Path) -> str | None:
    """The weights of a run that nothing happens to; None where they are not the same each time."""
    if not loop.is_exact:
        return None
    run.mkdir(parents=True)
    words = command_of(loop, data, run)
    status = one_start(words, run, random.Random(0), kills=0, tally=Tally())
    if status:
        raise SystemExit(f"{run} ended with status {status} without a kill")
    return weights_of(run)


def kill_and_resume(
    name: str, data: Path, run: Path, rng: random.Random, tally: Tally, expected: str | None
) -> None:
    """One run with some kills, to its end, and its proof."""
    run.mkdir(parents=True)
    words = command_of(LOOPS[name], data, run)
    begun_with = tally.kills
    while (left_to_kill := KILLS - (tally.kills - begun_with)) > 0:
        kills = left_to_kill if LOOPS[name].heals else 1
        before = tally.kills
        status = one_start(words, run, rng, kills=kills, tally=tally)
        if tally.kills == before or status == 0:
            break  # it has finished
    status = one_start(words, run, rng, kills=0, tally=tally)
    proof = prove(run)
    tally.add(proof.found)
    if status or proof.found.culprits or proof.found.rollouts != ROLLOUTS:
        tally.problems.append("\n".join([f"{run}: status {status}", *lines_of(proof)]))
    elif expected is not None and weights_of(run) != expected:
        tally.problems.append(f"{run}: the weights are not those of an undisturbed run")
    left = [pid for pid in processes_of(run) if pid != os.getpid()]
    if left:
        tally.problems.append(f"{run}: processes {left} are left")
    if status == 0 and not proof.found.culprits:
        shutil.rmtree(run / "ckpt", ignore_errors=True)


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
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started is ended
    rng, tally = random.Random(options.seed), Tally()
    end = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory() as temporary:
        root = options.folder or Path(temporary)
        root.mkdir(parents=True, exist_ok=True)
        subprocess.run(
            [sys.executable, "-m", "examples.addition.prepare", "--out", str(root / "data")],
            cwd=ROOT, check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        expected = {
            name: undisturbed(LOOPS[name], root / "data", root / f"undisturbed-{name}")
            for name in options.loops
        }
        while time.monotonic() < end:
            name = options.loops[tally.runs % len(options.loops)]
            run = root / f"{tally.runs:04d}-{name}"
            kill_and_resume(name, root / "data", run, rng, tally, expected[name])
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
