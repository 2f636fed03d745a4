"""The ledger's files: entries appended as sealed JSON lines, and one sealed state per checkpoint.

SAVE/ledger.jsonl                 {"blake2b": ..., "state": {"kind": "rollout", ...}} a line
SAVE/rollout/ledger_12.json       the books after rollout 12, written with its data position
SAVE/iter_0000012/ledger.json     a copy, published with the weights

Without --save the lines are in the run folder. A line is written whole or not at all but for a full
disk or a power failure; the next writer begins on a fresh line.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from slime.data.ledger_audit import Books
from slime.data.run_ledger import (
    RolloutEntry,
    Runs,
    SavedState,
    Start,
    StreamMark,
    TrainedEntry,
)
from slime.exceptions import ConfigError
from slime.files import atomic, exact_json
from slime.files.jsonl import ends_torn
from slime.files.sealed import seal, unseal

FILE_NAME = "ledger.jsonl"
STATE_NAME = "ledger.json"
LARGEST = 1 << 53  # of a number in an entry
MOST_NUMBERS = 1 << 40  # that a set of runs may hold
Entry = Start | RolloutEntry | TrainedEntry
T = TypeVar("T")


def handed_state_path(folder: str | os.PathLike, rollout_id: int) -> Path:
    """Where the books after a rollout are kept beside its data position."""
    return Path(folder) / "rollout" / f"ledger_{rollout_id}.json"


# --- values to JSON -------------------------------------------------------------------------------


def encode_entry(entry: Entry) -> bytes:
    """One line with its newline."""
    kind = {Start: "start", RolloutEntry: "rollout", TrainedEntry: "trained"}[type(entry)]
    return seal(exact_json.dumps({"kind": kind, **_plain(entry)})) + b"\n"


def write_state(path: Path, state: SavedState) -> None:
    """Writes the books of a checkpoint, whole or not at all."""
    atomic.write_bytes(path, seal(exact_json.dumps(_plain(state))))


def copy_ledger_state(save: str, rollout_id: int, folder: Path) -> None:
    """Puts the state that was written beside the data position into a checkpoint's folder."""
    with contextlib.suppress(FileNotFoundError):  # ranks without a rollout manager
        shutil.copyfile(handed_state_path(save, rollout_id), folder / STATE_NAME)


def _plain(value: Any) -> dict[str, Any]:
    plain = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if plain.get("mark") is not None:
        plain["mark"] = dataclasses.asdict(plain["mark"])
    for name in ("planned", "rows"):
        if isinstance(plain.get(name), Mapping):
            plain[name] = {str(key): entry for key, entry in plain[name].items()}
    return plain


# --- JSON to values -------------------------------------------------------------------------------


def decode_entry(line: bytes) -> Entry:
    """The entry of a line. ValueError for one that was not written by `encode_entry`, or changed
    since.
    """
    record = unseal(line)
    kind = record.pop("kind", None) if isinstance(record, dict) else None
    if kind not in _DECODERS:
        raise ValueError(f"it is an entry of kind {kind!r}")
    return _checked(_DECODERS[kind], record)


def read_state(path: Path) -> SavedState:
    """The books of a checkpoint. ConfigError for a damaged file; OSError where it cannot be
    read.
    """
    try:
        return _checked(_saved, unseal(path.read_bytes()))
    except ValueError as error:
        raise ConfigError(f"the ledger's state {str(path)!r} is damaged ({error}).") from error


def _checked(decode: Callable[[dict[str, Any]], T], record: Any) -> T:
    if not isinstance(record, dict):
        raise ValueError(f"it holds a {type(record).__name__}")
    try:
        return decode(record)
    except KeyError as error:
        raise ValueError(f"{error} is missing") from None
    except (TypeError, AttributeError) as error:
        raise ValueError(str(error)) from None


def _number(value: Any, *, least: int = 0) -> int:
    if type(value) is not int or not least <= value < LARGEST:
        raise ValueError(f"{value!r:.40} where a whole number is expected")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r:.40} where a text is expected")
    return value


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{value!r:.40} where a time is expected")
    return float(value)


def _runs(value: Any) -> Runs:
    found = tuple((_number(first), _number(count, least=1)) for first, count in value)
    if sum(count for _, count in found) > MOST_NUMBERS:
        raise ValueError("runs of more numbers than a run can have")
    return found


def _counts(value: Any) -> dict[str, int]:
    return {_text(key): _number(count) for key, count in value.items()}


def _mark(value: Any) -> StreamMark | None:
    if value is None:
        return None
    total = value["num_prompts"]
    return StreamMark(
        groups=_number(value["groups"]),
        epoch=_number(value["epoch"]),
        offset=_number(value["offset"]),
        num_prompts=None if total is None else _number(total, least=1),
        group_size=_number(value["group_size"], least=1),
    )


def _lineage(value: Any) -> tuple[tuple[str, int, int], ...]:
    found = tuple((_text(start), _number(first), _number(last)) for start, first, last in value)
    if any(first > last for _, first, last in found):
        raise ValueError("a lineage that ends before it begins")
    return found


def _start(record: dict[str, Any]) -> Start:
    loaded, note = record["loaded"], record["note"]
    return Start(
        start=_text(record["start"]),
        time=_seconds(record["time"]),
        run_dir=_text(record["run_dir"]),
        first=_number(record["first"]),
        lineage=_lineage(record["lineage"]),
        mark=_mark(record["mark"]),
        waiting=_runs(record["waiting"]),
        loaded=None if loaded is None else _text(loaded),
        note=None if note is None else _text(note),
    )


def _rollout(record: dict[str, Any]) -> RolloutEntry:
    served = record["served"]
    return RolloutEntry(
        start=_text(record["start"]),
        rollout=_number(record["rollout"]),
        time=_seconds(record["time"]),
        process=_text(record["process"]),
        mark=_mark(record["mark"]),
        served=tuple(
            (_number(epoch), _number(offset), _number(group), _number(count, least=1))
            for epoch, offset, group, count in served
        ),
        again=_runs(record["again"]),
        is_told=bool(record["is_told"]),
        planned={int(step): _runs(runs) for step, runs in record["planned"].items()},
        dropped={_text(reason): _runs(runs) for reason, runs in record["dropped"].items()},
        rows={int(index): _number(count) for index, count in record["rows"].items()},
        unnamed=_counts(record["unnamed"]),
        counts=_counts(record["counts"]),
    )


def _trained(record: dict[str, Any]) -> TrainedEntry:
    return TrainedEntry(
        start=_text(record["start"]),
        rollout=_number(record["rollout"]),
        time=_seconds(record["time"]),
        process=_text(record["process"]),
        rows=_number(record["rows"]),
        not_trained={_text(why): _runs(runs) for why, runs in record["not_trained"].items()},
        unnamed=_number(record["unnamed"]),
    )


def _saved(record: dict[str, Any]) -> SavedState:
    return SavedState(
        rollout=_number(record["rollout"]),
        lineage=_lineage(record["lineage"]),
        mark=_mark(record["mark"]),
        waiting=_runs(record["waiting"]),
    )


_DECODERS: dict[str, Callable[[dict[str, Any]], Entry]] = {
    "start": _start,
    "rollout": _rollout,
    "trained": _trained,
}


# --- the file of lines ----------------------------------------------------------------------------


def read_books(path: str | os.PathLike) -> Books:
    """All entries of a ledger. A line that cannot be read is kept as a sentence in `unreadable`.
    OSError where there is no file.
    """
    books = Books()
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                _enter(books, decode_entry(line.rstrip(b"\n")))
            except (ValueError, RecursionError) as error:
                books.unreadable.append(f"line {number} cannot be read: {error}")
    return books


def _enter(books: Books, entry: Entry) -> None:
    """An entry that stands there twice, unchanged, was written again after a full disk."""
    if isinstance(entry, Start):
        if books.starts.setdefault(entry.start, entry) != entry:
            books.twice.append(("start", entry.start, entry.first))
        return
    known: dict[tuple[str, int], Any] = (
        books.rollouts if isinstance(entry, RolloutEntry) else books.trained
    )
    if known.setdefault((entry.start, entry.rollout), entry) != entry:
        what = "samples" if isinstance(entry, RolloutEntry) else "training"
        books.twice.append((what, entry.start, entry.rollout))


class LedgerWriter:
    """Appends entries to one file; several processes may. What the disk does not take is kept and
    written with the next entry, or by `sync`.
    """

    def __init__(self, folder: str | os.PathLike) -> None:
        self.path = Path(folder) / FILE_NAME
        self._pending: list[bytes] = []
        self._descriptor: int | None = None

    def append(self, entries: Iterable[Entry]) -> OSError | None:
        """Appends entries; what the disk said where it refused them."""
        self._pending += [encode_entry(entry) for entry in entries]
        try:
            self._write()
        except OSError as error:
            return error
        return None

    def sync(self) -> None:
        """Returns when every entry is on the disk. OSError where it refuses."""
        self._write()
        if self._descriptor is not None:
            atomic.sync_descriptor(self._descriptor)

    def _write(self) -> None:
        if not self._pending:
            return
        if self._descriptor is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        content = b"\n" * ends_torn(self._descriptor) + b"".join(self._pending)
        written = os.write(self._descriptor, content)
        if written < len(content):
            raise OSError(
                f"{self.path}: {written} of {len(content)} bytes were written. Is the disk full?"
            )
        self._pending = []

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._write()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
