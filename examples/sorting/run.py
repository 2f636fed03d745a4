"""A tiny model learns to sort digits, and shows what becomes of a policy whose cut answers do not
train.

    python -m examples.sorting.run                             # warm-up and GRPO; any `slime train`
                                                               option may follow
    python -m examples.sorting.run --compare                   # one warm-up, then GRPO twice: cut
                                                               answers excluded, cut answers
                                                               penalized
    python -m examples.sorting.run --compare --seeds 1 2       # the same for each seed

The last line is the held-out accuracy before and after GRPO. With --compare it is a table instead,
a row per seed and recipe, read from the runs' metrics.jsonl. Exit status 1 when training failed or
the books of a run do not balance.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from examples.addition.run import (
    StageFailed,
    example_parser,
    place_of_run,
    run_stage,
    run_two_stages,
    two_stages,
)
from examples.sorting import prepare
from slime.harness.report import LEVEL_WINDOW, find_gate_problems, summarize_run
from slime.harness.run_records import RunRecords, read_run
from slime.tracking.plain_output import keep_output_plain

HERE = Path(__file__).resolve().parent
ACCURACY, CUT, TOTAL = "eval/sorting", "gate/failures/truncated", "gate/total"
OF_SAMPLED, OF_KEPT = "rollout/reward/mean", "rollout/reward/mean_kept"
RECIPES = {"exclude": "mark", "penalize": "penalize"}  # name -> policy of the gate for cut answers
DEFAULT_SEEDS = (1234,)
COLUMNS = (
    "seed",
    "cut answers",
    "held out",
    "cut at first",
    "in the last {n}",
    "in all",
    "reward of all, last {n}",
    "of the kept",
)


class IncompleteRun(Exception):
    """A run's records lack what a comparison needs; the message says what."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one run's records say: accuracy before and after; cut share of the first rollout, which
    is the warm-up's, of the last ones, and of all; mean reward over everything sampled and over
    what the gate kept, in the last ones (NaN where it kept nothing).
    """

    before: float
    after: float
    cut_first: float
    cut_last: float
    cut_all: float
    reward_sampled: float
    reward_kept: float


def commands(data: Path, run_dir: Path, extra: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Returns the two stages, each a name and a command line; `extra` options come last in GRPO's
    and win.
    """
    return two_stages(HERE, "sorting", data=data, run_dir=run_dir, extra=extra)


def read_outcome(run: RunRecords) -> Outcome:
    """Reads a GRPO run. IncompleteRun, naming what is missing, for one that was not evaluated twice
    or logged no cut share.
    """
    accuracies, (steps, shares) = run.numbers(ACCURACY)[1], run.numbers(CUT)
    if len(accuracies) < 2 or not steps:
        raise IncompleteRun(
            f"{ACCURACY} was logged {len(accuracies)} times and {CUT} {len(steps)} times; before "
            "and after are needed"
        )
    last = steps[-LEVEL_WINDOW:]

    def mean(name: str, steps: Iterable[int]) -> float:
        weights = {
            step: run.series[TOTAL][step] for step in steps if step in run.series.get(name, {})
        }
        total = sum(weights.values())
        return (
            sum(run.series[name][step] * weight for step, weight in weights.items()) / total
            if total
            else math.nan
        )

    return Outcome(
        accuracies[0],
        accuracies[-1],
        shares[0],
        mean(CUT, last),
        mean(CUT, steps),
        mean(OF_SAMPLED, last),
        mean(OF_KEPT, last),
    )


def format_table(outcomes: Iterable[tuple[int, str, Outcome]]) -> str:
    """Returns the table, in Markdown, of (seed, recipe, what the run did)."""
    rows = [[column.format(n=LEVEL_WINDOW) for column in COLUMNS], ["---"] * len(COLUMNS)]
    for seed, recipe, one in outcomes:
        cuts = [f"{share:.0%}" for share in (one.cut_first, one.cut_last, one.cut_all)]
        rewards = [
            "-" if math.isnan(mean) else f"{mean:.2f}"
            for mean in (one.reward_sampled, one.reward_kept)
        ]
        rows.append([str(seed), recipe, f"{one.before:.2f} -> {one.after:.2f}", *cuts, *rewards])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def finished_worse(folder: Path) -> bool:
    """Whether all that is wrong with the run in `folder` is that it was done and its model fails
    more than at first: a result, and no crash.
    """
    try:
        run = read_run(folder)
        read_outcome(run)
    except (FileNotFoundError, IncompleteRun):
        return False
    worse = find_gate_problems(run)
    return bool(worse) and summarize_run(run).problems == worse


def compare(data: Path, run_dir: Path, *, seeds: Sequence[int], extra: Sequence[str]) -> int:
    """Trains every recipe with every seed, prints the table, and returns the exit status. Recipes
    of one seed start from one warm-up.
    """
    started = time.monotonic()
    outcomes = []
    for seed in seeds:
        folder, words = run_dir / f"seed-{seed}", ["--seed", str(seed), "--rollout-seed", str(seed)]
        (warm_up, warm_up_command), (grpo, grpo_command) = commands(data, folder, [*extra, *words])
        run_stage(warm_up, [*warm_up_command, *words])
        for recipe, policy in RECIPES.items():
            place = folder / recipe
            print(f"seed {seed}, cut answers: {recipe}; run folder {place}", flush=True)
            try:
                run_stage(
                    grpo,
                    [
                        *grpo_command,
                        "--run-dir",
                        str(place),
                        "--gate-policies",
                        json.dumps({"truncated": policy}),
                    ],
                )
            except StageFailed as failure:
                if failure.status != 1 or not finished_worse(place):
                    raise
            outcomes.append((seed, recipe, read_outcome(read_run(place))))
    print(format_table(outcomes))
    print(f"{len(outcomes)} runs in {time.monotonic() - started:.0f} s", flush=True)
    return 0


def conclude(run_dir: Path, *, started: float) -> int:
    """Prints the last line, `accuracy: 0.45 -> 0.70, cut answers 9% -> 3% in 155 s`, and returns
    the exit status.
    """
    run = read_run(run_dir)
    problems = summarize_run(run).problems
    try:
        one = read_outcome(run)
    except IncompleteRun as error:
        one = None
        problems.append(str(error))
    for problem in problems:
        print(f"PROBLEM: {problem}", file=sys.stderr, flush=True)
    if one is not None:
        seconds = time.monotonic() - started
        cuts = f"{one.cut_first:.0%} -> {one.cut_last:.0%}"
        print(
            f"accuracy: {one.before:.2f} -> {one.after:.2f}, cut answers {cuts} in {seconds:.0f} s",
            flush=True,
        )
    return int(bool(problems))


def main(argv: Sequence[str] | None = None) -> int:
    description = __doc__.split("\n", 1)[0]
    parser = example_parser("sorting", description=description, prepare=prepare)
    add_comparison(parser)
    options, extra = parser.parse_known_args(argv)
    if not options.compare:
        if options.seeds:
            parser.error(
                "--seeds belongs to --compare; a run of one recipe takes --seed and --rollout-seed"
            )
        return run_two_stages(
            "sorting",
            argv,
            description=description,
            prepare=prepare,
            commands=commands,
            conclude=conclude,
        )
    if any(word.split("=")[0] == "--gate-policies" for word in extra):
        parser.error(
            "--compare sets --gate-policies itself, once to exclude and once to penalize cut "
            "answers"
        )
    keep_output_plain()
    data = prepare.prepare(options.data.resolve())
    try:
        return compare(
            data,
            place_of_run("sorting", options.run_dir),
            seeds=options.seeds or DEFAULT_SEEDS,
            extra=extra,
        )
    except StageFailed as failure:
        print(f"{failure}; its messages are above", file=sys.stderr)
        return failure.status
    except IncompleteRun as error:
        print(f"PROBLEM: {error}", file=sys.stderr)
        return 1


def add_comparison(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--compare",
        action="store_true",
        help="Train once with cut answers excluded and once with them penalized.",
    )
    parser.add_argument(
        "--seeds",
        type=int,
        nargs="+",
        help=f"Seeds of the comparison, a warm-up and two runs each; default: {DEFAULT_SEEDS[0]}.",
    )


if __name__ == "__main__":
    raise SystemExit(main())
