"""Compares what two runs were started with: options, versions, code."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from slime.config.yaml_file import DERIVED
from slime.exceptions import RolloutDataError
from slime.files.json_values import decode_values
from slime.harness.diff.results import RunDifference
from slime.harness.diff.stages import DiffStage, is_compared_option, is_layout_option
from slime.harness.diff.values import ABSENT, EXACT, Extent, json_differences
from slime.recording.reader import LARGEST_RUN_RECORD

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
    found = compare_options(a["options"], b["options"], allowed=allowed)
    versions_a, versions_b = a["versions"], b["versions"]
    for name in sorted({*versions_a, *versions_b}):
        sides = versions_a.get(name, ABSENT), versions_b.get(name, ABSENT)
        if sides[0] != sides[1]:
            full = f"versions.{name}"
            found.append(RunDifference(DiffStage.CODE, full, *sides, _why(full, allowed)))
    codes = a.get(CODE, ABSENT), b.get(CODE, ABSENT)
    if codes[0] != codes[1]:
        found.append(RunDifference(DiffStage.CODE, CODE, *codes, _why(CODE, allowed)))
    return found


def compare_options(
    a: Mapping[str, Any], b: Mapping[str, Any], *, allowed: Sequence[str] = ()
) -> list[RunDifference]:
    """The options that differ, by name."""
    found: list[RunDifference] = []
    for name in sorted({*a, *b}):
        if not is_compared_option(name):
            continue
        one, other = (decode_values(side.get(name, ABSENT)) for side in (a, b))
        if not any(True for _ in json_differences(one, other, EXACT, Extent())):
            continue
        why = _why(name, allowed) or (EXPECTED_LAYOUT if is_layout_option(name) else "")
        found.append(RunDifference(DiffStage.OPTION, name, one, other, why))
    return found


def read_config(path: Path) -> dict[str, Any]:
    """The options of a run's config.yaml, given and derived ones. `RolloutDataError` naming the
    file where it holds none.
    """
    try:
        if path.stat().st_size > LARGEST_RUN_RECORD:
            raise RolloutDataError(f"{path} has more than {LARGEST_RUN_RECORD} bytes.")
        content = yaml.safe_load(path.read_bytes())
    except (OSError, yaml.YAMLError, UnicodeError) as error:
        raise RolloutDataError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise RolloutDataError(f"{path} is no config.yaml of a run: it holds no options by name.")
    derived = content.pop(DERIVED, {})
    return {**content, **(derived if isinstance(derived, dict) else {})}


def layout_differs(differences: Sequence[RunDifference]) -> bool:
    """Whether an option differs that decides on which ranks numbers are summed."""
    return any(one.stage is DiffStage.OPTION and is_layout_option(one.name) for one in differences)


def _why(name: str, allowed: Sequence[str]) -> str:
    words = (pattern.replace("-", "_").lstrip("_") for pattern in allowed)
    return ALLOWED if any(fnmatch.fnmatchcase(name, p) or p == "all" for p in words) else ""
