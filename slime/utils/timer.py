"""Upstream's path of slime.observability.timer."""

from slime.observability.timer import Timer, inverse_timer, timer, with_defer

__all__ = ["Timer", "inverse_timer", "timer", "with_defer"]
