"""Gathering what ranks contribute and reducing it on one of them. The only collectives of the metrics."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from slime.observability import contributions
from slime.observability.contributions import Contribution
from slime.utils.rollout_fields import Reduce


def rollout_log_metric_contribution(
    per_rank_reducer_sum: float, *, cp_size: int, num_rollouts_in_rollout: int, dp_size: int
) -> tuple[float, float]:
    """`(sum, count)` of one rank whose reducer gave `per_rank_reducer_sum`: over the dp_size * cp_size ranks, the sum of sums over the sum
    of counts is the sum over ranks of the reducer's sums per rollout, which is what the train step reports."""
    return cp_size * per_rank_reducer_sum, num_rollouts_in_rollout / dp_size


def gather_to_source(value: Any, *, size: int, source_rank: int, group: Any) -> list[Any] | None:
    """Every rank's `value`, in group order, on global rank `source_rank`; None on the others. Called by all ranks of the group."""
    is_source = dist.get_rank() == source_rank
    gathered: list[Any] | None = [None] * size if is_source else None
    dist.gather_object(value, gathered, dst=source_rank, group=group)
    return gathered


def gather_and_reduce_log_dict(
    log_dict: dict[str, Any], *, dp_size: int, dp_src_rank: int, dp_group: Any
) -> dict[str, float] | None:
    """The reduced metrics on global rank `dp_src_rank`, None elsewhere. `dp_size` is the size of the group (data x context parallel).

    A value is a `Contribution`, a pair (sum, count) that becomes the sum of sums over the sum of counts (0.0 where all counts are 0), or a number
    that is averaged over the ranks that have it. Keys are the union over ranks; one that only some ranks have is reduced over those.
    """
    gathered = gather_to_source(log_dict, size=dp_size, source_rank=dp_src_rank, group=dp_group)
    return None if gathered is None else reduce_log_dicts(gathered)


def reduce_log_dicts(per_rank: list[dict[str, Any]]) -> dict[str, float]:
    """The arithmetic of `gather_and_reduce_log_dict`, without the collective."""
    metrics: dict[str, float] = {}
    for name in dict.fromkeys(name for log_dict in per_rank for name in log_dict):
        parts = [log_dict[name] for log_dict in per_rank if name in log_dict]
        if isinstance(parts[0], Contribution):
            metrics.update({f"{name}{suffix}": value for suffix, value in contributions.merge(parts).items()})
            continue
        pairs = [part if isinstance(part, tuple) else (part, 1) for part in parts]
        merged = contributions.merge([_as_mean(total, count) for total, count in pairs])
        metrics[name] = merged.get("", 0.0)
    return metrics


def _as_mean(total: Any, count: Any) -> Contribution:
    return Contribution(Reduce.MEAN, total=float(total), count=float(count))
