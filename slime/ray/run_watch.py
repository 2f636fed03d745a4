"""Ends a run by the name of the process that died or froze first, whatever else fails because of
it.

Ray itself names another process, or an address nobody knows; without its control store it would
wait for a minute, then print a stack and abort; of a frozen process it never hears.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import ray

from slime.exceptions import ConfigError, NothingLeft, SlimeError
from slime.ray.utils import reason_of_death
from slime.supervision import records
from slime.supervision.processes import children_of, command_of
from slime.supervision.watch import (
    CLUSTER,
    CONTROL_STORE,
    NODE_AGENT,
    NODE_MANAGER,
    Healer,
    Loss,
    Watch,
)

# An error of the loop may be a consequence of an end that is heard of this much later.
CAUSE_S = 1.0
# How long the driver may take to stop in good order; calls to a dead store may block for a minute.
STOP_S = 30.0
STOP_WITHOUT_CLUSTER_S = 8.0
# What cannot be a consequence of a lost process.
OWN_ERRORS = (ConfigError, NothingLeft, KeyboardInterrupt, SystemExit)
ADVICE = "The run ends now; it continues from its last checkpoint with --load."
logger = logging.getLogger(__name__)


class RunWatch:
    """The watch of the driver; without a folder (--local has one process) it does nothing.

    `clean_up` is called before this process is ended by force: when it has not ended `STOP_S` after
    a loss. `run_folder`: what is removed with the run, None without one.
    """

    def __init__(
        self,
        folder: str | None = None,
        clean_up: Callable[[], None] = lambda: None,
        *,
        run_folder: str | None = None,
    ) -> None:
        self.run_folder = run_folder
        self._clean_up = clean_up
        self._lock = threading.Lock()
        self._has_begun_to_end = False
        self._is_over = threading.Event()
        self._is_decided = threading.Event()
        self._loss: Loss | None = None
        self._watch = None if folder is None else Watch(folder, self._end_run)
        # whoever starts graders replaces them, and knows what was asked of them
        self.subscribe("grader", lambda loss: True)

    def subscribe(self, kind: str, healer: Healer) -> None:
        """`Watch.subscribe`: who takes care of losses of this kind, so that the run goes on."""
        if self._watch is not None:
            self._watch.subscribe(kind, healer)

    @contextlib.contextmanager
    def needed(self) -> Iterator[None]:
        """Inside, the run needs all its processes: the loss of one ends the block with a
        `SlimeError` that names the first. From its end on they may end, and the cluster alone is
        watched.
        """
        try:
            with self._named():
                yield
        finally:
            with self._lock:
                self._has_begun_to_end = True
                if self._watch is not None:
                    self._watch.only(CLUSTER)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Inside, the watch runs."""
        if self._watch is None:
            yield
            return
        for role, pid in cluster_processes():
            records.register(role, pid)
        self._watch.start()
        try:
            with self._named():
                yield
        finally:
            self._is_over.set()
            self._watch.stop()

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            if self._watch is not None and not isinstance(error, OWN_ERRORS):
                self._is_decided.wait(CAUSE_S)
            if self._loss is not None:
                raise SlimeError(self._sentence(self._loss, error)) from None
            raise

    def _sentence(self, loss: Loss, error: BaseException | None = None) -> str:
        return f"{loss.sentence(_reason_by_ray(loss.pid, error))} {ADVICE}"

    def _end_run(self, loss: Loss) -> None:
        """Called in the watch's thread."""
        with self._lock:
            is_of_cluster = loss.role in CLUSTER
            if self._loss is not None or (self._has_begun_to_end and not is_of_cluster):
                return
            if self._is_over.is_set() or (is_of_cluster and not ray.is_initialized()):
                return  # this process has shut its cluster down
            self._loss = loss
            self._is_decided.set()
        if loss.still_s is None:  # a frozen one is in the log by now
            logger.error("%s", loss.sentence())
        stop_s = STOP_WITHOUT_CLUSTER_S if is_of_cluster else STOP_S
        threading.Thread(target=self._end_by_force, args=(stop_s,), daemon=True).start()
        os.kill(os.getpid(), signal.SIGTERM)

    def _end_by_force(self, stop_s: float) -> None:
        if self._is_over.wait(stop_s) or self._loss is None:
            return
        self._clean_up()
        print(f"error: {self._sentence(self._loss)}", file=sys.stderr, flush=True)
        os._exit(1)


@contextlib.contextmanager
def watched_run(
    folder: str, clean_up: Callable[[], None], start: Callable[[], None]
) -> Iterator[RunWatch]:
    """Inside, the processes that `start` and the run start are watched; their records are in a new
    folder `processes` below `folder`.
    """
    place = Path(folder, "processes")
    place.mkdir(mode=0o700)
    before = os.environ.get(records.FOLDER_VARIABLE)
    os.environ[records.FOLDER_VARIABLE] = str(place)
    try:
        start()
        watch = RunWatch(str(place), clean_up, run_folder=folder)
        with watch.running():
            yield watch
    finally:
        os.environ.pop(records.FOLDER_VARIABLE)
        if before is not None:
            os.environ[records.FOLDER_VARIABLE] = before


def cluster_processes() -> list[tuple[str, int]]:
    """(role, process id) of what Ray runs for a cluster that this process has started; nothing
    where it joined one, or the installed Ray keeps them elsewhere.
    """
    node = getattr(ray._private.worker, "_global_node", None)
    processes = getattr(node, "all_processes", {})
    found = []
    for name, role in (("gcs_server", CONTROL_STORE), ("raylet", NODE_MANAGER)):
        found += [(role, info.process.pid) for info in processes.get(name, [])]
    for _, manager in [one for one in found if one[0] == NODE_MANAGER]:
        found += [
            (NODE_AGENT, pid) for pid in children_of(manager) if "agent" in command_of(pid).lower()
        ]
    return found


def _reason_by_ray(pid: int, error: BaseException | None) -> str | None:
    """What Ray knows of the death of a process that is behind `error`, where it ended it itself."""
    while error is not None:
        if isinstance(error, ray.exceptions.RayActorError):
            reason = reason_of_death(error)
            is_its = reason.startswith(f"It had process id {pid}. ")
            return reason if is_its and "Ray ended it" in reason else None
        error = error.__cause__
    return None
