"""Compares what two runs were started with: options, versions, code."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any

from slime.exceptions import RolloutDataError
from slime.files.json_values import decode_values
from slime.harness.diff.results import RunDifference
from slime.harness.diff.stages import DiffStage, is_compared_option, is_layout_option
from slime.harness.diff.values import ABSENT, EXACT, Extent, json_differences

EXPECTED_LAYOUT = "expected: the layout differs"
ALLOWED = "allowed"
RESUMED = "expected: a start of the run that resumed it"
# what says where a start of a run went on; where it did shows in weights, data position and samples
RESUME_OPTIONS = ("load", "critic_load", "ckpt_step", "start_rollout_id")
CODE = "code"


def compare_runs(
    a: Mapping[str, Any], b: Mapping[str, Any], *, allowed: Sequence[str] = ()
) -> list[RunDifference]:
    """Options, versions and the code hash that differ between two run records. `allowed`: patterns
    of names, as in "lr", "*_path", "versions.torch", "code", whose differences do not count.
    """
    found: list[RunDifference] = []
    options_a, options_b = _objects(a, "options"), _objects(b, "options")
    for name in sorted({*options_a, *options_b}):
        if not is_compared_option(name):
            continue
        one, other = (decode_values(side.get(name, ABSENT)) for side in (options_a, options_b))
        if not any(True for _ in json_differences(one, other, EXACT, Extent())):
            continue
        why = _why(name, allowed) or (EXPECTED_LAYOUT if is_layout_option(name) else "")
        found.append(RunDifference(DiffStage.OPTION, name, one, other, why))
    versions_a, versions_b = _objects(a, "versions"), _objects(b, "versions")
    for name in sorted({*versions_a, *versions_b}):
        sides = versions_a.get(name, ABSENT), versions_b.get(name, ABSENT)
        if sides[0] != sides[1]:
            full = f"versions.{name}"
            found.append(RunDifference(DiffStage.CODE, full, *sides, _why(full, allowed)))
    codes = a.get(CODE, ABSENT), b.get(CODE, ABSENT)
    if codes[0] != codes[1]:
        found.append(RunDifference(DiffStage.CODE, CODE, *codes, _why(CODE, allowed)))
    return found


def layout_differs(differences: Sequence[RunDifference]) -> bool:
    """Whether an option differs that decides on which ranks numbers are summed."""
    return any(one.stage is DiffStage.OPTION and is_layout_option(one.name) for one in differences)


def _why(name: str, allowed: Sequence[str]) -> str:
    words = (pattern.replace("-", "_").lstrip("_") for pattern in allowed)
    return ALLOWED if any(fnmatch.fnmatchcase(name, p) or p == "all" for p in words) else ""


def _objects(record: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = record.get(name)
    if not isinstance(value, Mapping):
        raise RolloutDataError(f"A run record has no {name!r}; it has {', '.join(record)}.")
    return value
