"""The files of a recording and the manifests that list them.

    DIR/run_0000.json              options, versions and seeds of each start of the run
    DIR/tokenizer/                 what the gate's text checks read
    DIR/rollout_000007/            one rollout
        manifest.rollout.json      lists what the rollout manager wrote
        manifest.train.json        lists what the policy's training ranks wrote
        manifest.critic.json       lists what the critic's ranks wrote
        samples.parquet ...        the parts
        weights/                   with --record-weights, the checkpoint before it trained
    DIR/eval_000008/               one evaluation, before rollout 8

A part is listed once it is whole, with its size and hash; so whatever a manifest lists can be
verified, also after a kill at any moment.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

from slime.exceptions import RolloutDataError
from slime.files import atomic, exact_json

FORMAT = "slime-recording-1"
ROLLOUT, TRAIN, CRITIC = "rollout", "train", "critic"  # who writes
WRITERS = (ROLLOUT, TRAIN, CRITIC)
# by part: the file, who writes it
PARTS = {
    "replies": ("replies.jsonl", ROLLOUT),
    "samples": ("samples.parquet", ROLLOUT),
    "gate": ("gate.json", ROLLOUT),
    "columns": ("columns.parquet", ROLLOUT),
    "schedule": ("schedule.parquet", ROLLOUT),
    "rollout": ("rollout.json", ROLLOUT),
    "train": ("train.parquet", TRAIN),
    "steps": ("steps.jsonl", TRAIN),
    "weights": ("weights.json", TRAIN),
    "critic_steps": ("critic_steps.jsonl", CRITIC),
}
TRAINED_PARTS = tuple(name for name, (_, writer) in PARTS.items() if writer != ROLLOUT)
SCHEMAS = dict.fromkeys(PARTS, 1)
WEIGHTS_FOLDER, CRITIC_WEIGHTS_FOLDER = "weights", "critic_weights"
TRASH = ".removed."  # begins the name of a rollout that is being removed
TOKENIZER_FOLDER = "tokenizer"
HASH_BYTES = 16
_HASH = re.compile(r"[0-9a-f]{32}")
_FOLDERS = {
    False: re.compile(r"rollout_([0-9]{6,12})"),
    True: re.compile(r"eval_([0-9]{6,12})"),
}
_RUN = re.compile(r"run_([0-9]{4,8})\.json")
_LARGEST_MANIFEST = 1 << 20  # bytes


@dataclasses.dataclass(frozen=True)
class Part:
    """One file as its manifest lists it. `num_rows`: rows of a table, lines of JSON lines."""

    name: str
    file: str
    num_bytes: int
    blake2b: str
    schema: int
    num_rows: int | None = None


@dataclasses.dataclass
class Manifest:
    """What one writer wrote of one rollout. `facts`: small values, such as how many ranks sent
    their share.
    """

    rollout_id: int
    writer: str
    run: int
    evaluation: bool = False
    parts: dict[str, Part] = dataclasses.field(default_factory=dict)
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)

    def to_json(self) -> bytes:
        record = {"format": FORMAT, **dataclasses.asdict(self)}
        return orjson.dumps(record, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def rollout_folder(root: Path, rollout_id: int, *, evaluation: bool = False) -> Path:
    """The folder of one rollout, or of one evaluation."""
    return root / f"{'eval' if evaluation else 'rollout'}_{rollout_id:06d}"


def manifest_path(folder: Path, writer: str) -> Path:
    return folder / f"manifest.{writer}.json"


def rollout_of(folder: Path) -> tuple[int, bool] | None:
    """(rollout, whether it is an evaluation) by the folder's name; None for another name."""
    for evaluation, pattern in _FOLDERS.items():
        if match := pattern.fullmatch(folder.name):
            return int(match[1]), evaluation
    return None


def recorded_rollouts(root: Path, *, evaluation: bool = False) -> list[int]:
    """The rollouts (evaluations) below `root` that have a manifest, ascending."""
    found = []
    for path in _entries(root):
        match = _FOLDERS[evaluation].fullmatch(path.name)
        if (
            match
            and path.is_dir()
            and not path.is_symlink()
            and any(manifest_path(path, w).is_file() for w in WRITERS)
        ):
            found.append(int(match[1]))
    return sorted(found)


def run_numbers(root: Path) -> list[int]:
    """The numbers of the runs whose options are recorded, ascending."""
    return sorted(int(match[1]) for path in _entries(root) if (match := _RUN.fullmatch(path.name)))


def run_path(root: Path, number: int) -> Path:
    return root / f"run_{number:04d}.json"


def _entries(root: Path) -> Iterator[Path]:
    return root.iterdir() if root.is_dir() else iter(())


def file_hash(path: Path) -> str:
    """blake2b-128 of the file's bytes, 32 hex digits."""
    digest = hashlib.blake2b(digest_size=HASH_BYTES)
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Replaces the writer's manifest. Raises `OSError` where the disk refuses it."""
    atomic.write_bytes(manifest_path(folder, manifest.writer), manifest.to_json())


def read_json(path: Path, *, limit: int = _LARGEST_MANIFEST) -> dict[str, Any]:
    """The JSON object in a file of at most `limit` bytes. `RolloutDataError` naming the file where
    there is none.
    """
    if path.is_symlink():
        raise RolloutDataError(f"{path} is a link; a recording holds files.")
    if os.path.lexists(path) and not path.is_file():
        raise RolloutDataError(f"{path} is no file.")
    try:
        if path.stat().st_size > limit:
            raise RolloutDataError(f"{path} has more than {limit} bytes, so it is none of ours.")
        content = exact_json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise RolloutDataError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise RolloutDataError(f"{path} holds no JSON object.")
    return content


def _manifest_of(content: Mapping[str, Any], writer: str) -> Manifest:
    """ValueError where a value is not of its kind."""
    number = _value(content, "rollout_id", int)
    run = _value(content, "run", int)
    evaluation = _value(content, "evaluation", bool)
    parts = {name: _part_of(name, entry) for name, entry in _value(content, "parts", dict).items()}
    facts = _value(content, "facts", dict)
    return Manifest(number, writer, run, evaluation, parts, dict(facts))


def _part_of(name: str, entry: Any) -> Part:
    if not isinstance(entry, dict) or entry.get("name") != name:
        raise ValueError(f"the part {name!r:.40} is {entry!r:.80}")
    num_rows = None if entry.get("num_rows") is None else _value(entry, "num_rows", int)
    part = Part(
        name,
        _value(entry, "file", str),
        _value(entry, "num_bytes", int),
        _value(entry, "blake2b", str),
        _value(entry, "schema", int),
        num_rows,
    )
    if not _HASH.fullmatch(part.blake2b):
        raise ValueError(f"the hash of the part {name!r} is {part.blake2b!r:.80}")
    return part


def _value(record: Mapping[str, Any], name: str, kind: type) -> Any:
    value = record.get(name)
    if type(value) is not kind or (isinstance(value, int) and value < 0):
        raise ValueError(f"{name} is {value!r:.80}")
    return value


def read_manifest(folder: Path, writer: str) -> Manifest | None:
    """What `writer` lists; None where it has listed nothing. `RolloutDataError` for another format
    or a file name that is not one of ours.
    """
    path = manifest_path(folder, writer)
    if not os.path.lexists(path):
        return None
    content = read_json(path)
    if content.get("format") != FORMAT:
        raise RolloutDataError(
            f"{path} is of the format {content.get('format')!r}; this version reads {FORMAT!r}."
        )
    try:
        manifest = _manifest_of(content, writer)
    except ValueError as error:
        raise RolloutDataError(f"{path} is damaged: {error}.") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise RolloutDataError(f"{path} is damaged: {type(error).__name__}: {error}") from error
    for name, part in manifest.parts.items():
        if name not in PARTS or part.file != PARTS[name][0]:
            raise RolloutDataError(
                f"{path} lists the part {name!r} as {part.file!r}; known are {', '.join(PARTS)}."
            )
        if part.schema != SCHEMAS[name]:
            raise RolloutDataError(
                f"{path}: the part {name!r} has schema {part.schema}; this version reads "
                f"{SCHEMAS[name]}."
            )
    return manifest


def verify_part(folder: Path, part: Part, *, hashes: bool = True) -> str | None:
    """What is wrong with a listed part, in one sentence; None where it is as it was written.
    Without `hashes` its content is not read.
    """
    path = folder / part.file
    if path.is_symlink():
        return f"{path} is a link; a recording holds files."
    if not path.is_file():
        return f"{path} is listed and is no file."
    size = path.stat().st_size
    if size != part.num_bytes:
        return f"{path} has {size} bytes, its manifest says {part.num_bytes}."
    found = file_hash(path) if hashes else part.blake2b
    return None if found == part.blake2b else f"{path} is damaged: its hash is {found}."
