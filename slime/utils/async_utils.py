"""One background event loop for the whole process, so that an HTTP session outlives the call that
opened it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from slime.plugins.watched_calls import WATCH, CallTimeout

T = TypeVar("T")

# How often a caller looks whether the loop is held.
POLL_S = 0.5

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None


def get_async_loop() -> asyncio.AbstractEventLoop:
    """The process-wide loop, running in a daemon thread that is started on the first call."""
    global _loop
    with _lock:
        if _loop is None or _loop.is_closed():
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, name="slime-async", daemon=True).start()
        return _loop


def run(coro: Coroutine[Any, Any, T]) -> T:
    """The result of `coro`, run on the background loop; blocks the caller.

    RuntimeError when called from the loop's own thread, where it could only wait for itself. An
    interrupt (Ctrl-C) cancels the coroutine before it reaches the caller. CallTimeout when a user's
    function holds an event loop beyond its limit; a loop that is held is left behind, later calls
    get a new one.
    """
    loop = get_async_loop()
    if _running_loop() is loop:
        coro.close()
        raise RuntimeError(
            "async_utils.run was called from the background loop itself; await the coroutine "
            "instead"
        )
    future = asyncio.run_coroutine_threadsafe(coro, loop)
    try:
        while True:
            done, _ = concurrent.futures.wait([future], timeout=POLL_S)
            if done:
                return future.result()
            WATCH.raise_overdue()
    except CallTimeout:
        if not future.done():
            future.cancel()
            _leave(loop)
        raise
    except BaseException:
        future.cancel()
        raise


def _leave(loop: asyncio.AbstractEventLoop) -> None:
    """Later calls get a new loop."""
    global _loop
    with _lock:
        if _loop is loop:
            _loop = None


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
