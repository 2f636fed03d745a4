"""The fields of a rollout batch as a table: one row per sample of the whole batch, in its order.

    kind    column                       an entry is
    rows    a list per sample            an array with a row per token
    number  a number per sample          a number
    json    a text per sample            the JSON text of an object

A row that lacks a field, because no rank trained the sample, is null. The table's metadata holds
the contract of its fields.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from slime.data.batch import RolloutBatch
from slime.data.fields import CONTRACT, Extent, FieldSpec, Missing, Origin, Reduce, Rows, Scope
from slime.data.ragged import (
    Ragged,
    Scalars,
    UngatheredColumn,
    as_array,
    is_tensor,
    num_entries,
)
from slime.exceptions import RolloutDataError
from slime.files import tables
from slime.files.json_values import decode_json, encode_each

if TYPE_CHECKING:
    import pyarrow

FORMAT = "slime-fields-1"
_ENUMS: dict[str, type[enum.Enum]] = {
    "scope": Scope,
    "extent": Extent,
    "rows": Rows,
    "origin": Origin,
    "missing": Missing,
    "reduce": Reduce,
}


@dataclasses.dataclass(frozen=True)
class FieldRows:
    """One field of M samples: `values` [rows, ...] with `lengths` [M] for lists, [M] for numbers,
    bytes with `lengths` for JSON texts.
    """

    name: str
    kind: str
    values: np.ndarray
    lengths: np.ndarray | None = None


def field_table(
    fields: Iterable[FieldRows],
    *,
    num_rows: int,
    positions: np.ndarray | None = None,
    extra: Mapping[str, Sequence[Any] | np.ndarray] | None = None,
) -> pyarrow.Table:
    """The table of `num_rows` samples. `positions` [M], ascending: the rows that have the fields;
    None: all. `extra`: further columns of integers, one entry or None per row, which come first; a
    field of the same name, which a plug-in may have, is stored as `field_NAME`.
    """
    import pyarrow

    columns: dict[str, Any] = {"position": pyarrow.array(np.arange(num_rows, dtype=np.int64))}
    for name, entries in (extra or {}).items():
        kind = None if isinstance(entries, np.ndarray) else pyarrow.int64()
        columns[name] = pyarrow.array(entries, kind)
    schema = [pyarrow.field(name, column.type) for name, column in columns.items()]
    names = []
    for field in fields:
        partial = positions if field.lengths is None or len(field.lengths) != num_rows else None
        if field.lengths is None and len(field.values) == num_rows:
            partial = None
        column = field.name
        while column in columns:
            column = f"field_{column}"
        columns[column] = _arrow(field, num_rows, partial)
        note = {"slime_kind": field.kind, "slime_trailing": json.dumps(field.values.shape[1:])}
        if column != field.name:
            note["slime_name"] = field.name
        schema.append(pyarrow.field(column, columns[column].type, metadata=note))
        names.append(field.name)
    metadata = {"slime": FORMAT, "slime_contract": json.dumps(contract_of(names))}
    return pyarrow.Table.from_arrays(
        list(columns.values()), schema=pyarrow.schema(schema, metadata=metadata)
    )


def _arrow(field: FieldRows, num_rows: int, positions: np.ndarray | None) -> Any:
    import pyarrow

    missing = None
    if positions is not None:
        missing = np.ones(num_rows, dtype=bool)
        missing[positions] = False
    if field.kind == "number":
        values = field.values
        if positions is not None:
            values = np.zeros(num_rows, dtype=field.values.dtype)
            values[positions] = field.values
        return pyarrow.array(values, mask=missing)
    assert field.lengths is not None, f"{field.name} has a number per sample"
    lengths = field.lengths
    if positions is not None:
        lengths = np.zeros(num_rows, dtype=np.int64)
        lengths[positions] = field.lengths
    if field.kind == "json":
        bounds = np.concatenate(([0], np.cumsum(lengths))).tolist()
        data = field.values.tobytes()
        texts = [
            None if missing is not None and missing[row] else data[low:high].decode()
            for row, (low, high) in enumerate(zip(bounds[:-1], bounds[1:], strict=True))
        ]
        return pyarrow.array(texts, pyarrow.large_string())
    width = int(np.prod(field.values.shape[1:], dtype=np.int64))
    return tables.list_column(field.values.reshape(-1), lengths * width, missing=missing)


def fields_of(table: pyarrow.Table) -> dict[str, tuple[str, Any]]:
    """`(kind, entries)` of every field of the table, entries [N]: arrays for "rows", an array or,
    where rows lack the field, a list with None for "number", objects for "json". None where a row
    lacks it. `RolloutDataError` for another table.
    """
    if tables.metadata_of(table).get("slime") != FORMAT:
        raise RolloutDataError(
            f"The table holds no fields of a rollout batch; its columns are "
            f"{', '.join(table.column_names[:20])}."
        )
    found: dict[str, tuple[str, Any]] = {}
    for field in table.schema:
        form = form_of(field)
        if form is not None:
            name = tables.texts_of(field.metadata).get("slime_name", field.name)
            found[name] = (form[0], _entries(table[field.name], *form))
    return found


def form_of(field: pyarrow.Field) -> tuple[str, tuple[int, ...]] | None:
    """`(kind, shape of one row)` of a column that holds a field; None for any other column."""
    note = tables.texts_of(field.metadata)
    if "slime_kind" not in note:
        return None
    return note["slime_kind"], tuple(json.loads(note.get("slime_trailing", "[]")))


def _entries(column: pyarrow.ChunkedArray, kind: str, trailing: tuple[int, ...]) -> Any:
    if kind == "number":
        return column.to_pylist() if column.null_count else tables.numbers_of(column)
    if kind == "json":
        return [None if text is None else decode_json(text.encode()) for text in column.to_pylist()]
    missing = tables.lists_of(column)[2].tolist()
    return [
        None if lacks else entry.reshape(-1, *trailing) if trailing else entry
        for entry, lacks in zip(tables.entries_of(column), missing, strict=True)
    ]


# --- the contract ---------------------------------------------------------------------------------


def contract_of(names: Iterable[str]) -> list[dict[str, Any]]:
    """The declarations of these fields, as JSON has them; an undeclared field is left out."""
    specs = [CONTRACT.find(name) for name in names]
    return [
        {
            key: value.value if isinstance(value, enum.Enum) else value
            for key, value in vars(spec).items()
            if key != "help" and not (isinstance(value, float) and value != value)
        }
        for spec in specs
        if spec is not None
    ]


def declare_recorded(metadata: Mapping[str, str]) -> None:
    """Declares the plug-ins' fields of a table with this metadata that this process does not know."""
    for record in json.loads(metadata.get("slime_contract", "[]")):
        if CONTRACT.find(record["name"]) is None:
            values: dict[str, Any] = {
                key: _ENUMS[key](value) if key in _ENUMS and value is not None else value
                for key, value in record.items()
            }
            CONTRACT.add(FieldSpec(**values))


# --- the whole batch ------------------------------------------------------------------------------


def fields_of_batch(batch: RolloutBatch) -> tuple[list[FieldRows], dict[str, str]]:
    """`(fields, reason by name of what no table holds)` of a whole batch."""
    num_samples = len(batch.raw("tokens"))
    fields, left_out = [], {}
    for name in dict.keys(batch):
        value = batch.raw(name)
        if value is None:
            continue
        if num_entries(value) != num_samples:
            left_out[name] = "it does not have one entry per sample"
            continue
        try:
            fields.append(_field(batch, name))
        except RolloutDataError as error:
            left_out[name] = str(error)
    return fields, left_out


def _field(batch: RolloutBatch, name: str) -> FieldRows:
    spec, value = CONTRACT.find(name), batch.raw(name)
    if spec is not None and spec.scope is Scope.TOKEN:
        column = batch.column(name)
        if isinstance(column, Ragged):
            values = as_array(column.dense_values(), what=name)
            return FieldRows(name, "rows", values, np.asarray(column.lengths, dtype=np.int64))
        parts = [as_array(entry, what=name) for entry in column.as_list()]
        values = np.concatenate(parts) if parts else np.zeros(0, dtype=np.float32)
        lengths = np.array([len(part) for part in parts], dtype=np.int64)
        return FieldRows(name, "rows", values, lengths)
    numeric = spec is not None and spec.wire_dtype is not None
    if numeric and not (isinstance(value, list) and any(entry is None for entry in value)):
        values = as_array(value, what=name) if is_tensor(value) else batch.array(name)
        return FieldRows(name, "number", values)
    texts = encode_each(batch[name], describe=True)
    lengths = np.array([len(text) for text in texts], dtype=np.int64)
    return FieldRows(name, "json", np.frombuffer(b"".join(texts), dtype=np.uint8), lengths)


def batch_of(table: pyarrow.Table) -> RolloutBatch:
    """The whole batch of a table that `field_table` made of `fields_of_batch`."""
    declare_recorded(tables.metadata_of(table))
    batch = RolloutBatch()
    for name, (kind, entries) in fields_of(table).items():
        if kind == "rows":
            batch[name] = UngatheredColumn(list(entries))
        elif kind == "number" and isinstance(entries, np.ndarray):
            batch[name] = Scalars(entries)
        else:
            batch[name] = list(entries)
    return batch
