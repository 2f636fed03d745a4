"""The process between the pool and one grader: starts it, prints what it prints up to a bound, and
ends it with every process that it started.

    grader_guard.py PARENT REQUESTS ANSWERS BUDGET LIMIT MODULE

PARENT is the pool's process id, the next three are inherited descriptors, LIMIT is in MiB. Runs by
its path, on the standard library alone, so that it starts in milliseconds. It is the subreaper of
the grader: a process whose parent ends, or which makes a session of its own, becomes its child and
is found there. It ends when stdin (held open by the pool) ends, on SIGTERM, which the kernel sends
when the pool's process ends, or when the grader ends; its status is the grader's.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
# One byte of the budget pipe allows this many bytes of output; LAST_BYTE is the last of the pool.
OUTPUT_CHUNK_BYTES = 1 << 16
LAST_BYTE = b"L"
KILL_SECONDS = 5.0
WRITE_SECONDS = 1.0


def prctl(option: int, value: int) -> None:
    """Linux's prctl with one argument."""
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def children_of(parent: int) -> set[int]:
    """All processes below `parent`, zombies included."""
    parents: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            try:
                text = Path(f"/proc/{entry}/stat").read_text(encoding="utf-8", errors="replace")
            except OSError:  # it has ended
                continue
            parents[int(entry)] = int(text.rsplit(")", 1)[1].split()[1])
    found: set[int] = {parent}
    while more := {pid for pid, above in parents.items() if above in found} - found:
        found |= more
    return found - {parent}


def kill_all_below(deadline: float) -> None:
    """Kills every process below this one until none is left: orphans become children of this one,
    and what was started meanwhile is found in the next pass.
    """
    while time.monotonic() < deadline:
        below = children_of(os.getpid())
        for sign in (signal.SIGSTOP, signal.SIGKILL):  # what is stopped starts nothing new
            for pid in below:
                try:
                    os.kill(pid, sign)
                except (ProcessLookupError, PermissionError):
                    continue
        if not below:
            return
        time.sleep(0.002)
        _reap()


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            continue
    except ChildProcessError:
        return


class _Output:
    """Prints what the grader prints while the pool's budget lasts; drops the rest."""

    def __init__(self, budget: int, limit_mib: int) -> None:
        self._budget = budget
        self._limit_mib = limit_mib
        self._left = 0
        self._is_cut = False

    def take(self, data: bytes) -> None:
        while data and not self._is_cut:
            if self._left == 0 and not self._more():
                return
            part, data = data[: self._left], data[self._left :]
            self._left -= len(part)
            _write(part)

    def _more(self) -> bool:
        try:
            allowed = os.read(self._budget, 1)
        except OSError:  # the budget is used up
            allowed = b""
        self._is_cut = not allowed
        self._left = OUTPUT_CHUNK_BYTES if allowed else 0
        if allowed == LAST_BYTE:
            self._is_cut = True
            _write(
                f"\nWARNING: graders have printed {self._limit_mib} MiB; what they print from here "
                "on is dropped.\n".encode()
            )
        return not self._is_cut


def _write(data: bytes) -> None:
    """Writes to stderr; what a reader does not take in time is dropped, so that the guard is never
    held up.
    """
    poller = select.poll()
    poller.register(2, select.POLLOUT)
    for start in range(0, len(data), select.PIPE_BUF):
        if not poller.poll(WRITE_SECONDS * 1000):
            return
        try:
            os.write(2, data[start : start + select.PIPE_BUF])
        except OSError:  # nobody reads it
            return


def _status(code: int) -> int:
    return code if code >= 0 else 128 - code


def serve(grader: subprocess.Popen, output: int, budget: _Output) -> int:
    """Prints output until the grader ends or is to end; returns its status."""
    wakeup, signalled = os.pipe()
    os.set_blocking(signalled, False)
    signal.set_wakeup_fd(signalled, warn_on_full_buffer=False)
    is_over = False

    def end(*_: object) -> None:
        nonlocal is_over
        is_over = True

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    poller = select.poll()
    for fd in (0, output, wakeup):
        poller.register(fd, select.POLLIN)
    while not is_over and grader.poll() is None:
        for fd, _ in poller.poll():
            if fd == 0:
                is_over = not os.read(0, 1)
            elif fd == wakeup:
                os.read(wakeup, 4096)
            elif data := os.read(output, OUTPUT_CHUNK_BYTES):
                budget.take(data)
            else:  # the grader and all its processes have closed it
                poller.unregister(output)
    status = grader.poll()
    kill_all_below(time.monotonic() + KILL_SECONDS)
    os.set_blocking(output, False)
    try:
        while data := os.read(output, OUTPUT_CHUNK_BYTES):
            budget.take(data)
    except BlockingIOError:  # a process that could not be killed still holds the other end
        pass
    return _status(status) if status is not None else 0


def main() -> int:
    """Starts the grader and stays until it has ended."""
    parent, requests, answers, budget, limit_mib = map(int, sys.argv[1:6])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the pool's business
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        return 1
    output, written = os.pipe()
    grader = subprocess.Popen(
        [sys.executable, "-m", sys.argv[6], str(os.getpid()), str(requests), str(answers)],
        stdin=subprocess.DEVNULL,
        stdout=written,
        stderr=written,
        pass_fds=(requests, answers),
        start_new_session=True,
    )
    for fd in (written, requests, answers):
        os.close(fd)
    return serve(grader, output, _Output(budget, limit_mib))


if __name__ == "__main__":
    sys.exit(main())
