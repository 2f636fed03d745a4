"""Our tables: the samples and train parts of a recording (`--record`), and dumps that were written
as .parquet, which have the same columns.

Token columns go from the file's buffers into arrays; no number of them is a Python object.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slime.files import tables
from slime.files.json_values import decode_json
from slime.files.train_table import read_train_table
from slime.harness.audit.dumps import row_of_sample, rows_of_train_dump
from slime.harness.audit.parquet import read_columns, schema_of
from slime.harness.audit.shapes import (
    Part,
    ReadOptions,
    Shape,
    is_evaluation_name,
    step_in_name,
)
from slime.harness.audit.table import Row

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


def _missing_samples(path: Path, options: ReadOptions) -> str | None:
    names = schema_of(path).names
    absent = [name for name in _SAMPLES if name not in names]
    return f"no column {', '.join(absent)} (it has {', '.join(names)[:300]})" if absent else None


def _read_samples(path: Path, options: ReadOptions) -> Iterator[Part]:
    table = read_columns(path, (*_PLAIN, *_TEXTS, *_JSONS, *_LISTS, *_VERDICT))
    names = table.column_names
    plain = {
        name: table[name].to_pylist()
        for name in (*_PLAIN, *_TEXTS, *_JSONS, *_VERDICT)
        if name in names
    }
    lists = {name: tables.entries_of(table[name]) for name in _LISTS if name in names}
    missing = {name: tables.lists_of(table[name])[2].tolist() for name in lists}
    rows = []
    for i in range(len(table)):
        one: dict[str, Any] = {name: values[i] for name, values in plain.items()}
        for name in _JSONS:
            one[name] = None if one.get(name) is None else decode_json(one[name].encode())
        for name, entries in lists.items():
            one[name] = None if missing[name][i] else entries[i]
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
    read_columns(path)  # within bounds, or not at all
    dump = read_train_table(path)
    yield Part(int(dump.rollout_id), rows_of_train_dump(dump), role="train")


TRAIN = Shape(
    "slime-train-table",
    "what training computed as a table: train.parquet of a recording, or a train dump ending in "
    ".parquet",
    (".parquet",),
    _missing_train,
    _read_train,
    role="train",
)
