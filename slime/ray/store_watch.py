"""Notices in the driver that the control store of its private Ray cluster has died.

Ray itself would try to reach it for a minute, then print a stack and abort the process.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

import ray

from slime.exceptions import SlimeError
from slime.ray.cluster_folder import started_at

POLL_S = 0.5
# How long the driver may take to stop in good order; calls to a dead store may block for a minute.
STOP_S = 8.0
logger = logging.getLogger(__name__)


def store_pid() -> int | None:
    """The process id of the control store (GCS) that this process has started, None where it joined
    a cluster or the installed Ray keeps it elsewhere.
    """
    node = getattr(ray._private.worker, "_global_node", None)
    processes = getattr(node, "all_processes", {})
    for info in processes.get("gcs_server", []):
        return info.process.pid
    return None


class StoreWatch:
    """A thread that looks at a process twice a second. When it has ended, the main thread is
    interrupted and, where that does not end this process within `STOP_S`, ended by force.
    """

    def __init__(self, pid: int, clean_up: Callable[[], None]) -> None:
        self._pid, self._started, self._clean_up = pid, started_at(pid), clean_up
        self._is_over = threading.Event()
        self.sentence: str | None = None  # once it has died

    def start(self) -> None:
        """Begins to watch."""
        threading.Thread(target=self._watch, name="watch-ray-store", daemon=True).start()

    def stop(self) -> None:
        """Ends the watch, unless the store has died: then this process must end."""
        self._is_over.set()

    def _watch(self) -> None:
        while not self._is_over.wait(POLL_S):
            if started_at(self._pid) != self._started:
                break
        else:
            return
        if self._is_over.is_set() or not ray.is_initialized():
            return  # this process has shut its cluster down
        self.sentence = (
            f"Ray's control store (gcs_server, process {self._pid}) has died: it crashed, was "
            "killed, or memory ran out (dmesg has a line then). Without it the run cannot go on; "
            "it ends now, and continues from its last checkpoint with --load."
        )
        logger.error("Ray's control store (gcs_server, process %d) has died", self._pid)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(STOP_S)
        self._clean_up()
        print(f"error: {self.sentence}", file=sys.stderr, flush=True)
        os._exit(1)


@contextlib.contextmanager
def watched_store(clean_up: Callable[[], None]) -> Iterator[None]:
    """Inside, the death of the control store ends the block with a `SlimeError` that names it, and
    this process at the latest `STOP_S` after it, `clean_up` first.
    """
    pid = store_pid()
    if pid is None or started_at(pid) is None:
        yield
        return
    watch = StoreWatch(pid, clean_up)
    watch.start()
    try:
        yield
    except BaseException as error:
        if watch.sentence is None and not isinstance(error, KeyboardInterrupt | SystemExit):
            time.sleep(2 * POLL_S)  # what fails first may be a consequence
        if watch.sentence is not None:
            raise SlimeError(watch.sentence) from None
        raise
    finally:
        watch.stop()
