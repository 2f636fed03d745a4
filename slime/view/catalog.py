"""What lies below the given folders: runs, recordings, and files that an audit may read. Nothing
outside of these folders is ever opened.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from slime.exceptions import ConfigError, RolloutDataError
from slime.recording import manifest
from slime.recording.reader import is_recording
from slime.view.foreign import foreign_files

RUN, RECORDING, FILES = "run", "recording", "files"
RUN_FILES = ("metrics.jsonl", "progress.jsonl", "gate.jsonl", "config.yaml")
# of a run, what may be a link to another disk
LINKED = (
    *RUN_FILES, "gate", "dumps", "rollout_data", "train_data", "dumps/rollout_data",
    "dumps/train_data", "trace", "logs", "logs/driver.log", "logs/local.log", "tokenizer", "tokenizer/tokenizer.json",
)  # fmt: skip
DEPTH = 5  # folders below a given one
MOST_ENTRIES = 2000
MOST_FOLDERS = 20_000
LARGEST_CONFIG = 1 << 22  # bytes
MAX_AGE_S = 2.0
SETTLED_S = 60.0  # a recording that has not changed for so long is looked at as seldom
_SNAPSHOT = re.compile(r"raw_(\d{6,12})\.parquet")
_DUMP = re.compile(r"(eval_)?(\d{1,12})\.(?:parquet|jsonl)")
_SKIPPED = frozenset(("gate", "logs", "dumps", "trace", "tokenizer", "weights", "wandb", ".git"))
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclasses.dataclass(frozen=True)
class Entry:
    """A run, a recording, or a folder of other files. `slug` names it in addresses, `name` on pages.
    `recording`: the recorded rollouts, of a run too, None where there are none. `notes`: what of it
    is not shown, and why.
    """

    slug: str
    name: str
    path: Path
    kind: str
    recording: Path | None = None
    notes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class RolloutRef:
    """Samples of one rollout or evaluation. kind: "recorded", "snapshot" (of the gate), "dump", or
    "foreign": a file of another framework, or of another shape.
    """

    key: str
    number: int
    evaluation: bool
    kind: str
    path: Path

    @property
    def title(self) -> str:
        if self.kind == "foreign":
            return f"{self.path.name}"
        return f"{'evaluation' if self.evaluation else 'rollout'} {self.number}"


class Catalog:
    """The entries below some folders, looked up anew when they are older than two seconds."""

    def __init__(self, roots: Sequence[Path]) -> None:
        """ConfigError for a root that is not there, or is a part of a recording."""
        for root in roots:
            if not root.exists():
                raise ConfigError(f"There is no {root}. Give a run folder, or one above some runs.")
            if manifest.rollout_of(root) is not None and is_recording(root.parent):
                raise ConfigError(f"{root} is one rollout; give its recording: {root.parent}")
        self.roots = tuple(dict.fromkeys(root.resolve() for root in roots))
        self._lock = threading.Lock()
        self._entries: dict[str, Entry] = {}
        self._configs: dict[Path, tuple[tuple[int, int], Mapping[str, Any]]] = {}
        self._rollouts: dict[Entry, tuple[float, int, list[RolloutRef]]] = {}
        self._looked_at = float("-inf")
        self.left_out: list[str] = []  # what is not shown, and why

    def entries(self) -> list[Entry]:
        """Everything there is, by name."""
        with self._lock:
            if time.monotonic() - self._looked_at > MAX_AGE_S:
                self._entries = {entry.slug: entry for entry in self._look()}
                self._looked_at = time.monotonic()
            return list(self._entries.values())

    def find(self, slug: str) -> Entry | None:
        """The entry of an address; None where there is none."""
        return next((entry for entry in self.entries() if entry.slug == slug), None)

    def contains(self, path: Path) -> bool:
        """Whether the path, wherever its links lead, lies in one of the folders."""
        try:
            real = path.resolve()
        except OSError:
            return False
        return any(real == root or root in real.parents for root in self.roots)

    def rollouts(self, entry: Entry) -> list[RolloutRef]:
        """`rollouts_of`, looked up anew when the recording has changed lately, or after a while."""
        now = time.monotonic()
        changed = 0 if entry.recording is None else entry.recording.stat().st_mtime_ns
        known = self._rollouts.get(entry)
        if known is not None and known[1] == changed:
            is_settled = entry.recording is not None and time.time() - changed / 1e9 > SETTLED_S
            if now - known[0] < (SETTLED_S if is_settled else MAX_AGE_S):
                return known[2]
        found = rollouts_of(entry)
        self._rollouts[entry] = now, changed, found
        return found

    def find_rollout(self, entry: Entry, key: str) -> RolloutRef:
        """The rollout of an address. `RolloutDataError` saying which there are."""
        known = self.rollouts(entry)
        for ref in known:
            if ref.key == key:
                return ref
        listed = f"{known[0].title} to {known[-1].title}" if known else "none"
        raise RolloutDataError(f"{entry.name} has no samples of {key[:40]}; it has {listed}.")

    def config(self, folder: Path) -> Mapping[str, Any]:
        """The options in the folder's config.yaml; {} where it has none that can be read."""
        path = folder / "config.yaml"
        try:
            found = path.stat()
            key = found.st_mtime_ns, found.st_size
            known = self._configs.get(path)
            if known is None or known[0] != key:
                text = path.read_text(encoding="utf-8") if found.st_size < LARGEST_CONFIG else ""
                content = yaml.load(text, Loader=_LOADER)  # noqa: S506 - a safe loader
                known = key, content if isinstance(content, dict) else {}
                self._configs[path] = known
            return known[1]
        except (OSError, ValueError, yaml.YAMLError, RecursionError):
            return {}

    def _look(self) -> Iterator[Entry]:
        found: list[tuple[str, Path, str]] = []
        self.left_out = []
        for root in self.roots:
            own = [(_name(root, path), path, kind) for path, kind in _walk(root)]
            found += [one for one in own if not self._leads_out(*one[:2])]
            if not own:
                found.append((root.name or str(root), root, FILES))
        first = {path: (name, path, kind) for name, path, kind in reversed(found)}
        found = list(reversed(first.values()))[:MOST_ENTRIES]
        claimed: set[Path] = set()
        details: dict[Path, tuple[Path | None, tuple[str, ...]]] = {}
        for _, path, kind in found:
            if kind == RUN:
                details[path] = self._recording_of(path)
                if details[path][0] not in (None, path):
                    claimed.add(details[path][0])  # type: ignore[arg-type]
        taken: set[str] = set()
        for name, path, kind in sorted(found):
            if path in claimed:
                continue
            recording, notes = details.get(path, (path if kind == RECORDING else None, ()))
            slug = _slug(name, path, taken)
            taken.add(slug)
            yield Entry(slug, name, path, kind, recording, notes)

    def _leads_out(self, name: str, folder: Path) -> bool:
        """Whether something of a run is a link to what was not given; notes it."""
        for own in LINKED:
            path = folder / own
            if path.is_symlink() and not self.contains(path):
                self.left_out.append(
                    f"{name} is not shown: its {own} is a link to {os.readlink(path)}. Give the folder "
                    "that it leads to as well."
                )
                return True
        return False

    def _recording_of(self, run: Path) -> tuple[Path | None, tuple[str, ...]]:
        """(the recording of a run, why none is shown)."""
        named = self.config(run).get("record")
        if isinstance(named, str) and named:
            path = (run / named).resolve() if not os.path.isabs(named) else Path(named)
            candidates = [path, Path(named).resolve()]
            for one in candidates:
                if self.contains(one) and is_recording(one):
                    return one.resolve(), ()
            if not is_recording(run):
                return None, (
                    f"its recording {named} is not in the given folders: slime view {run} {named}",
                )
        return (run, ()) if is_recording(run) else (None, ())


def _walk(root: Path) -> Iterator[tuple[Path, str]]:
    """(folder, kind) of the runs and recordings at and below a folder. Links are not followed."""
    waiting, looked = [(root, 0)], 0
    while waiting and looked < MOST_FOLDERS:
        folder, depth = waiting.pop()
        looked += 1
        try:
            with os.scandir(folder) as listed:
                children = sorted(listed, key=lambda one: one.name)
            names = {one.name for one in children if one.is_file(follow_symlinks=False)}
            folders = [one.name for one in children if one.is_dir(follow_symlinks=False)]
        except OSError:
            continue
        is_run = "metrics.jsonl" in names or len(names.intersection(RUN_FILES)) > 1
        if is_run:
            yield folder, RUN
        elif is_recording(folder):
            yield folder, RECORDING
        if depth < DEPTH:
            waiting += [
                (folder / name, depth + 1)
                for name in folders
                if name not in _SKIPPED and manifest.rollout_of(Path(name)) is None
            ]


def _name(root: Path, path: Path) -> str:
    inside = path.relative_to(root).as_posix()
    return (root.name or str(root)) if inside == "." else f"{root.name}/{inside}"


def _slug(name: str, path: Path, taken: set[str]) -> str:
    """The name as one word of an address, which stays the same while the folder does."""
    wanted = name.replace("/", "~")
    plain = re.sub(r"[^A-Za-z0-9._~-]+", "-", wanted).strip("-.") or "run"
    if plain == wanted and plain not in taken:
        return plain
    return f"{plain}-{hashlib.blake2s(os.fsencode(path), digest_size=4).hexdigest()}"


def rollouts_of(entry: Entry) -> list[RolloutRef]:
    """Every rollout and evaluation with samples, in the order in which they were made: what was
    recorded, of the others the gate's snapshots and the dumps.
    """
    found: dict[str, RolloutRef] = {}
    if entry.kind == FILES:
        return _foreign(entry)
    for path in _dumps(entry.path):
        match = _DUMP.fullmatch(path.name)
        if match:
            _add(found, RolloutRef("", int(match[2]), bool(match[1]), "dump", path))
    for path in _files(entry.path / "gate"):
        if match := _SNAPSHOT.fullmatch(path.name):
            _add(found, RolloutRef("", int(match[1]), False, "snapshot", path))
    if entry.recording is not None:
        for evaluation in (False, True):
            for number in manifest.recorded_rollouts(entry.recording, evaluation=evaluation):
                folder = manifest.rollout_folder(entry.recording, number, evaluation=evaluation)
                _add(found, RolloutRef("", number, evaluation, "recorded", folder))
    return sorted(found.values(), key=lambda one: (one.number, not one.evaluation))


def _foreign(entry: Entry) -> list[RolloutRef]:
    """The files of samples in a folder without a run, by their step where the name has one."""
    files = foreign_files(entry.path)
    counts = collections.Counter((step, evaluation) for step, evaluation, _ in files)
    found = []
    for place, (step, evaluation, path) in enumerate(files):
        if step is not None and counts[step, evaluation] == 1:
            key = f"{'eval' if evaluation else 'rollout'}-{step}"
        else:
            key = f"file-{place}"
        number = place if step is None else step
        found.append(RolloutRef(key, number, evaluation, "foreign", path))
    return sorted(found, key=lambda one: (one.number, not one.evaluation, one.path))


def _add(found: dict[str, RolloutRef], ref: RolloutRef) -> None:
    key = f"{'eval' if ref.evaluation else 'rollout'}-{ref.number}"
    found[key] = dataclasses.replace(ref, key=key)


def _dumps(folder: Path) -> list[Path]:
    return [*_files(folder / "dumps" / "rollout_data"), *_files(folder / "rollout_data")]


def _files(folder: Path) -> list[Path]:
    try:
        return [one for one in folder.iterdir() if one.is_file() and not one.is_symlink()]
    except OSError:
        return []
