"""Parquet files of foreign origin, within bounds: a small file may decode to any size."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from slime.exceptions import ConfigError, RolloutDataError
from slime.files import tables
from slime.harness.audit.shapes import open_regular

if TYPE_CHECKING:
    import pyarrow

MAX_ROWS = 5_000_000
MAX_BYTES = 8 << 30  # of a file's columns, decoded
MAX_VALUES = 500_000_000  # numbers in the lists of a file
ROWS_AT_ONCE = 256


def _pyarrow() -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError(
            "reading .parquet needs pyarrow: pip install 'slime-rl[data]'."
        ) from error
    return pyarrow


def schema_of(path: Path) -> pyarrow.Schema:
    """Names, types and metadata of a file's columns."""
    with open_regular(path) as file:
        return _pyarrow().parquet.ParquetFile(file).schema_arrow


def read_columns(path: Path, names: tuple[str, ...] | None = None) -> pyarrow.Table:
    """The columns of a file, those of `names` that it has, or all. RolloutDataError where it decodes
    to more than the bounds.
    """
    pyarrow = _pyarrow()
    batches: list[Any] = []
    size = 0
    with open_regular(path) as file:
        parquet = pyarrow.parquet.ParquetFile(file, page_checksum_verification=True)
        metadata = parquet.metadata
        if metadata.num_rows > MAX_ROWS:
            raise RolloutDataError(f"{metadata.num_rows} rows, at most {MAX_ROWS} are read")
        values = sum(
            metadata.row_group(group).column(column).num_values
            for group in range(metadata.num_row_groups)
            for column in range(metadata.num_columns)
        )
        if values > MAX_VALUES:
            raise RolloutDataError(f"{values} values, at most {MAX_VALUES} are read")
        schema = parquet.schema_arrow
        wanted = None if names is None else [name for name in names if name in schema.names]
        for batch in parquet.iter_batches(batch_size=ROWS_AT_ONCE, columns=wanted):
            size += batch.nbytes
            if size > MAX_BYTES:
                raise RolloutDataError(f"its rows decode to more than {MAX_BYTES >> 30} GiB")
            batches.append(batch)
        chosen = schema if wanted is None else pyarrow.schema([schema.field(n) for n in wanted])
        return pyarrow.Table.from_batches(batches, schema=None if batches else chosen)


def read_lists(path: Path, name: str) -> list[np.ndarray | None]:
    """The entries of a list column as arrays, None for null; of floats as float32, of 0 and 1 as
    uint8. One column at a time: a file's columns together are several times its size.
    """
    pyarrow = _pyarrow()
    table = read_columns(path, (name,))
    values, offsets, missing = tables.lists_of(table[name])
    del table
    if values.dtype.kind == "f":
        values = values.astype(np.float32)
    elif values.dtype.kind in "iub" and values.size and values.min() >= 0 and values.max() <= 1:
        values = values.astype(np.uint8)
    else:
        values = values.copy()
    pyarrow.default_memory_pool().release_unused()
    bounds = offsets.tolist()
    return [
        None if absent else values[low:high]
        for low, high, absent in zip(bounds[:-1], bounds[1:], missing.tolist(), strict=True)
    ]
