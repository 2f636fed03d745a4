"""Small pure helpers for metrics: prefixes, pass@k, statistics, repetition, steps."""

from __future__ import annotations

import argparse
import bz2
import gzip
import lzma
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from slime.data.rewards import is_solved
from slime.metrics.contributions import Contribution, mean, merge_all

REPETITION_CHARS = 10_000
REPETITION_RATIO = 10


def dict_add_prefix(d: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """`d` with `prefix` before every key."""
    return {f"{prefix}{key}": value for key, value in d.items()}


def powers_of_two_up_to(size: int) -> list[int]:
    """1, 2, 4, ... up to the largest power of two <= size."""
    return [1 << exponent for exponent in range(size.bit_length())] if size > 0 else []


def pass_at_k(num_samples: int, num_solved: int, k: int) -> float:
    """Unbiased chance that k of `num_samples` drawn without replacement hold a solved one: 1 -
    C(n-c, k) / C(n, k) (arXiv 2107.03374, eq. 1).
    """
    if num_samples - num_solved < k:
        return 1.0
    return 1.0 - math.comb(num_samples - num_solved, k) / math.comb(num_samples, k)


def compute_pass_rate(
    flat_rewards: Sequence[float],
    group_size: int,
    num_groups: int | None = None,
    *,
    threshold: float | None = None,
) -> dict[str, float]:
    """`{"pass@k": mean over groups}` for k = 1, 2, 4, ... <= group_size, of rewards in groups of
    `group_size`; {} for groups of one.

    AssertionError unless there are `num_groups` whole groups. For groups of different sizes see
    `compute_ragged_pass_rate`.
    """
    if group_size == 1:
        return {}
    if num_groups is None:
        num_groups = len(flat_rewards) // group_size
    assert len(flat_rewards) == num_groups * group_size, (
        f"{len(flat_rewards)} rewards are not {num_groups} groups of {group_size}"
    )
    return compute_ragged_pass_rate(
        flat_rewards, [i // group_size for i in range(len(flat_rewards))], threshold=threshold
    )


def compute_ragged_pass_rate(
    rewards: npt.ArrayLike, group_ids: npt.ArrayLike, *, threshold: float | None = None
) -> dict[str, float]:
    """`{"pass@k": mean over groups with at least k members}` for groups of any size in any order;
    {} where no group has two members.

    Rewards that are not finite (no score) are left out of their group.
    """
    return merge_all([pass_rate_contributions(rewards, group_ids, threshold=threshold)])


def pass_rate_contributions(
    rewards: npt.ArrayLike, group_ids: npt.ArrayLike, *, threshold: float | None = None
) -> dict[str, Contribution]:
    """The parts of `compute_ragged_pass_rate`, of groups that are whole here."""
    values = np.asarray(rewards, dtype=np.float64)
    scored = np.isfinite(values)
    if not scored.any():
        return {}
    _, group = np.unique(np.asarray(group_ids)[scored], return_inverse=True)
    sizes = np.bincount(group)
    solved = np.bincount(group, weights=is_solved(values[scored], threshold)).astype(int)
    if sizes.max() < 2:
        return {}
    pairs, counts = np.unique(np.stack([sizes, solved]), axis=1, return_counts=True)
    result = {}
    for k in powers_of_two_up_to(int(sizes.max())):
        terms = [
            (pass_at_k(n, c, k), weight)
            for n, c, weight in zip(*pairs.tolist(), counts.tolist(), strict=True)
            if n >= k
        ]
        result[f"pass@{k}"] = mean([p * w for p, w in terms], sum(w for _, w in terms))
    return result


def compute_statistics(values: Iterable[float]) -> dict[str, float]:
    """mean, median, max and min of `values`. ValueError when there are none."""
    array = np.asarray(list(values), dtype=np.float64)
    if not array.size:
        raise ValueError("no values to summarize")
    return {
        "mean": float(array.mean()),
        "median": float(np.median(array)),
        "max": float(array.max()),
        "min": float(array.min()),
    }


def compression_ratio(
    data: str | bytes, *, encoding: str = "utf-8", algorithm: str = "zlib", level: int = 9
) -> tuple[float, float]:
    """`(original bytes / compressed bytes, savings in percent)`; (inf, 0.0) for nothing."""
    raw = data.encode(encoding) if isinstance(data, str) else data
    if not raw:
        return math.inf, 0.0
    compress = {
        "zlib": lambda: zlib.compress(raw, level),
        "gzip": lambda: gzip.compress(raw, compresslevel=level),
        "bz2": lambda: bz2.compress(raw, compresslevel=level),
        "lzma": lambda: lzma.compress(raw, preset=level),
    }
    if algorithm not in compress:
        raise ValueError(f"algorithm must be one of {sorted(compress)}, got {algorithm!r}")
    size = len(compress[algorithm]())
    return len(raw) / size, 100.0 * (1.0 - size / len(raw))


def has_repetition(text: str) -> bool:
    """Whether the last 10,000 characters of a longer text compress more than tenfold: a loop."""
    return (
        len(text) > REPETITION_CHARS
        and compression_ratio(text[-REPETITION_CHARS:])[0] > REPETITION_RATIO
    )


def compute_rollout_step(args: argparse.Namespace, rollout_id: int) -> int:
    """The value of the rollout axis: the rollout id, or, with wandb_always_use_train_step, the
    optimizer steps before it.
    """
    if args.wandb_always_use_train_step:
        return (
            rollout_id
            * args.rollout_batch_size
            * args.n_samples_per_prompt
            // args.global_batch_size
        )
    return rollout_id


def compute_train_step(
    args: argparse.Namespace, rollout_id: int, step_id: int, *, last: int
) -> int:
    """The value of the train axis: the planned optimizer steps of the rollouts before, plus
    `step_id`; always above `last`, the step logged before.

    From the plan and not from this rollout's own steps: rejected samples or a trailing step change
    their number, and the axis must neither go back nor repeat, also after a resume.
    """
    planned = -(-args.rollout_batch_size * args.n_samples_per_prompt // args.global_batch_size)
    return max(rollout_id * max(planned, 1) + step_id, last + 1)
