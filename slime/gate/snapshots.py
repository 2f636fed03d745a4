"""Raw snapshots: the engine's output of the last rollouts as Parquet (zstd), readable by pandas,
polars or duckdb without our code.

raw_000007.parquet is a `verdict_table`: one row per sample that came from the engine, the batch,
then what the rollout dropped, with the reason in the column dropped_by. place_000007.parquet is a
`schedule_table`: it says who trains which row. They are the samples and schedule parts of a
recording, but for what the gate changed.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.data.sample import Sample
from slime.data.split import SplitPlan
from slime.files import tables
from slime.gate.config import Verdict
from slime.gate.tables import schedule_table, verdict_table
from slime.gate.token_columns import length_of

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
                f"raw_{rollout_id:06d}.parquet", verdict_table(samples, verdicts, dropped)
            ),
        )

    def submit_placement(self, rollout_id: int, raw_rows: Sequence[int], plan: SplitPlan) -> None:
        """Queues the table of who trains which row of the train data; `raw_rows` [N]: the raw row
        of each.
        """
        raw_rows = list(raw_rows)
        self._enqueue(
            rollout_id,
            lambda: self._publish(
                f"place_{rollout_id:06d}.parquet", schedule_table(plan, raw_rows)
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
        tables.write_table(self.folder / name, table)
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


def _num_bytes(sample: Sample) -> int:
    """About what a row takes before compression."""
    numbers = 8 * max(length_of(sample.tokens), 0) + 4 * max(length_of(sample.rollout_log_probs), 0)
    return numbers + sum(
        len(text) for text in (sample.prompt, sample.response) if isinstance(text, str)
    )


def _pyarrow_available() -> bool:
    import importlib.util

    return importlib.util.find_spec("pyarrow") is not None
