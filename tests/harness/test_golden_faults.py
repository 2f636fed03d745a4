"""The faults that the golden run must catch: each line still exists, and some are planted for real;
`python tools/mutants/golden.py` plants all of them.
"""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pytest

from slime.harness.diff.stages import LABELS

NUM_GPUS = 0

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "mutants" / "golden.py"


def load_tool():
    spec = importlib.util.spec_from_file_location("golden_faults", TOOL)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


tool = load_tool()


def test_every_fault_can_be_planted():
    """The old text of every fault is in the code once, and every expected cause is a stage of
    `slime diff`."""
    faults = tool.read_golden_faults()
    assert tool.problems_of(faults) == []
    assert len({one.fault.id for one in faults}) == len(faults) >= 30
    assert {cause for one in faults for cause in one.causes} <= set(LABELS.values())


def test_every_stage_of_the_data_has_faults():
    """Nothing is said about a stage for which no fault was tried."""
    causes = {one.causes[0] for one in tool.read_golden_faults()}
    assert {"verdict", "reward", "baseline", "mask or column", "schedule", "metric",
            "arrival on the ranks", "log-prob", "value or advantage",
            "loss or gradient norm"} <= causes  # fmt: skip


def test_a_fault_that_moved_is_named(tmp_path):
    """A line that was changed is reported with its fault's id, before anything runs."""
    path = tmp_path / "golden.yaml"
    entry = {"id": "golden-x", "about": "a", "cause": "verdict", "file": "slime/train.py"}
    path.write_text(json.dumps([{**entry, "old": "no such text", "new": "b"}]))
    (problem,) = tool.problems_of(tool.read_golden_faults(path))
    assert "golden-x" in problem and "occurs 0 times" in problem
    path.write_text(json.dumps([{**entry, "cuase": "verdict"}]))
    with pytest.raises(ValueError, match="cuase"):
        tool.read_golden_faults(path)
    path.write_text(json.dumps([{"id": "golden-y", "about": "a", "cause": "verdict"}]))
    with pytest.raises(ValueError, match="golden-y is no fault"):
        tool.read_golden_faults(path)


def test_the_page_shows_every_fault():
    """docs/harness.md has the outcome of each, as the tool wrote it."""
    page = (ROOT / tool.PAGE).read_text()
    table = page[page.index(tool.BEGIN) : page.index(tool.END)]
    faults = tool.read_golden_faults()
    assert table.count("\n| ") == len(faults) + 1
    assert all(f"| {one.about} |" in table for one in faults)
    assert "not caught" not in table and "(wrong: " not in table


@pytest.mark.timeout(300)
def test_faults_are_caught_with_the_right_first_cause():
    """A baseline with another member, a schedule with local indices for global ones, and a gate
    with another reason: each is found, in its stage, and the copy is whole again after it. The tool
    forks, so it has a process of its own."""
    causes = {
        "golden-reasons-swapped": "verdict",
        "rewards-std-of-the-population": "baseline",
        "split-partition-of-candidates": "schedule",
    }
    done = subprocess.run(
        [sys.executable, str(TOOL), *causes], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("3 of 3 are caught with the right first cause\n")
    for name, cause in causes.items():
        assert re.search(rf" {name}: {cause} \(", done.stdout), done.stdout


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
