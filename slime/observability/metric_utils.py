"""Upstream's later path of slime.metrics.statistics."""

from slime.metrics.statistics import (
    compression_ratio,
    compute_pass_rate,
    compute_rollout_step,
    compute_statistics,
    dict_add_prefix,
    has_repetition,
)

__all__ = [
    "compression_ratio",
    "compute_pass_rate",
    "compute_rollout_step",
    "compute_statistics",
    "dict_add_prefix",
    "has_repetition",
]
