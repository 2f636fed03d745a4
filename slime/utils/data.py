"""`process_rollout_data`: a training rank fetches its shard from the object store and makes it its
own.

Every other name of this path is slime.prompts.dataset's: read from there, and replaced there when
it is replaced here.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from slime.prompts import dataset
from slime.tracking.spans import add_span, is_tracing, span
from slime.tracking.timer import Timer
from slime.utils.doors import open_door

if TYPE_CHECKING:
    from slime.data.batch import RolloutBatch
    from slime.prompts.dataset import *  # noqa: F403


def process_rollout_data(
    args: argparse.Namespace, rollout_data_ref: list[Any], dp_rank: int, dp_size: int
) -> RolloutBatch:
    """This rank's batch from `rollout_data_ref`, one box (anything with `.inner`) per data-parallel
    rank. Of `args` only --step-timeout is read.

    `raw_reward` stays whole and `local_raw_reward` is its part in partition order, where there is
    one; `total_lengths` becomes local, and the timer keeps the whole batch's lengths. The batch's
    `info["trained_lengths"]` are those of the samples that some rank trains.
    AssertionError where there is not one box per rank; `RolloutDataError` where the shard is not
    this rank's, or a list has another length than its samples.
    """
    # late: prompts are read from this module where neither Ray nor numpy is loaded
    from slime.data.batch import localize
    from slime.ray import actors

    assert len(rollout_data_ref) == dp_size, (
        f"{len(rollout_data_ref)} shards for {dp_size} data-parallel ranks"
    )
    with span("get"):
        # None where users' tests call this without options
        timeout_s = getattr(args, "step_timeout", None)
        shard = actors.get(
            rollout_data_ref[dp_rank].inner,
            timeout=timeout_s,
            what=f"the shard of data-parallel rank {dp_rank}",
        )
    started = time.perf_counter()
    batch = localize(shard, dp_rank, dp_size=dp_size)
    if is_tracing():  # which samples: `slime trace` draws an arrow from each one's request
        samples = [int(index) for index in batch.get("sample_indices") or [] if index is not None]
        add_span("localize", started, time.perf_counter(), attrs={"samples": samples})
    lengths = [int(length) for length in shard["total_lengths"]] if "total_lengths" in shard else []
    Timer().seq_lens = lengths
    batch.info["trained_lengths"] = _trained_lengths(shard, lengths)
    return batch


def _trained_lengths(shard: Mapping[str, Any], seq_lens: list[int]) -> list[int]:
    """Lengths of the samples that some rank trains: what the phase's FLOPs and tokens per second
    are about.
    """
    if "owner_ranks" not in shard:
        return seq_lens
    return [
        length for length, owner in zip(seq_lens, shard["owner_ranks"], strict=True) if owner >= 0
    ]


open_door(__name__, dataset)
