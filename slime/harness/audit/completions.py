"""TRL's completions/completions_<step>.parquet: step, prompt, completion, a column per reward
function, advantage.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from slime.harness.audit.parquet import read_columns, schema_of
from slime.harness.audit.shapes import (
    Part,
    ReadOptions,
    Shape,
    is_evaluation_name,
    step_in_name,
)
from slime.harness.audit.table import Row
from slime.harness.audit.values import int_of, is_number, last_message_of, number_of, text_of

_NEEDED = ("prompt", "completion")
_KNOWN = (*_NEEDED, "step", "advantage")


def _missing(path: Path, options: ReadOptions) -> str | None:
    names = schema_of(path).names
    absent = [name for name in _NEEDED if name not in names]
    return f"no column {', '.join(absent)} (it has {', '.join(names)[:300]})" if absent else None


def _read(path: Path, options: ReadOptions) -> Iterator[Part]:
    steps: dict[int, list[Row]] = {}
    for batch in read_columns(path).to_batches():
        columns = {name: batch.column(name).to_pylist() for name in batch.schema.names}
        for i in range(batch.num_rows):
            one = {name: values[i] for name, values in columns.items()}
            step = int_of(one.get("step"))
            step = step if step is not None else step_in_name(path) or 0
            rows = steps.setdefault(step, [])
            rows.append(_row(one, len(rows), options))
    for step in sorted(steps):
        yield Part(step, steps[step], is_evaluation=is_evaluation_name(path))


def _row(one: dict[str, Any], index: int, options: ReadOptions) -> Row:
    parts = {
        name[:80]: number_of(value)
        for name, value in one.items()
        if name not in _KNOWN and is_number(value)
    }
    # a reward function that has no opinion of a sample logs None or NaN for it
    chosen = parts.get(options.reward_key) if options.reward_key else None
    known = [value for value in parts.values() if not math.isnan(value)]
    reward = chosen if chosen is not None else sum(known) if known else math.nan
    advantage = one.get("advantage")
    return Row(
        prompt=text_of(one.get("prompt")),
        asked=last_message_of(one.get("prompt")),
        response=text_of(one.get("completion")),
        index=index,
        reward=reward,
        has_reward=bool(parts),
        reward_parts=parts if len(parts) > 1 else {},
        advantage=np.array([number_of(advantage)]) if is_number(advantage) else None,
    )


TRL = Shape(
    "trl",
    "TRL's completions_<step>.parquet: columns prompt, completion (and step, advantage, one per "
    "reward function)",
    (".parquet",),
    _missing,
    _read,
)
