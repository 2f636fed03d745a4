"""A small mixture of experts learns addition: warm-up with expert parallelism 2, then GRPO with
tensor x context parallelism 2 x 2.

    python -m examples.moe.run                           # any `slime train` option may follow; it
                                                         goes to GRPO and wins
    python -m examples.moe.run --expert-model-parallel-size 2 --context-parallel-size 1
    --actor-num-gpus-per-node 2

The last line is the held-out greedy accuracy before and after GRPO, and the largest difference
between the trainer's and the engine's log-probs. Exit status 1 when training failed, the run's
books do not balance, or trainer and engine disagree.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from examples.addition.run import run_two_stages, two_stages
from examples.moe import prepare
from slime.harness.report import summarize_run
from slime.harness.run_records import read_run

HERE = Path(__file__).resolve().parent
ACCURACY, DISTANCE = "eval/addition", "rollout/logprob_abs_diff/max"
# fp32 on both sides: two layouts of one model, not two models
MAX_DISTANCE = 1e-3


def commands(data: Path, run_dir: Path, extra: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Returns the two stages, each a name and a command line; `extra` options come last in GRPO's
    and win.
    """
    return two_stages(HERE, "addition", data=data, run_dir=run_dir, extra=extra)


def main(argv: Sequence[str] | None = None) -> int:
    description = __doc__.split("\n", 1)[0]
    return run_two_stages(
        "moe", argv, description=description, prepare=prepare, commands=commands, conclude=conclude
    )


def conclude(run_dir: Path, *, started: float) -> int:
    """Prints the last line, `accuracy: 0.31 -> 0.44, log-probs within 2.1e-05 in 155 s`, and
    returns the exit status.
    """
    run = read_run(run_dir)
    problems = summarize_run(run).problems
    accuracies, distances = run.numbers(ACCURACY)[1], run.numbers(DISTANCE)[1]
    if len(accuracies) < 2 or not distances:
        problems.append(
            f"{ACCURACY} was logged {len(accuracies)} times and {DISTANCE} {len(distances)} times"
        )
    elif not max(distances) <= MAX_DISTANCE:
        problems.append(
            f"trainer and engine differ by {max(distances):.2g} nats, more than {MAX_DISTANCE:g}"
        )
    for problem in problems:
        print(f"PROBLEM: {problem}", file=sys.stderr, flush=True)
    if len(accuracies) >= 2 and distances:
        seconds = time.monotonic() - started
        print(
            (
                f"accuracy: {accuracies[0]:.2f} -> {accuracies[-1]:.2f}, log-probs within "
                f"{max(distances):.1e} in {seconds:.0f} s"
            ),
            flush=True,
        )
    return int(bool(problems))


if __name__ == "__main__":
    raise SystemExit(main())
