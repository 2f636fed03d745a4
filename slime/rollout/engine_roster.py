"""Which engines take requests now, in a run that outlives the loss of one (--use-fault-tolerance).

Whoever watches the engines (slime/ray/engine_healing.py) changes the roster from its threads; the
requests read it from their event loops:

    show(["http://a", "http://b"])      requests go to both
    show(["http://b"])                  a is lost: its open requests end, and are sent to b
    show([])                            none is there: requests wait for `wait_s`, then fail
    show(["http://c", "http://b"])      a's successor takes part
"""

from __future__ import annotations

import asyncio
import collections
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from slime.exceptions import EngineError, NoEngineLeft

T = TypeVar("T")

POLL_S = 0.05
# A request that lost so many engines may be what ends them.
MAX_LOSSES = 5


class EngineRoster:
    """`urls` are the engines that take requests; `router_url` is where requests go instead while
    there is at least one. `wait_s`: how long a request waits for an engine where there is none.

    look: asks the engine at an address, or all of them for the router's, whether it is well, and
    returns whether one was found to be lost. It blocks, and has a bound of its own.
    """

    def __init__(
        self,
        urls: Sequence[str],
        look: Callable[[str], bool],
        *,
        wait_s: float,
        router_url: str | None = None,
    ) -> None:
        self._urls = tuple(urls)
        self._look, self._wait_s, self._router_url = look, wait_s, router_url
        self._lock = threading.Lock()
        self._losses: collections.Counter[str] = collections.Counter()
        self._open: dict[str, set[tuple[asyncio.AbstractEventLoop, asyncio.Future]]] = {}
        self._answered: set[str] = set()
        self._failure: str | None = None
        self._num_resampled = 0

    # --- told by who watches the engines ------------------------------------------------------------

    def show(self, urls: Sequence[str]) -> None:
        """From now on these engines take requests. What others still work on is given up."""
        with self._lock:
            gone = set(self._urls) - set(urls)
            self._urls = tuple(urls)
            self._losses.update(gone)
            if gone and self._router_url is not None:
                self._losses[self._router_url] += 1
            self._answered -= gone
            waiting = [pair for url in gone for pair in self._open.pop(url, ())]
        for loop, lost in waiting:
            loop.call_soon_threadsafe(_resolve, lost)

    def fail(self, reason: str) -> None:
        """No engine will come back: every request fails with `reason`, and with it the run."""
        self._failure = self._failure or reason

    @property
    def failure(self) -> str | None:
        """What was given to `fail`."""
        return self._failure

    def has_answered(self, url: str) -> bool:
        """Whether the engine has answered a request since it was shown."""
        return url in self._answered

    def take_num_resampled(self) -> int:
        """How many samples were asked for again since the last call, because their engine was
        lost.
        """
        with self._lock:
            number, self._num_resampled = self._num_resampled, 0
            return number

    # --- asked by requests --------------------------------------------------------------------------

    def urls(self) -> tuple[str, ...]:
        """Where requests can go now."""
        if self._router_url is not None and self._urls:
            return (self._router_url,)
        return self._urls

    async def wait_for_urls(self) -> tuple[str, ...]:
        """The same, once it is not empty. NoEngineLeft where none comes back."""
        deadline = time.monotonic() + self._wait_s
        while True:
            if self._failure is not None:
                raise NoEngineLeft(self._failure)
            if found := self.urls():
                return found
            if time.monotonic() > deadline:
                raise NoEngineLeft(
                    "no engine came back within --rollout-engine-start-timeout "
                    f"{self._wait_s:g} s; the log of the rollout manager says what became of them"
                )
            await asyncio.sleep(POLL_S)

    def num_losses(self, url: str) -> int:
        """How often the engine at that address was lost; of the router's, how often any was."""
        return self._losses[url]

    async def watched(self, url: str, call: Coroutine[Any, Any, T]) -> T:
        """The result of a request to `url`. EngineError as soon as that engine is lost: one whose
        machine is gone would keep the connection open.
        """
        loop = asyncio.get_running_loop()
        lost: asyncio.Future[None] = loop.create_future()
        task = asyncio.ensure_future(call)
        with self._lock:
            self._open.setdefault(url, set()).add((loop, lost))
        try:
            either: set[asyncio.Future[Any]] = {task, lost}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise EngineError(f"the engine at {url} was lost while it worked on a request")
            result = task.result()
            self._answered.add(url)
            return result
        finally:
            task.cancel()
            with self._lock:
                self._open.get(url, set()).discard((loop, lost))

    async def has_lost(self, url: str, losses_before: int, *, num_samples: int) -> bool:
        """Whether a request to `url` failed because its engine is lost; its samples are counted
        then. `losses_before`: `num_losses` when it was sent.
        """
        if self.num_losses(url) == losses_before and not await asyncio.to_thread(self._look, url):
            return False
        with self._lock:
            self._num_resampled += num_samples
        return True


def _resolve(lost: asyncio.Future[None]) -> None:
    if not lost.done():
        lost.set_result(None)
