"""Kills and stops training ranks and the rollout manager of real runs in each phase, and compares each
run with one that nothing happened to.

    python tools/lose_ranks.py [--only save ...] [--folder DIR]

Each cell is a run of four rollouts on the addition example's data, deterministic, with
--recovery-interval. A row names the phase that the process showed when the signal was sent, the
seconds that the healing took, and in what the run differs from an undisturbed one of
the same options: metrics, samples, train dumps, ledger. Exit 1 where a signal was not sent, a run
did not end as it should, differs, or leaves something behind.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from support import same_run, small_run  # noqa: E402
from support.phase_faults import Strike, Striker  # noqa: E402

from slime.supervision.heart import ROLLOUT_MANAGER  # noqa: E402

ACTOR, CRITIC = "actor rank 0", "critic rank 0"
SHARED = "--num-rollout 4 --recovery-interval 1".split()
SAVES = "--save-interval 1 --save {run}/ckpt".split()
EVALUATES = "--eval-interval 1 --eval-prompt-data held {data}/eval.jsonl".split()
PPO = "--advantage-estimator ppo --num-critic-only-steps 1".split()
APART = "--rollout-num-gpus 1 --num-cpus 3".split()
TWO = "--actor-num-gpus-per-node 2 --rollout-num-gpus 2".split()
FULLY = "--rollout-function-path slime.rollout.fully_async_rollout.generate_rollout_fully_async"
TRAINS = "rollout 1: actor_train"
TIMEOUT_S, LEFT_S = 280.0, 5.0


@dataclasses.dataclass(frozen=True)
class Cell:
    """One run: its options and the strikes at it. ends_by: words of the error that ends it;
    compares: it is deterministic.
    """

    name: str
    strikes: Sequence[Strike]
    options: Sequence[str] = ()
    asynchronous: bool = False
    ends_by: str | None = None
    compares: bool = True


def kill(phase: str, role: str = ACTOR, **options: str) -> Strike:
    return Strike(role, phase, **options)


def cells() -> list[Cell]:
    """The table."""
    twice = "--recovery-interval 2".split()
    return [
        Cell("load", [kill("init")]),
        Cell("forward and backward", [kill("rollout 1: .*forward_backward")]),
        Cell("stopped", [kill("rollout 1: .*forward_backward", sent="STOP")]),
        Cell("optimizer", [kill("rollout 1: .*optimizer")]),
        Cell("every second state", [kill("rollout 2: .*forward_backward")], twice),
        Cell("weight update", [kill("rollout 1: .*send_weights")]),
        Cell("weight update, later", [kill("rollout 1: .*send_weights")], twice),
        Cell("publication of the state", [kill("rollout 1: .*publish_state")]),
        Cell("save", [kill("rollout 1: .*save_model")], SAVES),
        Cell("generation", [kill("rollout 2: .*generate", shown_by=ROLLOUT_MANAGER)]),
        Cell("evaluation", [kill("rollout 1: .*evaluation", shown_by=ROLLOUT_MANAGER)], EVALUATES),
        Cell("offload", [kill("rollout 1: .*sleep")], ["--offload"]),
        Cell("onload", [kill("rollout 1: .*wake_up")], ["--offload"]),
        Cell("--release-train", [kill(TRAINS)], ["--release-train"]),
        Cell("--release-train, state", [kill("rollout 1: .*publish_state")], ["--release-train"]),
        Cell("a second rank", [kill(TRAINS, "actor rank 1")], TWO),
        Cell("critic", [kill("rollout 2: .*train", CRITIC)], PPO),
        Cell("policy beside a critic", [kill("rollout 2: .*train")], PPO),
        Cell("train-async", [kill(TRAINS)], APART, asynchronous=True),
        Cell(
            "train-async, old weights",
            [kill("rollout 2: .*train")],
            [*APART, "--keep-old-actor"],
            asynchronous=True,
        ),
        Cell(
            "fully asynchronous",
            [kill(TRAINS)],
            [*APART, *FULLY.split()],
            asynchronous=True,
            compares=False,
        ),
        Cell("while it is healed", [kill(TRAINS), kill("init")]),
        Cell("in two rollouts", [kill(TRAINS), kill("rollout 2: .*train")]),
        Cell(
            "three times",
            [kill(TRAINS) for _ in range(3)],
            ends_by="lost 3 times since the training of rollout 1 began",
        ),
        *manager_cells(),
    ]


def manager_cells() -> list[Cell]:
    """Those in which the rollout manager is lost."""
    lost = ROLLOUT_MANAGER
    record = ["--record", "{run}/record"]
    return [
        Cell("manager: generation", [kill("rollout 1: .*generate", lost)]),
        Cell("manager: stopped", [kill("rollout 1: .*generate", lost, sent="STOP")]),
        Cell("manager: first rollout", [kill("rollout 0: .*generate", lost)]),
        Cell("manager: training", [kill(TRAINS, lost, shown_by=ACTOR)]),
        Cell("manager: weight update", [kill("rollout 1: .*send_weights", lost, shown_by=ACTOR)]),
        Cell("manager: save", [kill("rollout 1: .*save", lost)], SAVES),
        Cell(
            "manager: the ranks' save",
            [kill("rollout 1: .*save_model", lost, shown_by=ACTOR)],
            SAVES,
        ),
        Cell("manager: evaluation", [kill("rollout 2: .*evaluation", lost)], EVALUATES),
        Cell(
            "manager: --release-train", [kill("rollout 2: .*generate", lost)], ["--release-train"]
        ),
        Cell(
            "manager: router, engines replaced",
            [kill("rollout 1: .*generate", lost)],
            ["--use-sglang-router", "--use-fault-tolerance"],
        ),
        Cell("manager: recorded", [kill("rollout 1: .*generate", lost)], [*record, *SAVES]),
        Cell(
            "manager: train-async", [kill("rollout 2: .*generate", lost)], APART, asynchronous=True
        ),
        Cell(
            "manager: train-async, training",
            [kill(TRAINS, lost, shown_by=ACTOR)],
            [*APART, *SAVES],
            asynchronous=True,
        ),
        Cell(
            "manager: fully asynchronous",
            [kill("rollout 1: .*generate", lost)],
            [*APART, *FULLY.split()],
            asynchronous=True,
            compares=False,
        ),
        Cell(
            "manager, then a rank",
            [
                kill("rollout 1: .*generate", lost),
                kill("update_weights"),
            ],
        ),
        Cell(
            "manager, twice",
            [kill("rollout 1: .*generate", lost), kill("rollout 1: .*generate", lost)],
        ),
    ]


@dataclasses.dataclass(frozen=True)
class Row:
    """What a cell led to."""

    cell: Cell
    seen: Sequence[str]
    back_s: Sequence[str]
    problems: Sequence[str]

    def __str__(self) -> str:
        good = "ends as it should" if self.cell.ends_by else "nothing differs"
        back = ", ".join(self.back_s) or "-"
        return (
            f"| {self.cell.name} | {', '.join(strike.sent for strike in self.cell.strikes)} | "
            f"{'; '.join(self.seen)} | {back} | {'; '.join(self.problems) or good} |"
        )


class Table:
    """Runs cells below `folder`; undisturbed runs are made once for the same options."""

    def __init__(self, folder: Path, data: Path) -> None:
        self.folder, self.data = folder, data
        self._whole: dict[tuple, Path] = {}

    def _start(self, run: Path, cell: Cell) -> subprocess.Popen:
        words = [*SHARED, "--dump-details", str(run / "dumps"), *cell.options]
        words = [word.format(run=run, data=self.data) for word in words]
        return small_run.start(self.data, run, *words, asynchronous=cell.asynchronous)

    def _undisturbed(self, cell: Cell) -> Path:
        key = (cell.asynchronous, *cell.options)
        if key not in self._whole:
            run = self.folder / f"whole-{len(self._whole)}"
            small_run.finish(self._start(run, cell), timeout=TIMEOUT_S)
            self._whole[key] = run
        return self._whole[key]

    def run(self, cell: Cell) -> Row:
        """The run of one cell, compared."""
        whole = self._undisturbed(cell) if cell.compares and cell.ends_by is None else None
        run = self.folder / re.sub(r"\W+", "-", cell.name)
        process = self._start(run, cell)
        Striker(process.pid, cell.strikes)
        try:
            output, _ = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.terminate()
            output, _ = process.communicate(timeout=60)
            output += "\nit took too long"
        (self.folder / f"{run.name}.txt").write_text(output)
        problems = [f"{one.phase!r} was not seen" for one in cell.strikes if one.pid is None]
        if cell.ends_by is not None:
            is_named = re.search(f"^error: .*{cell.ends_by}", output, re.MULTILINE)
            problems += [] if is_named and process.returncode == 1 else ["it ends otherwise"]
        elif process.returncode != 0:
            problems.append(f"status {process.returncode}")
        elif whole is not None:
            problems += same_run.differences(whole, run)[:3]
        if process.returncode == 0:
            ledger = subprocess.run(
                [sys.executable, "-m", "slime.cli", "ledger", str(run)],
                cwd=ROOT,
                check=False,
                capture_output=True,
                text=True,
                timeout=120,
            )
            problems += [] if ledger.returncode == 0 else [f"ledger: {ledger.stdout[-300:]}"]
        problems += left_of(run)
        back = re.findall(r" back after ([\d.]+) s", output)
        return Row(cell, [one.seen for one in cell.strikes], back, problems)


def left_of(run: Path, patience_s: float = LEFT_S) -> list[str]:
    """Processes of the run, and folders in memory, that are still there after `patience_s`."""
    mark = f"{small_run.RUN_VARIABLE}={run}".encode()
    deadline = time.monotonic() + patience_s
    while True:
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(f"process {entry.name} is left")
        found += [f"{path} is left" for path in run.glob("recovery")]
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.1)


def main(argv: list[str] | None = None) -> int:
    """Prints a row per cell."""
    known = cells()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=[cell.name for cell in known])
    parser.add_argument("--folder", help="for data and run folders; default: a temporary one")
    args = parser.parse_args(argv)
    from examples.addition.prepare import prepare

    with contextlib.ExitStack() as stack:
        folder = Path(args.folder or stack.enter_context(tempfile.TemporaryDirectory()))
        table = Table(folder, Path(prepare(folder / "data")))
        before = set(Path("/dev/shm").glob("slime-ray-*"))
        print(
            "| death in | signal | the phase it showed | back after s | the run |\n|---|---|---|---|---|"
        )
        rows = []
        for cell in known:
            if args.only is None or cell.name in args.only:
                rows.append(table.run(cell))
                print(rows[-1], flush=True)
        left = [
            path
            for path in set(Path("/dev/shm").glob("slime-ray-*")) - before
            if not os.path.exists(f"/tmp/{path.name}")
        ]
        if left:
            print(f"left in memory: {left}")
    return 1 if left or any(row.problems for row in rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
