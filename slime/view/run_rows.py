"""A run in one row of the list of all: what stays of it when its numbers are no longer in memory."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path

from slime.exceptions import SlimeError
from slime.gate.gate import RECORD_FILE
from slime.harness.run_records import FAMILIES, eval_sets
from slime.harness.run_state import UNKNOWN, State, state_of
from slime.tracking.tracking import FILE_NAME
from slime.view.catalog import FILES, RECORDING, RUN, Catalog, Entry
from slime.view.charts import Spark, spark
from slime.view.run_data import RunLibrary, file_number

LARGE = 2 << 20  # bytes of metrics that take a while to read
READING = "being read"


@dataclasses.dataclass(frozen=True)
class RunRow:
    """A run in the list of all."""

    entry: Entry
    state: State
    num_rollouts: int = 0
    reward: Spark | None = None
    evaluation: Spark | None = None
    problems: tuple[str, ...] = ()
    error: str = ""


class RunRows:
    """The rows of runs, made anew for those that have been written to since."""

    def __init__(self, catalog: Catalog, runs: RunLibrary) -> None:
        self.catalog, self.runs = catalog, runs
        self._lock = threading.Lock()
        self._known: dict[Entry, tuple[tuple[int, ...], RunRow]] = {}

    def row(self, entry: Entry, *, patient: bool) -> RunRow:
        """The row of a run; of one that takes a while and has not been read, one without numbers,
        unless the caller is patient.
        """
        if entry.kind == FILES:
            return RunRow(entry, State(UNKNOWN, "no run: its files can be looked at and audited"))
        stamp = self._stamp(entry)
        with self._lock:
            known = self._known.get(entry)
        if known is None and not patient and self._is_large(entry):
            return RunRow(entry, State(READING))
        if known is not None and known[0] == stamp:
            row = known[1]
        else:
            row = self._read(entry)
            with self._lock:
                self._known[entry] = stamp, row
        # a run that writes no more has died after a while
        return dataclasses.replace(row, state=state_of(entry.path)) if entry.kind == RUN else row

    def _read(self, entry: Entry) -> RunRow:
        try:
            run = self.runs.get(entry).now()
            records = run.records
            sets = eval_sets(records)
            num_rollouts = len(records.series.get("rollout/ledger/sampled", {}))
            return RunRow(
                entry,
                run.state,
                num_rollouts or len(self.catalog.rollouts(entry)),
                spark(records, records.first_of(FAMILIES["reward"])),
                spark(records, f"eval/{sets[0]}" if sets else None),
                tuple(run.summary.problems),
            )
        except (SlimeError, OSError) as error:
            return RunRow(entry, State(UNKNOWN), error=str(error)[:400])

    def _stamp(self, entry: Entry) -> tuple[int, ...]:
        """Changes when the run has written something."""
        if entry.kind == RECORDING:
            return tuple(one.number for one in self.catalog.rollouts(entry)[-1:]) + (
                len(self.catalog.rollouts(entry)),
            )
        metrics = entry.path / FILE_NAME
        return file_number(metrics), _size(metrics), _size(entry.path / RECORD_FILE)

    def _is_large(self, entry: Entry) -> bool:
        if entry.kind == RECORDING:
            return len(self.catalog.rollouts(entry)) > 100
        return _size(entry.path / FILE_NAME) > LARGE


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1
