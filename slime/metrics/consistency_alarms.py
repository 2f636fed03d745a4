"""Computes alarms of a rollout and of a run from the metrics of consistency.py. Imports nothing
heavy: a report reads metrics alone.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
from collections.abc import Mapping
from typing import Any

UNSAMPLED_ALARM = 0.001
# How much further samples may be from the trainer for each update of the weights since they were
# sampled.
ALLOWED_PER_UPDATE = 9

MEAN, SHIFT = "rollout/logprob_abs_diff/mean", "rollout/logprob_shift"
BY_WEIGHTS = "rollout/logprob_abs_diff/weights/"
UNTRAINED, UNSAMPLED = "rollout/mask/sampled_untrained", "rollout/mask/trained_unsampled"
STALENESS = "rollout/staleness/mean"
# the metrics that alarms, and `slime consistency`, look at
SEEN = ("rollout/logprob_", "rollout/mask/", STALENESS)


@dataclasses.dataclass(frozen=True)
class ConsistencyLimits:
    """Above what there is an alarm: nats per token, and the share of sampled tokens outside the
    loss.
    """

    logprob_diff: float = 0.1
    untrained: float = 0.01

    @staticmethod
    def from_args(args: argparse.Namespace) -> ConsistencyLimits:
        return ConsistencyLimits(args.logprob_diff_alarm, args.untrained_tokens_alarm)


def consistency_alarms(metrics: Mapping[str, float], limits: ConsistencyLimits) -> dict[str, str]:
    """{kind: message about one rollout, with what to look at}; empty when no alarm fires."""
    alarms = (
        {"shift": _shift_alarm(int(metrics[SHIFT]))}
        if metrics.get(SHIFT)
        else _gap_alarms(metrics, limits)
    )
    if not metrics.get(UNSAMPLED, 0.0) <= UNSAMPLED_ALARM:
        alarms["unsampled"] = (
            f"{metrics[UNSAMPLED]:.1%} of the trained tokens have no engine log-prob (it is "
            "exactly 0): they were not sampled. Give tokens of tools and "
            "templates loss mask 0; look at the mask's offset in the generate function."
        )
    if not metrics.get(UNTRAINED, 0.0) <= limits.untrained:
        alarms["untrained"] = (
            f"{metrics[UNTRAINED]:.1%} of the sampled tokens do not train (loss mask 0 beside an "
            "engine log-prob), more than --untrained-tokens-alarm "
            f"{limits.untrained:g}. Look at the mask's offset in the generate function; where they are masked on purpose, raise the option."
        )
    return alarms


def _shift_alarm(shift: int) -> str:
    count = "one token" if abs(shift) == 1 else f"{abs(shift)} tokens"
    return (
        f"the engine's log-probs are shifted by {count}: that of token i{shift:+d} is the "
        "trainer's of token i. Look at how the generate function puts "
        "rollout_log_probs beside its tokens; weights, data type and temperature are right."
    )


def _gap_alarms(metrics: Mapping[str, float], limits: ConsistencyLimits) -> dict[str, str]:
    """The mean gap against the threshold; samples of older weights, which differ by design, against
    one that grows with their age.
    """
    look = (
        "Check that both run the same weights (perf/weight_version), data type and temperature, "
        "and that the response ids are those that were sampled."
    )
    older, mean = metrics.get(BY_WEIGHTS + "older"), gap_of_same_weights(metrics)
    alarms = {}
    if mean is not None and not mean <= limits.logprob_diff:
        largest = (
            f" (largest {metrics['rollout/logprob_abs_diff/max']:.3g})" if older is None else ""
        )
        alarms["gap"] = (
            f"trainer and engine disagree by {mean:.3g} nats a token on average{largest}, more "
            f"than --logprob-diff-alarm {limits.logprob_diff:g}. {look}"
        )
    updates = max(1.0, metrics.get(STALENESS, 1.0))
    factor = 1 + ALLOWED_PER_UPDATE * updates
    if older is not None and not older <= limits.logprob_diff * factor:
        alarms["gap of older weights"] = (
            f"trainer and engine disagree by {older:.3g} nats a token on average on samples of "
            "older weights, more than --logprob-diff-alarm "
            f"{limits.logprob_diff:g} times {factor:.3g} for {updates:.3g} updates since they were sampled. {look}"
        )
    return alarms


def gap_of_same_weights(metrics: Mapping[str, float]) -> float | None:
    """Mean |d| of the samples that the trained weights sampled, nats; None where there is none."""
    return (
        metrics.get(BY_WEIGHTS + "same") if BY_WEIGHTS + "older" in metrics else metrics.get(MEAN)
    )


def find_consistency_problems(
    series: Mapping[str, Mapping[int, Any]], limits: ConsistencyLimits
) -> list[str]:
    """A sentence per kind of alarm of a run, from its metrics by name and step: in how many
    rollouts it rang, and its words in the first.
    """
    names = [name for name in series if name.startswith(SEEN)]
    steps = sorted({step for name in names for step in series[name]})
    first: dict[str, str] = {}
    counts: collections.Counter[str] = collections.Counter()
    for step in steps:
        # float() also reads the "nan" and "inf" of a metrics file
        alarms = consistency_alarms(
            {name: float(series[name][step]) for name in names if step in series[name]}, limits
        )
        counts.update(alarms.keys())
        for kind, text in alarms.items():
            first.setdefault(kind, f"first in {step}: {text}")
    return [
        f"log-probs, {counts[kind]} of {len(steps)} rollouts, {text}"
        for kind, text in first.items()
    ]
