"""Upstream's later path of slime.observability.tensorboard_sink."""

from slime.observability.tensorboard_sink import TensorboardAdapter as _TensorboardAdapter

__all__ = ["_TensorboardAdapter"]
