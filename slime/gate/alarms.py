"""Computes the gate's alarms: messages about statistics that changed, with their numbers. Pure:
reads no file and logs nothing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

from slime.data.reasons import MODEL_FAILURES, PENALIZABLE, REASONS, InvalidReason
from slime.gate.config import Policy
from slime.gate.statistics import MAX_SHARE_OF_ITERATION, GateStatistics

# a toy iteration of a second is not worth a warning; the summary line has the share anyway
MIN_SECONDS_TO_ALARM = 0.5
MIN_RATE_STEP = 0.05
MIN_RATE_FACTOR = 1.5
MIN_STANDARD_ERRORS = 2.5
MIN_LEVEL_FACTOR = 2.0
FAILURE_LEVEL = "failure_level"
Counts = Mapping[int, tuple[int, int]]  # by rollout: samples with a reason, all samples
PSI_MOVED = 0.25
KS_DISTANCE, KS_P = 0.1, 1e-3


@dataclasses.dataclass(frozen=True)
class Alarm:
    """`name` is stable (gate/alarm/<name> is its metric); `message` says what, with which values,
    and where to look. `subject`: the reason that an alarm of several is about.
    """

    name: str
    message: str
    subject: str | None = None


def find_alarms(statistics: GateStatistics, history: Sequence[GateStatistics]) -> list[Alarm]:
    """Alarms of one rollout given the statistics of earlier ones (oldest first); [] if nothing
    stands out.
    """
    alarms = [*_group_alarms(statistics), *_time_alarms(statistics)]
    if history:
        alarms += [
            *_rate_alarms(statistics, history),
            *_alignment_alarms(statistics, history),
            *_drift_alarms(statistics),
        ]
        alarms += _version_alarms(statistics, history[-1], alarms)
    elif statistics.counts.get("compared", 0) and statistics.alignment_failure_rate > MIN_RATE_STEP:
        alarms.append(Alarm("alignment", _alignment_message(statistics, 0.0)))
    return alarms


def rate_jumped(count: int, total: int, count_before: int, total_before: int) -> bool:
    """True if count/total is above count_before/total_before by 5 points, by half, and by more than
    chance.

    Chance: 2.5 standard errors of the difference of two proportions, sqrt(p (1 - p) (1/total +
    1/total_before)), p pooled.
    """
    if not total or not total_before:
        return False
    rate, before = count / total, count_before / total_before
    if rate - before < MIN_RATE_STEP or rate < MIN_RATE_FACTOR * before:
        return False
    pooled = (count + count_before) / (total + total_before)
    return rate - before >= MIN_STANDARD_ERRORS * math.sqrt(
        pooled * (1 - pooled) * (1 / total + 1 / total_before)
    )


def level_rose(count: int, total: int, count_at_start: int, total_at_start: int) -> bool:
    """True if the share count/total is at least twice that of the start, 5 points above it, and
    above it by more than chance.
    """
    if not total or not total_at_start:
        return False
    doubled = count / total >= MIN_LEVEL_FACTOR * count_at_start / total_at_start
    return doubled and rate_jumped(count, total, count_at_start, total_at_start)


def level_message(
    reason: InvalidReason,
    now: tuple[int, int],
    at_start: tuple[int, int],
    *,
    trains: bool,
    over: tuple[int, int, float],
) -> str:
    """What a risen level means and what to try. `now`, `at_start`: (samples with the reason,
    samples); trains: whether such samples do; `over`: (first rollouts, last rollouts, rollouts
    between their middles).
    """
    before, after = at_start[0] / at_start[1], now[0] / now[1]
    first, last, distance = over
    text = (
        f"'{reason.value}' rose from {100 * before:.1f} % of the samples in the first "
        f"{_rollouts(first)} to {100 * after:.1f} % in the last {last}, "
        f"{100 * (after - before) / max(distance, 1):+.2f} points a rollout. "
    )
    if trains:
        return text + f"They train, and it rises all the same: look at {reason.facts.remedy}."
    if reason not in PENALIZABLE:
        return text + f"Look at {reason.facts.remedy}."
    return text + (
        "They are rejected, so no gradient teaches the model to avoid it: try --gate-policies "
        f'\'{{"{reason.value}": "penalize"}}\', or look at {reason.facts.remedy}.'
    )


def _rollouts(count: int) -> str:
    return "rollout" if count == 1 else f"{count} rollouts"


def find_level_alarms(
    start: Mapping[int, GateStatistics],
    recent: Mapping[int, GateStatistics],
    policy_of: Callable[[InvalidReason], Policy],
) -> list[Alarm]:
    """One alarm per kind of model failure whose share rose since the run's first rollouts. Both are
    statistics by rollout.
    """
    alarms = []
    for reason in (reason for reason in REASONS if reason in MODEL_FAILURES):
        counts_at_start, counts = (
            {
                number: (statistics.failures[reason], statistics.total)
                for number, statistics in part.items()
            }
            for part in (start, recent)
        )
        message = level_problem(
            reason,
            counts_at_start,
            counts,
            trains=policy_of(reason) in (Policy.KEEP, Policy.PENALIZE),
        )
        if message is not None:
            alarms.append(Alarm(FAILURE_LEVEL, message, reason.value))
    return alarms


def level_problem(
    reason: InvalidReason, start: Counts, recent: Counts, *, trains: bool
) -> str | None:
    """`level_message` where the share rose from the first rollouts, or from the very first: the
    first updates can raise it already. None if it did not.
    """
    for first in (start, dict([min(start.items())]) if start else {}):
        if not first or not recent:
            continue
        (now, total), (before, total_before) = (
            map(sum, zip(*part.values(), strict=True)) for part in (recent, first)
        )
        if level_rose(now, total, before, total_before):
            distance = sum(recent) / len(recent) - sum(first) / len(first)
            over = (len(first), len(recent), distance)
            return level_message(
                reason, (now, total), (before, total_before), trains=trains, over=over
            )
    return None


def _rate_alarms(statistics: GateStatistics, history: Sequence[GateStatistics]) -> list[Alarm]:
    total, before = statistics.total, sum(s.total for s in history)
    invalid, invalid_before = total - statistics.kept, sum(s.total - s.kept for s in history)
    if not rate_jumped(invalid, total, invalid_before, before):
        return []
    dropped = statistics.dropped
    rises = {
        reason: dropped[reason] / total - sum(s.dropped[reason] for s in history) / before
        for reason in dropped
    }
    reason = max(rises, key=lambda name: rises[name])
    return [
        Alarm(
            "drop_rate",
            f"{100 * invalid / total:.1f} % of the samples are invalid, "
            f"{100 * invalid_before / before:.1f} % in the last {len(history)} "
            f"rollouts. Most of the rise is '{reason.value}' (+{100 * rises[reason]:.1f} points): look at {reason.facts.remedy}.",
        )
    ]


def _alignment_message(statistics: GateStatistics, before: float) -> str:
    causes = {
        name[6:]: count for name, count in statistics.counts.items() if name.startswith("cause_")
    }
    return (
        f"{100 * statistics.alignment_failure_rate:.1f} % of the compared texts differ from their "
        f"tokens, {100 * before:.1f} % before; "
        f"causes {causes}; engine {statistics.versions.get('engine')}, tokenizer "
        f"{statistics.versions.get('tokenizer')}. "
        "Look at the sampler or the tokenizer: `slime gate align DUMP` lists them."
    )


def _alignment_alarms(statistics: GateStatistics, history: Sequence[GateStatistics]) -> list[Alarm]:
    counts = (statistics.counts.get("mismatched", 0), statistics.counts.get("compared", 0))
    before = (
        sum(s.counts.get("mismatched", 0) for s in history),
        sum(s.counts.get("compared", 0) for s in history),
    )
    if not rate_jumped(*counts, *before):
        return []
    return [Alarm("alignment", _alignment_message(statistics, before[0] / before[1]))]


def _drift_alarms(statistics: GateStatistics) -> list[Alarm]:
    drift = statistics.drift
    moved = drift.psi_previous > PSI_MOVED + 2 * drift.psi_noise
    apart = drift.ks_previous > KS_DISTANCE and drift.ks_previous_p < KS_P
    if not (moved and apart):
        return []
    lengths = statistics.length_summary()
    return [
        Alarm(
            "length_drift",
            f"lengths of kept responses moved since the last rollout: PSI {drift.psi_previous:.2f} "
            f"(above {PSI_MOVED} is another "
            f"distribution), KS distance {drift.ks_previous:.2f}, now mean {lengths['mean']:.0f} "
            f"and median {lengths['p50']:.0f} tokens. "
            "Look at the length limits, the stop strings, and whether the reward favours a length.",
        )
    ]


def _time_alarms(statistics: GateStatistics) -> list[Alarm]:
    share = statistics.share_of_iteration
    if not share > MAX_SHARE_OF_ITERATION or statistics.gate_seconds < MIN_SECONDS_TO_ALARM:
        return []
    slowest = max(statistics.seconds, key=lambda name: statistics.seconds[name])
    return [
        Alarm(
            "time",
            f"the gate takes {100 * share:.1f} % of the iteration ({statistics.gate_seconds:.1f} "
            f"s, most of it in '{slowest}'). In this "
            "order: (1) short circuit: put cheap thresholds first; (2) vectorise: arrays from the "
            "engine instead of lists; "
            "(3) parallel: lower --gate-parallel-above; (4) cache: keep compared texts, or --gate-compare-text off.",
        )
    ]


def _group_alarms(statistics: GateStatistics) -> list[Alarm]:
    mixed = statistics.groups()["mixed"]
    if not mixed:
        return []
    return [
        Alarm(
            "mixed_groups",
            f"{len(mixed)} groups hold samples of different prompts, e.g. group {mixed[0]}: their "
            "baselines are wrong, the loss will look "
            "normal and the model will slowly get worse. Look at the data source and at custom rollout functions; `slime gate groups DUMP`.",
        )
    ]


def _version_alarms(
    statistics: GateStatistics, last: GateStatistics, alarms: Sequence[Alarm]
) -> list[Alarm]:
    if not alarms or statistics.versions == last.versions:
        return []
    return [
        Alarm("version", f"versions changed with it: {last.versions} -> {statistics.versions}.")
    ]
