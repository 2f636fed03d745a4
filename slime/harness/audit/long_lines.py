"""A line of JSON that is too long to be parsed whole: a batch on one line. Its outermost object is
taken apart by the brackets; a list of lists comes as `Entries`, each parsed when it is asked for.
"""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

from slime.exceptions import RolloutDataError

_BRACKET = re.compile(rb'[\[\]{}"]')
_QUOTE = re.compile(rb'["\\]')
_SCALAR_END = re.compile(rb"[,}\s]")
_SPACE = b" \t\r\n"
LONGEST_VALUE = 1 << 28  # bytes of a value that is no list of lists
MOST_KEYS = 1000
MOST_ENTRIES, MOST_BRACKETS, DEEPEST = 5_000_000, 20_000_000, 64


class Entries(Sequence):
    """The inner lists of a list of lists, by their places in the file."""

    def __init__(
        self, file: BinaryIO, spans: list[tuple[int, int]], parse: Callable[[bytes], Any]
    ) -> None:
        self._file, self._spans, self._parse = file, spans, parse

    def __len__(self) -> int:
        return len(self._spans)

    def __getitem__(self, i: Any) -> Any:
        low, high = self._spans[i]
        return self._parse(os.pread(self._file.fileno(), high - low, low))


def columns_of(
    file: BinaryIO, start: int, parse: Callable[[bytes], Any], *, flat: frozenset[str]
) -> tuple[dict[str, Any], int]:
    """(the values of the object that begins at byte `start`, by key; the byte behind its line).
    `flat`: keys whose inner lists hold numbers alone. RolloutDataError where it is no object.
    """
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
        end = view.find(b"\n", start)
        end = len(view) if end < 0 else end
        columns: dict[str, Any] = {}
        at = _skip(view, start, end)
        if view[at : at + 1] != b"{":
            raise RolloutDataError("a line that is no object")
        at = _skip(view, at + 1, end)
        while view[at : at + 1] == b'"':
            behind = _string_end(view, at, end)
            key = parse(view[at:behind])
            at = _skip(view, behind, end)
            if view[at : at + 1] != b":":
                raise RolloutDataError(f"no colon behind the key {key[:40]!r}")
            at = _skip(view, at + 1, end)
            spans, behind = _value(view, at, end, is_flat=key in flat)
            if spans is not None:
                columns[key] = Entries(file, spans, parse)
            elif behind - at > LONGEST_VALUE:
                raise RolloutDataError(f"{key[:40]!r} has {behind - at} bytes")
            else:
                columns[key] = parse(view[at:behind])
            if hasattr(mmap, "MADV_DONTNEED"):  # or the file counts as this process's memory
                view.madvise(mmap.MADV_DONTNEED)
            at = _skip(view, behind, end)
            if view[at : at + 1] != b",":
                break
            if len(columns) > MOST_KEYS:
                raise RolloutDataError(f"more than {MOST_KEYS} keys")
            at = _skip(view, at + 1, end)
        if view[at : at + 1] != b"}" or view[at + 1 : end].strip():
            raise RolloutDataError("an object that is not closed")
        return columns, end + 1


def _skip(view: mmap.mmap, at: int, end: int) -> int:
    while at < end and view[at] in _SPACE:
        at += 1
    return at


def _string_end(view: mmap.mmap, at: int, end: int) -> int:
    """The byte behind the string that begins at `at`."""
    at += 1
    while match := _QUOTE.search(view, at, end):
        if match.group() == b'"':
            return match.end()
        at = match.end() + 1
    raise RolloutDataError("a text that is not closed")


def _value(
    view: mmap.mmap, at: int, end: int, *, is_flat: bool
) -> tuple[list[tuple[int, int]] | None, int]:
    """(places of the inner lists of a list of lists, else None; the byte behind the value)."""
    first = view[at : at + 1]
    if first == b'"':
        return None, _string_end(view, at, end)
    if first not in (b"[", b"{"):
        match = _SCALAR_END.search(view, at, end)
        return None, match.start() if match else end
    inner = _skip(view, at + 1, end)
    is_list_of_lists = first == b"[" and view[inner : inner + 1] == b"["
    if is_list_of_lists and is_flat:
        return _flat_spans(view, inner, end)
    spans, depth, begun, count = [], 0, at, 0
    while match := _BRACKET.search(view, at, end):
        found, at, count = match.group(), match.end(), count + 1
        if count > MOST_BRACKETS or depth > DEEPEST:
            raise RolloutDataError(
                f"more than {MOST_BRACKETS} brackets, or {DEEPEST} levels of them"
            )
        if found == b'"':
            at = _string_end(view, match.start(), end)
        elif found in b"[{":
            depth += 1
            begun = match.start() if depth == 2 else begun
        else:
            depth -= 1
            if depth == 1:
                spans.append((begun, at))
                behind = _skip(view, at, end)
                if view[behind : behind + 1] == b",":
                    behind = _skip(view, behind + 1, end)
                is_list_of_lists &= view[behind : behind + 1] in (b"[", b"]")
            if depth == 0:
                return spans if is_list_of_lists else None, at
    raise RolloutDataError("a list or an object that is not closed")


def _flat_spans(view: mmap.mmap, at: int, end: int) -> tuple[list[tuple[int, int]], int]:
    """Places of lists that hold no list and no text: to the next bracket each."""
    spans = []
    while view[at : at + 1] == b"[":
        behind = view.find(b"]", at, end) + 1
        if not behind:
            break
        spans.append((at, behind))
        if len(spans) > MOST_ENTRIES:
            raise RolloutDataError(f"a list of more than {MOST_ENTRIES} lists")
        at = _skip(view, behind, end)
        if view[at : at + 1] == b"]":
            return spans, at + 1
        at = _skip(view, at + 1, end)
    raise RolloutDataError("a list of lists that is not closed")
