"""Upstream's later path of slime.utils.metric_utils."""

from slime.utils.metric_utils import (
    dict_add_prefix,
    compute_pass_rate,
    compute_statistics,
    compression_ratio,
    has_repetition,
    compute_rollout_step,
)

__all__ = [
    "compression_ratio",
    "compute_pass_rate",
    "compute_rollout_step",
    "compute_statistics",
    "dict_add_prefix",
    "has_repetition",
]
