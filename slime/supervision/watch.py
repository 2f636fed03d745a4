"""The watch over the processes of a run on one machine: who has died, who is frozen.

    watch = Watch(folder, on_loss)                    on_loss: the run cannot go on without it
    watch.subscribe("engine", heal)                   unless heal(loss) returns True
    watch.start()

A death is heard of through the process's descriptor (pidfd), within a fraction of a second; a
frozen process is found by looking twice a second (stillness.py), its stacks are read, and it is
ended, so that whoever waits for it hears of its death. What ends on purpose is taken out of the
folder before (`records.expect_end`).

Each machine has its own process ids and files: this watch sees one. A run over several machines
would have one on each, whose `on_loss` reports to the driver's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import re
import select
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

from slime.supervision import records
from slime.supervision.heart import ROLLOUT_MANAGER
from slime.supervision.processes import STOPPED, look_at, started_at
from slime.supervision.records import Record
from slime.supervision.stacks import python_stacks
from slime.supervision.stillness import Reading, Stillness

CONTROL_STORE = "Ray's control store, gcs_server,"
NODE_MANAGER = "Ray's node manager, raylet,"
NODE_AGENT = "an agent of Ray's node manager"
CLUSTER = (CONTROL_STORE, NODE_MANAGER, NODE_AGENT)
# Of processes that have ended together, one of the lowest rank took the others with it. A node
# manager and its agents end with each other: of them it is the one that was heard of first.
CAUSES = {CONTROL_STORE: 0, NODE_MANAGER: 1, NODE_AGENT: 1, ROLLOUT_MANAGER: 2}

POLL_S = 0.25
LOOK_S = 0.5
# How much later than the first the others of a common end are heard of.
TOGETHER_S = 0.2
_NUMBER = re.compile(r" \d+$")
logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Loss:
    """A process that has died or is frozen; `still_s`: for how long (None: it has died)."""

    role: str
    pid: int
    phase: str
    still_s: float | None = None
    is_stopped: bool = False

    @property
    def kind(self) -> str:
        """The role without its number."""
        return _NUMBER.sub("", self.role)

    @property
    def number(self) -> int:
        """Of the role "engine 1": 1; 0 for a role that has none."""
        found = _NUMBER.search(self.role)
        return int(found[0]) if found else 0

    def sentence(self, reason: str | None = None) -> str:
        """Who, what and when. reason: of a death, where more is known than that it happened."""
        doing = f" Its last phase: {self.phase}." if self.phase else ""
        name = f"{self.role} (process {self.pid})"
        if self.still_s is None:
            why = reason or ("it crashed, was killed, or memory ran out (dmesg has a line then).")
            return f"{name} has died: {why}{doing}"
        why = "a signal has stopped it (SIGSTOP)" if self.is_stopped else "it hangs"
        return (
            f"{name} is frozen: {why}; for {self.still_s:.0f} s it has neither run nor waited for "
            f"a processor.{doing}"
        )


Healer = Callable[[Loss], bool]


@dataclasses.dataclass
class _Watched:
    record: Record
    pidfd: int | None
    stillness: Stillness = dataclasses.field(default_factory=Stillness)
    beats: int = -1
    phase: str = ""

    def close(self) -> None:
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None


def _now() -> float:
    """Seconds that pass also while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Watch:
    """One thread. `on_loss` is called in it, once for each process that is lost and that no healer
    takes care of.
    """

    def __init__(self, folder: str | os.PathLike[str], on_loss: Callable[[Loss], None]) -> None:
        self._folder = Path(folder)
        self._on_loss = on_loss
        self._healers: dict[str, Healer] = {}
        self._kinds: tuple[str, ...] | None = None
        self._watched: dict[Path, _Watched] = {}
        self._is_over = threading.Event()
        self._poller = select.poll()
        self._looked = -LOOK_S
        self._own_s = 0.0  # in which this thread read stacks and healed: no pause of its clock
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def subscribe(self, kind: str, healer: Healer) -> None:
        """Losses of this kind ("engine", "actor rank") go to `healer` first, in the watch's thread;
        True: it takes care, and the run goes on.
        """
        self._healers[kind] = healer

    def only(self, kinds: tuple[str, ...]) -> None:
        """From now on the end of processes of other kinds is nobody's loss."""
        self._kinds = kinds

    def start(self) -> None:
        """Begins to watch."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the watch."""
        self._is_over.set()

    def _run(self) -> None:
        try:
            while not self._is_over.is_set():
                self._turn()
        except Exception:
            logger.exception("the watch over the run's processes has failed; the run goes on")
        finally:
            for watched in self._watched.values():
                watched.close()

    def _turn(self) -> None:
        self._read_folder()
        ended = self._ended(POLL_S)
        if ended:
            deadline = time.monotonic() + TOGETHER_S
            while (left := deadline - time.monotonic()) > 0:
                ended += self._ended(left)
            ended.sort(key=lambda one: CAUSES.get(one.record.role, len(CAUSES)))
            for one in ended:
                self._lose(Loss(one.record.role, one.record.pid, one.phase))
        now = _now() - self._own_s
        if now - self._looked >= LOOK_S:
            self._looked = now
            for watched in list(self._watched.values()):
                self._look(watched, now)

    def _read_folder(self) -> None:
        """Takes up who has come, and forgets who is taken out."""
        try:
            paths = {path for path in self._folder.iterdir() if not path.name.startswith(".")}
        except OSError:
            paths = set()
        for path in self._watched.keys() - paths:
            self._take_out([self._watched[path]])
        for path in paths - self._watched.keys():
            record = records.read_record(path)
            if record is not None and record.node == records.this_node():
                self._watched[path] = self._take_up(record)

    def _take_up(self, record: Record) -> _Watched:
        pidfd = None
        with contextlib.suppress(OSError):
            pidfd = os.pidfd_open(record.pid)
            self._poller.register(pidfd, select.POLLIN)
        return _Watched(record, pidfd)

    def _take_out(self, gone: list[_Watched]) -> None:
        for watched in gone:
            self._watched.pop(watched.record.path, None)
            if watched.pidfd is not None:
                self._poller.unregister(watched.pidfd)
            watched.close()

    def _ended(self, wait_s: float) -> list[_Watched]:
        """Those that have ended and were not to, by name; waits at most this long for the first.
        They are watched no longer.
        """
        ready = {fd for fd, _ in self._poller.poll(wait_s * 1000)}
        ended = []
        for watched in list(self._watched.values()):
            record = watched.record
            if watched.pidfd not in ready and started_at(record.pid) == record.started:
                continue
            pulse = records.read_pulse(record.path)  # outlives the process; None: taken out before
            if pulse is not None:
                watched.phase = pulse[1]
                ended.append(watched)
                record.sign_off()
            self._take_out([watched])
        return sorted(ended, key=lambda one: one.record.role)

    def _look(self, watched: _Watched, now: float) -> None:
        record = watched.record
        pulse = records.read_pulse(record.path)
        is_silent = record.has_heart and pulse is not None and pulse[0] == watched.beats
        state = look_at(record.pid, closely=is_silent)
        if pulse is None or state is None or state.started != record.started:
            return  # the next turn hears of its end
        watched.beats, watched.phase = pulse
        reading = Reading(
            time=now,
            beats=pulse[0] if record.has_heart else None,
            state=state.state,
            cpu_s=state.cpu_s,
            is_runnable=state.is_runnable,
            is_traced=state.is_traced,
        )
        still_s = watched.stillness.add(reading)
        if still_s is None or not self._is_a_loss(record.role):
            return
        begun = _now()
        is_stopped = state.state == STOPPED
        loss = Loss(record.role, record.pid, watched.phase, still_s, is_stopped)
        logger.error("%s", loss.sentence())
        if record.has_heart:
            logger.error("the Python threads of %s:\n%s", record.role, python_stacks(record.pid))
        record.sign_off()
        self._take_out([watched])
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(record.pid, signal.SIGKILL)
        self._lose(loss)
        self._own_s += _now() - begun

    def _is_a_loss(self, role: str) -> bool:
        return self._kinds is None or role in self._kinds

    def _lose(self, loss: Loss) -> None:
        if self._is_over.is_set() or not self._is_a_loss(loss.role):
            return
        healer = self._healers.get(loss.kind)
        if healer is not None:
            logger.info("%s It is replaced.", loss.sentence())
            try:
                if healer(loss):
                    return
            except Exception:
                logger.exception("%s could not be replaced", loss.role)
        self._on_loss(loss)
