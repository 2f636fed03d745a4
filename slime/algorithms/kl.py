"""Estimators of KL(policy || base) from the log-probs of sampled tokens (Schulman 2020,
http://joschu.net/blog/kl-approx.html).
"""

from __future__ import annotations

import torch

from slime.algorithms.ratios import MAX_LOG_RATIO, MAX_RATIO
from slime.algorithms.table import KL_ESTIMATORS, formula_at


def k1(d: torch.Tensor) -> torch.Tensor:
    """Returns log pi - log pi_base: unbiased, high variance, may be negative."""
    return d


def k2(d: torch.Tensor) -> torch.Tensor:
    """Returns (log pi - log pi_base)^2 / 2: biased, low variance; its gradient is that of the true
    KL.
    """
    return d.square() / 2


def k3(d: torch.Tensor) -> torch.Tensor:
    """Returns exp(-d) - 1 + d: unbiased, low variance, never negative. A token that the base finds
    e^MAX_LOG_RATIO times as likely has the value at that bound and no gradient, where exp would
    overflow.
    """
    d = d.clamp(min=-MAX_LOG_RATIO)
    return torch.exp(-d) - 1 + d


def approximate_kl(
    log_probs: torch.Tensor,
    log_probs_base: torch.Tensor,
    *,
    kind: str,
    importance_ratio: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns the per-token KL estimate in nats, same shape, computed in fp32 (fp64 stays fp64).

    `importance_ratio` = pi / pi_old makes the estimate unbiased for samples of an older policy
    (DeepSeek-V3.2, arXiv:2512.02556). Where that ratio is at its bound (`slime.algorithms.ratios`),
    the token has no gradient. Raises ValueError for a kind that is not in
    `KL_ESTIMATORS`.
    """
    if kind not in KL_ESTIMATORS:
        raise ValueError(f"unknown KL estimator {kind!r}. Use one of {', '.join(KL_ESTIMATORS)}.")
    estimator = KL_ESTIMATORS[kind]
    dtype = torch.promote_types(log_probs.dtype, torch.float32)
    kl = formula_at(estimator.formula)(log_probs.to(dtype) - log_probs_base.to(dtype))
    if importance_ratio is not None:
        kl = importance_ratio * torch.where(importance_ratio < MAX_RATIO, kl, kl.detach())
    return kl if estimator.bound is None else kl.clamp(-estimator.bound, estimator.bound)
