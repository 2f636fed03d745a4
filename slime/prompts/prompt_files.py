"""Reading prompt files row by row: .jsonl, .parquet, .json arrays, .csv and .tsv, data set folders;
slices, folders and patterns.

Memory: one row, or one batch; the whole file of a .json array.

A row that cannot be read is an error that names the file, row and remedy; none is skipped. Blank
lines are not rows.
"""

from __future__ import annotations

import codecs
import dataclasses
import glob
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slime.exceptions import ConfigError
from slime.files import exact_json
from slime.files.table_files import (
    DELIMITERS,
    arrow_files,
    file_type,
    read_arrow,
    read_csv,
    read_json_array,
    rows_of_batch,
)

SUFFIXES = (".jsonl", ".parquet", ".json", ".csv", ".tsv", ".arrow")
# In a folder, .json files are descriptions as often as data: they are read when they are named.
FOLDER_SUFFIXES = (".jsonl", ".parquet", ".csv", ".tsv")
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
# A parquet batch holds about this many bytes, so that nested columns stay in one Arrow chunk
# whatever the file's size.
PARQUET_BATCH_BYTES = 32 * 2**20
_SLICE = re.compile(r"^(?P<path>.*)@\[(?P<start>-?\d*):(?P<stop>-?\d*)\]$")
_FOREIGN_MARKS = (
    codecs.BOM_UTF32_LE,
    codecs.BOM_UTF32_BE,
    codecs.BOM_UTF16_LE,
    codecs.BOM_UTF16_BE,
)


class PromptFileMissing(ConfigError, FileNotFoundError):
    """The file, folder or pattern given as prompts leads to nothing."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One row and where it stands: `place` reads "prompts.jsonl, line 7"."""

    data: dict[str, Any]
    place: str


def parse_generalized_path(path: str) -> tuple[str, slice | None]:
    """(path, slice or None) of a path such as "prompts.jsonl@[10:-5]"."""
    match = _SLICE.match(path)
    if match is None:
        return path, None
    start, stop = (int(text) if text else None for text in (match["start"], match["stop"]))
    return match["path"], slice(start, stop)


def read_rows(path: str) -> Iterator[Row]:
    """The rows of a file, a folder or a pattern, in order (files by name), after the slice of the
    path.

    PromptFileMissing with the path where there is nothing; ConfigError for another file type, an
    empty file, and a row that is not a JSON object.
    """
    plain, rows = parse_generalized_path(str(path))
    files = _files_of(plain)
    if rows is None:
        return itertools.chain.from_iterable(_read_file(file) for file in files)
    start, stop = rows.start or 0, rows.stop
    if start < 0 or (stop is not None and stop < 0):
        start, stop, _ = rows.indices(sum(_count_rows(file) for file in files))
    return itertools.islice(
        itertools.chain.from_iterable(_read_file(file) for file in files),
        start,
        max(start, stop) if stop is not None else None,
    )


def _files_of(path: str) -> list[Path]:
    plain = Path(path).expanduser()
    if plain.is_dir():
        saved = arrow_files(plain)
        if saved is not None:
            return saved
        files = sorted(file for file in plain.iterdir() if file_type(file) in FOLDER_SUFFIXES)
        missing = (
            f"folder {path!r} has no {', '.join(FOLDER_SUFFIXES)} file and is no data set folder"
        )
    elif (
        HUB_NAME.fullmatch(path)
        and file_type(plain) not in SUFFIXES
        and not plain.exists()
        and not plain.parent.exists()
    ):
        raise ConfigError(
            f"there is no {path!r} here. As a name on the Hugging Face hub it must be downloaded "
            "first, with the package datasets: "
            f'datasets.load_dataset("{path}", split="train").to_json("prompts.jsonl")'
        )
    elif plain.exists() or not glob.has_magic(path):
        files, missing = [plain], f"prompt file {path!r} does not exist"
    else:
        files, missing = sorted(map(Path, glob.glob(path))), f"no file matches the pattern {path!r}"
    if not files or not files[0].exists():
        raise PromptFileMissing(f"{missing} (looked from {Path.cwd()}).")
    for file in files:
        if file_type(file) not in SUFFIXES:
            raise ConfigError(
                f"prompt file {str(file)!r} has the type {file.suffix!r}; use one of "
                f"{', '.join(SUFFIXES)}."
            )
        # a pipe would be waited for, and could be read only once
        if file.exists() and not file.is_file():
            raise ConfigError(
                f"prompt file {str(file)!r} is no regular file, and prompts are read several "
                "times. Write them into a file first."
            )
    return files


def _rows_of(file: Path) -> Iterator[Row]:
    kind = file_type(file)
    if kind == ".jsonl" or (kind == ".json" and _is_json_lines(file)):
        return _read_jsonl(file)
    if kind == ".json":
        return (
            Row(_object(item, f"{file}, item {number}"), f"{file}, item {number}")
            for number, item in read_json_array(file)
        )
    if kind in DELIMITERS:
        return (Row(data, f"{file}, line {number}") for number, data in read_csv(file))
    if kind == ".arrow":
        return (
            Row(data, f"{file}, row {number}")
            for number, data in enumerate(read_arrow(file), start=1)
        )
    return _read_parquet(file)


def _is_json_lines(file: Path) -> bool:
    """Whether the first line is a whole object and more lines follow: many files named .json are
    .jsonl.
    """
    with file.open("rb") as lines:
        first = next(lines, b"").removeprefix(codecs.BOM_UTF8)
        try:
            return isinstance(exact_json.loads(first), dict) and any(line.strip() for line in lines)
        except exact_json.JSONDecodeError:
            return False


def _object(value: object, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(
            f'{place}: the value is a {type(value).__name__}, not an object. Write {{"input": '
            f"...}}."
        )
    return value


def _read_file(file: Path) -> Iterator[Row]:
    rows = _rows_of(file)
    empty = True
    for row in rows:
        empty = False
        yield row
    if empty:
        raise ConfigError(
            f"{file} has no rows. Give a file with at least one JSON object per line."
        )


def _read_jsonl(file: Path) -> Iterator[Row]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if number == 1:
                line = _without_byte_order_mark(line, file)
            if line.strip():
                yield Row(_parse_line(line, file, number), f"{file}, line {number}")


def _without_byte_order_mark(line: bytes, file: Path) -> bytes:
    if line.startswith(_FOREIGN_MARKS):
        raise ConfigError(
            f"{file}, line 1: the file begins with a UTF-16 or UTF-32 byte order mark. Save it as "
            "UTF-8, "
            "for instance with: iconv -f UTF-16 -t UTF-8."
        )
    return line.removeprefix(codecs.BOM_UTF8)


def _parse_line(line: bytes, file: Path, number: int) -> dict[str, Any]:
    try:
        data = exact_json.loads(line)
    except exact_json.JSONDecodeError as error:
        start = line[:80].decode("utf-8", errors="replace").strip()
        raise ConfigError(
            f"{file}, line {number}: not valid JSON ({error}). The line begins with {start!r}. "
            "Each line must be one complete JSON object; repair or remove this one."
        ) from error
    return _object(data, f"{file}, line {number}")


def _count_rows(file: Path) -> int:
    if file_type(file) == ".parquet":
        return _parquet().ParquetFile(file).metadata.num_rows
    if file_type(file) != ".jsonl":
        return sum(1 for _ in _rows_of(file))
    with file.open("rb") as lines:
        return sum(1 for line in lines if line.strip(b"\xef\xbb\xbf \t\r\n"))


def _read_parquet(file: Path) -> Iterator[Row]:
    pq = _parquet()
    import pyarrow

    try:
        with pq.ParquetFile(file) as parquet:
            number = 0
            for group in range(parquet.num_row_groups):
                about = parquet.metadata.row_group(group)
                batch_size = _rows_per_batch(about.total_byte_size, about.num_rows)
                for batch in parquet.iter_batches(
                    batch_size=batch_size, row_groups=[group], use_threads=False
                ):
                    for data in rows_of_batch(batch):
                        number += 1
                        yield Row(data, f"{file}, row {number}")
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"{file} cannot be read as parquet: {error}") from error


def _rows_per_batch(num_bytes: int, num_rows: int) -> int:
    return max(1, min(1024, PARQUET_BATCH_BYTES * max(1, num_rows) // max(1, num_bytes)))


def _parquet() -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError(
            "reading .parquet needs pyarrow: pip install 'slime-rl[data]', or use .jsonl."
        ) from error
    return pyarrow.parquet
