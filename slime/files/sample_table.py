"""Samples as a table and back, exact: one row per sample, readable without this code.

    column                                  holds
    index, group_index, rollout_id          identity
    prompt, response, finish_reason, status text; a chat prompt as JSON
    label, reward, metadata, weight_versions  JSON
    tokens, loss_mask, rollout_log_probs, teacher_log_probs, ...   a list per sample
    kinds                                   JSON: list fields that were no list, and what they were
    rest                                    JSON: every other field that is not its default

What a column cannot hold as it is, such as a text with half an emoji, is in `rest`, which wins.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from slime.data.number_list import NumberList, number_list, packed
from slime.data.ragged import is_tensor
from slime.data.sample import PrefixCacheInfo, Sample, SpecInfo, Status
from slime.exceptions import RolloutDataError
from slime.files import tables
from slime.files.json_values import decode_json, encode_json

if TYPE_CHECKING:
    import pyarrow

FORMAT = "slime-samples-2"
IDENTITIES = ("index", "group_index", "rollout_id")
TEXTS = ("prompt", "response", "finish_reason")
JSONS = ("label", "reward", "metadata", "weight_versions")
# by list field, the kind of numbers in it
LISTS = {
    "tokens": "i",
    "loss_mask": "i",
    "rollout_log_probs": "f",
    "teacher_log_probs": "f",
    "rollout_top_p_token_ids": "i",
    "rollout_top_p_token_offsets": "i",
}
_DEFAULTS = {name: value for name, value in vars(Sample()).items()}
_COLUMNS = frozenset((*IDENTITIES, *TEXTS, *JSONS, *LISTS, "status"))
_COUNTERS = {"spec_info": SpecInfo, "prefix_cache_info": PrefixCacheInfo}
INT64 = range(-(2**63), 2**63)
# by kind of a column, the arrays that it gives back as they were
_DTYPES = {
    "i": frozenset(("int8", "int16", "int32", "int64", "uint8")),
    "f": frozenset(("float32", "float64")),
}
_TYPES: Mapping[str, type] = {"i": int, "f": float}


@dataclasses.dataclass
class _ListColumn:
    """A list field of all samples while it is gathered: None where a sample has none, or has it in
    `rest`.
    """

    kind: str
    entries: list[np.ndarray | None] = dataclasses.field(default_factory=list)

    def to_arrow(self) -> pyarrow.Array:
        lengths = np.array([0 if e is None else len(e) for e in self.entries], dtype=np.int64)
        missing = np.array([e is None for e in self.entries], dtype=bool)
        present = [entry for entry in self.entries if entry is not None and len(entry)]
        if len({entry.dtype for entry in present}) == 1:
            values = np.concatenate(present)
        else:
            widest = "float64" if self.kind == "f" else "int64"
            values = np.concatenate([np.zeros(0, widest), *present], dtype=widest)
        return tables.list_column(_narrow(values), lengths, missing=missing)


def _narrow(values: np.ndarray) -> np.ndarray:
    """Integers of lists in 32 bits where all fit: files and readers take half of the time."""
    if values.dtype != np.int64 or not len(values):
        return values
    low, high = values.min(), values.max()
    if -(2**31) <= low and high < 2**31:
        return values.astype(np.int32)
    return values


def sample_table(samples: Sequence[Sample], *, describe: bool = False) -> pyarrow.Table:
    """The samples, one row each. `RolloutDataError` naming the sample where it holds an object that
    no file can; with `describe` the object's description is stored.
    """
    import pyarrow

    encode = functools.partial(encode_json, describe=describe)

    plain: dict[str, list[Any]] = collections.defaultdict(list)
    lists = {name: _ListColumn(kind) for name, kind in LISTS.items()}
    for sample in samples:
        try:
            _add_row(sample, plain, lists, encode)
        except RolloutDataError as error:
            raise RolloutDataError(f"Sample {sample.index} cannot be stored: {error}") from error
    columns: dict[str, Any] = {}
    for name in IDENTITIES:
        columns[name] = pyarrow.array(plain[name], pyarrow.int64())
    columns["response_length"] = pyarrow.array(plain["response_length"], pyarrow.int64())
    for name in (*TEXTS, "status", *JSONS, "kinds", "rest"):
        columns[name] = pyarrow.array(plain[name], pyarrow.large_string())
    for name, column in lists.items():
        if name in ("tokens", "loss_mask", "rollout_log_probs") or any(
            entry is not None for entry in column.entries
        ):
            columns[name] = column.to_arrow()
    return pyarrow.table(columns).replace_schema_metadata({"slime": FORMAT})


def _add_row(
    sample: Sample,
    plain: dict[str, list[Any]],
    lists: dict[str, _ListColumn],
    encode: Callable[[Any], bytes],
) -> None:
    values = sample.__dict__
    rest: dict[str, Any] = {}
    kinds: dict[str, str] = {}
    for name in IDENTITIES:
        value = values[name]
        fits = value is None or (type(value) is int and value in INT64)
        plain[name].append(value if fits else None)
        if not fits:
            rest[name] = value
    length = values["response_length"]
    fits = type(length) is int and length in INT64
    plain["response_length"].append(length if fits else None)
    if not fits:
        rest["response_length"] = length
    for name in TEXTS:
        value = values[name]
        text = value if isinstance(value, str) and _has_utf8(value) else None
        if text is None and value is not None:
            rest[name] = value
            text = encode(value).decode()  # to be read, not read back
        plain[name].append(text)
    status = values["status"]
    plain["status"].append(status.value if type(status) is Status else None)
    if type(status) is not Status:
        rest["status"] = status
    for name in JSONS:
        value = values[name]
        if isinstance(value, np.generic):  # a number is read as one, and comes back as it was
            rest[name] = value
            value = value.item()
        plain[name].append(None if value is None else encode(value).decode())
    for name, column in lists.items():
        value = values[name]
        found = None if value is None else _numbers(value, column.kind)
        if found is None:
            column.entries.append(None)
            if value is not None:
                rest[name] = value
            continue
        array, kind = found
        column.entries.append(array)
        if kind != "list":
            kinds[name] = kind
    for name, value in values.items():
        if name in _COLUMNS or name == "response_length" or _is_default(name, value):
            continue
        is_counter = type(value) is _COUNTERS.get(name)
        rest[name] = dataclasses.asdict(value) if is_counter else value
    plain["kinds"].append(encode(kinds).decode() if kinds else None)
    plain["rest"].append(encode(rest).decode() if rest else None)


def _has_utf8(text: str) -> bool:
    """False for a text with a lone surrogate, which UTF-8 does not have."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_default(name: str, value: Any) -> bool:
    if name not in _DEFAULTS:
        return False
    default = _DEFAULTS[name]
    if value is default:
        return True
    # the text tells -0.0 from 0.0
    return type(value) is type(default) and bool(value == default) and str(value) == str(default)


def _numbers(value: Any, kind: str) -> tuple[np.ndarray, str] | None:
    """(array [rows], what the value was), or None for what a list column cannot give back."""
    if type(value) in (list, NumberList):
        if not set(map(type, value)) <= {_TYPES[kind]}:
            return None
        array = packed(value, "i" if kind == "i" else "d")
        if array is None or array.dtype.kind not in f"{kind}u":
            try:
                array = np.array(value)
            except (ValueError, OverflowError):
                return None
        fits = array.ndim == 1 and array.dtype.name in _DTYPES[kind]
        return (array, "list") if fits else None
    if is_tensor(value):
        name = str(value.dtype).removeprefix("torch.")
        if value.ndim != 1 or name not in _DTYPES[kind]:
            return None
        return value.detach().cpu().numpy(), f"tensor {name}"
    if type(value) is np.ndarray and value.ndim == 1 and value.dtype.isnative:
        name = value.dtype.name
        return (value, f"array {name}") if name in _DTYPES[kind] else None
    return None


def samples_of(table: pyarrow.Table) -> list[Sample]:
    """The samples of a table, equal to what was stored. `RolloutDataError` for another table."""
    missing = {"index", "status", "tokens", "rest", "kinds"} - set(table.column_names)
    if missing:
        raise RolloutDataError(
            f"The table holds no samples: it has no column {', '.join(sorted(missing))}; its "
            f"columns are {', '.join(table.column_names[:20])}."
        )
    try:
        return _samples_of(table)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RolloutDataError(
            f"A row of the table is not a sample ({type(error).__name__}: {error})."
        ) from error


def _samples_of(table: pyarrow.Table) -> list[Sample]:
    plain = {
        name: table[name].to_pylist()
        for name in (*IDENTITIES, "response_length", *TEXTS, *JSONS, "status", "kinds", "rest")
    }
    lists = {
        name: (tables.entries_of(table[name]), tables.lists_of(table[name])[2].tolist())
        for name in LISTS
        if name in table.column_names
    }
    samples = []
    for row in range(len(table)):
        kinds = _json_at(plain["kinds"], row) or {}
        data: dict[str, Any] = {
            name: plain[name][row] for name in (*IDENTITIES, "response_length", *TEXTS)
        }
        status = plain["status"][row]
        data["status"] = None if status is None else Status(status)
        for name in JSONS:
            data[name] = _json_at(plain[name], row)
        for name, (entries, missing) in lists.items():
            data[name] = None if missing[row] else _restored(entries[row], kinds.get(name, "list"))
        rest = _json_at(plain["rest"], row) or {}
        for name, kind in _COUNTERS.items():
            if isinstance(rest.get(name), dict):
                rest[name] = kind(**rest[name])
        sample = Sample()
        sample.__dict__.update(data)
        sample.__dict__.update(rest)
        samples.append(sample)
    return samples


def _json_at(texts: list[str | None], row: int) -> Any:
    text = texts[row]
    return None if text is None else decode_json(text.encode())


def _restored(array: np.ndarray, kind: str) -> Any:
    what, _, dtype = kind.partition(" ")
    if what == "list":
        return number_list(array)
    array = array.astype(dtype)
    if what == "array":
        return array
    import torch

    return torch.from_numpy(array)


def changed_fields(before: Sample, after: Sample) -> dict[str, Any]:
    """The fields of `after` that differ from `before`, by name, as values that JSON can hold."""
    return {
        name: value.value if type(value) is Status else value
        for name, value in after.__dict__.items()
        if not _is_same(before.__dict__.get(name, _DEFAULTS), value)
    }


def with_changes(sample: Sample, changes: Mapping[str, Any]) -> Sample:
    """A copy of the sample with `changed_fields`."""
    other = Sample()
    other.__dict__.update(sample.__dict__)
    for name, value in changes.items():
        other.__dict__[name] = Status(value) if name == "status" else value
    return other


def _is_same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if is_tensor(a):
        return a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())
    try:
        return bool(a == b)
    except Exception:  # noqa: BLE001 - a structure of arrays; a plug-in's __eq__
        return False
