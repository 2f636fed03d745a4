"""Truncated importance sampling and IcePop in the form of a --custom-tis-function-path: keyword
call, masks may be returned changed.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

from slime.algorithms.corrections import CORRECTIONS
from slime.backends.megatron_utils.cp_utils import concatenate
from slime.backends.megatron_utils.loss_config import LossConfig

Metrics = dict[str, torch.Tensor]


def _band_correction(
    kind: str,
    args: argparse.Namespace,
    pg_loss: torch.Tensor,
    train_log_probs: Sequence[torch.Tensor],
    rollout_log_probs: Sequence[torch.Tensor],
    loss_masks: Sequence[torch.Tensor],
):
    correction = CORRECTIONS[kind](
        concatenate(train_log_probs).to(pg_loss.device),
        concatenate(rollout_log_probs).to(pg_loss.device),
        LossConfig.from_args(args).tis_band,
    )
    return pg_loss * correction.weights, loss_masks, correction.metrics


def vanilla_tis_function(
    args: argparse.Namespace,
    *,
    pg_loss: torch.Tensor,
    train_log_probs: Sequence[torch.Tensor],
    rollout_log_probs: Sequence[torch.Tensor],
    loss_masks: Sequence[torch.Tensor],
    **kwargs: object,
) -> tuple[torch.Tensor, Sequence[torch.Tensor], Metrics]:
    """Returns (pg_loss * clamp(train / rollout ratio, tis_clip_low, tis_clip), the masks, per-token
    metrics tis, tis_clipfrac, tis_abs).
    """
    return _band_correction("tis", args, pg_loss, train_log_probs, rollout_log_probs, loss_masks)


def icepop_function(
    args: argparse.Namespace,
    *,
    pg_loss: torch.Tensor,
    train_log_probs: Sequence[torch.Tensor],
    rollout_log_probs: Sequence[torch.Tensor],
    loss_masks: Sequence[torch.Tensor],
    **kwargs: object,
) -> tuple[torch.Tensor, Sequence[torch.Tensor], Metrics]:
    """Returns what `vanilla_tis_function` does, with weight 0 outside the band in place of its
    edge. Use it as --custom-tis-function-path.
    """
    return _band_correction("icepop", args, pg_loss, train_log_probs, rollout_log_probs, loss_masks)
