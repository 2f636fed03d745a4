"""Actors and references: Ray's, or objects of this process (`--local`). During a run, Ray is called
through this module only.

    handle = start(Engine, config, num_cpus=1)       an actor, Ray options by name
    reference = handle.health.remote()               its method, called
    get(reference), wait([reference])                the result

Inside `local_actors()` an actor is a plain object and its method runs when `.remote(...)` is
called, in the caller's thread, so a debugger, a profiler or a traceback goes through. What two
processes would not share is not shared: `put` copies, and each actor has timers and spans of its
own.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ray

from slime.exceptions import SlimeError
from slime.tracking.spans import SpanWriter, exchange_writer, span
from slime.tracking.timer import Timer
from slime.utils.misc import SingletonMeta

_is_local = False


@dataclasses.dataclass(frozen=True, eq=False)
class LocalRef:
    """The result of a method that has run: a value, or the exception that it raised."""

    value: Any = None
    error: Exception | None = None

    def result(self) -> Any:
        """The value; raises the exception, with the stack of where it was raised."""
        if self.error is not None:
            raise self.error
        return self.value


class LocalActor:
    """Stands for an object cls(*args) as Ray's handle does: `actor.method.remote(...)` returns a
    reference.
    """

    def __init__(self, cls: type, *args: object) -> None:
        self._timer: Timer | None = None
        self._span_writer: SpanWriter | None = None
        with self._inside():
            self._target = cls(*args)

    def __getattr__(self, name: str) -> _LocalMethod:
        if name.startswith("__"):  # copy and pickle ask for methods that a handle does not have
            raise AttributeError(name)
        return _LocalMethod(self, name)

    def _call(self, name: str, args: tuple, kwargs: dict[str, Any]) -> LocalRef:
        args = tuple(value.result() if isinstance(value, LocalRef) else value for value in args)
        with self._inside():
            try:
                return LocalRef(value=getattr(self._target, name)(*args, **kwargs))
            except Exception as error:  # noqa: BLE001 - raised where the reference is asked for its value
                return LocalRef(error=error)

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        """Inside, this process's timers and spans are the actor's own."""
        outer = SingletonMeta.exchange(Timer, self._timer), exchange_writer(self._span_writer)
        try:
            yield
        finally:
            self._timer = SingletonMeta.exchange(Timer, outer[0])
            self._span_writer = exchange_writer(outer[1])


@dataclasses.dataclass(frozen=True)
class _LocalMethod:
    actor: LocalActor
    name: str

    def remote(self, *args: object, **kwargs: object) -> LocalRef:
        """Runs the method now."""
        return self.actor._call(self.name, args, kwargs)


def start(cls: type, *args: object, **options: object) -> Any:
    """A handle of a new actor cls(*args). `options` are Ray's; a local actor has none."""
    if _is_local:
        return LocalActor(cls, *args)
    return ray.remote(cls).options(**options).remote(*args)


@dataclasses.dataclass(frozen=True)
class ActorClass:
    """A class whose `remote(...)` starts an actor."""

    cls: type
    options: dict[str, Any]

    def remote(self, *args: object) -> Any:
        """A handle of a new actor."""
        return start(self.cls, *args, **self.options)


def remote(**options: object) -> Callable[[type], ActorClass]:
    """Decorates a class of actors with their Ray options."""
    return lambda cls: ActorClass(cls, options)


def is_local() -> bool:
    """Whether actors are objects of this process."""
    return _is_local


def get(refs: Any, *, timeout: float | None = None, what: str = "") -> Any:
    """The value of a reference, or the values of a list of them. With `timeout`, SlimeError with
    `what` after that many seconds (without `what` Ray's own error).
    """
    if isinstance(refs, LocalRef):
        return refs.result()
    if isinstance(refs, Sequence) and any(isinstance(ref, LocalRef) for ref in refs):
        return [ref.result() for ref in refs]
    if timeout is None:
        return ray.get(refs)
    try:
        return ray.get(refs, timeout=timeout)
    except ray.exceptions.GetTimeoutError as error:
        if not what:
            raise
        raise SlimeError(f"{what} did not arrive within {timeout:g} s.") from error


def put(value: object) -> Any:
    """A reference to a copy of `value`."""
    with span("put"):
        return LocalRef(copy.deepcopy(value)) if _is_local else ray.put(value)


def wait(refs: list[Any], *, num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
    """(references whose result is there, the others), as `ray.wait`: at most `num_returns` in the
    first, after at most `timeout` s.
    """
    if any(isinstance(ref, LocalRef) for ref in refs):
        return refs[:num_returns], refs[num_returns:]
    return ray.wait(refs, num_returns=num_returns, timeout=timeout)


def kill(handle: Any) -> None:
    """Ends an actor's process; a local actor has none."""
    if not isinstance(handle, LocalActor):
        ray.kill(handle)


def gpu_ids() -> list[Any]:
    """The devices of the actor that asks; local: none, which leaves the choice to the
    accelerator.
    """
    return [] if _is_local else ray.get_gpu_ids()


@contextlib.contextmanager
def local_actors(warning_filters: str = "") -> Iterator[None]:
    """Inside, actors are objects of this process. At the end the environment and the process-wide
    objects are as before.

    warning_filters: ("ignore:text,...") as Ray actors get it in PYTHONWARNINGS.
    """
    global _is_local
    before, excepthook = dict(os.environ), sys.excepthook
    if os.environ.get("PYTHONBREAKPOINT", "").startswith("ray."):
        # left by a Ray session of this process or its parent: it sends breakpoint() to Ray's
        # debugger
        del os.environ["PYTHONBREAKPOINT"]
    _is_local = True
    try:
        with warnings.catch_warnings():
            for text in filter(None, warning_filters.split(",")):
                action, _, message = text.partition(":")
                # type: ignore: a text, where the stub asks for one of five literals
                warnings.filterwarnings(action, message=message)  # type: ignore[arg-type]
            yield
    finally:
        _is_local = False
        # torch.distributed's names a rank before each line of a traceback
        sys.excepthook = excepthook
        SingletonMeta.clear_instances()
        os.environ.clear()
        os.environ.update(before)
