"""Says what a comparison found, as lines of text or as JSON values."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from slime.harness.diff.results import Difference, FieldResult, Report, RolloutResult
from slime.harness.diff.stages import DiffStage, short


def describe(report: Report, *, top: int = 10) -> list[str]:
    """Lines that say whether A and B are identical, else what differs first and how much where."""
    lines = [_headline(report)]
    lines += _run_lines(report)
    lines += first_lines(report)
    lines += [
        f"only in {side}: {words}"
        for side, names in (("A", report.only_a), ("B", report.only_b))
        for words in names
    ]
    for one in report.rollouts:
        lead = f"{one.name}: " if one.name else ""
        lines += [f"{lead}only in A: {words}" for words in one.only_a[:top]]
        lines += [f"{lead}only in B: {words}" for words in one.only_b[:top]]
    lines += table_lines(report, top=top)
    lines += _expected_lines(report)
    lines += _within_tolerance(report)
    return [*lines, *_note_lines(report)]


def _note_lines(report: Report) -> list[str]:
    """Every note once, with the first of the rollouts that it is about."""
    about: dict[str, list[str]] = {}
    for one in report.rollouts:
        for note in one.notes:
            about.setdefault(note, []).append(one.name)
    lines = []
    for note, names in about.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        lines.append(f"note: {names[0] + more + ': ' if names[0] else ''}{note}")
    return lines + [f"note: {note}" for note in report.notes]


def _headline(report: Report) -> str:
    fields = {(one.part, one.field) for rollout in report.rollouts for one in rollout.fields}
    samples = sum(one.num_samples for one in report.rollouts)
    named = [one for one in report.rollouts if one.name]
    over = f"{len(fields)} fields x {samples} samples" + (
        f" in {len(named)} {'rollout' if len(named) == 1 else 'rollouts and evaluations'}"
        if len(named)
        else ""
    )
    if report.identical:
        within = f" within {report.tolerance}" if report.tolerance and _floats(report) else ""
        return f"identical{within}: {over}, 0 differences"
    differing = {(one.part, one.field) for rollout in report.rollouts for one in rollout.differing}
    count = sum(one.num_differences for one in report.rollouts)
    if not differing and report.options:
        return f"different: {len(report.options)} options, versions or code; data identical: {over}"
    if not differing:
        return f"different: {over} do not differ, but one side has more"
    return f"different: {len(differing)} of {over}, {_counted(count, 'difference')}"


def _counted(count: int, noun: str) -> str:
    plural = {"entry": "entries"}.get(noun, noun + "s")
    return f"{count} {noun if count == 1 else plural}"


def _run_lines(report: Report) -> list[str]:
    lines = []
    for stage, words in (
        (DiffStage.OPTION, "options differ"),
        (DiffStage.CODE, "versions or code differ"),
    ):
        for one in report.runs:
            if one.stage is stage:
                lines.append(f"{words}: {one}")
    return lines


def first_lines(report: Report) -> list[str]:
    """The first difference of the data and its sample; [] where no data differ."""
    if report.first is None:
        return []
    rollout, difference = report.first
    where = f"{rollout.name}, " if rollout.name else ""
    lines = [
        f"first difference in the data: {where}{difference.stage.label}: "
        f"{sample_words(rollout, difference)}{difference.place}: {difference.values}"
    ]
    return lines + [f"    {line}" for line in rollout.context]


def sample_words(rollout: RolloutResult, difference: Difference) -> str:
    """Which sample a difference is of, "" for none."""
    rows = difference.row_a, difference.row_b
    row = rows[1] if rows[0] is None else rows[0]
    if row is None:
        return ""
    indices = rollout.indices[1 if rows[0] is None else 0]
    known = indices is not None and row < len(indices) and indices[row] >= 0
    name = f"sample {indices[row]}" if indices is not None and known else "sample"
    if rows[0] == rows[1]:
        return f"{name} (position {row}), "
    if None in rows:
        return f"{name} (position {row} of {'B' if rows[0] is None else 'A'}), "
    return f"{name} (position {rows[0]} in A and {rows[1]} in B), "


@dataclasses.dataclass(frozen=True)
class Row:
    """One field over all rollouts, as a row of the table. `new`: what no earlier difference
    explains.
    """

    stage: DiffStage
    part: str
    field: str
    entries: int
    samples: int
    rollouts: int
    new: int
    largest: float
    largest_relative: float
    first_rollout: str

    @property
    def role(self) -> str:
        """Whether the field differs of itself."""
        return "consequence" if not self.new else ""


def rows_of(report: Report) -> list[Row]:
    """One row per differing field, by stage, causes first."""
    by_field: dict[tuple[DiffStage, str, str], list[tuple[str, FieldResult]]] = {}
    for rollout in report.rollouts:
        for one in rollout.differing:
            by_field.setdefault((one.stage, one.part, one.field), []).append((rollout.name, one))
    first = None if report.first is None else report.first[1]
    rows = []
    for (stage, part, field), found in by_field.items():
        results = [one for _, one in found]
        new = sum(one.new for one in results)
        is_first = first is not None and any(one.first is first for one in results)
        rows.append(
            Row(
                stage,
                part,
                field,
                sum(one.entries for one in results),
                sum(one.num_samples for one in results),
                len(results),
                max(new, 1) if is_first else new,
                max(one.extent.largest for one in results),
                max(one.extent.largest_relative for one in results),
                found[0][0],
            )
        )
    return sorted(rows, key=lambda row: (row.stage, -row.new, -row.entries, row.field))


def table_lines(report: Report, *, top: int) -> list[str]:
    """The table of differing fields, by stage."""
    rows = rows_of(report)
    lines: list[str] = []
    stage = None
    for row in rows[:top]:
        if row.stage is not stage:
            stage = row.stage
            lines.append(f"  {stage.label}")
        size = (
            f", largest {row.largest:.3g} (relative {row.largest_relative:.3g})"
            if row.largest
            else ""
        )
        samples = f" in {_counted(row.samples, 'sample')}" if row.samples else ""
        times = f", {row.rollouts} rollouts from {row.first_rollout}" if row.rollouts > 1 else ""
        role = f" - {row.role}" if row.role else ""
        entries = _counted(row.entries, "entry")
        lines.append(f"    {row.field}: {entries}{samples}{times}{size}{role}")
    if len(rows) > top:
        lines.append(f"    and {len(rows) - top} more fields")
    return lines


def _expected_lines(report: Report) -> list[str]:
    found: dict[str, list[str]] = {}
    for rollout in report.rollouts:
        for one in rollout.fields:
            if one.entries and one.expected and one.field not in found.setdefault(one.expected, []):
                found[one.expected].append(one.field)
    return [f"expected: {why}: {', '.join(fields)}" for why, fields in found.items()]


def _floats(report: Report) -> list[tuple[float, float, str, str]]:
    return [
        (one.extent.largest, one.extent.largest_relative, one.field, rollout.name)
        for rollout in report.rollouts
        for one in rollout.fields
        if one.extent.largest > 0 and not one.counts
    ]


def _within_tolerance(report: Report) -> list[str]:
    floats = _floats(report)
    if not floats:
        return []
    largest, relative, field, name = max(floats)
    where = f" of {name}" if name else ""
    return [
        f"largest difference within tolerance: {largest:.3g} (relative {relative:.3g}) in "
        f"{field}{where}"
    ]


# --- JSON -----------------------------------------------------------------------------------------


def as_json(report: Report) -> dict[str, Any]:
    """The report as JSON values."""
    first = report.first
    stage = report.first_stage
    return {
        "identical": report.identical,
        "a": report.a,
        "b": report.b,
        "first_cause": None if stage is None else stage.label,
        "first_difference": None if first is None else _difference(*first),
        "runs": [
            {
                "stage": one.stage.label,
                "name": one.name,
                "a": short(one.a, 200),
                "b": short(one.b, 200),
                "allowed": one.allowed,
            }
            for one in report.runs
        ],
        "only_in_a": report.only_a,
        "only_in_b": report.only_b,
        "rollouts": {one.name: _rollout(one) for one in report.rollouts},
        "notes": report.notes,
    }


def _difference(rollout: RolloutResult, difference: Difference) -> dict[str, Any]:
    return {
        "rollout": rollout.name,
        "stage": difference.stage.label,
        "part": difference.part,
        "field": difference.field,
        "path": list(difference.path),
        "token": difference.token,
        "position_a": difference.row_a,
        "position_b": difference.row_b,
        "a": short(difference.a, 200),
        "b": short(difference.b, 200),
        "text": f"{sample_words(rollout, difference)}{difference.place}: {difference.values}",
        "context": rollout.context,
    }


def _rollout(result: RolloutResult) -> dict[str, Any]:
    return {
        "identical": result.identical,
        "num_samples": result.num_samples,
        "num_differences": result.num_differences,
        "first": None if result.first is None else _difference(result, result.first),
        "fields": [_field(one) for one in sorted(result.fields, key=_by_stage)],
        "only_in_a": result.only_a,
        "only_in_b": result.only_b,
        "notes": result.notes,
    }


def _by_stage(one: FieldResult) -> tuple[int, str]:
    return int(one.stage), one.field


def _field(one: FieldResult) -> dict[str, Any]:
    return {
        "stage": one.stage.label,
        "part": one.part,
        "field": one.field,
        "entries": one.entries,
        "samples": one.num_samples,
        "new": one.new,
        "largest": one.extent.largest,
        "largest_relative": one.extent.largest_relative,
        "expected": one.expected,
    }


def stage_results(result: RolloutResult) -> dict[DiffStage, Sequence[FieldResult]]:
    """The compared fields of a rollout by stage, every stage of the data."""
    return {
        stage: [one for one in result.fields if one.stage is stage]
        for stage in DiffStage
        if stage not in (DiffStage.OPTION, DiffStage.CODE)
    }
