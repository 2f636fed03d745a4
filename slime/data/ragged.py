"""Columns: how the entries of one field are held, so that a batch is a few arrays and not a hundred
thousand small ones.

`Ragged` is one values array and one offsets array; `UngatheredColumn` holds entries that are not
gathered yet; `Scalars` is one number per sample. Every column also answers as a plain Python list
(`as_list`), because plug-ins and upstream's functions expect lists. numpy only: torch values are
accepted by duck typing, so that importing this costs nothing on the rollout side.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import numpy as np

from slime.data.number_list import NumberList, packed
from slime.exceptions import RolloutDataError
from slime.typing import Array

if TYPE_CHECKING:
    import torch

SMALLEST_INT = "smallest"
# By dtype, how a list of its numbers is packed: several times faster than numpy reads it.
PACK_CODES = {"int32": "i", "int64": "i", "float32": "d", "float64": "d", "uint8": "B"}


def is_tensor(value: object) -> TypeGuard[torch.Tensor]:
    """True for a torch tensor, without importing torch."""
    return hasattr(value, "detach") and hasattr(value, "numel")


def num_entries(value: object) -> int | None:
    """Entries of a column, list, array [N, ...] or the like; None for what is no list of anything:
    a number, a text, a mapping, a set.
    """
    if (
        isinstance(value, str | bytes | Mapping | Set)
        or not hasattr(value, "__len__")
        or getattr(value, "ndim", 1) == 0
    ):
        return None
    return len(value)


def as_array(value: Any, dtype: str | None = None, *, what: str = "value") -> np.ndarray:
    """`value` (array, tensor, list or tuple) as a numpy array of `dtype`, without a copy where
    possible.

    Raises `RolloutDataError` naming `what` where it is not numeric, or where an integer dtype would
    change a value.
    """
    if type(value) is np.ndarray:
        array = value
    elif type(value) is NumberList and value.array is not None:
        array = value.array
    elif (
        isinstance(value, list)
        and dtype in PACK_CODES
        and (found := packed(value, PACK_CODES[dtype])) is not None
    ):
        array = found
    elif is_tensor(value):
        tensor = value.detach().cpu()
        array = (tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor).numpy()
    else:
        try:
            array = np.asarray(value)
        except ValueError as error:
            raise RolloutDataError(f"{what} is not an array of numbers: {error}") from None
    if array.dtype == object or array.dtype.kind in "USV":
        raise RolloutDataError(f"{what} must hold numbers, got {_preview(value)}")
    if dtype is None or array.dtype == dtype:
        return array
    target = np.dtype(dtype)
    converted = array.astype(target)
    lossy = target.kind in "iu" and not np.can_cast(array.dtype, target, "safe")
    if lossy and not np.array_equal(converted, array):
        raise RolloutDataError(
            f"{what} has values that do not fit {dtype}: {_preview(array[converted != array])}"
        )
    return converted


def _preview(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def smallest_int_dtype(low: int, high: int) -> str:
    """Name of the smallest integer dtype that holds every value in [low, high]."""
    for name in ("uint8", "int8", "int16", "int32"):
        info = np.iinfo(name)
        if info.min <= low and high <= info.max:
            return name
    return "int64"


class Column:
    """The entries of one field. `as_list` hands out a list once and remembers it, so that a
    plug-in's edits are seen.
    """

    _list: list | None = None
    _snapshot: tuple = ()
    _memory: list | None = None

    def __len__(self) -> int:
        raise RolloutDataError("a column needs a length")

    def _build_list(self) -> list:
        raise RolloutDataError("a column needs entries")

    def as_list(self) -> list:
        """The entries as a list; the same list object every time."""
        if self._list is None:
            self._hand_out(self._build_list())
        return cast(list, self._list)

    def was_edited(self) -> bool:
        """True when the list that was handed out no longer holds the entries of this column."""
        if self._list is None:
            return False
        if len(self._list) != len(self._snapshot) or not all(
            map(operator.is_, self._list, self._snapshot)
        ):
            return True
        return self._memory_of(self._list) != self._memory

    def adopt_list(self, entries: list) -> None:
        """Makes `entries`, which was handed out before, this column's list: the same object, its
        entries now views of this column.
        """
        entries[:] = self._build_list()
        self._hand_out(entries)

    def _hand_out(self, entries: list) -> None:
        self._list, self._snapshot, self._memory = entries, tuple(entries), self._memory_of(entries)

    def _memory_of(self, entries: list) -> list | None:
        """Where each entry's numbers are; None where an entry cannot be given others without being
        replaced.
        """
        return None


class Scalars(Column):
    """One number per sample: a 1-D numpy array [N]."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def _build_list(self) -> list:
        return self.values.tolist()

    def select(self, positions: np.ndarray) -> Scalars:
        """The entries at `positions`, in that order."""
        return Scalars(self.values[positions])


class Ragged(Column):
    """One array per sample, stored as `values` [rows, *trailing] and `offsets` [N + 1]; entry i
    starts at offsets[i] and has lengths[i] rows.

    Rows between the end of an entry and the next offset are padding that belongs to no entry.
    `values` is a numpy array (read-only when it comes from the object store) or a torch tensor;
    entries are views of it.
    """

    def __init__(
        self, values: Array, offsets: np.ndarray, lengths: np.ndarray | None = None
    ) -> None:
        self.values = values
        self.offsets = offsets
        self.lengths = np.diff(offsets) if lengths is None else lengths

    @staticmethod
    def of_lengths(values: Array, lengths: Sequence[int]) -> Ragged:
        """Entries of these lengths that stand one after another in `values`."""
        offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
        np.cumsum(lengths, out=offsets[1:])
        return Ragged(values, offsets)

    @staticmethod
    def of_tensors(entries: Sequence[Any]) -> Ragged:
        """The torch tensors `entries` (at least one), copied one after another into one."""
        import torch

        return Ragged.of_lengths(torch.cat(list(entries)), [len(entry) for entry in entries])

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def is_dense(self) -> bool:
        """True when there is no padding, so that `values` is the concatenation of the entries."""
        return int(self.lengths.sum()) == len(self.values)

    def _build_list(self) -> list:
        starts = self.offsets[:-1].tolist()
        if is_tensor(self.values) and self.is_dense:
            return list(self.values.split(self.lengths.tolist())) if len(self) else []
        values = self.values
        return [
            values[start : start + length]
            for start, length in zip(starts, self.lengths.tolist(), strict=True)
        ]

    def _memory_of(self, entries: list) -> list | None:
        # `tensor.data = other` leaves the tensor in the list, with other numbers
        return [entry.data_ptr() for entry in entries] if is_tensor(self.values) else None

    def dense_values(self) -> Any:
        """The concatenation of the entries (`values` itself when there is no padding)."""
        if self.is_dense:
            return self.values
        entries = self.as_list() or [self.values[:0]]
        if is_tensor(self.values):
            import torch

            return torch.cat(entries)
        return np.concatenate(entries)


class UngatheredColumn(Column):
    """One array per sample, each still where its maker left it; gathered once, in schedule order,
    by `gather`.
    """

    def __init__(self, parts: list[np.ndarray]) -> None:
        self.parts = parts
        self.lengths = np.fromiter(map(len, parts), dtype=np.int64, count=len(parts))

    def __len__(self) -> int:
        return len(self.parts)

    def _build_list(self) -> list:
        return list(self.parts)

    def gather(
        self,
        positions: Sequence[int],
        *,
        dtype: str,
        padding: np.ndarray | None = None,
        lead: int = 0,
    ) -> Ragged:
        """The entries at `positions` as one `Ragged` of `dtype`, in one copy.

        `padding` [len(positions)]: zero rows after each entry; `lead`: zero rows before the first.
        """
        chosen = [self.parts[position] for position in positions]
        lengths = self.lengths[np.asarray(positions, dtype=np.int64)]
        trailing = next((part.shape[1:] for part in chosen), ())
        steps = lengths if padding is None else lengths + padding
        offsets = np.empty(len(chosen) + 1, dtype=np.int64)
        offsets[0] = lead
        np.cumsum(steps, out=offsets[1:])
        offsets[1:] += lead
        out = np.empty((int(offsets[-1]), *trailing), dtype=dtype)
        pieces = chosen
        if padding is not None or lead:
            zeros = np.zeros(
                (max(lead, int(padding.max(initial=0)) if padding is not None else 0), *trailing),
                dtype=dtype,
            )
            pieces = [zeros[:lead]] if lead else []
            for part, pad in zip(
                chosen,
                (padding if padding is not None else np.zeros(len(chosen), int)).tolist(),
                strict=True,
            ):
                pieces.append(part)
                if pad:
                    pieces.append(zeros[:pad])
        if pieces:
            try:
                np.concatenate(pieces, out=out, casting="unsafe")
            except ValueError as error:
                raise RolloutDataError(
                    "entries of one field have different shapes: "
                    f"{sorted({p.shape[1:] for p in chosen})}"
                ) from error
        return Ragged(out, offsets, None if padding is None and not lead else lengths)


def concatenated_ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """`concat([arange(s, s + n) for s, n in zip(starts, lengths)])` without the loop: positions
    [sum of lengths], int64.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    total = int(lengths.sum())
    if total == 0:
        return np.zeros(0, dtype=np.int64)
    ends = np.cumsum(lengths)
    return np.arange(total, dtype=np.int64) + np.repeat(
        np.asarray(starts, dtype=np.int64) - (ends - lengths), lengths
    )
