"""Stop strings: found in the text of the last tokens, wherever the borders between tokens lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import numpy as np

Decode = Callable[[Sequence[int]], str]
Ids = TypeVar("Ids", Sequence[int], "np.ndarray")


def find_stop(tokens: Ids, stops: tuple[str, ...], *, decode: Callable[[Ids], str]) -> str | None:
    """Returns the stop string that the last token completed (the one that starts first), else None.
    `decode` keeps special tokens.
    """
    longest = max(len(stop.encode()) for stop in stops)
    # Every token but a few special ones holds at least one byte, so the match and some bytes before
    # it are in this tail.
    tail = decode(tokens[-(longest + 8) :])
    found = [(tail.find(stop), stop) for stop in stops if stop in tail]
    return min(found)[1] if found else None


def cut_at_stop(tokens: Sequence[int], stop: str, *, decode: Decode) -> int | None:
    """Returns how many characters of the text of `tokens` come before `stop`, None if that text
    does not show it.

    An occurrence that was complete before the last token does not count: min_new_tokens required to
    go on.
    """
    text = decode(tokens)
    earlier = len(decode(tokens[:-1]).rstrip("\ufffd"))
    place = text.find(stop, max(0, earlier - len(stop) + 1))
    return None if place < 0 else place


def held_back(text: str, stops: tuple[str, ...]) -> int:
    """Returns how many trailing characters of a streamed `text` may still change: half a character,
    or the start of a stop string.
    """
    incomplete = len(text) - len(text.rstrip("\ufffd"))
    longest = 0
    for stop in stops:
        for size in range(min(len(stop) - 1, len(text)), 0, -1):
            if text.endswith(stop[:size]):
                longest = max(longest, size)
                break
    return max(incomplete, longest)
