"""docs/requirements.md: every id stands once, what holds it exists, and nothing else in the
repository uses an id.

The tests that are named are looked up in the syntax tree: nothing is imported or run.
"""

import ast
import difflib
import re
from pathlib import Path

import pytest

NUM_GPUS = 0

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "requirements.md"
NOT_YET = "not yet"
ID = re.compile(r"(?<![A-Za-z0-9])(?:A\d{2,3}|B\d{2})(?![A-Za-z0-9])")
NO_IDS = {"A100"}  # outside the page this is the name of a GPU
FOLDERS = ("slime", "tests", "tools", "docs", "examples", ".github")
TEXT_FILES = {".py", ".md", ".yaml", ".yml", ".j2", ".toml"}


def rows_of(page: str) -> list[tuple[str, str, list[str]]]:
    """Returns (id, requirement, entries of "held by") for every row of the page's tables."""
    rows = []
    for line in page.splitlines():
        cells = [
            cell.strip() for cell in line.strip().removeprefix("|").removesuffix("|").split("|")
        ]
        if line.startswith("|") and cells[0] != "id" and set(line) - set("|- "):
            rows.append(
                (cells[0], cells[1], [entry.strip(" `") for entry in cells[-1].split("<br>")])
            )
    return rows


def named_tests(source: str) -> set[str]:
    """Returns the tests of a file as pytest names them: "test_x", "TestClass::test_x"; a
    parametrized test by its function's name.
    """
    names = set()
    for node in ast.parse(source).body:
        members = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
        functions = (
            member
            for member in members
            if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef)
        )
        names |= {
            prefix + function.name for function in functions if function.name.startswith("test_")
        }
    return names


def problem_of_entry(entry: str, root: Path = ROOT) -> str | None:
    """Returns why nothing can be held by `entry`, a test ("tests/a/test_b.py::test_c"), a file or
    "not yet"; None for a good one.
    """
    if entry == NOT_YET:
        return None
    path, _, test = entry.partition("::")
    if not path or not (root / path).is_file():
        return f"there is no file {path!r}"
    if not test:
        return (
            f"{path} is a test file: name the test" if Path(path).name.startswith("test_") else None
        )
    tests = named_tests((root / path).read_text(encoding="utf-8"))
    if test in tests:
        return None
    closest = difflib.get_close_matches(test, tests, n=1)
    return f"{path} has no test {test!r}" + (f"; {closest[0]!r} comes closest" if closest else "")


def problems_of_page(page: str, root: Path = ROOT) -> list[str]:
    """Returns one sentence per row of the page that is wrong; an empty list for a good page."""
    problems, seen = [], set()
    for identifier, requirement, entries in rows_of(page):
        if not ID.fullmatch(identifier):
            problems.append(f"{identifier!r} is no id")
        if identifier in seen:
            problems.append(f"{identifier} stands twice")
        seen.add(identifier)
        if not requirement.endswith("."):
            problems.append(f"{identifier}: the requirement is no sentence")
        if len(entries) != len(set(entries)) or (NOT_YET in entries and len(entries) > 1):
            problems.append(
                f"{identifier}: the same entry twice, or {NOT_YET!r} beside another one"
            )
        found = (problem_of_entry(entry, root) for entry in entries)
        problems += [f"{identifier}: {problem}" for problem in found if problem]
    return problems


def ids_in(text: str) -> set[str]:
    """Returns what a text that is not the page says with an id. Codes of ruff behind `# noqa:` are
    none.
    """
    return set(ID.findall(re.sub(r"# noqa:.*", "", text))) - NO_IDS


def test_every_id_stands_once_with_what_holds_it():
    """A row whose test was renamed or removed fails here, with the name that comes closest."""
    page = PAGE.read_text(encoding="utf-8")
    assert problems_of_page(page) == []
    ids = [identifier for identifier, _, _ in rows_of(page)]
    numbers = {group: [int(i[1:]) for i in ids if i[0] == group] for group in "AB"}
    assert all(found == list(range(1, len(found) + 1)) for found in numbers.values()), (
        "an id is missing or out of order"
    )
    assert min(map(len, numbers.values())) > 0


def test_no_file_but_the_page_uses_an_id():
    """Code, tests and other documents state behaviour as sentences, without an id to look up."""
    files = [*ROOT.iterdir(), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*"))]
    texts = [path for path in files if path.suffix in TEXT_FILES and path != PAGE] + [
        ROOT / "Makefile"
    ]
    used = {
        path.relative_to(ROOT).as_posix(): ids_in(path.read_text(encoding="utf-8"))
        for path in texts
    }
    assert len(used) > 300, "the folders above are those of the repository"
    assert {path: ids for path, ids in used.items() if ids} == {}


@pytest.fixture
def checkout(tmp_path):
    """A folder with one test file: a function, a parametrized function and a class with a test and
    a helper.
    """
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").write_text(
        "import pytest\n\n\n@pytest.mark.parametrize('x', [1])\ndef test_plain(x):\n    pass\n\n\n"
        "async def test_other():\n    pass\n\n\nclass TestAll:\n    def test_inside(self):\n        pass\n\n    def helper(self):\n        pass\n"
    )
    (tmp_path / "guide.md").write_text("text")
    return tmp_path


@pytest.mark.parametrize(
    ("row", "told"),
    [
        (
            (
                "| {0}01 | It works. | "
                "`tests/test_a.py::test_plain`<br>`tests/test_a.py::TestAll::test_inside`<br>`guide.md` |"
            ),
            None,
        ),
        (
            (
                "| {0}01 | It works. | `tests/test_a.py::test_other` |\n| {0}02 | It works. | not "
                "yet "
                "|"
            ),
            None,
        ),
        (
            "| {0}01 | It works. | `tests/test_a.py::test_plane` |",
            "has no test 'test_plane'; 'test_plain' comes closest",
        ),
        ("| {0}01 | It works. | `tests/test_a.py::test_inside` |", "has no test 'test_inside'"),
        ("| {0}01 | It works. | `tests/test_a.py::TestAll::helper` |", "has no test"),
        (
            "| {0}01 | It works. | `tests/test_b.py::test_plain` |",
            "there is no file 'tests/test_b.py'",
        ),
        ("| {0}01 | It works. | `tests/test_a.py` |", "name the test"),
        ("| {0}01 | It works. | |", "there is no file ''"),
        ("| {0}01 | It works. | not yet<br>`guide.md` |", "beside another one"),
        ("| {0}01 | It works. | `guide.md` |\n| {0}01 | Again. | `guide.md` |", "stands twice"),
        ("| {0}01 | works | `guide.md` |", "no sentence"),
        ("| C1 | It works. | `guide.md` |", "no id"),
    ],
)
def test_a_row_that_is_wrong_is_found(checkout, row, told):
    """The check itself, on rows with one fault each."""
    problems = problems_of_page(
        "| id | requirement | held by |\n|---|---|---|\n" + row.format("A"), checkout
    )
    assert problems == [] if told is None else len(problems) == 1 and told in problems[0]


def test_an_id_in_a_text_is_found_and_other_codes_are_not():
    """An id is a letter and its number; a GPU, a rule of ruff and a part of a longer
    word are none.
    """
    one, other = "A" + "41", "B" + "24"
    assert ids_in(f'"""{one}, {other}: a sentence."""\n# ({one})') == {one, other}
    assert ids_in(f"8 A100 GPUs, x{one}, {one}b, UTF-8  # noqa: {other}, B027") == set()


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
