"""Files of JSON lines whose last line is a hash of all lines before it, so that no changed or
missing byte is read in silence.

{"format": ...}
{...}
{"blake2b":"6f1c..."}
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

_DIGEST_BYTES = 16
_BEGIN, _END = b'{"blake2b":"', b'"}\n'
SEAL_BYTES = len(_BEGIN) + 2 * _DIGEST_BYTES + len(_END)


class SealHash:
    """The hash of lines that come one after the other."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=_DIGEST_BYTES)

    def add(self, line: bytes) -> None:
        """The next line, with its end."""
        self._hash.update(line)

    def seal(self) -> bytes:
        """The last line of a file of these lines."""
        return _BEGIN + self._hash.hexdigest().encode() + _END


def sealed(lines: Iterable[bytes]) -> Iterator[bytes]:
    """The lines, each with its end, and the seal."""
    found = SealHash()
    for line in lines:
        found.add(line)
        yield line
    yield found.seal()


def is_whole(content: bytes) -> bool:
    """Whether the content ends with the seal of what stands before it."""
    found = SealHash()
    found.add(content[:-SEAL_BYTES])
    return content[-SEAL_BYTES:] == found.seal()
