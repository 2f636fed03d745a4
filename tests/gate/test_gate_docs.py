"""docs/gate.md states what the code does."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import generate_docs  # noqa: E402

from slime.commands.gate import COMMANDS  # noqa: E402
from slime.config.gate import GateOptions  # noqa: E402
from slime.data.reasons import DropReason, InvalidReason  # noqa: E402

NUM_GPUS = 0
TEXT = (ROOT / "docs" / "gate.md").read_text(encoding="utf-8")


def test_the_tables_of_reasons_are_current(capsys):
    """The committed tables are what slime/data/reasons.py says, and every reason has its row."""
    assert generate_docs.main(["gate", "--check"]) == 0, capsys.readouterr().err
    for reason in (*InvalidReason, *DropReason):
        assert len(re.findall(rf"^\| `{reason.value}` \|", TEXT, re.M)) == 1, reason


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
