"""A process that dies or freezes is named with its phase, in time, and none that only computes,
starves or stands in a debugger."""

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from slime.supervision import records, stacks  # noqa: E402
from slime.supervision import watch as watch_module  # noqa: E402
from slime.supervision.heart import ROLLOUT_MANAGER  # noqa: E402
from slime.supervision.processes import look_at, started_at  # noqa: E402
from slime.supervision.stillness import FROZEN_S, Reading, Stillness  # noqa: E402
from slime.supervision.watch import Watch  # noqa: E402
from slime.tracking import phases  # noqa: E402
from slime.tracking.spans import set_rollout, span  # noqa: E402
from slime.tracking.timer import timer  # noqa: E402

NUM_GPUS = 0

BUSY = 16  # processes that compute while others are watched

# A watched process: `what` it does after it has said that it is up.
MEMBER = """
import ctypes, sys, threading, time
from slime.supervision.heart import start_heart
from slime.tracking.spans import set_rollout, span

def hold_the_interpreter():
    ctypes.PyDLL(None).usleep(60_000_000)  # PyDLL keeps the interpreter's lock

def compute_in_c():
    sum(range(10**12))  # hours below Python, which keeps the interpreter's lock

def wait():
    time.sleep(60)

start_heart(sys.argv[1])
set_rollout(3)
with span("train"):
    print("up", flush=True)
    globals()[sys.argv[2]]()
"""


def still_after(readings, **fixed):
    """The time of the reading at which the process counts as frozen, None where it never does."""
    stillness = Stillness()
    for values in readings:
        reading = Reading(
            **{"beats": 1, "state": "S", "cpu_s": 0.0, "is_runnable": False, **fixed, **values}
        )
        if stillness.add(reading) is not None:
            return reading.time
    return None


def times(until_s=60.0, from_s=0.0):
    return [from_s + 0.5 * number for number in range(int(2 * (until_s - from_s)) + 1)]


def test_a_process_that_neither_beats_nor_runs_is_frozen_after_eight_seconds():
    """Stopped, or in a deadlock in which Ray's own threads still use a little."""
    assert still_after(({"time": t} for t in times()), state="T") == FROZEN_S == 8.0
    deadlock = [
        {"time": t, "cpu_s": 0.006 * t, "is_runnable": n % 6 == 0} for n, t in enumerate(times())
    ]
    assert still_after(deadlock) == 8.0
    # it reads a model from a slow disk, or its memory is swapped out
    assert still_after(({"time": t} for t in times()), state="D") == 60.0
    # it computed until it was stopped at 0.4
    assert still_after({"time": t, "cpu_s": min(t, 0.4)} for t in times()) == 8.5


@pytest.mark.parametrize(
    "alive",
    [
        {"beats": lambda t: int(2 * t)},
        {"cpu_s": lambda t: 0.05 * t},  # in C code, with a twentieth of a core
        {"is_runnable": lambda t: True},  # starves: it waits for a core all the time
        {"is_traced": lambda t: True, "state": lambda t: "t"},
        {"beats": lambda t: None},  # no heart, and not stopped
    ],
    ids=["beats", "computes", "starves", "debugged", "no heart"],
)
def test_a_process_with_a_sign_of_life_is_not_frozen(alive):
    """Each of these for a minute."""
    readings = ({"time": t} | {name: value(t) for name, value in alive.items()} for t in times())
    assert still_after(readings) is None


def test_a_pause_of_the_watch_itself_starts_everything_anew():
    """The driver was stopped with Ctrl-Z, or the machine was suspended, from 5 to 100 s: what stood
    still meanwhile gets its eight seconds afterwards."""
    paused = [{"time": t} for t in (*times(5.0), *times(130.0, from_s=100.0))]
    assert still_after(paused) == 108.0


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of a watch, known to this process and its children."""
    place = tmp_path / "processes"
    place.mkdir()
    monkeypatch.setenv(records.FOLDER_VARIABLE, str(place))
    return place


@pytest.fixture
def started(folder):
    """started(words) -> process, ended after the test."""
    processes = []

    def start(*words):
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(
            [sys.executable, *words], stdout=subprocess.PIPE, text=True, env=env
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.wait()


class Losses(list):
    """(loss, seconds since `begin`) of everything that a watch reports."""

    begun = 0.0

    def begin(self):
        self.begun = time.monotonic()

    def take(self, loss):
        self.append((loss, time.monotonic() - self.begun))

    def wait_for(self, count, timeout_s):
        deadline = time.monotonic() + timeout_s
        while len(self) < count and time.monotonic() < deadline:
            time.sleep(0.02)
        return {loss.role: (loss, seconds) for loss, seconds in self}


@pytest.fixture
def watching(folder):
    """(watch that runs, what it reports)."""
    losses = Losses()
    losses.begin()
    watch = Watch(folder, losses.take)
    yield watch, losses
    watch.stop()


def stopped(process):
    os.kill(process.pid, signal.SIGSTOP)


def test_the_dead_and_the_frozen_are_named_with_their_phase_and_nobody_else(
    started, watching, caplog
):
    """Beside sixteen processes that compute on all cores: a killed one is named within a second,
    a stopped one and one that holds the interpreter within ten, with their stacks, and then they
    are ended. One that computes in C code, one that waits, and one that ends on purpose are not."""
    watch, losses = watching
    does = {
        "killed 0": "wait",
        "stopped 0": "wait",
        "hanging 0": "hold_the_interpreter",
        "computing 0": "compute_in_c",
        "waiting 0": "wait",
        "leaving 0": "wait",
    }
    members = {role: started("-c", MEMBER, role, what) for role, what in does.items()}
    for member in members.values():
        assert member.stdout.readline() == "up\n"
    for _ in range(BUSY):
        started("-c", "while True: pass")
    watch.start()
    time.sleep(1.0)
    records.expect_end("leaving 0")
    members["leaving 0"].kill()
    losses.begin()
    members["killed 0"].kill()
    stopped(members["stopped 0"])
    found = losses.wait_for(3, timeout_s=30)
    assert sorted(found) == ["hanging 0", "killed 0", "stopped 0"]
    # on a machine that does nothing else: 0.4 and 10 s
    assert found["killed 0"][1] < 5 and max(seconds for _, seconds in found.values()) < 25
    killed, frozen, hanging = (
        found[role][0].sentence() for role in ("killed 0", "stopped 0", "hanging 0")
    )
    assert f"killed 0 (process {members['killed 0'].pid}) has died: " in killed
    assert "is frozen: a signal has stopped it (SIGSTOP)" in frozen and "it hangs" in hanging
    assert all("Its last phase: rollout 3: train." in one for one in (killed, frozen, hanging))
    assert "wait (<string>" in caplog.text and "hold_the_interpreter (<string>" in caplog.text
    assert members["stopped 0"].wait(5) == members["hanging 0"].wait(5) == -signal.SIGKILL
    time.sleep(1.0)
    assert len(losses) == 3 and members["computing 0"].poll() is None


def test_who_took_the_others_along_is_named_first(started, watching, monkeypatch):
    """A manager whose engine and router end with it is the cause, in whatever order they are heard
    of."""
    watch, losses = watching
    monkeypatch.setattr(watch_module, "TOGETHER_S", 2.0)  # this process may be held up meanwhile
    sleepers = [
        started("-c", "print('up', flush=True); import time; time.sleep(60)") for _ in "123"
    ]
    for sleeper, role in zip(sleepers, ("engine 0", "the router", ROLLOUT_MANAGER), strict=True):
        sleeper.stdout.readline()
        records.register(role, sleeper.pid)
    watch.start()
    time.sleep(0.5)
    for sleeper in sleepers:
        sleeper.kill()
    losses.wait_for(3, timeout_s=5)
    assert [loss.role for loss, _ in losses] == [ROLLOUT_MANAGER, "engine 0", "the router"]


def test_a_loss_that_somebody_takes_care_of_does_not_reach_the_run(started, watching):
    """A healer gets the losses of its kind. What it does not heal, or fails on, is the run's."""
    watch, losses = watching
    seen = []

    def heal(loss):
        seen.append((loss.role, loss.kind, loss.number))
        if loss.role == "engine 2":
            raise OSError("no room")
        return loss.role == "engine 0"

    watch.subscribe("engine", heal)
    roles = ("engine 0", "engine 1", "engine 2", "rank 0")
    for role in roles:
        sleeper = started("-c", "import time; time.sleep(60)")
        records.register(role, sleeper.pid)
        sleeper.kill()
        # it is a zombie, whose id nobody else gets, before the watch has seen it alive
        select.select([], [], [], 0.05)
    watch.start()
    losses.wait_for(3, timeout_s=5)
    assert sorted(loss.role for loss, _ in losses) == ["engine 1", "engine 2", "rank 0"]
    assert sorted(seen) == [(f"engine {number}", "engine", number) for number in range(3)]


def test_records_of_other_machines_and_other_files_are_left_alone(folder, started, watching):
    """A process of another machine has an id that is none here."""
    watch, losses = watching
    sleeper = started("-c", "import time; time.sleep(60)")
    record = records.register("engine 0", sleeper.pid)
    content = record.path.read_bytes()
    head = json.loads(content[records.HEAD_AT :].rstrip(b"\0"))
    away = json.dumps({**head, "node": "elsewhere", "pid": 4194305}).encode()
    (folder / "engine-0.4194305.1").write_bytes(content[: records.HEAD_AT] + away)
    (folder / "damaged").write_bytes(b"\0" * 3000)
    (folder / "empty").touch()
    watch.start()
    time.sleep(1.2)
    assert losses == [] and record.path.stat().st_mode & 0o777 == 0o600
    folder.rename(folder.with_name("gone"))
    time.sleep(0.6)
    assert losses == [], "a folder that is gone ends the watch of what stood in it"


def test_where_nobody_watches_nothing_is_written_and_no_thread_starts(monkeypatch, tmp_path):
    """Without the folder's path, and where the path is another machine's."""
    from slime.supervision.heart import start_heart

    for value in (None, str(tmp_path / "elsewhere")):
        if value is None:
            monkeypatch.delenv(records.FOLDER_VARIABLE, raising=False)
        else:
            monkeypatch.setenv(records.FOLDER_VARIABLE, value)
        assert start_heart("engine 0") is None and records.register("x", os.getpid()) is None
        records.expect_end("engine 0")
    assert list(tmp_path.iterdir()) == [] and phases.current_phases() is None


def test_a_full_disk_costs_the_watch_and_not_the_process(folder, monkeypatch, caplog):
    """The process runs unwatched, with a warning."""
    monkeypatch.setattr(records.atomic, "write_bytes", refuse)
    assert records.register("engine 0", os.getpid()) is None
    assert "engine 0 (process" in caplog.text and "is not watched: [Errno 28]" in caplog.text


def refuse(*args, **kwargs):
    raise OSError(28, "No space left on device")


def test_timers_and_spans_are_phases_of_a_watched_process(monkeypatch):
    """The innermost phases that are open, with the rollout; after them, the last that was."""
    shown = []
    monkeypatch.setattr(phases, "_phases", None)
    phases.show_phases(shown.append)
    with timer("train"), span("train_step"), span("request", track="requests"):
        set_rollout(7)
    with phases.phase("save_model"):
        pass
    assert shown == [
        "after its start",
        "train",
        "train > train_step",
        "rollout 7: train > train_step",
        "rollout 7: train",
        "rollout 7: after train",
        "rollout 7: save_model",
        "rollout 7: after save_model",
    ]


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (None, "py-spy is not installed"),
        ("echo 'Permission denied: try sudo' >&2; exit 1", "py-spy says: Permission denied: try"),
        ("sleep 30", "timed out after 0.2 seconds"),
    ],
)
def test_stacks_that_cannot_be_read_are_a_sentence(tmp_path, monkeypatch, script, said):
    """Without the tool, without the right to read another process, or where it hangs."""
    monkeypatch.setattr(stacks.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr(stacks, "TIMEOUT_S", 0.2 if script == "sleep 30" else 5.0)
    if script is not None:
        tool = tmp_path / "py-spy"
        tool.write_text(f"#!/bin/sh\n{'exec ' if script == 'sleep 30' else ''}{script}\n")
        tool.chmod(0o755)
    assert said in stacks.python_stacks(os.getpid())


def test_a_look_at_a_process_tells_whether_it_runs(started):
    """Its start, its processor time, whether it waits for a core; None for one that has ended."""
    busy = started("-c", "print('up', flush=True)\nwhile True: pass")
    busy.stdout.readline()
    before = look_at(busy.pid)
    time.sleep(0.5)
    after = look_at(busy.pid)
    assert after.cpu_s > before.cpu_s and after.is_runnable and not after.is_traced
    assert after.started == before.started == started_at(busy.pid)
    busy.kill()
    busy.wait()
    assert look_at(busy.pid) is None and started_at(busy.pid) is None


def test_a_debugged_process_is_seen_as_such(started):
    """One that a debugger holds has a tracer."""
    sleeper = started("-c", "import time; time.sleep(60)")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.ptrace(0x4206, sleeper.pid, 0, 0) != 0:  # PTRACE_SEIZE
        pytest.skip("this system does not let a process trace another")
    assert look_at(sleeper.pid).is_traced
    assert libc.ptrace(17, sleeper.pid, 0, 0) in (0, -1)  # PTRACE_DETACH


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
