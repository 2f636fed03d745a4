"""A checkpoint folder on disk: written under a temporary name, hashed, renamed as a whole, pointed
to last. No torch, no ranks.

SAVE/iter_0000012/...            one checkpoint, with manifest.json: blake2b and size of every other
                                 file
SAVE/latest_checkpointed_iteration.txt   "12"
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from slime.exceptions import ConfigError
from slime.files import atomic

TRACKER = "latest_checkpointed_iteration.txt"
MANIFEST = "manifest.json"
_ITERATION = re.compile(r"iter_(\d{7})")
_NUMBER = re.compile(r"[0-9]{1,9}")


def iteration_folder(save: str | Path, iteration: int) -> Path:
    """Where the checkpoint of `iteration` lies below `save`."""
    return Path(save) / f"iter_{iteration:07d}"


def temporary_folder(save: str | Path, iteration: int) -> Path:
    """The name a checkpoint is written under before it is published."""
    return Path(save) / f".iter_{iteration:07d}.writing"


def is_megatron_checkpoint(path: str | Path) -> bool:
    """True for a folder with the pointer file, and for an iter_<7 digits> folder itself."""
    path = Path(path)
    return (path / TRACKER).is_file() or (
        _ITERATION.fullmatch(path.name) is not None and path.is_dir()
    )


def find_checkpoint(path: str | Path, step: int | None) -> tuple[Path, int]:
    """Returns (checkpoint folder, iteration) of `step`, or of the latest. Raises `ConfigError`
    where there is none.
    """
    path = Path(path)
    own = _ITERATION.fullmatch(path.name)
    if own and step in (None, int(own[1])):
        return path, int(own[1])
    if step is None:
        text = (path / TRACKER).read_text(encoding="utf-8", errors="replace").strip()
        if not _NUMBER.fullmatch(text):
            raise ConfigError(
                f"{path / TRACKER} holds {text[:40]!r}, not an iteration. Write the number of one of "
                f"{_listed(path)}."
            )
        step = int(text)
    folder = iteration_folder(path, step)
    _put_back(folder)
    if not folder.is_dir():
        raise ConfigError(f"{path} has no checkpoint of iteration {step}. It has {_listed(path)}.")
    return folder, step


def published_iterations(save: str | Path) -> list[int]:
    """Iterations of the published checkpoints below `save`, ascending."""
    found = (_iteration_of(entry) for entry in Path(save).iterdir() if entry.is_dir())
    return sorted(iteration for iteration in found if iteration is not None)


def _iteration_of(folder: Path) -> int | None:
    match = _ITERATION.fullmatch(folder.name)
    return int(match[1]) if match else None


def files_below(folder: str | Path) -> list[str]:
    """Relative paths of all files but the manifest, sorted."""
    folder = Path(folder)
    paths = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(path for path in paths if path != MANIFEST)


def hash_files(
    folder: str | Path, names: Iterable[str], *, sync: bool = False
) -> dict[str, dict[str, object]]:
    """{relative path: {"blake2b": hex, "size": bytes}}; `sync` also forces each file's content to
    the disk.
    """
    entries: dict[str, dict[str, object]] = {}
    for name in names:
        digest, size = hashlib.blake2b(digest_size=16), 0
        with open(Path(folder) / name, "rb") as file:
            while chunk := file.read(1 << 22):
                digest.update(chunk)
                size += len(chunk)
            if sync:
                os.fsync(file.fileno())
        entries[name] = {"blake2b": digest.hexdigest(), "size": size}
    return entries


def begin(temporary: str | Path) -> None:
    """Makes the folder empty, and removes what saves that were killed have left beside it."""
    temporary = Path(temporary)
    for left in temporary.parent.glob(".iter_*.writing"):
        shutil.rmtree(left, ignore_errors=True)
    for final in map(_folder_of_replaced, temporary.parent.glob(".iter_*.replaced")):
        _put_back(final)
        shutil.rmtree(_replaced(final), ignore_errors=True)
    temporary.mkdir(parents=True)


def publish(
    temporary: str | Path, final: str | Path, entries: Mapping[str, Mapping[str, object]]
) -> None:
    """Writes the manifest and gives the folder its final name. A folder of that name stays beside
    it under another one until `point_to` or `withdraw`.
    """
    temporary, final = Path(temporary), Path(final)
    atomic.write_text(
        temporary / MANIFEST, json.dumps({"version": 1, "files": entries}, indent=1, sort_keys=True)
    )
    for folder in {(temporary / name).parent for name in entries} | {temporary}:
        atomic.sync_folder(folder)
    try:
        if final.exists():
            shutil.rmtree(_replaced(final), ignore_errors=True)
            final.rename(_replaced(final))
        temporary.rename(final)
        atomic.sync_folder(final.parent)
    except OSError:
        if not temporary.exists():
            final.rename(temporary)
        _put_back(final)
        raise


def withdraw(final: str | Path) -> None:
    """Removes what `publish` has published, and puts the folder that it replaced back. What the
    pointer names without a replaced folder stays. Errors of the disk, which has failed already, are
    ignored.
    """
    final = Path(final)
    if _replaced(final).is_dir() or latest_iteration(final.parent) != _iteration_of(final):
        shutil.rmtree(final, ignore_errors=True)
        _put_back(final)


def _replaced(final: Path) -> Path:
    return final.with_name(f".{final.name}.replaced")


def _folder_of_replaced(replaced: Path) -> Path:
    return replaced.with_name(replaced.name.removeprefix(".").removesuffix(".replaced"))


def _put_back(final: Path) -> None:
    """A crash between the two renames of `publish` leaves the earlier folder under its other name,
    and a pointer to nothing.
    """
    with contextlib.suppress(OSError):  # another rank may have done it
        if not final.exists() and _replaced(final).is_dir():
            _replaced(final).rename(final)


def point_to(save: str | Path, iteration: int) -> None:
    """Makes `iteration` the latest: the pointer file is replaced in one step. A folder that it
    replaced goes.
    """
    atomic.write_text(Path(save) / TRACKER, f"{iteration}\n")
    shutil.rmtree(_replaced(iteration_folder(save, iteration)), ignore_errors=True)


def latest_iteration(save: str | Path) -> int | None:
    """The iteration that the pointer names and that is there; None where there is none."""
    with contextlib.suppress(OSError, ValueError):
        iteration = int((Path(save) / TRACKER).read_text())
        if iteration_folder(save, iteration).is_dir():
            return iteration
    return None


@dataclasses.dataclass(frozen=True)
class Retention:
    """Which checkpoints stay: the newest `keep` (None: all), and the iterations `also`."""

    keep: int | None
    also: Collection[int] = ()


def retention_of(role: str, keep: int | None, save: str | None) -> Retention:
    """What a save of this role leaves. keep: --keep-checkpoints; save: the policy's folder."""
    if role != "critic" or keep is None or save is None:
        return Retention(keep)
    # The critic's is published first. Until the policy's is, which may fail, the critics of the
    # policy's checkpoints must stay.
    return Retention(keep + 1, also=frozenset(published_iterations(save)))


def prune(save: str | Path, retention: Retention, *, current: int) -> list[int]:
    """Deletes all checkpoints up to `current` that `retention` does not keep; returns the deleted
    iterations.

    Later iterations were abandoned when the run went back to an earlier one: they neither count nor
    go, until they are written anew.
    """
    if retention.keep is None:
        return []
    found = [iteration for iteration in published_iterations(save) if iteration <= current]
    deleted = [
        iteration
        for iteration in found[: -max(retention.keep, 1)]
        if iteration not in retention.also
    ]
    for iteration in deleted:
        shutil.rmtree(iteration_folder(save, iteration), ignore_errors=True)
    return deleted


def read_manifest(folder: str | Path) -> dict[str, dict[str, object]] | None:
    """The manifest's entries by relative path, None for a folder without one. Raises `ConfigError`
    for a malformed manifest.
    """
    path = Path(folder) / MANIFEST
    if not path.exists():
        return None
    try:
        return json.loads(path.read_text())["files"]
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} is damaged ({error}). Resume from an earlier checkpoint with --ckpt-step."
        ) from error


def damaged_files(
    folder: str | Path, manifest: Mapping[str, Mapping[str, object]], names: Sequence[str]
) -> list[str]:
    """One sentence per file of `names` that is missing, cut, or differs from its hash."""
    problems = []
    for name in names:
        path, expected = Path(folder) / name, manifest[name]
        if not path.is_file():
            problems.append(f"{path} is missing.")
        elif path.stat().st_size != expected["size"]:
            problems.append(
                f"{path} has {path.stat().st_size} bytes instead of {expected['size']}."
            )
        elif hash_files(folder, [name])[name]["blake2b"] != expected["blake2b"]:
            problems.append(f"{path} has been changed: its hash differs from the manifest's.")
    return problems


def _listed(save: Path) -> str:
    found = published_iterations(save) if save.is_dir() else []
    return ", ".join(str(iteration) for iteration in found) or "none"
