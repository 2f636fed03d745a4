"""No code of slime/ is there for its tests alone, or for nothing: `tools/unused_names.py` finds it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pytest

from tools.unused_names import check_repository, scan, unused

NUM_GPUS = 0

SOURCE = '''
"""A docstring that says alone, chained and mentioned."""
import dataclasses
from slime.other import helper as other_name, imported_only

USED = 1
UNUSED = 2
ONE, OF_TWO = 1, 2

def alone():
    return alone()

def chained():
    return 1

def chain():
    return chained()

def by_name(): ...
def by_path(): ...
def in_page(): ...
def mentioned(): ...
def documented(): ...
def local(): ...

@register
def registered():
    text = "mentioned in a sentence"
    return text, USED, BY_NAME["x"], Shape().area

BY_NAME = {"x": "by_name", "y": "slime.module.by_path"}
__all__ = ["alone"]

@dataclasses.dataclass
class Shape:
    def __len__(self): ...
    @property
    def area(self): ...
    def perimeter(self): ...

class Gone:
    def inside(self): ...
'''


@pytest.fixture
def root(tmp_path):
    files = {
        "slime/module.py": SOURCE,
        "slime/other.py": "def helper():\n    local = 1\n    return local\ndef imported_only(): ...\n",
        "tests/test_module.py": "from slime.module import alone\nalone()\n",
        "docs/page.md": "Call `in_page()`; documented is only a word here.\n",
        "tools/interface/table.jsonl": '{"kind": "name", "name": "slime.module.documented"}\n',
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def names(found):
    return [defined.place.split("::")[1] for defined in found]


def test_what_only_tests_or_unused_code_use_is_found(root):
    """Recursion, an import, a docstring, a local variable of the name and a word of a sentence are no use; a table that holds the name is."""
    expected = [
        "Gone",
        "Shape.perimeter",
        "UNUSED",
        "alone",
        "chain",
        "chained",
        "local",
        "mentioned",
    ]
    assert names(unused(scan(root))) == [*expected, "imported_only"]


def test_what_excused_code_uses_is_used(root):
    """Else each exception would need others for everything below it."""
    assert "chained" not in names(unused(scan(root), excused=["slime/module.py::chain"]))


def test_an_exception_that_excuses_nothing_is_named(root):
    """The list holds only what is true."""
    problems = check_repository(
        root,
        exceptions=(
            ("slime/module.py::*", "for the test"),
            ("slime/module.py::by_name", "is used"),
        ),
    )
    assert problems == [
        "slime/other.py::imported_only (1 lines): nothing but tests uses it. Delete it, or give the reason in EXCEPTIONS.",
        "slime/module.py::by_name: excuses nothing; remove the line",
    ]


def test_nothing_in_the_repository_is_unused():
    """A function that only its tests call is kept alive by them and misleads its reader."""
    assert check_repository() == []


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
