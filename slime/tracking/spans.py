"""Spans of a process of a run, written to <run dir>/trace/<process>-<pid>.jsonl with --trace.

    start_tracing(args, "rollout-manager", role="rollout")     once, where the process starts
    with span("columns"):                                        a phase of this thread
        ...
    add_span("request", started, ended, track="requests")        measured elsewhere, may overlap
    stop_tracing()                                             writes what is left

The first line of a file is its head: process, role, rank, pid, host, and `clock_offset`,
nanoseconds since the epoch minus the monotonic clock. A span is {"name", "start", "dur", "thread"}, `start` in
nanoseconds since the epoch (monotonic clock plus that offset, so a clock that is set meanwhile does
not tear spans apart) and `dur` in nanoseconds, with "track", "rollout" and "attrs" where it has
them. {"type": "open", "time", "rollout", "spans"} lists the phases that have not ended at that time, for a run
that goes on, hangs or was killed; the last one counts. Every block of `slime.tracking.timer.timer`
is a span too. Without --trace nothing is kept; a process that is watched shows its phases all the
same (phases.py).
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from slime.files.jsonl import JsonlWriter, encode
from slime.tracking.phases import current_phases, phase

logger = logging.getLogger(__name__)

FOLDER = "trace"
FORMAT_VERSION = 1
FLUSH_INTERVAL_S = 0.5
STOP_TIMEOUT_S = 5.0
NANOSECONDS = 1e9

P = ParamSpec("P")
T = TypeVar("T")


def boot_id() -> str:
    """What processes with the same monotonic clock have in common: the machine's start; its name
    where the system does not tell.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


class SpanWriter:
    """The spans of one process. `add` may be called from any thread and only appends to a queue; a
    thread of its own writes them twice a second. A disk that takes no more ends the recording with
    one warning.

    every: of rollouts 0, every, 2 every, ... alone, after the first `set_rollout`.
    """

    def __init__(
        self, folder: str | os.PathLike[str], process: str, *, every: int = 1, **head: object
    ) -> None:
        self.process = process
        self.is_on = True
        self.rollout_id: int | None = None
        self._every = every
        self._offset = time.time_ns() - time.perf_counter_ns()
        self._head = {
            "type": "head",
            "version": FORMAT_VERSION,
            "process": process,
            **head,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "boot_id": boot_id(),
            "clock_offset": self._offset,
        }
        self._file = JsonlWriter(Path(folder) / f"{process}-{os.getpid()}.jsonl")
        self._pending: collections.deque[tuple] = collections.deque()
        self._opened: dict[int | str, tuple[str, float, int]] = {}
        self._listed: list[dict[str, Any]] = []  # as open, in the file
        self._lock = threading.Lock()  # of the file
        self._has_failed = False
        self._stop = threading.Event()
        self._write([self._head])
        self._thread = threading.Thread(target=self._flush_often, name="trace-writer", daemon=True)
        self._thread.start()

    def set_rollout(self, rollout_id: int) -> None:
        """Labels spans from now on, and leaves out those of rollouts that are not recorded."""
        self.rollout_id = rollout_id
        self.is_on = not self._has_failed and rollout_id % self._every == 0

    def add(
        self,
        name: str,
        start_s: float,
        end_s: float,
        *,
        track: str | None = None,
        attrs: dict[str, Any] | None = None,
    ) -> None:
        """Adds a span between two values of `time.perf_counter()`. track: the lanes of its own that
        it belongs to, where spans may overlap; None: it is a phase of this thread, and nests.
        """
        if self.is_on:
            thread = threading.get_native_id()
            self._pending.append((name, start_s, end_s, thread, track, self.rollout_id, attrs))

    def open(self, key: int | str, name: str, start_s: float) -> None:
        """Notes that a phase of this thread has begun, until `ended(key)`."""
        self._opened[key] = (name, start_s, threading.get_native_id())

    def ended(self, key: int | str) -> None:
        """Notes that the phase of `key` has ended."""
        self._opened.pop(key, None)

    def close(self) -> None:
        """Writes what is left. Harmless when called twice."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=STOP_TIMEOUT_S)
        self._opened.clear()
        self.flush()
        self.is_on = False
        with self._lock:
            self._file.close()

    def flush(self) -> None:
        """Writes the spans that have ended by now, and which ones have been open for a while."""
        records = []
        with contextlib.suppress(IndexError):
            for _ in range(len(self._pending)):  # other threads append meanwhile
                records.append(self._record(*self._pending.popleft()))
        now = time.perf_counter()
        opened = [
            {"name": name, "start": round(start * NANOSECONDS) + self._offset, "thread": thread}
            for name, start, thread in list(self._opened.values())
            if now - start >= FLUSH_INTERVAL_S and self.is_on
        ]
        if opened != self._listed:
            self._listed = opened
            at = round(now * NANOSECONDS) + self._offset
            about = {"time": at, "rollout": self.rollout_id}
            records.append({"type": "open", **about, "spans": opened})
        if records:
            self._write(records)

    def _flush_often(self) -> None:
        while not self._stop.wait(FLUSH_INTERVAL_S):
            self.flush()

    def _write(self, records: list[dict[str, Any]]) -> None:
        with self._lock:
            if self._has_failed:
                return
            try:
                try:
                    self._file.write_all(records)
                except TypeError:  # text that is no Unicode, from a model or a user's function
                    self._file.write_all([_without_odd_text(record) for record in records])
                # an open file outlives its folder: what is written to it then is lost
                if not self._file.path.exists():
                    raise FileNotFoundError(f"{self._file.path} is gone")
            except OSError as error:
                self._has_failed, self.is_on = True, False
                self._file.close()
                logger.warning(
                    "%s records no more spans for --trace (%s: %s); the run goes on",
                    self.process,
                    type(error).__name__,
                    error,
                )

    def _record(
        self,
        name: str,
        start_s: float,
        end_s: float,
        thread: int,
        track: str | None,
        rollout_id: int | None,
        attrs: dict[str, Any] | None,
    ) -> dict[str, Any]:
        start = round(start_s * NANOSECONDS)
        record: dict[str, Any] = {
            "name": name,
            "start": start + self._offset,
            "dur": round(end_s * NANOSECONDS) - start,
            "thread": thread,
        }
        if track is not None:
            record["track"] = track
        if rollout_id is not None:
            record["rollout"] = rollout_id
        if attrs:
            record["attrs"] = attrs
        return record


def _without_odd_text(record: dict[str, Any]) -> dict[str, Any]:
    """The record, with attributes that JSON does not have as their ASCII representation."""
    try:
        encode(record)
    except TypeError:
        attrs = {ascii(name): ascii(value) for name, value in (record.get("attrs") or {}).items()}
        return {**record, "name": ascii(record.get("name")), "attrs": attrs}
    return record


_writer: SpanWriter | None = None


def current_writer() -> SpanWriter | None:
    """This process's writer, None without --trace: for threads that outlive the call that starts
    them.
    """
    return _writer


def exchange_writer(writer: SpanWriter | None) -> SpanWriter | None:
    """Makes `writer` the one of this process and returns the one before: actors of one process
    (--local) have one each.
    """
    global _writer
    before, _writer = _writer, writer
    return before


def trace_folder(args: argparse.Namespace) -> str | None:
    """Where the processes of this run write their spans; None without --trace."""
    return os.path.join(os.path.abspath(args.run_dir), FOLDER) if args.trace else None


def start_tracing(args: argparse.Namespace, process: str, **head: object) -> None:
    """Records the spans of this process from now on, where --trace asks for it. `head`: what
    further describes the process (role, rank).
    """
    folder = trace_folder(args)
    if folder is not None:
        open_writer(folder, process, every=args.trace_every, **head)


def open_writer(folder: str, process: str, *, every: int = 1, **head: object) -> None:
    """Records the spans of this process in `folder` from now on."""
    stop_tracing()
    exchange_writer(SpanWriter(folder, process, every=every, **head))


def stop_tracing() -> None:
    """Writes what is left and records no more. Harmless when nothing is recorded."""
    writer = exchange_writer(None)
    if writer is not None:
        writer.close()


def is_tracing() -> bool:
    """Whether a span that is added now is kept."""
    return _writer is not None and _writer.is_on


def set_rollout(rollout_id: int) -> None:
    """The rollout that this process works on from now on: the label of its spans, by which
    --trace-every chooses, and of its phases.
    """
    if _writer is not None:
        _writer.set_rollout(rollout_id)
    if (phases := current_phases()) is not None:
        phases.set_rollout(rollout_id)


def add_span(
    name: str,
    start_s: float,
    end_s: float,
    *,
    track: str | None = None,
    attrs: dict[str, Any] | None = None,
) -> None:
    """`SpanWriter.add` of this process; nothing without --trace."""
    if _writer is not None:
        _writer.add(name, start_s, end_s, track=track, attrs=attrs)


def open_span(name: str, start_s: float) -> None:
    """Notes that the phase `name`, of which there is one at a time, has begun."""
    if _writer is not None:
        _writer.open(name, name, start_s)
    if (phases := current_phases()) is not None:
        phases.begin(name, name)


def close_span(name: str, start_s: float, end_s: float) -> None:
    """Adds the phase that `open_span` has noted."""
    if _writer is not None:
        _writer.ended(name)
        _writer.add(name, start_s, end_s)
    if (phases := current_phases()) is not None:
        phases.end(name)


class _OpenSpan:
    """A span that ends with its block; an error that ends it is noted."""

    __slots__ = ("_attrs", "_name", "_writer", "_start", "_track")

    def __init__(
        self, writer: SpanWriter, name: str, track: str | None, attrs: dict[str, Any]
    ) -> None:
        self._writer, self._name, self._track, self._attrs = writer, name, track, attrs

    def __enter__(self) -> None:
        self._start = time.perf_counter()
        if self._track is None:
            self._writer.open(id(self), self._name, self._start)
            if (phases := current_phases()) is not None:
                phases.begin(id(self), self._name)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        end = time.perf_counter()
        self._writer.ended(id(self))
        if self._track is None and (phases := current_phases()) is not None:
            phases.end(id(self))
        if kind is not None:
            self._attrs["error"] = kind.__name__
        self._writer.add(self._name, self._start, end, track=self._track, attrs=self._attrs)


_OFF: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


def span(
    name: str, *, track: str | None = None, **attrs: object
) -> contextlib.AbstractContextManager[None]:
    """A context whose block is a span with these attributes."""
    if _writer is not None:
        return _OpenSpan(_writer, name, track, attrs)
    return _OFF if track is not None or current_phases() is None else phase(name)


def spanned(name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Returns a decorator that makes every call of a function a span."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
            with span(name):
                return function(*args, **kwargs)

        return wrapped

    return decorate


def spanned_items(name: str, items: Iterable[T]) -> Iterator[T]:
    """The same items; making each of them is a span."""
    iterator = iter(items)
    while True:
        with span(name):
            item = next(iterator, _END)
        if item is _END:
            return
        yield item  # type: ignore[misc]  # what is not the mark is an item


_END = object()
