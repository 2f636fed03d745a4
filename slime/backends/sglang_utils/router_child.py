"""The router's process: dies with its parent, then runs sglang_router's own launcher. Started by
router.py only.

python -m slime.backends.sglang_utils.router_child PARENT_PID ROUTER_ARGUMENTS...     key on stdin
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Asks the kernel for SIGKILL when the parent ends, and runs the router."""
    parent = int(sys.argv[1])
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        # The parent ended before the kernel knew what to do then.
        raise SystemExit(1)
    key = sys.stdin.readline().strip()
    # Changes what the launcher parses, not the command line that others can see. A key may begin
    # with a dash.
    sys.argv = ["sglang_router", *sys.argv[2:], *([f"--api-key={key}"] if key else [])]
    from sglang_router.launch_router import main as launch

    launch()


if __name__ == "__main__":
    main()
