"""Keeps the log-probs that the training step computes anyway, for a rollout that skips the log-prob
pass.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

_CAPTURED_LOG_PROBS: dict[int, torch.Tensor] | None = None
_LOOK: Callable[[], None] | None = None


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


@contextlib.contextmanager
def looked_at_log_probs(rollout_data: dict[str, Any], look: Callable[[], None]) -> Iterator[None]:
    """Inside, training runs. `look` is called once, before the first optimizer step, or at the end
    where there is none; `rollout_data` has "log_probs" by then, also where no pass computed them
    before.

    Nothing is kept for a batch that has them, that no engine sampled, or on a rank that computes no
    loss.
    """
    global _LOOK
    captures = (
        rollout_data.get("log_probs") is None and rollout_data.get("rollout_log_probs") is not None
    )
    if captures:
        enable_log_prob_capture()

    def store_and_look() -> None:
        captured = drain_captured_log_probs() if captures else {}
        if captured:
            positions = [int(position) for position in rollout_data["partition"]]
            if all(position in captured for position in positions):
                rollout_data["log_probs"] = [captured[position] for position in positions]
        look()

    _LOOK = store_and_look
    try:
        yield
        look_before_step()
    finally:
        _LOOK = None
        drain_captured_log_probs()


def look_before_step() -> None:
    """Calls what `looked_at_log_probs` was given, the first time. The training loop calls it when
    gradients are there and weights are as before.
    """
    global _LOOK
    look, _LOOK = _LOOK, None
    if look is not None:
        look()
