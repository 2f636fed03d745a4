"""Finds signs of a wrong reward function in a finished rollout: equal responses with different
rewards, and a grader that can only give 0.

A grader that is a function of prompt, label and response gives equal responses of one group equal
rewards. Where it does not, a label was mixed up, a call was answered for another sample, or state
leaks between calls.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from slime.data.rewards import reward_number
from slime.rollout.rm_hub import split_rm_type_name
from slime.rollout.rm_hub.deepscaler import ANSWER_MARKS

if TYPE_CHECKING:
    from slime.data.sample import Sample

logger = logging.getLogger(__name__)

# Equal within this share of the larger of the two (and of 1).
TOLERANCE = 1e-6
# Built-in types whose reward is no function of the response: chance, and whatever a server does.
NOT_DETERMINISTIC = frozenset({"random", "remote_rm"})


@dataclasses.dataclass(frozen=True)
class RewardConflict:
    """Two samples of one group with one response and two rewards."""

    group_index: Any
    first_index: Any
    second_index: Any
    rewards: tuple[float, float]
    response: str

    def __str__(self) -> str:
        return (
            f"group {self.group_index}: samples {self.first_index} and {self.second_index} have "
            "the same response (it ends "
            f"{self.response[-60:]!r}) and the rewards {self.rewards[0]:g} and {self.rewards[1]:g}"
        )


def is_deterministic(args: argparse.Namespace, sample: Sample) -> bool:
    """Whether equal responses to one prompt must score the same. A custom function is taken to be,
    unless --reward-is-random is given.
    """
    if args.reward_is_random:
        return False
    if sample.custom_rm_path or args.custom_rm_path:
        return True
    name = split_rm_type_name(args, sample)  # "" where a generate function sets the reward
    return bool(name) and name not in NOT_DETERMINISTIC


def find_reward_conflicts(samples: Sequence[Any], reward_key: str | None) -> list[RewardConflict]:
    """One conflict per sample whose reward differs from that of the first sample of its group with
    the same response and status.

    Only rollouts of one sample are compared: several samples of one rollout share a reward that
    other texts decide too. Samples without a group or a finite reward are left out.
    """
    sizes = collections.Counter(
        sample.rollout_id for sample in samples if sample.rollout_id is not None
    )
    first: dict[tuple, tuple[Any, float]] = {}
    conflicts = []
    for sample in samples:
        if (
            sample.group_index is None
            or sample.reward is None
            or not sample.response
            or sizes[sample.rollout_id] > 1
        ):
            continue
        reward = _number(sample, reward_key)
        if not math.isfinite(reward):
            continue
        key = (sample.group_index, sample.status, sample.response, str(sample.prompt))
        other, other_reward = first.setdefault(key, (sample, reward))
        if abs(reward - other_reward) > TOLERANCE * max(1.0, abs(reward), abs(other_reward)):
            conflicts.append(
                RewardConflict(
                    sample.group_index,
                    other.index,
                    sample.index,
                    (other_reward, reward),
                    sample.response,
                )
            )
    return conflicts


def _number(sample: Sample, reward_key: str | None) -> float:
    try:
        return reward_number(sample.reward, reward_key, index=sample.index)
    except ValueError:  # named where rewards are used
        return math.nan


def find_reward_warnings(
    args: argparse.Namespace, samples: Sequence[Any], conflicts: Sequence[RewardConflict]
) -> dict[str, str]:
    """{kind: warning}; the caller logs each kind once per run."""
    found = {}
    if conflicts:
        found["conflict"] = (
            f"{len(conflicts)} samples have another reward than a sample of their group with the "
            f"same response; the first: {conflicts[0]}. "
            "A reward of prompt, label and response cannot do that: look for mixed-up labels or "
            "state in the reward function "
            "(slime rescore DUMP shows which rewards change), or give --reward-is-random if it is random."
        )
    graded = [
        sample for sample in samples
        if sample.reward is not None and not (sample.custom_rm_path or args.custom_rm_path) and split_rm_type_name(args, sample) == "deepscaler"
    ]  # fmt: skip
    if graded and not any(
        mark in (sample.response or "") for sample in graded for mark in ANSWER_MARKS
    ):
        found["no answer mark"] = (
            f"none of {len(graded)} responses graded by deepscaler has "
            f"{' or '.join(ANSWER_MARKS)}, and without one deepscaler scores 0 whatever "
            "the answer. For models that write no reasoning use --rm-type math or math_value; docs/rewards.md compares them."
        )
    return found


class RewardWatch:
    """Looks at the rewards of each rollout of a run: a metric, and each kind of warning once."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self._said: set[str] = set()

    def metrics(self, samples: Sequence[Any], *, reward_key: str | None = None) -> dict[str, float]:
        """{"reward/conflict_count": n} where rewards of these samples must be a function of the
        response; {} elsewhere.
        """
        compared = [sample for sample in samples if is_deterministic(self.args, sample)]
        conflicts = find_reward_conflicts(compared, reward_key or self.args.reward_key)
        for kind, sentence in find_reward_warnings(self.args, samples, conflicts).items():
            if kind not in self._said:
                self._said.add(kind)
                logger.warning(sentence)
        return {"reward/conflict_count": float(len(conflicts))} if compared else {}
