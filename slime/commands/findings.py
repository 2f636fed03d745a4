"""The outcome of one check of `slime doctor`."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Finding:
    """The outcome of one check. `state` is ok, warn or fail; `remedy` says what to do about the
    last two.
    """

    name: str
    state: str
    detail: str
    remedy: str = ""


def ok(name: str, detail: str) -> Finding:
    """A check that passed."""
    return Finding(name, "ok", detail)


def warn(name: str, detail: str, remedy: str) -> Finding:
    """Something that works here but may surprise."""
    return Finding(name, "warn", detail, remedy)


def fail(name: str, detail: str, remedy: str) -> Finding:
    """Something without which slime does not run."""
    return Finding(name, "fail", detail, remedy)
