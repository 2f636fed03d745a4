"""A small recording of a real run, and copies of it with one value edited."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
from support import small_run

from slime.files import atomic, tables
from slime.recording import manifest

ROLLOUT = 1  # the rollout that is edited


def record_small_run(root: Path) -> Path:
    """The recording of two rollouts and an evaluation, of a run in one process; beside it its data,
    its run folder, its checkpoints in save/ and its rollout dumps in dumps/.
    """
    from examples.addition.prepare import prepare

    data = Path(prepare(root / "data"))
    rows = (data / "eval.jsonl").read_text().splitlines()[:8]
    (data / "few.jsonl").write_text("\n".join(rows) + "\n")
    words = ["--local", "--record", root / "recording", "--num-rollout", 2, "--eval-interval", 5]
    words += ["--eval-prompt-data", "few", data / "few.jsonl", "--n-samples-per-eval-prompt", 1]
    words += ["--record-weights", "--save", root / "save", "--save-interval", 1]
    words += ["--save-debug-rollout-data", root / "dumps" / "{rollout_id}.parquet"]
    small_run.run(data, root / "run", *words)
    return root / "recording"


def copy_of(recording: Path, target: Path) -> Path:
    """A copy to edit."""
    shutil.copytree(recording, target)
    return target


def replace_part(
    recording: Path, name: str, write: Callable[[Path], None], *, rollout_id: int = ROLLOUT
) -> None:
    """Writes a part anew and lists it as the writer does."""
    folder = manifest.rollout_folder(recording, rollout_id)
    file, writer = manifest.PARTS[name]
    write(folder / file)
    found = manifest.read_manifest(folder, writer)
    assert found is not None
    path = folder / file
    found.parts[name] = dataclasses.replace(
        found.parts[name],
        num_bytes=path.stat().st_size,
        blake2b=manifest.file_hash(path),
    )
    manifest.write_manifest(folder, found)


def edit_column(
    recording: Path,
    part: str,
    column: str,
    row: int,
    change: Callable[[Any], Any],
    *,
    rollout_id: int = ROLLOUT,
) -> None:
    """Changes one entry of one column; an entry of a list column is an array."""
    path = manifest.rollout_folder(recording, rollout_id) / manifest.PARTS[part][0]
    table = tables.read_table(path)
    entries = table[column].to_pylist()
    value = entries[row]
    entries[row] = change(np.array(value) if isinstance(value, list) else value)
    field = table.schema.field(column)
    place = table.schema.get_field_index(column)
    plain = [one.tolist() if isinstance(one, np.ndarray) else one for one in entries]
    table = table.set_column(place, field, pyarrow.array(plain, field.type))
    replace_part(recording, part, lambda file: write_table(file, table), rollout_id=rollout_id)


def write_table(path: Path, table: pyarrow.Table) -> None:
    """The table in the place of the part."""
    tables.write_table(path, table)


def edit_json(
    recording: Path, part: str, change: Callable[[Any], Any], *, rollout_id: int = ROLLOUT
) -> None:
    """Changes the value of a JSON part, or the list of the values of its lines."""
    path = manifest.rollout_folder(recording, rollout_id) / manifest.PARTS[part][0]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    value = lines if path.suffix == ".jsonl" else lines[0]
    change(value)
    text = "".join(
        json.dumps(one, separators=(",", ":")) + "\n"
        for one in (value if path.suffix == ".jsonl" else [value])
    )
    replace_part(recording, part, lambda file: atomic.write_text(file, text), rollout_id=rollout_id)


def edit_run(recording: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Changes the run record."""
    path = manifest.run_path(recording, 0)
    record = json.loads(path.read_text())
    change(record)
    atomic.write_text(path, json.dumps(record))


def resume(
    recording: Path, rollouts: Iterable[int], change: Callable[[dict[str, Any]], None]
) -> None:
    """A further start of the run, with a run record that `change` edits, that made the rollouts."""
    numbers = manifest.run_numbers(recording)
    record = json.loads(manifest.run_path(recording, numbers[-1]).read_text())
    change(record)
    atomic.write_text(manifest.run_path(recording, numbers[-1] + 1), json.dumps(record))
    for rollout_id in rollouts:
        folder = manifest.rollout_folder(recording, rollout_id)
        for writer in manifest.WRITERS:
            found = manifest.read_manifest(folder, writer)
            if found is not None:
                found.run = numbers[-1] + 1
                manifest.write_manifest(folder, found)
