"""Tables of samples as columns of numpy arrays: of a part of a recording, a rollout dump or a train
dump. A column is read when it is asked for, so that two large rollouts fit into memory.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from slime.data.sample import Sample
from slime.exceptions import RolloutDataError
from slime.files import tables
from slime.files.field_table import declare_recorded, form_of
from slime.files.json_values import decode_json, encode_json
from slime.files.sample_table import JSONS, sample_table
from slime.files.train_record import TrainDump
from slime.files.train_table import HEADER

if TYPE_CHECKING:
    import pyarrow

Given = TypeVar("Given")
Made = TypeVar("Made")
_JSON_COLUMNS = frozenset((*JSONS, "rest", "changes"))


@dataclasses.dataclass(frozen=True)
class Column:
    """One field of N samples.

    kind    values
    rows    numbers [rows]; `offsets` [N + 1] in rows; `trailing` is the shape of one row
    number  a number per sample [N]
    text    an arrow array of texts [N]
    json    an arrow array of JSON texts [N]

    missing [N]: samples without an entry; None: none is.
    """

    kind: str
    values: Any
    offsets: np.ndarray | None = None
    missing: np.ndarray | None = None
    trailing: tuple[int, ...] = ()
    where: str = ""  # begins the sentence of an error

    def at(self, row: int) -> Any:
        """The entry of one sample; None where it is missing."""
        if self.missing is not None and self.missing[row]:
            return None
        if self.kind == "rows":
            assert self.offsets is not None
            entry = self.values[self.offsets[row] : self.offsets[row + 1]]
            return entry.reshape(-1, *self.trailing) if self.trailing else entry
        if self.kind == "number":
            return self.values[row]
        text = self.values[row].as_py()
        if self.kind != "json" or text is None:
            return text
        try:
            return decode_json(text.encode())
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise RolloutDataError(
                f"{self.where}row {row} holds no JSON value: {text[:80]!r}"
            ) from error


# what samples are matched by and shown with; every other column is read once, and let go
_ASKED_AGAIN = frozenset({"tokens", "response"})


class Columns:
    """N samples, by column. `names` are in the order of the file."""

    def __init__(
        self,
        where: str,
        num_rows: int,
        names: Sequence[str],
        read: Callable[[str], Column],
        header: Mapping[str, Any] | None = None,
        *,
        is_large: bool = False,
    ) -> None:
        self.where, self.num_rows, self.names = where, num_rows, list(names)
        self.header = dict(header or {})  # of a train dump
        self.is_large = is_large  # a column takes long to read
        self._read = read
        self._kept: dict[str, Column] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def require(self, name: str) -> None:
        """`RolloutDataError` naming the file where it has no such column."""
        if name not in self.names:
            raise RolloutDataError(
                f"{self.where} has no column {name!r}; it has {', '.join(self.names[:20])}."
            )

    def column(self, name: str) -> Column:
        """A column. `RolloutDataError` naming the file where there is none, or it is damaged."""
        self.require(name)
        if name in self._kept:
            return self._kept[name]
        column = self._read(name)
        num_rows = len(column.offsets) - 1 if column.offsets is not None else len(column.values)
        if num_rows != self.num_rows:
            raise RolloutDataError(
                f"{self.where}: the column {name!r} has {num_rows} rows of {self.num_rows}."
            )
        if name in _ASKED_AGAIN:
            self._kept[name] = column
        return column

    def numbers(self, name: str) -> np.ndarray | None:
        """A column of integers, int64 [N], -1 where a sample has none; None without the column."""
        if name not in self.names:
            return None
        column = self.column(name)
        if column.kind != "number" or column.values.dtype.kind not in "biu":
            raise RolloutDataError(f"{self.where}: the column {name!r} holds no integers.")
        values = column.values.astype(np.int64)
        return values if column.missing is None else np.where(column.missing, -1, values)


def columns_of_both(a: Columns, b: Columns, name: str) -> tuple[Column, Column]:
    """One column of two tables."""
    if a.is_large and b.is_large:
        return both(lambda columns: columns.column(name), a, b)
    return a.column(name), b.column(name)


def both(function: Callable[[Given], Made], one: Given, other: Given) -> tuple[Made, Made]:
    """(function(one), function(other)), at the same time: reading files and hashing leave the
    interpreter free.
    """
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        second = pool.map(function, [other])
        first = function(one)
        return first, next(iter(second))


def columns_of_file(path: Path, what: str, *, is_verified: bool = False) -> Columns:
    """The columns of a Parquet file. `is_verified`: its hash is the one in its manifest."""
    file = tables.TableFile(path, what=what, is_verified=is_verified)
    header = {}
    try:
        declare_recorded(file.metadata)
        if HEADER in file.metadata:
            header = dict(json.loads(file.metadata[HEADER]))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise RolloutDataError(f"{path}: its header is damaged: {error}") from error

    def read(name: str) -> Column:
        return _column_of(name, file.schema.field(name), file.column(name), path)

    return Columns(
        str(path), file.num_rows, file.schema.names, read, header, is_large=file.is_large
    )


def columns_of_samples(where: str, samples: Sequence[Sample]) -> Columns:
    """The columns of samples that were read from a dump."""
    table = sample_table(samples)

    def read(name: str) -> Column:
        return _column_of(name, table.schema.field(name), table[name], where)

    return Columns(where, len(table), table.column_names, read)


def columns_of_train_dump(dump: TrainDump) -> Columns:
    """The columns of a train dump, one row per sample of the whole batch."""
    trained = dump.positions

    def read(name: str) -> Column:
        if name == "dp_rank":
            ranks = np.full(dump.num_whole, -1, dtype=np.int64)
            ranks[trained] = dump.owner_ranks
            return Column("number", ranks)
        if name in dump.whole_fields:
            return _entries_column(dump.whole_fields[name], dump.num_whole, None)
        values = dump.token_fields.get(name)
        if values is None:
            return _entries_column(dump.sample_fields[name], dump.num_whole, trained)
        lengths = np.zeros(dump.num_whole, dtype=np.int64)
        lengths[trained] = [len(entry) for entry in values]
        missing = np.ones(dump.num_whole, dtype=bool)
        missing[trained] = False
        flat = np.concatenate(values) if values else np.zeros(0, dtype=np.float32)
        trailing = flat.shape[1:]
        width = int(np.prod(trailing, dtype=np.int64))
        offsets = np.concatenate(([0], np.cumsum(lengths * width)))
        return Column("rows", flat.reshape(-1), offsets, missing, trailing)

    names = [*dump.token_fields, *dump.sample_fields, *dump.whole_fields, "dp_rank"]
    header = {
        "dp_shards": dump.dp_shards,
        "rollout_id": dump.rollout_id,
        "num_trained": len(trained),
    }
    return Columns(str(dump.path), dump.num_whole, names, read, header)


def _entries_column(entries: Any, num_rows: int, rows: np.ndarray | None) -> Column:
    """A column of one entry per sample; `rows`: those that have one."""
    import pyarrow

    missing = None
    if rows is not None and len(rows) != num_rows:
        missing = np.ones(num_rows, dtype=bool)
        missing[rows] = False
    if isinstance(entries, np.ndarray):
        values = entries
        if missing is not None:
            values = np.zeros(num_rows, dtype=entries.dtype)
            values[rows] = entries
        return Column("number", values, missing=missing)
    texts: list[str | None] = [None] * num_rows
    places = range(num_rows) if rows is None else rows.tolist()
    for row, entry in zip(places, entries, strict=True):
        texts[row] = encode_json(entry).decode()
    return Column("json", pyarrow.array(texts, pyarrow.large_string()), missing=missing)


def _column_of(
    name: str, field: pyarrow.Field, column: pyarrow.ChunkedArray, where: object
) -> Column:
    import pyarrow

    form = form_of(field)
    kind = field.type
    if pyarrow.types.is_large_list(kind) or pyarrow.types.is_list(kind):
        if not (is_number(kind.value_type)):
            raise RolloutDataError(f"{where}: the column {name!r} is of type {kind}.")
        values, offsets, missing = tables.lists_of(column)
        trailing = form[1] if form is not None else ()
        return Column("rows", values, offsets, missing if missing.any() else None, trailing)
    array = column.combine_chunks()
    if hasattr(array, "chunks"):
        array = array.chunk(0) if array.num_chunks else pyarrow.array([], kind)
    absent = array.is_null().to_numpy(zero_copy_only=False) if array.null_count else None
    if pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind):
        is_json = form[0] == "json" if form is not None else name in _JSON_COLUMNS
        return Column(
            "json" if is_json else "text", array, missing=absent, where=f"{where}, column {name}, "
        )
    if is_number(kind):
        if absent is not None:
            array = array.fill_null(False if pyarrow.types.is_boolean(kind) else 0)
        return Column("number", array.to_numpy(zero_copy_only=False), missing=absent)
    if pyarrow.types.is_null(kind):
        return Column("number", np.zeros(len(array), dtype=np.int64), missing=absent)
    raise RolloutDataError(
        f"{where}: the column {name!r} is of type {kind}, which is none of ours."
    )


def is_number(kind: pyarrow.DataType) -> bool:
    """Whether an arrow type holds integers, floats or truth values."""
    import pyarrow

    checks = (pyarrow.types.is_boolean, pyarrow.types.is_integer, pyarrow.types.is_floating)
    return any(check(kind) for check in checks)


def split_tokens(tokens: Column, response_lengths: np.ndarray) -> tuple[Column, Column]:
    """(prompt tokens, response tokens) of a column with both. `response_lengths` [N]; -1: unknown,
    then all are the response's.
    """
    if tokens.offsets is None:
        raise RolloutDataError("The column 'tokens' holds no lists.")
    lengths = np.diff(tokens.offsets)
    responses = np.where(response_lengths < 0, lengths, np.minimum(response_lengths, lengths))
    prompts = lengths - responses
    counts = np.stack((prompts, responses), axis=1).reshape(-1)
    is_response = np.repeat(np.tile([False, True], len(lengths)), counts)
    parts = []
    for chosen, sizes in ((~is_response, prompts), (is_response, responses)):
        offsets = np.concatenate(([0], np.cumsum(sizes)))
        parts.append(Column("rows", tokens.values[chosen], offsets, tokens.missing))
    return parts[0], parts[1]
