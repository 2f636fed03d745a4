"""Upstream's path of the training ranks' metrics."""

from slime.metrics.perf import log_perf_data_raw
from slime.metrics.train_metrics import (
    gather_log_data,
    log_multi_turn_data,
    log_passrate,
    log_perf_data,
)

__all__ = ["gather_log_data", "log_multi_turn_data", "log_passrate", "log_perf_data", "log_perf_data_raw"]
