"""The metrics of one training step from what its micro-batches reported on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


def reduce_train_step_metrics(
    losses_reduced: Sequence[dict[str, Any]],
    *,
    calculate_per_token_loss: bool,
    step_global_batch_size: int,
    cp_size: int,
    dp_with_cp_group: Any,
) -> dict[str, float]:
    """Returns the metrics of one training step: name -> mean over its rollouts (or over its loss
    tokens, per-token mode).

    `losses_reduced` holds per micro-batch {"keys": names, "values": [first, *values]}. A step
    without a loss token gives 0.0.
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
    dist.all_reduce(values, group=dp_with_cp_group)
    first, *sums = values.tolist()
    if calculate_per_token_loss:
        # every CP rank reports the full token count, so `first` holds it cp_size times
        return {
            key: value * cp_size / first if first else 0.0
            for key, value in zip(keys, sums, strict=True)
        }
    return {key: value / step_global_batch_size for key, value in zip(keys, sums, strict=True)}
