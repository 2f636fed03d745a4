"""TRL's completions/completions_<step>.parquet: step, prompt, completion, a column per reward
function, advantage.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from slime.exceptions import ConfigError, RolloutDataError
from slime.harness.audit.shapes import (
    Part,
    ReadOptions,
    Shape,
    is_evaluation_name,
    open_regular,
    step_in_name,
)
from slime.harness.audit.table import Row
from slime.harness.audit.values import int_of, is_number, number_of, text_of

_NEEDED = ("prompt", "completion")
_KNOWN = (*_NEEDED, "step", "advantage")
MAX_ROWS = 5_000_000
MAX_TEXT_BYTES = 4 << 30  # of a file's texts, decoded
ROWS_AT_ONCE = 1024


def _pyarrow() -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError(
            "reading .parquet needs pyarrow: pip install 'slime-rl[data]'."
        ) from error
    return pyarrow


def _missing(path: Path, options: ReadOptions) -> str | None:
    pyarrow = _pyarrow()
    with open_regular(path) as file:
        names = pyarrow.parquet.ParquetFile(file).schema_arrow.names
    absent = [name for name in _NEEDED if name not in names]
    return f"no column {', '.join(absent)} (it has {', '.join(names)[:300]})" if absent else None


def _read(path: Path, options: ReadOptions) -> Iterator[Part]:
    pyarrow = _pyarrow()
    steps: dict[int, list[Row]] = {}
    size = 0
    with open_regular(path) as file:
        parquet = pyarrow.parquet.ParquetFile(file)
        if parquet.metadata.num_rows > MAX_ROWS:
            raise RolloutDataError(f"{parquet.metadata.num_rows} rows, at most {MAX_ROWS} are read")
        for batch in parquet.iter_batches(batch_size=ROWS_AT_ONCE):
            size += batch.nbytes  # a small file may decode to any size
            if size > MAX_TEXT_BYTES:
                raise RolloutDataError(f"its rows decode to more than {MAX_TEXT_BYTES >> 30} GiB")
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
    known = [value for value in parts.values() if not np.isnan(value)]
    reward = chosen if chosen is not None else sum(known) if known else float("nan")
    advantage = one.get("advantage")
    return Row(
        prompt=text_of(one.get("prompt")),
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
