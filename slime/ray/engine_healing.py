"""Replaces engines that die or freeze while a run goes on (--use-fault-tolerance).

`EngineHealer.lost(rank, reason)` is the one place that says that an engine is dead; five tell it:
the end of its process, a health check without an answer, a request that failed, a weight update,
and the watch over the run's processes. From there on:

    requests     leave the roster's address; open ones are sent again, elsewhere or to the successor
    the engine   its process is ended, a new one starts on the same device
    weights      the new one takes what was published last, under the lock of weight updates, and
                 its checksum and version are compared, before it gets requests

External servers are not ours to start: requests go to the others, and one that takes the next
weights is used again.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray

from slime.exceptions import EngineError, NoEngineLeft, ProcessDied
from slime.ray import actors
from slime.ray.placement import Placement
from slime.ray.rollout_servers import create_engine
from slime.ray.servers import PublishedWeights, RolloutServers, ask_engines
from slime.ray.utils import held, reason_of_death, slime_error_of, wait_for
from slime.rollout.engine_roster import EngineRoster
from slime.supervision.processes import started_at
from slime.supervision.records import expect_end, this_node
from slime.utils.async_utils import run
from slime.utils.http_utils import request_once, send_key_to

# So many deaths of one engine without an answer in between, in one rollout, end the run.
MAX_DEATHS = 3
POLL_S = 0.25
# How long a process may take to end after SIGKILL; one on another machine is given as long as Ray
# takes to end a frozen one there.
END_S = 15.0
REMOTE_END_S = 6.0
logger = logging.getLogger(__name__)


@dataclasses.dataclass
class _Slot:
    """One place for an engine and who holds it now; of external servers only `rank`, `url` and
    `next_check` are used.

    ended: a reference that is ready when the process has ended. pid, started: that process, where
    it runs on this machine. asked: a health check that is under way, and until when. num_deaths:
    without an answer in between.
    """

    rank: int
    url: str
    engine: Any = None
    ended: Any = None
    pid: int = 0
    started: int | None = None
    next_check: float = 0.0
    asked: tuple[Any, float] | None = None
    num_deaths: int = 0
    is_asking: threading.RLock = dataclasses.field(default_factory=threading.RLock)


class EngineHealer:
    """Watches the engines of `servers` and replaces lost ones with what start_engine(rank) makes.
    `lock` is that of weight updates. `roster` is what requests go by.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        servers: RolloutServers,
        lock: Any,
        start_engine: Callable[[int], Any],
    ) -> None:
        self._args, self._servers, self._lock = args, servers, lock
        self._start_engine = start_engine
        router_url = None if servers.router is None else servers.router.url
        self.roster = EngineRoster(
            servers.urls,
            self._look,
            wait_s=args.rollout_engine_start_timeout,
            router_url=router_url,
        )
        servers.outlives = True
        self._are_ours = bool(servers.engines)
        self._mutex = threading.Lock()
        self._is_over = threading.Event()
        self._is_awake = threading.Event()
        self._is_awake.set()
        self._published: PublishedWeights | None = None
        self._num_restarted = 0
        self._slots = [_Slot(rank, url) for rank, url in enumerate(servers.urls)]
        for slot in self._slots:
            if self._are_ours:
                slot.engine = servers.engines[slot.rank]
                slot.ended = slot.engine.until_shutdown.remote()
                self._find_process(slot)
            self._postpone_check(slot)

    @staticmethod
    def from_args(
        args: argparse.Namespace, placement: Placement, servers: RolloutServers, lock: Any
    ) -> EngineHealer | None:
        """A started healer, None without --use-fault-tolerance or engines."""
        if not args.use_fault_tolerance or not servers.urls:
            return None
        healer = EngineHealer(
            args, servers, lock, lambda rank: create_engine(args, placement, rank)
        )
        threading.Thread(target=healer.watch, name="slime-engine-watch", daemon=True).start()
        return healer

    # --- what the rollout manager tells and asks --------------------------------------------------

    def lost(self, rank: int, reason: str, pid: int | None = None) -> None:
        """Engine `rank` is dead, or as good as dead: it is replaced. Does nothing where that is
        known, or where `pid`, its process, has a successor already.
        """
        slot = self._slots[rank]
        with slot.is_asking:
            if self._is_over.is_set() or rank in self._servers.lost or pid not in (None, slot.pid):
                return
            if self.roster.has_answered(slot.url):
                slot.num_deaths = 0
            self._servers.lost.add(rank)
            # before requests hear of it: the router would send them there again
            self._leave_router(slot)
            with self._mutex:
                self._show()
        are_left = bool(self.roster.urls())
        logger.warning("engine %d (%s) is lost: %s", rank, slot.url, reason)
        if not self._are_ours:
            if not are_left:
                self.roster.fail(
                    "none of --rollout-external-engine-addrs is left; the last one, engine "
                    f"{rank} ({slot.url}), was lost: {reason}"
                )
        elif self._may_start_again(slot, reason):
            name = f"slime-engine-{rank}"
            threading.Thread(target=self._replace, args=(slot,), name=name, daemon=True).start()

    def begin_rollout(self) -> None:
        """Deaths are counted anew. NoEngineLeft where a lost engine could not be replaced."""
        if self.roster.failure is not None:
            raise NoEngineLeft(self.roster.failure)
        for slot in self._slots:
            if slot.rank not in self._servers.lost:
                slot.num_deaths = 0

    def metrics(self) -> dict[str, float]:
        """What was healed since the last call."""
        with self._mutex:
            number, self._num_restarted = self._num_restarted, 0
        return {
            "rollout/engines_restarted": number,
            "rollout/resampled_requests": self.roster.take_num_resampled(),
        }

    def forget_published(self) -> None:
        """A weight update begins, under the lock: what engines served before is not needed any
        more.
        """
        self._published = None

    def keep_published(self, published: PublishedWeights, taken: Sequence[int] = ()) -> None:
        """A weight update ends, under the lock. `taken`: the external servers that have it."""
        if self._args.release_train or self._args.recovery_interval:
            # the ranks own what they sent, and end now or at any time
            limit = self._args.step_timeout
            mine = [actors.put(actors.get(bucket, timeout=limit)) for bucket in published.buckets]
            published = dataclasses.replace(published, buckets=tuple(mine))
        self._published = published
        with self._mutex:
            for rank in taken:
                if not self._are_ours and rank in self._servers.lost:
                    self._join_router(self._slots[rank].url)
                    self._servers.lost.discard(rank)
                    self._postpone_check(self._slots[rank])
                    logger.info("engine %d (%s) is back", rank, self._slots[rank].url)
            self._show()

    def fall_asleep(self) -> None:
        """Engines give their memory back: a lost one is ended at once, and its successor starts
        after `wake`.
        """
        self._is_awake.clear()

    def wake(self) -> None:
        """Engines have their memory again."""
        self._is_awake.set()

    def failures(self) -> list[str]:
        """Why the run cannot go on; nothing while engines can be replaced."""
        return [] if self.roster.failure is None else [self.roster.failure]

    def stop(self) -> None:
        """Ends the watch: from now on engines end because they are told to."""
        self._is_over.set()

    # --- the watch --------------------------------------------------------------------------------

    def watch(self) -> None:
        """Looks for engines that have ended or give no answer, until `stop`."""
        try:
            while not self._is_over.is_set():
                self._hear_deaths()
                for slot in self._up():
                    self._check_in_time(slot, time.monotonic())
        except Exception as error:  # noqa: BLE001 - whatever it is, nobody watches any more
            if not self._is_over.is_set():
                logger.exception("the watch of the engines ended")
                self.roster.fail(f"the watch of the engines ended with {error!r}")

    def _up(self) -> list[_Slot]:
        return [slot for slot in self._slots if slot.rank not in self._servers.lost]

    def _hear_deaths(self) -> None:
        """Returns after POLL_S, or as soon as an engine's process has ended."""
        slot_of = {slot.ended: slot for slot in self._up() if slot.ended is not None}
        if not slot_of:
            self._is_over.wait(POLL_S)
            return
        ended, _ = actors.wait(list(slot_of), num_returns=1, timeout=POLL_S)
        for ref in ended:
            slot = slot_of[ref]
            try:
                actors.get(ref)
                self.lost(slot.rank, "it was shut down")
            except Exception as error:  # noqa: BLE001 - Ray has several types for a death
                self.lost(slot.rank, _reason(error))

    def _check_in_time(self, slot: _Slot, now: float) -> None:
        """Asks for the health where it is due, and hears the answer."""
        limit = self._args.rollout_health_check_timeout
        if slot.asked is None:
            if now < slot.next_check:
                return
            if not self._are_ours:
                self._ask_external(slot)
                slot.next_check = time.monotonic() + self._args.rollout_health_check_interval
                return
            slot.asked = (slot.engine.health.remote(limit), now + limit)
        asked, deadline = slot.asked
        ready, _ = actors.wait([asked], num_returns=1, timeout=0)
        if ready:
            slot.asked = None
            slot.next_check = now + self._args.rollout_health_check_interval
            try:
                actors.get(asked)
            except Exception as error:  # noqa: BLE001 - Ray mixes its class into whatever the engine raised
                self.lost(slot.rank, _reason(error))
        elif now > deadline:
            self.lost(slot.rank, _frozen(limit))

    def _look(self, url: str) -> bool:
        """Asks the engine at `url`, or all of them where that is the router's, for its health now;
        whether one is lost.
        """
        slots = [slot for slot in self._slots if slot.url == url] or self._slots
        return any([not self._is_well(slot) for slot in slots])

    def _is_well(self, slot: _Slot) -> bool:
        """Many requests fail at once: one of them asks, the others hear what it found."""
        with slot.is_asking:
            if slot.rank in self._servers.lost:
                return False
            if not self._are_ours:
                return self._ask_external(slot)
            limit = self._args.rollout_health_check_timeout
            try:
                actors.get(slot.engine.health.remote(limit), timeout=limit)
            except ray.exceptions.GetTimeoutError:
                self.lost(slot.rank, _frozen(limit))
                return False
            except Exception as error:  # noqa: BLE001 - as above
                self.lost(slot.rank, _reason(error))
                return False
            return True

    def _ask_external(self, slot: _Slot) -> bool:
        limit = self._args.rollout_health_check_timeout
        try:
            run(request_once("GET", f"{slot.url}/health", timeout_s=limit))
        except EngineError as error:
            self.lost(slot.rank, str(error))
            return False
        return True

    # --- the successor ----------------------------------------------------------------------------

    def _may_start_again(self, slot: _Slot, reason: str) -> bool:
        slot.num_deaths += 1
        if slot.num_deaths < MAX_DEATHS:
            return True
        self.roster.fail(
            f"engine {slot.rank} was lost {slot.num_deaths} times in this rollout without an answer "
            f"to any request in between; the last time: {reason}"
        )
        return False

    def _replace(self, slot: _Slot) -> None:
        """A new engine in the slot, with the published weights; or the run ends with the reason."""
        started = time.monotonic()
        while not self._is_over.is_set():
            try:
                self._end(slot)
                while not self._is_awake.wait(POLL_S) and not self._is_over.is_set():
                    pass
                url = self._start(slot)
                with held(self._lock, timeout_s=self._args.step_timeout):
                    version = self._bring_in(slot, url)
            except ProcessDied as error:
                logger.warning("engine %d is lost again: %s", slot.rank, error)
                if not self._may_start_again(slot, str(error)):
                    return
            except Exception as error:  # noqa: BLE001 - it ends the run, whatever it is
                if not self._is_over.is_set():
                    reason = slime_error_of(error) or error
                    self.roster.fail(f"engine {slot.rank} could not be replaced: {reason}")
                return
            else:
                seconds = time.monotonic() - started
                logger.warning(
                    "engine %d is back after %.1f s (%s, weight version %s)",
                    slot.rank,
                    seconds,
                    url,
                    version,
                )
                return

    def _end(self, slot: _Slot) -> None:
        """The slot's process is gone, so that its port and its memory are free."""
        expect_end(f"engine {slot.rank}")
        ended, _ = actors.wait([slot.ended], num_returns=1, timeout=0)
        is_here = slot.started is not None
        if is_here and started_at(slot.pid) == slot.started:
            with contextlib.suppress(ProcessLookupError):
                os.kill(slot.pid, signal.SIGKILL)
        actors.kill(slot.engine)
        if not is_here and not ended:
            time.sleep(REMOTE_END_S)
        deadline = time.monotonic() + END_S
        while is_here and started_at(slot.pid) == slot.started:
            if time.monotonic() > deadline:
                raise EngineError(f"its process {slot.pid} did not end within {END_S:g} s")
            time.sleep(POLL_S)

    def _start(self, slot: _Slot) -> str:
        """The address of a new engine, which has the weights of --hf-checkpoint."""
        limit = self._args.rollout_engine_start_timeout
        slot.engine, slot.started = self._start_engine(slot.rank), None
        slot.ended = slot.engine.until_shutdown.remote()
        (info,) = wait_for(
            [slot.engine.start.remote(limit)],
            what="starting an engine again",
            timeout_s=limit,
            names=[f"engine {slot.rank}"],
            option="--rollout-engine-start-timeout",
        )
        self._find_process(slot)
        return info["url"]

    def _bring_in(self, slot: _Slot, url: str) -> str:
        """The engine takes the published weights, then requests; the version that it serves."""
        own = {slot.rank: slot.engine}
        if self._published is not None:
            load_published(own, self._published, timeout_s=self._args.step_timeout)
        if not self._is_awake.is_set():
            self._ask(own, "release_memory")
        (version,) = self._ask(own, "weight_version").values()
        send_key_to([url])
        self._join_router(url)
        with self._mutex:
            slot.url, slot.asked = url, None
            self._postpone_check(slot)
            self._servers.engines[slot.rank], self._servers.urls[slot.rank] = slot.engine, url
            self._servers.lost.discard(slot.rank)
            self._num_restarted += 1
            self._show()
        return version

    def _leave_router(self, slot: _Slot) -> None:
        if self._servers.router is not None:
            with contextlib.suppress(EngineError):  # the router may have dropped it by itself
                self._servers.router.remove_worker(slot.url)

    def _join_router(self, url: str) -> None:
        if self._servers.router is not None:
            self._servers.router.add_worker(url, api_key=self._args.sglang_api_key or None)

    def _ask(self, engines: dict[int, Any], method: str, *values: object) -> dict[int, Any]:
        limit = self._args.step_timeout
        return ask_engines(
            engines, method, *values, what="a new engine", timeout_s=limit, outlives=False
        )

    def _find_process(self, slot: _Slot) -> None:
        (found,) = self._ask({slot.rank: slot.engine}, "process").values()
        slot.pid, space = found
        slot.started = started_at(slot.pid) if space == this_node() else None

    def _postpone_check(self, slot: _Slot) -> None:
        slot.next_check = time.monotonic() + self._args.rollout_health_check_first_wait

    def _show(self) -> None:
        """The roster is that of the engines which are there; called with the mutex."""
        self.roster.show([slot.url for slot in self._up()])


def load_published(
    engine: dict[int, Any], published: PublishedWeights, *, timeout_s: float
) -> None:
    """The one engine of {number: handle} serves the published weights. EngineError where what came
    has another checksum.
    """

    def ask(method: str, *values: object) -> Any:
        what = f"weights of a new engine ({method})"
        answers = ask_engines(
            engine, method, *values, what=what, timeout_s=timeout_s, outlives=False
        )
        return next(iter(answers.values()))

    version, expected = published.version, published.checksum
    if published.folder is not None:
        received = ask("update_weights_from_disk", published.folder, version)
    else:
        ask("begin_weight_update", version)
        for bucket in published.buckets:
            ask("update_weights", bucket)
        received = ask("end_weight_update", version, expected)
    if expected is not None and received != expected:
        raise EngineError(
            f"a new engine got weights with the checksum {received}, and version {version} has "
            f"{expected}"
        )


def _frozen(limit: float) -> str:
    return f"it is frozen: no answer to a health check within --rollout-health-check-timeout {limit:g} s"


def _reason(error: Exception) -> str:
    if isinstance(error, ray.exceptions.RayActorError):
        return f"its process died. {reason_of_death(error)}"
    return str(slime_error_of(error) or error)
