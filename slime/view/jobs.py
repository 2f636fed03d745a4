"""Work that takes longer than a click: `slime audit` and `slime diff`, each in a process of its own
that ends with the viewer, one at a time.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

TIMEOUT_S = 600.0
LARGEST_OUTPUT = 64 << 20  # bytes
MOST = 32


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a command said: its JSON object, or its error."""

    content: dict[str, Any] | None
    error: str


class Jobs:
    """Commands that are running or have ended, by their words."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="jobs")
        self._known: dict[tuple[str, ...], Outcome | None] = {}
        self._running: subprocess.Popen[bytes] | None = None
        self._is_closed = False

    def ask(self, *words: str, stamp: str = "") -> Outcome | None:
        """The outcome of `slime WORDS --json`, None while it runs. Another stamp: again."""
        key = (*words, stamp)
        with self._lock:
            if key not in self._known:
                if len(self._known) >= MOST:
                    self._known.pop(next(iter(self._known)))
                self._known[key] = None
                self._pool.submit(self._work, key, words)
            return self._known[key]

    def _work(self, key: tuple[str, ...], words: Sequence[str]) -> None:
        try:
            found = self._run(words)
        except OSError as error:
            found = Outcome(None, f"it could not be started: {error}")
        with self._lock:
            self._known[key] = found

    def _run(self, words: Sequence[str]) -> Outcome:
        command = [sys.executable, "-m", "slime.cli", *words, "--json"]
        with self._lock:
            if self._is_closed:
                return Outcome(None, "the viewer has ended")
            process = self._running = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
        try:
            output, errors = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            return Outcome(None, f"it was stopped after {TIMEOUT_S:.0f} s")
        if len(output) > LARGEST_OUTPUT:
            return Outcome(None, f"it has more than {LARGEST_OUTPUT:,} bytes of findings")
        try:
            content = json.loads(output)
        except ValueError:
            said = errors.decode("utf-8", "replace").strip() or "it said nothing"
            return Outcome(None, said[-2000:])
        return Outcome(content, "") if isinstance(content, dict) else Outcome(None, "no object")

    def close(self) -> None:
        """Ends what runs."""
        with self._lock:
            self._is_closed = True
            if self._running is not None and self._running.poll() is None:
                self._running.kill()
        self._pool.shutdown(wait=False, cancel_futures=True)
