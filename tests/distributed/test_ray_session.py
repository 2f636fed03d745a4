"""A run's private Ray session: reachable from this machine alone, ended with the run, and a dead
cluster is reported at once."""

import argparse
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from slime.commands.run_security import descendants, listening_ports
from slime.exceptions import ConfigError
from slime.ray import cluster_folder, session

NUM_GPUS = 0

OPTIONS = argparse.Namespace(ray_address=None, num_cpus=2)
SLEEPER = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', "
    "flush=True); time.sleep(60)"
)


def start_sleeper(*words, obedient=True):
    """A process of ours with `words` on its command line; a disobedient one ignores SIGTERM."""
    script = (
        SLEEPER
        if not obedient
        else SLEEPER.replace("signal.signal(signal.SIGTERM, signal.SIG_IGN); ", "")
    )
    process = subprocess.Popen([sys.executable, "-c", script, *words], stdout=subprocess.PIPE)
    process.stdout.readline()
    return process


def test_every_process_of_a_session_listens_on_loopback_only_and_is_gone_afterwards(monkeypatch):
    """Every process of a session listens on loopback only, though Ray's default is all interfaces,
    and ends with it."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    before = {port.number for port in listening_ports([os.getpid()])}
    with session.ray_session(OPTIONS):
        import ray

        @ray.remote(num_cpus=0)
        def node_address():
            return ray.util.get_node_ip_address()

        assert ray.get(node_address.remote(), timeout=60) == "127.0.0.1"
        folder = ray._private.worker._global_node.get_temp_dir_path()
        assert folder.startswith("/tmp/slime-ray-")
        outer = os.path.dirname(folder)
        assert os.stat(outer).st_mode & 0o777 == 0o700, "Ray's own folder is open to everybody"
        assert os.stat(f"{outer}/token").st_mode & 0o777 == 0o600
        token = open(f"{outer}/token").read()
        pids = cluster_folder.processes_of(folder)
        assert not any(token in open(f"/proc/{pid}/cmdline").read() for pid in pids)
        assert refused_without_token(ray.get_runtime_context().gcs_address)
        assert len(pids) >= 2, "the cluster's control store and its node manager at least"
        tree = {pid for root in (os.getpid(), *pids) for pid in descendants(root)}
        found = [port for port in listening_ports(tree) if port.number not in before]
        assert found and all(port.is_loopback for port in found), found
    assert cluster_folder.processes_of(folder) == [] and not os.path.exists(outer)


def refused_without_token(address):
    """Whether the control store refuses a client that has another token."""
    script = (
        "import sys; from ray import _raylet\n"
        "try: _raylet.GcsClient(address=sys.argv[1]).internal_kv_keys(b'', None)\n"
        "except Exception as error: print(type(error).__name__)"
    )
    env = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "not-the-token"}
    env.pop("RAY_AUTH_TOKEN_PATH", None)
    words = [sys.executable, "-c", script, address]
    answer = subprocess.run(words, env=env, capture_output=True, text=True, timeout=60)
    return answer.stdout.strip() == "AuthenticationError"


DRIVER = """
import argparse, os, sys, time
import ray
from slime.commands.session import print_failure
from slime.ray import session
from slime.ray.run_watch import cluster_processes
from slime.ray.utils import wait_for

@ray.remote(num_cpus=0)
class Sleeper:
    def sleep(self):
        time.sleep(60)

try:
    with session.ray_session(argparse.Namespace(ray_address=None, num_cpus=2)):
        sleeper = Sleeper.remote()
        ray.get(sleeper.__ray_ready__.remote())
        (_, store), (_, manager), *_ = cluster_processes()
        folder = ray._private.worker._global_node.get_temp_dir_path()
        print(store, manager, folder, flush=True)
        wait_for([sleeper.sleep.remote()], what="sleeping", timeout_s=60)
except Exception as error:
    sys.exit(print_failure(error))
"""


@pytest.fixture
def driver(monkeypatch):
    """(process of a driver, ids of its control store and its node manager, the folder of its
    cluster).
    """
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVER], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    *pids, folder = process.stdout.readline().split()
    folder = os.path.dirname(folder)
    yield process, [int(pid) for pid in pids], folder
    process.kill()
    process.wait()
    cluster_folder.end_processes_of(folder)
    cluster_folder.remove_folder(folder)


@pytest.mark.parametrize(
    ("place", "name"), [(0, "control store, gcs_server,"), (1, "node manager")]
)
def test_a_dead_process_of_the_cluster_is_named_at_once_and_ends_the_run(driver, place, name):
    """The driver names what was killed of its cluster and ends in seconds, where Ray's own way is a
    minute and an abort, or another process's name; nothing is left."""
    process, pids, folder = driver
    tree = run_tree(process.pid)
    begun = time.monotonic()
    os.kill(pids[place], signal.SIGKILL)
    first = process.stderr.readline()
    while "has died" not in first:
        first = process.stderr.readline()
    named_after = time.monotonic() - begun
    _, rest = process.communicate(timeout=40)
    assert f"Ray's {name}" in first and f"(process {pids[place]}) has died" in first
    assert named_after < 5
    assert "error: Ray's " + name in rest and "--load" in rest
    assert process.returncode == 1 and time.monotonic() - begun < 30
    deadline = time.monotonic() + 10
    while (os.path.exists(folder) or still_run(tree)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert still_run(tree) == [] and not os.path.exists(folder)


def run_tree(driver):
    """{process id: start} of a driver's cluster, agents that change their title among them."""
    return {pid: cluster_folder.started_at(pid) for pid in descendants(driver) if pid != driver}


def still_run(tree):
    """The processes of `run_tree` that have not ended."""
    now = {pid: cluster_folder.started_at(pid) for pid in tree}
    return [pid for pid, start in tree.items() if start is not None and now[pid] == start]


@pytest.mark.parametrize("is_guarded", [True, False], ids=["guarded", "guard killed too"])
def test_what_a_driver_killed_with_9_leaves_goes_at_once_or_with_the_next_run(driver, is_guarded):
    """Folder and processes of a cluster whose driver was killed with -9 go within seconds, without
    another run; where the guard was killed as well, with the next sweep."""
    process, (store, _), folder = driver
    assert folder not in cluster_folder.sweep() and os.path.exists(folder), "its driver lives"
    tree = run_tree(process.pid)
    (guard,) = [
        pid for pid in tree if b"slime.ray.cluster_folder" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]  # fmt: skip
    if not is_guarded:
        os.kill(guard, signal.SIGKILL)
    process.kill()
    process.wait()
    if not is_guarded:
        assert os.path.exists(folder) and os.stat(folder).st_mode & 0o777 == 0o700
        assert folder in cluster_folder.sweep()
    deadline = time.monotonic() + 10
    while (still_run(tree) or os.path.exists(folder)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert still_run(tree) == [] and store in tree and not os.path.exists(folder)


@pytest.mark.parametrize("to_the_end", [False, True])
def test_signals_after_the_first_do_not_reach_the_cleanup(to_the_end):
    """Ten times Ctrl-C ended the driver inside Ray's shutdown, and left processes: the handlers of
    before were back by then."""
    before = {number: signal.getsignal(number) for number in session.ENDING}
    cleaned = []
    try:
        with pytest.raises(KeyboardInterrupt, match="SIGINT"):
            with session.interruptible(to_the_end=to_the_end):
                try:
                    with session.interruptible():
                        os.kill(os.getpid(), signal.SIGINT)
                finally:
                    for number in session.ENDING:
                        os.kill(os.getpid(), number)
                    cleaned.append(True)
        after = {number: signal.getsignal(number) for number in session.ENDING}
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert cleaned
    assert after == (dict.fromkeys(before, signal.SIG_IGN) if to_the_end else before)


def test_a_signal_inside_the_shutdown_takes_effect_at_its_end():
    """The first one, once."""
    done = []
    with pytest.raises(KeyboardInterrupt, match="SIGTERM"), session.interruptible():
        with session.uninterrupted():
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGINT):
                os.kill(os.getpid(), number)
            done.append(True)
        done.append("not reached")
    assert done == [True]


def test_only_folders_of_this_user_whose_owner_is_gone_are_swept(tmp_path, monkeypatch):
    """A folder stays while the process that made it lives, where it is another user's or a link,
    and for an hour where it names nobody. An id that was given again is another process."""
    memory = tmp_path / "memory"
    memory.mkdir()
    monkeypatch.setattr(cluster_folder, "PLACE", tmp_path)
    monkeypatch.setattr(cluster_folder, "MEMORY", memory)
    own = cluster_folder.make_folder()
    kept = [
        cluster_folder.memory_folder(str(tmp_path / f"slime-ray-{name}"))
        for name in ("gone", "young")
    ]
    assert all(place.stat().st_mode & 0o077 == 0 for place in kept)
    (memory / "slime-ray-old").mkdir(mode=0o755)
    assert cluster_folder.memory_folder(str(tmp_path / "slime-ray-old")) is None, "not for us alone"
    started = cluster_folder.started_at(os.getpid())
    for name, owner in {
        "again": f'{{"pid": {os.getpid()}, "started": {started - 1}}}',
        "gone": '{"pid": 4194305, "started": 7}',
        "young": None,
        "old": None,
        "damaged": '{"pid"',
    }.items():
        folder = tmp_path / f"slime-ray-{name}"
        folder.mkdir()
        if owner is not None:
            (folder / "owner.json").write_text(owner)
    os.utime(tmp_path / "slime-ray-old", (1, 1))
    (tmp_path / "slime-ray-link").symlink_to(tmp_path / "slime-ray-again")
    uid = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    assert cluster_folder.sweep(tmp_path) == []
    monkeypatch.setattr(os, "getuid", lambda: uid)
    swept = {os.path.basename(folder) for folder in cluster_folder.sweep(tmp_path)}
    assert swept == {"slime-ray-again", "slime-ray-gone", "slime-ray-old"}
    assert os.path.isdir(own) and (tmp_path / "slime-ray-young").is_dir()
    assert sorted(os.listdir(memory)) == ["slime-ray-old", "slime-ray-young"]


def test_an_interrupt_inside_the_start_of_ray_leaves_no_process(monkeypatch):
    """An interrupt while Ray starts leaves no process, though Ray's shutdown does not know those
    that it was starting."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    started = []

    def interrupted_init(**options):
        started.append(
            (options["_temp_dir"], start_sleeper(f"--session-dir={options['_temp_dir']}/session_1"))
        )
        raise KeyboardInterrupt("SIGINT")

    monkeypatch.setattr(session.ray, "init", interrupted_init)
    with pytest.raises(KeyboardInterrupt), session.ray_session(OPTIONS):
        raise AssertionError("the session never began")
    ((folder, process),) = started
    assert process.wait(timeout=10) == -signal.SIGTERM
    assert not os.path.exists(folder)


def test_a_process_that_ignores_the_request_is_killed_and_others_stay(tmp_path):
    """A process of the run that ignores SIGTERM is killed, and foreign processes stay."""
    stubborn, foreign = start_sleeper(str(tmp_path), obedient=False), start_sleeper("/elsewhere")
    try:
        begun = time.monotonic()
        # reaps it, so that it leaves /proc
        threading.Thread(target=stubborn.wait, daemon=True).start()
        cluster_folder.end_processes_of(str(tmp_path), patience_s=0.3)
        deadline = time.monotonic() + 5
        while stubborn.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        assert stubborn.poll() == -signal.SIGKILL and time.monotonic() - begun < 5
        assert foreign.poll() is None
    finally:
        for process in (stubborn, foreign):
            process.kill()
            process.wait()


@pytest.fixture
def silent_port():
    """A port of a server that accepts connections and never answers."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


def test_a_dead_cluster_is_one_sentence_at_once(monkeypatch):
    """A dead cluster is reported in one sentence at once; Ray itself prints warnings for two
    minutes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
    begun = time.monotonic()
    with pytest.raises(ConfigError) as caught, session.ray_session(OPTIONS):
        raise AssertionError("there is no cluster")
    assert time.monotonic() - begun < 10
    text = str(caught.value)
    assert (
        text.startswith(
            f"no Ray cluster answers at 127.0.0.1:{port} (RAY_ADDRESS in the environment): "
        )
        and "\n" not in text
    )
    assert "leave it out: the run then starts Ray by itself" in text


def test_a_server_that_is_no_cluster_is_given_up_after_the_deadline(silent_port):
    """A server that is no cluster, or a frozen one, is given up after the deadline."""
    with pytest.raises(
        ConfigError, match="accepts connections, but does not answer as a Ray cluster within 0.5 s"
    ):
        session.require_cluster(f"127.0.0.1:{silent_port}", named_by="--ray-address", timeout_s=0.5)


@pytest.mark.parametrize("address", ["head", "head:", "head:port", ":6379"])
def test_an_address_that_is_none_is_refused(address):
    """An address that is not HOST:PORT is refused."""
    with pytest.raises(ConfigError, match="is no address. Write HOST:PORT, or auto"):
        session.require_cluster(address, named_by="--ray-address")


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
