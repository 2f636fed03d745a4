"""One side of a comparison: the parts of a rollout, from a recording or from single files."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from slime.exceptions import RolloutDataError
from slime.files import exact_json, tables
from slime.files.jsonl import read_jsonl
from slime.files.pickles import pickle_problem
from slime.files.rollout_dump import FORMAT as ROLLOUT_FORMAT
from slime.files.rollout_dump import read_rollout_dump
from slime.files.train_dump import is_train_dump, read_train_dump
from slime.files.train_table import HEADER
from slime.harness.diff.columns import (
    Columns,
    columns_of_file,
    columns_of_samples,
    columns_of_train_dump,
)
from slime.recording import manifest
from slime.recording.manifest import Part
from slime.recording.reader import LARGEST_JSON, RecordedRollout

TABLES = ("samples", "columns", "schedule", "train")
RUN = "run"  # the part of a run record
CONFIG = "config"  # a run's config.yaml


class Side:
    """The parts of one rollout by name. `folder` is the recorded tokenizer's, None without one."""

    def __init__(
        self,
        where: str,
        files: Mapping[str, Path],
        *,
        parts: Mapping[str, Part] | None = None,
        facts: Mapping[str, Any] | None = None,
        tokenizer: Path | None = None,
    ) -> None:
        self.where, self.files, self.tokenizer = where, dict(files), tokenizer
        self.parts = dict(parts or {})
        self.facts = dict(facts or {})
        self._columns: dict[str, Columns] = {}
        self._objects: dict[str, dict[str, Any]] = {}
        self._verified: set[str] = set()  # parts

    @staticmethod
    def of_rollout(rollout: RecordedRollout) -> Side:
        """The listed parts of a recorded rollout. `RolloutDataError` where one is no file or has
        another size than its manifest says, and where a manifest is that of another rollout.
        """
        recording = rollout.recording
        if problems := rollout.problems(hashes=False):
            raise RolloutDataError(" ".join(problems))
        facts: dict[str, Any] = {}
        for one in rollout.manifests.values():
            facts.update(one.facts)
        facts["unfinished"] = sorted(
            writer for writer, one in rollout.manifests.items() if not one.facts.get("complete")
        )
        return Side(
            str(rollout.folder),
            {name: rollout.path(name) for name in rollout.parts},
            parts=rollout.parts,
            facts=facts,
            tokenizer=None if recording is None else recording.tokenizer_folder,
        )

    def __contains__(self, name: str) -> bool:
        return name in self.files

    def columns(self, name: str) -> Columns:
        """A table of samples."""
        if name not in self._columns:
            self._columns[name] = self._open(name)
        return self._columns[name]

    def _open(self, name: str) -> Columns:
        path = self.files[name]
        self.verify(name)  # before it is parsed
        if name == "samples" and not _is_table(path):
            return columns_of_samples(str(path), read_rollout_dump(path))
        if name == "train" and not _is_table(path):
            return columns_of_train_dump(read_train_dump(path))
        found = columns_of_file(
            path, f"{name} part of a recording", is_verified=name in self._verified
        )
        needed = {"samples": "tokens", "schedule": "dp_rank", "columns": "raw_row"}.get(name)
        if needed is not None:
            found.require(needed)
        _require_counted_rows(name, found)
        if name == "train" and not found.header:
            raise RolloutDataError(f"{path} is no train part of a recording: it has no header.")
        return found

    def verify(self, name: str) -> None:
        """`RolloutDataError` where the part is not as its manifest says."""
        part = self.parts.get(name)
        if part is not None and name not in self._verified:
            problem = manifest.verify_part(self.files[name].parent, part)
            if problem is not None:
                raise RolloutDataError(problem)
            self._verified.add(name)

    def check_hash(self, name: str, digest: str) -> None:
        """`verify`, for who has hashed the part while reading it."""
        part = self.parts.get(name)
        if part is not None and part.blake2b != digest:
            raise RolloutDataError(f"{self.files[name]} is damaged: its hash is {digest}.")

    def json(self, name: str) -> dict[str, Any]:
        """The JSON object of a part."""
        if name not in self._objects:
            self.verify(name)
            self._objects[name] = manifest.read_json(self.files[name], limit=LARGEST_JSON)
        return self._objects[name]

    def records(self, name: str) -> list[dict[str, Any]]:
        """The records of a part of JSON lines."""
        self.verify(name)
        records, num_unreadable = read_jsonl(self.files[name])
        if num_unreadable:
            raise RolloutDataError(
                f"{self.files[name]} is damaged: {num_unreadable} of its lines are no JSON objects."
            )
        return records

    @functools.cached_property
    def layout(self) -> dict[str, Any]:
        """What is known of the ranks that trained: how many of which kind."""
        known: dict[str, Any] = {}
        if "train" in self:
            header = self.columns("train").header
            shards = header.get("dp_shards")
            known["dp_size"] = len(shards) if isinstance(shards, list) else None
            known["cp_size"] = header.get("cp_size")
        if "rollout" in self:
            parallel = self.json("rollout").get("parallel")
            known.update(parallel if isinstance(parallel, dict) else {})
        known["ranks"] = self.facts.get("world_size")
        return {name: value for name, value in known.items() if value is not None}


def _require_counted_rows(part: str, columns: Columns) -> None:
    """`RolloutDataError` where the column by which a part is joined does not count its rows."""
    name = "raw_row" if part == "samples" else "position"
    numbers = columns.numbers(name)
    if numbers is not None and not np.array_equal(numbers, np.arange(columns.num_rows)):
        raise RolloutDataError(
            f"{columns.where}: {name} must count its rows from 0; other parts are joined by it."
        )


def _is_table(path: Path) -> bool:
    try:
        return tables.is_table(path)
    except OSError as error:
        raise RolloutDataError(f"{path} cannot be read: {error}") from error


# --- what a single file is ------------------------------------------------------------------------


def part_of_file(path: Path) -> str:
    """Which part, or dump, a file is, by what it holds. `RolloutDataError` for any other file."""
    if path.is_symlink():
        raise RolloutDataError(f"{path} is a link; name the file that it leads to.")
    if not path.is_file():
        raise RolloutDataError(f"There is no dump at {path}.")
    if _is_table(path):
        return _kind_of_table(path)
    if is_train_dump(path):
        return "train"
    if path.suffix in (".yaml", ".yml"):
        return CONFIG
    if problem := pickle_problem(path):
        raise RolloutDataError(problem)
    with open(path, "rb") as file:
        line = file.readline(1 << 28)
    try:
        first = orjson.loads(line)
    except orjson.JSONDecodeError:
        first = _whole_object(path)
    kind = _kind_of_object(first)
    if kind is None:
        raise RolloutDataError(_not_compared(path, first, line))
    return kind


def _not_compared(path: Path, value: Any, line: bytes) -> str:
    """Why a file is none that can be compared, and what to compare."""
    if isinstance(value, dict) and value.get("format") == manifest.FORMAT and "parts" in value:
        return (
            f"{path} is a manifest: it lists the parts of a rollout. Compare the rollouts, whose "
            "folders it lies in, or single parts."
        )
    known = ", ".join(file for file, _ in manifest.PARTS.values())
    return (
        f"{path} is no dump and no part of a recording: it begins with {line[:60]!r}. Two files are "
        f"compared where they are parts ({known}), run records (run_0000.json), config.yaml of two "
        "runs, or dumps."
    )


def _whole_object(path: Path) -> Any:
    """A JSON object of several lines, as run records are."""
    if path.stat().st_size > LARGEST_JSON:
        raise RolloutDataError(f"{path} has more than {LARGEST_JSON} bytes, so it is none of ours.")
    try:
        return exact_json.loads(path.read_bytes())
    except ValueError as error:
        raise RolloutDataError(f"{path}, line 1: not JSON ({error}).") from None


def _kind_of_table(path: Path) -> str:
    file = tables.TableFile(path)
    form = file.metadata.get("slime", "")
    if HEADER in file.metadata:
        return "train"
    if form.startswith("slime-samples"):
        return "samples"
    if form.startswith("slime-fields"):
        return "columns"
    if "dp_rank" in file and "position" in file:
        return "schedule"
    raise RolloutDataError(
        f"{path} is a table, but no dump and no part of a recording; its columns are "
        f"{', '.join(file.schema.names[:20])}."
    )


def _kind_of_object(value: Any) -> str | None:
    if not isinstance(value, dict):
        return None
    if value.get("format") == ROLLOUT_FORMAT:
        return "samples"
    if value.get("format") == manifest.FORMAT and "options" in value:
        return RUN
    for kind, keys in (
        ("steps", ("step_key", "metrics")),
        ("replies", ("url", "reply")),
        ("weights", ("before", "after")),
        ("gate", ("state", "statistics")),
        ("rollout", ("metrics",)),
    ):
        if all(key in value for key in keys):
            return kind
    return None


def side_of_file(path: Path) -> Side:
    """A side that has one part alone. A part that lies in its recording is held against the
    manifest there. `RolloutDataError` where it is not as that says.
    """
    name = part_of_file(path)
    side = Side(str(path), {name: path}, parts=_listed_at(path, name))
    side.verify(name)
    return side


def _listed_at(path: Path, name: str) -> dict[str, Part]:
    """The part as the manifest in its folder lists it; nothing where there is none."""
    if name not in manifest.PARTS or path.name != manifest.PARTS[name][0]:
        return {}
    listed = manifest.read_manifest(path.parent, manifest.PARTS[name][1])
    return {} if listed is None or name not in listed.parts else {name: listed.parts[name]}
