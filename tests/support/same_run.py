"""What must be the same in a run that something happened to, and in one that nothing happened to."""

from __future__ import annotations

import collections
import contextlib
import io
import math
from pathlib import Path

from support import small_run

from slime.harness.diff.command import main as diff_main

# Figures of time, of a process's own, and of the healing.
OTHER = (
    "perf/",
    "gate/time/",
    "rollout/engines_restarted",
    "rollout/resampled_requests",
    "rollout/training_restarts",
    "rollout/manager_restarts",
    "eval/gate/time/",
)


def metrics_of(run_dir: Path) -> dict[tuple, object]:
    """{(axis, step, name): value} of everything that does not tell the time."""
    return {key: value for key, value in _logged(run_dir) if not key[2].startswith(OTHER)}


def _logged(run_dir: Path) -> list[tuple[tuple, object]]:
    return [
        ((record["step_key"], record["step"], name), value)
        for record in small_run.records(run_dir)
        if "step_key" in record
        for name, value in record["metrics"].items()
    ]


def differences(whole: Path, healed: Path) -> list[str]:
    """One sentence for each way in which metrics or dumps (dumps/ of the run folder) differ, or a
    value was logged twice.
    """
    found, expected = metrics_of(healed), metrics_of(whole)
    problems = [f"{key} is missing" for key in expected.keys() - found.keys()]
    problems += [f"{key} is one too many" for key in found.keys() - expected.keys()]
    problems += [
        f"{key}: {found[key]}, not {value}"
        for key, value in expected.items()
        if key in found
        and found[key] != value
        and not (isinstance(value, float) and math.isnan(value))
    ]
    counts = collections.Counter(key for key, _ in _logged(healed))
    problems += [f"{key} was logged {count} times" for key, count in counts.items() if count > 1]
    for kind in ("rollout_data", "train_data"):
        folders = [run / "dumps" / kind for run in (whole, healed)]
        names = [sorted(path.name for path in folder.iterdir()) for folder in folders]
        if names[0] != names[1]:
            problems.append(f"{kind} has {names[1]}, not {names[0]}")
            continue
        shown = io.StringIO()
        with contextlib.redirect_stdout(shown):
            is_same = diff_main(list(map(str, folders))) == 0
        problems += [] if is_same else [f"{kind} differs: {shown.getvalue()}"]
        if kind == "train_data":
            one, other = folders
            problems += [
                f"{name} has other bytes"
                for name in names[0]
                if (one / name).read_bytes() != (other / name).read_bytes()
            ]
    return problems
