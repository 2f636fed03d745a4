"""How full the disk of a folder is, for the messages of writers that failed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def disk_space(folder: str | os.PathLike) -> str:
    """ "PATH is on a disk with 0.0 of 9.8 GB free", of the nearest folder that exists."""
    path = Path(os.path.abspath(folder))
    missing = "" if path.is_dir() else " (which is not there)"
    while not path.is_dir() and path != path.parent:
        path = path.parent
    try:
        usage = shutil.disk_usage(path)
    except OSError as error:
        return f"the disk of {folder}{missing} does not answer: {error}"
    free, total = usage.free / 1e9, usage.total / 1e9
    return f"{folder}{missing} is on a disk with {free:.3g} of {total:.3g} GB free"
