"""Runs a job of the rendered GitHub workflow on this machine, step by step, once per entry of its
matrix.

    python tools/run_workflow_job.py cpu-unittest                       # every entry
    python tools/run_workflow_job.py cpu-unittest --only test_sample.py # one entry; may be repeated
    python tools/run_workflow_job.py cpu-unittest --list

`uses:` steps need GitHub and are skipped, which is said. A step that does not depend on the matrix
(the installation) runs once, and not at all with `--no-install`. The exit status is 1 when any
entry failed, 2 when nothing matched. This interpreter's folder is first on PATH, so that `python`
in a step is this one.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
WORKFLOW = ROOT / ".github" / "workflows" / "pr-test.yml"
EXPRESSION = re.compile(r"\$\{\{\s*(.*?)\s*\}\}")


def evaluate(expression: str, context: dict[str, Any]) -> str:
    """Returns the text of `a.b.c || 'literal'`: the first alternative that is not empty. ValueError
    for what this does not know.
    """
    for alternative in (part.strip() for part in expression.split("||")):
        literal = re.fullmatch(r"'([^']*)'", alternative)
        if literal:
            return literal.group(1)
        if not re.fullmatch(r"[A-Za-z_][\w.-]*", alternative):
            raise ValueError(
                f"the local runner does not know the expression ${{{{ {expression} }}}}"
            )
        value: Any = context
        for name in alternative.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        if value not in (None, "", False):
            return str(value)
    return ""


def substitute(text: Any, context: dict[str, Any]) -> str:
    """Returns `text` with every ${{ ... }} replaced."""
    return EXPRESSION.sub(lambda match: evaluate(match.group(1), context), str(text))


def uses_matrix(step: dict[str, Any]) -> bool:
    """Returns whether the step differs between the matrix's entries."""
    return "matrix." in str(step)


def run_step(
    step: dict[str, Any], environment: dict[str, str], context: dict[str, Any], *, cwd: Path
) -> int:
    """Runs one `run:` step as GitHub's bash does and returns its exit status."""
    values = {name: substitute(value, context) for name, value in step.get("env", {}).items()}
    with tempfile.NamedTemporaryFile("w", suffix=".sh", delete=False) as script:
        script.write(substitute(step["run"], context))
    try:
        command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", script.name]
        folder = step.get("working-directory", ".")
        return subprocess.run(
            command, cwd=cwd / folder, env={**environment, **values}, check=False
        ).returncode
    finally:
        os.unlink(script.name)


def matrix_entries(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns one dict per entry of `strategy.matrix.info`; one empty entry for a job without a
    matrix.
    """
    return job.get("strategy", {}).get("matrix", {}).get("info") or [{}]


def run_entry(
    job: dict[str, Any], entry: dict[str, Any], done: set[str], *, install: bool, cwd: Path
) -> str | None:
    """Runs the job's steps for one entry; returns None or which step failed with which status.
    `done` holds steps that run once.
    """
    context = {"matrix": {"info": entry}, "github": {"sha": "local", "event": {}}}
    environment = {**os.environ, "CI": "true"}
    environment["PATH"] = os.pathsep.join(
        [str(Path(sys.executable).parent), environment.get("PATH", "")]
    )
    environment.update(
        {name: substitute(value, context) for name, value in job.get("env", {}).items()}
    )
    for step in job["steps"]:
        name = step.get("name") or step.get("uses") or step["run"].splitlines()[0]
        if "uses" in step:
            if name not in done:
                print(f"-- {name}: skipped, {step['uses']} needs GitHub", flush=True)
                done.add(name)
            continue
        if not uses_matrix(step):
            if name in done:
                continue
            done.add(name)
            if not install and "install" in name.lower():
                print(f"-- {name}: skipped (--no-install)", flush=True)
                continue
        print(f"-- {name}", flush=True)
        status = run_step(step, environment, context, cwd=cwd)
        if status:
            return f"step {name!r} ended with status {status}"
    return None


def run_job(job: dict[str, Any], *, only: list[str], install: bool, cwd: Path) -> int:
    """Runs the job for its entries and prints a verdict per entry; returns the exit status."""
    entries = [entry for entry in matrix_entries(job) if not only or entry.get("test_file") in only]
    if len(entries) < len(only):
        known = {entry.get("test_file") for entry in entries}
        print(f"not in this job: {', '.join(sorted(set(only) - known))}", file=sys.stderr)
        return 2
    failures, done = [], set[str]()
    for number, entry in enumerate(entries, 1):
        label, started = entry.get("test_file", "the job"), time.monotonic()
        print(f"[{number}/{len(entries)}] {label}", flush=True)
        failure = run_entry(job, entry, done, install=install, cwd=cwd)
        print(
            (
                f"[{number}/{len(entries)}] {label}: {failure or 'ok'}, "
                f"{time.monotonic() - started:.1f} s"
            ),
            flush=True,
        )
        if failure:
            failures.append(f"{label}: {failure}")
    print(f"{len(entries) - len(failures)} of {len(entries)} entries passed")
    for failure in failures:
        print(f"FAILED {failure}", file=sys.stderr)
    return int(bool(failures))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("job", help="Job of the workflow.")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="FILE",
        help="Run this matrix entry; repeatable.",
    )
    parser.add_argument(
        "--list", action="store_true", help="Print the entries instead of running them."
    )
    parser.add_argument(
        "--no-install",
        action="store_true",
        help="Skip installation steps: this environment has it all.",
    )
    parser.add_argument("--workflow", type=Path, default=WORKFLOW, help="Rendered workflow file.")
    parser.add_argument(
        "--root", type=Path, default=ROOT, help="Folder that stands for the checkout."
    )
    options = parser.parse_args()
    jobs = yaml.safe_load(options.workflow.read_text(encoding="utf-8"))["jobs"]
    if options.job not in jobs:
        print(
            f"no job {options.job!r} in {options.workflow.name}; it has {', '.join(jobs)}",
            file=sys.stderr,
        )
        return 2
    if options.list:
        print(
            "\n".join(
                entry.get("test_file", "the job") for entry in matrix_entries(jobs[options.job])
            )
        )
        return 0
    return run_job(
        jobs[options.job], only=options.only, install=not options.no_install, cwd=options.root
    )


if __name__ == "__main__":
    raise SystemExit(main())
