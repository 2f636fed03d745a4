"""`list[Sample]` to columns. Samples are read, never changed; the field contract states what each
field is and where it is read from.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import logging
import math
import operator
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from slime.algorithms.table import ESTIMATORS, LOSSES
from slime.data.batch import RolloutBatch, check_masks, check_rows
from slime.data.build import build_column
from slime.data.declared_fields import read_source, warn_of_unfilled
from slime.data.fields import CONTRACT, Origin
from slime.data.length_penalty import LengthPenalty, compute_length_penalties, penalty_metrics
from slime.data.ragged import as_array
from slime.data.reasons import MODEL_FAILURES, DropReason, InvalidReason
from slime.data.rewards import RewardStatistics, normalize_rewards, raw_rewards_of, reward_number
from slime.data.weight_versions import oldest_version
from slime.exceptions import RolloutDataError

if TYPE_CHECKING:
    from slime.data.sample import Sample

logger = logging.getLogger(__name__)
_said_singletons = False
ALONE_BELOW = -0.01  # nats: more than bfloat16's rounding of a certain token


@dataclasses.dataclass(frozen=True)
class ColumnsConfig:
    """What the conversion needs to know of the options."""

    reward_key: str | None = None
    group_baseline: bool = True  # rewards are normalized by group
    leave_one_out: bool = False
    divide_by_std: bool = True
    removed_samples_in_baseline: bool = False
    length_penalty: LengthPenalty = LengthPenalty()
    # every sample of a rollout is a member of its group's baseline, not the rollout
    baseline_by_row: bool = False
    require_top_p_tokens: bool = False
    uses_engine_log_probs: bool = False  # in a ratio, so they must be of the trainer's distribution
    # reasons that say the model answered badly, not that its answer was lost
    model_failures: frozenset[str] = frozenset()

    @staticmethod
    def from_args(args: argparse.Namespace) -> ColumnsConfig:
        """From the reward, algorithm and rollout options."""
        baseline = ESTIMATORS[args.advantage_estimator].baseline
        return ColumnsConfig(
            reward_key=args.reward_key,
            group_baseline=baseline is not None
            and args.rewards_normalization
            and args.compute_advantages_and_returns,
            leave_one_out=baseline is not None and baseline.leave_one_out,
            divide_by_std=baseline is not None
            and baseline.may_divide_by_std
            and args.grpo_std_normalization,
            removed_samples_in_baseline=args.removed_samples_in_baseline,
            length_penalty=LengthPenalty.from_args(args),
            baseline_by_row=args.fan_out_baseline == "row",
            require_top_p_tokens=args.rollout_top_p != 1.0
            and not LOSSES[args.loss_type].is_supervised,
            uses_engine_log_probs=args.rollout_top_p != 1.0
            and (args.use_rollout_logprobs or args.use_tis or args.get_mismatch_metrics),
            model_failures=frozenset(reason.value for reason in MODEL_FAILURES),
        )


# --- identities -----------------------------------------------------------------------------------


def rollout_ids_of(samples: Sequence[Any]) -> list[int]:
    """`Sample.rollout_id`, where None ("its own rollout") becomes the smallest unused id >= 0, in
    order.
    """
    return _ids(samples, "rollout_id", itertools.count())


def group_ids_of(samples: Sequence[Any]) -> list[int]:
    """`Sample.group_index`; a sample without one is a group of its own, with the largest unused id
    < 0.
    """
    return _ids(samples, "group_index", itertools.count(-1, -1))


def _ids(samples: Sequence[Any], attribute: str, candidates: Iterator[int]) -> list[int]:
    """The attribute of each sample, where None becomes the next candidate that no sample has."""
    given = [getattr(sample, attribute) for sample in samples]
    try:
        ids = [None if value is None else operator.index(value) for value in given]
    except TypeError as error:
        raise RolloutDataError(
            f"Sample.{attribute} must be an integer: {error}. Use a number in place of a name."
        ) from None
    used = set(ids)
    unused = (candidate for candidate in candidates if candidate not in used)
    return [next(unused) if value is None else value for value in ids]


def counts_in_baseline(sample: Sample, *, removed_count: bool = False) -> bool:
    """Whether the sample's reward may shift its siblings' baseline: it is valid, not failed, not
    aborted unless the gate keeps such ones, and trains: neither removed from the loss nor masked in
    every token. `removed_count`: what does not train counts too.
    """
    lost = sample.status.value == "failed" or (
        sample.status.value == "aborted" and sample.invalid_reason != InvalidReason.ABORTED.value
    )
    if not sample.valid or lost:
        return False
    return removed_count or not (sample.remove_sample or _is_fully_masked(sample))


def _is_fully_masked(sample: Sample) -> bool:
    mask = sample.loss_mask
    return mask is not None and not (any(mask) if isinstance(mask, list) else as_array(mask).any())


# --- rewards --------------------------------------------------------------------------------------


def length_penalties_of(
    samples: Sequence[Any], config: ColumnsConfig
) -> tuple[np.ndarray, dict[str, float]]:
    """(what --length-penalty adds to each reward, float64 [N]; its metrics, {} without
    a penalty).
    """
    if config.length_penalty.name == "none":
        return np.zeros(len(samples)), {}
    raw_N = raw_rewards_of(samples, config.reward_key)
    counts_N = np.array(
        [
            counts_in_baseline(sample, removed_count=config.removed_samples_in_baseline)
            for sample in samples
        ],
        dtype=bool,
    )
    lengths = [sample.response_length for sample in samples]
    penalties_N = compute_length_penalties(
        lengths, raw_N, group_ids_of(samples), counts_N, penalty=config.length_penalty
    )
    return penalties_N, penalty_metrics(penalties_N, raw_N, counts_N)


def compute_rewards(
    samples: Sequence[Any], config: ColumnsConfig
) -> tuple[list[float], list[float], RewardStatistics | None]:
    """`(raw_rewards, rewards, statistics)`, one float per sample: as scored, and what the estimator
    reads. NaN where there is no score.

    Rewards are normalized by group for the estimators that ask for it, else equal to the raw ones;
    both with the length penalty.
    """
    raw_N = raw_rewards_of(samples, config.reward_key)
    shaped_N = raw_N + length_penalties_of(samples, config)[0]
    if not config.group_baseline:
        return raw_N.tolist(), shaped_N.tolist(), None
    valid = [
        counts_in_baseline(sample, removed_count=config.removed_samples_in_baseline)
        for sample in samples
    ]
    rewards_N, statistics = normalize_rewards(
        shaped_N,
        group_ids_of(samples),
        valid,
        divide_by_std=config.divide_by_std,
        leave_one_out=config.leave_one_out,
        rollout_ids=None if config.baseline_by_row else rollout_ids_of(samples),
    )
    global _said_singletons
    if (
        statistics.num_groups
        and statistics.num_groups == statistics.num_singleton_groups
        and not _said_singletons
    ):
        _said_singletons = True  # the count is a metric of every rollout; this is logged once
        logger.warning(
            "Every group has one member that counts, so every group-normalized reward is 0 and "
            "nothing is learned. Raise "
            "--n-samples-per-prompt, or pass --disable-rewards-normalization."
        )
    return raw_N.tolist(), np.where(np.isfinite(raw_N), rewards_N, np.nan).tolist(), statistics


# --- columns --------------------------------------------------------------------------------------


def build_train_columns(
    samples: Sequence[Any], rewards: tuple[Sequence[float], Sequence[float]], config: ColumnsConfig
) -> RolloutBatch:
    """The whole-batch `RolloutBatch` of these samples, invalid ones included and marked by `valid`.

    `rewards` is `(raw_rewards, rewards)`. A field that only some of the valid samples have is a
    `RolloutDataError`, or is filled as declared; so is any entry whose length does not fit its
    sample. A sample without a finite reward is invalid here, with the reason "bad_reward".
    """
    raw_rewards, normalized = rewards
    for name, values in (("raw_rewards", raw_rewards), ("rewards", normalized)):
        if len(values) != len(samples):
            raise RolloutDataError(f"{len(values)} {name} for {len(samples)} samples.")
    batch = RolloutBatch()
    rewards_N = _numbers(samples, normalized, config)
    valid, reasons = _verdicts(samples, rewards_N)
    responses = np.fromiter(
        (sample.response_length for sample in samples), dtype=np.int64, count=len(samples)
    )
    tokens = [sample.tokens for sample in samples]
    entries: dict[str, Any] = {
        "tokens": tokens,
        "response_lengths": responses,
        "total_lengths": np.fromiter(map(len, tokens), dtype=np.int64, count=len(samples)),
        "rewards": np.where(np.isfinite(rewards_N), rewards_N, 0.0),
        "valid": valid,
        "raw_reward": _override_raw_rewards(samples, raw_rewards, config),
        "truncated": [int(was_cut(sample)) for sample in samples],
        "loss_masks": _loss_masks(samples, responses),
        "rollout_ids": rollout_ids_of(samples),
        "group_ids": group_ids_of(samples),
        "source_names": [source_name_of(sample) for sample in samples],
    }
    oldest = [oldest_version(sample) for sample in samples]
    if any(version is not None for version in oldest):
        entries["oldest_weight_version"] = oldest
    for spec in CONTRACT:
        if spec.name in entries or spec.source is None or spec.origin is not Origin.ROLLOUT:
            continue
        values = read_source(samples, spec)
        if any(value is not None for value in values):
            entries[spec.name] = values
        else:
            warn_of_unfilled(samples, spec)
    if not valid.all():
        entries["invalid_reason"] = reasons
        entries["model_failure"] = [reason in config.model_failures for reason in reasons]
    for name, values in entries.items():
        batch[name] = build_column(CONTRACT[name], values, required=valid)
    check_masks(batch)
    check_rows(batch, positions=np.flatnonzero(valid))
    if config.require_top_p_tokens and "rollout_top_p_token_ids" not in batch and valid.any():
        raise RolloutDataError(
            "--rollout-top-p is not 1, so the trainer needs the ids that nucleus sampling kept, "
            "but no sample has rollout_top_p_token_ids. "
            "Use an engine that returns them, or --rollout-top-p 1."
        )
    if config.require_top_p_tokens and config.uses_engine_log_probs:
        _check_nucleus_log_probs(samples)
    return batch


def _check_nucleus_log_probs(samples: Sequence[Any]) -> None:
    """RolloutDataError where a token that nucleus sampling left no choice for is less than certain:
    the engine's log-probs are then not over the ids that it returns, and the trainer's are.
    """
    for sample in samples:
        if (
            not sample.valid
            or sample.rollout_top_p_token_offsets is None
            or sample.rollout_log_probs is None
        ):
            continue
        log_probs = as_array(sample.rollout_log_probs)
        alone = np.diff(as_array(sample.rollout_top_p_token_offsets)) == 1
        if len(alone) == len(log_probs) and (log_probs[alone] < ALONE_BELOW).any():
            raise RolloutDataError(
                f"sample {sample.index}: the engine gives a token that nucleus sampling left alone "
                f"the log-prob {log_probs[alone].min():.4g}, not 0: its "
                "log-probs are over the whole vocabulary, the trainer's over the ids that were "
                "kept, and their ratio would be wrong. Remove "
                "--use-rollout-logprobs, --use-tis and --get-mismatch-metrics, or use --rollout-top-p 1."
            )


def _numbers(samples: Sequence[Any], rewards: Sequence[Any], config: ColumnsConfig) -> np.ndarray:
    """float64 [N]: what a custom post-process returned, NaN where there is no number. It may
    compute with tensors: one of one element is its element.
    """
    rewards = [
        value.item() if hasattr(value, "item") and math.prod(value.shape) == 1 else value
        for value in rewards
    ]
    pairs = zip(samples, rewards, strict=True)
    return np.array(
        [reward_number(value, config.reward_key, index=sample.index) for sample, value in pairs],
        dtype=np.float64,
    )


def _verdicts(samples: Sequence[Any], rewards_N: np.ndarray) -> tuple[np.ndarray, list[str | None]]:
    """`(valid [N], reasons)`: the gate's verdict, and "bad_reward" where it passed but there is no
    finite reward to learn from.
    """
    marked = np.fromiter((bool(sample.valid) for sample in samples), dtype=bool, count=len(samples))
    finite = np.isfinite(rewards_N)
    reasons = [
        (sample.invalid_reason or DropReason.INVALID.value)
        if not sample.valid
        else None
        if is_finite
        else InvalidReason.BAD_REWARD.value
        for sample, is_finite in zip(samples, finite.tolist(), strict=True)
    ]
    return marked & finite, reasons


def was_cut(sample: Sample) -> bool:
    """Whether the response was cut at a length limit, by its status or by the engine's word for it,
    which is all that a custom generate function may keep.
    """
    return sample.status.value == "truncated" or (
        isinstance(sample.finish_reason, str) and sample.finish_reason == "length"
    )


def source_name_of(sample: Sample) -> str:
    """The data source of a sample: its `source` attribute, else metadata["source_name"], else
    "unknown".
    """
    source = sample.__dict__.get("source")
    return str(source or (sample.metadata or {}).get("source_name") or "unknown")


def _override_raw_rewards(
    samples: Sequence[Any], raw_rewards: Sequence[float], config: ColumnsConfig
) -> np.ndarray:
    """metadata["raw_reward"] where a sample has it (a reward model's score before shaping), else
    the raw reward. NaN for None.
    """
    raw_N = _numbers(samples, raw_rewards, config)
    for i, sample in enumerate(samples):
        if sample.metadata and "raw_reward" in sample.metadata:
            raw_N[i] = reward_number(
                sample.metadata["raw_reward"], config.reward_key, index=sample.index
            )
    return raw_N


def _loss_masks(samples: Sequence[Any], responses: np.ndarray) -> list[np.ndarray]:
    """Per sample 0/1 [T]: its mask, ones where it has none, zeros where it is removed from the
    loss.
    """
    longest = int(responses.max(initial=0))
    ones, zeros = np.ones(longest, dtype=np.uint8), np.zeros(longest, dtype=np.uint8)
    masks = []
    for sample, length in zip(samples, responses.tolist(), strict=True):
        if sample.remove_sample:
            masks.append(zeros[:length])
        elif sample.loss_mask is None:
            masks.append(ones[:length])
        else:
            masks.append(
                as_array(sample.loss_mask, "uint8", what=f"loss_mask of sample {sample.index}")
            )
    return masks
