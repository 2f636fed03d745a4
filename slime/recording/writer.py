"""Writes the parts of a recording on one background thread, so that no step waits for a disk."""

from __future__ import annotations

import argparse
import logging
import os
import queue
import re
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.exceptions import RolloutDataError
from slime.files import atomic, tables
from slime.recording.manifest import (
    PARTS,
    ROLLOUT,
    SCHEMAS,
    TRAIN,
    TRASH,
    Manifest,
    Part,
    file_hash,
    manifest_path,
    read_manifest,
    recorded_rollouts,
    rollout_folder,
    rollout_of,
    run_numbers,
    write_manifest,
)

if TYPE_CHECKING:
    import pyarrow

logger = logging.getLogger(__name__)
QUEUE_SIZE = 24  # parts that wait, of about three rollouts; a slow disk must not fill the memory
CLOSE_TIMEOUT_S = 120.0
# a process that is told to stop has a few seconds, see slime.ray.utils.STOP_TIMEOUT_S
STOP_TIMEOUT_S = 2.0
# writes a part to a path that it is given and returns its rows, None where rows have no meaning
WritePart = Callable[[Path], "int | None"]
_STOP = object()
# Whatever a disk, a plug-in's value or pyarrow raises ends the recording and never the run.
FAILURES = (Exception,)


class PartWriter:
    """One process's way into a recording. A part that cannot be written ends the recording of this
    process with one warning, never the run; what is listed by then stays.
    """

    def __init__(
        self,
        root: Path,
        writer: str,
        *,
        run: int,
        keep: int | None = None,
        max_bytes: int | None = None,
    ) -> None:
        self.root, self.writer, self.run = root, writer, run
        self.keep, self.max_bytes = keep, max_bytes
        self.failed = False
        self.num_skipped = 0  # rollouts that a slow disk cost
        self._current: tuple[Path, Manifest] | None = None
        self._skipping = False  # the rollout under way
        self._queue: queue.Queue[Any] = queue.Queue(maxsize=QUEUE_SIZE)
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()  # of the one warning

    def begin(self, rollout_id: int, *, evaluation: bool = False) -> None:
        """Opens the rollout's folder, at once. The manager's writer removes what an earlier attempt
        at the same rollout left; the ranks' writers list anew, since they train the same samples
        again.
        """
        self._skipping = False
        folder = rollout_folder(self.root, rollout_id, evaluation=evaluation)
        self._current = folder, Manifest(rollout_id, self.writer, self.run, evaluation)
        if self.failed:
            return
        try:
            if self.writer == ROLLOUT and os.path.lexists(folder):
                remove_folder(folder)
            folder.mkdir(exist_ok=True)  # not its parents: a recording that vanished has ended
            manifest_path(folder, self.writer).unlink(missing_ok=True)
        except FAILURES as error:
            self.stop(error)

    def add(self, name: str, write: WritePart, **facts: Any) -> None:
        """Queues one part of the rollout that was begun last, and what the manifest notes with it.
        What `write` reads must not change.
        """
        file, owner = PARTS[name]
        assert owner == self.writer, f"the part {name!r} is written by {owner}"

        def action(folder: Path, manifest: Manifest) -> None:
            with atomic.replacing(folder / file) as temporary:
                num_rows = write(temporary)
                size, digest = temporary.stat().st_size, file_hash(temporary)
                part = Part(name, file, size, digest, SCHEMAS[name], num_rows)
            manifest.parts[name] = part
            manifest.facts.update(facts)

        self._submit(action)

    def finish(self, **facts: Any) -> None:
        """Notes that the rollout has all the parts that this process writes, and removes the oldest
        rollouts beyond `keep` and `max_bytes`.
        """

        def action(folder: Path, manifest: Manifest) -> None:
            manifest.facts.update(facts, complete=True)

        self._submit(action)

    def _prune(self, current: Path | None) -> None:
        if self.keep is not None or self.max_bytes is not None:
            prune(self.root, keep=self.keep, max_bytes=self.max_bytes, current=current)

    def close(self, timeout_s: float | None = None) -> None:
        """Writes what is queued and ends the thread; a disk that hangs is left behind after
        `timeout_s` seconds, `CLOSE_TIMEOUT_S` where it is None. A later part starts a thread anew.
        """
        if self._thread is None:
            return
        timeout_s = CLOSE_TIMEOUT_S if timeout_s is None else timeout_s
        deadline = time.monotonic() + timeout_s
        try:
            self._queue.put(_STOP, timeout=timeout_s)
            self._thread.join(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Full:
            pass
        if self._thread.is_alive():
            logger.warning(
                "the recording in %s lacks its end: its disk hangs, for %g s so far",
                self.root,
                timeout_s,
            )
        self._thread = None

    def _submit(self, action: Callable[[Path, Manifest], None]) -> None:
        if self.failed or self._skipping or self._current is None:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="recording", daemon=True)
            self._thread.start()
        try:
            self._queue.put_nowait((action, *self._current))
        except queue.Full:
            self._skipping = True
            self.num_skipped += 1
            if self.num_skipped == 1:
                logger.warning(
                    "%s is recorded in part, because the disk of %s is too slow. Further rollouts "
                    "that it costs are not warned about; their manifests lack complete=true.",
                    self._current[0].name,
                    self.root,
                )

    def _work(self) -> None:
        """Writes what is queued. Parts that wait together are listed together."""
        unlisted: tuple[Path, Manifest] | None = None
        while True:
            try:
                job = self._queue.get(block=unlisted is None)
            except queue.Empty:
                job = None
            if unlisted is not None and (job is None or job is _STOP or job[2] is not unlisted[1]):
                self._act(self._list, *unlisted)
                unlisted = None
            if job is _STOP:
                break
            if job is not None and not self.failed and self._act(*job):
                unlisted = job[1:]
        try:
            if not self.failed:
                self._prune(None)
        except FAILURES as error:
            self.stop(error)

    def _act(
        self, action: Callable[[Path, Manifest], None], folder: Path, manifest: Manifest
    ) -> bool:
        """Whether the action was done on the rollout. What fails ends the recording."""
        try:
            if folder.is_dir():
                action(folder, manifest)
                return True
            if not self.root.is_dir():
                raise FileNotFoundError(f"{self.root} is gone")
        except FAILURES as error:
            # removed meanwhile by --record-keep or by hand: there is nothing to add to
            if folder.is_dir() or not self.root.is_dir():
                self.stop(error)
        return False

    def _list(self, folder: Path, manifest: Manifest) -> None:
        write_manifest(folder, manifest)
        if manifest.facts.get("complete"):
            self._prune(folder)

    def stop(self, error: Exception) -> None:
        """Ends the recording of this process, with one warning."""
        with self._lock:
            was_failed, self.failed = self.failed, True
        if not was_failed:
            logger.warning(
                "recording in %s has stopped: %s: %s. Training goes on; what its manifests list "
                "stays readable.",
                self.root,
                type(error).__name__,
                error,
            )


def writer_of(args: argparse.Namespace, name: str) -> PartWriter | None:
    """This process's writer into --record's folder; None without --record."""
    if args.record is None:
        return None
    root = Path(args.record)
    try:
        numbers = run_numbers(root)
    except OSError:  # the driver has warned of it
        numbers = []
    limits: dict[str, Any] = {}
    if name == ROLLOUT:
        size = args.record_max_gib
        limits = {
            "keep": args.record_keep,
            "max_bytes": None if size is None else int(size * 2**30),
        }
    return PartWriter(root, name, run=numbers[-1] if numbers else 0, **limits)


def table_part(table: pyarrow.Table) -> WritePart:
    """Writes a part that is a table."""

    def write(path: Path) -> int:
        tables.write_table_to(path, table)
        return len(table)

    return write


def lines_part(lines: Sequence[bytes]) -> WritePart:
    """Writes a part of lines, each with its end."""

    def write(path: Path) -> int:
        with open(path, "wb") as file:
            file.writelines(lines)
        return len(lines)

    return write


def remove_folder(folder: Path) -> None:
    """Removes a rollout's folder: at once from the recording, then its files. `OSError` where it is
    a link or the disk refuses.
    """
    if folder.is_symlink():
        raise OSError(f"{folder} is a link; a recording holds folders")
    trash = folder.with_name(f"{TRASH}{folder.name}.{os.getpid()}")
    folder.rename(trash)
    shutil.rmtree(trash)


def clean_up(root: Path) -> None:
    """Removes what processes left that died while they wrote: temporary files of parts and
    manifests, folders half removed. Called before a run writes; `OSError` where the disk refuses.
    """
    names = "|".join(re.escape(file) for file, _ in PARTS.values())
    temporary = re.compile(rf"\.(?:{names}|manifest\.[a-z]+\.json)\.[0-9]+")
    for path in root.iterdir():
        if path.is_symlink() or not path.is_dir():
            continue
        if path.name.startswith(TRASH):
            shutil.rmtree(path)
        elif rollout_of(path) is not None:
            for file in path.iterdir():
                if temporary.fullmatch(file.name):
                    file.unlink()


def folder_bytes(folder: Path) -> int:
    """Bytes of all files below the folder."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.lstat().st_size if path.is_file() else 0
        except OSError:  # removed meanwhile
            continue
    return total


def prune(
    root: Path, *, keep: int | None, max_bytes: int | None, current: Path | None = None
) -> None:
    """Removes recorded rollouts, oldest first, until at most `keep` are left and all take at most
    `max_bytes`, and the evaluations of before. `current` always stays, and so does the newest
    rollout before it while none that is newer has trained: the ranks are still writing it.

    Newest is what was begun last: a resumed run writes lower numbers than the run before it left.
    """
    folders = {
        rollout_folder(root, number, evaluation=evaluation): evaluation
        for evaluation in (False, True)
        for number in recorded_rollouts(root, evaluation=evaluation)
    }
    written = {folder: _begun_at(folder) for folder in folders}
    num_rollouts, total, has_trained = 0, 0, False
    too_many = False
    for folder in sorted(folders, key=lambda f: (f == current, written[f], f.name), reverse=True):
        is_rollout = not folders[folder]
        total += folder_bytes(folder) if max_bytes is not None else 0
        stays = folder == current or (is_rollout and num_rollouts < 2 and not has_trained)
        stays = stays or (current is None and is_rollout and num_rollouts == 0)
        too_many = too_many or (keep is not None and num_rollouts >= keep and is_rollout)
        num_rollouts += is_rollout
        if is_rollout and not has_trained:
            has_trained = _has_trained(folder)
        if not stays and (too_many or (max_bytes is not None and total > max_bytes)):
            remove_folder(folder)


def _has_trained(folder: Path) -> bool:
    try:
        manifest = read_manifest(folder, TRAIN)
    except RolloutDataError:  # damaged: no rank writes it any more
        return True
    return manifest is not None and bool(manifest.facts.get("complete"))


def _begun_at(folder: Path) -> int:
    try:
        return manifest_path(folder, ROLLOUT).stat().st_mtime_ns
    except OSError:
        return 0
