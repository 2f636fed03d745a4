"""What the training ranks log about a rollout batch: every declared metric field, and the optional
panels.

All ranks of the last pipeline stage with tensor rank 0 build contributions (pure, see
batch_values.py), which are gathered over data x context parallel ranks and reduced once.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from slime.data.ragged import as_array
from slime.exceptions import RolloutDataError
from slime.metrics import consistency
from slime.metrics import contributions as c
from slime.metrics.batch_values import (
    flat_tokens,
    given_sample_field,
    numbers,
    phase_contributions,
    raw_entry,
    sample_field,
    sample_tokens,
)
from slime.metrics.consistency_alarms import (
    ConsistencyLimits,
    consistency_alarms,
    gap_of_same_weights,
)
from slime.metrics.contributions import Contribution
from slime.metrics.perf import log_perf_data_raw
from slime.metrics.reduction import (  # noqa: F401  (their later place upstream)
    gather_and_reduce_log_dict,
    rollout_log_metric_contribution,
)
from slime.metrics.statistics import (
    compute_pass_rate,
    compute_ragged_pass_rate,
    compute_rollout_step,
    is_solved,
)
from slime.metrics.step_metrics import reduce_train_step_metrics  # noqa: F401  (its later place upstream)
from slime.tracking import tracking

logger = logging.getLogger(__name__)

QUARTERS = ("p25", "p50", "p75", "p100")
_said: set[str] = set()


@dataclasses.dataclass(frozen=True)
class TrainMetricsConfig:
    """What the phase metrics need to know of the options, and of this rank's place."""

    cp_size: int = 1
    cp_rank: int = 0
    rollout_max_response_len: int | None = None
    n_samples_per_prompt: int = 1
    rollout_batch_size: int = 1
    passrate_threshold: float | None = None

    @staticmethod
    def from_args(args: argparse.Namespace, *, cp_size: int, cp_rank: int) -> TrainMetricsConfig:
        return TrainMetricsConfig(
            cp_size=cp_size,
            cp_rank=cp_rank,
            rollout_max_response_len=args.rollout_max_response_len,
            n_samples_per_prompt=args.n_samples_per_prompt,
            rollout_batch_size=args.rollout_batch_size,
            passrate_threshold=args.passrate_threshold,
        )


# --- contributions of one rank --------------------------------------------------------------------


def _say_once(text: str) -> None:
    if text not in _said:
        _said.add(text)
        logger.warning(text)


def correct_sample_contributions(
    batch: Mapping[str, Any], *, config: TrainMetricsConfig
) -> dict[str, Contribution]:
    """Lengths and entropy of this rank's samples with raw reward 1: `correct_response_lengths`
    (mean and quantiles), `correct_length/p25..p100` (their share per quarter of the longest
    response; longer ones in the last), `correct_entropy`.

    The entropy is the policy's if it was computed; else the sampled-token estimate -log p from the
    training log-probs; else from the engine's; else it is left out and said once. A rank without a
    correct sample contributes count 0.
    """
    raw = sample_field(batch, "local_raw_reward")
    if raw is None:
        _say_once(
            "--log-correct-samples: the batch has no raw_reward, so nothing is known to be correct."
        )
        return {}
    correct = is_solved(raw)
    lengths = given_sample_field(batch, "response_lengths")
    chosen = lengths[correct]
    result = {
        "correct_response_lengths": c.mean(chosen, len(chosen)),
        "correct_response_length": c.quantiles(chosen if config.cp_rank == 0 else [], c.QUARTILES),
    }
    if config.rollout_max_response_len:
        shares = c.length_share_by_quarter(chosen, config.rollout_max_response_len)
        result.update(
            {
                f"correct_length/{quarter}": share
                for quarter, share in zip(QUARTERS, shares, strict=True)
            }
        )
    source = next(
        (
            name
            for name in ("entropy", "log_probs", "rollout_log_probs")
            if raw_entry(batch, name) is not None
        ),
        None,
    )
    if source is None:
        _say_once(
            "--log-correct-samples: there is neither entropy nor any log-prob, so "
            "rollout/correct_entropy is left out."
        )
    elif "loss_masks" in batch:
        tokens = sample_tokens(batch, cp_size=config.cp_size, cp_rank=config.cp_rank)
        values_T = flat_tokens(batch, source, tokens.plan.lengths_N)
        result["correct_entropy"] = tokens.sample_mean(
            values_T, correct, sign=1 if source == "entropy" else -1
        )
    return result


def multi_turn_contributions(
    batch: Mapping[str, Any], *, config: TrainMetricsConfig
) -> dict[str, Contribution]:
    """`multi_turn/...` numbers over samples: response lengths with and without what the environment
    wrote, and rounds.
    """
    lengths = given_sample_field(batch, "response_lengths")
    masked = np.array([float((as_array(mask) != 0).sum()) for mask in batch["loss_masks"]])
    result = _spread("raw_response_length/response_length", lengths)
    if config.rollout_max_response_len:
        clipped = lengths >= config.rollout_max_response_len
        result["raw_response_length/response_length_clip_ratio"] = c.mean(clipped, len(clipped))
    result.update(_spread("wo_obs_response_length/response_length", masked))
    rounds = sample_field(batch, "round_number")
    if rounds is not None:
        result.update(_spread("multi_turn_metric/round_number", rounds))
    return result


def _spread(name: str, values: np.ndarray) -> dict[str, Contribution]:
    return {
        f"{name}_mean": c.mean(values, len(values)),
        f"{name}_max": c.maximum(values),
        f"{name}_min": c.minimum(values),
    }


def pass_rates(batch: Mapping[str, Any], *, config: TrainMetricsConfig) -> dict[str, float]:
    """`{"pass@k": ...}` over the whole rollout batch: one vote per rollout, groups by id and of any
    size; samples that were lost are left out, those rejected as model failures count as wrong.

    Without group ids (a plain dict), groups are `rollout_batch_size` blocks of
    `n_samples_per_prompt`; AssertionError when they do not fit.
    """
    raw = numbers(batch["raw_reward"])
    if "group_ids" not in batch:
        return compute_pass_rate(
            raw.tolist(),
            config.n_samples_per_prompt,
            config.rollout_batch_size,
            threshold=config.passrate_threshold,
        )
    groups = np.asarray(numbers(batch["group_ids"]), dtype=np.int64)
    if "valid" in batch:
        # a lost answer is left out; one that the gate rejected for its content counts as wrong
        raw = np.where(numbers(batch["valid"]) != 0, raw, np.nan)
    if "model_failure" in batch:
        raw = np.where(numbers(batch["model_failure"]) != 0, 0.0, raw)
    if "all_rollout_ids" in batch:
        # one vote per rollout: its best score, so that the order of its samples is nothing
        order = np.lexsort((groups, -np.where(np.isfinite(raw), raw, -np.inf)))
        _, first = np.unique(numbers(batch["all_rollout_ids"])[order], return_index=True)
        raw, groups = raw[order][first], groups[order][first]
    return compute_ragged_pass_rate(raw, groups, threshold=config.passrate_threshold)


# --- shells ---------------------------------------------------------------------------------------


def _is_logging_rank() -> bool:
    from megatron.core import mpu

    return mpu.get_tensor_model_parallel_rank() == 0 and mpu.is_pipeline_last_stage()


def _config(args: argparse.Namespace) -> TrainMetricsConfig:
    from megatron.core import mpu

    cp_size = max(1, mpu.get_context_parallel_world_size())
    return TrainMetricsConfig.from_args(
        args, cp_size=cp_size, cp_rank=mpu.get_context_parallel_rank() if cp_size > 1 else 0
    )


def gather_log_data(
    metric_name: str, args: argparse.Namespace, rollout_id: int, log_dict: dict[str, Any]
) -> dict[str, float] | None:
    """Reduces `log_dict` over data x context parallel ranks and logs it as `<metric_name>/<key>` at
    `rollout/step`. The dict on the source rank, None elsewhere.
    """
    reduced = _gathered(log_dict)
    if reduced is None:
        return None
    metrics: dict[str, Any] = {f"{metric_name}/{key}": value for key, value in reduced.items()}
    metrics["rollout/step"] = compute_rollout_step(args, rollout_id)
    logger.debug("%s %s: %s", metric_name, rollout_id, metrics)
    tracking.log(args, metrics, step_key="rollout/step")
    return metrics


def _gathered(log_dict: dict[str, Any]) -> dict[str, float] | None:
    """`log_dict` reduced over data x context parallel ranks on the source rank, None elsewhere."""
    from megatron.core import mpu

    return gather_and_reduce_log_dict(
        log_dict,
        dp_size=mpu.get_data_parallel_world_size(with_context_parallel=True),
        dp_src_rank=mpu.get_data_parallel_src_rank(with_context_parallel=True),
        dp_group=mpu.get_data_parallel_group_gloo(with_context_parallel=True),
    )


def log_rollout_data(
    rollout_id: int, args: argparse.Namespace, rollout_data: Mapping[str, Any]
) -> dict[str, float] | None:
    """Logs `rollout/<metric>` for every declared metric field of this rollout batch, then the
    panels that options ask for.

    Called by all ranks; those of tensor rank 0 and the last pipeline stage take part. Returns the
    metrics on the source rank, None elsewhere.
    """
    if not _is_logging_rank():
        return None
    config = _config(args)
    parts = phase_contributions(rollout_data, cp_size=config.cp_size, cp_rank=config.cp_rank)
    if args.log_correct_samples:
        parts.update(correct_sample_contributions(rollout_data, config=config))
    metrics = gather_log_data("rollout", args, rollout_id, parts)
    if metrics is not None and args.ci_test:
        check_ci(
            metrics,
            rollout_id,
            check_kl=not (args.ci_disable_kl_checker or args.use_rollout_routing_replay),
        )
    if args.log_multi_turn:
        log_multi_turn_data(rollout_id, args, rollout_data)
    if args.log_passrate:
        log_passrate(rollout_id, args, rollout_data)
    return metrics


def log_consistency(
    rollout_id: int,
    args: argparse.Namespace,
    rollout_data: Mapping[str, Any],
    *,
    ages_N: np.ndarray | None = None,
    compares_sampler: bool = True,
) -> dict[str, float] | None:
    """Logs `rollout/logprob_abs_diff/...`, `rollout/logprob_kl/...` and their like (see
    consistency.py), with their alarms, and staleness. Called by all ranks, before the
    weights change. RolloutDataError where the gap is above --logprob-diff-stop.

    ages_N: updates of the weights since each sample's oldest token, NaN where unknown.
    compares_sampler: the trainer's log-probs are of the weights that sampled, whatever the ages
    are.
    """
    if not _is_logging_rank():
        return None
    config = _config(args)
    parts = consistency.consistency_contributions(
        rollout_data,
        cp_size=config.cp_size,
        cp_rank=config.cp_rank,
        ages_N=None if compares_sampler else ages_N,
        masks_older=args.partial_rollout and args.mask_offpolicy_in_partial_rollout,
    )
    if ages_N is not None:
        parts |= consistency.staleness_contributions(ages_N)
    medians = _gathered(
        consistency.shift_contributions(
            rollout_data, cp_size=config.cp_size, cp_rank=config.cp_rank
        )
    )
    if (shift := consistency.shifted_by(medians or {})) is not None:
        parts["logprob_shift"] = consistency.shift_metric(shift)
    metrics = gather_log_data("rollout", args, rollout_id, parts)
    for alarm in consistency_alarms(metrics or {}, ConsistencyLimits.from_args(args)).values():
        logger.warning("rollout %d: %s", rollout_id, alarm)
    gap = gap_of_same_weights(metrics or {})
    if args.logprob_diff_stop is not None and gap is not None and not gap <= args.logprob_diff_stop:
        raise RolloutDataError(
            f"rollout {rollout_id}: trainer and engine disagree by {gap:.3g} nats a token on "
            "average, more than --logprob-diff-stop "
            f"{args.logprob_diff_stop:g}; the optimizer step was not taken. The dump of this rollout and `slime consistency` show the tokens."
        )
    return metrics


def check_ci(metrics: Mapping[str, float], rollout_id: int, *, check_kl: bool) -> None:
    """AssertionError where a healthy first rollout cannot look like this: policy unlike its
    reference, log-probs or entropy out of range.
    """
    policy, reference = metrics.get("rollout/log_probs"), metrics.get("rollout/ref_log_probs")
    if rollout_id == 0 and check_kl and policy is not None and reference is not None:
        assert abs(policy - reference) < 1e-8, (
            f"log_probs {policy} and ref_log_probs {reference} differ before the first step"
        )
    if policy is not None:
        assert -1 < policy < 0, f"rollout/log_probs is {policy}, expected in (-1, 0)"
    if metrics.get("rollout/entropy") is not None:
        assert 0 < metrics["rollout/entropy"] < 1, (
            f"rollout/entropy is {metrics['rollout/entropy']}, expected in (0, 1)"
        )


def log_multi_turn_data(
    rollout_id: int, args: argparse.Namespace, rollout_data: Mapping[str, Any]
) -> dict[str, float] | None:
    """Logs `multi_turn/...`: means over samples, and the phase's true max and min."""
    if not _is_logging_rank():
        return None
    return gather_log_data(
        "multi_turn", args, rollout_id, multi_turn_contributions(rollout_data, config=_config(args))
    )


def log_passrate(
    rollout_id: int, args: argparse.Namespace, rollout_data: Mapping[str, Any]
) -> dict[str, float] | None:
    """Logs `passrate/pass@k` of the whole rollout batch."""
    if not _is_logging_rank():
        return None
    rates = (
        pass_rates(rollout_data, config=_config(args))
        if rollout_data.get("raw_reward") is not None
        else {}
    )
    return gather_log_data(
        "passrate", args, rollout_id, {name: c.mean([rate], 1) for name, rate in rates.items()}
    )


def log_perf_data(
    rollout_id: int,
    args: argparse.Namespace,
    extra_metrics: dict[str, float] | None = None,
    *,
    seq_lens: Sequence[int] | None = None,
) -> dict[str, float] | None:
    """Logs `perf/<timer>_time` in seconds, and throughput in TFLOPs per GPU and tokens per second,
    on the primary rank. Resets timers on every rank. `seq_lens` as for `log_perf_data_raw`.
    """
    from megatron.core import mpu

    primary = _is_logging_rank() and mpu.get_data_parallel_rank(with_context_parallel=True) == 0
    return log_perf_data_raw(
        rollout_id, args, primary, extra_metrics=extra_metrics, seq_lens=seq_lens
    )
