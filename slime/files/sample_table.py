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

import dataclasses
import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from slime.data.number_list import NumberList, known_array, number_list, packed
from slime.data.ragged import is_tensor
from slime.data.sample import PrefixCacheInfo, Sample, SpecInfo, Status
from slime.exceptions import RolloutDataError
from slime.files import tables
from slime.files.json_values import decode_json, encode_json, plain_texts

if TYPE_CHECKING:
    import pyarrow

FORMAT = "slime-samples-2"
INTEGERS = ("index", "group_index", "rollout_id", "response_length")
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
_COLUMNS = frozenset((*INTEGERS, *TEXTS, *JSONS, *LISTS, "status"))
_OTHERS = tuple(name for name in _DEFAULTS if name not in _COLUMNS)
# list columns that are there also where no sample has the field
ALWAYS = ("tokens", "loss_mask", "rollout_log_probs")
_COUNTERS = {"spec_info": SpecInfo, "prefix_cache_info": PrefixCacheInfo}
INT64 = range(-(2**63), 2**63)
# by kind of a column, the arrays that it gives back as they were
_DTYPES: Mapping[str, Mapping[Any, str]] = {
    "i": {np.dtype(name): name for name in ("int8", "int16", "int32", "int64", "uint8")},
    "f": {np.dtype(name): name for name in ("float32", "float64")},
}
_INT_OR_NONE = frozenset((int, type(None)))
_LIST_TYPES = frozenset((list, NumberList))
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

    gathered = _Gathered([sample.__dict__ for sample in samples], describe=describe)
    columns: dict[str, Any] = {name: gathered.integers(name) for name in INTEGERS}
    for name in TEXTS:
        columns[name] = gathered.texts(name)
    columns["status"] = gathered.status()
    for name in JSONS:
        columns[name] = gathered.jsons(name)
    lists = {name: gathered.lists(name, kind) for name, kind in LISTS.items()}
    gathered.others()
    columns["kinds"] = gathered.encoded(gathered.kinds)
    columns["rest"] = gathered.encoded(gathered.rest)
    columns.update({name: column for name, column in lists.items() if column is not None})
    return pyarrow.table(columns).replace_schema_metadata({"slime": FORMAT})


class _Gathered:
    """Columns of the samples' `rows`. A column is made in one step where its values are all of the
    usual kind, and value by value otherwise; what it cannot hold is put into `rest`.
    """

    def __init__(self, rows: list[dict[str, Any]], *, describe: bool) -> None:
        self.rows, self.describe = rows, describe
        self.rest: list[dict[str, Any]] = [{} for _ in rows]
        self.kinds: list[dict[str, Any]] = [{} for _ in rows]

    def integers(self, name: str) -> pyarrow.Array:
        import pyarrow

        values = [row[name] for row in self.rows]
        if not (
            set(map(type, values)) <= _INT_OR_NONE
            and all(value is None or value in INT64 for value in values)
        ):
            for row, value in enumerate(values):
                if value is not None and not (type(value) is int and value in INT64):
                    self.rest[row][name] = value
                    values[row] = None
        return pyarrow.array(values, pyarrow.int64())

    def texts(self, name: str) -> pyarrow.Array:
        import pyarrow

        values = [row[name] for row in self.rows]
        if set(map(type, values)) == {str} and all(map(str.isascii, values)):
            return pyarrow.array(values, pyarrow.large_string())
        for row, value in enumerate(values):
            if value is None or (type(value) is str and _has_utf8(value)):
                continue
            self.rest[row][name] = value  # what stands in the column is to be read, not read back
            values[row] = (
                value.encode("utf-8", "replace").decode()
                if isinstance(value, str)
                else self._encode(row, value)
            )
        return pyarrow.array(values, pyarrow.large_string())

    def status(self) -> pyarrow.Array:
        import pyarrow

        values = [row["status"] for row in self.rows]
        for row, value in enumerate(values):
            if type(value) is not Status:
                self.rest[row]["status"] = value
        texts = [value.value if type(value) is Status else None for value in values]
        return pyarrow.array(texts, pyarrow.large_string())

    def jsons(self, name: str) -> pyarrow.Array:

        values = [row[name] for row in self.rows]
        if any(issubclass(kind, np.generic) for kind in set(map(type, values))):
            for row, value in enumerate(values):
                if isinstance(value, np.generic):  # is read as a number, and comes back as it was
                    self.rest[row][name] = value
                    values[row] = value.item()
        return self._texts(values)

    def lists(self, name: str, kind: str) -> pyarrow.Array | None:
        """None where no sample has the field and readers do not expect its column."""
        values = [row[name] for row in self.rows]
        present = [value for value in values if value is not None]
        if not present and name not in ALWAYS:
            return None
        column = _ListColumn(kind)
        usual = set(map(type, present)) <= _LIST_TYPES and set(
            map(type, itertools.chain.from_iterable(present))
        ) <= {_TYPES[kind]}
        if usual:
            known = [None if value is None else known_array(value) for value in values]
            if not all(a is not None and a.dtype in _DTYPES[kind] for a in known if a is not None):
                known = [None]
            if sum(array is not None for array in known) == len(present):
                column.entries = known
                return column.to_arrow()
            flat = _flat(present, kind)
            if flat is not None:
                lengths = np.array([0 if v is None else len(v) for v in values], dtype=np.int64)
                missing = np.array([value is None for value in values], dtype=bool)
                return tables.list_column(_narrow(flat), lengths, missing=missing)
        for row, value in enumerate(values):
            found = None if value is None else _numbers(value, kind)
            column.entries.append(_with_holes(value, kind) if found is None else found[0])
            if found is None and value is not None:
                self.rest[row][name] = value
            elif found is not None and found[1] != "list":
                self.kinds[row][name] = found[1]
        return column.to_arrow()

    def others(self) -> None:
        """Puts the fields that have no column, and are not their default, into `rest`."""
        columns = zip(*map(operator.itemgetter(*_OTHERS), self.rows), strict=True)
        for name, values in zip(_OTHERS, columns, strict=False):
            if set(map(id, values)) == {id(_DEFAULTS[name])}:
                continue
            for row, value in enumerate(values):
                if not _is_default(name, value):
                    is_counter = type(value) is _COUNTERS.get(name)
                    self.rest[row][name] = _counts_of(value) if is_counter else value
        for row, fields in enumerate(self.rows):
            if len(fields) != len(_DEFAULTS):
                self.rest[row].update({n: v for n, v in fields.items() if n not in _DEFAULTS})

    def encoded(self, records: list[dict[str, Any]]) -> pyarrow.Array:
        """A column of objects; null for an empty one."""
        return self._texts([record or None for record in records])

    def _texts(self, values: list[Any]) -> pyarrow.Array:
        """A column of JSON texts; null for None."""
        import pyarrow

        present = [value for value in values if value is not None]
        plain = plain_texts(present)
        if plain is None:
            texts = [None if v is None else self._encode(row, v) for row, v in enumerate(values)]
        elif len(present) == len(values):
            texts = [text.decode() for text in plain]
        else:
            following = map(bytes.decode, plain)
            texts = [None if value is None else next(following) for value in values]
        return pyarrow.array(texts, pyarrow.large_string())

    def _encode(self, row: int, value: Any) -> str:
        try:
            return encode_json(value, describe=self.describe).decode()
        except RolloutDataError as error:
            raise RolloutDataError(
                f"Sample {self.rows[row]['index']} cannot be stored: {error}"
            ) from error


def _counts_of(counter: Any) -> dict[str, Any]:
    """`dataclasses.asdict` of numbers, which need no copies."""
    return {name: getattr(counter, name) for name in counter.__dataclass_fields__}


def _with_holes(value: Any, kind: str) -> np.ndarray | None:
    """Log-probs of which some are None, with NaN there, to be read; None for anything else."""
    if kind != "f" or type(value) not in _LIST_TYPES:
        return None
    if not set(map(type, value)) <= {int, float, type(None)}:
        return None
    try:
        return np.array([math.nan if one is None else float(one) for one in value], np.float64)
    except OverflowError:
        return None


def _flat(lists: list[list], kind: str) -> np.ndarray | None:
    """The numbers of all lists, one after the other; None where an integer has more than 64
    bits.
    """
    count = sum(map(len, lists))
    dtype = np.int64 if kind == "i" else np.float64
    try:
        return np.fromiter(itertools.chain.from_iterable(lists), dtype=dtype, count=count)
    except OverflowError:
        return None


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
    if type(value) is not type(default) or not value == default:
        return False
    return type(value) is not float or str(value) == str(default)  # -0.0 is not 0.0


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
        fits = array.ndim == 1 and array.dtype in _DTYPES[kind]
        return (array, "list") if fits else None
    if is_tensor(value):
        name = str(value.dtype).removeprefix("torch.")
        if value.ndim != 1 or name not in _DTYPES[kind].values():
            return None
        return value.detach().cpu().numpy(), f"tensor {name}"
    if type(value) is np.ndarray and value.ndim == 1 and value.dtype in _DTYPES[kind]:
        return value, f"array {_DTYPES[kind][value.dtype]}"
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
        for name in (*INTEGERS, *TEXTS, *JSONS, "status", "kinds", "rest")
    }
    lists = {
        name: (tables.entries_of(table[name]), tables.lists_of(table[name])[2].tolist())
        for name in LISTS
        if name in table.column_names
    }
    samples = []
    for row in range(len(table)):
        kinds = _json_at(plain["kinds"], row) or {}
        data: dict[str, Any] = {name: plain[name][row] for name in (*INTEGERS, *TEXTS)}
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
    old, new = before.__dict__, after.__dict__
    if len(old) == len(new) and all(map(operator.is_, old.values(), new.values())):
        return {}  # the gate's copies keep the order of the fields
    return {
        name: value.value if type(value) is Status else value
        for name, value in new.items()
        if (earlier := old.get(name, _DEFAULTS)) is not value and not _is_same(earlier, value)
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
