"""The rollout manager of a run, whichever process it is, and the rollouts that were asked of it
(--recovery-interval).

Where the manager's process ends, Ray ends its engines, the router and the lock with it, and what it
put into the object store is gone. So the driver takes over each rollout's shards as soon as it is
handed out.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray

from slime.exceptions import ProcessDied, SlimeError
from slime.ray import actors
from slime.ray.placement import Placement, require_room
from slime.ray.utils import LOCK_OF_UPDATES, reason_of_death, wait_for
from slime.supervision.heart import ROLLOUT_MANAGER
from slime.supervision.records import end_by_force
from slime.utils.http_utils import get_rollout_num_engines
from slime.utils.misc import Box

ROUTER, GRADER = "the router", "grader"
TAKEN_S = 30.0  # that shards which were handed out may take to arrive


@dataclasses.dataclass
class PendingRollout:
    """A rollout that was asked for. shards: the driver's own, once they are there."""

    rollout_id: int
    shards: concurrent.futures.Future[Any] = dataclasses.field(
        default_factory=concurrent.futures.Future
    )

    def take(self, ref: Any) -> None:
        """Begins to take the rollout over, which `ref` will hold."""
        self.shards = concurrent.futures.Future()
        threading.Thread(target=self._take, args=(ref, self.shards), daemon=True).start()

    @staticmethod
    def _take(ref: Any, shards: concurrent.futures.Future[Any]) -> None:
        try:
            boxes = actors.get(ref)
            mine = boxes and [
                Box(actors.put(actors.get(box.inner)), box.num_trained) for box in boxes
            ]
        except Exception as error:  # noqa: BLE001 - raised where the rollout is waited for
            shards.set_exception(error)
        else:
            shards.set_result(mine)

    @property
    def is_there(self) -> bool:
        """Whether the driver has the shards."""
        return self.shards.done() and self.shards.exception() is None

    def result(self, timeout_s: float) -> Any:
        """The shards. What the manager raised; ProcessDied where it has ended; SlimeError after
        --step-timeout.
        """
        try:
            return self.shards.result(timeout_s)
        except concurrent.futures.TimeoutError:
            raise SlimeError(
                f"rollout {self.rollout_id}: the rollout manager gave no answer within "
                f"--step-timeout {timeout_s:g} s; raise it if that is too short"
            ) from None
        except ray.exceptions.RayActorError as error:
            died = ProcessDied(
                f"rollout {self.rollout_id}: the process died. {reason_of_death(error)}"
            )
            died.whose = ROLLOUT_MANAGER
            raise died from error


class ManagerSeat:
    """Stands for the manager's handle; `handle` is that of the process that is the manager now.
    start(folder): a new one, which keeps its state there, with engines in the placement.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        start: Callable[[str], Any],
        folder: Path,
        placement: Placement,
    ) -> None:
        self._args, self._start, self._folder = args, start, str(folder)
        self._placement = placement
        self.handle = start(self._folder)
        self.last_rollout = -1  # that was handed out
        self._pending: dict[int, PendingRollout] = {}

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_") or method == "handle":
            raise AttributeError(method)
        return getattr(self.handle, method)

    def __reduce__(self) -> tuple:
        return _as_it_is, (self.handle,)

    def begin(self, rollout_id: int) -> PendingRollout:
        """Asks for a rollout."""
        pending = self._pending[rollout_id] = PendingRollout(rollout_id)
        pending.take(self.handle.generate.remote(rollout_id))
        return pending

    def shards(self, pending: PendingRollout) -> Any:
        """The shards of a rollout. What the manager raised; ProcessDied where it has ended."""
        shards = pending.result(self._args.step_timeout)
        self._pending.pop(pending.rollout_id, None)
        self.last_rollout = max(self.last_rollout, pending.rollout_id)
        return shards

    def end(self) -> None:
        """Ends the manager's process, where it has not ended, and those that end with it."""
        engines = [f"engine {rank}" for rank in range(get_rollout_num_engines(self._args))]
        left = end_by_force([ROLLOUT_MANAGER, LOCK_OF_UPDATES, ROUTER, GRADER, *engines])
        if left:
            raise SlimeError(f"the processes {left} of the rollout manager do not end")
        actors.kill(self.handle)

    def replace(self) -> tuple[str, int]:
        """A new process in place of one that has ended, with its engines, and the state after the
        last rollout that was handed out. Returns (the name of its start in the ledger, its first
        rollout).
        """
        waiting = [pending.shards for pending in self._pending.values()]
        concurrent.futures.wait(waiting, timeout=TAKEN_S)
        there = [number for number, pending in self._pending.items() if pending.is_there]
        last = max([self.last_rollout, *there])
        self.handle = self._start(self._folder)
        limit = self._args.startup_timeout
        wait_for(
            [self.handle.ready.remote()],
            what="starting the engines again",
            timeout_s=limit,
            option="--startup-timeout",
            meanwhile=lambda: require_room(self._placement[0]),
        )
        (start,) = wait_for(
            [self.handle.go_on.remote(last)],
            what="restoring the rollout manager",
            timeout_s=limit,
            option="--startup-timeout",
        )
        return start, last + 1

    def ask_again(self) -> None:
        """Asks for the rollouts again that were not handed out."""
        for number, pending in sorted(self._pending.items()):
            if not pending.is_there:
                pending.take(self.handle.generate.remote(number))


def _as_it_is(handle: Any) -> Any:
    return handle
