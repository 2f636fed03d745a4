"""Prompt files beside .jsonl and .parquet: a JSON array, CSV and TSV, and the folder that
`datasets.save_to_disk` writes.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from slime.exceptions import ConfigError
from slime.files import exact_json

if TYPE_CHECKING:
    import pyarrow

DELIMITERS = {".csv": ",", ".tsv": "\t"}
OTHER_DELIMITERS = (";", "\t", ",", "|")
LONGEST_CELL = 64 * 2**20  # characters; Python's own limit of 131,072 is below a long conversation


def file_type(file: Path) -> str:
    """The suffix in lower case: DATA.CSV is a .csv file."""
    return file.suffix.lower()


def read_json_array(file: Path) -> Iterator[tuple[int, Any]]:
    """The (number from 1, value) of each item of a .json file that holds one array. ConfigError for
    another content.
    """
    try:
        content = exact_json.loads(file.read_bytes())
    except exact_json.JSONDecodeError as error:
        raise ConfigError(
            f"{file}: not valid JSON ({error}). The file must hold one array of objects, or one "
            "object per line."
        ) from error
    if isinstance(content, dict):
        lists = [key for key, value in content.items() if isinstance(value, list)]
        hint = (
            f" Its key {lists[0]!r} holds one: write that to a file of its own."
            if len(lists) == 1
            else ""
        )
        raise ConfigError(f"{file}: the file holds one object, not an array of rows.{hint}")
    if not isinstance(content, list):
        raise ConfigError(
            f"{file}: the file holds a {type(content).__name__}, not an array of rows."
        )
    yield from enumerate(content, start=1)


def read_csv(file: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """The (line, row) of each row of a .csv or .tsv file, whose first line names the columns. All
    values are text. Where the first line is one cell with the file type's separator and several
    with another one (spreadsheets write semicolons where the comma is the decimal mark), that other
    one is the file's.

    ConfigError for a file that is not UTF-8, has no or doubled names, and for a row of another
    number of cells.
    """
    csv.field_size_limit(max(csv.field_size_limit(), LONGEST_CELL))
    try:
        with file.open(encoding="utf-8-sig", newline="") as lines:
            delimiter = _delimiter_of(lines, DELIMITERS[file_type(file)])
            reader = csv.reader(lines, delimiter=delimiter, strict=True)
            names = next(reader, [])
            if not names or len(set(names)) < len(names) or not all(names):
                raise ConfigError(
                    f"{file}, line 1: the first line must name each column once, it has {names}."
                )
            for cells in reader:
                if not cells:
                    continue
                if len(cells) != len(names):
                    mark = repr(delimiter)
                    raise ConfigError(
                        f"{file}, line {reader.line_num}: {len(cells)} cells, but {len(names)} "
                        f"columns. Put a cell with {mark} in quotes."
                    )
                yield reader.line_num, dict(zip(names, cells, strict=True))
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{file} is not UTF-8 ({error}). Convert it, for instance with: iconv -t UTF-8."
        ) from error
    except csv.Error as error:
        raise ConfigError(f"{file}: not valid CSV ({error}).") from error


def _delimiter_of(lines: TextIO, usual: str) -> str:
    """The separator of a table's first line, which stays unread."""
    for delimiter in (usual, *(other for other in OTHER_DELIMITERS if other != usual)):
        try:
            names = next(csv.reader(lines, delimiter=delimiter, strict=True), [])
        finally:
            lines.seek(0)
        if len(names) > 1:
            return delimiter
    return usual


def arrow_files(folder: Path) -> list[Path] | None:
    """The Arrow files of a folder that `datasets.save_to_disk` wrote; None for another folder.
    ConfigError for one that holds splits.
    """
    splits = folder / "dataset_dict.json"
    if splits.is_file():
        names = _json_of(splits).get("splits") or []
        hint = f"{folder / names[0]}" if names else "the folder of one of them"
        raise ConfigError(
            f"{folder} holds the splits {', '.join(map(str, names))} of a data set. Give one, for "
            f"instance {hint}."
        )
    state = folder / "state.json"
    if not state.is_file() or not (folder / "dataset_info.json").is_file():
        return None
    content = _json_of(state)
    if content.get("_indices_files"):
        raise ConfigError(
            f"{folder} was saved with a selection of rows beside its data. Save it again after "
            ".flatten_indices()."
        )
    return [
        folder / Path(str(entry.get("filename"))).name for entry in content.get("_data_files") or []
    ]


def _json_of(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    return content if isinstance(content, dict) else {}


def read_arrow(file: Path) -> Iterator[dict[str, Any]]:
    """The rows of an Arrow stream or file, a record batch at a time. ConfigError where pyarrow is
    missing or the file is damaged.
    """
    try:
        import pyarrow
    except ImportError as error:
        raise ConfigError(
            "reading a data set folder needs pyarrow: pip install 'slime-rl[data]', or use .jsonl."
        ) from error
    try:
        with pyarrow.memory_map(str(file)) as source:
            try:
                batches: Any = pyarrow.ipc.open_stream(source)
            except pyarrow.ArrowInvalid:
                opened = pyarrow.ipc.open_file(source)
                batches = (opened.get_batch(number) for number in range(opened.num_record_batches))
            for batch in batches:
                yield from rows_of_batch(batch)
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"{file} cannot be read as Arrow data: {error}") from error


def rows_of_batch(batch: pyarrow.RecordBatch) -> list[dict[str, Any]]:
    """The rows of an Arrow record batch as JSON would hold them: maps as objects, and no keys that
    only other rows have.

    A column of structs has every key in every row, null where the row has none. A null `content` of
    a message is one that was written.
    """
    try:
        rows = batch.to_pylist(maps_as_pydicts="lossy")
    except TypeError:  # a pyarrow that cannot
        rows = batch.to_pylist()
    return [{key: _without_nulls(value) for key, value in row.items()} for row in rows]


def _without_nulls(value: object) -> Any:
    if isinstance(value, dict):
        is_message = "role" in value
        return {
            key: _without_nulls(entry)
            for key, entry in value.items()
            if entry is not None or (is_message and key == "content")
        }
    return [_without_nulls(entry) for entry in value] if isinstance(value, list) else value
