"""An audit as text, as one JSON object, and as one HTML page. Whatever came from a file is shown as
text: no control character reaches a terminal, no markup a browser.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

from slime import __version__
from slime.files import atomic
from slime.harness.audit.audit import Audit
from slime.harness.audit.findings import Evidence, Finding, Level, plural
from slime.harness.audit.series_findings import Series
from slime.harness.consistency_report import printable

TEMPLATE = Path(__file__).with_name("page.html.jinja")
SHOWN_IN_PAGE = 20  # pieces of evidence of a finding
WIDTH, HEIGHT = 320, 64  # of a curve


def text_report(audit: Audit, *, top: int) -> list[str]:
    """Lines: what was read, and the findings, each with `top` pieces of evidence."""
    lines = [_summary(audit), ""]
    counts = {level: sum(one.level is level for one in audit.findings) for level in Level}
    for one in audit.findings:
        lines += [f"{one.level.name}  {one.name}", f"  {printable(one.sentence)}"]
        lines += [f"    {_place(place)}" for place in one.evidence[:top]]
        if len(one.evidence) > top > 0:
            lines.append(f"    ... and {len(one.evidence) - top} more (--top, --json, --html)")
        if one.level is not Level.INFO:
            lines.append(f"  look at: {one.kind.remedy}")
        lines.append("")
    lines += [f"note: {printable(note)}" for note in audit.notes[:20]]
    if audit.skipped:
        name, why = audit.skipped[0]
        lines.append(
            f"{plural(len(audit.skipped), 'file')} of no known shape, or not followed, for instance "
            f"{printable(name)} (--json says of each why)"
        )
    lines.append(
        f"{plural(counts[Level.ERROR], 'error')}, {plural(counts[Level.WARNING], 'warning')}, "
        f"{counts[Level.INFO]} for information."
    )
    return lines


def _summary(audit: Audit) -> str:
    parts = [plural(audit.samples, "sample"), plural(audit.steps, "step")]
    if audit.evaluations:
        parts.append(plural(audit.evaluations, "evaluation"))
    shapes = ", ".join(f"{name}" for name in audit.shapes)
    lacking = [name for name, count in audit.columns.items() if not count]
    without = f"; without {', '.join(lacking)}" if lacking and audit.samples else ""
    return (
        f"{printable(audit.path)}: {', '.join(parts)} in {plural(audit.files, 'file')} ({shapes})"
        f"{without}"
    )


def _place(evidence: Evidence) -> str:
    parts = [evidence.where]
    if evidence.group:
        parts.append(f"group {evidence.group}")
    if evidence.index is not None:
        parts.append(f"sample {evidence.index}")
    text = f": {evidence.text!r}" if evidence.text else ""
    note = f" ({evidence.note})" if evidence.note else ""
    return printable(f"{', '.join(parts)}{note}{text}")


def as_json(audit: Audit) -> dict[str, Any]:
    """The audit as plain values: numbers that JSON lacks are None."""
    return {
        "path": audit.path,
        "version": __version__,
        "exit_status": audit.exit_status,
        "samples": audit.samples,
        "steps": audit.steps,
        "evaluations": audit.evaluations,
        "files": audit.files,
        "shapes": audit.shapes,
        "columns": audit.columns,
        "findings": [_finding_as_json(one) for one in audit.findings],
        "series": [
            {"name": one.name, "steps": one.steps, "values": [_finite(v) for v in one.values]}
            for one in audit.series
        ],
        "unreadable": [{"file": name, "why": why} for name, why in audit.unreadable],
        "skipped": [{"file": name, "why": why} for name, why in audit.skipped],
        "notes": audit.notes,
    }


def _finding_as_json(one: Finding) -> dict[str, Any]:
    return {
        "name": one.name,
        "family": one.kind.family,
        "level": one.level.name.lower(),
        "sentence": one.sentence,
        "share": _finite(one.share),
        "remedy": one.kind.remedy,
        "evidence": [
            {
                "where": place.where,
                "group": place.group,
                "index": place.index,
                "text": place.text,
                "note": place.note,
            }
            for place in one.evidence
        ],
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def write_page(audit: Audit, path: Path) -> None:
    """Writes the HTML page: one file, without scripts and without anything to fetch."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    page = environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        path=printable(audit.path),
        summary=_summary(audit),
        version=__version__,
        findings=[_shown(one) for one in audit.findings],
        curves=[_curve(one) for one in audit.series if len(one.values) > 1],
        unreadable=[(printable(name), printable(why)) for name, why in audit.unreadable],
        skipped=[(printable(name), printable(why)) for name, why in audit.skipped[:200]],
        columns=audit.columns,
        samples=audit.samples,
        width=WIDTH,
        height=HEIGHT,
    )
    atomic.write_bytes(path, [page.encode("utf-8", "backslashreplace")])


def _shown(one: Finding) -> dict[str, Any]:
    return {
        "name": one.name,
        "family": one.kind.family,
        "level": one.level.name.lower(),
        "sentence": printable(one.sentence),
        "meaning": one.kind.meaning.replace("`", "").replace("*", ""),
        "remedy": one.kind.remedy.replace("`", "").replace("*", ""),
        "more": max(0, len(one.evidence) - SHOWN_IN_PAGE),
        "evidence": [
            {
                "where": printable(place.where),
                "group": printable(place.group),
                "index": "" if place.index is None else str(place.index),
                "note": printable(place.note),
                "text": printable(place.text),
            }
            for place in one.evidence[:SHOWN_IN_PAGE]
        ],
    }


def _curve(series: Series) -> dict[str, str]:
    """A series as the points of a polyline, with its ends in words."""
    steps, values = _thinned(series.steps), _thinned(series.values)
    finite = [value for value in values if math.isfinite(value)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    width, height = max(1, steps[-1] - steps[0]), (high - low) or 1.0
    points = " ".join(
        f"{WIDTH * (step - steps[0]) / width:.1f},{HEIGHT - 2 - (HEIGHT - 4) * (value - low) / height:.1f}"
        for step, value in zip(steps, values, strict=True)
        if math.isfinite(value)
    )
    return {
        "name": printable(series.name),
        "points": points,
        "ends": f"step {steps[0]}: {values[0]:.4g}, step {steps[-1]}: {values[-1]:.4g}, "
        f"from {low:.4g} to {high:.4g}",
    }


def _thinned(values: Sequence[Any]) -> list[Any]:
    stride = max(1, len(values) // 1000)
    return [*values[::stride]]
