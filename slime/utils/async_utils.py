"""One background event loop for the whole process, so that an HTTP session outlives the call that opened it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

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

    RuntimeError when called from the loop's own thread, where it could only wait for itself. An interrupt (Ctrl-C)
    cancels the coroutine before it reaches the caller.
    """
    loop = get_async_loop()
    if _running_loop() is loop:
        coro.close()
        raise RuntimeError("async_utils.run was called from the background loop itself; await the coroutine instead")
    future = asyncio.run_coroutine_threadsafe(coro, loop)
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
