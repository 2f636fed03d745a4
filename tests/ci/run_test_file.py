"""Runs one test file as CI does and fails when it ran no test, whatever its own exit status says.

    python tests/ci/run_test_file.py tests/test_x.py [arguments of the file]

A file without a `__main__` block exits with 0 and has tested nothing. The file runs as `python
<file>`; pytest inside it reports its cases through PYTEST_ADDOPTS to a junit file, and a file that
leaves no case there has failed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path


def count_cases(junit: Path) -> tuple[int, int]:
    """Returns the numbers of cases that ran and that were skipped; (0, 0) when pytest wrote
    nothing.
    """
    if not junit.exists():
        return 0, 0
    suites = list(ElementTree.parse(junit).getroot().iter("testsuite"))
    total = sum(int(suite.get("tests", 0)) for suite in suites)
    skipped = sum(int(suite.get("skipped", 0)) for suite in suites)
    return total - skipped, skipped


def run_test_file(file: str, arguments: list[str]) -> int:
    """Returns the file's exit status, or 5 (pytest's "no tests collected") when it passed without
    running a case.
    """
    with tempfile.TemporaryDirectory() as scratch:
        junit = Path(scratch) / "junit.xml"
        options = f"{os.environ.get('PYTEST_ADDOPTS', '')} --junitxml={junit}".strip()
        status = subprocess.run(
            [sys.executable, file, *arguments],
            env={**os.environ, "PYTEST_ADDOPTS": options},
            check=False,
        ).returncode
        ran, skipped = count_cases(junit)
    if status == 0 and ran == 0:
        print(
            (
                f"{file} ran no test ({skipped} skipped). Does it end with a __main__ block that "
                "calls "
                "pytest?"
            ),
            file=sys.stderr,
        )
        return 5
    print(f"{file}: {ran} ran, {skipped} skipped, exit status {status}")
    return status


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit("usage: python tests/ci/run_test_file.py FILE [ARGUMENTS]")
    raise SystemExit(run_test_file(sys.argv[1], sys.argv[2:]))
