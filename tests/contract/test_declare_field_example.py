"""The documented way to add a field runs: the example, and the guide's code in the example's
place."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

NUM_GPUS = 0
ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "data_contract" / "declare_field.py"
GUIDE = ROOT / "docs" / "data_contract.md"
# the mean of 0..7, on one rank and on two
PRINTED = [f"dp {ranks}: rollout/answer_length = 3.5, rollout/surprise = 3.5" for ranks in (1, 2)]


def run_script(script):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=60, env=environment
    )


def test_the_example_logs_its_fields_equally_on_one_and_two_ranks():
    """Two declarations suffice for the example to log its fields, with the same numbers on one and
    on two ranks; they can be checked by hand."""
    done = run_script(EXAMPLE)
    assert done.stdout.splitlines() == PRINTED, done.stderr


def program_of_the_guide():
    """The example with its declarations replaced by the page's Python code."""
    blocks = re.findall(
        r"^```python\n(.*?)^```$", GUIDE.read_text(), flags=re.MULTILINE | re.DOTALL
    )
    head, _, rest = EXAMPLE.read_text().partition("# A number per sample")
    declarations, _, tail = rest.partition("def make_samples")
    assert (
        blocks and declarations.count("declare_field(") == 2 and "declare_field(" not in head + tail
    )
    return head, "\n".join(blocks), "def make_samples" + tail


def test_the_code_of_the_guide_is_what_its_example_prints(tmp_path):
    """The guide's code, pasted where the example declares its fields, gives the guide's result."""
    script = tmp_path / "guide.py"
    script.write_text("\n".join(program_of_the_guide()))
    done = run_script(script)
    assert done.stdout.splitlines() == PRINTED, done.stderr
    assert "examples/data_contract/declare_field.py" in GUIDE.read_text()


def test_the_numbers_come_from_the_declarations(tmp_path):
    """Without the guide's code the fields are unknown, so the test above cannot pass by itself."""
    head, _, tail = program_of_the_guide()
    script = tmp_path / "without.py"
    script.write_text(head + tail)
    done = run_script(script)
    assert done.returncode != 0 and "answer_length" in done.stderr


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
