"""The whole batch of a plain dict of lists, as a custom converter makes it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from slime.data.batch import RolloutBatch, check_masks
from slime.data.build import build_column
from slime.data.fields import CONTRACT, FieldSpec, Origin, Scope
from slime.data.ragged import Column, as_array, is_tensor, num_entries
from slime.exceptions import RolloutDataError


def batch_from_lists(data: Mapping[str, Any]) -> RolloutBatch:
    """The whole-batch `RolloutBatch` of a plain dict of lists, as a custom converter makes it; or
    of a `RolloutBatch`, where what a converter added to the columns, or edited of them, is taken
    like a list of its own.

    Undeclared fields with one entry per sample are carried as objects, never as metrics, with one
    warning naming them; any other undeclared field is a `RolloutDataError`. Fields that the split
    makes itself are recomputed, so they are left out.
    """
    if "tokens" not in data:
        raise RolloutDataError(f"The train data has no 'tokens'; its keys are {sorted(data)}.")
    batch, num_samples, undeclared = RolloutBatch(), len(data["tokens"]), []
    columns = data if isinstance(data, RolloutBatch) else None
    stored = data.__getitem__ if columns is None else columns.raw
    valid = None
    if "valid" in data and stored("valid") is not None:
        valid = np.asarray(data["valid"] if columns is None else columns.array("valid"), dtype=bool)
    for name in data:
        entries = stored(name)
        entries = (
            entries.as_list() if isinstance(entries, Column) and entries.was_edited() else entries
        )
        spec = CONTRACT.find(name)
        if spec is None:
            undeclared.append(name)
            spec = FieldSpec(name, Scope.SAMPLE)
        if entries is None or (not spec.per_sample and spec.origin is not Origin.ROLLOUT):
            continue
        if not spec.per_sample:
            dict.__setitem__(batch, name, entries)
            continue
        if num_entries(entries) != num_samples:
            size = repr(entries)[:60] if num_entries(entries) is None else f"{len(entries)} entries"
            raise RolloutDataError(
                f"{name!r} has {size} for {num_samples} samples. A field needs one entry per sample"
                + (
                    f"; declare {name!r} with declare_field(..., scope=...) if it is something "
                    "else."
                    if name in undeclared
                    else "."
                )
            )
        if is_tensor(entries) and spec.scope is Scope.SAMPLE and spec.wire_dtype is not None:
            entries = as_array(entries)
        dict.__setitem__(batch, name, build_column(spec, entries, required=valid))
    if "loss_masks" in batch and (
        columns is None or batch.raw("loss_masks") is not columns.raw("loss_masks")
    ):
        check_masks(batch)  # untouched columns were checked when they were built
    if undeclared:
        warnings.warn(
            f"Undeclared fields {undeclared} are shipped with their samples and are not metrics. "
            "Declare them with "
            f"slime.data.fields.declare_field to give them a dtype, a device or a metric.",
            stacklevel=2,
        )
    return batch
