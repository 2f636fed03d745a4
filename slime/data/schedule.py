"""Which rank trains which sample in which micro-batch of which optimizer step.

Every rank runs the same number of micro-batches in a step; one that has fewer samples runs empty
ones, which weigh nothing, so no collective waits for a peer. All samples of a rollout stay in one
step. Nothing is dropped without being listed in `SchedulePlan.dropped`.

Three samples of 5, 4 and 6 tokens on two ranks, at most 9 tokens per micro-batch; the first two are
rollout 0, the third is rollout 1, and one step takes both rollouts:

                            rank 0      rank 1
    partitions              [0 1]       [2]         positions in the batch
    micro_batch_indices     [[0 1]]     [[0]]       positions in the rank's own lists
    num_microbatches        [1]         [1]         the same on every rank

The fill is 15 tokens over the room of 18; the busiest rank has 9 tokens where the mean has 7.5.

Suffixes: `_N` samples of the batch, `_R` data-parallel ranks, `_S` optimizer steps.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from slime.data.flops import FlopsModel
from slime.data.packing import pack_balanced
from slime.data.partitioning import (
    expand_bins_by_splitting,
    first_fit_pack,
    get_seqlen_balanced_partitions,
)
from slime.exceptions import ConfigError


@dataclasses.dataclass(frozen=True)
class ScheduleConfig:
    """How samples are packed and spread. `align` is the number the micro-batch count per step must
    be a multiple of.
    """

    dp_size: int
    align: int
    # tokens per micro-batch over all context-parallel ranks; None: static blocks
    token_cap: int | None = None
    micro_batch_size: int = 1
    packing: str = "first_fit"
    balance_data: bool = False
    balance_by_flops: bool = False
    flops: FlopsModel | None = None

    @staticmethod
    def from_args(
        args: argparse.Namespace, train_parallel_config: Mapping[str, int]
    ) -> ScheduleConfig:
        """From the batching options, model sizes and a `train_parallel_config` with dp_size,
        cp_size, vpp_size and microbatch_group_size_per_vp_stage. Upstream calls this with a bare
        namespace, hence the defaults here.
        """
        dp_size, cp_size = train_parallel_config["dp_size"], train_parallel_config.get("cp_size", 1)
        virtual = (train_parallel_config.get("vpp_size") or 1) > 1
        group = (
            (train_parallel_config.get("microbatch_group_size_per_vp_stage") or 1) if virtual else 1
        )
        dynamic = bool(getattr(args, "use_dynamic_batch_size", False))
        if dynamic and not args.max_tokens_per_gpu:
            raise ConfigError(
                "--use-dynamic-batch-size needs --max-tokens-per-gpu, the tokens a micro-batch may "
                "hold per GPU."
            )
        by_flops = bool(getattr(args, "balance_by_flops", False))
        packing = getattr(args, "micro_batch_packing", "first_fit")
        balance = bool(getattr(args, "balance_data", False)) or by_flops
        sized = getattr(args, "hidden_size", None) is not None
        if balance and not sized:
            raise ConfigError(
                "--balance-data and --balance-by-flops need the model's sizes (--hidden-size, "
                "--num-layers, ...)."
            )
        return ScheduleConfig(
            dp_size=dp_size,
            align=dp_size * group,
            token_cap=args.max_tokens_per_gpu * cp_size if dynamic else None,
            micro_batch_size=getattr(args, "micro_batch_size", None) or 1,
            packing=packing,
            balance_data=balance,
            balance_by_flops=by_flops,
            flops=FlopsModel.from_args(args)
            if sized and (balance or packing == "balanced")
            else None,
        )

    def work_of(self, lengths_N: np.ndarray) -> np.ndarray:
        """The work of each sample: forward FLOPs where the model is known, else tokens. float64
        [N].
        """
        return (
            self.flops.of(lengths_N)
            if self.flops is not None
            else np.asarray(lengths_N, dtype=np.float64)
        )


@dataclasses.dataclass(frozen=True)
class StepReport:
    """How well one step is packed."""

    num_samples: int
    num_micro_batches: int  # over all ranks
    num_empty: int
    lower_bound: int  # aligned number of micro-batches below which the tokens cannot fit
    fill: float  # tokens over the room of all micro-batches (of the fullest one, for static blocks)
    work_max_over_mean: float  # busiest rank's work over the mean rank's


@dataclasses.dataclass(frozen=True)
class SchedulePlan:
    """The schedule of one rollout batch. Positions are positions in the arrays the plan was made
    from.
    """

    partitions: list[list[int]]  # [R] positions in consumption order
    micro_batch_indices: list[list[list[int]]]  # [R][micro-batch] local positions
    num_microbatches: list[int]  # [S] per rank
    global_batch_sizes: list[int]  # [S] rollouts
    dropped: list[int]  # positions that no step trains
    steps: list[StepReport]

    def metrics(self) -> dict[str, float]:
        """`schedule/...` numbers over the steps of the batch, and, where there are several, of
        each: `schedule/step_0/...`.
        """
        if not self.steps:
            return {"schedule/num_steps": 0, "schedule/dropped_samples": len(self.dropped)}
        per_step: dict[str, float] = {}
        for number, step in enumerate(self.steps if len(self.steps) > 1 else ()):
            per_step[f"schedule/step_{number}/micro_batches"] = step.num_micro_batches
            per_step[f"schedule/step_{number}/micro_batches_lower_bound"] = step.lower_bound
            per_step[f"schedule/step_{number}/fill"] = step.fill
            per_step[f"schedule/step_{number}/work_max_over_mean"] = step.work_max_over_mean
        return {
            **per_step,
            "schedule/num_steps": len(self.steps),
            "schedule/micro_batches": sum(s.num_micro_batches for s in self.steps),
            "schedule/micro_batches_lower_bound": sum(s.lower_bound for s in self.steps),
            "schedule/empty_micro_batches": sum(s.num_empty for s in self.steps),
            "schedule/fill": sum(s.fill * s.num_micro_batches for s in self.steps)
            / max(1, sum(s.num_micro_batches for s in self.steps)),
            "schedule/work_max_over_mean": max(s.work_max_over_mean for s in self.steps),
            "schedule/dropped_samples": len(self.dropped),
        }


def plan_step_sizes(
    num_rollouts: int, global_batch_size: int, *, expected_rollouts: int, keep_trailing: bool
) -> list[int]:
    """Rollouts per optimizer step, in order. What the sum leaves over is trailing, and the caller
    reports it.

    Whole steps of `global_batch_size`, then, with `keep_trailing`, a last smaller one. Where
    rejected samples leave fewer rollouts than the planned steps need (`expected_rollouts //
    global_batch_size` of them), the planned number of steps shares what there is evenly, so that a
    few rejected samples cost only themselves. It depends on counts alone: marking and dropping
    train alike.
    """
    if global_batch_size < 1:
        raise ConfigError(f"--global-batch-size must be at least 1, got {global_batch_size}.")
    if num_rollouts == 0:
        return []
    planned = max(1, expected_rollouts // global_batch_size)
    full, rest = divmod(num_rollouts, global_batch_size)
    if keep_trailing:
        return [global_batch_size] * full + ([rest] if rest else [])
    if full >= planned:
        return [global_batch_size] * full
    planned = min(planned, num_rollouts)
    return [
        num_rollouts // planned + (1 if step < num_rollouts % planned else 0)
        for step in range(planned)
    ]


def group_by_rollout(rollout_ids: Sequence[int]) -> list[list[int]]:
    """Positions of each rollout's samples; rollouts in order of first appearance."""
    groups: dict[int, list[int]] = {}
    for position, rollout_id in enumerate(rollout_ids):
        groups.setdefault(rollout_id, []).append(position)
    return list(groups.values())


def plan_schedule(
    total_lengths: Sequence[int] | np.ndarray,
    rollout_ids: Sequence[int],
    *,
    step_sizes: Sequence[int],
    config: ScheduleConfig,
) -> SchedulePlan:
    """The schedule of samples with these lengths [N] and rollout ids [N], with `step_sizes[s]`
    rollouts in step s.
    """
    lengths_N = np.asarray(total_lengths, dtype=np.int64)
    work_N = config.work_of(lengths_N)
    rollouts = group_by_rollout(list(rollout_ids))
    partitions: list[list[int]] = [[] for _ in range(config.dp_size)]
    micro_batches: list[list[list[int]]] = [[] for _ in range(config.dp_size)]
    num_microbatches, reports, start = [], [], 0
    for size in step_sizes:
        positions = [i for rollout in rollouts[start : start + size] for i in rollout]
        start += size
        bins_R = _plan_step(positions, lengths_N, work_N, config)
        num_microbatches.append(len(bins_R[0]))
        reports.append(_report(bins_R, lengths_N, work_N, config))
        for rank, bins in enumerate(bins_R):
            for items in bins:
                offset = len(partitions[rank])
                micro_batches[rank].append(list(range(offset, offset + len(items))))
                partitions[rank].extend(items)
    dropped = [i for rollout in rollouts[start:] for i in rollout]
    return SchedulePlan(
        partitions, micro_batches, num_microbatches, list(step_sizes), dropped, reports
    )


def _plan_step(
    positions: list[int], lengths_N: np.ndarray, work_N: np.ndarray, config: ScheduleConfig
) -> list[list[list[int]]]:
    """Per rank, the micro-batches (lists of positions) of one step; the same number on
    every rank.
    """
    lengths, work = lengths_N[positions], work_N[positions]
    if (
        config.token_cap is not None
        and config.packing == "balanced"
        and not config.balance_by_flops
    ):
        local_R = pack_balanced(
            lengths, work, cap=config.token_cap, num_ranks=config.dp_size, align=config.align
        )
        return [[[positions[i] for i in items] for items in bins] for bins in local_R]
    if config.token_cap is None:
        size = config.micro_batch_size
        bins = [
            list(range(i, min(i + size, len(positions)))) for i in range(0, len(positions), size)
        ]
    elif config.balance_by_flops:
        bins = _flops_bins(lengths, work, cap=config.token_cap)
    else:
        bins = first_fit_pack(lengths.tolist(), config.token_cap)
    target = max(config.align, -(-len(bins) // config.align) * config.align)
    if config.token_cap is not None:
        expand_bins_by_splitting(bins, target, lengths.tolist())
    bins += [[] for _ in range(target - len(bins))]
    if config.balance_data:
        ranks = get_seqlen_balanced_partitions(
            [float(work[items].sum()) for items in bins], config.dp_size, equal_size=True
        )
    else:
        ranks = [list(range(rank, len(bins), config.dp_size)) for rank in range(config.dp_size)]
    return [[[positions[i] for i in bins[k]] for k in chosen] for chosen in ranks]


def _flops_bins(lengths: np.ndarray, work: np.ndarray, *, cap: int) -> list[list[int]]:
    """`--balance-by-flops`: ceil(tokens / cap) parts of near-equal work. The cap is not
    guaranteed.
    """
    parts = min(len(lengths), max(1, -(-int(lengths.sum()) // cap)))
    if parts == len(lengths):
        return [[i] for i in range(parts)]
    return get_seqlen_balanced_partitions(work.tolist(), parts, equal_size=False)


def _report(
    bins_R: list[list[list[int]]], lengths_N: np.ndarray, work_N: np.ndarray, config: ScheduleConfig
) -> StepReport:
    bins = [items for bins in bins_R for items in bins]
    tokens = [int(lengths_N[items].sum()) for items in bins]
    work_R = [float(sum(work_N[items].sum() for items in bins)) for bins in bins_R]
    mean = sum(work_R) / len(work_R)
    room = config.token_cap if config.token_cap is not None else max(tokens, default=0)
    minimum = (
        -(-sum(tokens) // config.token_cap)
        if config.token_cap is not None
        else -(-sum(map(len, bins)) // config.micro_batch_size)
    )
    return StepReport(
        num_samples=sum(map(len, bins)),
        num_micro_batches=len(bins),
        num_empty=sum(1 for items in bins if not items),
        lower_bound=max(config.align, -(-minimum // config.align) * config.align),
        fill=sum(tokens) / (room * len(bins)) if room else 0.0,
        work_max_over_mean=max(work_R) / mean if mean else 1.0,
    )


def build_dp_schedule(
    args: argparse.Namespace,
    train_parallel_config: Mapping[str, int],
    total_lengths: Sequence[int],
    *,
    global_batch_size: int,
    rollout_indices: Sequence[int],
) -> tuple[list[list[int]], list[list[list[int]]], list[int], list[int]]:
    """Upstream's call: `(partitions, micro_batch_indices, num_microbatches, global_batch_sizes)` in
    whole steps of `global_batch_size` rollouts.

    AssertionError naming `num_rollouts` where there is not one whole step. Trailing rollouts are
    left out; `plan_schedule` lists them.
    """
    assert len(total_lengths) == len(rollout_indices), (
        f"{len(total_lengths)} lengths for {len(rollout_indices)} rollout ids"
    )
    num_rollouts = len(set(rollout_indices))
    assert num_rollouts >= global_batch_size, (
        f"num_rollouts {num_rollouts} is less than one step of global_batch_size "
        f"{global_batch_size}"
    )
    plan = plan_schedule(
        total_lengths,
        rollout_indices,
        step_sizes=[global_batch_size] * (num_rollouts // global_batch_size),
        config=ScheduleConfig.from_args(args, train_parallel_config),
    )
    return plan.partitions, plan.micro_batch_indices, plan.num_microbatches, plan.global_batch_sizes
