"""Keeps the log-probs that the training step computes anyway, for a rollout that skips the log-prob
pass.

Upstream's losses have no argument for it, so what is captured stands in this module, between
`enable_log_prob_capture` and the drain.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_CAPTURED_LOG_PROBS: dict[int, torch.Tensor] | None = None


def enable_log_prob_capture() -> None:
    """Starts keeping the log-probs that the policy loss computes, by position in the rollout batch,
    until they are drained.
    """
    global _CAPTURED_LOG_PROBS
    _CAPTURED_LOG_PROBS = {}


def drain_captured_log_probs() -> dict[int, torch.Tensor]:
    """Returns position -> log-probs [R] on CPU (CP-local) and stops capturing; {} when
    it was off.
    """
    global _CAPTURED_LOG_PROBS
    captured, _CAPTURED_LOG_PROBS = _CAPTURED_LOG_PROBS, None
    return captured or {}


def _maybe_capture_log_probs(batch: dict[str, Any], log_probs: Sequence[torch.Tensor]) -> None:
    """Keeps the first log-probs of each position of `batch["partition"]` while capturing is on."""
    if _CAPTURED_LOG_PROBS is None or batch.get("partition") is None:
        return
    for position, values in zip(batch["partition"], log_probs, strict=True):
        _CAPTURED_LOG_PROBS.setdefault(int(position), values.detach().cpu())


def take_captured_log_probs(positions: Sequence[int]) -> list[torch.Tensor] | None:
    """Returns the captured log-probs of these positions, in their order, and stops capturing; None
    where one of them has none.
    """
    captured = drain_captured_log_probs()
    if not captured or any(position not in captured for position in positions):
        return None
    return [captured[position] for position in positions]
