"""Upstream's path of the two functions that start W&B."""

from slime.tracking import tracking, wandb_sink
from slime.utils.doors import open_door

open_door(__name__, tracking, wandb_sink)
