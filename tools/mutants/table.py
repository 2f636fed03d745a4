"""The table of planted faults: `faults/<area>.yaml`, one entry per fault, read and checked here.

- id: schedule-drops-last-step          # unique, starts with the name of its area's file
  file: slime/data/schedule.py
  kind: off by one                      # what sort of slip it is
  old: for step in range(num_steps)     # occurs exactly once in the file
  new: for step in range(num_steps - 1)
  tests: tests/contract/test_dp_schedule.py::test_every_sample_is_in_one_step   # one or a list:
                                                                                pytest files or
                                                                                node ids
  equivalent: why no test can see it # only where the fault changes nothing that can be observed
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
FAULTS = Path(__file__).resolve().parent / "faults"
REQUIRED = ("id", "file", "kind", "old", "new", "tests")


@dataclasses.dataclass(frozen=True)
class Fault:
    """One change of one line, and the tests that must notice it."""

    id: str
    area: str
    file: str
    kind: str
    old: str
    new: str
    tests: tuple[str, ...]
    equivalent: str | None = None

    def apply(self, root: Path = ROOT) -> str:
        """Returns the file's text with the fault in it; ValueError when the old text does not occur
        exactly once.
        """
        text = (root / self.file).read_text(encoding="utf-8")
        if (count := text.count(self.old)) != 1:
            raise ValueError(
                f"{self.id}: {self.old!r} occurs {count} times in {self.file}, not once"
            )
        return text.replace(self.old, self.new)


def read_fault(area: str, entry: dict[str, object]) -> Fault:
    """Returns the entry as a Fault; ValueError names what is missing or not known."""
    fields = {field.name for field in dataclasses.fields(Fault)} - {"area"}
    missing = [name for name in REQUIRED if entry.get(name) is None]
    unknown = sorted(set(entry) - fields)
    if missing or unknown:
        raise ValueError(
            f"{area}.yaml, {entry.get('id', entry)}: missing {missing}, not known {unknown}"
        )
    tests = entry["tests"]
    listed = tuple(tests) if isinstance(tests, list) else (str(tests),)
    texts = {name: str(value) for name, value in entry.items() if name != "tests"}
    return Fault(area=area, tests=listed, **texts)  # type: ignore[arg-type]


def read_faults(folder: Path = FAULTS) -> list[Fault]:
    """Returns every fault of the table, by area in the order of its file."""
    faults = []
    for path in sorted(folder.glob("*.yaml")):
        entries = yaml.safe_load(path.read_text(encoding="utf-8")) or []
        faults += [read_fault(path.stem, entry) for entry in entries]
    return faults


def find_problems(faults: list[Fault], root: Path = ROOT) -> list[str]:
    """Returns a sentence per fault that cannot be planted: text not there once, no such test file,
    id taken or foreign, no change of one line.
    """
    problems, seen = [], set[str]()
    for fault in faults:
        if fault.id in seen:
            problems.append(f"{fault.id} is there twice")
        seen.add(fault.id)
        if not fault.id.startswith(f"{fault.area}-"):
            problems.append(
                f"{fault.id} is in {fault.area}.yaml; its id must start with {fault.area}-"
            )
        if fault.old == fault.new:
            problems.append(f"{fault.id} changes nothing")
        if not (root / fault.file).is_file():
            problems.append(f"{fault.id}: {fault.file} is not there")
            continue
        try:
            fault.apply(root)
        except ValueError as error:
            problems.append(str(error))
        for test in fault.tests:
            path, *names = test.split("::")
            name = names[-1].split("[")[0] if names else None
            if not (root / path).is_file():
                problems.append(f"{fault.id}: {path} is not there")
            elif name and f"def {name}(" not in (root / path).read_text(encoding="utf-8"):
                problems.append(f"{fault.id}: {path} has no {name}")
    return problems
