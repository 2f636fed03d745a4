"""JSON texts of values that JSON lacks, exact: arrays, tensors, tuples, keys that are no texts,
floats that are no numbers, half an emoji. Reading executes nothing.

    {"__array__": base64, "dtype", "shape", "kind"}   array, tensor or numpy scalar
    {"__tuple__": [...]}  {"__set__": [...]}  {"__bytes__": base64}
    {"__float__": "nan"}  {"__int__": hex, of 300 digits and more}  {"__text__": UTF-16 in hex}
    {"__dict__": [[key, value], ...]}    a dict whose keys are no texts, or are one of these names
"""

from __future__ import annotations

import base64
import dataclasses
import datetime
import enum
import itertools
import math
import re
import reprlib
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from slime.data.ragged import is_tensor
from slime.exceptions import RolloutDataError
from slime.files import exact_json

_ARRAY, _FLOAT, _TEXT, _INT = "__array__", "__float__", "__text__", "__int__"
_TUPLE, _SET, _BYTES, _DICT = "__tuple__", "__set__", "__bytes__", "__dict__"
_MARKS = frozenset((_ARRAY, _FLOAT, _TEXT, _INT, _TUPLE, _SET, _BYTES, _DICT))
NOT_STORED = "__not_recorded__"  # the key of a description
_SURROGATE = re.compile("[\ud800-\udfff]")
_OPTIONS = orjson.OPT_NON_STR_KEYS
_SMALL = range(-(2**63), 2**63)
_LARGEST_DECIMAL = 10**300  # orjson reads integers of more digits as no number
_PLAIN = frozenset((int, float, str, bool, type(None)))
_NATIVE = _PLAIN | {list, dict}
_DEPTH = 8  # of values that are looked at together
_CONSTANTS = frozenset((bool, type(None)))
_ORJSONS = (datetime.date, datetime.time, uuid.UUID, enum.Enum, int)
_REPR = reprlib.Repr()
_REPR.maxother = _REPR.maxstring = 200

Unknown = Callable[[Any], Any]


def encode_json(value: object, *, describe: bool = False) -> bytes:
    """One JSON text of `value`. `RolloutDataError` for an object that has none; with `describe` its
    description stands in its place, under `NOT_STORED`.
    """
    unknown = _description if describe else _refuse
    try:
        return exact_json.dumps(
            _encode(value, unknown), default=lambda one: _object(one, unknown), option=_OPTIONS
        )
    except (TypeError, ValueError, RuntimeError) as error:
        if describe:
            return orjson.dumps(_description(value))
        cause = error.__cause__ if isinstance(error.__cause__, RolloutDataError) else error
        raise RolloutDataError(str(cause)) from error


def encode_each(values: Sequence[Any], *, describe: bool = False) -> list[bytes]:
    """`encode_json` of every value."""
    texts = plain_texts(values)
    return [encode_json(v, describe=describe) for v in values] if texts is None else texts


def plain_texts(values: Sequence[Any]) -> list[bytes] | None:
    """`encode_json` of every value where all are made of what JSON has, several times as fast; else
    None.
    """
    if not _are_plain(values):
        return None
    try:
        return list(map(orjson.dumps, values))
    except TypeError:  # half an emoji, an integer beyond 64 bits
        return None


def _are_plain(values: Sequence[Any]) -> bool:
    """Whether JSON holds all values, and all within them, as they are. All of one depth are looked
    at together.
    """
    level: list[Any] = list(values)
    for _ in range(_DEPTH):
        kinds = set(map(type, level))
        if not kinds <= _NATIVE:
            return False
        if float in kinds and not all(math.isfinite(v) for v in level if type(v) is float):
            return False
        following: list[Any] = []
        if dict in kinds:
            objects = [value for value in level if type(value) is dict]
            keys = set(itertools.chain.from_iterable(objects))
            if not _MARKS.isdisjoint(keys) or not set(map(type, keys)) <= {str}:
                return False
            following.extend(itertools.chain.from_iterable(map(dict.values, objects)))
        if list in kinds:
            following.extend(
                itertools.chain.from_iterable(value for value in level if type(value) is list)
            )
        level = following
        if not level:
            return True
    return False


def decode_json(text: bytes) -> Any:
    """What `encode_json` was given. `ValueError` or `TypeError` for a text that it did not make."""
    return decode_values(exact_json.loads(text))


def decode_values(value: object) -> Any:
    """The values of a JSON text that `encode_json` made, as they were."""
    try:
        return _decode(value)
    except RecursionError:
        raise ValueError("JSON is nested too deep") from None


# --- to JSON --------------------------------------------------------------------------------------


def _encode(value: Any, unknown: Unknown) -> Any:
    """`value` with what JSON lacks made explicit."""
    kind = type(value)
    if kind is str:
        return value if value.isascii() or not _SURROGATE.search(value) else _text(value)
    if kind is bool or value is None:
        return value
    if kind is int:
        return value if -_LARGEST_DECIMAL < value < _LARGEST_DECIMAL else {_INT: hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {_FLOAT: str(value)}
    if isinstance(value, dict):
        return _dict(value, unknown)
    if isinstance(value, list):
        return value if _is_plain(value) else [_encode(entry, unknown) for entry in value]
    if isinstance(value, tuple):
        return {_TUPLE: [_encode(entry, unknown) for entry in value]}
    return _object(value, unknown)


def _is_plain(values: list) -> bool:
    """Whether JSON holds the list as it is; False where finding out takes as long as encoding."""
    kinds = set(map(type, values))
    if kinds == {int}:
        return min(values) in _SMALL and max(values) in _SMALL
    if kinds == {float}:
        return math.isfinite(sum(values))
    if kinds == {str}:
        return all(map(str.isascii, values))
    return kinds <= _CONSTANTS


def _text(value: str) -> dict[str, str]:
    # half an emoji of an engine: JSON text has no form for it
    return {_TEXT: value.encode("utf-16-le", "surrogatepass").hex()}


def _dict(value: dict, unknown: Unknown) -> dict:
    if _MARKS.isdisjoint(value) and all(
        type(key) is str and (key.isascii() or not _SURROGATE.search(key)) for key in value
    ):
        return {key: _encode(entry, unknown) for key, entry in value.items()}
    return {_DICT: [[_encode(k, unknown), _encode(v, unknown)] for k, v in value.items()]}


def _object(value: Any, unknown: Unknown) -> Any:
    """Of an object that is no value of JSON: what stands for it, for orjson what it knows itself
    (dataclasses, dates), else what `unknown` makes of it.
    """
    try:
        if isinstance(value, np.ndarray):
            return {**_array_record(value, unknown), "kind": "array"}
        if isinstance(value, np.generic):
            return {**_array_record(np.asarray(value), unknown), "kind": "scalar"}
        if is_tensor(value):
            return _tensor_record(value, unknown)
    except (TypeError, ValueError, RuntimeError, AttributeError):
        return unknown(value)
    if isinstance(value, bytes | bytearray):
        return {_BYTES: base64.b64encode(value).decode()}
    if isinstance(value, set | frozenset):
        return {_SET: [_encode(entry, unknown) for entry in _in_order(value)]}
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, str):
        return _encode(str(value), unknown)
    if _is_orjsons(value, unknown):
        return value
    return unknown(value)


def _is_orjsons(value: object, unknown: Unknown) -> bool:
    """Whether orjson has a text for the object."""
    if not (dataclasses.is_dataclass(value) or isinstance(value, _ORJSONS)):
        return False
    try:
        orjson.dumps(value, default=lambda one: _object(one, unknown), option=_OPTIONS)
    except TypeError:
        return False
    return True


def _in_order(values: set | frozenset) -> list:
    try:
        return sorted(values)
    except TypeError:
        return list(values)


def _array_record(array: np.ndarray, unknown: Unknown) -> dict[str, Any]:
    shape = list(array.shape)
    if array.dtype == object:
        entries = [_encode(entry, unknown) for entry in array.reshape(-1).tolist()]
        return {_ARRAY: entries, "dtype": "object", "shape": shape}
    data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
    return {_ARRAY: data, "dtype": _dtype_record(array.dtype), "shape": shape}


def _dtype_record(dtype: np.dtype) -> Any:
    if dtype.subdtype is not None:
        return [_dtype_record(dtype.subdtype[0]), list(dtype.subdtype[1])]
    if dtype.fields is None:
        return dtype.name if dtype.isnative and dtype.kind in "biufc" else dtype.str
    names = list(dtype.names or ())
    return {
        "names": names,
        "formats": [_dtype_record(dtype.fields[name][0]) for name in names],
        "offsets": [dtype.fields[name][1] for name in names],
        "itemsize": dtype.itemsize,
    }


def _tensor_record(value: Any, unknown: Unknown) -> dict[str, Any]:
    tensor = value.detach().cpu().resolve_conj().resolve_neg()
    try:
        return {**_array_record(tensor.numpy(), unknown), "kind": "tensor"}
    except TypeError:  # numpy has no bfloat16, and no float of 8 bits
        import torch

        data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
        return {
            **_array_record(data, unknown),
            "kind": "tensor",
            "torch_dtype": str(tensor.dtype).removeprefix("torch."),
            "torch_shape": list(tensor.shape),
        }


def _refuse(value: object) -> Any:
    raise RolloutDataError(
        f"A sample holds a {type(value).__name__}, which a dump cannot store: "
        f"{_shown(value):.80}. Keep numbers, strings, lists, dicts, arrays and tensors in samples, "
        "or drop it in a sample hook."
    )


def _description(value: object) -> dict[str, str]:
    return {NOT_STORED: f"{type(value).__name__}: {_shown(value):.200}"}


def _shown(value: object) -> str:
    try:
        shown = _REPR.repr(value)
    except Exception:  # noqa: BLE001 - a plug-in's __repr__ may raise anything
        return "(its repr fails)"
    return shown.encode("utf-8", "replace").decode()


# --- from JSON ------------------------------------------------------------------------------------


def _decode(value: Any) -> Any:
    if isinstance(value, dict):
        if _ARRAY in value:
            return _decode_array(value)
        if len(value) == 1:
            (key,) = value
            if key in _MARKS:
                return _DECODERS[key](value[key])
        return {key: _decode(entry) for key, entry in value.items()}
    if isinstance(value, list):
        if _PLAIN.issuperset(map(type, value)):
            return value
        return [_decode(entry) for entry in value]
    return value


_DECODERS: Mapping[str, Callable[[Any], Any]] = {
    _FLOAT: float,
    _INT: lambda text: int(text, 16),
    _TEXT: lambda text: bytes.fromhex(text).decode("utf-16-le", "surrogatepass"),
    _TUPLE: lambda entries: tuple(_decode(entry) for entry in entries),
    _SET: lambda entries: {_decode(entry) for entry in entries},
    _BYTES: base64.b64decode,
    _DICT: lambda pairs: {_decode(key): _decode(entry) for key, entry in pairs},
}


def _dtype_of(record: Any) -> np.dtype:
    if isinstance(record, list):
        return np.dtype((_dtype_of(record[0]), tuple(record[1])))
    if isinstance(record, dict):
        formats = [_dtype_of(entry) for entry in record["formats"]]
        return np.dtype({**record, "formats": formats})  # type: ignore[call-overload]
    return np.dtype(record)


def _decode_array(record: dict[str, Any]) -> Any:
    data = record[_ARRAY]
    if isinstance(data, list):
        array = np.empty(len(data), dtype=object)
        for place, entry in enumerate(data):
            array[place] = _decode(entry)
    else:
        array = np.frombuffer(base64.b64decode(data), dtype=_dtype_of(record["dtype"])).copy()
    array = array.reshape(record["shape"])
    kind = record.get("kind")
    if kind == "scalar":
        return array[()]
    if kind != "tensor":
        return array
    import torch

    tensor, name = torch.from_numpy(array), record.get("torch_dtype")
    if name is None:
        return tensor
    dtype = getattr(torch, str(name), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch has no dtype {name!r}")
    if "torch_shape" not in record:  # of an earlier version: the numbers, widened
        return tensor.to(dtype)
    words = tensor.view(dtype) if len(array) else torch.empty(0, dtype=dtype)
    return words.reshape(record["torch_shape"])
