"""Starts the training ranks and the rollout manager again when one dies or freezes, and the run goes
on (--recovery-interval).

Every N rollouts the ranks publish their whole state, in memory or, where that has no room, in the
run folder. The driver remembers what they have done since, with the shards that were handed out:

    rollout 4    train, update weights, publish     state 5, since then: nothing
    rollout 5    train, update weights              state 5, since then: train 5, update
    rollout 6    train <- rank 1 dies               all ranks end, start with state 5, do "train 5,
                                                    update" again, then train 6

What is done again changes the ranks alone: engines get nothing, and what the metrics file holds is
not logged again. With the manager its engines end: new ones get the weights that those before had,
from the ranks if these have them still, else from ranks that are brought there as above.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from slime.exceptions import ConfigError, NothingLeft, ProcessDied, SaveError, SlimeError
from slime.ray.actor_group import rank_names
from slime.ray.cluster_folder import memory_folder
from slime.ray.manager_seat import ROUTER, ManagerSeat, PendingRollout
from slime.ray.placement import Placement
from slime.ray.run_watch import ADVICE, CAUSE_S, RunWatch
from slime.ray.train_states import Point, TrainStates
from slime.ray.utils import LOCK_OF_UPDATES, slime_error_of, wait_for
from slime.supervision.heart import ROLLOUT_MANAGER
from slime.supervision.records import end_by_force
from slime.supervision.watch import Healer, Loss

# The manager is of no use without them, and they end with it: whichever is heard of first.
WITH_MANAGER = (ROLLOUT_MANAGER, ROUTER, LOCK_OF_UPDATES)
# So many losses in one rollout end the run.
MAX_LOSSES = 3
# Ranks that end because of the first do so within this time.
SETTLE_S = 0.5
T = TypeVar("T")
Started = tuple[Any, Any | None, int]  # groups of ranks: policy, critic; the first rollout
# (name of the manager's start in the ledger, its first rollout)
OnManager = Callable[[str, int], None]
logger = logging.getLogger(__name__)


class NoHealing:
    """Without --recovery-interval: what fails, fails."""

    def start_manager(self, start: Callable[[str | None], Any], placement: Placement) -> Any:
        """The rollout manager's handle, or what stands for it. start(folder of its state): one with
        engines in the placement.
        """
        return start(None)

    def create(self, start: Callable[[], Started]) -> Started:
        """What `start` returns: the groups, started."""
        return start()

    def begin(self, first_rollout: int, on_manager: OnManager) -> None:
        """The run begins. on_manager: hears of each new rollout manager."""

    def attempts(
        self, again: Callable[[], object], *, rollout_id: int
    ) -> Iterator[contextlib.AbstractContextManager[object]]:
        """Trains a rollout: `for attempt in attempts(...): with attempt: ...`, until a block has
        ended without the loss of a process. again: what brings ranks that are as before it to where
        the block has brought them.
        """
        yield contextlib.nullcontext()

    def do(self, action: Callable[[], T], again: Callable[[], object] | None = None) -> T:
        """What `action` returns, which asks something of the ranks. again: as in `attempts`, where
        it changes their state.
        """
        return action()

    def ask(self, action: Callable[[], T]) -> T:
        """What `action` returns, which asks something of the manager alone."""
        return action()

    def generate(self, manager: Any, rollout_id: int) -> Any:
        """What `shards` waits for: a reference."""
        return manager.generate.remote(rollout_id)

    def shards(self, asked: Any, rollout_id: int, timeout_s: float) -> Any:
        """The shards of a rollout that `generate` asked for."""
        return wait_for([asked], what=f"rollout {rollout_id}", timeout_s=timeout_s)[0]

    def wait(self, asked: Any, rollout_id: int, timeout_s: float) -> None:
        """Returns when `shards` need not wait any more."""
        wait_for([asked], what=f"rollout {rollout_id}", timeout_s=timeout_s)

    def update(self, group: Any) -> None:
        """The policy's weights become the engines' next version."""
        group.update_weights()

    def publish(self, rollout_id: int, *, is_first: bool = False) -> None:
        """Begins to write the ranks' state, where that is due after this rollout. is_first: it is,
        since the run begins after it.
        """

    def sleep_engines(self, action: Callable[[], object]) -> None:
        """Does `action`, by which engines give their memory back."""
        action()

    def wake_engines(self, action: Callable[[], object]) -> None:
        """Does `action`, by which they take it again."""
        action()

    def suspend(self, groups: Sequence[Any], *, ends: bool) -> None:
        """The ranks give their device's memory back. ends: their processes end, with their state
        written.
        """
        for group in groups:
            if ends:
                group.suspend()
            else:
                group.offload()

    def resume(self, groups: Sequence[Any], manager: Any, *, ends: bool) -> None:
        """They can train again."""
        for group in groups:
            if ends:
                group.recreate(manager)
            else:
                group.onload()

    def unless_with_manager(self, otherwise: Healer) -> Healer:
        """Who takes care of the loss of a process that ends with the manager."""
        return otherwise

    def metrics(self) -> dict[str, float]:
        """What was healed since the last call."""
        return {}

    def close(self) -> None:
        """Removes the states; the run is over."""


class _Attempt:
    """A block that may fail because a process was lost: keeps what it raised."""

    error: Exception | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, stack: object) -> bool:
        if isinstance(error, Exception):
            self.error = error
        return self.error is not None


class RunHealer(NoHealing):
    """Hears of losses, and heals when the ranks or the manager are needed next."""

    def __init__(self, args: argparse.Namespace, run_folder: str | None) -> None:
        self._args = args
        memory = None if run_folder is None else memory_folder(run_folder)
        self._states = TrainStates(args, memory)
        self._seat: ManagerSeat | None = None
        self._on_manager: OnManager | None = None  # once the run has begun
        self._groups: list[Any] = []
        self._point: Point | None = None
        self._since: list[tuple[str, Callable[[], object]]] = []
        self._has_updated = False  # the engines have got weights
        self._is_awake = self._engines_are_awake = True
        self._rollout_id: int | None = None
        self._num_losses = 0  # in this rollout
        self._num_healed = {"training": 0, "manager": 0}
        self._is_lost = threading.Event()
        self._losses: list[Loss] = []
        # what a heal that was interrupted by a further loss has left to do
        self._is_torn = False  # ranks have done a part of something
        self._owes_manager = self._owes_weights = False
        self._ends_manager = False
        self._has_given_up = False

    @staticmethod
    def from_args(args: argparse.Namespace, watch: RunWatch) -> NoHealing:
        """One that hears of losses from `watch`; `NoHealing` without --recovery-interval."""
        if not args.recovery_interval or args.debug_rollout_only:
            return NoHealing()
        healer = RunHealer(args, watch.run_folder)
        for kind in ("actor rank", "critic rank", *WITH_MANAGER):
            watch.subscribe(kind, healer.lose)
        watch.subscribe("engine", healer.unless_with_manager())
        return healer

    # --- what the watch tells ---------------------------------------------------------------------

    def lose(self, loss: Loss) -> bool:
        """A rank or the manager is dead. Called in the watch's thread; whoever waits heals."""
        if self._has_given_up or (loss.role in WITH_MANAGER and self._on_manager is None):
            return False
        if self._ends_manager and loss.role in WITH_MANAGER:
            return True  # one of those that are being ended
        self._losses.append(loss)
        self._is_lost.set()
        return True

    def unless_with_manager(self, otherwise: Healer = lambda loss: False) -> Healer:
        """Who takes care of a process that ends with the manager: a new manager starts its own."""
        return lambda loss: self._has_lost_manager() or self._owes_manager or otherwise(loss)

    def _has_lost_manager(self) -> bool:
        return any(loss.role in WITH_MANAGER for loss in self._losses)

    # --- what the loops ask -----------------------------------------------------------------------

    def start_manager(self, start: Callable[[str | None], Any], placement: Placement) -> Any:
        folder = self._states.place_of_manager()
        self._seat = ManagerSeat(self._args, start, folder, placement)
        return self._seat

    def create(self, start: Callable[[], Started]) -> Started:
        while True:
            try:
                policy, critic, first = start()
            except Exception as error:  # noqa: BLE001 - Ray has many types for the consequences
                self._require_loss(error)
                self._count_loss()
                if left := end_by_force(self._rank_names()):
                    raise SlimeError(f"the training processes {left} do not end") from error
                self._forget_losses()
            else:
                self._groups = [group for group in (critic, policy) if group is not None]
                return policy, critic, first

    def begin(self, first_rollout: int, on_manager: OnManager) -> None:
        assert self._seat is not None
        self._seat.last_rollout = first_rollout - 1
        self._on_manager = on_manager

    def attempts(
        self, again: Callable[[], object], *, rollout_id: int
    ) -> Iterator[contextlib.AbstractContextManager[object]]:
        if rollout_id != self._rollout_id:
            self._rollout_id, self._num_losses = rollout_id, 0
        yield from self._attempts(changes=True)
        self._since.append(("train", again))

    def do(self, action: Callable[[], T], again: Callable[[], object] | None = None) -> T:
        result = self._until_done(action, changes=again is not None)
        if again is not None:
            self._since.append(("update", again))
        return result

    def _until_done(self, action: Callable[[], T], *, changes: bool = False) -> T:
        """changes: `action` changes the ranks' state."""
        for attempt in self._attempts(changes=changes):
            with attempt:
                result = action()
        return result

    def _attempts(self, *, changes: bool) -> Iterator[_Attempt]:
        """Blocks until one has ended without the loss of a process. changes: they change the ranks'
        state.
        """
        while True:
            attempt = _Attempt()
            try:
                if self._is_lost.is_set():
                    self._heal()
                self._settle()
            except Exception as error:  # noqa: BLE001 - Ray has many types for the consequences
                self._require_loss(error)
                continue
            yield attempt
            if attempt.error is None:
                return
            self._is_torn = self._is_torn or changes
            self._require_loss(attempt.error)

    def generate(self, manager: Any, rollout_id: int) -> PendingRollout:
        return self.ask(lambda: manager.begin(rollout_id))

    def shards(self, asked: Any, rollout_id: int, timeout_s: float) -> Any:
        assert self._seat is not None
        seat = self._seat
        return self.ask(lambda: seat.shards(asked))

    def wait(self, asked: Any, rollout_id: int, timeout_s: float) -> None:
        self.ask(lambda: asked.result(timeout_s))

    def ask(self, action: Callable[[], T]) -> T:
        # without waiting for the ranks, which may write their state meanwhile
        has_failed = False
        while True:
            try:
                if has_failed or self._owes_weights or self._has_lost_manager():
                    self._heal()
                return action()
            except Exception as error:  # noqa: BLE001 - Ray has many types for the consequences
                self._require_loss(error)
                has_failed = True

    def update(self, group: Any) -> None:
        self.do(group.update_weights, group.count_update)
        self._has_updated = True

    def sleep_engines(self, action: Callable[[], object]) -> None:
        self.ask(action)
        self._engines_are_awake = False

    def wake_engines(self, action: Callable[[], object]) -> None:
        self.ask(action)
        self._engines_are_awake = True

    def suspend(self, groups: Sequence[Any], *, ends: bool) -> None:
        if ends:
            number = 0 if self._rollout_id is None else self._rollout_id + 1
            self._until_done(lambda: self._write_now(number))
            self._end_ranks()
        else:
            self._until_done(lambda: [group.offload() for group in groups])
        self._is_awake = False

    def resume(self, groups: Sequence[Any], manager: Any, *, ends: bool) -> None:
        if ends:
            self._until_done(self._recreate)
        else:
            self._until_done(lambda: [group.onload() for group in groups])
        self._is_awake = True

    # --- states -----------------------------------------------------------------------------------

    def publish(self, rollout_id: int, *, is_first: bool = False) -> None:
        is_due = is_first or (rollout_id + 1) % self._args.recovery_interval == 0
        if is_due and not self._args.release_train:  # which publishes after each rollout
            self._until_done(lambda: self._states.begin(self._groups, rollout_id + 1))

    def _write_now(self, number: int) -> None:
        self._states.begin(self._groups, number)
        self._take_over(self._states.finish())

    def _settle(self) -> None:
        """The state that is being written is the one to go back to. What does not fit is warned
        of.
        """
        try:
            self._take_over(self._states.finish())
        except Exception as error:
            known = slime_error_of(error)
            if not isinstance(known, SaveError):
                raise
            logger.warning("the training state was not kept, an earlier one is: %s", known)

    def _take_over(self, point: Point | None) -> None:
        if point is not None:
            self._point, self._since = point, []

    def metrics(self) -> dict[str, float]:
        found: dict[str, float] = {
            f"rollout/{what}_restarts": count for what, count in self._num_healed.items()
        }
        self._num_healed = dict.fromkeys(self._num_healed, 0)
        return found

    def close(self) -> None:
        self._states.remove()

    # --- losses -----------------------------------------------------------------------------------

    def _require_loss(self, error: Exception) -> None:
        """Returns where the error is the consequence of a death that is healed; else raises it."""
        if isinstance(slime_error_of(error), ConfigError | NothingLeft) or self._has_given_up:
            raise error
        whose = error.whose if isinstance(error, ProcessDied) else None
        is_known = whose in self._rank_names()
        # the watch hears of it at about the same time
        is_heard = self._is_lost.wait(CAUSE_S)
        if not is_known and not is_heard:
            raise error
        if not is_heard:  # on another machine
            self._losses.append(Loss(str(whose), 0, ""))
            self._is_lost.set()
        time.sleep(SETTLE_S)

    def _rank_names(self) -> list[str]:
        size = self._args.actor_num_nodes * self._args.actor_num_gpus_per_node
        return [name for role in ("actor", "critic") for name in rank_names(role, size)]

    def _count_loss(self) -> None:
        """SlimeError where this rollout has lost too many."""
        first = min(self._losses, key=lambda loss: loss.role not in WITH_MANAGER)
        self._num_losses += 1
        number = self._rollout_id
        since = "the start" if number is None else f"the training of rollout {number} began"
        if self._num_losses >= MAX_LOSSES:
            self._has_given_up = True
            raise SlimeError(
                f"{first.sentence()} Ranks or the rollout manager were lost {self._num_losses} "
                f"times since {since}, which may be what ends them. {ADVICE}"
            )
        what = "The rollout manager" if self._has_lost_manager() else "All training ranks"
        also = " and its engines are" if self._has_lost_manager() else " are"
        logger.warning("%s %s%s started again.", first.sentence(), what, also)

    def _forget_losses(self) -> None:
        self._losses = []
        self._is_lost.clear()

    def _heal(self) -> None:
        """Ranks and manager are as if nothing had been lost."""
        started = time.monotonic()
        self._count_loss()
        if self._has_lost_manager():
            self._owes_manager = self._owes_weights = True
            self._ends_manager = True
        has_lost_rank = any(loss.role not in WITH_MANAGER for loss in self._losses)
        with contextlib.suppress(Exception):  # they may have written all of it before
            self._settle()
        # new engines get what those before had: have the ranks trained since?
        is_ahead = bool(self._since) and self._since[-1][0] == "train"
        if has_lost_rank or self._is_torn or (self._owes_weights and is_ahead):
            self._is_torn = True
            for group in self._groups:
                group.end_now()
        elif self._owes_manager and self._is_awake and self._args.offload_train:
            for group in self._groups:
                group.offload()  # engines start on the same devices
        self._forget_losses()
        if self._owes_manager:
            self._replace_manager()
        else:
            self._ask_manager("abandon_weight_update", "giving up the update of lost ranks")
        self._bring_ranks_back(sends=self._owes_weights)
        what = "manager" if self._owes_weights else "training"
        self._is_torn = self._owes_weights = False
        self._num_healed[what] += 1
        names = {"manager": "the rollout manager is", "training": "the training ranks are"}
        logger.warning("%s back after %.1f s", names[what], time.monotonic() - started)

    def _replace_manager(self) -> None:
        assert self._seat is not None and self._on_manager is not None
        self._ends_manager = True
        self._seat.end()
        time.sleep(SETTLE_S)
        self._ends_manager = False
        self._on_manager(*self._seat.replace())
        self._owes_manager = False

    def _ask_manager(self, method: str, what: str) -> None:
        refs = [getattr(self._seat, method).remote()]
        wait_for(refs, what=what, timeout_s=self._args.step_timeout)

    def _bring_ranks_back(self, *, sends: bool) -> None:
        """All ranks run, and have done what was done. sends: to new engines, what those before had."""
        are_new = not all(group.is_running for group in self._groups)
        if not are_new and not sends:
            return
        policy = self._groups[-1]
        if are_new:
            self._recreate()
            for group in self._groups:
                group.skip_logged(self._states.num_logged(self._point))
        else:
            for group in self._groups:
                if self._args.offload_train:
                    group.onload()
                group.set_rollout_manager(self._manager)
        has_weights = sends and self._has_updated
        if has_weights and (self._point is not None or not are_new):
            policy.send_weights_again()
        for name, again in self._since if are_new else ():
            again()
            if has_weights and name == "update":
                policy.send_weights_again()
        if not self._is_awake and self._args.release_train:
            self._end_ranks()
        elif not self._is_awake:
            for group in self._groups:
                group.offload()
        if sends:
            assert self._seat is not None
            if not self._engines_are_awake:
                self._ask_manager("offload", "freeing the engines' memory")
            self._seat.ask_again()

    def _end_ranks(self) -> None:
        """The ranks' processes end; their state is written."""
        for group in self._groups:
            with contextlib.suppress(Exception):  # one that ends by itself ends too
                group.end()

    @property
    def _manager(self) -> Any:
        assert self._seat is not None
        return self._seat.handle

    def _recreate(self) -> None:
        for group in self._groups:
            if group.is_running:
                continue
            if self._point is None:
                group.start_again(self._manager)
            else:
                group.recreate(self._manager, self._point.of(group), self._point.number)
