"""Samples for tests of the gate: `sound_sample(7)` passes every check and says which one it is."""

from __future__ import annotations

from typing import Any

import numpy as np

from slime.data.sample import Sample, Status
from slime.data.schedule import SchedulePlan
from slime.data.split import SplitPlan


def sound_sample(
    number: int = 0, *, length: int = 12, prompt_length: int = 3, **changes: Any
) -> Sample:
    """Sample `number` of group number // 4: response ids 100 * number + 0, 1, ..., log-prob -(i +
    1) / 10, reward number.
    """
    group = number // 4
    fields: dict[str, Any] = {
        "index": number,
        "group_index": group,
        "prompt": f"prompt of group {group}",
        "tokens": [*range(1, prompt_length + 1), *(100 * number + i for i in range(length))],
        "response": f"response {number}",
        "response_length": length,
        "rollout_log_probs": [-(i + 1) / 10 for i in range(length)],
        "status": Status.COMPLETED,
        "finish_reason": "stop",
        "reward": float(number),
    }
    return Sample(**{**fields, **changes})


def reasons_of(result: Any) -> list[str | None]:
    """The reason of each input sample, None where there is none."""
    return [verdict.reason.value if verdict.reason else None for verdict in result.verdicts]


def plan_of(partitions: list[list[int]], num_rows: int) -> SplitPlan:
    """A plan by which rank r trains the rows `partitions[r]`, in one step of one micro-batch."""
    schedule = SchedulePlan(
        partitions=partitions,
        micro_batch_indices=[[list(range(len(part)))] for part in partitions],
        num_microbatches=[1],
        global_batch_sizes=[num_rows],
        dropped=[],
        steps=[],
    )
    return SplitPlan(
        schedule=schedule,
        rollout_mask_sums_N=np.ones(num_rows, dtype=np.float32),
        rollout_sample_counts_N=np.ones(num_rows, dtype=np.int32),
        owner_ranks_N=np.zeros(num_rows, dtype=np.int16),
        steps_N=np.zeros(num_rows, dtype=np.int64),
        reasons=[None] * num_rows,
        global_batch_sizes=[num_rows],
        num_trained_by_rank=[len(part) for part in partitions],
        num_trained_rollouts=num_rows,
    )
