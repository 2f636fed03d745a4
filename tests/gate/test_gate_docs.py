"""docs/gate.md states what the code does."""

import re
from pathlib import Path

import pytest

from slime.commands.gate import COMMANDS
from slime.config.gate import GateOptions
from slime.gate.config import NEVER_KEPT, QUALITY_CHECKS, REASONS

NUM_GPUS = 0
TEXT = (Path(__file__).resolve().parents[2] / "docs" / "gate.md").read_text(encoding="utf-8")


def test_every_reason_has_a_row_with_its_level_keepability_and_part_in_pass_at_k():
    """Every reason has a row in the guide with its level, whether it may be kept, and its part in
    pass@k."""
    rows = {
        row[0].strip("` "): [cell.strip(" *") for cell in row]
        for row in re.findall(r"^\| (`\w+`) \| (.+) \| (.+) \| (.+) \| (.+) \|$", TEXT, re.M)
    }
    for reason in REASONS:
        _, example, level, keep, pass_at_k = rows[reason.value]
        assert example and (level == "always") is (reason.value not in QUALITY_CHECKS), reason
        assert (keep in ("no", "never")) is (reason in NEVER_KEPT), reason
        assert (pass_at_k == "wrong") is reason.is_model_failure, reason


def test_the_symptom_of_wrong_groups_stands_beside_its_spot_check():
    """The guide tells in one paragraph what wrong groups look like and which command shows them,
    since training itself looks normal."""
    (paragraph,) = [part for part in TEXT.split("\n\n") if "Mixed groups" in part]
    words = " ".join(paragraph.split())
    assert "training runs, the loss is normal, the model slowly gets worse" in words
    assert "`slime gate groups DUMP`" in words and "`--against" in words and "spot check" in words
    assert "groups" in COMMANDS


def test_every_flag_and_command_in_the_text_exists():
    """Every flag and `slime gate` command in the guide exists, and the three first steps stand in
    order."""
    flags = set(re.findall(r"--(gate-[a-z-]+)", TEXT))
    assert (
        flags <= {name.replace("_", "-") for name in GateOptions.__dataclass_fields__}
        and len(flags) > 12
    )
    assert set(re.findall(r"slime gate (\w+)", TEXT)) <= set(COMMANDS)
    first = [TEXT.index(f"({step})") for step in (1, 2, 3)]
    assert first == sorted(first)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
