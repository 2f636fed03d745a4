"""Parquet tables with ragged columns: one row per sample, one list per sample and token field.

What is written is read by pandas, polars and duckdb without this code. Pages carry checksums, and the
whole file a seal, see `table_seal`, so a flipped bit is found when a table is read.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from slime.exceptions import RolloutDataError
from slime.files import atomic, table_seal

if TYPE_CHECKING:
    import pyarrow

COMPRESSION, LEVEL = "zstd", 1
# A table of ours takes at most about ten times its file in memory; what takes far more is refused.
EXPANSION, LARGEST_EXPANSION = 64, 1 << 28
SMALL_FILE = 1 << 22  # bytes of a table that is read at once
# A row group holds about so many entries of the longest list column, so that a few rows of a large
# table are read without the others.
GROUP_ENTRIES, LEAST_GROUP_ROWS = 1 << 20, 64


def list_column(
    values: np.ndarray, lengths: np.ndarray, *, missing: np.ndarray | None = None
) -> pyarrow.Array:
    """A list column of `values` [rows] from the buffers, without making Python numbers. `lengths`
    [N]: rows of each entry; `missing` [N]: entries that are null, of length 0.
    """
    import pyarrow

    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    mask = None if missing is None or not missing.any() else pyarrow.array(missing)
    return pyarrow.LargeListArray.from_arrays(
        pyarrow.array(offsets), pyarrow.array(np.ascontiguousarray(values)), mask=mask
    )


def lists_of(column: pyarrow.ChunkedArray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`(values [rows], offsets [N + 1], missing [N])` of a list column."""
    array = column.combine_chunks()
    if hasattr(array, "chunks"):  # an older pyarrow keeps the wrapper
        array = array.chunk(0) if array.num_chunks else array.type.wrap_array([])
    missing = (
        np.asarray(array.is_null().to_numpy(zero_copy_only=False), dtype=bool)
        if array.null_count
        else np.zeros(len(array), dtype=bool)
    )
    offsets = array.offsets.to_numpy(zero_copy_only=False).astype(np.int64)
    values = array.values.to_numpy(zero_copy_only=False)
    if len(offsets):
        values, offsets = values[offsets[0] : offsets[-1]], offsets - offsets[0]
    return values, offsets if len(offsets) else np.zeros(1, dtype=np.int64), missing


def entries_of(column: pyarrow.ChunkedArray) -> list[np.ndarray]:
    """One array per row of a list column; an empty one for null."""
    values, offsets, _ = lists_of(column)
    bounds = offsets.tolist()
    return [values[low:high] for low, high in zip(bounds[:-1], bounds[1:], strict=True)]


def write_table(
    path: str | os.PathLike, table: pyarrow.Table, metadata: Mapping[str, str] | None = None
) -> None:
    """Writes the table whole or not at all. `metadata` goes into the file's schema. Raises
    `OSError` where the disk takes no more.
    """
    with atomic.replacing(path) as temporary:
        write_table_to(temporary, table, metadata)
        table_seal.seal(temporary)


def write_table_to(
    path: str | os.PathLike, table: pyarrow.Table, metadata: Mapping[str, str] | None = None
) -> None:
    """Writes the table, without a seal, to a path that is the caller's to give its name: for a file
    whose hash is kept elsewhere.
    """
    import pyarrow.parquet

    table = table.replace_schema_metadata(
        {**(table.schema.metadata or {}), **{key: text for key, text in (metadata or {}).items()}}
    )
    # numbers of a model repeat rarely: a dictionary of them costs time and saves nothing
    named = [
        field.name
        for field in table.schema
        if pyarrow.types.is_string(field.type) or pyarrow.types.is_large_string(field.type)
    ]
    try:
        pyarrow.parquet.write_table(
            table,
            path,
            compression=COMPRESSION,
            compression_level=LEVEL,
            row_group_size=_rows_of_a_group(table),
            use_dictionary=named,
            write_statistics=False,
            write_page_checksum=True,
        )
    except pyarrow.ArrowException as error:
        if isinstance(error, OSError):
            raise
        raise RolloutDataError(f"{path} cannot be written as a table: {error}") from error


def _rows_of_a_group(table: pyarrow.Table) -> int:
    import pyarrow

    lists = (pyarrow.types.is_list, pyarrow.types.is_large_list)
    entries = max(
        (
            sum(len(chunk.values) for chunk in table.column(place).chunks)
            for place, field in enumerate(table.schema)
            if any(is_one(field.type) for is_one in lists)
        ),
        default=0,
    )
    if entries <= GROUP_ENTRIES:
        return max(1, len(table))
    return max(LEAST_GROUP_ROWS, GROUP_ENTRIES * len(table) // entries)


def is_table(path: str | os.PathLike) -> bool:
    """Whether the file begins as a Parquet file does."""
    with open(path, "rb") as file:
        return file.read(4) == b"PAR1"


class TableFile:
    """A table in a file: the columns of a large one are read one by one, when they are asked for."""

    def __init__(
        self, path: str | os.PathLike, *, what: str = "table", is_verified: bool = False
    ) -> None:
        """`is_verified`, and `RolloutDataError`: as `read_table`."""
        import pyarrow
        import pyarrow.parquet

        self.path, self.what = Path(path), what
        self._table: pyarrow.Table | None = None
        if not self.path.is_file() or self.path.stat().st_size <= SMALL_FILE:
            self._table = read_table(self.path, what=what, is_verified=is_verified)
            self.schema, self.num_rows = self._table.schema, len(self._table)
        else:
            self._is_verified = is_verified or _has_good_seal(self.path)
            try:
                with pyarrow.parquet.ParquetFile(self.path) as file:
                    self.schema, self.num_rows = file.schema_arrow, file.metadata.num_rows
            except (pyarrow.ArrowException, OSError, ValueError) as error:
                raise RolloutDataError(f"{path} is not a whole {what}: {error}") from error
        self.metadata = texts_of(self.schema.metadata)

    @property
    def is_large(self) -> bool:
        """Whether every column is read anew."""
        return self._table is None

    def __contains__(self, name: str) -> bool:
        return name in self.schema.names

    def column(self, name: str) -> pyarrow.ChunkedArray:
        """A column. `RolloutDataError` as `read_table`."""
        table = self._table
        if table is None:
            table = read_table(
                self.path, what=self.what, columns=[name], is_verified=self._is_verified
            )
        try:
            return table[name]
        except KeyError as error:
            raise RolloutDataError(f"{self.path} is no {self.what}: {error}") from error


def read_table(
    path: str | os.PathLike,
    *,
    what: str = "table",
    columns: Sequence[str] | None = None,
    is_verified: bool = False,
) -> pyarrow.Table:
    """The table, or these columns of it. `is_verified`: the caller has held the file's bytes against
    a hash. `RolloutDataError` naming the file where there is none, it is damaged, or a small file
    claims to hold far more than its size.
    """
    with RowReader(path, what=what, is_verified=is_verified) as reader:
        return reader.read(columns)


class RowReader:
    """A table in a file, of which columns or a few rows are read: rows take the row groups that
    they are in. `schema` and `num_rows` are known at once. For one thread at a time.
    """

    def __init__(
        self, path: str | os.PathLike, *, what: str = "table", is_verified: bool = False
    ) -> None:
        """`is_verified`, and `RolloutDataError`: as `read_table`."""
        import pyarrow
        import pyarrow.parquet

        self.path, self.what = Path(path), what
        if not self.path.is_file():
            raise RolloutDataError(f"There is no {what} at {path}.")
        # the pages' own checksums cost three times what the rest of reading a table of floats does
        has_pages_to_check = not (is_verified or _has_good_seal(self.path))
        self._limit = LARGEST_EXPANSION + EXPANSION * self.path.stat().st_size
        with self._errors():
            file = pyarrow.parquet.ParquetFile(
                self.path, page_checksum_verification=has_pages_to_check
            )
            repeated = _texts_that_may_repeat(file.metadata, self._limit)
            claimed = _claimed_bytes(file.metadata)
            if claimed > self._limit or repeated:
                file.close()
            if claimed > self._limit:
                raise _Bomb(claimed)
            self.schema, self.num_rows = file.schema_arrow, file.metadata.num_rows
            if repeated:
                file = pyarrow.parquet.ParquetFile(
                    self.path,
                    page_checksum_verification=has_pages_to_check,
                    read_dictionary=repeated,
                )
            self._file = file
            groups = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
        self._bounds = np.concatenate(([0], np.cumsum(groups, dtype=np.int64)))

    def __enter__(self) -> RowReader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __contains__(self, name: str) -> bool:
        return name in self.schema.names

    def close(self) -> None:
        self._file.close()

    def read(self, columns: Sequence[str] | None = None) -> pyarrow.Table:
        """The table, or these columns of it. `RolloutDataError` where it is damaged."""
        with self._errors():
            return _with_texts(
                self._file.read(columns=None if columns is None else list(columns)),
                self.schema,
                self._limit,
            )

    def groups(self, columns: Sequence[str]) -> Iterator[tuple[int, pyarrow.Table]]:
        """(number of its first row, these columns) of each row group. `RolloutDataError` where the
        file is damaged.
        """
        for number, first in enumerate(self._bounds[:-1].tolist()):
            with self._errors():
                table = self._file.read_row_group(number, columns=list(columns))
                found = _with_texts(table, self.schema, self._limit)
            yield first, found

    def num_groups_of(self, rows: Sequence[int]) -> int:
        """How many row groups these rows are in."""
        return len(np.unique(np.searchsorted(self._bounds, np.asarray(rows), side="right")))

    def rows(self, rows: Sequence[int], columns: Sequence[str]) -> pyarrow.Table:
        """These rows, in this order, of these columns. `RolloutDataError` where the file is
        damaged, IndexError for a row that it does not have.
        """
        wanted = np.asarray(rows, dtype=np.int64)
        if len(wanted) and not (0 <= wanted.min() and wanted.max() < self.num_rows):
            raise IndexError(f"{self.path} has {self.num_rows} rows; asked for {wanted.max()}.")
        group = np.searchsorted(self._bounds, wanted, side="right") - 1
        groups, places = np.unique(group, return_inverse=True)
        first = self._bounds[groups]
        before = np.concatenate(([0], np.cumsum(self._bounds[groups + 1] - first)))
        with self._errors():
            table = self._file.read_row_groups(groups.tolist(), columns=list(columns))
            found = table.take(before[places] + wanted - first[places])
            return _with_texts(found, self.schema, self._limit)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        import pyarrow

        try:
            yield
        except _Bomb as bomb:
            raise RolloutDataError(
                f"{self.path} has {self.path.stat().st_size:,} bytes and would take "
                f"{bomb.num_bytes:,} in memory; no {self.what} of ours expands so far."
            ) from None
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            raise RolloutDataError(f"{self.path} is not a whole {self.what}: {error}") from error


def _has_good_seal(path: Path) -> bool:
    """Whether the file's own hash vouches for it. `RolloutDataError` where it has another one."""
    is_good = table_seal.is_unchanged(path)
    if is_good is False:
        raise RolloutDataError(
            f"{path} is damaged: it is not what was written, whose hash stands before its footer."
        )
    return is_good is True


class _Bomb(Exception):
    """A file that would take `num_bytes` in memory, more than any table of ours."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(num_bytes)
        self.num_bytes = num_bytes


def _claimed_bytes(metadata: Any) -> int:
    """Bytes that the columns take in memory by what the file's footer says: of its pages, and of
    the numbers and nulls that they encode.
    """
    total = metadata.num_rows
    for group in range(metadata.num_row_groups):
        columns = metadata.row_group(group)
        for number in range(columns.num_columns):
            column = columns.column(number)
            total += max(column.total_uncompressed_size, 0) + 8 * max(column.num_values, 0)
    return total


def _texts_that_may_repeat(metadata: Any, limit: int) -> list[str]:
    """Columns of texts that name each text once, of which the footer alone cannot tell how often
    they repeat it.
    """
    found = set()
    for group in range(metadata.num_row_groups):
        columns = metadata.row_group(group)
        for number in range(columns.num_columns):
            column = columns.column(number)
            if (
                column.physical_type == "BYTE_ARRAY"
                and any("DICTIONARY" in encoding for encoding in column.encodings)
                and column.num_values * column.total_uncompressed_size > limit
            ):
                found.add(column.path_in_schema)
    return sorted(found)


def _with_texts(table: pyarrow.Table, schema: pyarrow.Schema, limit: int) -> pyarrow.Table:
    """The table with every text in its row, of the type that `schema`, the file's, has, unless that
    takes more than `limit` bytes.
    """
    import pyarrow
    import pyarrow.compute

    total = 0
    for place, field in enumerate(table.schema):
        if not pyarrow.types.is_dictionary(field.type):
            continue
        for chunk in table.column(place).chunks:
            lengths = pyarrow.compute.binary_length(chunk.dictionary).to_numpy(zero_copy_only=False)
            counts = np.bincount(chunk.indices.drop_null().to_numpy(), minlength=len(lengths))
            total += int(np.dot(counts, lengths))
        if total > limit:
            raise _Bomb(total)
        plain = field.with_type(schema.field(field.name).type)
        table = table.set_column(place, plain, table.column(place).cast(plain.type))
    return table


def metadata_of(table: pyarrow.Table) -> dict[str, str]:
    """The texts that a table carries in its schema, by name."""
    return texts_of(table.schema.metadata)


def texts_of(metadata: Mapping[bytes, bytes] | None) -> dict[str, str]:
    """The texts of a schema's or a field's metadata, by name."""
    return {
        key.decode("utf-8", "replace"): value.decode("utf-8", "replace")
        for key, value in (metadata or {}).items()
    }


def numbers_of(column: pyarrow.ChunkedArray) -> Any:
    """A number per row as a numpy array [N]."""
    return column.to_numpy(zero_copy_only=False) if len(column) else np.zeros(0)
