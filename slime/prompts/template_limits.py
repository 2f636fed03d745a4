"""Limits for chat templates, which are programs from a model's folder: seconds and characters of a
render, and one trial in another process before the first.

A template runs in the sandbox of the tokenizer's library, which bounds neither. A render is
interrupted from another thread, wherever it is called; that reaches loops, and not one long
operation inside C (a power, a huge text). The first render of a template is therefore preceded by
one of sample conversations, in a process that can be killed and whose memory is bounded.
"""

from __future__ import annotations

import ctypes
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from slime.exceptions import RolloutDataError
from slime.prompts import template_trial

RENDER_SECONDS = 10.0
MAX_CHARS = template_trial.MAX_CHARS
TRIAL_SECONDS = 20.0


class TemplateLimit(RolloutDataError):
    """A render took too long or made too long a text."""


class _Interrupt(BaseException):
    """Raised inside a render that is out of time; no template catches it."""


class _Watch:
    """Interrupts calls of other threads at their deadlines, from one thread of its own."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._deadlines: dict[int, float] = {}  # by thread
        self._interrupted: set[int] = set()
        self._thread: threading.Thread | None = None

    def call(self, function: Callable[[], str], seconds: float) -> str:
        """What `function` returns; TimeoutError where that takes longer."""
        thread = threading.get_ident()
        with self._changed:
            if thread in self._deadlines:  # a render inside a render: the outer deadline holds
                return function()
            self._deadlines[thread] = time.monotonic() + seconds
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(
                    target=self._serve, name="slime-template-watch", daemon=True
                )
                self._thread.start()
            self._changed.notify()
        try:
            try:
                return function()
            finally:
                self._leave(thread)
        except _Interrupt:
            raise TimeoutError from None

    def _leave(self, thread: int) -> None:
        while True:
            try:
                with self._changed:
                    was_interrupted = thread in self._interrupted
                    self._interrupted.discard(thread)
                    self._deadlines.pop(thread, None)
                break
            except _Interrupt:  # just now: leave all the same
                continue
        if was_interrupted:
            _absorb(thread)

    def _serve(self) -> None:
        with self._changed:
            while True:
                now = time.monotonic()
                for thread, deadline in list(self._deadlines.items()):
                    if deadline <= now and thread not in self._interrupted:
                        self._interrupted.add(thread)
                        _raise_in(thread, _Interrupt)
                waiting = [
                    deadline - now
                    for thread, deadline in self._deadlines.items()
                    if thread not in self._interrupted
                ]
                self._changed.wait(min(waiting, default=None))


def _raise_in(thread: int, error: type[BaseException]) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error))


def _absorb(thread: int) -> None:
    """Takes an interruption of this thread that may not have been raised yet. One that is withdrawn
    instead leaves the interpreter's mark of it set for ever, and Python 3.11 then loops in the next
    call that is traced or profiled.
    """
    try:
        _raise_in(thread, _Interrupt)
        while True:
            pass
    except _Interrupt:
        pass


_watch = _Watch()
_problems: dict[str, str | None] = {}  # by template; None: its trial ended within the limits


def apply_template(tokenizer: Any, messages: list[dict], **options: Any) -> str:
    """The text of `tokenizer.apply_chat_template(messages, tokenize=False, **options)`.

    TemplateLimit where it takes more than RENDER_SECONDS or has more than MAX_CHARS characters, and
    where the template's trial exceeded a limit.
    """
    for template in (getattr(tokenizer, "chat_template", None), options.get("chat_template")):
        for text in template.values() if isinstance(template, dict) else (template,):
            if isinstance(text, str):
                _check(text, tokenizer)
    try:
        text = _watch.call(
            lambda: tokenizer.apply_chat_template(messages, tokenize=False, **options),
            RENDER_SECONDS,
        )
    except TimeoutError:
        raise TemplateLimit(
            f"the chat template did not end within {RENDER_SECONDS:g} s on {len(messages)} "
            "messages. Give the tokenizer another one."
        ) from None
    if len(text) > MAX_CHARS:
        raise TemplateLimit(
            f"the chat template makes a text of {len(text)} characters from {len(messages)} "
            f"messages; at most {MAX_CHARS}. Give the tokenizer another one."
        )
    return text


def _check(template: str, tokenizer: Any) -> None:
    """TemplateLimit where the template exceeds a limit on sample conversations; what it refuses or
    does wrong is not looked at.
    """
    if template not in _problems:
        marks = getattr(tokenizer, "special_tokens_map", {}).items()
        _problems[template] = _try(
            {name: text for name, text in marks if isinstance(text, str)}, template
        )
    problem = _problems[template]
    if problem is not None:
        raise TemplateLimit(f"the chat template {problem}. Give the tokenizer another one.")


def _try(marks: dict[str, str], template: str) -> str | None:
    try:
        done = subprocess.run(
            [sys.executable, "-I", template_trial.__file__],
            input=json.dumps({"template": template, "marks": marks}).encode(),
            capture_output=True,
            timeout=TRIAL_SECONDS,
            check=False,
            start_new_session=True,
        )
    except subprocess.TimeoutExpired:
        return f"did not end within {TRIAL_SECONDS:g} s on a conversation of a few words"
    if done.returncode == template_trial.TOO_MUCH:
        return done.stdout.decode(errors="replace").strip()
    if done.returncode == -signal.SIGXCPU:
        return (
            f"did not end within {template_trial.CPU_SECONDS} s of processor time on a "
            "conversation of a few words"
        )
    if done.returncode < 0:
        return f"ended the process that tried it with signal {-done.returncode}"
    return None
