"""`NumberList`: a Python list of numbers that remembers its array.

Plug-ins expect tokens, log-probs and masks of a `Sample` to be lists. The gate and the columns read
arrays, and packing a list into one costs ten times what they do with it. So a list that came out of
an array, or was packed once, keeps the array until the list is changed.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from slime.typing import Numbers

if TYPE_CHECKING:
    import numpy as np


class NumberList(list):
    """A list in every respect. `array`: its numbers as a numpy array [N] where they are known as
    one, else None; it must not be written to.

    Every method that changes the list forgets the array, also one that another thread is just
    making. C code that writes into a list's memory (heapq) goes past them. A sum of lists, a slice
    and a copy are plain lists; see `joined`.
    """

    __slots__ = ("_array", "_changes")

    def __init__(self, values: Iterable = (), *, array: np.ndarray | None = None) -> None:
        super().__init__(values)
        self._array = array
        self._changes = 0

    @property
    def array(self) -> np.ndarray | None:
        array = self._array
        return array if array is not None and len(array) == len(self) else None

    def __reduce__(self) -> tuple:
        # an array travels several times faster than its numbers
        return (NumberList, (list(self),)) if self.array is None else (_from_array, (self._array,))


def _forgetting(name: str) -> Callable[..., Any]:
    change = getattr(list, name)

    def method(self: NumberList, *args: object, **kw: object) -> Any:
        try:
            return change(self, *args, **kw)
        finally:  # counted after the change, so that `packed` notices an array packed before it
            self._changes += 1
            self._array = None

    method.__name__, method.__doc__ = name, change.__doc__
    return method


for _name in (
    "__setitem__",
    "__delitem__",
    "__iadd__",
    "__imul__",
    "append",
    "clear",
    "extend",
    "insert",
    "pop",
    "remove",
    "reverse",
    "sort",
):
    setattr(NumberList, _name, _forgetting(_name))


def _from_array(array: np.ndarray) -> NumberList:
    array.flags.writeable = False  # a copy and a pickle of a read-only array can be written to
    return NumberList(array.tolist(), array=array)


def number_list(values: Any) -> NumberList:
    """A new `NumberList` of a list, tuple, numpy array or tensor [N]; empty for None. It shares no
    memory with `values`.
    """
    if values is None:
        return NumberList()
    if not hasattr(values, "tolist"):
        return NumberList(values, array=known_array(values))
    import numpy as np

    if hasattr(values, "detach"):  # a tensor, without importing torch
        values = values.detach().cpu()
        if str(values.dtype) == "torch.bfloat16":  # numpy has none
            values = values.float()
    array = np.array(values)
    if array.ndim != 1:
        return NumberList(array.tolist())
    array.flags.writeable = False
    return NumberList(array.tolist(), array=array)


def joined(first: Numbers | None, second: list) -> NumberList:
    """The numbers of `first` (list, array, tensor or None), then those of `second`. The sum knows
    its array where `second` does: `first` is packed then. None of the two is changed.
    """
    first = first if isinstance(first, list) else number_list(first)
    values = NumberList(first)
    list.extend(values, second)
    tail = known_array(second)
    if tail is None or tail.dtype.kind not in "if":
        return values
    head = packed(first, "i" if tail.dtype.kind == "i" else "d")
    if head is None or (len(head) and tail.dtype.kind != head.dtype.kind):
        return values
    import numpy as np

    array = np.concatenate([head, tail]) if len(head) else tail
    array.flags.writeable = False
    values._array = array
    return values


def known_array(values: object) -> np.ndarray | None:
    """The array that `values` remembers; None for a list that knows none, and for anything else."""
    return values.array if isinstance(values, NumberList) else None


def packed(values: list, code: str) -> np.ndarray | None:
    """The list as an array [N]: the one it remembers, or int32 (`code` "i"), float64 ("d") or uint8
    ("B"), which a `NumberList` remembers then.

    None where it holds something that this type does not: struct is strict about types, and twice
    as fast as numpy on a list.
    """
    if (array := known_array(values)) is not None:
        return array
    import numpy as np

    changes = values._changes if isinstance(values, NumberList) else None
    try:
        data = bytes(values) if code == "B" else struct.pack(f"{len(values)}{code}", *values)
    except (struct.error, TypeError, ValueError, OverflowError):
        return None
    array = np.frombuffer(data, dtype=code)
    if isinstance(values, NumberList):
        values._array = array
        if values._changes != changes:  # the list was changed meanwhile
            values._array = None
    return array
