"""The actors of a run: rollout manager and training groups, each on its devices.

Also upstream's path of slime.ray.placement, which assigns the devices.
"""

from __future__ import annotations

import argparse
import logging
from typing import Any

from ray.actor import ActorHandle

from slime.algorithms.table import ESTIMATORS
from slime.backends.megatron_utils.checkpoint_files import iteration_folder
from slime.config.resume import evaluates_only
from slime.config.yaml_file import parse_megatron_role_args
from slime.exceptions import ConfigError
from slime.ray import actors, placement
from slime.ray.actor_group import RayTrainGroup
from slime.ray.placement import TRAIN_FRACTION, Placement
from slime.ray.rollout_process import RolloutManagerActor
from slime.ray.utils import add_default_ray_env_vars
from slime.utils.doors import open_door

logger = logging.getLogger(__name__)


def create_rollout_manager(args: argparse.Namespace, pg: Placement, keep: str | None = None) -> Any:
    """The RolloutManager actor, still starting: engines and trainers load side by side. keep: the
    folder of what another process needs to go on in its place.
    """
    options = {
        "num_cpus": 0,
        "max_concurrency": 4,
        "runtime_env": {"env_vars": add_default_ray_env_vars()},
    }
    return actors.start(RolloutManagerActor, args, pg, keep, **options)


def allocate_train_group(
    args: argparse.Namespace,
    placement: Placement,
    *,
    role: str = "actor",
    with_ref: bool = False,
    with_opd_teacher: bool = False,
) -> Any:
    """The train actors of one role; engines and a critic share their devices by fractions."""
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
    """(actor group, first rollout to run): models are built, weights loaded, and the rollout
    manager has the parallel config of the trainers.
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


open_door(__name__, placement)
