"""The whole rollout batch to one shard per data-parallel rank: who trains what, and the arrays that
travel.

`plan_split` decides and computes what needs every sibling (loss denominators); `make_shards`
gathers each rank's arrays, in consumption order, one rank at a time, so that no more than one shard
is in memory beside the batch. Samples that no step trains stay in the whole-batch fields (pass@k,
raw reward) and are counted by reason.

Three samples of 5, 4 and 6 tokens, of which one is the prompt's, on two ranks; samples 0 and 1 are
rollout 0, sample 2 is rollout 1. What `make_shards` gives, and `localize` makes of it:

                            rank 0      rank 1
    partition               [0 1]       [2]
    total_lengths, shard    [5 4 6]     [5 4 6]     the whole batch on the wire
    total_lengths, local    [5 4]       [6]
    response_lengths        [4 3]       [5]
    rollout_mask_sums       [7 7]       [5]         trainable tokens of the sample's rollout
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from slime.data.batch import RolloutBatch, Stage, check_rows
from slime.data.build import build_column, column_dtype
from slime.data.fields import CONTRACT, Extent, FieldSpec, Scope
from slime.data.from_lists import batch_from_lists
from slime.data.ragged import Ragged, Scalars, UngatheredColumn, is_tensor
from slime.data.reasons import DropReason, InvalidReason
from slime.data.schedule import ScheduleConfig, SchedulePlan, plan_schedule, plan_step_sizes
from slime.exceptions import ConfigError, RolloutDataError


@dataclasses.dataclass(frozen=True)
class SplitConfig:
    """What the split needs to know of the options and of the trainer's layout."""

    global_batch_size: int
    expected_rollouts: int  # rollouts of a full batch: prompts * samples per prompt
    schedule: ScheduleConfig
    keep_trailing: bool = False
    # packed rows are padded to a multiple of this many tokens; 0: laid out by the trainer
    pad_to: int = 0

    @staticmethod
    def from_args(
        args: argparse.Namespace, train_parallel_config: Mapping[str, int]
    ) -> SplitConfig:
        """From the batching options and the trainer's dp_size, cp_size, vpp_size,
        microbatch_group_size_per_vp_stage and (optional) tp_size.
        """
        expected = args.rollout_batch_size * args.n_samples_per_prompt
        size = args.global_batch_size
        if size is None:
            if not args.num_steps_per_rollout:
                raise ConfigError(
                    "Give --global-batch-size, or --num-steps-per-rollout from which it follows."
                )
            size = max(1, expected // args.num_steps_per_rollout)
        # under context parallelism a rank's row interleaves chunks of all sequences, so the trainer
        # gathers it
        one_rank_row = train_parallel_config.get("cp_size", 1) == 1
        return SplitConfig(
            global_batch_size=size,
            expected_rollouts=expected,
            schedule=ScheduleConfig.from_args(args, train_parallel_config),
            keep_trailing=args.keep_trailing_rollouts,
            pad_to=args.data_pad_size_multiplier * train_parallel_config.get("tp_size", 1)
            if one_rank_row
            else 0,
        )


@dataclasses.dataclass(frozen=True)
class SplitPlan:
    """The schedule in positions of the whole batch, what needs all siblings, and what became of
    every sample.
    """

    schedule: SchedulePlan
    rollout_mask_sums_N: np.ndarray  # float32 [N]: trainable tokens of the sample's rollout
    rollout_sample_counts_N: np.ndarray  # int32 [N]: trained samples of the sample's rollout
    owner_ranks_N: np.ndarray  # int16 [N]: -1 where no step trains the sample
    steps_N: np.ndarray  # int64 [N]: the step within the rollout, -1 for none
    reasons: list[str | None]  # [N]: why the sample does not train, None where it does
    # per step, rollouts with a trainable token (at least 1, the loss divides by it)
    global_batch_sizes: list[int]
    num_trained_by_rank: list[int]  # samples with a trainable token in their rollout
    num_trained_rollouts: int

    @property
    def dropped(self) -> dict[str, int]:
        """Samples by the reason for which they do not train."""
        return dict(collections.Counter(reason for reason in self.reasons if reason))

    @property
    def num_trained_samples(self) -> int:
        return sum(self.num_trained_by_rank)

    def metrics(self) -> dict[str, float]:
        """`schedule/...` numbers of the batch."""
        return {
            **self.schedule.metrics(),
            "schedule/trained_rollouts": self.num_trained_rollouts,
        }


def plan_split(data: Mapping[str, Any], config: SplitConfig) -> tuple[RolloutBatch, SplitPlan]:
    """The completed whole batch, and the plan of its split. `data` is a `RolloutBatch` or a custom
    converter's dict of lists.

    Raises `RolloutDataError` where a field of a sample that trains does not fit the sample, or the
    plan is not a disjoint cover.
    """
    batch = _complete(batch_from_lists(data))
    valid_N = batch.array("valid")
    check_rows(batch, positions=np.flatnonzero(valid_N))
    lengths_N = batch.array("total_lengths").astype(np.int64)
    rollout_ids_N = batch.array("rollout_ids")
    candidates = np.flatnonzero(valid_N)
    step_sizes = plan_step_sizes(
        len(np.unique(rollout_ids_N[candidates])),
        config.global_batch_size,
        expected_rollouts=config.expected_rollouts,
        keep_trailing=config.keep_trailing,
    )
    local = plan_schedule(
        lengths_N[candidates],
        rollout_ids_N[candidates].tolist(),
        step_sizes=step_sizes,
        config=config.schedule,
    )
    schedule = dataclasses.replace(
        local,
        partitions=[candidates[part].tolist() for part in local.partitions],
        dropped=candidates[local.dropped].tolist(),
    )
    owner_ranks_N = _owners(schedule.partitions, len(lengths_N))
    return batch, _with_denominators(batch, schedule, owner_ranks_N)


def _complete(batch: RolloutBatch) -> RolloutBatch:
    """The batch with every field that the split needs; what a custom converter left out gets its
    neutral value.
    """
    batch = batch.copy()
    num_samples = len(batch.raw("tokens"))
    token_lengths = _lengths_of(batch, "tokens")
    defaults: dict[str, Any] = {
        "total_lengths": lambda: token_lengths,
        "response_lengths": lambda: (
            _lengths_of(batch, "loss_masks") if "loss_masks" in batch else token_lengths
        ),
        "loss_masks": lambda: [
            np.ones(n, dtype=np.uint8) for n in batch.array("response_lengths").tolist()
        ],
        "rollout_ids": lambda: np.arange(num_samples),
        "valid": lambda: np.ones(num_samples, dtype=bool),
    }
    for name, make in defaults.items():
        if name not in batch:
            batch[name] = build_column(CONTRACT[name], make())
    for name in list(dict.keys(batch)):
        spec = CONTRACT.find(name)
        if spec is not None and spec.per_sample and len(batch.raw(name)) != num_samples:
            raise RolloutDataError(
                f"{name!r} has {len(batch.raw(name))} entries for {num_samples} samples."
            )
    _reject_unusable(batch)
    return batch


def _lengths_of(batch: RolloutBatch, name: str) -> np.ndarray:
    """Entries per sample of a field that has an array per sample, int64 [N]."""
    column = batch.column(name)
    assert isinstance(column, (UngatheredColumn, Ragged)), f"{name} has one value per sample"
    return column.lengths


def _reject_unusable(batch: RolloutBatch) -> None:
    """A sample with a number that would spoil every gradient does not train, for the reason that
    the gate has for it: users' functions behind the gate may write such numbers. A negative token
    id, a log-prob or a reward that is not finite.
    """
    valid_N = batch.array("valid").copy()
    found: list[tuple[str, np.ndarray]] = []
    checks = [("tokens", InvalidReason.BAD_TOKEN.value, _has_negative)]
    checks += [
        (name, InvalidReason.BAD_LOGPROB.value, _has_no_number)
        for name in ("rollout_log_probs", "teacher_log_probs")
    ]
    for name, reason, is_bad in checks:
        if name in batch:
            column = batch.column(name)
            entries = column.parts if isinstance(column, UngatheredColumn) else column.as_list()
            found.append(
                (
                    reason,
                    np.fromiter(
                        (
                            bool(good) and is_bad(entry)
                            for good, entry in zip(valid_N, entries, strict=True)
                        ),
                        bool,
                        len(valid_N),
                    ),
                )
            )
    if "rewards" in batch:
        rewards_N = batch.array("rewards")
        is_finite_N = np.isfinite(rewards_N)
        found.append((InvalidReason.BAD_REWARD.value, ~is_finite_N))
    reasons = list(batch["invalid_reason"]) if "invalid_reason" in batch else [None] * len(valid_N)
    before = int(valid_N.sum())
    for reason, bad_N in found:
        for position in np.flatnonzero(bad_N & valid_N).tolist():
            reasons[position] = reason
        valid_N &= ~bad_N
    if int(valid_N.sum()) == before:
        return
    batch["invalid_reason"], batch["valid"] = reasons, Scalars(valid_N)
    if "rewards" in batch and not is_finite_N.all():
        batch["rewards"] = Scalars(np.where(is_finite_N, rewards_N, 0.0).astype(np.float32))


def _has_negative(entry: np.ndarray) -> bool:
    return len(entry) > 0 and bool(entry.min() < 0)


def _has_no_number(entry: object) -> bool:
    return not np.isfinite(np.asarray(entry)).all()


def _owners(partitions: list[list[int]], num_samples: int) -> np.ndarray:
    owners_N = np.full(num_samples, -1, dtype=np.int16)
    for rank, part in enumerate(partitions):
        if (owners_N[part] >= 0).any() or len(set(part)) != len(part):
            raise RolloutDataError(
                f"The schedule gives a sample to rank {rank} twice, or to two ranks."
            )
        owners_N[part] = rank
    return owners_N


def _with_denominators(
    batch: RolloutBatch, schedule: SchedulePlan, owner_ranks_N: np.ndarray
) -> SplitPlan:
    """Loss denominators over the samples that train: a sibling that was rejected or left over adds
    no tokens to them.
    """
    trained_N = owner_ranks_N >= 0
    masks = batch.column("loss_masks")
    entries = masks.parts if isinstance(masks, UngatheredColumn) else masks.as_list()
    mask_sums_N = np.array([int(np.count_nonzero(mask)) for mask in entries], dtype=np.int64)
    _, rollout_N = np.unique(batch.array("rollout_ids"), return_inverse=True)
    sums = np.bincount(rollout_N, weights=np.where(trained_N, mask_sums_N, 0))
    counts = np.bincount(rollout_N, weights=trained_N)
    trainable_rollouts = sums > 0
    step_of_rollout = _steps_of_rollouts(schedule, rollout_N, len(sums))
    sizes = [
        int(np.count_nonzero(trainable_rollouts & (step_of_rollout == step)))
        for step in range(len(schedule.num_microbatches))
    ]
    masked_N = trained_N & (sums[rollout_N] == 0)
    valid = batch.array("valid")
    given = batch["invalid_reason"] if "invalid_reason" in batch else [None] * len(valid)
    reasons: list[str | None] = [None] * len(valid)
    for row in np.flatnonzero(~valid).tolist():
        reasons[row] = given[row] or DropReason.INVALID.value
    for row in schedule.dropped:
        reasons[row] = DropReason.TRAILING.value
    for row in np.flatnonzero(masked_N).tolist():
        reasons[row] = DropReason.FULLY_MASKED.value
    return SplitPlan(
        schedule=schedule,
        rollout_mask_sums_N=sums[rollout_N].astype(np.float32),
        rollout_sample_counts_N=counts[rollout_N].astype(np.int32),
        owner_ranks_N=owner_ranks_N,
        steps_N=np.where(trained_N & ~masked_N, step_of_rollout[rollout_N], -1),
        reasons=reasons,
        global_batch_sizes=[max(size, 1) for size in sizes],
        num_trained_by_rank=np.bincount(
            owner_ranks_N[trained_N & ~masked_N], minlength=len(schedule.partitions)
        ).tolist(),
        num_trained_rollouts=sum(sizes),
    )


def _steps_of_rollouts(
    schedule: SchedulePlan, rollout_N: np.ndarray, num_rollouts: int
) -> np.ndarray:
    """The step that trains each rollout, int64, -1 for none."""
    steps = np.full(num_rollouts, -1, dtype=np.int64)
    bounds = np.cumsum([0, *schedule.num_microbatches]).tolist()
    for part, micro_batches in zip(schedule.partitions, schedule.micro_batch_indices, strict=True):
        for step, (low, high) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
            local = [i for indices in micro_batches[low:high] for i in indices]
            steps[rollout_N[[part[i] for i in local]]] = step
    return steps


def make_shards(
    batch: RolloutBatch,
    plan: SplitPlan,
    config: SplitConfig,
    *,
    dropped_failures: Sequence[int | None] = (),
) -> Iterator[RolloutBatch]:
    """One shard per data-parallel rank, in rank order, made when asked for. `dropped_failures`: see
    `split_by_dp`.
    """
    votes = 0.0
    made = {
        "rollout_mask_sums": Scalars(plan.rollout_mask_sums_N),
        "rollout_sample_counts": Scalars(plan.rollout_sample_counts_N),
        "owner_ranks": Scalars(plan.owner_ranks_N),
        "all_rollout_ids": Scalars(batch.array("rollout_ids")),
    }
    if "raw_reward" in batch:
        weights_N, votes = _raw_reward_weights(batch, dropped_failures)
        made["raw_reward_weights"] = Scalars(weights_N)
    columns = {
        name: _shippable(batch, name)
        for name in dict.keys(batch)
        if name not in made and name != "invalid_reason"
    }
    dtypes = {
        name: column_dtype(CONTRACT[name], column)
        for name, column in columns.items()
        if isinstance(column, UngatheredColumn)
    }
    for rank, partition in enumerate(plan.schedule.partitions):
        micro_batches = plan.schedule.micro_batch_indices[rank]
        positions = np.asarray(partition, dtype=np.int64)
        info: dict[str, Any] = {
            "num_whole": len(plan.owner_ranks_N),
            "dp_rank": rank,
            "dp_size": len(plan.schedule.partitions),
        }
        info.update(declared=CONTRACT.of_plug_ins, dropped_failure_votes=votes)
        shard = RolloutBatch(stage=Stage.SHARD, info=info)
        gaps: dict[str, tuple[np.ndarray, int]] = {}
        if config.pad_to:
            gaps = plan_gaps(
                columns["tokens"].lengths[positions],
                columns["loss_masks"].lengths[positions],
                micro_batches,
                config.pad_to,
            )
        for name, column in {**columns, **made}.items():
            spec = CONTRACT.find(name) or FieldSpec(name, Scope.SAMPLE)
            if spec.extent is Extent.WHOLE or spec.ships_whole or not spec.per_sample:
                shard[name] = column
            elif isinstance(column, UngatheredColumn):
                padding, lead = gaps.get(name, (None, 0))
                shard[name] = column.gather(
                    partition, dtype=dtypes[name], padding=padding, lead=lead
                )
            elif isinstance(column, Scalars):
                shard[name] = column.select(positions)
            else:
                shard[name] = (
                    column[positions] if is_tensor(column) else [column[i] for i in partition]
                )
        shard["partition"] = Scalars(positions)
        shard["micro_batch_indices"] = micro_batches
        shard["num_microbatches"] = list(plan.schedule.num_microbatches)
        shard["global_batch_sizes"] = list(plan.global_batch_sizes)
        yield shard


def _raw_reward_weights(
    batch: RolloutBatch, dropped_failures: Sequence[int | None]
) -> tuple[np.ndarray, float]:
    """float64 [N]: each rollout's one vote in the mean of raw rewards, shared by its samples that
    are valid and scored, or that the model failed at; and the votes of the samples that are not in
    the batch.
    """
    counted = batch.array("valid") & np.isfinite(batch.array("raw_reward"))
    if "model_failure" in batch:
        counted = counted | batch.array("model_failure").astype(bool)
    own = itertools.count(-1, -1)
    taken = set(batch.array("rollout_ids").tolist())
    absent = [
        next(i for i in own if i not in taken) if rollout is None else rollout
        for rollout in dropped_failures
    ]
    ids = np.concatenate(
        [batch.array("rollout_ids").astype(np.int64), np.array(absent, dtype=np.int64)]
    )
    counted = np.concatenate([counted, np.ones(len(absent), dtype=bool)])
    _, rollout = np.unique(ids, return_inverse=True)
    sizes = np.bincount(rollout, weights=counted)
    weights = np.where(counted, 1.0 / np.maximum(sizes[rollout], 1), 0.0)
    num_samples = len(ids) - len(absent)
    return weights[:num_samples], float(weights[num_samples:].sum())


def _shippable(batch: RolloutBatch, name: str) -> Any:
    """The column as `make_shards` wants it: `UngatheredColumn` for arrays per sample, `Scalars`
    for numbers, else the list.
    """
    spec = CONTRACT.find(name)
    if spec is None or not spec.per_sample:
        return batch[name]
    if spec.scope is Scope.SAMPLE and spec.wire_dtype is None:
        return batch[name]
    column = batch.column(name)
    if isinstance(column, Ragged):
        return build_column(spec, column.as_list())
    return column


def plan_row_padding(
    lengths: np.ndarray, micro_batches: list[list[int]], *, pad_to: int
) -> tuple[np.ndarray, int]:
    """`(padding [N], lead)` so that each micro-batch is one row of a multiple of `pad_to` tokens.

    Padding follows a micro-batch's last sample. An empty micro-batch is a row of padding alone: it
    belongs to the sample before it, or, before the first sample, to `lead`.
    """
    padding, lead, last = np.zeros(len(lengths), dtype=np.int64), 0, -1
    for indices in micro_batches:
        tokens = int(lengths[indices].sum()) if indices else 0
        width = max(pad_to, -(-tokens // pad_to) * pad_to)
        last = indices[-1] if indices else last
        if last < 0:
            lead += width - tokens
        else:
            padding[last] += width - tokens
    return padding, lead


def plan_gaps(
    totals: np.ndarray, responses: np.ndarray, micro_batches: list[list[int]], pad_to: int
) -> dict[str, tuple[np.ndarray, int]]:
    """`{field: (padding after each entry, places before the first)}`, so that a micro-batch of
    tokens is one padded row, and the same slice of the loss masks' buffer is its mask, each
    response token's at the position whose logit predicts it.

    A sample without a prompt has no such position: then masks are not laid out here.
    """
    padding, lead = plan_row_padding(totals, micro_batches, pad_to=pad_to)
    gaps = {"tokens": (padding, lead)}
    prompts = totals - responses
    if len(totals) and prompts.min() >= 1:
        following = np.append(prompts[1:] - 1, 0)
        gaps["loss_masks"] = (padding + 1 + following, lead + int(prompts[0]) - 1)
    return gaps


@dataclasses.dataclass(frozen=True)
class Split:
    """The plan and the shards, which are made when iterated (once)."""

    plan: SplitPlan
    shards: Iterator[RolloutBatch]


def split_by_dp(
    data: Mapping[str, Any], config: SplitConfig, *, dropped_failures: Sequence[int | None] = ()
) -> Split:
    """Plans the split of `data` and returns it with its shards, one `RolloutBatch` per
    data-parallel rank.

    dropped_failures: `Sample.rollout_id` of samples that the gate rejected for what the model wrote
    and that are not in `data`; they count as 0 in the mean of raw rewards.
    """
    batch, plan = plan_split(data, config)
    return Split(plan, make_shards(batch, plan, config, dropped_failures=dropped_failures))
