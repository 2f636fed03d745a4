"""Upstream's later path of the checks, the conversion and the dump of a rollout."""

from slime.data.structure import validate_rollout_id_annotated, validate_rollout_routed_experts_for_replay
from slime.data.tensorize import tensorize_rollout_data_for_training
from slime.files.rollout_dump import load_debug_rollout_data, save_debug_rollout_data

__all__ = [
    "load_debug_rollout_data",
    "save_debug_rollout_data",
    "tensorize_rollout_data_for_training",
    "validate_rollout_id_annotated",
    "validate_rollout_routed_experts_for_replay",
]
