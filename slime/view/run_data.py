"""A run's numbers, followed while it writes them: series by step, problems, what to mark on curves."""

from __future__ import annotations

import collections
import dataclasses
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from slime.exceptions import RolloutDataError, SlimeError
from slime.files.jsonl import JsonlTail
from slime.gate.gate import RECORD_FILE
from slime.harness.report import UPDATE_SKIPPED, Checks, Summary, recorded_checks, summarize_run
from slime.harness.run_records import (
    FAMILIES,
    RunRecords,
    eval_sets,
    is_not_finite,
)
from slime.harness.run_state import UNKNOWN, State, state_of
from slime.metrics.consistency_alarms import SEEN, ConsistencyLimits, consistency_alarms
from slime.recording import manifest
from slime.recording.reader import RecordedRollout, Recording
from slime.tracking.tracking import FILE_NAME
from slime.view.catalog import Catalog, Entry

MOST_POINTS = 4_000_000  # kept of all runs


@dataclasses.dataclass(frozen=True)
class Mark:
    """Something that happened at a step. axis: "rollout" or "train" (optimizer steps)."""

    axis: str
    step: int
    kind: str
    text: str


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A run as it is now. `version` grows with every record."""

    records: RunRecords
    axes: Mapping[str, str]  # by metric, the step key that it was logged with
    summary: Summary
    state: State
    marks: list[Mark]
    gate: list[dict[str, Any]]
    version: int
    notes: tuple[str, ...]


class RunData:
    """Follows one run or recording. For any thread."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self._lock = threading.Lock()
        self._notes: list[str] = []
        self._version = 0
        self._begin()
        self._judged: tuple[int, Summary, list[Mark]] | None = None
        self._checks: Checks | None = None

    def _begin(self) -> None:
        """Knows nothing: at first, and when another run begins in the folder."""
        self._file = file_number(self.entry.path / FILE_NAME)
        self._metrics = JsonlTail(self.entry.path / FILE_NAME)
        self._gate_tail = JsonlTail(self.entry.path / RECORD_FILE)
        self._series: dict[str, dict[int, Any]] = {}
        self._axes: dict[str, str] = {}
        self._gate: list[dict[str, Any]] = []
        self._read_rollouts: set[tuple[int, bool, int]] = set()
        self._version += 1

    @property
    def num_points(self) -> int:
        return sum(map(len, list(self._series.values())))

    def now(self) -> Snapshot:
        """Reads what is new, and returns all of it."""
        with self._lock:
            self._notes = list(self.entry.notes)
            if self.entry.kind == "recording":
                self._read_recording()
                state = State(UNKNOWN, "a recording without its run folder")
            else:
                if self._file != file_number(self.entry.path / FILE_NAME):
                    self._begin()
                self._take(self._metrics.read())
                self._take_gate(self._gate_tail.read())
                state = state_of(self.entry.path)
            records = RunRecords(self._series, self._metrics.malformed)
            if self._judged is None or self._judged[0] != self._version:
                summary = self._summarize(records)
                limits = (self._checks or Checks()).log_probs
                self._judged = self._version, summary, marks_of(records, self._gate, limits)
            return Snapshot(
                records,
                self._axes,
                self._judged[1],
                state,
                self._judged[2],
                self._gate,
                self._version,
                tuple(self._notes),
            )

    def _take(self, records: Iterable[Mapping[str, Any]]) -> None:
        for record in records:
            key, step, metrics = (record.get(name) for name in ("step_key", "step", "metrics"))
            if not (isinstance(key, str) and type(step) is int and isinstance(metrics, dict)):
                continue
            self._version += 1
            for name, value in metrics.items():
                points = self._series.get(name)
                if points is None:
                    points = self._series[name] = {}
                    self._axes[name] = key
                points[step] = value

    def _take_gate(self, records: Iterable[dict[str, Any]]) -> None:
        for record in records:
            self._version += 1
            if not record.get("evaluation") and isinstance(record.get("rollout_id"), int):
                self._gate.append(record)

    def _read_recording(self) -> None:
        recording = Recording(self.entry.path)
        for evaluation in (False, True):
            for number in manifest.recorded_rollouts(self.entry.path, evaluation=evaluation):
                folder = manifest.rollout_folder(self.entry.path, number, evaluation=evaluation)
                seen = _manifest_time(folder)
                if (number, evaluation, seen) in self._read_rollouts:
                    continue
                self._read_rollouts.add((number, evaluation, seen))
                try:
                    rollout = RecordedRollout(folder, recording)
                    self._take(rollout.metric_records())
                    self._take_gate(_gate_of(rollout))
                except (RolloutDataError, OSError, TypeError, AttributeError) as error:
                    self._notes.append(str(error)[:400])
        self._gate.sort(key=lambda record: record["rollout_id"])

    def _summarize(self, records: RunRecords) -> Summary:
        if not self._series:
            return Summary([], [], [])
        if self._checks is None:
            try:
                self._checks = (
                    Checks() if self.entry.kind == "recording" else recorded_checks(self.entry.path)
                )
            except SlimeError as error:
                self._checks = Checks()
                self._notes.append(f"config.yaml: {error}"[:400])
        return summarize_run(records, self._checks)


def file_number(path: Path) -> int:
    """Another one where a file was moved aside and begun anew; -1 where there is none."""
    try:
        return path.stat().st_ino
    except OSError:
        return -1


def _manifest_time(folder: Any) -> int:
    """Changes when a manifest of the rollout does."""
    total = 0
    for writer in manifest.WRITERS:
        try:
            total += manifest.manifest_path(folder, writer).stat().st_mtime_ns
        except OSError:
            continue
    return total


def _gate_of(rollout: RecordedRollout) -> list[dict[str, Any]]:
    if "gate" not in rollout or rollout.parts["gate"].num_bytes > 1 << 22:
        return []
    part = rollout.json("gate")
    statistics = part.get("statistics")
    record = dict(statistics) if isinstance(statistics, dict) else {}
    record["alarms"] = part.get("alarms") or []
    record["rollout_id"] = rollout.rollout_id
    record["evaluation"] = any(one.evaluation for one in rollout.manifests.values())
    return [record]


class RunLibrary:
    """The runs that were looked at lately, as many as fit."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self._lock = threading.Lock()
        self._runs: collections.OrderedDict[Entry, RunData] = collections.OrderedDict()

    def get(self, entry: Entry) -> RunData:
        """The run of an entry."""
        with self._lock:
            data = self._runs.setdefault(entry, RunData(entry))
            self._runs.move_to_end(entry)
            total = sum(one.num_points for one in self._runs.values())
            while total > MOST_POINTS and len(self._runs) > 1:
                _, gone = self._runs.popitem(last=False)
                total -= gone.num_points
            return data


def marks_of(
    records: RunRecords, gate: Iterable[Mapping[str, Any]], limits: ConsistencyLimits | None
) -> list[Mark]:
    """Alarms of the gate and of the log-probs, skipped updates, and numbers that were not finite."""
    marks = [
        Mark(
            "train",
            step,
            "skipped",
            "the optimizer step changed nothing: a gradient was not finite",
        )
        for step, value in sorted(records.series.get(UPDATE_SKIPPED, {}).items())
        if value and not is_not_finite(value)
    ]
    for record in gate:
        for alarm in record.get("alarms") or []:
            text = alarm.get("message") if isinstance(alarm, dict) else alarm
            marks.append(Mark("rollout", record["rollout_id"], "alarm", f"gate: {text}"[:400]))
    if limits is not None:
        marks += _log_prob_alarms(records, limits)
    watched = {name for names in FAMILIES.values() for name in names}
    watched |= {f"eval/{name}" for name in eval_sets(records)}
    for name in sorted(watched & set(records.series)):
        axis = "train" if name.startswith("train/") else "rollout"
        marks += [
            Mark(axis, step, "not finite", f"{name} is {records.series[name][step]}")
            for step in records.not_finite(name)
        ]
    return marks


def _log_prob_alarms(records: RunRecords, limits: ConsistencyLimits) -> list[Mark]:
    by_step: dict[int, dict[str, float]] = {}
    for name, points in records.series.items():
        if name.startswith(SEEN):
            for step, value in points.items():
                try:
                    by_step.setdefault(step, {})[name] = float(value)
                except (TypeError, ValueError):
                    continue
    return [
        Mark("rollout", step, "alarm", text[:400])
        for step, metrics in sorted(by_step.items())
        for text in consistency_alarms(metrics, limits).values()
    ]


def name_of_label(records: RunRecords, label: str) -> str | None:
    """The metric that a row of the summary shows; None where there is none."""
    if label.startswith("eval "):
        return f"eval/{label.removeprefix('eval ')}"
    return records.first_of(FAMILIES.get(label, ()))


def rollout_of_train_step(records: RunRecords, step: int) -> int:
    """The rollout that optimizer step `step` belongs to, by the recorded numbers of steps."""
    steps, counts = records.numbers("schedule/num_steps")
    before = 0
    for rollout, count in zip(steps, counts, strict=True):
        before += max(1, int(count))
        if step < before:
            return rollout
    return step
