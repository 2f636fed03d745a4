"""Values of a foreign file as numbers, arrays and text. Nothing is trusted: each function says what
it takes and returns None, or NaN, for everything else.
"""

from __future__ import annotations

import itertools
import math
import numbers
from typing import Any

import numpy as np

from slime.data.number_list import packed
from slime.data.ragged import is_tensor
from slime.exceptions import RolloutDataError

MAX_TEXT = 4_000_000  # characters of one text that are looked at; a longer one is cut
MAX_TOKENS = 1 << 26  # of one sample
_DEPTH = 6
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "infinity": math.inf, "-inf": -math.inf,
               "-infinity": -math.inf}  # fmt: skip


def number_of(value: object) -> float:
    """A number, also in a tensor or an array of one entry, or spelled "nan" or "inf"; NaN for the
    rest.
    """
    if isinstance(value, bool | int | float):
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf
    if isinstance(value, str):
        return _NOT_FINITE.get(value.strip().lower().lstrip("+"), math.nan)
    if isinstance(value, list) and len(value) == 1 and not isinstance(value[0], list):
        return number_of(value[0])
    if isinstance(value, numbers.Real):
        return float(value)
    array = array_of(value)
    return float(array[0]) if array is not None and array.size == 1 else math.nan


def is_number(value: object) -> bool:
    """Whether `number_of` finds a number in it, finite or not."""
    if isinstance(value, list) and len(value) == 1:
        return is_number(value[0])
    spelled = isinstance(value, str) and value.strip().lower().lstrip("+") in _NOT_FINITE
    return spelled or isinstance(value, numbers.Real) or isinstance(value, np.generic)


def int_of(value: object) -> int | None:
    """A whole number within 63 bits, None for the rest."""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, float | np.floating) and math.isfinite(value) and value == int(value):
        value = int(value)
    if isinstance(value, str) and len(value) < 19 and value.strip().isdecimal():
        value = int(value)
    is_whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return int(value) if is_whole and abs(int(value)) < 2**62 else None  # type: ignore[call-overload]


def array_of(value: object) -> np.ndarray | None:
    """A flat list, array or tensor of numbers as a 1-D array; None entries are NaN. None for what is
    no such thing.

    RolloutDataError for a tensor that says it is larger than what the file holds of it.
    """
    if is_tensor(value):
        return _array_of_tensor(value)
    if isinstance(value, np.ndarray):
        return value.reshape(-1) if value.dtype.kind in "biuf" else None
    if not isinstance(value, list | tuple):
        return None
    entries: list = list(value) if isinstance(value, tuple) else value
    for code in ("i", "d"):
        found = packed(entries, code)
        if found is not None:
            return found
    if all(entry is None or isinstance(entry, bool | int | float | str) for entry in entries):
        return np.array([number_of(entry) for entry in entries], dtype=np.float64)
    return None


def _array_of_tensor(tensor: Any) -> np.ndarray:
    size = tensor.numel() * tensor.element_size()
    if size > tensor.untyped_storage().nbytes():
        # a stride of 0 makes any size of one number
        raise RolloutDataError(
            f"a tensor claims {tensor.numel()} entries of {tensor.untyped_storage().nbytes()} "
            "bytes in the file"
        )
    if tensor.numel() > MAX_TOKENS:
        raise RolloutDataError(f"a tensor of one sample has {tensor.numel()} entries")
    tensor = tensor.detach().cpu()
    if str(tensor.dtype) == "torch.bfloat16":
        tensor = tensor.float()
    return tensor.reshape(-1).numpy()


def ids_of(value: object) -> np.ndarray | None:
    """Token ids as int32 or int64 [T]; None where they are no whole numbers."""
    array = array_of(value)
    if array is None or not array.size:
        return None if array is None else np.zeros(0, dtype=np.int32)
    if array.dtype.kind == "f":
        if not np.isfinite(array).all() or (array != np.floor(array)).any():
            return None
        array = array.astype(np.int64)
    if array.dtype.itemsize < 4 or array.dtype.kind in "bu":
        array = array.astype(np.int64)
    low, high = int(array.min()), int(array.max())
    return array.astype(np.int32) if -(2**31) <= low and high < 2**31 else array.astype(np.int64)


def floats_of(value: object) -> np.ndarray | None:
    """Log-probs or advantages as float32 [T]: enough for nats, and half of the memory."""
    array = array_of(value)
    if array is None:
        return None
    with np.errstate(over="ignore"):
        return array.astype(np.float32, copy=False)


def text_of(value: object) -> str:
    """A prompt or response as text: a string as it is, a message as its content, several as
    `role: content` lines, other values as short text. At most MAX_TEXT characters.
    """
    if isinstance(value, str):
        return value if len(value) <= MAX_TEXT else value[:MAX_TEXT]
    if value is None or (isinstance(value, list) and not value):
        return ""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str):
        return text_of(value[0])
    messages = _messages(value)
    if messages is None:
        return _short(value, _DEPTH)[:2000]
    if len(messages) == 1:
        return messages[0][1][:MAX_TEXT]
    lines = (text if role is None else f"{role}: {text}" for role, text in messages)
    return "\n".join(lines)[:MAX_TEXT]


def last_message_of(value: object) -> str:
    """The content of the last of several messages; "" for everything else."""
    messages = _messages(value)
    return "" if messages is None or len(messages) == 1 else messages[-1][1][:MAX_TEXT]


def label_of(value: object) -> Any:
    """A label as graders take it: a number, a text, or a list of these; anything else as short
    text.
    """
    if isinstance(value, list) and len(value) <= 64 and all(map(_is_plain, value)):
        return value
    return value if _is_plain(value) else text_of(value)


def _is_plain(value: object) -> bool:
    if isinstance(value, str):
        return len(value) <= 100_000
    if isinstance(value, int):
        return value.bit_length() <= 4096  # what Python turns into text
    return value is None or isinstance(value, float)


def key_of(value: object) -> str | int | None:
    """What may name a group: a text, cut where it is long, or a whole number."""
    if isinstance(value, str):
        return value[:1000]
    return value if isinstance(value, int) and value.bit_length() <= 128 else None


def _messages(value: object) -> list[tuple[str | None, str]] | None:
    """(role, content) of each message; None where the value is no list of messages."""
    if not isinstance(value, list) or not value or not all(isinstance(one, dict) for one in value):
        return None
    return [(_role_of(message), _content_of(message)) for message in value[:1000]]


def _role_of(message: dict) -> str | None:
    role = message.get("role")
    return role if isinstance(role, str) else None


def _content_of(message: dict) -> str:
    content = message.get("content")
    if isinstance(content, list):  # parts of a multimodal message
        parts = [part.get("text") for part in content[:1000] if isinstance(part, dict)]
        content = " ".join(part for part in parts if isinstance(part, str))
    if content in (None, ""):  # a message that only calls a tool
        content = message.get("tool_calls") or ""
    return content if isinstance(content, str) else _short(content, _DEPTH)


def _short(value: object, depth: int) -> str:
    """Text of any value, of bounded size: a file may hold lists that hold each other many times."""
    if isinstance(value, str):
        return value[:500]
    if value is None or isinstance(value, bool | float):
        return str(value)
    if isinstance(value, int):
        return str(value) if abs(value) < 10**100 else "a large integer"
    if isinstance(value, dict | list | tuple):
        if not depth:
            return "..."
        if isinstance(value, dict):
            pairs = itertools.islice(value.items(), 8)
            inner = ", ".join(f"{_short(k, 0)}: {_short(v, depth - 1)}" for k, v in pairs)
            return f"{{{inner[:500]}}}"
        inner = ", ".join(_short(one, depth - 1) for one in value[:8])
        return f"[{inner[:500]}]"
    return f"<{type(value).__name__}>"
