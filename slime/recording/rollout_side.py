"""What the rollout manager records of a rollout: replies, samples with verdicts, columns, schedule,
metrics.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from slime.config.secrets import without_secrets
from slime.data.batch import RolloutBatch
from slime.data.from_lists import batch_from_lists
from slime.data.sample import Sample
from slime.data.split import SplitPlan
from slime.files.field_table import field_table, fields_of_batch
from slime.files.json_values import encode_json
from slime.files.jsonl import encode as encode_record
from slime.files.sample_table import INT64, changed_fields
from slime.gate.judge import PostprocessResult
from slime.gate.tables import schedule_table, verdict_table
from slime.recording.manifest import ROLLOUT
from slime.recording.writer import (
    FAILURES,
    PartWriter,
    WritePart,
    lines_part,
    table_part,
    writer_of,
)
from slime.tracking.spans import spanned

if TYPE_CHECKING:
    import pyarrow

# of the gate's config, what the options alone do not say
GATE_STATE = (
    "level",
    "compare_every",
    "rewards_expected",
    "evaluation",
    "reward_key",
    "vocab_size",
)


class RolloutRecorder:
    """Records rollouts on behalf of the rollout manager. Tables are made when a method is called,
    from then on the values may change; they are written in the background.
    """

    def __init__(self, writer: PartWriter, *, every: int = 1) -> None:
        self.writer, self.every = writer, every
        self._is_due = False
        self._facts: dict[str, Any] = {}
        self._replies: collections.deque[bytes] = collections.deque()

    @staticmethod
    def from_args(args: argparse.Namespace) -> RolloutRecorder | None:
        writer = writer_of(args, ROLLOUT)
        return None if writer is None else RolloutRecorder(writer, every=args.record_every)

    def add_reply(self, url: str, request: bytes | None, reply: bytes, status: int) -> None:
        """Keeps one HTTP reply of an engine, or of a grader, for the rollout whose gate comes next.
        Called from any thread.
        """
        if self.writer.failed:
            return
        try:
            record = {
                "url": _shown_url(url),
                "status": status,
                # `request` is JSON that this process wrote
                "request": None if request is None else orjson.Fragment(request),
                "reply": _as_json(reply),
            }
            self._replies.append(orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE))
        except FAILURES as error:
            self.writer.stop(error)

    def begin(self, rollout_id: int, *, evaluation: bool = False) -> None:
        """Whether this rollout is recorded is decided here, by --record-every; evaluations all
        are.
        """
        self._is_due = evaluation or rollout_id % self.every == 0
        self._facts = {}
        if self._is_due:
            self.writer.begin(rollout_id, evaluation=evaluation)

    def gate(
        self,
        samples: Sequence[Sample],
        judged: PostprocessResult,
        dropped_groups: Sequence[tuple[str, Sequence[Sample]]] = (),
        **facts: Any,
    ) -> None:
        """Records the replies since the gate before, what the gate was given, and what it said.
        `facts`: small values that go with it.
        """
        lines = [self._replies.popleft() for _ in range(len(self._replies))]
        self._add("replies", lambda: lines_part(lines))
        self._add(
            "samples",
            lambda: table_part(
                judged_table(
                    samples, judged, [(why, one) for why, group in dropped_groups for one in group]
                )
            ),
        )
        self._add("gate", lambda: _json_writer(gate_record(judged, len(samples), facts)))

    def split(
        self,
        data: Mapping[str, Any],
        sources: Sequence[int],
        plan: SplitPlan,
        *,
        indices: Sequence[int | None],
    ) -> None:
        """Records the whole batch as it was split, where each row came from, and who trains it.
        `indices`: `Sample.index` of every sample that the gate judged.
        """
        self._add(
            "columns",
            lambda: table_part(
                columns_table(
                    batch_from_lists(data), sources, [indices[source] for source in sources]
                )
            ),
        )
        self._add("schedule", lambda: table_part(schedule_table(plan, sources)))
        self._facts = {
            "split": {
                "num_microbatches": list(plan.schedule.num_microbatches),
                "global_batch_sizes": list(plan.global_batch_sizes),
                "num_trained_by_rank": list(plan.num_trained_by_rank),
                "dropped": dict(plan.dropped),
            },
        }

    def finish(
        self, metrics: Sequence[Mapping[str, Any]], facts: Callable[[], Mapping[str, Any]]
    ) -> None:
        """Records what was logged of the rollout and `facts()`, and ends it."""
        self._add(
            "rollout",
            lambda: _json_writer({**self._facts, "metrics": list(metrics), **facts()}),
        )
        if not self._is_off():
            self.writer.finish()

    def close(self, timeout_s: float | None = None) -> None:
        """Waits for what is being written."""
        self.writer.close(timeout_s)

    def _is_off(self) -> bool:
        return not self._is_due or self.writer.failed

    @spanned("record")
    def _add(self, name: str, build: Callable[[], WritePart]) -> None:
        """Queues a part that `build` makes now. What cannot be made ends the recording, not the
        run.
        """
        if self._is_off():
            return
        try:
            self.writer.add(name, build())
        except FAILURES as error:
            self.writer.stop(error)


def _as_json(body: bytes) -> Any:
    """The body as it is where it is JSON on one line, else its text."""
    if b"\n" not in body:
        try:
            orjson.loads(body)
        except orjson.JSONDecodeError:
            pass
        else:
            return orjson.Fragment(body)
    return body.decode("utf-8", "replace")


@functools.lru_cache(maxsize=1024)
def _shown_url(url: str) -> str:
    """The URL without passwords and keys."""
    return without_secrets(url)


def gate_record(
    judged: PostprocessResult, num_samples: int, facts: Mapping[str, Any]
) -> dict[str, Any]:
    """What the gate said of the rollout as a whole, and what of its config the options do not
    say.
    """
    config = judged.config
    return {
        "state": {name: getattr(config, name) for name in GATE_STATE if hasattr(config, name)},
        "statistics": judged.statistics.to_record(),
        "alarms": [dataclasses.asdict(alarm) for alarm in judged.alarms],
        "num_samples": num_samples,
        **facts,
    }


def judged_table(
    samples: Sequence[Sample],
    judged: PostprocessResult,
    dropped: Sequence[tuple[str, Sample]] = (),
) -> pyarrow.Table:
    """The samples part: `verdict_table` of what the gate was given, with what it changed."""
    changes = [
        {} if before is after else changed_fields(before, after)
        for before, after in zip(samples, judged.judged, strict=True)
    ]
    return verdict_table(samples, judged.verdicts, dropped, changes=changes)


def columns_table(
    batch: RolloutBatch, sources: Sequence[int], indices: Sequence[int | None]
) -> pyarrow.Table:
    """The whole batch, one row per sample. raw_row is the row of its sample in the samples part,
    sample_index the sample's index.
    """
    fields, left_out = fields_of_batch(batch)
    table = field_table(
        fields,
        num_rows=len(sources),
        extra={
            "raw_row": np.asarray(sources, dtype=np.int64),
            # a plug-in's index may be a text
            "sample_index": [one if type(one) is int and one in INT64 else None for one in indices],
        },
    )
    return table.replace_schema_metadata(
        {**(table.schema.metadata or {}), "slime_left_out": orjson.dumps(left_out)}
    )


def _json_writer(record: Mapping[str, Any]) -> WritePart:
    try:
        text = encode_record(dict(record))
    except (TypeError, ValueError):  # state of a plug-in that JSON lacks
        text = encode_json(dict(record), describe=True)

    def write(path: Path) -> None:
        path.write_bytes(text)

    return write
