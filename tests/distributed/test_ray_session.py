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

import pytest

from slime.exceptions import ConfigError
from slime.ray import session

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


def listening_addresses(pids):
    """{(address, port): process ids} of the TCP sockets on which `pids` listen, from /proc."""
    owners = {}
    for pid in pids:
        for entry in os.listdir(f"/proc/{pid}/fd"):
            try:
                target = os.readlink(f"/proc/{pid}/fd/{entry}")
            except OSError:
                continue
            if target.startswith("socket:["):
                owners.setdefault(target[8:-1], set()).add(pid)
    found = {}
    for table in ("tcp", "tcp6"):
        for line in open(f"/proc/net/{table}").read().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in owners:
                found.setdefault(tuple(words[1].split(":")), set()).update(owners[words[9]])
    return found


def test_every_process_of_a_session_listens_on_loopback_only_and_is_gone_afterwards(monkeypatch):
    """Every process of a session listens on loopback only, though Ray's default is all interfaces,
    and ends with it."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    before = listening_addresses([os.getpid()])
    with session.ray_session(OPTIONS):
        import ray

        @ray.remote(num_cpus=0)
        def node_address():
            return ray.util.get_node_ip_address()

        assert ray.get(node_address.remote(), timeout=60) == "127.0.0.1"
        folder = ray._private.worker._global_node.get_temp_dir_path()
        assert folder.startswith("/tmp/slime-ray-")
        pids = session.processes_of(folder)
        assert len(pids) >= 2, "the cluster's control store and its node manager at least"
        children = ["ps", "-o", "pid=", "--ppid", ",".join(map(str, pids))]
        workers = [
            int(word)
            for word in subprocess.run(children, capture_output=True, text=True).stdout.split()
        ]
        found = listening_addresses([os.getpid(), *pids, *workers])
        found = {place: owners for place, owners in found.items() if place not in before}
        loopback = {
            "0100007F",
            "00000000000000000000000001000000",
            "0000000000000000FFFF00000100007F",
        }
        assert found and {address for address, _ in found} <= loopback, found
    assert session.processes_of(folder) == [] and not os.path.exists(folder)


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
        session.end_processes_of(str(tmp_path), patience_s=0.3)
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
