"""Raw snapshots: the engine's output of the last rollouts as Parquet (zstd), readable by pandas,
polars or duckdb without our code.

raw_000007.parquet holds one row per sample that came from the engine: the batch, then what the
rollout dropped, with the reason in the column dropped_by. place_000007.parquet says where each kept
one went.
"""

from __future__ import annotations

import json
import logging
import math
import os
import queue
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from slime.data.reasons import REASON_OF_VALUE
from slime.data.sample import Sample
from slime.files import atomic
from slime.files.jsonl import plain_value
from slime.gate.before_rewards import ENGINE_TEXT, engine_text_of
from slime.gate.config import Verdict
from slime.gate.token_columns import (
    as_int,
    length_of,
    log_prob_array,
    missing_positions,
    token_array,
)
from slime.typing import Array

if TYPE_CHECKING:
    import pyarrow

logger = logging.getLogger(__name__)
_STOP = object()
# What a disk, a value or pyarrow can raise (pyarrow's errors derive from these).
_FAILURES = (
    OSError,
    ValueError,
    TypeError,
    RuntimeError,
    MemoryError,
    LookupError,
    OverflowError,
    AttributeError,
)
_PATTERNS = ("raw_*.parquet", "place_*.parquet")
DroppedGroups = Sequence[tuple[str, Sequence[Sample]]]


class SnapshotWriter:
    """Writes snapshots on one background thread, each whole or not at all. Keeps the last
    `keep` rollouts within `max_bytes`.

    Without pyarrow (the extra `data`) nothing is written, with one warning. A failed write is
    logged and never raised; a rollout that arrives while two are waiting is skipped and counted, so
    that a slow disk cannot fill the memory. For the same reason what the rollout dropped is taken
    group by group while the whole, uncompressed, stays within `max_bytes`; a warning has the number
    of the rest.
    """

    def __init__(self, folder: str | os.PathLike[str], *, keep: int = 3, max_bytes: int = 4 << 30):
        self.folder = Path(folder)
        self.keep = keep
        self.max_bytes = max_bytes
        self.num_skipped = 0
        self._queue: queue.Queue[Any] = queue.Queue(maxsize=4)
        self._thread: threading.Thread | None = None
        self._available = _pyarrow_available()
        if not self._available:
            logger.warning(
                (
                    "No raw snapshots are written to %s: pyarrow is missing. Install slime[data], "
                    "or "
                    "set --gate-snapshots 0."
                ),
                self.folder,
            )

    def submit(
        self,
        rollout_id: int,
        samples: Sequence[Sample],
        verdicts: Sequence[Verdict],
        dropped_groups: DroppedGroups = (),
    ) -> None:
        """Queues one rollout's raw samples, and (reason, group) of what the rollout dropped before
        the gate saw the batch.

        They are read on the thread and must not change; the gate's are not edited by anyone.
        """
        samples, verdicts = list(samples), list(verdicts)
        dropped = self._fitting(rollout_id, samples, dropped_groups)
        self._enqueue(
            rollout_id,
            lambda: self._publish(
                f"raw_{rollout_id:06d}.parquet", raw_table(samples, verdicts, dropped)
            ),
        )

    def submit_placement(
        self, rollout_id: int, raw_rows: Sequence[int], partitions: Sequence[Sequence[int]]
    ) -> None:
        """Queues the table raw_row -> (dp_rank, dp_position). `partitions[rank]` lists positions in
        the gate's output.
        """
        raw_rows, partitions = list(raw_rows), [list(part) for part in partitions]
        self._enqueue(
            rollout_id,
            lambda: self._publish(
                f"place_{rollout_id:06d}.parquet", placement_table(raw_rows, partitions)
            ),
        )

    def flush(self) -> None:
        """Returns when everything queued so far is written or has failed."""
        self._queue.join()

    def close(self) -> None:
        """Writes what is queued and ends the thread."""
        if self._thread is not None:
            self._queue.put(_STOP)
            self._thread.join()
            self._thread = None

    def _fitting(
        self, rollout_id: int, samples: list[Sample], groups: DroppedGroups
    ) -> list[tuple[str, Sample]]:
        """(reason, sample) of the dropped groups that have room beside the batch, in order."""
        room = self.max_bytes - sum(map(_num_bytes, samples))
        taken: list[tuple[str, Sample]] = []
        for number, (reason, group) in enumerate(groups):
            room -= sum(map(_num_bytes, group))
            if room < 0:
                logger.warning(
                    "rollout %d: %d of %d groups that the rollout dropped are not in its raw "
                    "snapshot; raise --gate-snapshots-max-gib "
                    "to keep them.",
                    rollout_id,
                    len(groups) - number,
                    len(groups),
                )
                break
            taken += [(str(reason), sample) for sample in group]
        return taken

    def _enqueue(self, rollout_id: int, job: Callable[[], None]) -> None:
        if not self._available:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="gate-snapshots", daemon=True)
            self._thread.start()
        try:
            self._queue.put_nowait(job)
        except queue.Full:
            self.num_skipped += 1
            logger.warning(
                "rollout %d has no raw snapshot: the disk of %s is too slow (%d skipped).",
                rollout_id,
                self.folder,
                self.num_skipped,
            )

    def _work(self) -> None:
        while True:
            job = self._queue.get()
            try:
                if job is _STOP:
                    return
                job()
            except (
                _FAILURES
            ) as error:  # the thread outlives any one snapshot: losing it never costs training data
                logger.error(
                    "a raw snapshot in %s could not be written: %s: %s",
                    self.folder,
                    type(error).__name__,
                    error,
                )
            finally:
                self._queue.task_done()

    def _publish(self, name: str, table: pyarrow.Table) -> None:
        import pyarrow.parquet

        with atomic.replacing(self.folder / name) as temporary:
            pyarrow.parquet.write_table(table, temporary, compression="zstd")
        self._prune()

    def _prune(self) -> None:
        """Removes all but the newest `keep` rollouts, and older ones beyond `max_bytes`; the newest
        always stays.

        Newest is the one written last: a resumed run writes lower numbers than the run before it
        left.
        """
        files: dict[str, list[Path]] = {}
        for pattern in _PATTERNS:
            for path in self.folder.glob(pattern):
                if (number := path.stem.partition("_")[2]).isdigit():
                    files.setdefault(number, []).append(path)
        written = {
            number: max(path.stat().st_mtime_ns for path in paths)
            for number, paths in files.items()
        }
        total = 0
        for rank, number in enumerate(
            sorted(files, key=lambda n: (written[n], int(n)), reverse=True)
        ):
            total += sum(path.stat().st_size for path in files[number])
            if rank >= self.keep or (rank > 0 and total > self.max_bytes):
                for path in files[number]:
                    path.unlink(missing_ok=True)


def raw_table(
    samples: Sequence[Sample],
    verdicts: Sequence[Verdict],
    dropped: Sequence[tuple[str, Sample]] = (),
) -> Any:
    """A pyarrow table, one row per raw sample: identity, prompt, label, the engine's text, ids,
    log-probs, finish reason, reward, metadata and the verdict.

    Rows 0 .. len(samples) - 1 are the batch (dropped_by is null), the others what the rollout
    dropped before, each with its reason and with the verdict that it had by then.
    """
    import pyarrow

    dropped_by = [None] * len(samples) + [reason for reason, _ in dropped]
    verdicts = [*verdicts, *(_verdict_on(sample) for _, sample in dropped)]
    samples = [*samples, *(sample for _, sample in dropped)]
    tokens = [_readable(token_array(sample.tokens)) for sample in samples]
    log_probs = [_log_probs(sample.rollout_log_probs) for sample in samples]
    columns = {
        "raw_row": pyarrow.array(range(len(samples)), pyarrow.int64()),
        "index": pyarrow.array([_int(s.index) for s in samples], pyarrow.int64()),
        "group_index": pyarrow.array([_int(s.group_index) for s in samples], pyarrow.int64()),
        "rollout_id": pyarrow.array([_int(s.rollout_id) for s in samples], pyarrow.int64()),
        "prompt": pyarrow.array([_text(s.prompt) for s in samples], pyarrow.string()),
        "label": pyarrow.array([_json(s.label) for s in samples], pyarrow.string()),
        "response": pyarrow.array([_text(engine_text_of(s)) for s in samples], pyarrow.string()),
        "tokens": _list_column(tokens, pyarrow.int64()),
        "response_length": pyarrow.array(
            [_int(s.response_length) for s in samples], pyarrow.int64()
        ),
        "rollout_log_probs": _list_column(log_probs, pyarrow.float32()),
        "finish_reason": pyarrow.array(
            [_text(s.finish_reason) if s.finish_reason else None for s in samples], pyarrow.string()
        ),
        "status": pyarrow.array(
            [_text(getattr(s.status, "value", s.status)) for s in samples], pyarrow.string()
        ),
        "weight_versions": pyarrow.array(
            [_text(s.weight_versions) for s in samples], pyarrow.string()
        ),
        "reward": pyarrow.array([_json(s.reward) for s in samples], pyarrow.string()),
        "metadata": pyarrow.array(
            [_json(_own_metadata(s.metadata)) for s in samples], pyarrow.string()
        ),
        "valid": pyarrow.array([v.valid for v in verdicts], pyarrow.bool_()),
        "reason": pyarrow.array(
            [v.reason.value if v.reason else None for v in verdicts], pyarrow.string()
        ),
        "detail": pyarrow.array([_text(v.detail) for v in verdicts], pyarrow.string()),
        "dropped": pyarrow.array([v.dropped for v in verdicts], pyarrow.bool_()),
        "dropped_by": pyarrow.array(dropped_by, pyarrow.string()),
    }
    return pyarrow.table(columns)


def placement_table(raw_rows: Sequence[int], partitions: Sequence[Sequence[int]]) -> Any:
    """A pyarrow table raw_row, output_position, dp_rank, dp_position. Positions that no rank got
    are absent (trimmed).
    """
    import pyarrow

    rows = [
        (raw_rows[p], p, rank, place)
        for rank, part in enumerate(partitions)
        for place, p in enumerate(part)
    ]
    names = ("raw_row", "output_position", "dp_rank", "dp_position")
    return pyarrow.table(
        {
            name: pyarrow.array([row[i] for row in rows], pyarrow.int64())
            for i, name in enumerate(names)
        }
    )


def _own_metadata(metadata: object) -> Any:
    """Metadata without the engine's text, which has a column of its own."""
    if not isinstance(metadata, dict) or ENGINE_TEXT not in metadata:
        return metadata
    return {key: value for key, value in metadata.items() if key != ENGINE_TEXT}


def _verdict_on(sample: Sample) -> Verdict:
    """The verdict that a sample carries which the rollout dropped."""
    reason = (
        REASON_OF_VALUE.get(sample.invalid_reason)
        if isinstance(sample.invalid_reason, str)
        else None
    )
    return Verdict(valid=bool(sample.valid), reason=reason, dropped=True)


def _num_bytes(sample: Sample) -> int:
    """About what a row takes before compression."""
    numbers = 8 * max(length_of(sample.tokens), 0) + 4 * max(length_of(sample.rollout_log_probs), 0)
    return numbers + sum(
        len(text) for text in (sample.prompt, sample.response) if isinstance(text, str)
    )


def _list_column(rows: list[np.ndarray | None], value_type: pyarrow.DataType) -> Any:
    """A list column straight from the buffers, without making Python numbers."""
    import pyarrow

    dtype = np.int64 if pyarrow.types.is_integer(value_type) else np.float32
    lengths = np.array([0 if row is None else len(row) for row in rows], dtype=np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    present = [row.astype(dtype, copy=False) for row in rows if row is not None and len(row)]
    values = pyarrow.array(
        np.concatenate(present) if present else np.zeros(0, dtype=dtype), value_type
    )
    missing = pyarrow.array([row is None for row in rows], pyarrow.bool_())
    return pyarrow.LargeListArray.from_arrays(pyarrow.array(offsets), values, mask=missing)


def _readable(values: np.ndarray | str) -> np.ndarray | None:
    return None if isinstance(values, str) else values


def _log_probs(values: Sequence[float | None] | Array | None) -> np.ndarray | None:
    """Numbers as they came; entries that are None read NaN; None where there is nothing to read."""
    if values is None:
        return None
    if missing_positions(values) is not None:
        values = [math.nan if value is None else value for value in values]
    return _readable(log_prob_array(values))


def _int(value: object) -> int | None:
    number = as_int(value)
    return number if number is not None and abs(number) < 2**63 else None


def _json(value: object) -> str:
    """JSON text, also of a string, so that reading gives the same value back; numpy and torch
    scalars as numbers.
    """
    try:
        text = json.dumps(value, default=plain_value, ensure_ascii=False)
    except (TypeError, ValueError):  # keys that are no strings, or a structure that holds itself
        text = json.dumps(str(value), ensure_ascii=False)
    return text.encode("utf-8", "replace").decode("utf-8")


def _text(value: object) -> str:
    text = value if isinstance(value, str) else _json(value)
    return text.encode("utf-8", "replace").decode("utf-8")  # lone surrogates have no UTF-8 form


def _pyarrow_available() -> bool:
    import importlib.util

    return importlib.util.find_spec("pyarrow") is not None
