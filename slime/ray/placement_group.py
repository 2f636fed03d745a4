"""Who runs on which device: one placement group, one bundle a device, trainers first, engines after
them (or on top of them).

A device is a GPU where the machine has one, else a CPU core; flags that say "gpus" count devices.
"""

from __future__ import annotations

import argparse
import logging
from typing import TYPE_CHECKING, Any, cast

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from slime.accelerator import get_accelerator
from slime.algorithms.table import ESTIMATORS
from slime.backends.megatron_utils.checkpoint_files import iteration_folder
from slime.config.resume import evaluates_only
from slime.exceptions import ConfigError
from slime.ray import actors
from slime.ray.utils import add_default_ray_env_vars, wait_for
from slime.typing import ActorHandle

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

PLACEMENT_TIMEOUT_S = 60.0
# Shares of one device, so that a trainer, a critic and a colocated engine fit on it together.
TRAIN_FRACTION = 0.4
ENGINE_FRACTION = 0.2

logger = logging.getLogger(__name__)

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


def create_rollout_manager(args: argparse.Namespace, pg: Placement) -> Any:
    """The RolloutManager actor, still starting: engines and trainers load side by side."""
    from slime.ray.rollout import RolloutManagerActor

    options = {
        "num_cpus": 0,
        "max_concurrency": 4,
        "runtime_env": {"env_vars": add_default_ray_env_vars()},
    }
    return actors.start(RolloutManagerActor, args, pg, **options)


def allocate_train_group(
    args: argparse.Namespace,
    placement: Placement,
    *,
    role: str = "actor",
    with_ref: bool = False,
    with_opd_teacher: bool = False,
) -> Any:
    """The train actors of one role; engines and a critic share their devices by fractions."""
    from slime.ray.actor_group import RayTrainGroup
    from slime.utils.arguments import parse_megatron_role_args

    if args.megatron_config_path is not None:
        args = parse_megatron_role_args(args, args.megatron_config_path, role)
    return RayTrainGroup(
        args,
        args.actor_num_nodes,
        args.actor_num_gpus_per_node,
        placement,
        num_gpus_per_actor=TRAIN_FRACTION,
        role=role,
        with_ref=with_ref,
        with_opd_teacher=with_opd_teacher,
    )


def create_actor_model(
    args: argparse.Namespace, placements: dict[str, Placement], rollout_manager: ActorHandle
) -> tuple[Any, int]:
    """(actor group, first rollout to run): models built, weights loaded, schedule layout told to
    the rollout manager.
    """
    with_ref = args.kl_coef != 0 or args.use_kl_loss
    with_teacher = args.use_opd and args.opd_type == "megatron"
    group = allocate_train_group(
        args, placements["actor"], role="actor", with_ref=with_ref, with_opd_teacher=with_teacher
    )
    start_ids = group.create(rollout_manager=rollout_manager)
    if len(set(start_ids)) != 1:
        raise ConfigError(
            "ranks loaded different checkpoints: they would start at rollouts "
            f"{sorted(set(start_ids))}. Check --load on every node."
        )
    return group, start_ids[0]


def create_training_models(
    args: argparse.Namespace, placements: dict[str, Placement], rollout_manager: ActorHandle
) -> tuple[Any, Any | None, int]:
    """(actor group, critic group or None, first rollout to run)."""
    actor, start = create_actor_model(args, placements, rollout_manager)
    critic = None
    if ESTIMATORS[args.advantage_estimator].needs_critic and not evaluates_only(args):
        critic = allocate_train_group(
            _critic_args(args, start), placements["critic"], role="critic"
        )
        _check_critic_start(args, start, set(critic.create()))
    return actor, critic, start


def _critic_args(args: argparse.Namespace, actor_start: int) -> Any:
    """`args` with which a critic resumes after the same rollout as its policy, also where its own
    latest checkpoint is a newer one.
    """
    if actor_start == 0:
        return args
    if args.critic_load is None:
        logger.warning(
            (
                "--load %s has no critic: the policy goes on after rollout %d with a new critic, "
                "whose "
                "values begin untrained. Give --critic-load."
            ),
            args.load,
            actor_start - 1,
        )
    elif args.ckpt_step is None and iteration_folder(args.critic_load, actor_start - 1).is_dir():
        return argparse.Namespace(**{**vars(args), "ckpt_step": actor_start - 1})
    return args


def _check_critic_start(
    args: argparse.Namespace, actor_start: int, critic_starts: set[int]
) -> None:
    """ConfigError where a critic that was loaded belongs to another rollout than the policy; a new
    critic may join a trained policy.
    """
    if args.critic_load and max(critic_starts) > 0 and critic_starts != {actor_start}:
        raise ConfigError(
            f"the policy (--load {args.load}) would start at rollout {actor_start}, the critic "
            f"(--critic-load {args.critic_load}) at "
            f"{max(critic_starts)}. Choose the same iteration with --ckpt-step, or leave --critic-load out for a new critic."
        )
