"""Upstream's path of slime.observability.logging_utils."""

from slime.observability.logging_utils import configure_logger, finish_tracking, init_tracking, log

__all__ = ["configure_logger", "finish_tracking", "init_tracking", "log"]
