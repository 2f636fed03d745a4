"""The metrics of one training step from what its micro-batches reported on every rank.

A loss reports per micro-batch, by name, either a scalar tensor, which is this rank's sum over the
micro-batch and becomes the mean over the step's rollouts (or loss tokens), or a `Contribution`,
which carries any other reduction. Scalars travel as one tensor, so that they cost one collective
and one read of the device however many there are; contributions travel as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from slime.data.fields import Reduce
from slime.metrics.contributions import Contribution, merge_all

StepMetric = torch.Tensor | Contribution


def pack_step_metrics(first: torch.Tensor, metrics: Mapping[str, StepMetric]) -> dict[str, Any]:
    """Returns one micro-batch's report: {"keys": names of the sums, "values": fp64 [1 + sums] with
    `first` before them, "contributions": the others by name}.
    """
    own = {name: value for name, value in metrics.items() if isinstance(value, Contribution)}
    sums = {name: value for name, value in metrics.items() if name not in own}
    values = torch.stack(
        [
            torch.as_tensor(value, device=first.device).to(torch.float64)
            for value in (first, *sums.values())
        ]
    )
    return {"keys": list(sums), "values": values, "contributions": own}


def reduce_train_step_metrics(
    losses_reduced: Sequence[dict[str, Any]],
    *,
    calculate_per_token_loss: bool,
    step_global_batch_size: int,
    cp_size: int,
    dp_with_cp_group: dist.ProcessGroup,
) -> dict[str, float]:
    """Returns the metrics of one training step: each sum as the mean over its rollouts (or over its
    loss tokens, per-token mode), each contribution merged over the micro-batches and ranks that
    have it.

    `losses_reduced` holds per micro-batch what `pack_step_metrics` returns, or upstream's report
    without "contributions". A step without a loss token gives 0.0. All ranks of the group call it
    together. AssertionError where micro-batches report different sums.
    """
    keys = losses_reduced[0]["keys"]
    for index, losses in enumerate(losses_reduced):
        assert list(losses["keys"]) == list(keys), (
            f"micro-batch {index} reports {losses['keys']}, the first one {keys}"
        )
        assert len(keys) + 1 == losses["values"].numel(), (
            f"{len(keys)} names for {losses['values'].numel() - 1} values"
        )
    values = torch.stack([losses["values"] for losses in losses_reduced]).sum(dim=0)
    parts = [losses["contributions"] for losses in losses_reduced if losses.get("contributions")]
    takes_contributions = "contributions" in losses_reduced[0]
    if takes_contributions:
        # maybe only one rank has one: the sum shows every rank whether there is more to gather
        values = torch.cat([values, values.new_full((1,), float(len(parts)))])
    dist.all_reduce(values, group=dp_with_cp_group)
    first, *sums = values.tolist()
    if takes_contributions and sums.pop():
        parts = _from_all_ranks(parts, dp_with_cp_group)
    # every CP rank reports the full token count, so `first` holds it cp_size times
    scale, count = (cp_size, first) if calculate_per_token_loss else (1, step_global_batch_size)
    means = {
        key: Contribution(Reduce.MEAN, total=value * scale, count=count)
        for key, value in zip(keys, sums, strict=True)
    }
    return {**dict.fromkeys(keys, 0.0), **merge_all([means, *parts])}


def _from_all_ranks(
    parts: list[dict[str, Contribution]], group: dist.ProcessGroup
) -> list[dict[str, Contribution]]:
    """The micro-batches' contributions of every rank of the group, in rank order."""
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, parts, group=group)
    return [part for of_rank in gathered for part in of_rank]
