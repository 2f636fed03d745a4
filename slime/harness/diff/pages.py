"""A comparison as a JUnit report and as one self-contained page. Texts of models are data here:
escaped, and without characters that XML does not have.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

from slime.harness.diff.results import FieldResult, Report, RolloutResult
from slime.harness.diff.stages import DiffStage
from slime.harness.diff.text import describe, first_lines, rows_of, stage_results

# what XML 1.0 has no form for
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_TEMPLATE = Path(__file__).with_name("page.html.jinja")


def _clean(text: str) -> str:
    return _NOT_XML.sub("\ufffd", text)


def junit(report: Report) -> bytes:
    """JUnit XML: a case per stage of the runs, and per rollout and stage."""
    suite = ElementTree.Element("testsuite", name="slime diff")
    counts = {"tests": 0, "failures": 0, "skipped": 0}

    def case(where: str, stage: str, failure: str, detail: str, *, skipped: str = "") -> None:
        counts["tests"] += 1
        element = ElementTree.SubElement(
            suite, "testcase", classname=_clean(where), name=_clean(stage), time="0"
        )
        if failure:
            counts["failures"] += 1
            found = ElementTree.SubElement(element, "failure", message=_clean(failure))
            found.text = _clean(detail)
        elif skipped:
            counts["skipped"] += 1
            ElementTree.SubElement(element, "skipped", message=_clean(skipped))

    for stage in (DiffStage.OPTION, DiffStage.CODE):
        found = [str(one) for one in report.options if one.stage is stage]
        case("run", stage.label, found[0] if found else "", "\n".join(found))
    lacking = [f"only in A: {w}" for w in report.only_a] + [
        f"only in B: {w}" for w in report.only_b
    ]
    case("run", "both have the same rollouts", lacking[0] if lacking else "", "\n".join(lacking))
    for rollout in report.rollouts:
        where = rollout.name or "files"
        for stage, fields in stage_results(rollout).items():
            failure, detail = _failure(report, rollout, fields)
            case(where, stage.label, failure, detail, skipped="" if fields else "not recorded")
        parts = [f"only in A: {w}" for w in rollout.only_a]
        parts += [f"only in B: {w}" for w in rollout.only_b]
        case(where, "both have the same parts", parts[0] if parts else "", "\n".join(parts))
    for name, count in counts.items():
        suite.set(name, str(count))
    suite.set("errors", "0")
    root = ElementTree.Element("testsuites")
    root.append(suite)
    return ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)


def _failure(
    report: Report, rollout: RolloutResult, fields: Sequence[FieldResult]
) -> tuple[str, str]:
    """(the first difference of a stage, a line per field), "" where none counts."""
    differing = [one for one in fields if one.counts]
    firsts = [one.first for one in differing if one.first is not None]
    if not firsts:
        return "", ""
    first = min(firsts, key=lambda one: one.order)
    lines = [
        f"{one.field}: {one.entries} entries, {one.num_samples} samples"
        + ("" if one.new else ", a consequence of an earlier difference")
        for one in differing
    ]
    if report.first is not None and report.first[1] is first:
        lines = [*first_lines(report), *lines]
    return f"{first.place}: {first.values}", "\n".join(lines)


def html(report: Report) -> bytes:
    """One page with everything that `slime diff` prints, and a table of rollouts by stage."""
    import jinja2

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    stages = [stage for stage in DiffStage if stage not in (DiffStage.OPTION, DiffStage.CODE)]
    cells = [
        {
            "name": rollout.name or "files",
            "cells": [_cell(fields) for fields in stage_results(rollout).values()],
            "only": [
                *(f"only in A: {words}" for words in rollout.only_a),
                *(f"only in B: {words}" for words in rollout.only_b),
                *rollout.notes,
            ],
        }
        for rollout in report.rollouts
    ]
    text = template.render(
        report=report,
        headline=describe(report)[0],
        first=first_lines(report),
        rows=rows_of(report),
        stages=[stage.label for stage in stages],
        rollouts=cells,
    )
    return text.encode("utf-8", "replace")


def _cell(fields: Sequence[FieldResult]) -> dict[str, str]:
    """How a stage of a rollout came out, and the words for it."""
    if not fields:
        return {"kind": "none", "text": "-", "title": "not recorded"}
    differing = [one for one in fields if one.counts]
    if not differing:
        return {"kind": "same", "text": "same", "title": f"{len(fields)} fields"}
    names = ", ".join(one.field for one in differing)
    entries = sum(one.entries for one in differing)
    kind = "cause" if any(one.new for one in differing) else "effect"
    return {"kind": kind, "text": str(entries), "title": names}
