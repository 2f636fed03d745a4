"""The faults of whole loops, one cell a fault and a component: how it strikes, how one sees that it
did, and what must follow.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from chaos.lineage import Lineage, Loop, thaw
from chaos.proxy import JUNK_JSON, BreakingProxy
from slime.supervision.heart import ROLLOUT_MANAGER
from slime.supervision.processes import look_at, started_at
from slime.supervision.watch import CONTROL_STORE, NODE_MANAGER

GOES_ON, ENDS = "goes on", "ends"
RANK, ENGINE, ROUTER, GRADER = "actor rank 0", "engine 0", "the router", "grader"
LOCK, DRIVER = "the lock of weight updates", "the driver"
PAUSE_S = 4.0  # half of what makes a process a frozen one
EXTERNAL_KEY = "a-key-of-the-chaos-tools"

SYNC = Loop("sync", options=("--use-fault-tolerance",))
RECOVERY = Loop("sync, recovery", options=("--use-fault-tolerance", "--recovery-interval", "1"))
CONTINUES = ("--save-failure", "continue")
ASYNC = Loop(
    "async", "slime.train_async", ("--use-fault-tolerance", *CONTINUES), without=("--colocate",)
)
HTTP = Loop(
    "external engine",
    options=(
        "--sglang-api-key",
        EXTERNAL_KEY,
        "--rollout-request-timeout",
        "5",
        "--update-weight-transport",
        "disk",
    ),
    without=("--use-sglang-router",),
)


@dataclasses.dataclass(frozen=True)
class Cell:
    """One fault of one component. strike: makes it happen and returns the evidence that it did;
    AssertionError where it did not. named: what the terminal must show; statuses: of the end.
    """

    fault: str
    component: str
    strike: Callable[[Lineage], str]
    expects: str = ENDS
    named: str = ""
    statuses: tuple[int, ...] = (1,)
    within_s: float = 60.0
    restore: Callable[[Lineage], None] = lambda lineage: None
    at_start: tuple[str, ...] | None = None  # strikes before the start, which has these options
    is_harmless: bool = False  # nothing may be said to have died or frozen


def _until(condition: Callable[[], bool], what: str, timeout_s: float = 2.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"the fault did not fire: {what}"
        time.sleep(0.01)


def _pid(lineage: Lineage, role: str) -> int:
    assert lineage.run is not None
    if role == DRIVER:
        return lineage.run.process.pid
    return lineage.run.processes()[role]


def _state(pid: int) -> str:
    found = look_at(pid, closely=False)
    return "-" if found is None else found.state


def killed(lineage: Lineage, role: str) -> str:
    """SIGKILL; the process is gone."""
    pid = _pid(lineage, role)
    os.kill(pid, signal.SIGKILL)
    _until(lambda: started_at(pid) is None, f"process {pid} lives")
    return f"process {pid} is gone"


def stopped(lineage: Lineage, role: str) -> str:
    """SIGSTOP; the kernel says that it stands still."""
    pid = _pid(lineage, role)
    os.kill(pid, signal.SIGSTOP)
    _until(lambda: _state(pid) in "T-", f"process {pid} runs")
    return f"process {pid} is stopped"


def paused(lineage: Lineage, role: str) -> str:
    """SIGSTOP, and SIGCONT before anybody may call it frozen."""
    pid = _pid(lineage, role)
    os.kill(pid, signal.SIGSTOP)
    try:
        _until(lambda: _state(pid) == "T", f"process {pid} runs")
        time.sleep(PAUSE_S)
        state = _state(pid)
        assert state == "T", f"after {PAUSE_S} s process {pid} is in state {state}"
    finally:
        thaw(pid)
    return f"process {pid} stood still for {PAUSE_S:.0f} s"


def kill(role: str, expects: str = ENDS) -> Cell:
    """The process is killed."""
    named = "" if role == DRIVER or expects == GOES_ON else f"{role} "
    statuses = (-signal.SIGKILL,) if role == DRIVER else (1,)
    return Cell("kill -9", role, lambda run: killed(run, role), expects, named, statuses)


def stop(role: str, expects: str = ENDS) -> Cell:
    """The process stands still for good."""
    named = "" if expects == GOES_ON else f"{role} "
    return Cell("SIGSTOP", role, lambda run: stopped(run, role), expects, named)


def pause(role: str) -> Cell:
    """The process stands still for a while."""
    return Cell("SIGSTOP, SIGCONT", role, lambda run: paused(run, role), GOES_ON, is_harmless=True)


def out_of_memory() -> Cell:
    """What the kernel does where memory runs out: the largest process goes."""

    def strike(lineage: Lineage) -> str:
        role, _ = lineage.largest()
        return f"{role}, the largest: {killed(lineage, role)}"

    return Cell("out of memory", "the largest", strike, named=" has died")


def interrupts(count: int, gap_s: float) -> Cell:
    """Ctrl-C: SIGINT to the process group of the terminal."""

    def strike(lineage: Lineage) -> str:
        assert lineage.run is not None
        sent = 0
        for _ in range(count):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(lineage.run.process.pid, signal.SIGINT)
                sent += 1
            time.sleep(gap_s)
        assert sent, "no process took a signal"
        return f"{sent} signals were sent"

    name = f"Ctrl-C, {count} times" if count > 1 else "Ctrl-C"
    return Cell(name, DRIVER, strike, statuses=(130,))


# --- disks ----------------------------------------------------------------------------------------


def _ballast(lineage: Lineage) -> Path:
    return lineage.folder / "ballast"


def _fill(lineage: Lineage) -> str:
    """Evidence that the file system of the run folder has no room left."""
    assert lineage.is_mounted, "mounting a small file system is not allowed here"
    with contextlib.suppress(OSError), _ballast(lineage).open("wb", buffering=0) as file:
        while True:
            file.write(b"\0" * 4096)
    free = os.statvfs(lineage.folder).f_bavail
    assert free <= 8, f"{free} blocks are free"
    return f"{free} blocks are free"


def _make_room(lineage: Lineage) -> None:
    _ballast(lineage).unlink(missing_ok=True)


def disk_full() -> Cell:
    """The file system of the run folder has no byte left: checkpoints, metrics, logs, ledger."""
    named = "No space left on device"
    return Cell("disk full", "the run folder", _fill, named=named, restore=_make_room)


def disk_full_for_a_while() -> Cell:
    """As disk_full, until somebody makes room; the run is told to train on."""

    def strike(lineage: Lineage) -> str:
        assert lineage.run is not None
        found = _fill(lineage)
        try:
            time.sleep(PAUSE_S)
            _until(lambda: "was not saved" in lineage.run.text(), "no save failed", 30.0)
        finally:
            _make_room(lineage)
        return found

    return Cell("disk full for a while", "the run folder", strike, GOES_ON, restore=_make_room)


def ordered(lineage: Lineage, order: dict, timeout_s: float) -> str:
    """An order to the processes of the run; what they noted when they met it."""
    for path in lineage.orders.glob("fired.*"):
        path.unlink()
    path = lineage.orders / "order.tmp"
    path.write_text(json.dumps(order))
    path.rename(lineage.orders / "order.json")
    _until(lambda: any(lineage.orders.glob("fired.*")), f"nobody met {order}", timeout_s)
    time.sleep(0.5)
    notes = [path.read_text().split("\n")[0] for path in lineage.orders.glob("fired.*")]
    return f"{len(notes)} processes met it: {notes[0].replace(str(lineage.folder), '')}"


def withdrawn(lineage: Lineage) -> None:
    """No order stands any more."""
    (lineage.orders / "order.json").unlink(missing_ok=True)


def disk_error(component: str, number: int, name: str, expects: str, named: str = "") -> Cell:
    """Operations on files of the run with `name` in their path are refused once per process."""

    def strike(lineage: Lineage) -> str:
        order = {"kind": "disk", "errno": number, "below": str(lineage.folder), "name": name}
        return ordered(lineage, order, 30.0)

    return Cell(errno.errorcode[number], component, strike, expects, named, restore=withdrawn)


def clock(seconds: int) -> Cell:
    """time.time of every Python process is ahead, or behind, from now on."""

    def strike(lineage: Lineage) -> str:
        return ordered(lineage, {"kind": "clock", "seconds": seconds}, 10.0)

    return Cell(
        f"clock {seconds:+d} s", "all Python processes", strike, GOES_ON,
        restore=withdrawn, is_harmless=True,
    )  # fmt: skip


# --- ports and HTTP -------------------------------------------------------------------------------


class TakenPort:
    """A port that this process listens on."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.number = self._socket.getsockname()[1]

    def close(self) -> None:
        """The port is free."""
        self._socket.close()


def port_taken(option: str, component: str, port: TakenPort) -> Cell:
    """Somebody listens on the port that the run was told to take."""

    def strike(lineage: Lineage) -> str:
        with socket.create_connection(("127.0.0.1", port.number), timeout=5):
            return f"port {port.number} is taken"

    options = (option, str(port.number))
    return Cell(
        "port taken", component, strike, named=str(port.number), statuses=(1, 2), at_start=options
    )


def broken_http(proxy: BreakingProxy, mode: str, *, count: int = 3) -> Cell:
    """The engine's answers to /generate are broken until `count` were."""

    def strike(lineage: Lineage) -> str:
        with proxy.broken(mode) as num_broken:
            _until(lambda: num_broken() >= count, "no request came", 30.0)
            return f"{num_broken()} answers were broken"

    if mode == JUNK_JSON:  # an engine that answers, and not as one: asking again does not help
        return Cell(f"HTTP: {mode}", "manager - engine", strike, named="--max-failed-ratio")
    return Cell(f"HTTP: {mode}", "manager - engine", strike, GOES_ON)


# --- tables ---------------------------------------------------------------------------------------


def loop_cells(loop: Loop) -> Iterator[Cell]:
    """All cells of a loop with its own engine."""
    watched = (CONTROL_STORE, NODE_MANAGER, ROLLOUT_MANAGER, RANK, LOCK, ROUTER)
    for role in (*watched, ENGINE, GRADER, DRIVER):
        yield pause(role)
    for role in (ENGINE, GRADER):
        yield kill(role, GOES_ON)
        yield stop(role, GOES_ON)
    yield clock(3600)
    yield clock(-3600)
    failed = (GOES_ON, "") if CONTINUES[0] in loop.options else (ENDS, "was not saved")
    yield disk_error("checkpoint", errno.EIO, ".writing", *failed)
    yield disk_error("checkpoint", errno.ENOSPC, "/iter_", *failed)
    yield disk_error("data position", errno.EIO, "/rollout/", *failed)
    yield disk_full() if failed[0] == ENDS else disk_full_for_a_while()
    for role in (*watched, DRIVER):
        yield kill(role)
    for role in watched:
        yield stop(role)
    yield out_of_memory()
    yield interrupts(1, 0.0)
    yield interrupts(2, 0.3)
    yield interrupts(10, 0.05)


def recovery_cells() -> Iterator[Cell]:
    """Losses that a run with --recovery-interval survives."""
    for role in (RANK, ROLLOUT_MANAGER):
        for cell in (kill(role, GOES_ON), stop(role, GOES_ON)):
            yield dataclasses.replace(cell, within_s=120.0)
