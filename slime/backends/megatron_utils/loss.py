"""Losses of one micro-batch, and the advantages of a rollout batch, on one Megatron rank. The
formulas are in `slime.algorithms`; here is what they are applied to: which logits rows, which ranks'
sums, which denominator. What a forward pass gives per sample is forward.py.

A batch is the dict that `get_batch` returns. Flat tensors hold the response tokens that this
context-parallel rank owns, sample after sample, [L]. Selection, never multiplication by zero, keeps
masked positions out, so that NaN or inf there changes nothing.

Three samples of two rollouts, A (samples 0 and 1) and B (sample 2), on two data-parallel ranks, one
micro-batch each; a token's loss is what the formula gave, 9 where nothing is trained:

                            rank 0                          rank 1
    samples                 0 (A)    1 (A)                  2 (B)
    response_lengths        3        2                      4
    loss_masks              [1 1 0]  [1 1]                  [1 0 1 1]
    rollout_mask_sums       4        4                      3           tokens of the whole rollout
    flat losses [L]         [1 3 9 2 2]                     [0.5 9 0.5 2]
    sum_of_sample_mean      (1+3)/4 + (2+2)/4 = 2           (0.5+0.5+2)/3 = 1
    loss for the schedule   2 * 1/2 * 2 = 2                 1 * 1/2 * 2 = 1
    values of the report    [0, 2]                          [0, 1]
    a maximum reported      3                               2

The schedule averages over the two ranks: 1.5, the mean over rollouts of the mean over their tokens.
The metric is (2 + 1) / 2 rollouts = 1.5, the maximum 3. With --calculate-per-token-loss the values
are [4, 8] and [3, 3], and the metric is 11 / 7 tokens.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core import mpu
from torch.utils.checkpoint import checkpoint

from slime.algorithms.advantages import distillation_advantages
from slime.algorithms.corrections import compute_sequence_kl, opsm_keep_mask
from slime.algorithms.kl import approximate_kl
from slime.algorithms.policy_loss import ClipConfig, PolicyLoss, clipped_value_loss
from slime.algorithms.ratios import importance_ratio
from slime.algorithms.reducers import repeat_per_token, select_masked, sum_per_sample
from slime.algorithms.table import LOSS_TYPES, LOSSES, estimator_named, formula_at
from slime.backends.megatron_utils import advantages as advantages_parts
from slime.backends.megatron_utils import forward
from slime.backends.megatron_utils.advantages import (
    compute_reference_kl,
    estimate_advantages,
    join_constants,
    split_per_sample,
    store_fields,
    whiten_advantages,
)
from slime.backends.megatron_utils.cp_utils import (
    check_lengths,
    concatenate,
    get_cp_size,
    get_response_layout,
    get_sum_of_sample_mean,
    required_field,
    sum_over_cp,
)
from slime.backends.megatron_utils.log_prob_capture import (  # noqa: F401  (upstream's names are found here)
    _maybe_capture_log_probs,
    drain_captured_log_probs,
    enable_log_prob_capture,
)
from slime.backends.megatron_utils.loss_config import LossConfig
from slime.backends.megatron_utils.off_policy import icepop_function, vanilla_tis_function  # noqa: F401
from slime.backends.megatron_utils.response_rows import (
    PackedResponses,
    compute_response_log_probs,
    squeeze_logits,
    take_rows,
)
from slime.data.context_parallel import ResponseLayout
from slime.exceptions import ConfigError, RolloutDataError
from slime.metrics.contributions import Contribution
from slime.metrics.step_metrics import StepMetric, pack_step_metrics
from slime.utils.doors import open_door
from slime.utils.misc import load_function
from slime.utils.ppo_utils import compute_policy_loss

Reducer = Callable[[torch.Tensor], torch.Tensor]
Metrics = dict[str, StepMetric]

ROLLOUT_TOP_P_TOKEN_KEYS = ("rollout_top_p_token_ids", "rollout_top_p_token_offsets")


def get_rollout_top_p_logprob_kwargs(
    args: argparse.Namespace, batch: dict[str, Any]
) -> dict[str, Any]:
    """Returns the nucleus arguments of `get_log_probs_and_entropy`: none for `rollout_top_p` 1.
    ValueError when the batch lacks them.
    """
    if not LossConfig.from_args(args).replays_nucleus:
        return {}
    ids, offsets = (batch.get(key) for key in ROLLOUT_TOP_P_TOKEN_KEYS)
    if ids is None or offsets is None:
        raise RolloutDataError(
            "--rollout-top-p is not 1, so the log-probs need "
            f"{' and '.join(ROLLOUT_TOP_P_TOKEN_KEYS)} to replay the nucleus, but the batch has "
            "not "
            "both. Let the engine return them, and a custom converter pass on what Sample has under these names, or sample with --rollout-top-p 1."
        )
    return {"top_p_token_ids": ids, "top_p_token_offsets": offsets}


# ---------------------------------------------------------------- losses


@dataclasses.dataclass(frozen=True)
class ResponseTokens:
    """The response tokens of a micro-batch on this rank: their layout, float masks [L], and mask
    sums of the full responses [N].
    """

    layout: ResponseLayout
    masks: torch.Tensor
    mask_sums: torch.Tensor

    @classmethod
    def of(cls, batch: dict[str, Any], device: torch.device) -> ResponseTokens:
        layout = get_response_layout(batch["total_lengths"], batch["response_lengths"])
        check_lengths(batch["loss_masks"], layout.response_lengths, name="loss_masks")
        full = concatenate(batch["loss_masks"]).to(device=device, dtype=torch.float32)
        samples = repeat_per_token(
            torch.arange(len(layout.response_lengths), device=device), layout.response_lengths
        )
        mask_sums = sum_per_sample(full, samples, num_samples=len(layout.response_lengths))
        masks = full if layout.whole else full.index_select(0, layout.response_indices.to(device))
        return cls(layout, masks, mask_sums)

    def select(self, values: Sequence[torch.Tensor], name: str) -> torch.Tensor:
        """Returns the flat field [L] with exact 0 at masked positions. RolloutDataError naming a
        sample with a wrong length.
        """
        check_lengths(values, self.layout.local_lengths, name=name)
        return select_masked(concatenate(values).to(self.masks.device), self.masks)

    def trained(self, flat: torch.Tensor) -> torch.Tensor:
        """Returns the entries of the flat field at trained tokens, detached: what a contribution is
        made of. Each token is on one context-parallel rank, so none counts twice.
        """
        return flat.detach()[self.masks != 0]

    def split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Returns the flat field per sample."""
        return split_per_sample(self.layout, flat)


def _current_log_probs(
    config: LossConfig,
    args: argparse.Namespace,
    batch: dict[str, Any],
    logits: torch.Tensor,
    *,
    with_entropy: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    packed = PackedResponses(
        batch["unconcat_tokens"],
        batch["total_lengths"],
        batch["response_lengths"],
        batch["loss_masks"],
        **(get_rollout_top_p_logprob_kwargs(args, batch) if config.replays_nucleus else {}),
    )
    return compute_response_log_probs(logits, config, packed, with_entropy=with_entropy)


def _pg_loss_reducer(
    config: LossConfig, batch: dict[str, Any], loss_masks: Sequence[torch.Tensor], default: Reducer
) -> Reducer:
    """Returns the reducer of the policy loss alone; every metric keeps the default one."""
    lengths = (batch["total_lengths"], batch["response_lengths"])
    per_token = config.calculate_per_token_loss
    denominators = batch.get("rollout_mask_sums")
    if config.custom_pg_loss_reducer_function_path is not None:
        function = load_function(config.custom_pg_loss_reducer_function_path)
        # upstream's contract has four arguments; one that also names `sample_denoms` can keep the
        # per-rollout mean exact
        extra = (
            {"sample_denoms": denominators}
            if "sample_denoms" in inspect.signature(function).parameters
            else {}
        )
        return function(*lengths, loss_masks, per_token, **extra)
    if estimator_named(config.advantage_estimator).constant_length and not per_token:
        length = config.dr_grpo_length or config.rollout_max_response_len
        if not length:
            raise ConfigError(
                "dr_grpo divides by a constant length: set --dr-grpo-length or "
                "--rollout-max-response-len."
            )
        return get_sum_of_sample_mean(*lengths, loss_masks, [float(length)] * len(loss_masks))
    if loss_masks is batch["loss_masks"]:
        return default
    return get_sum_of_sample_mean(*lengths, loss_masks, denominators, per_token)


def _correct_off_policy(
    args: argparse.Namespace,
    config: LossConfig,
    batch: dict[str, Any],
    tokens: ResponseTokens,
    pg_loss: torch.Tensor,
    train_log_probs: torch.Tensor,
) -> tuple[torch.Tensor, Sequence[torch.Tensor], Metrics]:
    """Returns (pg_loss, loss masks for it, per-token metrics) after TIS or the function that
    replaces it.
    """
    rollout_log_probs = tokens.select(
        required_field(batch, "rollout_log_probs", "--use-tis"), "rollout_log_probs"
    )
    path = config.custom_tis_function_path
    function: Callable[..., Any] = vanilla_tis_function if path is None else load_function(path)
    corrected, masks, metrics = function(
        args=args,
        pg_loss=pg_loss,
        train_log_probs=tokens.split(train_log_probs),
        rollout_log_probs=tokens.split(rollout_log_probs),
        loss_masks=batch["loss_masks"],
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
    )
    if not config.use_tis:  # only the metrics were asked for
        return pg_loss, batch["loss_masks"], metrics
    if path is not None and masks is not batch["loss_masks"]:
        # a correction may take tokens out, and puts none in that the batch does not train
        masks = [mask * (own != 0) for mask, own in zip(masks, batch["loss_masks"], strict=True)]
    return corrected, masks, metrics


def _token_policy_loss(
    estimator: str,
    clip: ClipConfig,
    ppo_kl: torch.Tensor,
    log_probs: torch.Tensor,
    advantages: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (loss, clip fraction) per token. The clipped loss is called by upstream's name, which
    users' code replaces in this module.
    """
    path = estimator_named(estimator).policy_loss
    if path is not None:
        own_loss: PolicyLoss = formula_at(path)
        return own_loss(ppo_kl, log_probs, advantages, clip)
    return compute_policy_loss(
        ppo_kl, advantages, clip.eps_clip, clip.eps_clip_high, clip.eps_clip_c
    )


def policy_loss_function(
    args: argparse.Namespace,
    batch: dict[str, Any],
    logits: torch.Tensor,
    sum_of_sample_mean: Reducer,
) -> tuple[torch.Tensor, Metrics]:
    """Returns (loss, metrics) of the policy: pg_loss - entropy_coef * entropy + kl_loss_coef * kl,
    each reduced over the micro-batch.

    Old log-probs are the engine's with `use_rollout_logprobs`, else `batch["log_probs"]`, else the
    current ones (ratio exactly 1). Metrics are detached scalars, reduced with the batch's own masks
    even where a correction rejects tokens from the loss.
    """
    config = LossConfig.from_args(args)
    tokens = ResponseTokens.of(batch, logits.device)
    log_probs, entropy = _current_log_probs(
        config, args, batch, logits, with_entropy=config.wants_entropy
    )
    log_probs = select_masked(log_probs, tokens.masks)
    _maybe_capture_log_probs(batch, tokens.split(log_probs))
    recorded = batch.get("log_probs")
    train_log_probs = (
        log_probs.detach() if recorded is None else tokens.select(recorded, "log_probs")
    )
    old_log_probs = train_log_probs
    if config.use_rollout_logprobs:
        old_log_probs = tokens.select(
            required_field(batch, "rollout_log_probs", "--use-rollout-logprobs"),
            "rollout_log_probs",
        )
    advantages = tokens.select(batch["advantages"], "advantages")

    ppo_kl = old_log_probs - log_probs
    estimator = estimator_named(config.advantage_estimator)
    if estimator.sequence_ratio or config.use_opsm:
        sequence_kl = compute_sequence_kl(
            ppo_kl, tokens.masks, tokens.layout.sample_indices, tokens.mask_sums, sum_over_cp
        )
    if estimator.sequence_ratio:
        ppo_kl = repeat_per_token(sequence_kl, tokens.layout.local_lengths)
    pg_loss, pg_clipfrac = _token_policy_loss(
        config.advantage_estimator, config.clip, ppo_kl, log_probs, advantages
    )

    # a metric per token is reduced like the loss; one with a reduction of its own is one line:
    # per_token["ppo_kl/max"] = maximum(tokens.trained(ppo_kl))
    per_token: Metrics = {"pg_clipfrac": pg_clipfrac, "ppo_kl": ppo_kl}
    if config.use_opsm:
        keep = opsm_keep_mask(
            sequence_kl, advantages, tokens.layout.local_lengths, delta=config.opsm_delta
        )
        pg_loss = select_masked(pg_loss, keep)
        per_token["opsm_clipfrac"] = 1 - keep
    loss_masks = batch["loss_masks"]
    if config.use_tis or config.get_mismatch_metrics:
        pg_loss, loss_masks, tis_metrics = _correct_off_policy(
            args, config, batch, tokens, pg_loss, train_log_probs
        )
        per_token |= {"ois": importance_ratio(-ppo_kl), **tis_metrics}

    loss = pg_loss = _pg_loss_reducer(config, batch, loss_masks, sum_of_sample_mean)(pg_loss)
    terms = {"pg_loss": pg_loss}
    if entropy is not None:
        terms["entropy_loss"] = sum_of_sample_mean(entropy)
        if config.entropy_coef != 0:
            loss = loss - config.entropy_coef * terms["entropy_loss"]
    if config.use_kl_loss:
        reference = tokens.select(
            required_field(batch, "ref_log_probs", "--use-kl-loss"), "ref_log_probs"
        )
        ratio = importance_ratio(log_probs - old_log_probs) if config.use_unbiased_kl else None
        kl = approximate_kl(log_probs, reference, kind=config.kl_loss_type, importance_ratio=ratio)
        terms["kl_loss"] = sum_of_sample_mean(kl)
        if config.kl_loss_coef != 0:
            loss = loss + config.kl_loss_coef * terms["kl_loss"]
    if batch.get("rollout_log_probs") is not None:
        rollout_log_probs = tokens.select(batch["rollout_log_probs"], "rollout_log_probs")
        per_token["train_rollout_logprob_abs_diff"] = (train_log_probs - rollout_log_probs).abs()
    if batch.get("opd_reverse_kl") is not None:
        per_token["opd_reverse_kl"] = tokens.select(batch["opd_reverse_kl"], "opd_reverse_kl")

    metrics: Metrics = {name: value.detach() for name, value in {"loss": loss, **terms}.items()}
    for name, values in per_token.items():
        metrics[name] = (
            values if isinstance(values, Contribution) else sum_of_sample_mean(values.detach())
        )
    return loss, metrics


def value_loss_function(
    args: argparse.Namespace,
    batch: dict[str, Any],
    logits: torch.Tensor,
    sum_of_sample_mean: Reducer,
) -> tuple[torch.Tensor, Metrics]:
    """Returns (loss, metrics) of a critic: the clipped squared error of its values [1, T, 1]
    against `batch["returns"]`.
    """
    config = LossConfig.from_args(args)
    tokens = ResponseTokens.of(batch, logits.device)
    rows = take_rows(squeeze_logits(logits), tokens.layout.row_indices)
    values = select_masked(rows.squeeze(-1), tokens.masks)
    old_values, returns = (
        tokens.select(batch["values"], "values"),
        tokens.select(batch["returns"], "returns"),
    )
    losses, clipfrac = clipped_value_loss(values, old_values, returns, value_clip=config.value_clip)
    loss = sum_of_sample_mean(losses)
    return loss, {
        "value_loss": loss.detach(),
        "value_clipfrac": sum_of_sample_mean(clipfrac.detach()),
    }


def sft_loss_function(
    args: argparse.Namespace,
    batch: dict[str, Any],
    logits: torch.Tensor,
    sum_of_sample_mean: Reducer,
) -> tuple[torch.Tensor, Metrics]:
    """Returns (loss, metrics) of supervised fine-tuning: minus the reduced log-probs of the
    response. How a rollout would be sampled (temperature, nucleus) has no part in it.
    """
    config = dataclasses.replace(LossConfig.from_args(args), loss_type="sft_loss")
    log_probs, _ = _current_log_probs(config, args, batch, logits, with_entropy=False)
    loss = -sum_of_sample_mean(log_probs)
    return loss, {"loss": loss.detach()}


def _loss_function_of(config: LossConfig, role: str) -> Callable[..., tuple[torch.Tensor, Metrics]]:
    if role == "critic":
        return value_loss_function
    if config.loss_type not in LOSSES:
        raise ConfigError(
            f"unknown loss type {config.loss_type!r}. Use one of {', '.join(LOSS_TYPES)}."
        )
    path = LOSSES[config.loss_type].function
    if path is not None:
        return formula_at(path)
    if config.custom_loss_function_path is None:
        raise ConfigError(f"--loss-type {config.loss_type} needs --custom-loss-function-path.")
    return load_function(config.custom_loss_function_path)


def loss_function(
    args: argparse.Namespace,
    batch: dict[str, Any],
    num_microbatches: int,
    step_global_batch_size: int,
    logits: torch.Tensor,
    *,
    role: str = "actor",
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Returns (loss, normaliser, report) of one micro-batch, scaled for Megatron's schedule; the
    report is that of `pack_step_metrics`.

    A critic minimizes its value loss, whatever the policy's `loss_type` is.

    Megatron divides by max(normaliser, 1) and by `num_microbatches` and averages gradients over DP
    x CP; in per-token mode it divides the summed gradient once, by the normaliser summed over DP x
    CP. So the gradient of a step is that of the sum over rollouts / `step_global_batch_size`, or in
    per-token mode of the sum over tokens / number of loss tokens. In the report, values[0] is the
    number of loss tokens in per-token mode and 0 otherwise, the others are this rank's sums, which
    the step divides the same way. A loss gives its metrics as scalars, which are such sums, or as
    contributions.
    """
    config = LossConfig.from_args(args)
    function = _loss_function_of(config, role)
    per_token = config.calculate_per_token_loss
    reducer = get_sum_of_sample_mean(
        batch["total_lengths"],
        batch["response_lengths"],
        batch["loss_masks"],
        batch.get("rollout_mask_sums"),
        per_token,
    )
    if config.recompute_loss_function:
        loss, metrics = checkpoint(
            function, args, batch, logits, reducer, use_reentrant=False, preserve_rng_state=False
        )
    else:
        loss, metrics = function(args, batch, logits, reducer)
    if logits.requires_grad and not loss.requires_grad:
        # nothing to train on this rank: the backward pass must still run, or the ranks that share
        # its collectives hang
        loss = loss + logits[:, :0].sum()
    if per_token:
        masks = concatenate(batch["loss_masks"])
        normaliser = (masks != 0).sum().to(device=logits.device, dtype=torch.int32)
        first = normaliser
        loss = loss * get_cp_size()
    else:
        normaliser = torch.ones((), dtype=torch.int32, device=logits.device)
        first = torch.zeros((), device=logits.device)
        loss = loss * (
            num_microbatches
            / step_global_batch_size
            * mpu.get_data_parallel_world_size(with_context_parallel=True)
        )
    return loss, normaliser, pack_step_metrics(first, metrics)


# ---------------------------------------------------------------- advantages


def compute_advantages_and_returns(args: argparse.Namespace, rollout_data: dict[str, Any]) -> None:
    """Adds "kl", "advantages" and "returns" to `rollout_data`, per sample [R], CP-local; on the
    last pipeline stage only.

    Every rank of DP x CP must call it, also without samples: whitening is a collective. "kl" keeps
    the raw KL, in nats.
    """
    if not mpu.is_pipeline_last_stage():
        return
    config = LossConfig.from_args(args)
    layout = get_response_layout(rollout_data["total_lengths"], rollout_data["response_lengths"])
    log_probs = rollout_data.get(
        "rollout_log_probs" if config.use_rollout_logprobs else "log_probs"
    )
    kl = compute_reference_kl(config, layout, rollout_data, log_probs)
    store_fields(rollout_data, layout, kl=kl)
    if config.custom_advantage_function_path is not None:
        load_function(config.custom_advantage_function_path)(args, rollout_data)
        reason = (
            f"--custom-advantage-function-path {config.custom_advantage_function_path} must "
            "set, and what follows"
        )
        advantages, returns = (
            join_constants(layout, required_field(rollout_data, name, reason), name)
            for name in ("advantages", "returns")
        )
    else:
        advantages, returns = estimate_advantages(config, layout, rollout_data, kl)
    if config.use_opd:
        advantages = concatenate(
            apply_opd_kl_to_advantages(
                args, rollout_data, split_per_sample(layout, advantages), log_probs
            )
        )
    if config.normalize_advantages:
        advantages = whiten_advantages(layout, rollout_data, advantages)
    store_fields(rollout_data, layout, advantages=advantages, returns=returns)


def apply_opd_kl_to_advantages(
    args: argparse.Namespace,
    rollout_data: dict[str, Any],
    advantages: list[torch.Tensor],
    student_log_probs: Sequence[torch.Tensor] | None,
) -> list[torch.Tensor]:
    """Returns advantages - opd_kl_coef * (student - teacher log-prob); also writes them into the
    list `advantages` and adds "opd_reverse_kl".

    Without student log-probs nothing happens. ValueError when the teacher's are missing.
    """
    if student_log_probs is None:
        return advantages
    teacher = required_field(rollout_data, "teacher_log_probs", "--use-opd")
    coef = LossConfig.from_args(args).opd_kl_coef
    check_lengths(teacher, [len(values) for values in student_log_probs], name="teacher_log_probs")
    pairs = [
        distillation_advantages(advantage, student, reference.to(student.device), coef=coef)
        for advantage, student, reference in zip(
            advantages, student_log_probs, teacher, strict=True
        )
    ]
    advantages[:] = [advantage for advantage, _ in pairs]
    rollout_data["opd_reverse_kl"] = [reverse_kl for _, reverse_kl in pairs]
    return advantages


# what upstream's callers import from here, or replace here, and lives there
open_door(__name__, forward, advantages_parts)
