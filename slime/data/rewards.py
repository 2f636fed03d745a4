"""Group-normalized rewards: the half of the advantage that needs every sibling, computed before the
batch is split over ranks.

By group id, in any order, over the members that count, for groups of any size. Suffixes: `_N`
samples, `_E` executions (rollouts), `_G` groups.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from slime.data.sample import chosen_reward, scalar
from slime.exceptions import RolloutDataError

if TYPE_CHECKING:
    import numpy.typing as npt

STD_EPSILON = 1e-6
SPREAD_TOLERANCE = 1e-9  # relative: 0.1 + 0.2 and 0.3 are the same reward


@dataclasses.dataclass(frozen=True)
class RewardStatistics:
    """What happened to the groups of one batch."""

    num_groups: int  # groups with at least one counting member
    num_singleton_groups: int  # one counting execution: its reward becomes 0
    num_no_spread_groups: int  # two or more equal rewards: they become 0
    num_excluded_samples: int  # invalid, removed or without a finite reward

    def metrics(self) -> dict[str, float]:
        """`group/...` numbers."""
        return {
            f"group/{field.name}": getattr(self, field.name) for field in dataclasses.fields(self)
        }


def normalize_rewards(
    rewards: Sequence[float],
    group_ids: Sequence[int],
    valid: Sequence[bool],
    *,
    divide_by_std: bool,
    leave_one_out: bool = False,
    rollout_ids: Sequence[int] | None = None,
) -> tuple[np.ndarray, RewardStatistics]:
    """`(normalized, statistics)`: each member's reward minus its group's mean, float64 [N]; with
    `divide_by_std` over (unbiased std + 1e-6), with `leave_one_out` minus the mean of the other
    members.

    Members are the group's valid executions: the samples of one rollout are one member, with their
    mean reward, and each of them gets that member's
    value. Without `rollout_ids` every sample is a member of its own. Samples that are not valid, or
    whose reward is not finite, change nothing and get
    0. A group with one member, or with no spread between members, gives 0.
    (GRPO, arXiv 2402.03300; without the std, Dr. GRPO, arXiv 2503.20783; leave-one-out, RLOO, arXiv
    2402.14740.)
    """
    rewards_N = np.asarray(rewards, dtype=np.float64)
    counts_N = np.asarray(valid, dtype=bool) & np.isfinite(rewards_N)
    normalized_N = np.zeros(len(rewards_N))
    chosen = np.flatnonzero(counts_N)
    excluded = len(rewards_N) - len(chosen)
    if not len(chosen):
        return normalized_N, RewardStatistics(0, 0, 0, excluded)
    value = rewards_N[chosen]
    _, group = np.unique(np.asarray(group_ids)[chosen], return_inverse=True)
    if rollout_ids is None:
        member_value, member_group, member = value, group, np.arange(len(value))
    else:
        member_value, member_group, member = _execution_means(
            value, group, np.asarray(rollout_ids)[chosen]
        )
    num_groups = int(group.max()) + 1
    size_G = np.bincount(member_group, minlength=num_groups)
    low_G, high_G = np.full(num_groups, np.inf), np.full(num_groups, -np.inf)
    np.minimum.at(low_G, member_group, member_value)
    np.maximum.at(high_G, member_group, member_value)
    has_spread_G = high_G - low_G > SPREAD_TOLERANCE * np.maximum(
        1.0, np.maximum(np.abs(low_G), np.abs(high_G))
    )
    # centred on the group's minimum first, so that a large common offset costs no digits
    shifted = member_value - low_G[member_group]
    mean_G = np.bincount(member_group, weights=shifted, minlength=num_groups) / size_G
    result = shifted - mean_G[member_group]
    if divide_by_std:
        squares_G = np.bincount(member_group, weights=result**2, minlength=num_groups)
        std_G = np.sqrt(squares_G / np.maximum(size_G - 1, 1))
        result = result / (std_G[member_group] + STD_EPSILON)
    if leave_one_out:
        result = result * (size_G / np.maximum(size_G - 1, 1))[member_group]
    normalized_N[chosen] = np.where(has_spread_G[member_group], result, 0.0)[member]
    singles = size_G == 1
    return normalized_N, RewardStatistics(
        num_groups, int(singles.sum()), int((~has_spread_G & ~singles).sum()), excluded
    )


def _execution_means(
    value: np.ndarray, group: np.ndarray, rollout_ids: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(mean reward [E], group [E]) of each execution within its group, and each sample's execution
    [N].
    """
    keys = np.stack([group, np.unique(rollout_ids, return_inverse=True)[1]])
    _, first, execution = np.unique(keys, axis=1, return_index=True, return_inverse=True)
    execution = execution.reshape(-1)
    sizes_E = np.bincount(execution)
    if len(sizes_E) == len(value):
        return value, group, np.arange(len(value))
    low_E = np.full(len(sizes_E), np.inf)
    np.minimum.at(low_E, execution, value)
    # equal rewards of siblings stay bit-equal: the mean is taken of the differences
    mean_E = low_E + np.bincount(execution, weights=value - low_E[execution]) / sizes_E
    return mean_E, group[first], execution


def execution_keys(samples: Sequence[Any]) -> list[Any]:
    """One key per sample, equal for the samples of one execution: its `rollout_id`; a sample
    without one is an execution of its own.
    """
    return [
        ("own", position) if sample.rollout_id is None else sample.rollout_id
        for position, sample in enumerate(samples)
    ]


def execution_values(
    values: Sequence[float], keys: Sequence[Any], *, best: bool = False
) -> dict[Any, float]:
    """{key: mean of its finite values, or the largest of them}; a key without a finite value is
    left out.
    """
    by_key: dict[Any, list[float]] = {}
    for key, value in zip(keys, values, strict=True):
        if math.isfinite(value):
            by_key.setdefault(key, []).append(value)
    return {
        key: max(found) if best else math.fsum(found) / len(found) for key, found in by_key.items()
    }


def reward_number(reward: object, reward_key: str | None, *, index: object = None) -> float:
    """The number in `reward`: itself, or `reward[reward_key]`. NaN where there is none (None, or
    the key's value is None).

    `RolloutDataError` naming the keys for a dict without a usable `reward_key`, or for something
    that is not a number.
    """
    reward = scalar(chosen_reward(reward, reward_key, index=index))
    if reward is None:
        return math.nan
    try:
        if isinstance(reward, numbers.Real):
            return float(reward)
    except OverflowError:
        pass
    raise RolloutDataError(f"The reward of sample {index} is {reward!r}, which is not a number.")


def value_problem(reward: object) -> str | None:
    """A message about what is wrong with a reward that is one value; None if it is a finite number.
    Text is not a number, nor is a list of one number.
    """
    if reward is None:
        return "reward is None"
    reward = scalar(reward)
    if not isinstance(reward, numbers.Real):
        return f"reward is {type(reward).__name__}, not a number"
    try:
        return None if math.isfinite(reward) else f"reward is {reward}"
    except OverflowError:
        return "reward is an integer beyond the range of a float"


def raw_rewards_of(samples: Sequence[Any], reward_key: str | None) -> np.ndarray:
    """The scored reward of each sample, float64 [N], NaN where there is none. See
    `reward_number`.
    """
    return np.array(
        [reward_number(sample.reward, reward_key, index=sample.index) for sample in samples],
        dtype=np.float64,
    )


def is_solved(rewards: npt.ArrayLike, threshold: float | None = None) -> np.ndarray:
    """bool [N]: the reward is exactly 1, or, with a threshold, at least that. NaN is not solved."""
    values = np.asarray(rewards, dtype=np.float64)
    return values == 1 if threshold is None else values >= threshold
