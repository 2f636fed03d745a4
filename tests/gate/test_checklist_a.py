"""Every line of the checklist, A01-A113 of the gate and B01-B32 of the data contract, is named by a test."""

import ast
import re
from pathlib import Path

import pytest

NUM_GPUS = 0
TESTS = Path(__file__).resolve().parent.parent
NUM_LINES = {"A": 113, "B": 32}


def lines_named_by_tests() -> dict[str, list[str]]:
    """{"A01": [test names]} from the first docstring line of every test function under tests/; "B01" alike."""
    named: dict[str, list[str]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                for part, number in re.findall(r"\b([AB])(\d{2,3})\b", (ast.get_docstring(node) or "").split("\n")[0]):
                    named.setdefault(f"{part}{int(number):02d}", []).append(node.name)
    return named


def test_every_line_of_the_checklist_has_a_test_that_names_it():
    """A requirement without a test is a wish."""
    named = lines_named_by_tests()
    wanted = [f"{part}{number:02d}" for part, count in NUM_LINES.items() for number in range(1, count + 1)]
    assert [line for line in wanted if line not in named] == []
    assert sorted(set(named) - set(wanted)) == []


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
