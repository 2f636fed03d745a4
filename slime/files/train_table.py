"""A train dump as a Parquet table: one row per sample of the whole rollout batch, null where no
rank trained it. The fields are those of `train_dump`.

position, dp_rank (-1: nobody trained it), step and micro_batch say where a row was trained.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from slime.exceptions import RolloutDataError
from slime.files import tables
from slime.files.field_table import FieldRows, field_table, fields_of
from slime.files.train_record import TensorOutline, TrainDump

if TYPE_CHECKING:
    import pyarrow

TABLE_SUFFIX = ".parquet"
HEADER = "slime_train"
_ABSENT = ("fields", "partition")


class TensorCollector:
    """Keeps the announced tensors in memory, in the place of a file."""

    def __init__(
        self, path: Path, header: Mapping[str, Any], outlines: Sequence[TensorOutline]
    ) -> None:
        self.path, self.header = path, dict(header)
        self.tensors: dict[str, np.ndarray] = {}
        self._expected = [outline.name for outline in outlines]

    def write(self, name: str, values: np.ndarray) -> None:
        self.tensors[name] = values

    def commit(self) -> Path | None:
        """None: there is no file. ValueError where a tensor did not come."""
        if list(self.tensors) != self._expected:
            raise ValueError(f"{len(self.tensors)} of {len(self._expected)} tensors were written")
        return None

    def abandon(self) -> None:
        self.tensors.clear()

    def table(self) -> pyarrow.Table:
        """The table of what was collected."""
        return train_table(self.header, self.tensors)


class TrainTableWriter(TensorCollector):
    """Writes the table when it has every tensor."""

    def commit(self) -> Path | None:
        super().commit()
        tables.write_table(self.path, self.table())
        return self.path


def train_table(header: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> pyarrow.Table:
    """The table of a train dump's header and tensors."""
    num_rows = header["num_whole"]
    positions = tensors["partition"].astype(np.int64)
    fields = []
    for name, kind in header["fields"].items():
        if name == "partition":
            continue
        offsets = tensors.get(f"{name}.offsets")
        lengths = None if offsets is None else np.diff(offsets)
        kind = {"whole": "number", "whole json": "json"}.get(kind, kind)
        fields.append(FieldRows(name, kind, tensors[name], lengths))
    table = field_table(
        fields, num_rows=num_rows, positions=positions, extra=places_of(header, num_rows)
    )
    kept = {key: value for key, value in header.items() if key != "num_samples"}
    return table.replace_schema_metadata(
        {**(table.schema.metadata or {}), HEADER: json.dumps(kept)}
    )


def places_of(header: Mapping[str, Any], num_rows: int) -> dict[str, np.ndarray]:
    """dp_rank, step and micro_batch [num_rows], -1 where nobody trained the row."""
    places = {
        name: np.full(num_rows, -1, dtype=np.int32) for name in ("dp_rank", "step", "micro_batch")
    }
    for rank, shard in enumerate(header["dp_shards"]):
        positions = np.asarray(shard["partition"], dtype=np.int64)
        places["dp_rank"][positions] = rank
        counts = shard.get("num_microbatches") or []
        step_of = np.repeat(np.arange(len(counts)), counts)
        for number, indices in enumerate(shard.get("micro_batch_indices") or []):
            chosen = positions[np.asarray(indices, dtype=np.int64)]
            places["micro_batch"][chosen] = number
            places["step"][chosen] = step_of[number] if number < len(step_of) else -1
    return places


def read_train_table(path: Path) -> TrainDump:
    """The dump in a table. `RolloutDataError` naming the file where it is another table or damaged."""
    table = tables.read_table(path, what="train dump")
    try:
        header = json.loads(tables.metadata_of(table)[HEADER])
        kinds = header["fields"]
        trained = np.flatnonzero(tables.numbers_of(table["dp_rank"]) >= 0)
        whole = fields_of(table)
        own = fields_of(table.take(trained))
        token_fields, sample_fields = {}, {"partition": trained}
        for name, kind in kinds.items():
            if kind == "rows":
                token_fields[name] = own[name][1]
            elif name not in _ABSENT and not kind.startswith("whole"):
                sample_fields[name] = own[name][1]
        return TrainDump.of_header(
            path,
            header,
            token_fields=token_fields,
            sample_fields=sample_fields,
            whole_fields={n: whole[n][1] for n, kind in kinds.items() if kind.startswith("whole")},
        )
    except (KeyError, TypeError, ValueError) as error:
        raise RolloutDataError(
            f"{path} is not a train dump of this version ({type(error).__name__}: {error})."
        ) from error
