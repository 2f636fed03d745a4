"""Gathering what ranks contribute to a batch's metrics and reducing it on one of them. Those of a
train step are reduced on all ranks: step_metrics.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slime.accelerator.process_groups import gather_to_source
from slime.data.fields import Reduce
from slime.metrics import contributions
from slime.metrics.contributions import Contribution

if TYPE_CHECKING:
    import torch.distributed as dist


def rollout_log_metric_contribution(
    per_rank_reducer_sum: float, *, cp_size: int, num_rollouts_in_rollout: int, dp_size: int
) -> tuple[float, float]:
    """`(sum, count)` of one rank whose reducer gave `per_rank_reducer_sum`: over the dp_size *
    cp_size ranks, the sum of sums over the sum of counts is the sum over ranks of the reducer's
    sums per rollout, which is what the train step reports.
    """
    return cp_size * per_rank_reducer_sum, num_rollouts_in_rollout / dp_size


def gather_and_reduce_log_dict(
    log_dict: dict[str, Any], *, dp_size: int, dp_src_rank: int, dp_group: dist.ProcessGroup
) -> dict[str, float] | None:
    """The reduced metrics on global rank `dp_src_rank`, None elsewhere. `dp_size` is the size of
    the group (data x context parallel).

    A value is a `Contribution`, a pair (sum, count) that becomes the sum of sums over the sum of
    counts (0.0 where all counts are 0), or a number that is averaged over the ranks that have it.
    Keys are the union over ranks; one that only some ranks have is reduced over those.
    """
    gathered = gather_to_source(log_dict, size=dp_size, source_rank=dp_src_rank, group=dp_group)
    return None if gathered is None else reduce_log_dicts(gathered)


def reduce_log_dicts(per_rank: list[dict[str, Any]]) -> dict[str, float]:
    """The arithmetic of `gather_and_reduce_log_dict`, without the collective."""
    means = {
        name: 0.0
        for log_dict in per_rank
        for name, value in log_dict.items()
        if not isinstance(value, Contribution)
    }
    parts = [
        {name: _as_contribution(value) for name, value in log_dict.items()} for log_dict in per_rank
    ]
    return {**means, **contributions.merge_all(parts)}


def _as_contribution(value: object) -> Contribution:
    if isinstance(value, Contribution):
        return value
    total, count = value if isinstance(value, tuple) else (value, 1)
    return Contribution(Reduce.MEAN, total=float(total), count=float(count))
