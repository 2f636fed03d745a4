"""The documented way to add a field is run, not only written."""

import subprocess
import sys
from pathlib import Path

import pytest

NUM_GPUS = 0
ROOT = Path(__file__).resolve().parents[2]


def test_the_example_logs_its_fields_equally_on_one_and_two_ranks():
    """B30: two declarations are all it takes; the numbers can be checked by hand: the mean of 0..7."""
    script = ROOT / "examples" / "data_contract" / "declare_field.py"
    out = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True, timeout=60).stdout
    line = "rollout/answer_length = 3.5, rollout/surprise = 3.5"
    assert out.splitlines() == [f"dp 1: {line}", f"dp 2: {line}"]


def test_the_guide_shows_what_the_example_runs():
    """A guide that drifts from the code teaches errors."""
    guide = (ROOT / "docs" / "data_contract.md").read_text()
    for text in (
        'source="metadata.answer_length", wire_dtype="int32"',
        'source="metadata.surprise"',
        "examples/data_contract/declare_field.py",
    ):
        assert text in guide
    assert (
        'source="metadata.answer_length", wire_dtype="int32"'
        in (ROOT / "examples" / "data_contract" / "declare_field.py").read_text()
    )


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
