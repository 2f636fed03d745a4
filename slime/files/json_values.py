"""JSON texts of values that JSON lacks: arrays, tensors, floats that are no numbers, half an emoji.
Reading executes nothing.
"""

from __future__ import annotations

import base64
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from slime.data.ragged import is_tensor
from slime.exceptions import RolloutDataError
from slime.files import exact_json

_ARRAY, _NAN, _TEXT = "__array__", "__float__", "__text__"
_SURROGATE = re.compile("[\ud800-\udfff]")
_OPTIONS = orjson.OPT_NON_STR_KEYS


def encode_json(value: object) -> bytes:
    """One JSON text of `value`, which may hold arrays, tensors and floats that are no numbers.
    `RolloutDataError` for other objects.
    """
    try:
        return exact_json.dumps(_encode(value), default=_encode_object, option=_OPTIONS)
    except TypeError as error:
        raise RolloutDataError(str(error.__cause__ or error)) from error


def decode_json(text: bytes) -> Any:
    """What `encode_json` was given; tuples come back as lists."""
    return decode_values(exact_json.loads(text))


def _encode(value: object) -> Any:
    """`value` with what JSON lacks made explicit: arrays with their dtype, and the floats that are
    no numbers.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return {_NAN: str(value)}
    if isinstance(value, dict):
        return {key: _encode(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        # long lists of plain ints need no look inside
        if value and type(value[0]) is int and type(value[-1]) is int:
            return value if isinstance(value, list) else list(value)
        return [_encode(entry) for entry in value]
    if isinstance(value, np.ndarray) or is_tensor(value):
        return _encode_object(value)
    # half an emoji of an engine: JSON text has no form for it
    if isinstance(value, str) and not value.isascii() and _SURROGATE.search(value):
        return {_TEXT: value.encode("utf-16-le", "surrogatepass").hex()}
    return value


def _encode_object(value: Any) -> Any:
    if is_tensor(value):
        tensor = value.detach().cpu()
        if str(tensor.dtype) == "torch.bfloat16":
            return {
                **_array_record(tensor.float().numpy()),
                "kind": "tensor",
                "torch_dtype": "bfloat16",
            }
        return {**_array_record(tensor.numpy()), "kind": "tensor"}
    if isinstance(value, np.ndarray):
        return {**_array_record(value), "kind": "array"}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, set | frozenset):
        return sorted(value)
    if isinstance(value, Path):
        return str(value)
    raise RolloutDataError(
        f"A sample holds a {type(value).__name__}, which a dump cannot store: {value!r:.80}. Keep "
        "numbers, strings, lists, dicts, arrays and "
        f"tensors in samples, or drop it in a sample hook."
    )


def _array_record(array: np.ndarray) -> dict[str, Any]:
    if array.dtype == object:
        raise RolloutDataError(
            "A sample holds an array of Python objects, which a dump cannot store."
        )
    data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
    return {_ARRAY: data, "dtype": array.dtype.name, "shape": list(array.shape)}


def decode_values(value: object) -> Any:
    """The values of a JSON text that `encode_json` made, as they were."""
    if isinstance(value, dict):
        if _NAN in value and len(value) == 1:
            return float(value[_NAN])
        if _TEXT in value and len(value) == 1:
            return bytes.fromhex(value[_TEXT]).decode("utf-16-le", "surrogatepass")
        if _ARRAY in value:
            return _decode_array(value)
        return {key: decode_values(entry) for key, entry in value.items()}
    if isinstance(value, list):
        if value and type(value[0]) is int and type(value[-1]) is int:
            return value
        return [decode_values(entry) for entry in value]
    return value


def _decode_array(record: dict[str, Any]) -> Any:
    array = (
        np.frombuffer(base64.b64decode(record[_ARRAY]), dtype=record["dtype"])
        .reshape(record["shape"])
        .copy()
    )
    if record.get("kind") != "tensor":
        return array
    import torch

    tensor = torch.from_numpy(array)
    return tensor.to(torch.bfloat16) if record.get("torch_dtype") == "bfloat16" else tensor
