"""Judged samples and their places as tables: what raw snapshots and recordings hold.

`verdict_table` has one row per sample that the gate was given, then one per sample that the rollout
dropped before; `schedule_table` one row per row of the train data, with who trains it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from slime.data.reasons import REASON_OF_VALUE
from slime.data.sample import Sample
from slime.data.split import SplitPlan
from slime.files.json_values import encode_json
from slime.files.sample_table import sample_table, samples_of
from slime.gate.before_rewards import ENGINE_TEXT, engine_text_of
from slime.gate.config import Verdict

if TYPE_CHECKING:
    import pyarrow


def verdict_table(
    samples: Sequence[Sample],
    verdicts: Sequence[Verdict],
    dropped: Sequence[tuple[str, Sample]] = (),
    *,
    changes: Sequence[Mapping[str, Any]] | None = None,
) -> pyarrow.Table:
    """The samples that the gate was given, then those that the rollout dropped before, each with
    its verdict. `changes`: per sample of the batch, the fields that the gate changed.

    raw_row numbers the rows; valid, reason, detail, dropped and keep_mask (JSON) are the verdict;
    dropped_by is null for the batch; engine_text is there where the response is not the engine's own text.
    """
    import pyarrow

    all_verdicts = [*verdicts, *(_verdict_on(one) for _, one in dropped)]
    rows = [*samples, *(one for _, one in dropped)]
    changed = [{}] * len(samples) if changes is None else changes
    texts = [engine_text_of(one) for one in rows]
    string = pyarrow.large_string()
    own = {
        "raw_row": pyarrow.array(np.arange(len(rows), dtype=np.int64)),
        "valid": pyarrow.array([bool(v.valid) for v in all_verdicts], pyarrow.bool_()),
        "reason": pyarrow.array(
            [v.reason.value if v.reason else None for v in all_verdicts], string
        ),
        "detail": pyarrow.array([_text(v.detail) for v in all_verdicts], string),
        "dropped": pyarrow.array([bool(v.dropped) for v in all_verdicts], pyarrow.bool_()),
        "dropped_by": pyarrow.array(
            [None] * len(samples) + [_text(str(reason)) for reason, _ in dropped], string
        ),
        "engine_text": pyarrow.array(
            [
                _text(text) if text is not one.response else None
                for text, one in zip(texts, rows, strict=True)
            ],
            string,
        ),
        "keep_mask": pyarrow.array(
            [
                None if v.keep_mask is None else encode_json(list(v.keep_mask)).decode()
                for v in all_verdicts
            ],
            string,
        ),
        "changes": pyarrow.array(
            [encode_json(dict(e), describe=True).decode() if e else None for e in changed]
            + [None] * len(dropped),
            string,
        ),
    }
    table = sample_table(rows, describe=True)
    for place, (name, column) in enumerate(own.items()):
        table = table.add_column(place, name, column)
    return table


def samples_as_sent(table: pyarrow.Table, *, with_dropped: bool = False) -> list[Sample]:
    """The samples of a `verdict_table`'s batch as the engine sent them: with its text, and without
    a verdict; `with_dropped` also those that the rollout dropped, which stand behind it.
    `RolloutDataError` for another table.
    """
    if not with_dropped and "dropped_by" in table.column_names:
        table = table.filter(table["dropped_by"].is_null())
    samples = samples_of(table)
    for sample in samples:
        sample.response = engine_text_of(sample)
        if isinstance(sample.metadata, dict):
            sample.metadata.pop(ENGINE_TEXT, None)
        sample.valid, sample.invalid_reason = True, None
    return samples


def _verdict_on(sample: Sample) -> Verdict:
    """The verdict that a sample carries which the rollout dropped."""
    reason = sample.invalid_reason
    known = REASON_OF_VALUE.get(reason) if isinstance(reason, str) else None
    return Verdict(valid=bool(sample.valid), reason=known, dropped=True)


def _text(value: object) -> str | None:
    if value is None or (type(value) is str and value.isascii()):
        return value
    return str(value).encode("utf-8", "replace").decode()


def schedule_table(plan: SplitPlan, sources: Sequence[int]) -> pyarrow.Table:
    """One row per row of the train data: the row of its sample (raw_row), who trains it (dp_rank,
    -1 for nobody), at which place of the rank (dp_position), in which optimizer step and
    micro-batch of the rank.
    """
    import pyarrow

    num = len(sources)
    places = {
        name: np.full(num, -1, dtype=np.int32)
        for name in ("dp_rank", "dp_position", "step", "micro_batch")
    }
    step_of = np.repeat(
        np.arange(len(plan.schedule.num_microbatches)), plan.schedule.num_microbatches
    )
    for rank, part in enumerate(plan.schedule.partitions):
        positions = np.asarray(part, dtype=np.int64)
        places["dp_rank"][positions] = rank
        places["dp_position"][positions] = np.arange(len(part))
        for number, indices in enumerate(plan.schedule.micro_batch_indices[rank]):
            chosen = positions[np.asarray(indices, dtype=np.int64)]
            places["micro_batch"][chosen] = number
            places["step"][chosen] = step_of[number]
    return pyarrow.table(
        {
            "position": np.arange(num, dtype=np.int64),
            "raw_row": np.asarray(sources, dtype=np.int64),
            **places,
            "rollout_mask_sum": plan.rollout_mask_sums_N,
            "rollout_sample_count": plan.rollout_sample_counts_N,
        }
    )
