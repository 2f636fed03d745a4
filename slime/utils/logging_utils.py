"""Upstream's path of slime.tracking.tracking."""

from slime.tracking.tracking import configure_logger, finish_tracking, init_tracking, log

__all__ = ["configure_logger", "finish_tracking", "init_tracking", "log"]
