"""Named wall-clock timers of one process, in seconds. With --trace each timed block is a span."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

from slime.tracking.spans import close_span, open_span
from slime.utils.misc import SingletonMeta


class Timer(metaclass=SingletonMeta):
    """Seconds by name, accumulated until `reset`. One per process. `seq_lens` holds the total
    lengths [N] of the phase that is timed.
    """

    def __init__(self) -> None:
        self.timers: dict[str, float] = {}
        self.start_time: dict[str, float] = {}
        self.seq_lens: list[int] = []

    def start(self, name: str) -> None:
        """Starts `name`, which must not be running."""
        assert name not in self.start_time, f"timer {name!r} is running already"
        self.start_time[name] = started = time.perf_counter()
        open_span(name, started)

    def end(self, name: str) -> float:
        """Stops `name`, which must be running, adds its seconds and returns them."""
        assert name in self.start_time, f"timer {name!r} was not started"
        started, ended = self.start_time.pop(name), time.perf_counter()
        elapsed = ended - started
        self.add(name, elapsed)
        close_span(name, started, ended)
        return elapsed

    def add(self, name: str, elapsed: float) -> None:
        """Adds `elapsed` seconds to `name`."""
        self.timers[name] = self.timers.get(name, 0.0) + elapsed

    def reset(self, name: str | None = None) -> None:
        """Forgets the seconds of `name`, or of all names. What is running keeps running."""
        if name is None:
            self.timers = {}
        else:
            self.timers.pop(name, None)

    def log_dict(self) -> dict[str, float]:
        """Returns a copy of the accumulated seconds by name."""
        return dict(self.timers)

    @contextlib.contextmanager
    def context(self, name: str) -> Iterator[None]:
        """Times the body, whether or not it raises."""
        self.start(name)
        try:
            yield
        finally:
            self.end(name)


def timer(name_or_function: str | Callable[..., Any]) -> Any:
    """As `with timer("name"):` times the body; as `@timer` times every call under the function's
    name.
    """
    if isinstance(name_or_function, str):
        return Timer().context(name_or_function)
    function = name_or_function

    @functools.wraps(function)
    def timed(*args: object, **kwargs: object) -> Any:
        with Timer().context(function.__name__):
            return function(*args, **kwargs)

    return timed


@contextlib.contextmanager
def inverse_timer(name: str) -> Iterator[None]:
    """Pauses the running timer `name` for the body."""
    Timer().end(name)
    try:
        yield
    finally:
        Timer().start(name)


def with_defer(deferred: Callable[[], Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Returns a decorator that calls `deferred()` after the function, whether or not it raised."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapped(*args: object, **kwargs: object) -> Any:
            try:
                return function(*args, **kwargs)
            finally:
                deferred()

        return wrapped

    return decorate
