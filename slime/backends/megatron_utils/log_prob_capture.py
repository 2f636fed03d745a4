"""Keeps the log-probs that the training step computes anyway, for a rollout that skips the log-prob pass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

_CAPTURED_LOG_PROBS: dict[int, torch.Tensor] | None = None


def enable_log_prob_capture() -> None:
    """Starts keeping the log-probs that the policy loss computes, by position in the rollout batch, until they are drained."""
    global _CAPTURED_LOG_PROBS
    _CAPTURED_LOG_PROBS = {}


def drain_captured_log_probs() -> dict[int, torch.Tensor]:
    """Returns position -> log-probs [R] on CPU (CP-local) and stops capturing; {} when it was off."""
    global _CAPTURED_LOG_PROBS
    captured, _CAPTURED_LOG_PROBS = _CAPTURED_LOG_PROBS, None
    return captured or {}


def _maybe_capture_log_probs(batch: dict[str, Any], log_probs: Sequence[torch.Tensor]) -> None:
    """Keeps the first log-probs of each position of `batch["partition"]` while capturing is on."""
    if _CAPTURED_LOG_PROBS is None or batch.get("partition") is None:
        return
    for position, values in zip(batch["partition"], log_probs, strict=True):
        _CAPTURED_LOG_PROBS.setdefault(int(position), values.detach().cpu())


@contextlib.contextmanager
def captured_log_probs(rollout_data: dict[str, Any]) -> Iterator[None]:
    """Inside, training runs; afterwards `rollout_data` has "log_probs" also where no pass computed them before.

    Nothing is kept for a batch that has them, that no engine sampled, or on a rank that computes no loss.
    """
    if rollout_data.get("log_probs") is not None or rollout_data.get("rollout_log_probs") is None:
        yield
        return
    enable_log_prob_capture()
    try:
        yield
    finally:
        captured = drain_captured_log_probs()
    positions = [int(position) for position in rollout_data["partition"]]
    if captured and all(position in captured for position in positions):
        rollout_data["log_probs"] = [captured[position] for position in positions]
