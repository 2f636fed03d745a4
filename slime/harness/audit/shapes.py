"""What a reader is: a shape of file that `slime audit` knows, how it is recognised, and the rows it
gives.
"""

from __future__ import annotations

import dataclasses
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from slime.exceptions import RolloutDataError
from slime.harness.audit.table import Row

_NUMBER = re.compile(r"(?P<step>\d{1,15})")
_FOLDER = re.compile(r"(?:rollout|eval)_(?P<step>\d{1,15})")


@dataclasses.dataclass(frozen=True)
class ReadOptions:
    """mapping: our column -> their key of plain JSON lines. reward_key: which of several rewards
    counts. report(path, why): notes what of a file could not be read, where the rest of it was.
    """

    mapping: Mapping[str, str] | None = None
    reward_key: str | None = None
    report: Callable[[Path, str], None] = lambda path, why: None


@dataclasses.dataclass
class Part:
    """Rows of one step. `role`: "rollout" rows stand for themselves; "train" rows are what a rank
    computed, and are joined to the rollout's where there are some.
    """

    step: int
    rows: list[Row]
    role: str = "rollout"
    is_evaluation: bool = False


@dataclasses.dataclass(frozen=True)
class Shape:
    """One kind of file. suffixes: of its names. needs: what such a file has, for an error. missing:
    None where the file is of this shape, else what it lacks. read: its parts; whole steps where the
    file has several. role: of its parts.
    """

    name: str
    needs: str
    suffixes: tuple[str, ...]
    missing: Callable[[Path, ReadOptions], str | None]
    read: Callable[[Path, ReadOptions], Iterator[Part]]
    role: str = "rollout"


def open_regular(path: Path) -> BinaryIO:
    """Opens a file that is one: no link, no pipe, no device. RolloutDataError for anything else."""
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        raise RolloutDataError(f"cannot be opened: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise RolloutDataError("is no regular file")
    return os.fdopen(descriptor, "rb")


def step_in_name(path: Path) -> int | None:
    """The first number in a file's name, which is its step in every framework's naming; of a part
    of a recording, that of its folder.
    """
    found = _NUMBER.search(path.stem) or _FOLDER.fullmatch(path.parent.name)
    return int(found.group("step")) if found else None


def run_of(path: Path) -> Path:
    """The folder of the run that a file's step belongs to; of a part of a recording, the recording."""
    return path.parent.parent if _FOLDER.fullmatch(path.parent.name) else path.parent


def is_evaluation_name(path: Path) -> bool:
    """Whether a dump's name says that it is of an evaluation: eval_7.pt."""
    return path.stem.startswith(("eval", "val_")) or (
        path.parent.name.startswith("eval_") and _FOLDER.fullmatch(path.parent.name) is not None
    )


def lacking(record: dict[str, None] | str, keys: tuple[str, ...]) -> str | None:
    """Which of `keys` a record's keys lack, with those it has; None where it has all. A text: the
    name of the type of a record that is no object.
    """
    if isinstance(record, str):
        return f"the first line is a {record}, no object"
    absent = [key for key in keys if key not in record]
    if not absent:
        return None
    known = ", ".join(sorted(str(key)[:40] for key in list(record)[:12])) or "nothing"
    return f"no {', '.join(absent)} (it has {known})"
