"""Output in a file or a pipe has no colours and no carriage returns."""

import subprocess
import sys

import pytest

from slime.tracking.plain_output import PLAIN, keep_output_plain

NUM_GPUS = 0


@pytest.mark.parametrize(
    ("is_terminal", "given", "expected"),
    [
        (False, {}, PLAIN),
        (True, {}, {}),
        (True, {"NO_COLOR": "1"}, {"NO_COLOR": "1", **PLAIN}),
        (False, {"TQDM_DISABLE": "0"}, {**PLAIN, "TQDM_DISABLE": "0"}),
    ],
)
def test_libraries_are_told_where_output_is_no_terminal(is_terminal, given, expected):
    """Libraries are switched to plain output where it is no terminal, unless the user has set
    something else."""
    environment = dict(given)
    keep_output_plain(environment, is_terminal=is_terminal)
    assert environment == expected


def test_a_library_bar_and_rays_lines_come_out_plain_in_a_pipe():
    """In a pipe transformers' progress bar has no carriage returns, and Ray's lines no colours."""
    script = (
        "from slime.tracking.plain_output import keep_output_plain; keep_output_plain()\n"
        "import sys, tqdm.auto; list(tqdm.auto.tqdm([1, 2]))\n"
        "from ray._private.worker import print_worker_logs\n"
        "print_worker_logs({'job': 'j', 'pid': 7, 'ip': 'x', 'is_err': True, 'lines': ['a line'], 'actor_name': 'a', 'task_name': None}, sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], capture_output=True, timeout=100, check=True
    )
    assert b"a line" in done.stderr and b"pid=7" in done.stderr
    assert b"\r" not in done.stdout + done.stderr and b"\x1b" not in done.stdout + done.stderr


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
