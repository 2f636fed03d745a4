"""A tiny model learns to call a calculator and to repeat its result: two turns, supervised warm-up
and GRPO, in about a minute.

    python -m examples.calculator.run                    # any `slime train` option may follow

The last line is the held-out accuracy before and after GRPO and the mean number of turns. Exit
status 1 when training failed or the run's books do not balance.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from examples.addition.run import run_two_stages, two_stages
from examples.calculator import prepare
from slime.harness.report import summarize_run
from slime.harness.run_records import read_run

HERE = Path(__file__).resolve().parent
ACCURACY, TURNS = "eval/calculator", "multi_turn/multi_turn_metric/round_number_mean"


def commands(data: Path, run_dir: Path, extra: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Returns the two stages, each a name and a command line; `extra` options come last in GRPO's
    and win.
    """
    return two_stages(HERE, "calculator", data=data, run_dir=run_dir, extra=extra)


def main(argv: Sequence[str] | None = None) -> int:
    description = __doc__.split("\n", 1)[0]
    return run_two_stages(
        "calculator",
        argv,
        description=description,
        prepare=prepare,
        commands=commands,
        conclude=conclude,
    )


def conclude(run_dir: Path, *, started: float) -> int:
    """Prints the last line, `accuracy: 0.27 -> 0.70 with 2.00 turns in 60 s`, and returns the exit
    status.
    """
    run = read_run(run_dir)
    problems = summarize_run(run).problems
    accuracies, turns = run.numbers(ACCURACY)[1], run.numbers(TURNS)[1]
    if len(accuracies) < 2 or not turns:
        problems.append(
            f"{ACCURACY} was logged {len(accuracies)} times and {TURNS} {len(turns)} times"
        )
    for problem in problems:
        print(f"PROBLEM: {problem}", file=sys.stderr, flush=True)
    if len(accuracies) >= 2 and turns:
        seconds = time.monotonic() - started
        print(
            (
                f"accuracy: {accuracies[0]:.2f} -> {accuracies[-1]:.2f} with {turns[-1]:.2f} turns "
                "in "
                f"{seconds:.0f} s"
            ),
            flush=True,
        )
    return int(bool(problems))


if __name__ == "__main__":
    raise SystemExit(main())
