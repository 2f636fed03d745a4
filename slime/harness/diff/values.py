"""Entries that differ: arrays of numbers at once, JSON values entry by entry."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

import numpy as np

from slime.data.ragged import is_tensor
from slime.harness.diff.stages import Text, is_compared_key

ABSENT = Text("absent")


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """Floats a and b are equal when |a - b| <= atol + rtol * max(|a|, |b|). Everything else must be
    identical.
    """

    rtol: float = 0.0
    atol: float = 0.0


EXACT = Tolerance()
_LONG, _SHORT = 16, 8  # rows and columns of a list of lists that is compared by column


@dataclasses.dataclass
class Extent:
    """How far floats are apart at most, also within tolerance."""

    largest: float = 0.0
    largest_relative: float = 0.0

    def add(self, apart: np.ndarray, size: np.ndarray) -> None:
        """Takes |a - b| and max(|a|, |b|) of entries that are not equal."""
        if not apart.size:
            return
        self.largest = max(self.largest, float(apart.max()))
        with np.errstate(invalid="ignore"):  # fmax passes over the NaN of what is not finite
            relative = float(np.fmax.reduce(apart / size, initial=0.0))
        self.largest_relative = max(self.largest_relative, relative)


def differing(a: np.ndarray, b: np.ndarray, tolerance: Tolerance, extent: Extent) -> np.ndarray:
    """int64: where two arrays of one shape [n] differ. NaN equals NaN."""
    places = np.flatnonzero(a != b)
    if not len(places) or (a.dtype.kind in "biu" and b.dtype.kind in "biu"):
        return places
    x, y = a[places].astype(np.float64), b[places].astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        apart = np.abs(x - y)
    is_nan = np.isnan(apart)
    if is_nan.any():
        apart[is_nan] = np.inf
        both = ~(np.isnan(x) & np.isnan(y))
        places, x, y, apart = places[both], x[both], y[both], apart[both]
    size = np.maximum(np.abs(x), np.abs(y))
    extent.add(apart, size)
    if tolerance == EXACT:
        return places
    allowed = tolerance.atol + tolerance.rtol * np.where(np.isfinite(size), size, 0.0)
    return places[~(apart <= allowed)]


Found = tuple[tuple[Any, ...], Any, Any]


def json_differences(a: object, b: object, tolerance: Tolerance, extent: Extent) -> Iterator[Found]:
    """Yields (path, entry of a, entry of b) where two JSON values differ, in order. Keys that
    are not compared are passed over.
    """
    numeric_a, numeric_b = _numeric(a), _numeric(b)
    if numeric_a is not None and numeric_b is not None:
        yield from _array_differences(numeric_a, numeric_b, tolerance, extent)
    elif isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in dict.fromkeys([*a, *b]):
            if not is_compared_key(key):
                continue
            if key in a and key in b:
                for path, x, y in json_differences(a[key], b[key], tolerance, extent):
                    yield (key, *path), x, y
            else:
                yield (key,), a.get(key, ABSENT), b.get(key, ABSENT)
    elif _is_grid(a) and _is_grid(b) and len(a) == len(b) and len(a[0]) == len(b[0]):
        yield from _grid_differences(a, b, tolerance, extent)
    elif isinstance(a, list | tuple) and isinstance(b, list | tuple):
        for index, (entry_a, entry_b) in enumerate(zip(a, b, strict=False)):
            for path, x, y in json_differences(entry_a, entry_b, tolerance, extent):
                yield (index, *path), x, y
        if len(a) != len(b):
            yield (min(len(a), len(b)),), *_lengths(len(a), len(b))
    elif a != b:
        yield (), a, b


def _is_grid(value: Any) -> TypeGuard[list[list[Any]]]:
    """Whether the value is a long list of short lists of one length, as an engine sends one per
    token: compared by column, as arrays.
    """
    if not isinstance(value, list) or len(value) < _LONG or not isinstance(value[0], list):
        return False
    width = len(value[0])
    return 0 < width <= _SHORT and all(isinstance(row, list) and len(row) == width for row in value)


def _grid_differences(
    a: list[list[Any]], b: list[list[Any]], tolerance: Tolerance, extent: Extent
) -> Iterator[Found]:
    found: list[Found] = []
    for place, (x, y) in enumerate(zip(zip(*a, strict=True), zip(*b, strict=True), strict=True)):
        if x == y:
            continue
        found += [
            ((path[0], place, *path[1:]), one, other)
            for path, one, other in json_differences(list(x), list(y), tolerance, extent)
        ]
    yield from sorted(found, key=lambda one: one[0][:2])


def _lengths(a: int, b: int) -> tuple[Text, Text]:
    return Text(f"{a} entries"), Text(f"{b} entries")


def _numeric(value: Any) -> np.ndarray | None:
    """Numbers and lists of numbers as an array, None for the rest."""
    if is_tensor(value):
        tensor = value.detach().cpu()
        return (tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor).numpy()
    if isinstance(value, np.ndarray | np.generic | bool | float):
        return np.asarray(value)
    if isinstance(value, int):
        return np.asarray(value) if -(2**63) <= value < 2**63 else None
    if (
        isinstance(value, list)
        and value
        and all(type(entry) in (bool, int, float) for entry in value)
    ):
        array = np.asarray(value)
        return None if array.dtype.kind == "O" else array
    return None


def _array_differences(
    a: np.ndarray, b: np.ndarray, tolerance: Tolerance, extent: Extent
) -> Iterator[Found]:
    if a.ndim == b.ndim == 1 and len(a) != len(b):
        count = min(len(a), len(b))
        yield from _array_differences(a[:count], b[:count], tolerance, extent)
        yield (count,), *_lengths(len(a), len(b))
        return
    if a.shape != b.shape:
        yield (), Text(f"shape {list(a.shape)}"), Text(f"shape {list(b.shape)}")
        return
    flat_a, flat_b = a.reshape(-1), b.reshape(-1)
    places = differing(flat_a, flat_b, tolerance, extent)
    for place, x, y in zip(places.tolist(), flat_a[places], flat_b[places], strict=True):
        if a.ndim == 1:
            yield (place,), x, y
        else:
            yield tuple(int(i) for i in np.unravel_index(place, a.shape)) if a.ndim else (), x, y
