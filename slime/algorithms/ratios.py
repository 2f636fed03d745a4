"""Importance ratios from differences of log-probs, bounded so that one far token cannot spoil a
step.
"""

from __future__ import annotations

import torch

# Nats. e^20 = 4.9e8: far outside every trust region, and small enough that sums and products of
# such ratios stay finite in fp32.
MAX_LOG_RATIO = 20.0
MAX_RATIO = float(torch.tensor(MAX_LOG_RATIO).exp())


def importance_ratio(log_ratio: torch.Tensor) -> torch.Tensor:
    """Returns exp(log_ratio), the log ratio clamped to +-MAX_LOG_RATIO first: value and gradient
    are finite whatever the log ratio is, and the gradient of a clamped one is exactly 0. Without
    the clamp exp overflows beyond 88, and inf times a gradient of 0 is NaN for the whole model.
    """
    return torch.exp(log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
