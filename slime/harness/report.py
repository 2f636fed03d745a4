"""Reports what a run did, from its metrics.jsonl alone: a summary table, report.png, and checks of
samples, weights, rewards and numbers. `slime report` prints it.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from slime.algorithms.table import LOSSES
from slime.config.resume import evaluates_only
from slime.config.specs import slime_specs
from slime.config.yaml_file import read_option_file
from slime.data.ledger import PREFIX as LEDGER
from slime.data.reasons import MODEL_FAILURES, REASONS
from slime.gate.alarms import level_problem
from slime.harness.report_picture import draw_report
from slime.harness.run_records import (
    FAMILIES,
    SAVE_FAILED,
    LedgerTotals,
    RunRecords,
    eval_sets,
    read_ledgers,
    read_run,
    total_ledger,
)
from slime.metrics.consistency_alarms import ConsistencyLimits, find_consistency_problems
from slime.tracking.tracking import finish_tracking

LEVEL_WINDOW = 5  # rollouts at either end that a rise of failures is read from
GATE_SHARE = "gate/time/share_of_iteration"
UPDATE_SKIPPED = "train/update_skipped"
REWARD_CONFLICTS = "rollout/reward/conflict_count"
WEIGHT_SIGNS = ("train/weights_checksum_changed", "train/weight_delta")

DISTILLATION = "slime.rollout.on_policy_distillation.post_process_rewards"


def find_ledger_problems(ledgers: Mapping[int, LedgerTotals]) -> list[str]:
    """Returns a sentence per rollout whose samples do not balance, or one when nothing
    was counted.
    """
    if not ledgers:
        return [f"no ledger: no record has {LEDGER}sampled, so the samples were not counted"]
    return [
        f"ledger of rollout {step} does not balance: {ledger}, {abs(ledger.missing)} "
        + ("vanished without a reason" if ledger.missing > 0 else "more were counted than sampled")
        for step, ledger in sorted(ledgers.items())
        if ledger.missing
    ]


def find_weight_problems(run: RunRecords) -> list[str]:
    """Returns a sentence unless some record shows that the published weights differ from those
    before.
    """
    name = run.first_of(WEIGHT_SIGNS)
    if name is None:
        return [f"no evidence that the weights changed: no record has {' or '.join(WEIGHT_SIGNS)}"]
    values = run.numbers(name)[1]
    if values and not any(values):
        return [
            (
                f"weights never changed: {name} is 0 in all {len(values)} records. "
                "Is "
                "the learning rate 0?"
            )
        ]
    return []


def find_reward_problems(run: RunRecords) -> list[str]:
    """Returns a sentence when the reward is the same number in every rollout, which teaches
    nothing, and one when equal responses scored differently.
    """
    name = run.first_of(FAMILIES["reward"])
    if name is None:
        return [f"no reward: no record has {' or '.join(FAMILIES['reward'])}"]
    problems = []
    conflicts = [
        (step, count) for step, count in zip(*run.numbers(REWARD_CONFLICTS), strict=True) if count
    ]
    if conflicts:
        problems.append(
            f"{sum(count for _, count in conflicts):g} samples have another reward than a sample "
            "of their group with the same response, the first in "
            f"rollout {conflicts[0][0]} ({REWARD_CONFLICTS}): a label was mixed up or the reward function keeps state; slime rescore DUMP shows where"
        )
    values = run.numbers(name)[1]
    if len(values) > 1 and max(values) - min(values) <= 1e-9:
        problems.append(
            f"reward did not move: {name} is {values[0]:g} in all {len(values)} rollouts. "
            "Does the reward function tell responses apart?"
        )
    return problems


def find_number_problems(run: RunRecords) -> list[str]:
    """Returns a sentence per family that was not a finite number at some step, and one when
    optimizer steps were skipped for it.
    """
    problems = []
    skipped = [step for step, value in zip(*run.numbers(UPDATE_SKIPPED), strict=True) if value]
    if skipped:
        of = len(run.numbers("train/loss")[0]) + len(run.not_finite("train/loss"))
        problems.append(
            f"{len(skipped)} of {max(of, len(skipped))} optimizer steps changed nothing, the first "
            f"at step {skipped[0]}: a gradient was not finite "
            f"({UPDATE_SKIPPED}). Look at the reward, the log-probs and the learning rate of that step."
        )
    names = {
        name
        for families in (
            FAMILIES.values(),
            [WEIGHT_SIGNS],
            [[f"eval/{name}"] for name in eval_sets(run)],
        )
        for family in families
        for name in family
    }
    for name in sorted(names):
        if steps := run.not_finite(name):
            total = len(steps) + len(run.numbers(name)[0])
            problems.append(
                f"{name} is not a finite number in {len(steps)} of {total} records, the first at "
                f"step {steps[0]}"
            )
    return problems


def find_save_problems(run: RunRecords) -> list[str]:
    """Returns a sentence when checkpoints could not be written (--save-failure continue)."""
    steps, values = run.numbers(SAVE_FAILED)
    failed = [step for step, value in zip(steps, values, strict=True) if value]
    if not failed:
        return []
    return [
        f"{len(failed)} of {len(steps)} checkpoints were not saved, the first after rollout "
        f"{failed[0]} ({SAVE_FAILED}). The driver's log has the cause of each."
    ]


def find_gate_problems(run: RunRecords) -> list[str]:
    """Returns a sentence per kind of failure whose share of the samples at least doubled between
    the run's first and last rollouts.
    """

    problems = []
    totals = dict(zip(*run.numbers("gate/total"), strict=True))
    for reason in (reason for reason in REASONS if reason in MODEL_FAILURES):
        shares = {
            step: share
            for step, share in zip(*run.numbers(f"gate/failures/{reason.value}"), strict=True)
            if step in totals
        }
        steps, window = list(shares), min(LEVEL_WINDOW, len(shares) // 2)
        first, last = steps[:window], steps[len(steps) - window :]
        start, recent = (
            {step: (round(shares[step] * totals[step]), round(totals[step])) for step in part}
            for part in (first, last)
        )
        trained = sum(
            run.series.get(f"gate/kept_by_policy/{reason.value}", {}).get(step, 0) for step in last
        )
        message = level_problem(reason, start, recent, trains=bool(trained))
        if message is not None:
            problems.append(f"the model fails more: {message}")
    return problems


@dataclasses.dataclass(frozen=True)
class Checks:
    """Which books a run has to balance. A supervised run has no reward; one without training no new
    weights; one that only evaluates none of these.
    """

    ledger: bool = True
    weights: bool = True
    reward: bool = True
    log_probs: ConsistencyLimits | None = ConsistencyLimits()


@dataclasses.dataclass(frozen=True)
class Summary:
    """`rows` are (what, first, last, best) as text; `facts` single lines; `problems` what does not
    add up; `png` the picture or None.
    """

    rows: list[tuple[str, str, str, str]]
    facts: list[str]
    problems: list[str]
    png: Path | None = None

    @property
    def exit_status(self) -> int:
        """0 when there is no problem, else 1."""
        return int(bool(self.problems))


def summarize_run(run: RunRecords, checks: Checks = Checks()) -> Summary:
    """Returns the summary of a run without drawing it. Pure."""
    names = {label: run.first_of(candidates) for label, candidates in FAMILIES.items()}
    names |= {f"eval {label}": f"eval/{label}" for label in eval_sets(run)}
    rows = []
    for label, name in names.items():
        if name is not None and (
            checks.reward or label not in ("reward", "reward kept", "pass rate")
        ):
            values = run.numbers(name)[1]
            first, last = ((f"{float(run.series[name][step]):.4g}") for step in run.ends(name))
            span = f"{min(values):.4g} .. {max(values):.4g}" if values else "no finite value"
            rows.append((label, first, last, span))
    ledgers = read_ledgers(run)
    facts, problems = [], []
    if ledgers:
        facts.append(f"samples: {total_ledger(ledgers)}")
    problems += find_number_problems(run)
    problems += find_save_problems(run)
    if checks.ledger:
        problems += find_ledger_problems(ledgers)
    if checks.weights:
        problems += find_weight_problems(run)
        if (name := run.first_of(WEIGHT_SIGNS)) is not None:
            values = run.numbers(name)[1]
            facts.append(f"weights: changed in {sum(map(bool, values))} of {len(values)} updates")
    if checks.reward:
        problems += find_reward_problems(run)
        problems += find_gate_problems(run)
    if checks.log_probs is not None:
        problems += find_consistency_problems(run.series, checks.log_probs)
    if shares := run.numbers(GATE_SHARE)[1]:
        facts.append(
            f"gate: {statistics.median(shares):.1%} of an iteration (median of {len(shares)}; "
            f"largest {max(shares):.1%})"
        )
    if run.num_unreadable:
        facts.append(f"metrics: {run.num_unreadable} torn lines were skipped")
    return Summary(rows, facts, problems)


def print_summary(summary: Summary, *, stream: TextIO | None = None) -> None:
    """Prints the table, the facts and the problems; plain text where the stream is no terminal."""
    from rich.console import Console
    from rich.table import Table

    console = Console(file=stream or sys.stdout, highlight=False)
    table = Table("metric", "first", "last", "range", title="run summary", title_justify="left")
    for row in summary.rows:
        table.add_row(*row)
    if summary.rows:
        console.print(table)
    for fact in summary.facts:
        console.print(fact, markup=False, soft_wrap=True)
    for problem in summary.problems:
        console.print(f"PROBLEM: {problem}", markup=False, style="bold red", soft_wrap=True)
    if summary.png is not None:
        console.print(f"picture: {summary.png}", markup=False, soft_wrap=True)


def write_report(
    run_dir: str | os.PathLike[str], *, checks: Checks = Checks(), title: str | None = None
) -> Summary:
    """Writes <run_dir>/report.png and returns the summary; `summary.problems` is empty when
    everything adds up.
    """
    run = read_run(run_dir)
    png = draw_report(
        run, Path(run_dir) / "report.png", title=title or Path(run_dir).resolve().name
    )
    return dataclasses.replace(summarize_run(run, checks), png=png)


def checks_for(args: argparse.Namespace) -> Checks:
    """Returns what a run with these options has to balance."""
    if evaluates_only(args):
        return Checks(ledger=False, weights=False, reward=False, log_probs=None)
    trains = not args.debug_rollout_only
    # A teacher's log-probs are the signal there, and the rewards are 0 by construction.
    distills = args.custom_reward_post_process_path == DISTILLATION
    # a replay may train on samples of other weights on purpose
    log_probs = None if args.debug_train_only else ConsistencyLimits.from_args(args)
    return Checks(
        ledger=trains,
        weights=trains,
        reward=LOSSES[args.loss_type].learns_from_reward and not distills,
        log_probs=log_probs,
    )


def recorded_checks(run_dir: str | os.PathLike[str]) -> Checks:
    """Returns what the run in this folder has to balance, by the options that its config.yaml
    records; the usual checks where it has none. ConfigError for one that cannot be read.
    """

    path = Path(run_dir) / "config.yaml"
    if not path.exists():
        return Checks()
    specs = {spec.name: spec for spec in slime_specs()}
    recorded = read_option_file(str(path), specs, strict=False).known
    return checks_for(
        argparse.Namespace(
            **{name: recorded.get(name, spec.default) for name, spec in specs.items()}
        )
    )


def finish_run(args: argparse.Namespace) -> list[str]:
    """Closes the records of the run that `args` describes; with --write-report prints its report
    and returns the problems in it. Safe to call twice.
    """
    is_over = finish_tracking(args)
    return report_at_end(args) if is_over and args.write_report else []


def report_at_end(args: argparse.Namespace) -> list[str]:
    """Prints the report of the run that `args` describes and returns its problems; a run that
    logged nothing has none, and a full disk costs only the picture.
    """
    try:
        summary = write_report(args.run_dir, checks=checks_for(args))
    except FileNotFoundError as error:
        print(f"no report: {error}", file=sys.stderr)
        return []
    except OSError as error:
        print(f"report.png was not written: {error}", file=sys.stderr)
        summary = summarize_run(read_run(args.run_dir), checks_for(args))
    print_summary(summary)
    return summary.problems
