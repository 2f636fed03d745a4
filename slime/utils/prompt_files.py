"""Reading prompt files row by row: .jsonl and .parquet, slices, folders and patterns. Memory: one row, or one batch.

A row that cannot be read is an error that names the file, row and remedy; none is skipped. Blank lines are not rows.
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
from slime.utils import exact_json

SUFFIXES = (".jsonl", ".parquet")
# A parquet batch holds about this many bytes, so that nested columns stay in one Arrow chunk whatever the file's size.
PARQUET_BATCH_BYTES = 32 * 2**20
_SLICE = re.compile(r"^(?P<path>.*)@\[(?P<start>-?\d*):(?P<stop>-?\d*)\]$")
_FOREIGN_MARKS = (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


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
    """The rows of a file, a folder or a pattern, in order (files by name), after the slice of the path.

    PromptFileMissing with the path where there is nothing; ConfigError for another file type, an empty file, and a row
    that is not a JSON object.
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
        files = sorted(file for file in plain.iterdir() if file.suffix in SUFFIXES)
        missing = f"folder {path!r} has no {' or '.join(SUFFIXES)} file"
    elif plain.exists() or not glob.has_magic(path):
        files, missing = [plain], f"prompt file {path!r} does not exist"
    else:
        files, missing = sorted(map(Path, glob.glob(path))), f"no file matches the pattern {path!r}"
    if not files or not files[0].exists():
        raise PromptFileMissing(f"{missing} (looked from {Path.cwd()}).")
    for file in files:
        if file.suffix not in SUFFIXES:
            raise ConfigError(
                f"prompt file {str(file)!r} has the type {file.suffix!r}; use one of {', '.join(SUFFIXES)}."
            )
    return files


def _read_file(file: Path) -> Iterator[Row]:
    rows = _read_jsonl(file) if file.suffix == ".jsonl" else _read_parquet(file)
    empty = True
    for row in rows:
        empty = False
        yield row
    if empty:
        raise ConfigError(f"{file} has no rows. Give a file with at least one JSON object per line.")


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
            f"{file}, line 1: the file begins with a UTF-16 or UTF-32 byte order mark. Save it as UTF-8, "
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
    if not isinstance(data, dict):
        raise ConfigError(
            f'{file}, line {number}: the value is a {type(data).__name__}, not an object. Write {{"input": ...}}.'
        )
    return data


def _count_rows(file: Path) -> int:
    if file.suffix == ".parquet":
        return _parquet().ParquetFile(file).metadata.num_rows
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
                for batch in parquet.iter_batches(batch_size=batch_size, row_groups=[group], use_threads=False):
                    for data in batch.to_pylist():
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
        raise ConfigError("reading .parquet needs pyarrow: pip install 'slime-rl[data]', or use .jsonl.") from error
    return pyarrow.parquet
