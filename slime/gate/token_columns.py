"""Per-sample sequences as one contiguous array and offsets. Legend: N rows, `offsets` [N + 1], row
i is values[offsets[i]:offsets[i+1]].
"""

from __future__ import annotations

import array
import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from slime.data.number_list import packed

if TYPE_CHECKING:
    import torch


class Scratch:
    """Memory that one chunk after another is gathered into: fresh memory for each would cost more
    than the checks.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, str], np.ndarray] = {}

    def take(self, name: str, dtype: np.dtype, size: int) -> np.ndarray:
        """[size] values of `dtype`, not initialised; what was taken by this name and dtype before
        is overwritten.
        """
        key = (name, dtype.str)
        if key not in self._buffers or len(self._buffers[key]) < size:
            self._buffers[key] = np.empty(size, dtype=dtype)
        return self._buffers[key][:size]


@dataclasses.dataclass(frozen=True)
class TokenRows:
    """Rows of different lengths without padding."""

    values: np.ndarray
    offsets: np.ndarray

    @staticmethod
    def of(rows: list[np.ndarray], name: str, scratch: Scratch) -> TokenRows:
        """The rows, one after another, in memory of `scratch`."""
        offsets = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum([len(row) for row in rows], out=offsets[1:])
        dtype = np.result_type(*{row.dtype for row in rows}) if rows else np.dtype(np.int32)
        values = scratch.take(name, dtype, int(offsets[-1]))
        if len(values):
            np.concatenate(rows, out=values)
        return TokenRows(values, offsets)

    def row(self, index: int) -> np.ndarray:
        return self.values[self.offsets[index] : self.offsets[index + 1]]

    def row_extremes(self) -> tuple[np.ndarray, np.ndarray]:
        """[N] smallest and [N] largest value of each row: NaN where a row holds one, 0 for an empty
        row.
        """
        # reduceat would give an empty row its neighbour's value
        filled = np.flatnonzero(np.diff(self.offsets))
        lows, highs = np.zeros((2, len(self.offsets) - 1), dtype=self.values.dtype)
        if len(filled):
            lows[filled] = np.minimum.reduceat(self.values, self.offsets[filled])
            highs[filled] = np.maximum.reduceat(self.values, self.offsets[filled])
        return lows, highs


def token_array(tokens: object) -> np.ndarray | str:
    """Token ids as a 1-D integer array without copying where they are one already; a string that
    says what is wrong otherwise.
    """
    values = packed(tokens, "i") if isinstance(tokens, list) else _as_numpy(tokens)
    if values is None and isinstance(tokens, list):
        return f"tokens are not 32-bit integers: {_first_bad(tokens, int)}"
    if values is None or values.ndim != 1 or (values.dtype.kind not in "iu" and values.size):
        return f"tokens must be a flat sequence of integers, got {_kind(tokens, values)}"
    if values.dtype == np.uint64:  # numpy makes floats of uint64 next to int64
        if values.size and values.max() >= 2**63:
            return f"tokens are not 63-bit integers: entry {int(values.argmax())} is {values.max()}"
        return values.astype(np.int64)
    # a vocabulary's size does not fit narrower integers
    return values if values.size and values.dtype.itemsize >= 4 else values.astype(np.int32)


def log_prob_array(log_probs: object) -> np.ndarray | str:
    """Log-probs as a 1-D float array; None entries become NaN only in `missing_positions`, here
    they are an error string.
    """
    values = packed(log_probs, "d") if isinstance(log_probs, list) else _as_numpy(log_probs)
    if values is None and isinstance(log_probs, list):
        return f"log-probs are not numbers: {_first_bad(log_probs, float)}"
    if values is None or values.ndim != 1 or (values.dtype.kind not in "fiu" and values.size):
        return f"log-probs must be a flat sequence of numbers, got {_kind(log_probs, values)}"
    return values


def mask_array(mask: object) -> np.ndarray | str:
    """A loss mask as a 1-D array of 0 and 1; a string that says what is wrong otherwise."""
    values = packed(mask, "B") if isinstance(mask, list) else _as_numpy(mask)
    if values is None and isinstance(mask, list):  # floats, or no numbers at all
        values = _as_numpy(tuple(mask))
    if values is None or values.ndim != 1 or (values.dtype.kind not in "biuf" and values.size):
        return f"loss mask must be a flat sequence of 0 and 1, got {_kind(mask, values)}"
    if values.dtype == np.uint8 and (not values.size or values.max() <= 1):
        return values
    wrong = np.flatnonzero((values != 0) & (values != 1))
    return (
        f"entry {wrong[0]} of the loss mask is {values[wrong[0]]}, not 0 or 1"
        if len(wrong)
        else values
    )


def missing_positions(log_probs: object) -> np.ndarray | None:
    """[T] bool, True where an entry is None; None when there is no such entry or the value is not a
    list.
    """
    if not isinstance(log_probs, list | tuple):
        return None
    missing = np.fromiter((value is None for value in log_probs), dtype=bool, count=len(log_probs))
    return missing if missing.any() else None


def length_of(values: Any) -> int:
    """len(values), -1 for None, -2 where there is no length."""
    if values is None:
        return -1
    try:
        return len(values)
    except TypeError:
        return -2


def _as_numpy(values: object) -> np.ndarray | None:
    if isinstance(values, np.ndarray):
        return values
    try:
        if hasattr(values, "detach"):  # a tensor, without importing torch
            return _tensor_as_numpy(values.detach().cpu())
        if isinstance(values, tuple | range | array.array):
            return np.asarray(values)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None
    return None


def _tensor_as_numpy(tensor: torch.Tensor) -> np.ndarray:
    try:
        return tensor.numpy()
    except TypeError:  # bfloat16 has no numpy type
        return tensor.float().numpy()


def as_int(value: object) -> int | None:
    """`value` as int where it is one, of Python or numpy; None otherwise."""
    return int(value) if isinstance(value, int | np.integer) else None


def _first_bad(values: list, kind: type) -> str:
    accepted = (int, np.integer) if kind is int else (int, float, np.integer, np.floating)
    for position, value in enumerate(values):
        if not isinstance(value, accepted) or (kind is int and not -(2**31) <= value < 2**31):
            return f"entry {position} is {str(value)[:40]!r} of type {type(value).__name__}"
    return "values out of range"


def _kind(raw: object, values: np.ndarray | None) -> str:
    return (
        type(raw).__name__
        if values is None
        else f"{type(raw).__name__} of shape {list(values.shape)} and dtype {values.dtype}"
    )
