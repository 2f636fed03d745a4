"""The Python stacks of a process that cannot be asked: py-spy reads them from outside."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig

TIMEOUT_S = 5.0


def python_stacks(pid: int) -> str:
    """The stack of every Python thread, also of a stopped process; a sentence where it cannot be
    read.
    """
    places = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])
    tool = shutil.which("py-spy", path=places)
    if tool is None:
        return "Its stacks cannot be read: py-spy is not installed."
    words = [tool, "dump", "--nonblocking", "--pid", str(pid)]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"Its stacks cannot be read: {error}."
    begin = done.stdout.find("Thread ")  # the command line before it may hold a secret
    if done.returncode != 0 or begin < 0:
        reason = (done.stderr.strip() or done.stdout.strip() or "it printed nothing").splitlines()
        return f"Its stacks cannot be read; py-spy says: {reason[-1].strip()}"
    return done.stdout[begin:].rstrip()
