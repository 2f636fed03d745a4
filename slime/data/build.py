"""From lists, one entry per sample, to the column that a field is declared to be."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from slime.data.fields import FieldSpec, Missing, Scope
from slime.data.ragged import (
    SMALLEST_INT,
    Column,
    Ragged,
    Scalars,
    UngatheredColumn,
    as_array,
    is_tensor,
    smallest_int_dtype,
)
from slime.exceptions import RolloutDataError


def build_column(spec: FieldSpec, entries: Any, *, required: np.ndarray | None = None) -> Any:
    """The column of `entries` (one per sample) for this field; a plain list where the contract says
    Python objects.

    `required` [N] bool: samples that must have the field (the valid ones). A field that only some
    of them have is an error or is filled, as its declaration says; samples that need not have it
    get an empty or zero stand-in.
    """
    if isinstance(entries, Column):
        return entries
    if not spec.per_sample:
        return entries
    if spec.scope is Scope.SAMPLE:
        return _build_scalars(spec, entries, required)
    if is_tensor(entries):
        raise RolloutDataError(
            f"{spec.name} must be a list with one array per sample, got one tensor of shape "
            f"{tuple(entries.shape)}."
        )
    entries = fill_missing(spec, list(entries), required)
    if entries and all(map(is_tensor, entries)) and spec.wire_dtype is None:
        return Ragged.of_tensors(entries)
    if spec.wire_dtype is None:
        return UngatheredColumn(
            [as_array(entry, what=f"{spec.name}[{i}]") for i, entry in enumerate(entries)]
        )
    dtype = None if spec.wire_dtype == SMALLEST_INT else spec.wire_dtype
    if dtype is None or not all(
        type(entry) is np.ndarray and entry.dtype == dtype for entry in entries
    ):
        entries = [
            as_array(entry, dtype, what=f"{spec.name}[{i}]") for i, entry in enumerate(entries)
        ]
    if spec.one_number_per_row:
        for i, entry in enumerate(entries):
            if entry.ndim != 1:
                raise RolloutDataError(
                    f"{spec.name}[{i}] must have one number per token, got shape "
                    f"{list(entry.shape)}."
                )
    return UngatheredColumn(entries)


def fill_missing(spec: FieldSpec, entries: list, required: np.ndarray | None) -> list:
    """`entries` with every None replaced, or `RolloutDataError` naming the samples that lack a
    field others have.
    """
    missing = [i for i, entry in enumerate(entries) if entry is None]
    if not missing:
        return entries
    bad = missing if required is None else [i for i in missing if required[i]]
    if bad and spec.missing is not Missing.FILL:
        raise RolloutDataError(
            f"{len(bad)} of {len(entries)} samples have no {spec.name}, for example positions "
            f"{bad[:5]}, while others have it. Set it on every "
            f"sample of the rollout, or on none, or declare the field with missing=Missing.FILL and fill=<value>."
        )
    stand_in = spec.fill
    if spec.scope is Scope.SAMPLE and stand_in is None:
        stand_in = math.nan if np.dtype(spec.wire_dtype).kind == "f" else 0
    elif stand_in is None:
        shape = next((np.shape(entry)[1:] for entry in entries if entry is not None), ())
        stand_in = np.zeros(
            (0, *shape),
            dtype=spec.wire_dtype if spec.wire_dtype not in (None, SMALLEST_INT) else None,
        )
    filled = list(entries)
    for i in missing:
        filled[i] = stand_in
    return filled


def _build_scalars(spec: FieldSpec, entries: Any, required: np.ndarray | None) -> Any:
    if spec.wire_dtype is None or is_tensor(entries):
        return entries if is_tensor(entries) else list(entries)
    if not isinstance(entries, np.ndarray):
        entries = list(entries)
        if any(entry is None for entry in entries):
            if spec.missing is Missing.NONE:
                return entries
            entries = fill_missing(spec, entries, required)
    try:
        array = np.asarray(entries)
    except (TypeError, ValueError) as error:
        raise RolloutDataError(
            f"{spec.name} must be one number per sample ({spec.wire_dtype}): {error}"
        ) from None
    if array.ndim != 1 and array.size != len(entries):
        raise RolloutDataError(
            f"{spec.name} must be one number per sample ({spec.wire_dtype}), got shape "
            f"{array.shape}."
        )
    return Scalars(as_array(array.reshape(len(entries)), spec.wire_dtype, what=spec.name))


def column_dtype(spec: FieldSpec, column: UngatheredColumn) -> str:
    """The dtype on the wire of a TOKEN field; "smallest" is decided over the whole batch."""
    if spec.wire_dtype != SMALLEST_INT:
        return spec.wire_dtype or (column.parts[0].dtype.name if column.parts else "float32")
    filled = [part for part in column.parts if part.size]
    return smallest_int_dtype(
        min((int(p.min()) for p in filled), default=0),
        max((int(p.max()) for p in filled), default=0),
    )
