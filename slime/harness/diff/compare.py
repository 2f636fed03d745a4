"""Compares two columns over matched samples, all samples at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from slime.harness.diff.columns import Column
from slime.harness.diff.stages import Text, is_compared_key
from slime.harness.diff.values import (
    ABSENT,
    EXACT,
    Extent,
    Found,
    Tolerance,
    differing,
    json_differences,
)

_BLOCK = 1 << 17  # numbers that are compared at a time, so that they stay in the cache
_AROUND = 24  # characters of a long text before its first difference


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Which rows are compared: row `a[i]` of A with row `b[i]` of B."""

    a: np.ndarray
    b: np.ndarray

    def __len__(self) -> int:
        return len(self.a)


@dataclasses.dataclass
class Outcome:
    """What differs in one column. `pairs`: the pairs that differ, ascending; `first`: of the lowest
    pair the first entry.
    """

    entries: int = 0
    pairs: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    extent: Extent = dataclasses.field(default_factory=Extent)
    first: Found | None = None


def compare_columns(a: Column, b: Column, pairs: Pairs, tolerance: Tolerance = EXACT) -> Outcome:
    """Compares the entries of two columns. A column of another kind differs in every entry."""
    missing_a, missing_b = _missing(a, pairs.a), _missing(b, pairs.b)
    one_lacks = np.flatnonzero(missing_a != missing_b)
    both = np.flatnonzero(~(missing_a | missing_b))
    found = Outcome()
    if a.kind != b.kind or a.trailing != b.trailing:
        found.entries, found.pairs = len(both), both
        if len(both):
            found.first = (), Text(_form(a)), Text(_form(b))
    elif len(both):
        compare = _KINDS[a.kind]
        compare(a, b, Pairs(pairs.a[both], pairs.b[both]), tolerance, found)
        found.pairs = both[found.pairs]
    if len(one_lacks):
        lowest = one_lacks[0]
        if not len(found.pairs) or lowest < found.pairs[0]:
            row_a, row_b = int(pairs.a[lowest]), int(pairs.b[lowest])
            sides = [_or_absent(a, row_a), _or_absent(b, row_b)]
            found.first = (), sides[0], sides[1]
        found.entries += len(one_lacks)
        found.pairs = np.union1d(found.pairs, one_lacks)
    return found


def _missing(column: Column, rows: np.ndarray) -> np.ndarray:
    return np.zeros(len(rows), dtype=bool) if column.missing is None else column.missing[rows]


def _form(column: Column) -> str:
    shape = f" of shape {list(column.trailing)}" if column.trailing else ""
    return f"a column of kind {column.kind}{shape}"


def _or_absent(column: Column, row: int) -> Any:
    value = column.at(row)
    if value is None:
        return ABSENT
    return Text(f"{len(value)} entries") if column.kind == "rows" else value


# --- by kind --------------------------------------------------------------------------------------


def _compare_numbers(
    a: Column, b: Column, pairs: Pairs, tolerance: Tolerance, found: Outcome
) -> None:
    x, y = a.values[pairs.a], b.values[pairs.b]
    places = differing(x, y, tolerance, found.extent)
    found.entries, found.pairs = len(places), places
    if len(places):
        found.first = (), x[places[0]], y[places[0]]


def _compare_rows(a: Column, b: Column, pairs: Pairs, tolerance: Tolerance, found: Outcome) -> None:
    assert a.offsets is not None and b.offsets is not None
    starts_a, starts_b = a.offsets[pairs.a], b.offsets[pairs.b]
    lengths_a, lengths_b = a.offsets[pairs.a + 1] - starts_a, b.offsets[pairs.b + 1] - starts_b
    shared = np.minimum(lengths_a, lengths_b)
    differ = lengths_a != lengths_b
    found.entries = int(np.abs(lengths_a - lengths_b).sum())
    first_place = np.where(differ, shared, -1)  # by pair: where its first difference is
    for low, high in _blocks(shared):
        sizes = shared[low:high]
        x = _gather(a.values, starts_a[low:high], sizes)
        y = _gather(b.values, starts_b[low:high], sizes)
        places = differing(x, y, tolerance, found.extent)
        if not len(places):
            continue
        bounds = np.concatenate(([0], np.cumsum(sizes)))
        found.entries += len(places)
        starts = np.searchsorted(places, bounds)  # of each pair's own among the places
        pair = np.flatnonzero(np.diff(starts))
        differ[low + pair] = True
        first_place[low + pair] = places[starts[pair]] - bounds[pair]
    found.pairs = np.flatnonzero(differ)
    if len(found.pairs):
        lowest = int(found.pairs[0])
        place = int(first_place[lowest])
        path = _path(place, a.trailing)
        if place < shared[lowest]:
            sides = a.values[starts_a[lowest] + place], b.values[starts_b[lowest] + place]
        else:
            width = int(np.prod(a.trailing, dtype=np.int64))
            counts = int(lengths_a[lowest]) // width, int(lengths_b[lowest]) // width
            sides = Text(f"{counts[0]} entries"), Text(f"{counts[1]} entries")
        found.first = path, *sides


def _path(place: int, trailing: tuple[int, ...]) -> tuple[int, ...]:
    if not trailing:
        return (place,)
    width = int(np.prod(trailing, dtype=np.int64))
    return (place // width, *(int(i) for i in np.unravel_index(place % width, trailing)))


def _blocks(sizes: np.ndarray) -> Iterator[tuple[int, int]]:
    """Bounds of blocks of pairs of about _BLOCK numbers."""
    total = np.cumsum(sizes)
    low = 0
    while low < len(sizes):
        before = total[low - 1] if low else 0
        high = max(low + 1, int(np.searchsorted(total, before + _BLOCK, side="right")))
        yield low, high
        low = high


def _gather(values: np.ndarray, starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """values[start : start + size] of every pair, one after the other; a view where they lie so."""
    ends = starts + sizes
    if np.array_equal(starts[1:], ends[:-1]):
        return values[starts[0] : ends[-1]]
    bounds = np.cumsum(sizes) - sizes
    index = np.arange(int(sizes.sum()), dtype=np.int64)
    return values[index + np.repeat(starts - bounds, sizes)]


def _compare_texts(
    a: Column, b: Column, pairs: Pairs, tolerance: Tolerance, found: Outcome
) -> None:
    del tolerance
    found.pairs = _differing_texts(a, b, pairs)
    found.entries = len(found.pairs)
    if found.entries:
        lowest = found.pairs[0]
        x, y = a.at(int(pairs.a[lowest])), b.at(int(pairs.b[lowest]))
        found.first = around_difference(x, y)


def _differing_texts(a: Column, b: Column, pairs: Pairs) -> np.ndarray:
    import pyarrow
    import pyarrow.compute

    x, y = a.values.take(pyarrow.array(pairs.a)), b.values.take(pyarrow.array(pairs.b))
    if x.type != y.type:
        x, y = x.cast(pyarrow.large_string()), y.cast(pyarrow.large_string())
    differs = pyarrow.compute.not_equal(x, y)
    return np.flatnonzero(differs.to_numpy(zero_copy_only=False))


def around_difference(x: str, y: str) -> Found:
    """Two texts from a little before the character where they part, which is the path."""
    place = next(
        (i for i, (c, d) in enumerate(zip(x, y, strict=False)) if c != d), min(len(x), len(y))
    )
    if max(len(x), len(y)) <= 2 * _AROUND:
        return (), x, y
    start = max(0, place - _AROUND)
    lead = "..." if start else ""
    return (f"character {place}",), lead + x[start:][:200], lead + y[start:][:200]


def _compare_json(a: Column, b: Column, pairs: Pairs, tolerance: Tolerance, found: Outcome) -> None:
    differ = []
    for pair in _differing_texts(a, b, pairs).tolist():
        x, y = a.at(int(pairs.a[pair])), b.at(int(pairs.b[pair]))
        entries = list(json_differences(x, y, tolerance, found.extent))
        if entries:
            differ.append(pair)
            found.entries += len(entries)
            found.first = found.first or entries[0]
    found.pairs = np.array(differ, dtype=np.int64)


_KINDS = {
    "number": _compare_numbers,
    "rows": _compare_rows,
    "text": _compare_texts,
    "json": _compare_json,
}


def compare_objects(
    a: Column, b: Column, pairs: Pairs, tolerance: Tolerance = EXACT
) -> dict[str, Outcome]:
    """Compares a JSON column of objects, by key. Keys that do not differ are not in the result. A
    sample without an object has an empty one.
    """
    found: dict[str, Outcome] = {}
    a, b = _with_objects(a), _with_objects(b)
    for pair in _differing_texts(a, b, pairs).tolist():
        x, y = a.at(int(pairs.a[pair])), b.at(int(pairs.b[pair]))
        if not isinstance(x, dict) or not isinstance(y, dict):
            x, y = {"rest": x}, {"rest": y}
        for key in dict.fromkeys([*x, *y]):
            if not is_compared_key(key):
                continue
            outcome = found.get(key) or Outcome()
            sides = x.get(key, ABSENT), y.get(key, ABSENT)
            entries = list(json_differences(*sides, tolerance, outcome.extent))
            if entries:
                outcome.entries += len(entries)
                outcome.first = outcome.first or entries[0]
                outcome.pairs = np.append(outcome.pairs, pair)
                found[key] = outcome
    return found


def _with_objects(column: Column) -> Column:
    return Column("json", column.values.fill_null("{}"))
