"""The tolerances and time limits that commands of the harness are given."""

from __future__ import annotations

import argparse
import math

from slime.exceptions import ConfigError
from slime.harness.diff.values import Tolerance


def tolerance_of(options: argparse.Namespace) -> Tolerance | None:
    """--rtol and --atol; None where neither is given. `ConfigError` for what is no tolerance."""
    given = {name: getattr(options, name, None) for name in ("rtol", "atol")}
    for name, value in given.items():
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise ConfigError(f"--{name} {value} must be a finite number of at least 0, as 1e-5.")
    if all(value is None for value in given.values()):
        return None
    return Tolerance(given["rtol"] or 0.0, given["atol"] or 0.0)


def timeout_of(options: argparse.Namespace) -> float:
    """--timeout in seconds. `ConfigError` for what is none."""
    value = float(options.timeout)
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(f"--timeout {value} must be a finite number above 0, as 600.")
    return value
