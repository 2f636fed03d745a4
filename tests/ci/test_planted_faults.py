"""The table of planted faults can be planted, covers every part of the code, and its runner tells a
killed fault from a survivor.
"""

import dataclasses
import importlib.util
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

NUM_GPUS = 0

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ROOT / "tools" / "mutants"


def load(name):
    spec = importlib.util.spec_from_file_location(f"mutants_{name}", TOOLS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


table, run = load("table"), load("run")

MINIMUM_TOTAL = 300
MINIMUM_BY_AREA = {
    "algorithms": 40,
    "checkpoint": 30,
    "engine": 60,
    "gate": 40,
    "layout": 40,
    "metrics": 25,
    "models": 10,
    "rewards": 15,
    "rollout": 25,
    "schedule": 30,
    "split": 40,
    "tools": 20,
    "trackers": 10,
    "training": 30,
    "weights": 25,
    "view": 15,
}


def fault(**changes):
    values = {
        "id": "part-a",
        "area": "part",
        "file": "slime/part.py",
        "kind": "off by one",
        "old": "n + 1",
        "new": "n",
        "tests": ("tests/test_part.py",),
    }
    return table.Fault(**{**values, **changes})


@pytest.fixture
def small(tmp_path):
    """A repository with one function and two tests of it, of which one looks."""
    (tmp_path / "slime").mkdir()
    (tmp_path / "tests").mkdir()
    (tmp_path / "slime" / "part.py").write_text("def following(n):\n    return n + 1\n")
    (tmp_path / "tests" / "test_part.py").write_text(
        "from slime.part import following\n\n\ndef test_looks():\n    assert following(1) == "
        "2\n\n\ndef test_does_not():\n    following(1)\n"
    )
    return tmp_path


def test_every_fault_can_be_planted():
    """Every fault of the table can be planted: its old text is in the code once, its tests exist,
    its id is unique."""
    assert table.find_problems(table.read_faults()) == []


def test_every_part_of_the_code_has_its_share_of_faults():
    """Each part of the code has at least its minimum of planted faults."""
    counts = Counter(fault.area for fault in table.read_faults())
    assert {
        area: counts[area] for area in MINIMUM_BY_AREA if counts[area] < MINIMUM_BY_AREA[area]
    } == {}
    assert set(counts) == set(MINIMUM_BY_AREA) and counts.total() >= MINIMUM_TOTAL


def test_at_most_three_percent_of_the_faults_are_explained_away():
    """At most three percent of the faults are marked equivalent, each with the reason why no test
    can notice it."""
    faults = table.read_faults()
    explained = [fault for fault in faults if fault.equivalent]
    assert all(len(fault.equivalent.split()) >= 5 for fault in explained)
    assert len(explained) <= 0.03 * len(faults)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"old": "n + 2"}, "'n + 2' occurs 0 times in slime/part.py, not once"),
        ({"old": "n", "new": "m"}, "'n' occurs 4 times in slime/part.py, not once"),
        ({"new": "n + 1"}, "part-a changes nothing"),
        ({"file": "slime/gone.py"}, "slime/gone.py is not there"),
        ({"tests": ("tests/test_gone.py",)}, "tests/test_gone.py is not there"),
        ({"tests": ("tests/test_part.py::test_sees",)}, "tests/test_part.py has no test_sees"),
        ({"area": "whole"}, "its id must start with whole-"),
    ],
)
def test_a_fault_that_cannot_be_planted_is_named(small, changes, said):
    """Each kind of broken entry is reported as its one problem."""
    assert table.find_problems([fault()], small) == []
    (problem,) = table.find_problems([fault(**changes)], small)
    assert said in problem


def test_an_entry_with_a_field_too_few_or_too_many_is_refused():
    """An entry with a missing or unknown field is refused; a misspelt `equivalent` would turn a
    survivor into a failure."""
    entry = {"id": "a-b", "file": "f", "kind": "k", "old": "o", "new": "n", "tests": "t"}
    assert table.read_fault("a", entry).tests == ("t",)
    with pytest.raises(ValueError, match=r"missing \['kind'\]"):
        table.read_fault("a", {**entry, "kind": None})
    with pytest.raises(ValueError, match=r"not known \['equivalant'\]"):
        table.read_fault("a", {**entry, "equivalant": "x"})


# The runner forks, so it has a process of its own, in which no library has threads yet.
PLANT = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import run, table
for words in json.loads(sys.argv[3]):
    planted = table.Fault(**{**words, "tests": tuple(words["tests"])})
    print(run.plant_and_run(Path(sys.argv[2]), planted, timeout=60).verdict)
"""


def test_a_fault_is_killed_by_a_test_that_looks_and_survives_one_that_does_not(small):
    """A test that asserts the value kills the fault, one that does not lets it survive, a test that
    is not there is an error, and the copy is restored for the next fault."""
    before = (small / "slime" / "part.py").read_text()
    names = ("test_looks", "test_does_not", "test_of_another_name")
    faults = [fault(tests=(f"tests/test_part.py::{name}",)) for name in names]
    faults.append(fault(new="n + following(n)", tests=("tests/test_part.py::test_looks",)))
    text = json.dumps([dataclasses.asdict(one) for one in faults])
    done = subprocess.run(
        [sys.executable, "-c", PLANT, str(TOOLS), str(small), text],
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.stdout.split() == ["killed", "survived", "broken", "killed"], done.stderr
    assert (small / "slime" / "part.py").read_text() == before


def test_a_test_that_fails_anyway_kills_nothing():
    """A test that fails without the fault does not count as killing it."""
    planted = fault(tests=("tests/test_part.py", "tests/test_red.py::test_red"))
    baseline = run.Baseline(failed={"tests/test_red.py": "FAILED tests/test_red.py::test_red"})
    details = {
        "FAILED tests/test_part.py::test_looks": "killed",
        "FAILED tests/test_red.py::test_red": "broken",
        "time-out": "broken",
    }
    assert {
        detail: baseline.judge(run.Outcome(planted, "killed", 0.0, detail)).verdict
        for detail in details
    } == details
    assert baseline.judge(run.Outcome(planted, "survived", 0.0, "")).verdict == "survived"
    assert run.Baseline().judge(run.Outcome(planted, "killed", 0.0, "time-out")).verdict == "killed"


def test_a_survivor_is_right_only_where_the_table_explains_it():
    """A survivor needs an explanation in the table, and an explained fault that is killed is a
    problem too."""
    explained = fault(equivalent="nothing reads it")
    outcomes = {
        (f.equivalent, v): run.Outcome(f, v, 0.0, "").is_right
        for f in (fault(), explained)
        for v in ("killed", "survived", "broken")
    }
    assert {key for key, right in outcomes.items() if right} == {
        (None, "killed"),
        ("nothing reads it", "survived"),
    }


def test_a_sample_is_the_same_for_the_same_seed_and_names_are_checked():
    """The same seed draws the same faults, and an unknown name is refused."""
    faults = [fault(id=f"part-{i}") for i in range(50)] + [fault(id="other-0", area="other")]
    first = run.select(faults, [], sample=30, seed=0)
    assert (
        first
        == run.select(faults, [], sample=30, seed=0)
        != run.select(faults, [], sample=30, seed=1)
    )
    assert len({fault.id for fault in first}) == 30
    assert [fault.id for fault in run.select(faults, ["other", "part-7"], sample=None, seed=0)] == [
        "part-7",
        "other-0",
    ]
    with pytest.raises(ValueError, match="no area and no fault is called part-99"):
        run.select(faults, ["part-99"], sample=None, seed=0)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
