"""Which phases this process is in, for whoever watches it from outside.

    with phase("save_model"):        begins and ends one
        ...

Spans and timers (spans.py, timer.py) are phases too. Without a watch this costs a comparison.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

SHOWN = 3


class Phases:
    """The phases that have begun and not ended; `show` gets them as one text at each change."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self._open: dict[int | str, str] = {}
        self._last = "its start"
        self._rollout_id: int | None = None
        self._tell()

    def set_rollout(self, rollout_id: int) -> None:
        """The rollout that the process works on from now on."""
        self._rollout_id = rollout_id
        self._tell()

    def begin(self, key: int | str, name: str) -> None:
        """Notes that a phase has begun, until `end(key)`."""
        self._open[key] = name
        self._tell()

    def end(self, key: int | str) -> None:
        """Notes that the phase of `key` has ended."""
        self._last = self._open.pop(key, self._last)
        self._tell()

    def _tell(self) -> None:
        opened = list(self._open.values())[-SHOWN:]  # other threads begin and end phases meanwhile
        text = " > ".join(opened) if opened else f"after {self._last}"
        self._show(text if self._rollout_id is None else f"rollout {self._rollout_id}: {text}")


_phases: Phases | None = None


def show_phases(show: Callable[[str], None]) -> None:
    """Makes `show` take the phases of this process from now on."""
    global _phases
    _phases = Phases(show)


def current_phases() -> Phases | None:
    """None where nobody watches this process."""
    return _phases


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Inside, this process is in the phase `name`."""
    phases, key = _phases, object()
    if phases is None:
        yield
        return
    phases.begin(id(key), name)
    try:
        yield
    finally:
        phases.end(id(key))
