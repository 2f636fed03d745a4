"""Checks the placement of engines before any engine is started."""

from __future__ import annotations

from slime.exceptions import ConfigError


def validate_server_group_gpu_indices(
    *,
    worker_type: str,
    gpu_offset: int,
    num_gpus_per_engine: int,
    num_gpus_per_engine_on_node: int,
    num_engines: int,
    num_available_gpus: int,
    rollout_num_gpus: int,
    rollout_num_gpus_per_engine: int,
) -> None:
    """Returns None if `num_engines` engines fit into the placed devices from `gpu_offset` on.
    Raises ConfigError (a ValueError) with every number.
    """
    required = gpu_offset + num_engines * num_gpus_per_engine_on_node
    if num_engines == 0 or (
        gpu_offset >= 0 and num_gpus_per_engine_on_node > 0 and required <= num_available_gpus
    ):
        return
    numbers = dict(
        worker_type=worker_type,
        gpu_offset=gpu_offset,
        num_gpus_per_engine=num_gpus_per_engine,
        num_gpus_per_engine_on_node=num_gpus_per_engine_on_node,
        num_engines=num_engines,
        num_available_gpus=num_available_gpus,
        rollout_num_gpus=rollout_num_gpus,
        rollout_num_gpus_per_engine=rollout_num_gpus_per_engine,
        required_gpu_slots=required,
    )
    listing = ", ".join(f"{name}={value}" for name, value in numbers.items())
    raise ConfigError(
        f"the engines do not fit into the placed devices: {listing}, "
        f"len(reordered_gpu_ids)={num_available_gpus}. "
        "Lower --rollout-num-gpus or --rollout-num-gpus-per-engine, or give the job more devices."
    )
