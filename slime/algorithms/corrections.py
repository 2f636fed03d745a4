"""Corrections for the gap between the policy that sampled and the policy that trains. All tensors
are [T] unless said otherwise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch

from slime.algorithms.ratios import importance_ratio
from slime.algorithms.reducers import repeat_per_token, select_masked, sum_per_sample


@dataclasses.dataclass(frozen=True)
class BandConfig:
    """The band of accepted ratios train / rollout: [low, high]."""

    low: float = 0.0
    high: float = 2.0


@dataclasses.dataclass(frozen=True)
class Correction:
    """`weights` multiply the policy loss; `metrics` are per-token values under the name they are
    reported as.
    """

    weights: torch.Tensor
    metrics: dict[str, torch.Tensor]


def truncated_importance_weights(
    train_log_probs: torch.Tensor, rollout_log_probs: torch.Tensor, band: BandConfig
) -> Correction:
    """Returns weights clamp(pi_train / pi_rollout, low, high): truncated importance sampling (TIS;
    Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training";
    truncation after Ionides 2008).
    """
    ratio = importance_ratio(train_log_probs - rollout_log_probs)
    weights = ratio.clamp(band.low, band.high)
    return Correction(weights, _describe(ratio, weights))


def icepop_weights(
    train_log_probs: torch.Tensor, rollout_log_probs: torch.Tensor, band: BandConfig
) -> Correction:
    """Returns the ratio pi_train / pi_rollout inside the band and 0 outside: IcePop (Ling team
    2025, arXiv:2510.18855).
    """
    ratio = importance_ratio(train_log_probs - rollout_log_probs)
    inside = (ratio >= band.low) & (ratio <= band.high)
    weights = torch.where(inside, ratio, 0)
    return Correction(weights, _describe(ratio, weights))


def _describe(ratio: torch.Tensor, weights: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        "tis": ratio,
        "tis_clipfrac": (weights != ratio).to(ratio.dtype),
        "tis_abs": (ratio - 1).abs(),
    }


CORRECTIONS: dict[str, Callable[[torch.Tensor, torch.Tensor, BandConfig], Correction]] = {
    "tis": truncated_importance_weights,
    "icepop": icepop_weights,
}


def compute_sequence_kl(
    old_minus_new_T: torch.Tensor,
    masks_T: torch.Tensor,
    sample_indices_T: torch.Tensor,
    mask_sums_N: torch.Tensor,
    sum_over_ranks: Callable[[torch.Tensor], torch.Tensor] = lambda values: values,
) -> torch.Tensor:
    """Returns [N]: the masked mean over each response of old - new log-prob, so that exp(-it) is
    GSPO's length-normalized sequence ratio (arXiv:2507.18071). Differentiable.

    The token tensors hold this rank's tokens; `mask_sums_N` counts the full responses;
    `sum_over_ranks` adds the ranks' parts.
    """
    sums = sum_per_sample(
        select_masked(old_minus_new_T, masks_T) * masks_T,
        sample_indices_T,
        num_samples=mask_sums_N.numel(),
    )
    return sum_over_ranks(sums) / mask_sums_N.clamp(min=1)


def opsm_keep_mask(
    sequence_kl_N: torch.Tensor,
    advantages_T: torch.Tensor,
    lengths_N: Sequence[int],
    *,
    delta: float,
) -> torch.Tensor:
    """Returns [T], 0.0 for tokens of negative advantage in a response whose sequence KL is above
    `delta`, else 1.0: off-policy sequence masking (DeepSeek-V3.2, arXiv:2512.02556).
    """
    far = repeat_per_token(sequence_kl_N.detach() > delta, lengths_N)
    return torch.where((advantages_T < 0) & far, 0.0, 1.0)
