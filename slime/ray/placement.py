"""Assigns devices to actors: one placement group, one bundle per device, trainers first, engines
after them (or on the same devices).

A device is a GPU where the machine has one, else a CPU core; flags that say "gpus" count devices.
"""

from __future__ import annotations

import argparse
from typing import Any, cast

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from slime.accelerator import get_accelerator
from slime.exceptions import ConfigError, SlimeError
from slime.ray import actors
from slime.ray.utils import wait_for

PLACEMENT_TIMEOUT_S = 60.0
# Shares of one device, so that a trainer, a critic and a colocated engine fit on it together.
TRAIN_FRACTION = 0.4
ENGINE_FRACTION = 0.2
Placement = tuple[Any, list[int], list[Any]]


def device_resource() -> str:
    """The Ray resource that one bundle holds: "GPU", or "CPU" where no CUDA device is used."""
    return get_accelerator().ray_resource


def device_options(fraction: float) -> dict[str, Any]:
    """Ray options for an actor that takes `fraction` of a bundle's device."""
    if device_resource() == "GPU":
        return {"num_gpus": fraction, "num_cpus": fraction}
    return {"num_cpus": fraction, "num_gpus": 0}


def _get_placement_group_layout(args: argparse.Namespace) -> tuple[int, int]:
    """(devices to ask for, index of the first rollout device); reads the seven sizes and switches
    that upstream reads, nothing else.
    """
    actor = args.actor_num_nodes * args.actor_num_gpus_per_node
    rollout = 0 if args.rollout_external else args.rollout_num_gpus
    if args.debug_train_only:
        return actor, 0
    if args.debug_rollout_only:
        return (rollout or actor, 0)
    if args.colocate:
        return max(actor, rollout), 0
    return actor + rollout, actor


@ray.remote(num_cpus=0)
class _Probe:
    def where(self) -> tuple[str, Any]:
        ids = ray.get_gpu_ids()
        return ray.util.get_node_ip_address(), ids[0] if ids else 0


def _check_resources(num_devices: int) -> None:
    resource = device_resource()
    have = ray.cluster_resources().get(resource, 0)
    if num_devices > have:
        raise ConfigError(
            f"this job asks for more devices than Ray has.\n  requested: {num_devices} "
            f"{resource}\n  available: {have:g} {resource}\n"
            "Lower --actor-num-gpus-per-node or --rollout-num-gpus, use --colocate, or (on one machine without GPUs) raise --num-cpus."
        )


def _create_placement_group(num_devices: int) -> Placement:
    """(placement group, bundle indices ordered by node and device, device ids in that order);
    (None, [], []) for 0 devices.
    """
    if num_devices == 0:
        return None, [], []
    _check_resources(num_devices)
    bundle = {"GPU": 1, "CPU": 1} if device_resource() == "GPU" else {"CPU": 1}
    group = placement_group([bundle] * num_devices, strategy="PACK")
    ready, _ = ray.wait([group.ready()], timeout=PLACEMENT_TIMEOUT_S)
    if not ready:
        raise ConfigError(
            f"Ray could not place {num_devices} x {bundle} within {PLACEMENT_TIMEOUT_S:.0f} s; it "
            f"has {ray.available_resources()}"
        )
    if device_resource() == "CPU":
        return group, list(range(num_devices)), list(range(num_devices))
    probes = [
        cast(Any, _Probe)
        .options(num_gpus=0.01, scheduling_strategy=bundle_strategy(group, index))
        .remote()
        for index in range(num_devices)
    ]
    asked = [probe.where.remote() for probe in probes]
    places = wait_for(asked, what="finding the devices", timeout_s=PLACEMENT_TIMEOUT_S, option=None)
    for probe in probes:
        ray.kill(probe)
    order = sorted(
        range(num_devices),
        key=lambda index: (
            tuple(int(part) for part in places[index][0].split(".")),
            places[index][1],
        ),
    )
    return group, order, [places[index][1] for index in order]


def require_room(group: PlacementGroup | None) -> None:
    """SlimeError where a node is gone and those that are left do not hold the run's devices: Ray
    places the group's lost bundles again as soon as there is room, and would wait for ever.
    """
    if group is None or placement_group_table(group)["state"] == "CREATED":
        return
    resource, num_devices = device_resource(), group.bundle_count
    nodes = ray.nodes()
    have = sum(node["Resources"].get(resource, 0) for node in nodes if node["Alive"])
    if num_devices <= have:
        return
    gone = [node["NodeManagerAddress"] for node in nodes if not node["Alive"]]
    raise SlimeError(
        f"{len(gone)} node(s) of the Ray cluster are gone ({', '.join(gone)}), and the others do "
        f"not hold this run.\n  needed: {num_devices} {resource}\n  left: {have:g} {resource}\n"
        "Start a node in its place (ray start --address ...), or continue with --load on fewer "
        "devices: a checkpoint is loaded under any layout."
    )


def bundle_strategy(
    group: PlacementGroup | None, bundle_index: int
) -> PlacementGroupSchedulingStrategy | str:
    """The strategy that puts an actor into that bundle; Ray's own choice without a group."""
    if group is None:
        return "DEFAULT"
    return PlacementGroupSchedulingStrategy(
        placement_group=group,
        placement_group_bundle_index=bundle_index,
        placement_group_capture_child_tasks=True,
    )


def create_placement_groups(args: argparse.Namespace) -> dict[str, Placement]:
    """{"actor", "critic", "rollout"} -> (placement group, bundle order, device ids); one group
    serves all roles.
    """
    num_devices, rollout_offset = _get_placement_group_layout(args)
    if actors.is_local():
        place = (None, list(range(num_devices)), list(range(num_devices)))
        return {
            "actor": place,
            "critic": place,
            "rollout": (None, place[1][rollout_offset:], place[2][rollout_offset:]),
        }
    group, order, ids = _create_placement_group(num_devices)
    whole = (group, order, ids)
    return {
        "actor": whole,
        "critic": whole,
        "rollout": (group, order[rollout_offset:], ids[rollout_offset:]),
    }
