"""Compares two rollouts part by part, in the order in which the parts are made."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from slime.harness.diff import stages
from slime.harness.diff.columns import Column, Columns, both, columns_of_both, split_tokens
from slime.harness.diff.compare import Outcome, Pairs, compare_columns, compare_objects
from slime.harness.diff.matching import (
    IDENTITIES,
    Matching,
    identities_of,
    match,
    match_by_place,
    match_by_source,
    same_grouping,
)
from slime.harness.diff.replies import compare_replies
from slime.harness.diff.results import Difference, FieldResult, RolloutResult, mark_new
from slime.harness.diff.sides import TABLES, Side
from slime.harness.diff.stages import NOT_COMPARED_FIELDS, DiffStage
from slime.harness.diff.values import ABSENT, EXACT, Extent, Tolerance, json_differences

LAYOUT_DIFFERS = "the layout differs"
_PLACES = ("dp_rank", "dp_position", "micro_batch")  # what a layout decides
_NUMBERED = ("rollout_ids", "all_rollout_ids")  # numbers of a rollout's executions, by place
_INDEX_COLUMNS = (
    ("samples", "index"),
    ("columns", "sample_index"),
    ("train", "sample_indices"),
)
_PRESENT = stages.Text("present")
_Metrics = dict[tuple[str, Any, str], Any]


@dataclasses.dataclass(frozen=True)
class Settings:
    """How two rollouts are compared. `tolerance`: of every float, None: exact, or the contract's
    tolerances where the layouts differ.
    """

    tolerance: Tolerance | None = None
    layout_differs: bool = False

    def of_field(self, name: str) -> Tolerance:
        """The tolerance of a field."""
        return self._of(stages.layout_tolerance_of(name))

    def of_metric(self, name: str) -> Tolerance:
        """The tolerance of a metric."""
        return self._of(stages.layout_tolerance_of_metric(name))

    def _of(self, between_layouts: float) -> Tolerance:
        if self.tolerance is not None:
            return self.tolerance
        return Tolerance(between_layouts, between_layouts) if self.layout_differs else EXACT


def compare_sides(
    a: Side, b: Side, settings: Settings, result: RolloutResult, *, earlier: bool = False
) -> None:
    """Compares what both sides have and names what only one has, in `result`. `earlier`: whether a
    rollout before differs, so that every difference here may follow from it.
    """
    _Comparison(a, b, settings, result).run(earlier=earlier)


class _Comparison:
    def __init__(self, a: Side, b: Side, settings: Settings, result: RolloutResult) -> None:
        self.a, self.b, self.result = a, b, result
        shared = set(a.layout) & set(b.layout)
        differs = any(a.layout[key] != b.layout[key] for key in shared)
        self.settings = dataclasses.replace(
            settings, layout_differs=settings.layout_differs or differs
        )
        self.matched_by = ""  # the part whose rows are the samples
        self.samples = self._match_samples()
        self.rows = self._match_rows()

    def run(self, *, earlier: bool) -> None:
        result = self.result
        for part in dict.fromkeys([*self.a.files, *self.b.files]):
            if (part in self.a) != (part in self.b):
                here, lacking = (self.a, self.b) if part in self.a else (self.b, self.a)
                words = f"the {part} part"
                if lacking.facts.get("unfinished"):
                    words += f" (the run of {'B' if here is self.a else 'A'} ended before it)"
                (result.only_a if here is self.a else result.only_b).append(words)
        both = [part for part in self.a.files if part in self.b]
        for part in both:
            if part in TABLES:
                if not self._is_same_file(part):
                    self._table(part)
            else:
                _PARTS[part](self)
        result.num_samples = len(self.samples.pairs)
        result.indices = self._indices(self.a), self._indices(self.b)
        mark_new(result.fields, self._groups(), earlier=earlier)

    # --- samples ----------------------------------------------------------------------------------

    def _match_samples(self) -> Matching:
        for part, names in (
            ("samples", IDENTITIES),
            ("columns", ("sample_index",)),
            ("train", ()),
            ("schedule", ()),
        ):
            if part in self.a and part in self.b:
                self.matched_by = part
                x, y = self.a.columns(part), self.b.columns(part)
                ids = identities_of(x, names), identities_of(y, names)
                return match(*ids, x.num_rows, y.num_rows)
        return match_by_place(0, 0)

    def _match_rows(self) -> Matching:
        """Rows of the columns, the schedule and the train part."""
        if "samples" not in self.a or "samples" not in self.b:
            return self.samples
        sources = self._sources(self.a), self._sources(self.b)
        if sources[0] is None or sources[1] is None:
            return self.samples
        return match_by_source(sources[0], sources[1], self.samples)

    @staticmethod
    def _sources(side: Side) -> np.ndarray | None:
        for part in ("columns", "schedule"):
            if part in side:
                return side.columns(part).numbers("raw_row")
        return None

    @staticmethod
    def _indices(side: Side) -> np.ndarray | None:
        for part, name in _INDEX_COLUMNS:
            if part in side:
                return side.columns(part).numbers(name)
        return None

    def _groups(self) -> np.ndarray | None:
        for part, name in (("samples", "group_index"), ("columns", "group_ids")):
            if part in self.a and name in self.a.columns(part):
                return self.a.columns(part).numbers(name)
        return None

    # --- tables -----------------------------------------------------------------------------------

    def _is_same_file(self, part: str) -> bool:
        """Whether the manifests list one hash, and both files have it: then nothing is read."""
        x, y = self.a.parts.get(part), self.b.parts.get(part)
        if x is None or y is None or x.blake2b != y.blake2b:
            return False
        both(lambda side: side.verify(part), self.a, self.b)
        for name in self.a.columns(part).names:
            if name not in NOT_COMPARED_FIELDS:
                self._add(part, name, self._stage(part, name), Outcome(), None, None)
        return True

    def _table(self, part: str) -> None:
        x, y = self.a.columns(part), self.b.columns(part)
        matching = self.samples if part == "samples" else self.rows
        if part != self.matched_by and not _fits(matching, x.num_rows, y.num_rows):
            matching = match_by_place(x.num_rows, y.num_rows)
        self._members(part, matching)
        rows = self._sample_rows(part, matching)
        for name in x.names:
            if name in NOT_COMPARED_FIELDS or name == "position":
                continue
            if name not in y:
                self._lacking(part, name, in_a=True)
            elif part == "samples" and name == "rest":
                self._rest(x, y, matching, rows)
            elif part == "samples" and name == "tokens":
                self._tokens(x, y, matching, rows)
            else:
                self._column(part, name, x, y, matching, rows)
        for name in y.names:
            if name not in x and name not in NOT_COMPARED_FIELDS:
                self._lacking(part, name, in_a=False)

    def _sample_rows(self, part: str, matching: Matching) -> tuple[np.ndarray, np.ndarray]:
        """The rows of the samples that the pairs of a part are of, in A and in B."""
        if part == "samples":
            return matching.pairs.a, matching.pairs.b
        return (
            self._sample_rows_of(self.a, matching.pairs.a),
            self._sample_rows_of(self.b, matching.pairs.b),
        )

    def _sample_rows_of(self, side: Side, rows: np.ndarray) -> np.ndarray:
        sources = self._sources(side) if "samples" in side else None
        if sources is None or max(rows, default=-1) >= len(sources):
            return rows
        return sources[rows]

    def _column(
        self,
        part: str,
        name: str,
        x: Columns,
        y: Columns,
        matching: Matching,
        rows: tuple[np.ndarray, np.ndarray],
    ) -> None:
        pairs = matching.pairs
        column_a, column_b = columns_of_both(x, y, name)
        if name in _NUMBERED and not matching.is_by_place and column_a.kind == "number":
            places = np.arange(len(pairs), dtype=np.int64)
            column_a = Column("number", same_grouping(column_a.values, pairs.a))
            column_b = Column("number", same_grouping(column_b.values, pairs.b))
            pairs = Pairs(places, places)
        outcome = compare_columns(column_a, column_b, pairs, self.settings.of_field(name))
        self._add(part, name, self._stage(part, name), outcome, *rows)

    def _tokens(
        self,
        x: Columns,
        y: Columns,
        matching: Matching,
        rows: tuple[np.ndarray, np.ndarray],
    ) -> None:
        split = []
        tokens = columns_of_both(x, y, "tokens")
        for columns, column in zip((x, y), tokens, strict=True):
            lengths = columns.numbers("response_length")
            if lengths is None:
                lengths = np.full(columns.num_rows, -1, dtype=np.int64)
            split.append(split_tokens(column, lengths))
        for stage, one, other in zip((DiffStage.PROMPT, DiffStage.REPLY), *split, strict=True):
            self._add(
                "samples", "tokens", stage, compare_columns(one, other, matching.pairs), *rows
            )

    def _rest(
        self,
        x: Columns,
        y: Columns,
        matching: Matching,
        rows: tuple[np.ndarray, np.ndarray],
    ) -> None:
        tolerance = self.settings.tolerance or EXACT
        found = compare_objects(x.column("rest"), y.column("rest"), matching.pairs, tolerance)
        for key, outcome in found.items():
            self._add("samples", key, self._stage("samples", key), outcome, *rows)

    def _stage(self, part: str, name: str) -> DiffStage:
        if part == "samples":
            return stages.STAGE_OF_SAMPLE_FIELD.get(name, DiffStage.REPLY)
        if part == "schedule":
            return DiffStage.SCHEDULE
        both_have_columns = "columns" in self.a and "columns" in self.b
        if part == "train" and (
            name in (*_PLACES, "step") or (both_have_columns and not stages.is_computed(name))
        ):
            return DiffStage.ARRIVAL
        return stages.stage_of_field(name)

    def _add(
        self,
        part: str,
        name: str,
        stage: DiffStage,
        outcome: Outcome,
        rows_a: np.ndarray | None,
        rows_b: np.ndarray | None,
    ) -> None:
        result = FieldResult(stage, part, name, outcome.entries, None, outcome.extent)
        if outcome.first is not None and rows_a is not None and rows_b is not None:
            lowest = int(outcome.pairs[0])
            result.rows = np.unique(rows_a[outcome.pairs])
            row_a, row_b = int(rows_a[lowest]), int(rows_b[lowest])
            result.first = Difference(stage, part, name, *outcome.first, row_a, row_b)
        if part in ("schedule", "train") and self.settings.layout_differs and name in _PLACES:
            result.expected = LAYOUT_DIFFERS
        self.result.fields.append(result)

    def _lacking(self, part: str, name: str, *, in_a: bool) -> None:
        stage = self._stage(part, name)
        values = (_PRESENT, ABSENT) if in_a else (ABSENT, _PRESENT)
        first = Difference(stage, part, name, (), *values)
        self.result.fields.append(FieldResult(stage, part, name, 1, first=first))
        only = self.result.only_a if in_a else self.result.only_b
        only.append(
            f"field {name} of the {part} part" if len(self.a.files) > 1 else f"field {name}"
        )

    def _members(self, part: str, matching: Matching) -> None:
        """Samples, or rows made of them, that one side lacks or has in another order."""
        if part == self.matched_by:
            stage, only_a, only_b = self._member_stage(), matching.only_a, matching.only_b
            rows_a, rows_b = only_a, only_b
        else:
            # rows of samples that one side lacks follow from that
            stage = self._stage(part, "tokens" if part != "schedule" else "")
            sources_a = self._sample_rows_of(self.a, matching.only_a)
            sources_b = self._sample_rows_of(self.b, matching.only_b)
            kept_a = np.isin(sources_a, self.samples.pairs.a)
            kept_b = np.isin(sources_b, self.samples.pairs.b)
            only_a, only_b = matching.only_a[kept_a], matching.only_b[kept_b]
            rows_a, rows_b = sources_a[kept_a], sources_b[kept_b]
        moved = matching.moved
        if not (len(only_a) or len(only_b) or len(moved)):
            return
        pairs_a, pairs_b = self._sample_rows(part, matching)
        result = FieldResult(stage, part, "position")
        result.rows = np.unique(np.concatenate((rows_a, pairs_a[moved])))
        result.entries = len(only_a) + len(only_b) + len(moved)
        words = (stages.Text(f"position {row}") for row in (*only_a[:1], *only_b[:1]))
        firsts = [
            Difference(stage, part, "position", (), next(words), ABSENT, row_a=int(row))
            for row in rows_a[:1]
        ]
        firsts += [
            Difference(stage, part, "position", (), ABSENT, next(words), row_b=int(row))
            for row in rows_b[:1]
        ]
        for pair in moved[:1].tolist():
            place_a, place_b = (
                stages.Text(f"position {rows[pair]}")
                for rows in (matching.pairs.a, matching.pairs.b)
            )
            row_a, row_b = int(pairs_a[pair]), int(pairs_b[pair])
            firsts.append(Difference(stage, part, "position", (), place_a, place_b, row_a, row_b))
        result.first = min(firsts, key=lambda one: one.order, default=None)
        self.result.fields.append(result)
        for own, names in ((only_a, self.result.only_a), (only_b, self.result.only_b)):
            if len(own):
                noun = "sample" if len(own) == 1 else "samples"
                of = "" if part == self.matched_by else f" of the {part} part"
                names.append(f"{len(own)} {noun}{of}, the first at position {own[0]}")

    def _member_stage(self) -> DiffStage:
        """Which samples there are is decided by the data's position; where groups are dropped and
        replaced, by the verdict on those before.
        """
        for side in (self.a, self.b):
            if "samples" in side and "dropped_by" in side.columns("samples"):
                column = side.columns("samples").column("dropped_by")
                if column.missing is None or not column.missing.all():
                    return DiffStage.VERDICT
        return DiffStage.PROMPT

    # --- other parts ------------------------------------------------------------------------------

    def replies(self) -> None:
        tolerance = self.settings.of_field("rollout_log_probs")
        self.result.fields += compare_replies(self.a, self.b, tolerance)

    def gate(self) -> None:
        x, y = self.a.json("gate"), self.b.json("gate")
        for key in dict.fromkeys([*x, *y]):
            self._value("gate", key, DiffStage.VERDICT, x.get(key, ABSENT), y.get(key, ABSENT))

    def rollout(self) -> None:
        x, y = self.a.json("rollout"), self.b.json("rollout")
        for key in dict.fromkeys([*x, *y]):
            one, other = x.get(key, ABSENT), y.get(key, ABSENT)
            if key == "split" and isinstance(one, Mapping) and isinstance(other, Mapping):
                for name in dict.fromkeys([*one, *other]):
                    values = one.get(name, ABSENT), other.get(name, ABSENT)
                    self._value("rollout", name, DiffStage.SCHEDULE, *values)
            elif key == "data_position":
                self._value("rollout", key, self._member_stage(), one, other)
            elif key == "weight_version":
                self._value("rollout", key, DiffStage.WEIGHTS_BEFORE, one, other)
            elif key not in ("metrics", "parallel"):  # the layout is compared before all
                self._value("rollout", key, DiffStage.METRIC, one, other)
        self._metrics("rollout", *(_list_of(side, "metrics") for side in (x, y)))

    def steps(self) -> None:
        self._metrics("steps", self.a.records("steps"), self.b.records("steps"))

    def critic_steps(self) -> None:
        self._metrics(
            "critic_steps", self.a.records("critic_steps"), self.b.records("critic_steps")
        )

    def weights(self) -> None:
        x, y = self.a.json("weights"), self.b.json("weights")
        if self.settings.layout_differs:
            self.result.notes.append(
                f"digests of the weights are not compared: {LAYOUT_DIFFERS}, and with it each "
                "rank's share"
            )
            return
        for key, stage in (("before", DiffStage.WEIGHTS_BEFORE), ("after", DiffStage.WEIGHTS)):
            one, other = (_by_rank(side.get(key)) for side in (x, y))
            self._value("weights", key, stage, one, other)

    def _value(self, part: str, name: str, stage: DiffStage, a: Any, b: Any) -> None:
        extent = Extent()
        if not stages.is_compared_key(name):
            return
        tolerance = self.settings.tolerance or EXACT
        found = list(json_differences(a, b, tolerance, extent))
        result = FieldResult(stage, part, name, len(found), extent=extent)
        if found:
            result.first = Difference(stage, part, name, *found[0])
        if self.settings.layout_differs and name in ("num_microbatches", "num_trained_by_rank"):
            result.expected = LAYOUT_DIFFERS
        self.result.fields.append(result)

    def _metrics(self, part: str, a: list[Any], b: list[Any]) -> None:
        x = _metrics_by_place(a)
        y = self._numbered_as(x, _metrics_by_place(b))
        found: dict[tuple[DiffStage, str], FieldResult] = {}
        layout_differs = self.settings.layout_differs
        for place in dict.fromkeys([*x, *y]):
            axis, step, name = place
            if not stages.is_compared_metric(name, layout_differs=layout_differs):
                continue
            stage = DiffStage.STEP if axis.startswith("train") else DiffStage.METRIC
            result = found.setdefault((stage, name), FieldResult(stage, part, name))
            values = x.get(place, ABSENT), y.get(place, ABSENT)
            tolerance = self.settings.of_metric(name)
            entries = list(json_differences(*values, tolerance, result.extent))
            result.entries += len(entries)
            if entries and result.first is None:
                _, one, other = entries[0]
                path = (f"{axis} {step}",)
                number = step if isinstance(step, int) else None
                result.first = Difference(stage, part, name, path, one, other, step=number)
        self.result.fields += found.values()

    def _numbered_as(self, x: _Metrics, y: _Metrics) -> _Metrics:
        """B's metrics by A's numbers of steps. Those of another rollout have no number in common;
        then the first step is compared with the first.
        """
        for axis in sorted({place[0] for place in x} & {place[0] for place in y}):
            steps = [_steps(side, axis) for side in (x, y)]
            if not all(steps) or steps[0] & steps[1]:
                continue
            first, other = min(steps[0]), min(steps[1])
            y = {
                (one, step + first - other if one == axis else step, name): value
                for (one, step, name), value in y.items()
                if (one, name) != (axis, axis)
            }
            self.result.notes.append(
                f"{axis} {other} of B is compared with {axis} {first} of A, and so on: they have no "
                "step in common"
            )
        return y


_PARTS = {
    "replies": _Comparison.replies,
    "gate": _Comparison.gate,
    "rollout": _Comparison.rollout,
    "steps": _Comparison.steps,
    "critic_steps": _Comparison.critic_steps,
    "weights": _Comparison.weights,
}


def _fits(matching: Matching, num_a: int, num_b: int) -> bool:
    """Whether a matching of other parts' rows covers the rows of a part."""
    covered = (
        len(matching.pairs) + len(matching.only_a),
        len(matching.pairs) + len(matching.only_b),
    )
    return covered == (num_a, num_b)


def _list_of(record: Mapping[str, Any], name: str) -> list[Any]:
    value = record.get(name)
    return value if isinstance(value, list) else []


def _by_rank(digests: Any) -> Any:
    if not isinstance(digests, list):
        return digests
    return {f"rank {rank}": one for rank, one in enumerate(digests)}


def _steps(metrics: _Metrics, axis: str) -> set[int]:
    return {step for one, step, _ in metrics if one == axis and isinstance(step, int)}


def _metrics_by_place(records: list[Any]) -> _Metrics:
    """Metrics by axis, step and name; the latest record of a step wins."""
    found: _Metrics = {}
    for record in records:
        if isinstance(record, dict) and isinstance(record.get("metrics"), dict):
            axis, step = str(record.get("step_key", "")), record.get("step")
            step = step if isinstance(step, int) else str(step)
            for name, value in record["metrics"].items():
                found[axis, step, name] = value
    return found
