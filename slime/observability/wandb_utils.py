"""Upstream's later path of slime.tracking.wandb_sink."""

from slime.tracking.wandb_sink import init_wandb_primary, init_wandb_secondary

__all__ = ["init_wandb_primary", "init_wandb_secondary"]
