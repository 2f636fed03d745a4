"""`RayTrainGroup`: all ranks of one training role, addressed together."""

from __future__ import annotations

import argparse
import os
import shutil
from typing import Any

from slime.exceptions import SlimeError
from slime.ray import actors
from slime.ray.placement import bundle_strategy, device_options, require_room
from slime.ray.train_worker import MEGATRON_ACTOR, TrainWorker
from slime.ray.utils import STOP_TIMEOUT_S, add_default_ray_env_vars, wait_for
from slime.supervision.heart import ROLLOUT_MANAGER
from slime.supervision.records import end_by_force, expect_end
from slime.typing import ActorHandle


def rank_names(role: str, world_size: int) -> list[str]:
    """The roles of the processes of a group, in rank order."""
    return [f"{role} rank {rank}" for rank in range(world_size)]


class RayTrainGroup:
    """The train actors of one role (actor or critic), one a device, in rank order."""

    def __init__(
        self,
        args: argparse.Namespace,
        num_nodes: int,
        num_gpus_per_node: int,
        pg: tuple,
        num_gpus_per_actor: float = 1,
        role: str = "actor",
        with_ref: bool = False,
        with_opd_teacher: bool = False,
        actor_path: str = MEGATRON_ACTOR,
    ) -> None:
        self.args, self.role, self.with_ref, self.with_opd_teacher = (
            args,
            role,
            with_ref,
            with_opd_teacher,
        )
        self.world_size = num_nodes * num_gpus_per_node
        self.num_published = 0  # versions that the engines got
        self._place = (actor_path, pg, num_gpus_per_actor)
        self._handlers: list[Any] = []
        self._allocate()

    def _allocate(self) -> None:
        actor_path, (group, order, _), fraction = self._place
        handlers = self._handlers = []
        master_addr = master_port = None
        for rank, name in enumerate(self.names):
            options = device_options(fraction) | {
                "scheduling_strategy": bundle_strategy(group, order[rank]),
                "runtime_env": {"env_vars": add_default_ray_env_vars(self.args.train_env_vars)},
            }
            handlers.append(
                actors.start(
                    TrainWorker,
                    name,
                    actor_path,
                    self.world_size,
                    rank,
                    master_addr,
                    master_port,
                    **options,
                )
            )
            if rank == 0:
                ((master_addr, master_port),) = wait_for(
                    [handlers[0].call.remote("get_master_addr_and_port")],
                    what=f"{self.role}: the first rank's process",
                    timeout_s=self.args.startup_timeout,
                    names=[name],
                    option="--startup-timeout",
                    meanwhile=self._require_room,
                )

    def _all(
        self, method: str, *args: object, timeout_s: float | None = None, **kwargs: object
    ) -> list[Any]:
        refs = [handler.call.remote(method, *args, **kwargs) for handler in self._handlers]
        return self._wait(refs, method, timeout_s or self.args.step_timeout)

    def _wait(
        self, refs: list[Any], doing: str, timeout_s: float, *, option: str = "--step-timeout"
    ) -> list[Any]:
        return wait_for(
            refs,
            what=f"{self.role}: {doing}",
            timeout_s=timeout_s,
            names=[*self.names, ROLLOUT_MANAGER],
            option=option,
            meanwhile=self._require_room,
        )

    def _require_room(self) -> None:
        require_room(self._place[1][0])

    @property
    def names(self) -> list[str]:
        """The roles of the ranks' processes, in rank order."""
        return rank_names(self.role, self.world_size)

    @property
    def is_running(self) -> bool:
        """Whether there are processes: not between `end` and `recreate`."""
        return bool(self._handlers)

    def create(self, rollout_manager: ActorHandle | None = None) -> list[int]:
        """Builds the models; returns each rank's first rollout to run. A rollout manager that
        cannot start ends the wait.
        """
        return self._init(self.args, rollout_manager)

    def _init(self, args: argparse.Namespace, rollout_manager: ActorHandle | None) -> list[int]:
        refs = [
            handler.call.remote("init", args, self.role, self.with_ref, self.with_opd_teacher)
            for handler in self._handlers
        ]
        if rollout_manager is not None:
            refs.append(rollout_manager.ready.remote())
        start_ids = self._wait(
            refs, "loading", self.args.startup_timeout, option="--startup-timeout"
        )[: self.world_size]
        if rollout_manager is not None:
            self.set_rollout_manager(rollout_manager)
        return start_ids

    def async_train(
        self,
        rollout_id: int,
        rollout_data_ref: list,
        external_data: list | dict[str, Any] | None = None,
        *,
        weight_updates_since_start: int | None = None,
    ) -> list[Any]:
        """Starts one rollout's training on every rank; returns the references. A list of external
        data is one entry a rank.

        weight_updates_since_start: how many versions were published since the rollout was begun;
        None: not known.
        """
        per_rank = (
            external_data if isinstance(external_data, list) else [external_data] * self.world_size
        )
        refs = []
        for handler, data in zip(self._handlers, per_rank, strict=True):
            options = {
                "external_data": data,
                "weight_updates_since_start": weight_updates_since_start,
            }
            refs.append(handler.call.remote("train", rollout_id, rollout_data_ref, **options))
        return refs

    def finish_train(self, refs: list[Any], rollout_id: int) -> list[Any]:
        """What each rank returned, of the references of `async_train`."""
        return self._wait(refs, f"train of rollout {rollout_id}", self.args.step_timeout)

    def save_model(self, rollout_id: int, force_sync: bool = False) -> None:
        """Writes a checkpoint; returns when it is published."""
        self._all("save_model", rollout_id, force_sync=force_sync)

    def update_weights(self) -> None:
        """Publishes the weights to every engine as a new version."""
        self._all("update_weights")
        self.num_published += 1

    def count_update(self) -> None:
        """The ranks note an update that the engines have got from the ranks before these."""
        self._all("update_weights", sends=False)

    def send_weights_again(self) -> None:
        """Publishes the weights to new engines as the version that those before had."""
        self._all("send_weights_again")

    def onload(self) -> None:
        self._all("wake_up")

    def offload(self) -> None:
        self._all("sleep")

    def state_bytes(self) -> int:
        """At least as many as `publish_state` writes."""
        return sum(self._all("state_bytes"))

    def async_publish_state(self, folder: str, iteration: int) -> list[Any]:
        """Begins to write the ranks' whole state below `folder` as `iteration`; returns the
        references.
        """
        return [
            handler.call.remote("publish_state", folder, iteration) for handler in self._handlers
        ]

    def finish_publish_state(self, refs: list[Any]) -> None:
        """Returns when the state is written. `SaveError` where it does not fit."""
        self._wait(refs, "publish_state", self.args.step_timeout)

    def suspend(self) -> None:
        """Writes the ranks' whole state below the run folder and ends their processes, until
        `recreate`.
        """
        self.finish_publish_state(self.async_publish_state(self._suspended_dir, 0))
        self.end()

    def recreate(
        self,
        rollout_manager: ActorHandle,
        folder: str | None = None,
        iteration: int | None = None,
    ) -> None:
        """Starts the ranks again with the state `iteration` below `folder`, by default with that of
        `suspend`. Nothing where they run.
        """
        if self._handlers:
            return
        self._allocate()
        folder = folder or self._suspended_dir
        whole = {
            "load": folder,
            "critic_load": folder,
            "ckpt_step": iteration,
            "finetune": False,
            "no_load_optim": False,
            "no_load_rng": False,
        }
        self._init(argparse.Namespace(**{**vars(self.args), **whole}), rollout_manager)

    def start_again(self, rollout_manager: ActorHandle) -> None:
        """Starts the ranks again as they were first started."""
        self._allocate()
        self._init(self.args, rollout_manager)

    def skip_logged(self, offset: int) -> None:
        """The ranks log nothing that the metrics file holds from `offset` on."""
        self._all("skip_logged", offset)

    @property
    def _suspended_dir(self) -> str:
        return os.path.join(os.path.abspath(self.args.run_dir), "suspended", self.role)

    def finish_recording(self) -> None:
        """Waits until what the ranks recorded is on the disk."""
        self._all("finish_recording")

    def clear_memory(self) -> None:
        self._all("clear_memory")

    def set_rollout_manager(self, rollout_manager: ActorHandle) -> None:
        self._all("set_rollout_manager", rollout_manager)

    def release(self) -> None:
        """Ends all ranks: they leave their process group, then their processes end. What `suspend`
        wrote goes with them.
        """
        self.end()
        shutil.rmtree(self._suspended_dir, ignore_errors=True)

    def end_now(self) -> None:
        """Ends all ranks by force, whatever they do, and returns when those of this machine are
        gone.
        """
        handlers, self._handlers = self._handlers, []
        left = end_by_force(self.names)
        for handler in handlers:
            actors.kill(handler)
        if left:
            raise SlimeError(f"{self.role}: the processes {left} do not end")

    def end(self) -> None:
        """The ranks leave their process group, then their processes end."""
        handlers, self._handlers = self._handlers, []
        for name in self.names if handlers else ():
            expect_end(name)
        try:
            refs = [handler.call.remote("stop") for handler in handlers]
            if refs:
                self._wait(refs, "stop", STOP_TIMEOUT_S)
        finally:
            for handler in handlers:
                actors.kill(handler)
