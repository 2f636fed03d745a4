"""What a rank's batch holds, as arrays, and this rank's part of every declared metric field.

Pure functions from a batch (a local `RolloutBatch`, or a dict of lists with the same keys) to
arrays and contributions. What is a metric and how it is reduced stands in the contract; nothing
here lists keys. Suffixes: `_N` samples of this rank, `_T` its response tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np

from slime.data.batch import RolloutBatch
from slime.data.context_parallel import plan_response_layout
from slime.data.fields import CONTRACT, Extent, FieldSpec, Reduce, Scope
from slime.data.ragged import Ragged, UngatheredColumn, as_array, is_tensor
from slime.exceptions import RolloutDataError
from slime.metrics import contributions as c
from slime.metrics.contributions import Contribution, SampleTokens


def numbers(value: Any) -> np.ndarray:
    """A per-sample field as float64 [N]; None is NaN."""
    if is_tensor(value):
        return value.detach().double().cpu().numpy().reshape(-1)
    if isinstance(value, np.ndarray):
        return value.astype(np.float64)
    return np.array(
        [np.nan if entry is None else float(entry) for entry in value], dtype=np.float64
    )


def sample_field(
    batch: Mapping[str, Any], name: str, default: float | None = None
) -> np.ndarray | None:
    """A per-sample field as float64 [N], or None where the batch lacks it."""
    if name not in batch or batch[name] is None:
        return None if default is None else np.full(_num_local(batch), default)
    return numbers(
        batch.array(name)
        if isinstance(batch, RolloutBatch) and not is_tensor(batch.raw(name))
        else batch[name]
    )


def given_sample_field(
    batch: Mapping[str, Any], name: str, default: float | None = None
) -> np.ndarray:
    """`sample_field`, where the batch has the field or there is a default."""
    return cast(np.ndarray, sample_field(batch, name, default))


def raw_entry(batch: Mapping[str, Any], name: str) -> Any:
    """What the batch stores under `name`, a column or a list; None where it lacks it. No list is
    made of a column.
    """
    if name not in batch:
        return None
    return batch.raw(name) if isinstance(batch, RolloutBatch) else batch[name]


def _num_local(batch: Mapping[str, Any]) -> int:
    return batch.num_samples if isinstance(batch, RolloutBatch) else len(batch["response_lengths"])


def flat_tokens(batch: Mapping[str, Any], name: str, lengths_N: np.ndarray) -> np.ndarray:
    """The concatenated entries of a TOKEN field on the CPU, in their own dtype; not copied where
    the batch holds one column on the CPU.

    RolloutDataError naming the sample that has another number of entries than `lengths_N` says.
    """
    if isinstance(batch, RolloutBatch) and name in CONTRACT:
        column = batch.column(name)
        if isinstance(column, Ragged):
            _check_lengths(name, column.lengths, lengths_N)
            if column.values.ndim != 1:
                raise RolloutDataError(
                    f"{name} must have one number per token, got shape {list(column.values.shape)} "
                    "for all samples."
                )
            return as_array(column.dense_values(), what=name)
        entries = column.parts if isinstance(column, UngatheredColumn) else column.as_list()
    else:
        entries = [as_array(entry, what=name) for entry in batch[name]]
    _check_lengths(
        name, np.fromiter(map(len, entries), dtype=np.int64, count=len(entries)), lengths_N
    )
    return np.concatenate(entries) if len(entries) else np.zeros(0)


def _check_lengths(name: str, found_N: np.ndarray, lengths_N: np.ndarray) -> None:
    if len(found_N) != len(lengths_N):
        raise RolloutDataError(
            f"{name} has {len(found_N)} entries where this rank has {len(lengths_N)} samples."
        )
    wrong = np.flatnonzero(found_N != lengths_N)
    if len(wrong):
        i = int(wrong[0])
        raise RolloutDataError(
            f"{name} has {found_N[i]} values for the {lengths_N[i]} response tokens of the sample "
            f"at {i}."
        )


def _trains_every_token(batch: Mapping[str, Any], num_tokens: int) -> bool:
    """Whether no response token is masked, from one count over all masks: rows between the entries
    are zero.
    """
    if not isinstance(batch, RolloutBatch):
        return False
    column = batch.column("loss_masks")
    if not isinstance(column, Ragged) or int(column.lengths.sum()) != num_tokens:
        return False
    return int(np.count_nonzero(as_array(column.values))) == num_tokens


def sample_tokens(batch: Mapping[str, Any], *, cp_size: int = 1, cp_rank: int = 0) -> SampleTokens:
    """Which response tokens this rank holds, and the denominators, from the full masks."""
    responses = given_sample_field(batch, "response_lengths").astype(np.int64)
    every = _trains_every_token(batch, int(responses.sum()))
    mask_T = None if every else flat_tokens(batch, "loss_masks", responses) != 0
    plan = c.SegmentPlan(responses)
    mask_sums = responses.astype(np.float64) if mask_T is None else c.segment_sums(mask_T, plan)
    rollout_sums = sample_field(batch, "rollout_mask_sums")
    if cp_size > 1:
        layout = plan_response_layout(
            given_sample_field(batch, "total_lengths").astype(np.int64),
            responses,
            cp_size=cp_size,
            cp_rank=cp_rank,
        )
        plan = c.SegmentPlan(layout.local_lengths)
        mask_T = None if mask_T is None else mask_T[layout.response_indices.numpy()]
    sums = mask_sums if rollout_sums is None else rollout_sums
    return SampleTokens(plan, mask_T, mask_sums, sums, copies=cp_size)


def phase_contributions(
    batch: Mapping[str, Any], *, cp_size: int = 1, cp_rank: int = 0
) -> dict[str, Contribution]:
    """This rank's part of every declared metric field in `batch`, by metric name.

    SAMPLE_MEAN gives each rollout one vote, whatever number of samples it emitted; over
    ROLLOUT_MEAN's denominators see `SampleTokens`. Fields that are absent, or without an entry for
    any sample, contribute nothing.
    """
    result: dict[str, Contribution] = {}
    if not _num_local(batch):
        return result
    tokens = (
        sample_tokens(batch, cp_size=cp_size, cp_rank=cp_rank) if "loss_masks" in batch else None
    )
    counts = given_sample_field(batch, "rollout_sample_counts", default=1.0)
    for name in dict.keys(cast(dict, batch)):
        spec = CONTRACT.find(name)
        if (
            spec is None
            or spec.reduce is Reduce.NONE
            or raw_entry(batch, name) is None
            or spec.extent is Extent.EQUAL
        ):
            continue
        contribution = (
            _token_contribution(batch, spec, tokens)
            if spec.scope is Scope.TOKEN
            else _sample_contribution(batch, spec, counts, cp_rank=cp_rank)
        )
        if contribution is not None:
            result[spec.metric_name] = contribution
    # what trains: the samples of rollouts with a trainable token, as the ledger counts them
    trained_N = (
        tokens.rollout_mask_sums_N > 0 if tokens is not None else np.ones(len(counts), dtype=bool)
    )
    copies = float(cp_size)
    result["num_samples"] = c.total([int(trained_N.sum()) / copies])
    result["num_rollouts"] = c.total(1.0 / counts[trained_N] / copies)
    return result


def _token_contribution(
    batch: Mapping[str, Any], spec: FieldSpec, tokens: SampleTokens | None
) -> Contribution | None:
    if tokens is None:
        return None
    if not spec.cp_sharded and tokens.copies > 1:
        raise RolloutDataError(
            f"The metric field {spec.name!r} must be declared cp_sharded=True to be reduced under "
            "context parallelism."
        )
    values_T = flat_tokens(batch, spec.name, tokens.plan.lengths_N)
    if spec.reduce is Reduce.TOKEN_MEAN:
        return tokens.token_mean(values_T)
    if spec.reduce is Reduce.ROLLOUT_MEAN:
        return tokens.rollout_mean(values_T)
    kept = values_T if tokens.mask_T is None else values_T[tokens.mask_T]
    return c.of_values(Reduce.MEAN if spec.reduce is Reduce.SAMPLE_MEAN else spec.reduce, kept)


def _is_first_copy(batch: Mapping[str, Any], spec: FieldSpec, cp_rank: int) -> bool:
    """Whether this rank speaks for values that its context-parallel peers have too, and every rank
    where the field is whole.
    """
    if cp_rank or spec.extent is not Extent.WHOLE or not isinstance(batch, RolloutBatch):
        return cp_rank == 0
    owners = batch.array("owner_ranks") if "owner_ranks" in batch else np.zeros(1)
    return batch.info.get("dp_rank", 0) == owners[owners >= 0].min()


def _sample_contribution(
    batch: Mapping[str, Any], spec: FieldSpec, counts: np.ndarray, *, cp_rank: int
) -> Contribution | None:
    values = given_sample_field(batch, spec.name)
    if spec.reduce in (Reduce.SUM, Reduce.QUANTILES) and not _is_first_copy(batch, spec, cp_rank):
        # said once; a mean, a maximum and a minimum are the same of any number of copies
        values = values[:0]
    if spec.extent is Extent.WHOLE:
        weights = sample_field(batch, "raw_reward_weights")
        weights = (
            np.ones(len(values)) if weights is None or len(weights) != len(values) else weights
        )
        if spec.name == "raw_reward":
            values, weights = _with_failures(batch, values, weights)
    else:
        weights = 1.0 / counts
    if spec.reduce is Reduce.SAMPLE_MEAN:
        return c.weighted_mean(values, weights)
    return c.of_values(spec.reduce, values)


def _with_failures(
    batch: Mapping[str, Any], values: np.ndarray, weights: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Raw rewards and weights where what the model failed at is 0, also what is not in the batch:
    else a policy that fails more often looks better.
    """
    failed = sample_field(batch, "model_failure")
    if failed is not None:
        values = np.where(failed != 0, 0.0, values)
    votes = batch.info.get("dropped_failure_votes", 0.0) if isinstance(batch, RolloutBatch) else 0.0
    return (np.append(values, 0.0), np.append(weights, votes)) if votes else (values, weights)
