"""A disk that takes no more, in this process: the limit on the size of a file, which the system
enforces in the middle of a write.
"""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def full_disk(*, after: int) -> Iterator[None]:
    """Inside, the first `after` bytes of a file are written and the rest is an `OSError`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (after, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
