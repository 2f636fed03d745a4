"""Samples that other frameworks wrote, with the columns of ours: what `slime audit` can read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from slime.exceptions import ConfigError, RolloutDataError
from slime.files import tables
from slime.harness.audit.reading import find_sources, read_tables
from slime.harness.audit.shapes import ReadOptions, is_evaluation_name
from slime.harness.audit.table import UNKNOWN, SampleTable, TokenColumn

if TYPE_CHECKING:
    import pyarrow

MOST_FILES = 2000
LARGEST_FILE = 256 << 20  # bytes


def foreign_files(folder: Path) -> list[tuple[int | None, bool, Path]]:
    """(step, whether it is an evaluation, file) of each file of samples below a folder, or of the
    file itself.
    """
    try:
        found = find_sources(folder, ReadOptions())
    except ConfigError:
        return []
    rollouts = [source for source in found.sources if source.shape.role != "train"]
    return [
        (source.step, is_evaluation_name(source.path), source.path)
        for source in (rollouts or found.sources)[:MOST_FILES]
    ]


def foreign_table(path: Path) -> tuple[pyarrow.Table, list[str]]:
    """(the samples of a file as a rollout dump has them, what could not be read). RolloutDataError
    where there are none.
    """
    import pyarrow

    if path.stat().st_size > LARGEST_FILE:
        raise RolloutDataError(
            f"{path} has more than {LARGEST_FILE:,} bytes: slime audit reads it."
        )
    try:
        found = find_sources(path, ReadOptions())
    except ConfigError as error:
        raise RolloutDataError(str(error)) from error
    parts = [_arrow(one) for one in read_tables(found, ReadOptions()) if len(one)]
    notes = [f"{name}: {why}" for name, why in found.unreadable]
    if not parts:
        raise RolloutDataError("; ".join(notes) or f"{path} has no samples.")
    return pyarrow.concat_tables(parts, promote_options="permissive"), notes


def _arrow(step: SampleTable) -> pyarrow.Table:
    import pyarrow

    text, count = pyarrow.large_string(), len(step)

    def whole(values: np.ndarray) -> pyarrow.Array:
        return pyarrow.array(values.astype(np.int64), mask=values == UNKNOWN)

    def jsons(values: Sequence[Any]) -> pyarrow.Array:
        return pyarrow.array(
            [None if one is None else json.dumps(one, default=str) for one in values], text
        )

    rewards = [
        float(value) if has else None
        for value, has in zip(step.reward_N, step.has_reward_N, strict=True)
    ]
    columns: dict[str, Any] = {
        "index": whole(step.index_N),
        "group_index": whole(step.group_N),
        "response_length": whole(step.response_length_N),
        "prompt": pyarrow.array(list(map(_plain, step.prompts)), text),
        "response": pyarrow.array(list(map(_plain, step.responses)), text),
        "status": pyarrow.array([_STATUS.get(int(one)) for one in step.cut_N], text),
        "label": jsons(step.labels),
        "reward": jsons(rewards),
        "metadata": jsons([_parts(step, row) for row in range(count)]),
        "weight_versions": jsons([_versions(step, row) for row in range(count)]),
        "reason": pyarrow.nulls(count, text),
        "detail": pyarrow.array([None if p is None else _plain(p) for p in step.problems], text),
        "normalized": pyarrow.array(step.normalized_N),
    }
    token_columns = {
        "tokens": step.tokens,
        "loss_mask": step.masks,
        "rollout_log_probs": step.rollout_log_probs,
        "trainer_log_probs": step.log_probs,
    }
    for name, column in token_columns.items():
        if column is not None:
            columns[name] = _lists(column)
    return pyarrow.table(columns)


_STATUS = {0: "completed", 1: "truncated"}


def _lists(column: TokenColumn) -> pyarrow.Array:
    lengths = np.asarray(column.lengths, dtype=np.int64)
    return tables.list_column(column.values, lengths, missing=lengths == 0)


def _plain(text: str) -> str:
    """A text that UTF-8 has."""
    return text.encode("utf-8", "replace").decode()


def _parts(step: SampleTable, row: int) -> dict[str, dict[str, float]] | None:
    parts = {name: float(values[row]) for name, values in step.reward_parts.items()}
    known = {name: value for name, value in parts.items() if value == value}
    return {"reward": known} if known else None


def _versions(step: SampleTable, row: int) -> list[str] | None:
    low, high = int(step.version_low_N[row]), int(step.version_high_N[row])
    if low == UNKNOWN:
        return None
    return [str(one) for one in dict.fromkeys((low, high))]
