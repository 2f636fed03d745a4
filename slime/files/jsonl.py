"""Append-only JSON lines that several processes write at once and anyone can read at any time.

One record is one `write` on a descriptor opened with O_APPEND, so records of different processes
never mix. A record that did not fit on a full disk, or whose process was killed, leaves a torn line;
the next record starts on a fresh line and readers skip and count what they cannot parse. A record
carries a checksum, so that a changed byte is one of these.

{"step": 3, ..., "crc32": 2774873541}
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import orjson

from slime.files import exact_json

# the checksum of a record, its last value
_CRC = re.compile(rb',?"crc32":(\d{1,10})\}$')
# What `plain_value` makes of a float that JSON does not have.
NOT_FINITE = frozenset({"nan", "inf", "-inf"})


def plain_value(value: object) -> Any:
    """Returns `value` as something JSON has: tensors and numpy scalars of one element as numbers,
    not-a-number as a string, the rest as text.
    """
    if value is None or isinstance(value, bool | str | int):
        return value
    if not isinstance(value, float):
        item = getattr(value, "item", None)
        if item is None or getattr(value, "size", None) == 0:
            return str(value)
        try:
            value = item()
        except (ValueError, RuntimeError):  # more than one element
            return str(value)
        return plain_value(value) if isinstance(value, bool | int | float) else str(value)
    # numpy's float64 is a float that orjson refuses; inf - inf and nan - nan are nan
    return float(value) if value - value == 0 else str(value)


def encode(record: dict[str, Any]) -> bytes:
    """Returns one JSON line with its newline. Keys are text; values may be nested dicts, lists and
    anything `plain_value` takes.
    """
    return exact_json.dumps(
        record, default=plain_value, option=orjson.OPT_NON_STR_KEYS | orjson.OPT_APPEND_NEWLINE
    )


def size_of(path: Path) -> int:
    """Bytes of a file of records; 0 where nothing was written yet."""
    return path.stat().st_size if path.exists() else 0


class JsonlWriter:
    """Appends records to one file; creates it and its folder on the first write. OSError of a write
    reaches the caller.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._descriptor: int | None = None
        self._torn = False

    def write(self, record: dict[str, Any]) -> None:
        """Appends `record` as one line. OSError when the disk takes none or only a part of it."""
        self.write_all([record])

    def write_all(self, records: Iterable[dict[str, Any]]) -> None:
        """Appends a line per record, all of them in one write. OSError as `write`; complete lines
        that the disk took stay.
        """
        if self._descriptor is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
            self._torn = ends_torn(self._descriptor)
        lines = b"\n" * self._torn + b"".join(map(_checked, map(encode, records)))
        written = os.write(self._descriptor, lines)
        self._torn = written < len(lines)
        if self._torn:
            raise OSError(
                f"{self.path}: {written} of {len(lines)} bytes were written. Is the disk full?"
            )

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _checked(line: bytes) -> bytes:
    """The line of a record with the checksum of what stands before it as its last value."""
    content = line[:-2]
    comma = b"," if len(content) > 1 else b""
    return b'%b%b"crc32":%d}\n' % (content, comma, zlib.crc32(content))


def _is_changed(line: bytes) -> bool:
    """Whether a line has a checksum that is not its own."""
    found = _CRC.search(line)
    return found is not None and zlib.crc32(line[: found.start()]) != int(found[1])


def ends_torn(descriptor: int) -> bool:
    """Whether the file ends within a line, which a process that was killed has left."""
    size = os.fstat(descriptor).st_size
    return size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"


class JsonlTail:
    """Reads what was appended since the last call. `malformed` counts complete lines that are no
    JSON object, or not the one that was written. Records come without their checksum.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, from_end: bool = False, offset: int = 0
    ) -> None:
        self.path = Path(path)
        self.malformed = 0
        self._rest = b""
        self._offset = offset
        if from_end and self.path.exists():
            self._offset = self.path.stat().st_size

    @property
    def ends_torn(self) -> bool:
        """Whether the last line that was read has no end: it is being written, or never was."""
        return bool(self._rest)

    def read(self) -> list[dict[str, Any]]:
        """Returns the complete new records in file order; [] when the file is not there."""
        try:
            with self.path.open("rb") as file:
                # the file was moved aside and begun anew
                if os.fstat(file.fileno()).st_size < self._offset:
                    self._offset, self._rest = 0, b""
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        return list(self._parse(lines))

    def skip_to_end(self, num_bytes: int) -> None:
        """Goes to the first line that begins in the file's last `num_bytes`; `read` begins there."""
        try:
            with self.path.open("rb") as file:
                start = max(0, os.fstat(file.fileno()).st_size - num_bytes)
                file.seek(max(0, start - 1))
                partial = file.readline() if start else b""
                self._offset, self._rest = max(0, start - 1) + len(partial), b""
        except FileNotFoundError:
            return

    def _parse(self, lines: list[bytes]) -> Iterator[dict[str, Any]]:
        for line in lines:
            if not line:
                continue
            try:
                record = exact_json.loads(line)
            except orjson.JSONDecodeError:
                self.malformed += 1
                continue
            if isinstance(record, dict) and not _is_changed(line):
                record.pop("crc32", None)
                yield record
            else:
                self.malformed += 1


def read_jsonl(path: str | os.PathLike[str]) -> tuple[list[dict[str, Any]], int]:
    """Returns every complete record of the file and the number of lines that could not be read."""
    tail = JsonlTail(path)
    return tail.read(), tail.malformed
