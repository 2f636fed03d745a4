"""Where a command may write what it makes from recordings and other data that it reads."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from slime.exceptions import ConfigError
from slime.recording import manifest
from slime.recording.reader import is_recording

PAGES = (".html", ".htm", ".xml")


def require_free(option: str, path: Path, *, read: Iterable[Path] = ()) -> None:
    """`ConfigError` where `path` lies in a recording, is one of the inputs `read`, or would replace
    a file below one of them that is no page of ours.
    """
    target = path.resolve()
    for folder in (target, *target.parents):
        if is_recording(folder) or _is_recorded_rollout(folder):
            raise ConfigError(
                f"{option} {path} lies in the recording {folder}. A recording is only read; give "
                "another place."
            )
    for one in map(Path.resolve, read):
        is_inside = one == target or (one in target.parents and target.exists())
        if is_inside and (one == target or target.suffix.lower() not in PAGES):
            raise ConfigError(f"{option} {path} would replace what is read. Give another place.")


def _is_recorded_rollout(folder: Path) -> bool:
    return manifest.rollout_of(folder) is not None and any(
        manifest.manifest_path(folder, writer).is_file() for writer in manifest.WRITERS
    )
