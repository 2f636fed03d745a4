"""Our tables: the samples and train parts of a recording (`--record`), and dumps that were written
as .parquet, which have the same columns.

Token columns go from the file's buffers into arrays; no number of them is a Python object.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slime.exceptions import RolloutDataError
from slime.files.json_values import decode_json
from slime.harness.audit.dumps import row_of_sample, rows_of_fields
from slime.harness.audit.parquet import read_columns, read_lists, schema_of
from slime.harness.audit.shapes import (
    Part,
    ReadOptions,
    Shape,
    is_evaluation_name,
    step_in_name,
)
from slime.harness.audit.table import Row
from slime.harness.audit.values import int_of
from slime.recording import manifest

_SAMPLES = ("index", "status", "tokens", "rest", "kinds")
_PLAIN = ("index", "group_index", "rollout_id", "response_length", "finish_reason", "status")
_TEXTS = ("prompt", "response")
_JSONS = ("label", "reward", "metadata", "weight_versions", "rest", "changes")
_LISTS = ("tokens", "loss_mask", "rollout_log_probs")
_VERDICT = ("valid", "dropped_by")  # of a recording
# Of `rest` and `changes`, what an audit reads; the others stay text.
_KEPT = frozenset(
    (*_PLAIN, *_TEXTS, *_JSONS, *_LISTS, "weight_version_spans", "remove_sample", "valid")
)
_TRAIN = b"slime_train"
_NUMBERS = (
    "dp_rank", "sample_indices", "rollout_ids", "response_lengths", "truncated", "raw_reward",
    "local_raw_reward", "rewards",
)  # fmt: skip
_TOKENS = ("tokens", "loss_masks", "rollout_log_probs", "log_probs", "advantages")


def damaged_files(folder: Path, only: Path | None = None) -> dict[Path, str]:
    """By file of a recorded rollout why it is not as it was written: a manifest that cannot be
    read, and every part of another size or hash than its manifest says; of the parts `only` this
    one is looked at. None in another folder.
    """
    damaged: dict[Path, str] = {}
    if manifest.rollout_of(folder) is None:
        return damaged
    for writer in manifest.WRITERS:
        path = manifest.manifest_path(folder, writer)
        try:
            found = manifest.read_manifest(folder, writer)
        except RolloutDataError as error:
            damaged[path] = str(error).removeprefix(f"{path} ")
            continue
        for part in () if found is None else found.parts.values():
            file = folder / part.file
            if only is not None and file != only:
                continue
            try:
                why = manifest.verify_part(folder, part)
            except OSError as error:
                why = f"cannot be read: {error.strerror}"
            if why is not None:
                damaged[file] = why.removeprefix(f"{file} ")
    return damaged


def _missing_samples(path: Path, options: ReadOptions) -> str | None:
    names = schema_of(path).names
    absent = [name for name in _SAMPLES if name not in names]
    return f"no column {', '.join(absent)} (it has {', '.join(names)[:300]})" if absent else None


def _read_samples(path: Path, options: ReadOptions) -> Iterator[Part]:
    table = read_columns(path, (*_PLAIN, *_TEXTS, *_JSONS, *_VERDICT))
    plain = {name: table[name].to_pylist() for name in table.column_names}
    count = len(table)
    del table
    present = schema_of(path).names
    lists = {name: read_lists(path, name) for name in _LISTS if name in present}
    rows = []
    for i in range(count):
        one: dict[str, Any] = {name: values[i] for name, values in plain.items()}
        for name in _JSONS:
            one[name] = None if one.get(name) is None else decode_json(one[name].encode())
        for name, entries in lists.items():
            one[name] = entries[i]
        for extra in ("rest", "changes"):
            if isinstance(one.get(extra), dict):
                one |= {name: value for name, value in one[extra].items() if name in _KEPT}
        rows.append(_row(one, options))
    yield Part(step_in_name(path) or 0, rows, is_evaluation=is_evaluation_name(path))


def _row(one: dict[str, Any], options: ReadOptions) -> Row:
    row = row_of_sample(one, options)
    # filtered groups were scored, and are in no baseline
    return dataclasses.replace(row, counts=False) if one.get("dropped_by") else row


SAMPLES = Shape(
    "slime-samples",
    "our samples as a table: samples.parquet of a recording, or a rollout dump ending in .parquet",
    (".parquet",),
    _missing_samples,
    _read_samples,
)


def _missing_train(path: Path, options: ReadOptions) -> str | None:
    return None if _TRAIN in (schema_of(path).metadata or {}) else "no metadata slime_train"


def _read_train(path: Path, options: ReadOptions) -> Iterator[Part]:
    table = read_columns(path, _NUMBERS)
    if "dp_rank" not in table.column_names:
        raise RolloutDataError("has no column dp_rank")
    columns: dict[str, Any] = {name: table[name].to_pylist() for name in table.column_names}
    present = schema_of(path).names
    columns |= {name: read_lists(path, name) for name in _TOKENS if name in present}
    columns.setdefault("local_raw_reward", columns.get("raw_reward"))
    trained = [i for i, rank in enumerate(columns["dp_rank"]) if rank is not None and rank >= 0]
    fields = {
        name: [values[i] for i in trained] for name, values in columns.items() if values is not None
    }
    step = step_in_name(path)
    header = json.loads((table.schema.metadata or {}).get(_TRAIN, b"{}"))
    if isinstance(header, dict) and int_of(header.get("rollout_id")) is not None:
        step = int(header["rollout_id"])
    rows = rows_of_fields(fields, fields["dp_rank"])
    yield Part(step or 0, rows, role="train")


TRAIN = Shape(
    "slime-train-table",
    "what training computed as a table: train.parquet of a recording, or a train dump ending in "
    ".parquet",
    (".parquet",),
    _missing_train,
    _read_train,
    role="train",
)
