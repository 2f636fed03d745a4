"""Upstream's later path of slime.tracking.tensorboard_sink."""

from slime.tracking.tensorboard_sink import TensorboardAdapter as _TensorboardAdapter

__all__ = ["_TensorboardAdapter"]
