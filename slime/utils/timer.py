"""Upstream's path of slime.tracking.timer."""

from slime.tracking.timer import Timer, inverse_timer, timer, with_defer

__all__ = ["Timer", "inverse_timer", "timer", "with_defer"]
