"""Ragged samples through the real chain onto every data-parallel rank of a layout, and the
advantages that the trainer computes there.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from slime.algorithms.table import ESTIMATORS
from slime.backends.megatron_utils import loss
from slime.backends.megatron_utils.data import to_train_device
from slime.data.batch import RolloutBatch, localize
from slime.data.columns import ColumnsConfig, build_train_columns, compute_rewards
from slime.data.sample import Sample
from slime.data.schedule import ScheduleConfig
from slime.data.split import SplitConfig, split_by_dp


def make_long_samples() -> list[Sample]:
    """Six groups of four: lengths from 1 to 300 (and one empty), masked tokens, one sample masked
    whole, and an invalid member of a huge reward.
    """
    rng = np.random.default_rng(11)
    lengths = [
        1,
        300,
        129,
        127,
        128,
        0,
        2,
        257,
        *np.exp(rng.normal(4, 1, 16)).astype(int).clip(1, 299).tolist(),
    ]
    samples = [
        Sample(
            index=i,
            group_index=i // 4,
            rollout_id=i,
            tokens=rng.integers(0, 1000, 3 + length).tolist(),
            response_length=length,
            loss_mask=(rng.random(length) < 0.8).astype(int).tolist() if i % 3 else [1] * length,
            reward=float(rng.normal()),
            rollout_log_probs=(-rng.random(length) * 3).tolist(),
            teacher_log_probs=(-rng.random(length) * 3).tolist(),
            status=Sample.Status.COMPLETED,
        )
        for i, length in enumerate(lengths)
    ]
    samples[9].loss_mask = [0] * samples[9].response_length
    samples[14].valid, samples[14].invalid_reason, samples[14].reward = False, "too_short", 900.0
    return samples


def shards_of(
    samples: Sequence[Sample], estimator: str, dp_size: int, *, packing: str = "balanced"
) -> list[RolloutBatch]:
    """The batches of all ranks on their device, with what forward passes would add: numbers that
    name their sample and place.
    """
    baseline = ESTIMATORS[estimator].baseline
    settings = ColumnsConfig(
        group_baseline=baseline is not None,
        leave_one_out=baseline is not None and baseline.leave_one_out,
        divide_by_std=baseline is not None and baseline.may_divide_by_std,
    )
    columns = build_train_columns(samples, compute_rewards(samples, settings)[:2], settings)
    schedule = ScheduleConfig(dp_size, dp_size, 400, 2, packing)
    split = split_by_dp(columns, SplitConfig(24, 24, schedule, keep_trailing=True, pad_to=8))
    batches = []
    for rank, shard in enumerate(split.shards):
        batch = to_train_device(localize(shard, rank, dp_size=dp_size), "cpu")
        draws = [torch.Generator().manual_seed(index) for index in batch["sample_indices"]]
        for name in ("ref_log_probs", "values"):
            batch[name] = [
                torch.randn(n, generator=g)
                for g, n in zip(draws, batch["response_lengths"], strict=True)
            ]
        batches.append(batch)
    return batches


def advantages_of(
    batch: RolloutBatch, estimator: str, **options: Any
) -> dict[int, tuple[list[int], list[int]]]:
    """{sample index: (advantages, returns), each as its bits}, by the function that the trainer
    calls.
    """
    given = {
        "advantage_estimator": estimator,
        "use_rollout_logprobs": True,
        "gamma": 0.97,
        "lambd": 0.9,
        **options,
    }
    loss.compute_advantages_and_returns(SimpleNamespace(**given), batch)
    pairs = zip(batch["sample_indices"], batch["advantages"], batch["returns"], strict=True)
    return {i: (a.view(torch.int32).tolist(), r.view(torch.int32).tolist()) for i, a, r in pairs}
