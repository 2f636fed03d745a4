"""One Ray session for one run: started (or joined) here, and gone when the run ends, however it ends."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import ray

from slime.ray.utils import add_default_ray_env_vars

OBJECT_STORE_BYTES = 2 * 1024**3
logger = logging.getLogger(__name__)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Inside, SIGTERM ends the run in the same orderly way as Ctrl-C."""

    def interrupt(signum: int, frame: Any) -> None:
        # A second signal must not break the cleanup that the first one began.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt(signal.Signals(signum).name)

    previous = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def ray_session(args: Any) -> Iterator[None]:
    """A connection to the cluster of `--ray-address`, or a private local one that is stopped, with its files, at the end."""
    os.environ |= {name: value for name, value in add_default_ray_env_vars().items() if name.startswith("RAY_")}
    os.environ.setdefault("RAY_DEDUP_LOGS", "1")
    address = args.ray_address or os.environ.get("RAY_ADDRESS")
    # Ray puts unix sockets below it, whose paths are limited to about 100 characters.
    temp_dir = None if address else tempfile.mkdtemp(prefix="slime-ray-", dir="/tmp")
    if temp_dir is not None:
        # Registered before Ray's own exit handler, so it runs after it: an interrupt inside ray.init leaves processes that write until then.
        atexit.register(_remove_folder, temp_dir)
    try:
        if address:
            ray.init(address=address, logging_level=logging.ERROR, log_to_driver=True)
        else:
            ray.init(
                address="local",
                num_cpus=args.num_cpus or os.cpu_count(),
                include_dashboard=False,
                object_store_memory=_object_store_bytes(),
                logging_level=logging.ERROR,
                log_to_driver=True,
                _temp_dir=temp_dir,
            )
        # Ray's core has put its own handlers in place, which print a stack and abort.
        with interruptible():
            yield
    finally:
        ray.shutdown()
        if temp_dir is not None:
            _remove_folder(temp_dir)


def _remove_folder(folder: str, *, patience_s: float = 3.0) -> None:
    """Removes the folder, also while processes that are just ending still write into it."""
    deadline = time.monotonic() + patience_s
    while os.path.exists(folder) and time.monotonic() < deadline:
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.05)


def _object_store_bytes() -> int:
    """At most 2 GiB and at most a third of what /dev/shm has free: more would fall back to slow files."""
    free = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else OBJECT_STORE_BYTES
    return max(128 * 1024**2, min(OBJECT_STORE_BYTES, free // 3))
