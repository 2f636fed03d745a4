"""Calls of a user's code that must come back: a limit to what they wait for, and a watch over those
that hold the event loop.

Three ways to hang need three answers. A call that awaits something for ever is cancelled
(`call_within`). One that blocks its event loop (a sleep, a request without a timeout, an endless
loop) cannot be ended from inside: a thread detects it, and code that waits for the loop raises
(`raise_overdue`). One that keeps the interpreter to itself (C code that does not let go of the GIL)
stops every thread of the process: a timer below Python then writes the stacks and ends the process,
and `last_words` names what was running.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import faulthandler
import logging
import mmap
import os
import sys
import threading
import time
from collections.abc import Coroutine, Generator
from pathlib import Path
from types import FrameType
from typing import Any

from slime.exceptions import SlimeError

logger = logging.getLogger(__name__)

WATCH_INTERVAL_S = 0.5
# How much longer than a call's limit the interpreter may be held before the process is ended.
HELD_GRACE_S = 5.0
NOTE_BYTES = 4096
FRAMES_SHOWN = 4
DEBUGGERS = ("pdb.py", "bdb.py", "debugpy", "pydevd")


class CallTimeout(SlimeError):
    """A user's function took longer than its limit."""


@dataclasses.dataclass(frozen=True)
class Step:
    """The part of a call that runs now, without giving its event loop back."""

    what: str
    option: str
    timeout_s: float
    started: float


class CallWatch:
    """The steps that run in this process, by thread, and the thread and the timer that
    watch them.
    """

    def __init__(self) -> None:
        self._steps: dict[int, Step] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._overdue: CallTimeout | None = None
        self._is_armed = False
        self._note: mmap.mmap | None = None
        self._stacks: Any = None

    def record_in(self, folder: str | Path) -> None:
        """Keeps in `folder` what is called, for the case that the process is ended by the timer."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob("call-*"):  # of an earlier run in this folder
            left.unlink(missing_ok=True)
        file = (folder / f"call-{os.getpid()}.note").open("w+b")
        file.truncate(NOTE_BYTES)
        self._note = mmap.mmap(file.fileno(), NOTE_BYTES)
        self._stacks = (folder / f"call-{os.getpid()}.stacks").open("w")

    def begin(self, step: Step) -> None:
        """Notes that a step begins in the calling thread."""
        self._steps[threading.get_ident()] = step
        if self._note is not None:
            text = f"{step.option}\n{step.timeout_s:g}\n{step.what}".encode()[: NOTE_BYTES - 1]
            self._note[: len(text) + 1] = text + b"\0"
        if self._thread is None:
            self._start()
        if not self._is_armed:
            self._arm()

    def end(self) -> None:
        """Notes that the calling thread's step gave its event loop back."""
        self._steps.pop(threading.get_ident(), None)

    def raise_overdue(self) -> None:
        """CallTimeout, with the stack, for a step that has held its event loop beyond its limit;
        once per step.
        """
        if self._overdue is not None:
            error, self._overdue = self._overdue, None
            raise error

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._watch, name="slime-call-watch", daemon=True
                )
                self._thread.start()

    def _watch(self) -> None:
        while True:
            time.sleep(WATCH_INTERVAL_S)
            steps = dict(self._steps)
            with self._lock:
                if steps:
                    self._arm()
                elif self._is_armed:
                    faulthandler.cancel_dump_traceback_later()
                    self._is_armed = False
            for thread_id, step in steps.items():
                held_s = time.monotonic() - step.started
                if held_s > step.timeout_s and self._steps.get(thread_id) is step:
                    self._note_overdue(thread_id, step, held_s)

    def _arm(self) -> None:
        """(Re)starts the timer that ends this process if no thread gets the
        interpreter any more.
        """
        longest = max((step.timeout_s for step in list(self._steps.values())), default=0.0)
        # no stream to write to: then without this last resort
        with contextlib.suppress(ValueError, OSError, RuntimeError):
            stacks = {} if self._stacks is None else {"file": self._stacks}
            faulthandler.dump_traceback_later(longest + HELD_GRACE_S, exit=True, **stacks)
            self._is_armed = True

    def _note_overdue(self, thread_id: int, step: Step, held_s: float) -> None:
        frame = sys._current_frames().get(thread_id)
        frames = [] if frame is None else _frames_of(frame)
        if any(mark in name for name, _, _ in frames for mark in DEBUGGERS):
            return  # someone is looking at it
        place = " <- ".join(
            f"{name}:{line} in {function}" for name, line, function in frames[:FRAMES_SHOWN]
        )
        error = CallTimeout(
            f"{step.what} has held its event loop for {held_s:.0f} s, more than {step.option} "
            f"{step.timeout_s:g} allows: it neither returned "
            f"nor awaited anything. It stands at {place}. Await what takes long, give it a timeout of its own, or raise {step.option}."
        )
        if self._steps.get(thread_id) is step:
            self._overdue = error
            # reported once; its thread may stay blocked for long after the run has ended
            self._steps.pop(thread_id, None)


def _frames_of(frame: FrameType | None) -> list[tuple[str, int, str]]:
    """(file, line, function), innermost first."""
    found = []
    while frame is not None:
        found.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return found


WATCH = CallWatch()


class _Steps:
    """Awaits a coroutine and reports each of its steps to the watch."""

    def __init__(
        self, coro: Coroutine[Any, Any, Any], what: str, option: str, timeout_s: float
    ) -> None:
        self.coro, self.what, self.option, self.timeout_s = coro, what, option, timeout_s
        self.own_s = 0.0

    def __await__(self) -> Generator[Any, Any, Any]:
        send: Any = self.coro.send
        value: Any = None
        while True:
            started = time.monotonic()
            WATCH.begin(Step(self.what, self.option, self.timeout_s, started))
            try:
                yielded = send(value)
            except StopIteration as stop:
                return stop.value
            finally:
                WATCH.end()
                self.own_s += time.monotonic() - started
            try:
                value = yield yielded
                send = self.coro.send
            except BaseException as error:  # noqa: BLE001 - handed to the coroutine, as `await` does
                send, value = self.coro.throw, error


async def call_within(
    coro: Coroutine[Any, Any, Any], *, what: str, option: str, timeout_s: float
) -> Any:
    """The result of a user's coroutine; CallTimeout after `timeout_s` seconds of its own.

    Time in which other calls held the event loop does not count: a thousand calls may wait for each
    other. `what` names function and sample, `option` the flag that sets the limit.
    """
    steps = _Steps(coro, what, option, timeout_s)

    async def run() -> Any:
        return await steps

    task = asyncio.ensure_future(run())
    slice_s = timeout_s / 8
    spent = 0.0
    try:
        while spent < timeout_s:
            started, own = time.monotonic(), steps.own_s
            done, _ = await asyncio.wait({task}, timeout=min(slice_s, timeout_s - spent))
            if done:
                return task.result()
            spent += max(min(time.monotonic() - started, 1.5 * slice_s), steps.own_s - own)
    finally:
        if not task.done():
            task.cancel()
    raise CallTimeout(
        f"{what} did not return within {option} {timeout_s:g} s. Give what it waits for a limit, "
        f"or raise {option}."
    )


def last_words(folder: str | Path | None) -> str | None:
    """What a process whose interpreter was held by a call was running when the timer ended it; None
    where that did not happen.
    """
    for stacks in sorted(Path(folder or os.devnull).glob("call-*.stacks")):
        note = stacks.with_suffix(".note")
        if not stacks.stat().st_size or not note.exists():
            continue
        option, timeout_s, what = (
            note.read_bytes().split(b"\0", 1)[0].decode(errors="replace").split("\n", 2)
        )
        return (
            f"{what} kept the interpreter to itself for more than {option} {timeout_s} s (code in "
            "C that does not let other threads run, for "
            f"instance a regular expression), so its process was ended. The stacks of its threads are in {stacks}."
        )
    return None
