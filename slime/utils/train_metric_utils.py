"""Upstream's path of the training ranks' metrics."""

from slime.metrics import perf, train_metrics
from slime.utils.doors import open_door

open_door(__name__, perf, train_metrics)
