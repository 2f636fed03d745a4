"""Plants faults in a copy of the repository and replays the golden run with each:
`python tools/mutants/golden.py`.

    python tools/mutants/golden.py                       # every fault (`make test-golden-faults`)
    python tools/mutants/golden.py golden-sum-in-bf16    # one fault
    python tools/mutants/golden.py --write               # also writes the table into docs/harness.md

The faults are those of golden.yaml. `slime golden check tests/golden/run` runs in a fork that
imports slime from the copy; every stage that needs no training on all rollouts, and training of
rollout 1 where the fault is one of training. A fault is right when the check ends with status 1 and
names a first cause in the stage that golden.yaml gives. Exit status 1 when one is not.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import json
import os
import shlex
import signal
import sys
import tempfile
import time
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent))

from run import ENVIRONMENT, UNDER_TEST, copy_repository  # noqa: E402
from table import ROOT, Fault, find_problems, read_faults  # noqa: E402

TABLE = Path(__file__).resolve().parent / "golden.yaml"
PAGE = "docs/harness.md"
RUN = "tests/golden/run"
BEGIN, END = "<!-- golden faults -->", "<!-- end of golden faults -->"
HEAVY = ("torch", "numpy", "ray", "transformers", "pyarrow.parquet", "yaml", "orjson")
TIMEOUT_S = 600.0
ROLLOUT = (
    "1"  # the one that is trained: it starts from an optimizer's state and two weight versions
)
KEYS = {"id", "about", "cause", "train", "options", "file", "old", "new"}


@dataclasses.dataclass(frozen=True)
class GoldenFault:
    """A fault, the stages that may be named as its first cause, and what must be trained."""

    fault: Fault
    about: str
    causes: tuple[str, ...]
    train: bool = False
    options: str = ""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What the check said. `cause` None: it found nothing; `stages`: the replay's stages that
    differ; `first`: the first difference.
    """

    golden: GoldenFault
    status: int
    cause: str | None
    stages: tuple[str, ...]
    first: str
    seconds: float

    @property
    def is_right(self) -> bool:
        """Whether the fault was caught and the first cause is in the right stage."""
        return self.status == 1 and self.cause in self.golden.causes


def read_golden_faults(path: Path = TABLE) -> list[GoldenFault]:
    """Every fault of golden.yaml; ValueError names what is missing or not known."""
    known = {fault.id: fault for fault in read_faults()}
    found = []
    for entry in yaml.safe_load(path.read_text(encoding="utf-8")):
        name = entry.get("id")
        wrong = sorted(set(entry) - KEYS)
        if wrong or not entry.get("about") or not entry.get("cause"):
            raise ValueError(f"{name}: not known {wrong}, or without about and cause")
        if "file" in entry:
            fault = Fault(
                id=name, area="golden", file=entry["file"], kind=entry["about"],
                old=entry["old"], new=entry["new"], tests=(),
            )  # fmt: skip
        elif name in known:
            fault = known[name]
        else:
            raise ValueError(f"{name} is no fault of faults/*.yaml, and has no file of its own")
        causes = entry["cause"] if isinstance(entry["cause"], list) else [entry["cause"]]
        options = str(entry.get("options", ""))
        train = bool(entry.get("train", False))
        found.append(GoldenFault(fault, entry["about"], tuple(causes), train, options))
    return found


def problems_of(faults: list[GoldenFault], root: Path = ROOT) -> list[str]:
    """A sentence per fault that cannot be planted."""
    return find_problems([golden.fault for golden in faults], root)


def plant_and_check(scratch: Path, golden: GoldenFault) -> Outcome:
    """The outcome of one fault; the scratch copy is as before afterwards."""
    path = scratch / golden.fault.file
    original, times = path.read_bytes(), path.stat()
    started = time.monotonic()
    try:
        path.write_text(golden.fault.apply(scratch), encoding="utf-8")
        # never taken for the compiled original
        os.utime(path, (times.st_atime, times.st_mtime + 7200))
        words = ["golden", "check", RUN, "--json"]
        if golden.train:
            words += ["--stage", "all", "--rollout", ROLLOUT, *shlex.split(golden.options)]
        status, text = check_in_fork(scratch, words)
    finally:
        path.write_bytes(original)
        os.utime(path, (times.st_atime, times.st_mtime))
    return outcome_of(golden, status, text, time.monotonic() - started)


def outcome_of(golden: GoldenFault, status: int, text: str, seconds: float) -> Outcome:
    """Reads the check's report, the last line that it printed."""
    lines = [line for line in text.splitlines() if line.strip()]
    try:
        report = json.loads(lines[-1])
    except (IndexError, json.JSONDecodeError):
        return Outcome(
            golden, status if status != 1 else 2, None, (), "\n".join(lines[-5:]), seconds
        )
    differing = [name for name, one in report["rollouts"].items() if not one["identical"]]
    stages = tuple(dict.fromkeys(name.split()[2] for name in differing))
    first = report["first_difference"]
    return Outcome(
        golden, status, report["first_cause"], stages, first["text"] if first else "", seconds
    )


def check_in_fork(scratch: Path, words: list[str]) -> tuple[int, str]:
    """(exit status, output) of `slime` with these words, in a fork that imports it from
    `scratch`; -1 after `TIMEOUT_S`.
    """
    log = scratch.with_suffix(".log")
    child = os.fork()
    if child == 0:
        status = 3
        try:
            os.setsid()
            status = _run_in_fork(scratch, words, log)
        except BaseException as error:  # noqa: BLE001 - the parent reads it in the log
            print(f"{type(error).__name__}: {error}", flush=True)
        finally:
            sys.stdout.flush()
            os._exit(status)
    deadline = time.monotonic() + TIMEOUT_S
    status = -1
    while time.monotonic() < deadline:
        finished, code = os.waitpid(child, os.WNOHANG)
        if finished:
            status = os.waitstatus_to_exitcode(code)
            break
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    if status == -1:
        os.waitpid(child, 0)
    return status, log.read_text(errors="replace")


def _run_in_fork(scratch: Path, words: list[str], log: Path) -> int:
    with log.open("w") as output:
        os.dup2(output.fileno(), 1)
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    os.chdir(scratch)
    sys.dont_write_bytecode = True
    os.environ.update(PYTHONDONTWRITEBYTECODE="1", PYTHONPATH=str(scratch))
    own = (ROOT, Path(__file__).resolve().parent)
    sys.path[:] = [str(scratch)] + [
        entry for entry in sys.path if entry and Path(entry).resolve() not in own
    ]
    for name in [name for name in sys.modules if name.split(".")[0] in UNDER_TEST]:
        del sys.modules[name]
    cli = importlib.import_module("slime.cli")
    assert str(cli.__file__).startswith(str(scratch)), f"slime was imported from {cli.__file__}"
    return cli.main(words)


def run_golden_faults(faults: list[GoldenFault]) -> list[Outcome]:
    """Every outcome; prints a line per fault as it ends. RuntimeError where the check fails without
    a fault.
    """
    os.environ.update(ENVIRONMENT)
    for name in HEAVY:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    with tempfile.TemporaryDirectory(prefix="slime-golden-", ignore_cleanup_errors=True) as folder:
        scratch = Path(folder) / "copy"
        scratch.mkdir()
        copy_repository(scratch)
        stages = ["--stage", "all"] if any(one.train for one in faults) else []
        status, text = check_in_fork(
            scratch, ["golden", "check", RUN, "--rollout", ROLLOUT, *stages]
        )
        if status != 0:
            raise RuntimeError(f"The golden run differs without a fault:\n{text}")
        outcomes = []
        for number, golden in enumerate(faults, 1):
            outcome = plant_and_check(scratch, golden)
            outcomes.append(outcome)
            mark = "" if outcome.is_right else "  <--"
            print(
                f"[{number}/{len(faults)}] {outcome.seconds:5.1f} s  {golden.fault.id}: "
                f"{outcome.cause or f'status {outcome.status}'} "
                f"({', '.join(outcome.stages) or 'nothing differs'}){mark}",
                flush=True,
            )
            if mark:
                print(f"      {outcome.first[:300]}", flush=True)
        return outcomes


def table_of(outcomes: list[Outcome]) -> str:
    """The outcomes in Markdown."""
    lines = ["| fault | planted in | caught by | first cause |", "|---|---|---|---|"]
    for one in outcomes:
        golden = one.golden
        file = golden.fault.file.removeprefix("slime/")
        options = f" with `{golden.options}`" if golden.options else ""
        caught = ", ".join(one.stages) or "not caught"
        wrong = "" if one.is_right else f" (wrong: expected {' or '.join(golden.causes)})"
        lines.append(
            f"| {golden.about} | `{file}` | {caught}{options} | {one.cause or 'none'}{wrong} |"
        )
    right = sum(one.is_right for one in outcomes)
    caught = sum(one.status == 1 for one in outcomes)
    lines += [
        "",
        f"{caught} of {len(outcomes)} are caught; {right} with the first cause in the right stage.",
    ]
    return "\n".join(lines)


def write_table(outcomes: list[Outcome], page: Path) -> None:
    """Puts the table between its marks in the page."""
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"{page} has no {BEGIN} ... {END}")
    page.write_text(f"{before}{BEGIN}\n{table_of(outcomes)}\n{END}{after}", encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="Ids of faults; default: all.")
    parser.add_argument("--write", action="store_true", help=f"Write the table into {PAGE}.")
    options = parser.parse_args(argv)
    faults = read_golden_faults()
    problems = problems_of(faults)
    ids = {golden.fault.id for golden in faults}
    problems += [f"no fault is called {name}" for name in options.names if name not in ids]
    if problems:
        print(*problems, sep="\n", file=sys.stderr)
        return 2
    chosen = [one for one in faults if not options.names or one.fault.id in options.names]
    outcomes = run_golden_faults(chosen)
    wrong = [one.golden.fault.id for one in outcomes if not one.is_right]
    print(f"{len(outcomes) - len(wrong)} of {len(outcomes)} are caught with the right first cause")
    if options.write:
        write_table(outcomes, ROOT / PAGE)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
