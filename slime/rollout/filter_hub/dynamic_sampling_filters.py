"""Filters for --dynamic-sampling-filter-path: equal rewards in a group teach nothing under a group
baseline.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable
from typing import Any

from slime.data.rewards import execution_values, reward_number
from slime.data.sample import Sample
from slime.rollout.filter_hub.base_types import DynamicFilterOutput

# Rewards closer than this are equal: 0.1 + 0.2 and 0.3 are one reward.
SMALLEST_STD = 1e-6


def check_reward_nonzero_std(
    args: argparse.Namespace, samples: list[Sample], **kwargs: object
) -> DynamicFilterOutput:
    """Keeps a group whose rewards differ (standard deviation over its executions, of what is scored
    and valid, > 1e-6).
    """
    rewards = usable_rewards(args, samples)
    keep = _std(rewards) > SMALLEST_STD
    return DynamicFilterOutput(keep=keep, reason=None if keep else _reason(rewards))


def check_reward_nonzero_std_with_fallback(
    args: argparse.Namespace, samples: list[Sample], **kwargs: object
) -> DynamicFilterOutput:
    """The same; equal rewards still fill the batch where it would otherwise be too small."""
    output = check_reward_nonzero_std(args, samples, **kwargs)
    output.keep_when_insufficient = not output.keep
    return output


def usable_rewards(args: argparse.Namespace, samples: Iterable[Any]) -> list[float]:
    """The finite reward of each execution of a group, the mean over its valid samples, as the
    group's baseline takes it. A list among `samples` is one execution, as are samples with one
    `rollout_id`. None, NaN and invalid samples are left out.
    """
    rewards: list[float] = []
    keys: list[Any] = []
    for position, item in enumerate(samples):
        for sample in item if isinstance(item, list) else [item]:
            if sample.valid:
                rewards.append(reward_number(sample.reward, args.reward_key, index=sample.index))
                keys.append(("place", position) if sample.rollout_id is None else sample.rollout_id)
    return list(execution_values(rewards, keys).values())


def _std(rewards: list[float]) -> float:
    if len(rewards) < 2:
        return 0.0
    mean = math.fsum(rewards) / len(rewards)
    return math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1))


def _reason(rewards: list[float]) -> str:
    return f"zero_std_{round(rewards[0], 1)}" if rewards else "no_rewards"
