"""`TrainRayActor`: one training rank as a Ray actor, before any backend is chosen."""

from __future__ import annotations

import abc
import argparse
import datetime
import os
from typing import Any

import torch.distributed as dist

from slime.accelerator import get_accelerator
from slime.accelerator.memory import clear_memory
from slime.accelerator.process_groups import (
    init_gloo_group,
    loopback_store,
    set_gloo_group,
    stay_on_loopback,
)
from slime.ray import actors
from slime.ray.ray_actor import RayActor
from slime.ray.utils import wait_for
from slime.tracking.tracking import skip_logged
from slime.typing import ActorHandle
from slime.utils.misc import is_loopback


class TrainRayActor(RayActor):
    """One rank of a training process group. Rank 0 chooses the address at which all ranks meet."""

    def __init__(
        self, world_size: int, rank: int, master_addr: str | None, master_port: int | None
    ) -> None:
        self.world_size, self.rank = world_size, rank
        if master_addr is None or master_port is None:
            master_addr, master_port = self._get_current_node_ip_and_free_port(
                start_port=20000 + (os.getpid() * 7) % 20000
            )
        self.master_addr, self.master_port = master_addr, master_port
        if is_loopback(str(master_addr)):
            stay_on_loopback()
        device_ids = actors.gpu_ids()
        os.environ |= {
            "MASTER_ADDR": str(master_addr),
            "MASTER_PORT": str(master_port),
            "WORLD_SIZE": str(world_size),
            "RANK": str(rank),
            "LOCAL_RANK": str(device_ids[0] if device_ids else 0),
        }

    def init(
        self,
        args: argparse.Namespace,
        role: str,
        with_ref: bool = False,
        with_opd_teacher: bool = False,
    ) -> int:
        """Joins the process group. Subclasses build the model and return the first
        rollout to run.
        """
        self.args, self.role, self.with_ref, self.with_opd_teacher = (
            args,
            role,
            with_ref,
            with_opd_teacher,
        )
        accelerator = get_accelerator()
        accelerator.set_device(int(os.environ["LOCAL_RANK"]))
        timeout = datetime.timedelta(minutes=args.distributed_timeout_minutes)
        place: dict[str, Any] = {}
        if is_loopback(str(self.master_addr)):
            store = loopback_store(
                str(self.master_addr), int(self.master_port), self.rank, self.world_size, timeout
            )
            place = {"store": store, "rank": self.rank, "world_size": self.world_size}
        dist.init_process_group(
            backend=args.distributed_backend or accelerator.communication_backend,
            timeout=timeout,
            **place,
        )
        init_gloo_group()
        return 0

    def set_rollout_manager(self, rollout_manager: ActorHandle) -> None:
        """Keeps the handle; rank 0 sends the manager the train parallel config, by which samples
        are split over data-parallel ranks.
        """
        self.rollout_manager = rollout_manager
        if self.rank == 0:
            reply = rollout_manager.set_train_parallel_config.remote(self.train_parallel_config)
            wait_for(
                [reply],
                what="sending the train parallel config to the rollout manager",
                timeout_s=self.args.step_timeout,
            )

    def skip_logged(self, offset: int) -> None:
        """Logs no value that the metrics file holds, from `offset` on, already: what an earlier
        process of this rank has logged of a step that is trained again.
        """
        skip_logged(offset)

    def clear_memory(self) -> None:
        """Gives cached device memory back."""
        clear_memory()

    def stop(self) -> None:
        """Leaves the process group; the actor ends after it."""
        set_gloo_group(None)
        if dist.is_initialized():
            dist.destroy_process_group()

    @property
    @abc.abstractmethod
    def train_parallel_config(self) -> dict[str, int]:
        """What the rollout side needs to split samples for these ranks."""

    @abc.abstractmethod
    def sleep(self) -> None: ...

    @abc.abstractmethod
    def wake_up(self) -> None: ...

    @abc.abstractmethod
    def train(
        self,
        rollout_id: int,
        rollout_data_ref: list,
        external_data: dict[str, Any] | None = None,
        *,
        weight_updates_since_start: int | None = None,
    ) -> Any: ...

    @abc.abstractmethod
    def save_model(self, rollout_id: int, force_sync: bool = False) -> None: ...

    @abc.abstractmethod
    def update_weights(self, *, sends: bool = True) -> None: ...
