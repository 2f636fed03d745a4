"""A hash of a whole Parquet file, in the gap between its last page and its footer, which every reader
steps over. It is held against the file before the file is parsed: pages have checksums of their
own, the footer has none, and a changed bit there ends some versions of pyarrow with an abort.

    PAR1 | pages | slime-seal-1 hash | footer | length of the footer | PAR1
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import BinaryIO

_MARK = b"slime-seal-1"
_DIGEST_BYTES = 16
_SEAL_BYTES = len(_MARK) + _DIGEST_BYTES
_END_BYTES = 8  # length of the footer, PAR1
_CHUNK = 1 << 22


def seal(path: str | os.PathLike) -> None:
    """Puts the seal into a Parquet file that has none."""
    with open(path, "r+b") as file:
        start = _footer_start(file)
        file.seek(start)
        footer = file.read()
        digest = _hash_of(file, start, footer)
        file.seek(start)
        file.write(_MARK + digest + footer)


def is_unchanged(path: Path) -> bool | None:
    """Whether the file's seal is its own. None for one without a seal, which another program or an
    earlier version wrote.
    """
    with open(path, "rb") as file:
        try:
            start = _footer_start(file)
        except ValueError:
            return None  # its reader says what is wrong
        if start < _SEAL_BYTES:
            return None
        file.seek(start - _SEAL_BYTES)
        found = file.read(_SEAL_BYTES)
        footer = file.read()
        if not found.startswith(_MARK):
            return None
        return found == _MARK + _hash_of(file, start - _SEAL_BYTES, footer)


def _footer_start(file: BinaryIO) -> int:
    """Where the footer begins. ValueError where the file does not end as a Parquet file."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _END_BYTES))
    end = file.read(_END_BYTES)
    start = size - _END_BYTES - int.from_bytes(end[:4], "little")
    if len(end) != _END_BYTES or end[4:] != b"PAR1" or start < 0:
        raise ValueError("no Parquet file")
    return start


def _hash_of(file: BinaryIO, num_bytes: int, footer: bytes) -> bytes:
    """The hash of the file's first `num_bytes` and the footer with its end."""
    found = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    file.seek(0)
    left = num_bytes
    while left and (chunk := file.read(min(left, _CHUNK))):
        found.update(chunk)
        left -= len(chunk)
    found.update(footer)
    return found.digest()
