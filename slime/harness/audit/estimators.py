"""Advantages as known estimators make them from rewards, to compare with those a run recorded.

Group baselines are those of slime.data.rewards. Legend: N samples of a step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from slime.data.rewards import normalize_rewards

TOLERANCE = 5e-3  # relative: bfloat16 advantages, and epsilons beside a standard deviation
EPSILONS = (1e-6, 1e-4, 1e-8)  # ours and most; TRL; others


@dataclasses.dataclass(frozen=True)
class Prediction:
    """One estimator's advantages [N]. scope: "group", "batch" (a baseline over all samples) or
    "none" (the reward itself).
    """

    name: str
    scope: str
    values: np.ndarray


@dataclasses.dataclass(frozen=True)
class Step:
    """What an estimator is given. [N] rewards, group and execution of each sample, and whether it
    counts in its group's baseline.
    """

    rewards: np.ndarray
    groups: np.ndarray
    executions: np.ndarray
    counts: np.ndarray


def group_predictions(
    step: Step, *, epsilons: tuple[float, ...] = EPSILONS
) -> Iterator[Prediction]:
    """The estimators whose baseline is the group's."""

    def normalized(**options: bool) -> np.ndarray:
        return normalize_rewards(
            step.rewards.tolist(),
            step.groups.tolist(),
            step.counts.tolist(),
            rollout_ids=step.executions.tolist(),
            **{"divide_by_std": False, **options},
        )[0]

    centred = normalized()
    yield Prediction(
        "GRPO (group mean, divided by the group's std)", "group", normalized(divide_by_std=True)
    )
    for name, ddof in (
        ("GRPO (group mean, divided by the group's std)", 1),
        ("GRPO (group mean, divided by the group's population std)", 0),
    ):
        for epsilon in epsilons:
            values = centred / (_group_std(centred, step.groups, step.counts, ddof) + epsilon)
            yield Prediction(name, "group", np.where(centred == 0, 0.0, values))
    yield Prediction("Dr. GRPO (group mean, not divided)", "group", centred)
    yield Prediction("RLOO (mean of the other members)", "group", normalized(leave_one_out=True))
    used = step.rewards[step.counts & np.isfinite(step.rewards)]
    for what, spread in (("rewards", used), ("centred rewards", centred[step.counts])):
        for ddof in (1, 0):
            if len(spread) > ddof and spread.std(ddof=ddof) > 0:
                values = centred / (spread.std(ddof=ddof) + 1e-6)
                yield Prediction(
                    f"group mean, divided by the batch's std of {what}", "group", values
                )


def _group_std(
    centred: np.ndarray, groups: np.ndarray, counts: np.ndarray, ddof: int
) -> np.ndarray:
    """[N] standard deviation of each sample's group, of its counting members."""
    _, group = np.unique(groups, return_inverse=True)
    weights = counts.astype(np.float64)
    sizes = np.bincount(group, weights=weights)
    squares = np.bincount(group, weights=weights * centred**2)
    return np.sqrt(squares / np.maximum(sizes - ddof, 1))[group]


def batch_predictions(step: Step) -> Iterator[Prediction]:
    """The estimators without a group baseline."""
    rewards = np.where(step.counts & np.isfinite(step.rewards), step.rewards, np.nan)
    count = int(np.isfinite(rewards).sum())
    if count < 2:
        return
    mean = float(np.nanmean(rewards))
    yield Prediction("REINFORCE (the reward itself)", "none", rewards)
    yield Prediction("batch mean", "batch", rewards - mean)
    yield Prediction(
        "leave-one-out over the batch", "batch", (rewards - mean) * count / (count - 1)
    )
    for ddof in (1, 0):
        std = float(np.nanstd(rewards, ddof=ddof))
        if std > 0:
            for epsilon in EPSILONS:
                values = (rewards - mean) / (std + epsilon)
                yield Prediction("batch-whitened (REINFORCE++)", "batch", values)


def tolerance_of(advantages: np.ndarray, predicted: np.ndarray) -> np.ndarray:
    """[N] by how much an advantage may differ from a prediction."""
    size = np.maximum(np.abs(advantages), np.abs(predicted))
    typical = float(np.sqrt(np.mean(advantages**2))) if len(advantages) else 0.0
    return TOLERANCE * np.nan_to_num(size) + 1e-3 * typical + 1e-7


def matches(advantages: np.ndarray, predicted: np.ndarray) -> np.ndarray:
    """bool [N]: the advantage is the predicted one."""
    with np.errstate(invalid="ignore"):
        return np.abs(advantages - predicted) <= tolerance_of(advantages, predicted)


def fitted_line(advantages: np.ndarray, x: np.ndarray) -> tuple[float, float]:
    """(a, b) of the least-squares line advantages = a x + b."""
    centred = x - x.mean()
    spread = float((centred**2).sum())
    if spread <= 1e-18:
        return 0.0, float(advantages.mean())
    a = float((centred * advantages).sum()) / spread
    return a, float(advantages.mean()) - a * float(x.mean())


def fitted_factor(advantages: np.ndarray, x: np.ndarray) -> float:
    """c of advantages = c x: by least squares over the samples whose own factor is near the median
    one, so that a few others do not move it.
    """
    told = np.abs(x) > 1e-6 * max(float(np.abs(x).max(initial=0.0)), 1e-12)
    if not told.any():
        return 0.0
    factors = advantages[told] / x[told]
    median = float(np.median(factors))
    near = np.abs(factors - median) <= 0.02 * abs(median) + 1e-12
    if not near.any():
        return median
    mine, theirs = x[told][near], advantages[told][near]
    return float((mine * theirs).sum() / (mine * mine).sum())


def fitted_weights(advantages: np.ndarray, parts: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """[K] weights of the rewards `parts` [N, K] whose weighted sum, centred in its group, is the
    advantages [N] times a factor of the group; the largest weight is 1 or -1.

    Within a group the part of the centred sum that stands at right angles to the advantages is 0:
    the weights are the direction in which all groups have least of it.
    """
    square = np.zeros((parts.shape[1], parts.shape[1]))
    for group in np.unique(groups):
        rows = groups == group
        centred = parts[rows] - parts[rows].mean(axis=0)
        mine = advantages[rows]
        length = float(mine @ mine)
        if length > 0:
            centred = centred - np.outer(mine, mine @ centred) / length
        square += centred.T @ centred
    weights = np.linalg.eigh(square)[1][:, 0]
    return weights / weights[np.argmax(np.abs(weights))]


@dataclasses.dataclass(frozen=True)
class Order:
    """A reordering of samples: sample i is given what belongs to sample places[i]."""

    name: str
    places: np.ndarray


def orders(count: int, group_size: int, keys: dict[str, np.ndarray]) -> Iterator[Order]:
    """Reorderings that bugs make: shifts, reversal, interleaved ranks, and those of `keys` (name ->
    [N]), each both ways.
    """
    here = np.arange(count)
    shifts = dict.fromkeys([1, -1, 2, -2, *range(3, 9), group_size, -group_size])
    for shift in shifts:
        if shift % count:
            yield Order(f"shifted by {shift:+d}", np.roll(here, -shift))
    yield Order("reversed", here[::-1])
    for ranks in range(2, min(count, 65)):
        if count % ranks == 0 and ranks < count:
            dealt = np.concatenate([here[rank::ranks] for rank in range(ranks)])
            yield Order(f"interleaved over {ranks} ranks", dealt)
            yield Order(f"interleaved over {ranks} ranks, gathered in order", np.argsort(dealt))
    for name, values in keys.items():
        sorted_ = np.argsort(values, kind="stable")
        if (sorted_ != here).any():
            yield Order(f"sorted by {name}", sorted_)
            yield Order(f"sorted by {name}, and not put back", np.argsort(sorted_, kind="stable"))


def block_groupings(
    count: int, groups: np.ndarray, group_size: int
) -> Iterator[tuple[str, np.ndarray]]:
    """Groupings by position that are not the groups: every size that divides the batch, of
    neighbours and of every k-th sample; neighbours on the ranks that samples were dealt to.
    """
    here = np.arange(count)
    _, own = np.unique(groups, return_inverse=True)
    found = []
    for size in range(2, count):
        if count % size == 0:
            found.append((f"{size} rows in a row", here // size))
            found.append((f"every {count // size}-th row", here % (count // size)))
    for ranks in range(2, min(count, 65)):
        if count % (ranks * group_size) == 0 and group_size > 1:
            blocks = here % ranks * count + here // ranks // group_size
            found.append((f"{group_size} rows in a row of each of {ranks} ranks", blocks))
    for name, grouping in found:
        if not _same_partition(own, grouping):
            yield name, grouping


def _same_partition(a: np.ndarray, b: np.ndarray) -> bool:
    pairs = len(np.unique(np.stack([a, b]), axis=1).T)
    return pairs == len(np.unique(a)) == len(np.unique(b))
