"""Plants each fault of the table in a copy of the repository and runs the tests that concern it:
`python tools/mutants/run.py`.

    python tools/mutants/run.py                          # every fault (`make test-mutants`)
    python tools/mutants/run.py engine gate-keeps-empty  # the faults of an area, one fault
    python tools/mutants/run.py --sample 30              # 30 of them, the same for the same --seed
                                                         (the job in CI)
    python tools/mutants/run.py --list

A fault is killed when one of its tests fails, and survives when all pass. The heavy libraries are
imported once; each fault gets a fork of that process, which imports slime and the tests from a
scratch copy of the repository with the fault in it. The working tree is never touched. First every
test is run without a fault: a test that fails by itself can notice nothing. Exit status 1 when a
fault survives that the table does not explain, when an explained one is killed, or when a test
fails without a fault.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import dataclasses
import importlib
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from table import ROOT, Fault, find_problems, read_faults  # noqa: E402

HEAVY = (
    "torch",
    "numpy",
    "ray",
    "transformers",
    "hypothesis",
    "yaml",
    "orjson",
    "safetensors.torch",
    "aiohttp",
)
HEAVY += (
    "_pytest.assertion.rewrite",
    "megatron.core.parallel_state",
    "megatron.core.models.gpt",
    "megatron.core.optimizer",
)
UNDER_TEST = ("slime", "support", "examples", "tools", "conftest")
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
PASSED, FAILED, COLLECTION_FAILED, TIMED_OUT = 0, 1, 2, -1


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What the tests said about one fault: `verdict` is killed, survived or broken (its tests could
    not be run, or fail without it too).
    """

    fault: Fault
    verdict: str
    seconds: float
    detail: str

    @property
    def is_right(self) -> bool:
        """Whether the verdict is what the table says."""
        return self.verdict == ("survived" if self.fault.equivalent else "killed")


def copy_repository(target: Path, root: Path = ROOT) -> None:
    """Copies what git tracks or would track; builds, runs and caches stay behind."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = (
        subprocess.run(command, cwd=root, capture_output=True, check=True)
        .stdout.decode()
        .split("\0")
    )
    for name in filter(None, names):
        if (root / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, target / name)


def import_heavy_libraries() -> None:
    """Imports what is slow and not under test, so that a fork has it. slime is imported by each
    fork, from its copy.
    """
    os.environ.update(ENVIRONMENT)
    for name in HEAVY:
        with contextlib.suppress(ImportError):  # a test that needs it says so better
            importlib.import_module(name)


def run_tests(
    scratch: Path,
    tests: tuple[str, ...],
    log: Path,
    *,
    timeout: float,
    write_bytecode: bool = False,
) -> int:
    """Returns pytest's exit status for these tests in a fork that imports the repository from
    `scratch`; TIMED_OUT after `timeout` seconds.
    """
    child = os.fork()
    if child == 0:
        status = 3
        try:
            os.setsid()
            status = _run_in_fork(scratch, tests, log, write_bytecode=write_bytecode)
        finally:
            os._exit(status)
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        finished, status = os.waitpid(child, os.WNOHANG)
        if finished:
            _kill_group(child)
            return os.waitstatus_to_exitcode(status) if not os.WIFSIGNALED(status) else FAILED
        time.sleep(0.02)
    _kill_group(child)
    os.waitpid(child, 0)
    return TIMED_OUT


def _run_in_fork(scratch: Path, tests: tuple[str, ...], log: Path, *, write_bytecode: bool) -> int:
    with log.open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    sys.stdout, sys.stderr = (
        os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2)
    )
    os.chdir(scratch)
    sys.dont_write_bytecode = not write_bytecode
    if not write_bytecode:
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    os.environ["PYTHONPATH"] = str(scratch)
    # ranks that a test spawns import their parent's main module
    sys.modules["__main__"] = types.ModuleType("__main__")
    sys.path[:] = [str(scratch)] + [
        entry for entry in sys.path if entry and not _is_repository(entry)
    ]
    for name in [name for name in sys.modules if name.split(".")[0] in UNDER_TEST]:
        del sys.modules[name]
    import pytest

    options = ["-x", "-q", "--tb=line", "--no-header", "--hypothesis-seed=0"]
    status = int(pytest.main([*tests, *options]))
    for place in getattr(sys.modules.get("slime"), "__path__", ()):
        assert str(place).startswith(str(scratch)), f"slime was imported from {place}"
    return status


def _is_repository(entry: str) -> bool:
    return Path(entry).resolve() in (ROOT, Path(__file__).resolve().parent)


def _kill_group(leader: int) -> None:
    """Ends what the fork left behind: servers and ranks that its tests started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def plant_and_run(scratch: Path, fault: Fault, *, timeout: float) -> Outcome:
    """Returns the outcome of one fault; the scratch copy is as before afterwards."""
    path, log = scratch / fault.file, scratch.with_suffix(".log")
    original, times = path.read_bytes(), path.stat()
    started = time.monotonic()
    try:
        path.write_text(fault.apply(scratch), encoding="utf-8")
        # never taken for the compiled original
        os.utime(path, (times.st_atime, times.st_mtime + 7200))
        status = run_tests(scratch, fault.tests, log, timeout=timeout)
    finally:
        path.write_bytes(original)
        os.utime(path, (times.st_atime, times.st_mtime))
    verdicts = {
        PASSED: "survived",
        FAILED: "killed",
        COLLECTION_FAILED: "killed",
        TIMED_OUT: "killed",
    }
    detail = "time-out" if status == TIMED_OUT else last_failure(log)
    return Outcome(fault, verdicts.get(status, "broken"), time.monotonic() - started, detail)


def last_failure(log: Path) -> str:
    """Returns pytest's line about the first failure, or the last line that it printed."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    failed = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
    return (failed or lines or [""])[-1 if not failed else 0]


@dataclasses.dataclass
class Baseline:
    """How the chosen tests of each file do without a fault: seconds, and the last line where they
    fail.
    """

    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    failed: dict[str, str] = dataclasses.field(default_factory=dict)

    def timeout(self, fault: Fault, least: float) -> float:
        """Seconds after which a fault's tests are taken to hang: `least`, and five times what they
        need without it.
        """
        return least + 5 * sum(self.seconds[file] for file in files_of(fault))

    def judge(self, outcome: Outcome) -> Outcome:
        """Returns the outcome, broken instead of killed where a file that fails without the fault
        may be what failed.
        """
        suspects = files_of(outcome.fault) & self.failed.keys()
        known = [file for file in files_of(outcome.fault) if f" {file}::" in outcome.detail]
        if (
            outcome.verdict != "killed"
            or not suspects
            or (known and not suspects.intersection(known))
        ):
            return outcome
        return dataclasses.replace(outcome, verdict="broken")


def files_of(fault: Fault) -> set[str]:
    return {test.split("::")[0] for test in fault.tests}


def run_without_faults(scratch: Path, faults: list[Fault], *, timeout: float) -> Baseline:
    """Returns how the tests of these faults do on the code as it is, file by file."""
    by_file: dict[str, set[str]] = collections.defaultdict(set)
    for fault in faults:
        for test in fault.tests:
            by_file[test.split("::")[0]].add(test)
    baseline = Baseline()
    for file, tests in sorted(by_file.items()):
        chosen = (file,) if file in tests else tuple(sorted(tests))
        started = time.monotonic()
        status = run_tests(
            scratch, chosen, scratch.with_suffix(".log"), timeout=timeout, write_bytecode=True
        )
        baseline.seconds[file] = time.monotonic() - started
        if status != PASSED:
            baseline.failed[file] = (
                "time-out" if status == TIMED_OUT else last_failure(scratch.with_suffix(".log"))
            )
    return baseline


_scratch: Path


def _start_worker(template: Path, folder: Path) -> None:
    global _scratch
    _scratch = folder / f"copy{os.getpid()}"
    shutil.copytree(template, _scratch, symlinks=True)


def _run_in_worker(fault: Fault, timeout: float) -> Outcome:
    return plant_and_run(_scratch, fault, timeout=timeout)


def run_faults(
    faults: list[Fault], *, jobs: int, timeout: float
) -> tuple[list[Outcome], dict[str, str]]:
    """Returns every outcome, and the test files that fail without a fault; prints a line per fault
    as it ends.
    """
    import_heavy_libraries()
    with tempfile.TemporaryDirectory(prefix="slime-mutants-", ignore_cleanup_errors=True) as folder:
        template = Path(folder) / "original"
        template.mkdir()
        copy_repository(template)
        baseline = run_without_faults(template, faults, timeout=10 * timeout)
        outcomes = []
        context = multiprocessing.get_context("fork")
        with concurrent.futures.ProcessPoolExecutor(
            jobs, context, _start_worker, (template, Path(folder))
        ) as pool:
            waiting = [
                pool.submit(_run_in_worker, fault, baseline.timeout(fault, timeout))
                for fault in faults
            ]
            for number, future in enumerate(concurrent.futures.as_completed(waiting), 1):
                outcome = baseline.judge(future.result())
                outcomes.append(outcome)
                mark = "" if outcome.is_right else "  <--"
                print(
                    (
                        f"[{number}/{len(faults)}] {outcome.seconds:5.1f} s  {outcome.verdict:8} "
                        f"{outcome.fault.id}{mark}"
                    ),
                    flush=True,
                )
                if mark or os.environ.get("SLIME_MUTANTS_DETAIL"):
                    print(f"      {outcome.detail[:300]}", flush=True)
        return outcomes, baseline.failed


def select(faults: list[Fault], names: list[str], *, sample: int | None, seed: int) -> list[Fault]:
    """Returns the faults of these areas and ids (all when none is named), or `sample` of them;
    ValueError for an unknown name.
    """
    known = {fault.id for fault in faults} | {fault.area for fault in faults}
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"no area and no fault is called {', '.join(unknown)}; --list shows them")
    chosen = [fault for fault in faults if not names or fault.id in names or fault.area in names]
    if sample is None:
        return chosen
    return random.Random(seed).sample(chosen, min(sample, len(chosen)))


def print_summary(outcomes: list[Outcome], broken_files: dict[str, str]) -> None:
    """Prints the counts, what is wrong, and the survivors with their explanations."""
    changing = [outcome for outcome in outcomes if not outcome.fault.equivalent]
    killed = sum(outcome.verdict == "killed" for outcome in changing)
    share = f", {100 * killed / len(changing):.1f} %" if changing else ""
    print(
        f"\n{killed} of {len(changing)} faults that change behaviour were killed{share}; "
        f"{len(outcomes) - len(changing)} change nothing"
    )
    for outcome in outcomes:
        if outcome.fault.equivalent and outcome.is_right:
            print(f"explained: {outcome.fault.id}: {outcome.fault.equivalent}")
    for outcome in sorted(outcomes, key=lambda outcome: outcome.fault.id):
        if not outcome.is_right:
            fault = outcome.fault
            claim = " although the table says that it changes nothing" if fault.equivalent else ""
            print(
                f"{outcome.verdict.upper()}{claim}: {fault.id} ({fault.file}): {fault.old!r} -> "
                f"{fault.new!r}; tests: {' '.join(fault.tests)}"
            )
    for file, line in broken_files.items():
        print(f"FAILS WITHOUT A FAULT: {file}: {line}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("names", nargs="*", metavar="AREA_OR_ID", help="Only these.")
    parser.add_argument(
        "--sample", type=int, metavar="N", help="N of the chosen faults, drawn with --seed."
    )
    parser.add_argument("--seed", type=int, default=0, help="Of --sample.")
    parser.add_argument(
        "--jobs",
        type=int,
        default=1,
        help="Faults at a time; each job has its own copy of the repository.",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=60.0,
        help="Seconds beyond five times what a fault's tests need without it; then they hang.",
    )
    parser.add_argument(
        "--list", action="store_true", help="Print the faults instead of planting them."
    )
    options = parser.parse_args()
    try:
        chosen = select(read_faults(), options.names, sample=options.sample, seed=options.seed)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if options.list:
        print("\n".join(f"{fault.id}: {fault.file}: {fault.kind}" for fault in chosen))
        return 0
    if problems := find_problems(chosen):
        print("\n".join(problems), file=sys.stderr)
        return 2
    outcomes, broken_files = run_faults(chosen, jobs=options.jobs, timeout=options.timeout)
    print_summary(outcomes, broken_files)
    return int(bool(broken_files) or not all(outcome.is_right for outcome in outcomes))


if __name__ == "__main__":
    raise SystemExit(main())
