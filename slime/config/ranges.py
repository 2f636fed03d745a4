"""Finds numbers outside the range that their option states (`option(minimum=, above=, ...)`).

range_problems(args)     {"lr": "--lr must be >= 0, it is -1.0. Use 1e-06."}
"""

from __future__ import annotations

import argparse
from typing import Any

from slime.config.option import OptionSpec, flag_of
from slime.config.specs import specs_by_name


def range_problems(args: argparse.Namespace) -> dict[str, str]:
    """Returns a sentence per option of `args` whose value is out of its range, by name: the flag, the
    range, the value, and one that works.
    """
    problems = {}
    for spec in specs_by_name().values():
        if spec.range is not None and hasattr(args, spec.name):
            problem = range_problem(spec, getattr(args, spec.name))
            if problem is not None:
                problems[spec.name] = f"{flag_of(spec.name)} {problem}"
    return problems


def range_problem(spec: OptionSpec, value: Any) -> str | None:
    """What is wrong with `value` of this option: "must be > 0, it is -1.0. Use 1.0."; None where it
    holds, and where it is no number: types are checked elsewhere.
    """
    if spec.range is None:
        return None
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, int | float) and not isinstance(item, bool):
            if not spec.range.holds(item):
                return _sentence(spec, item)
    return None


def _sentence(spec: OptionSpec, value: float) -> str:
    assert spec.range is not None
    note = f": {spec.range.note}" if spec.range.note else ""
    works = spec.default if isinstance(spec.default, int | float) else spec.range.nearest(value)
    use = "" if works is None else f" Use {spec.kind(works)}."
    return f"must be {spec.range.requirement(value)}, it is {value}{note}.{use}"
