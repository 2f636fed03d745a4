"""`slime doctor --security RUN`: open ports, keys, file modes and pickles of a run."""

import json
import os
import pickle
import subprocess
import sys

import pytest
import torch

from slime.commands import run_security
from slime.commands.doctor import doctor

NUM_GPUS = 0

LISTENER = """
import socket, sys, time
own = open(sys.argv[1] + "/metrics.jsonl", "a")
sockets = [socket.create_server((host, 0)) for host in sys.argv[2:]]
print(*[server.getsockname()[1] for server in sockets], flush=True)
time.sleep(60)
"""


def listener(folder, *hosts):
    """A process that has a file of the folder open and listens; its ports."""
    words = [sys.executable, "-c", LISTENER, str(folder), *hosts]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    return process, [int(word) for word in process.stdout.readline().split()]


def test_ports_of_a_live_run_are_listed_and_open_ones_are_warned_about(tmp_path):
    """The processes of a run are those that have its files open, and their children. A port that
    other machines reach is a warning."""
    assert "it is over" in run_security.check_open_ports(tmp_path).detail
    process, ports = listener(tmp_path, "127.0.0.1", "127.0.0.1")
    try:
        finding = run_security.check_open_ports(tmp_path)
        assert finding.state == "ok" and "2, all on loopback" in finding.detail
        assert all(f"{port} (" in finding.detail for port in ports)
        assert f" {process.pid})" in finding.detail
    finally:
        process.kill()
        process.communicate()
    process, ports = listener(tmp_path, "127.0.0.1", "0.0.0.0")
    try:
        finding = run_security.check_open_ports(tmp_path)
        assert finding.state == "warn" and f"machines: {ports[1]} (" in finding.detail
        assert str(ports[0]) not in finding.detail
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    "text, state, said",
    [
        ("{}", "ok", "ask for the run's key"),
        ("no_api_key: true", "warn", "ask for none"),
        ("sglang_api_key: ''", "warn", "ask for none"),
        ("rollout_external_engine_addrs: ['http://127.0.0.1:1']", "ok", "external"),
        (None, "warn", "is missing"),
    ],
)
def test_the_recorded_options_tell_whether_engines_ask_for_a_key(tmp_path, text, state, said):
    """Whether there is a key, never which."""
    if text is not None:
        (tmp_path / "config.yaml").write_text(text)
    finding = run_security.check_keys(tmp_path)
    assert finding.state == state and said in finding.detail


def test_what_others_may_change_is_named(tmp_path):
    """A file or folder that other users may write is named, with what closes it."""
    os.chmod(tmp_path, 0o755)
    (tmp_path / "a.json").write_text("{}")
    os.chmod(tmp_path / "a.json", 0o644)
    assert run_security.check_modes(tmp_path).state == "ok"
    os.chmod(tmp_path / "a.json", 0o666)
    finding = run_security.check_modes(tmp_path)
    assert finding.state == "warn" and "1 of 2" in finding.detail and "a.json" in finding.detail
    assert finding.remedy == f"chmod -R go-w {tmp_path}"


def test_pickles_are_found_by_their_bytes(tmp_path):
    """A pickle under any name is found; the files of a checkpoint, which slime reads as data, are
    not warned about."""
    (tmp_path / "text.pkl").write_text("no pickle")
    assert run_security.check_pickles(tmp_path).detail == "none"
    torch.save({"a": 1}, tmp_path / "common.pt")
    (tmp_path / ".metadata").write_bytes(pickle.dumps({}))
    assert "2 files of the distributed checkpoint format" in str(
        run_security.check_pickles(tmp_path)
    )
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "notes.json").write_bytes(pickle.dumps([1]))
    torch.save([1], tmp_path / "dump_0.pt")
    finding = run_security.check_pickles(tmp_path)
    assert finding.state == "warn" and "2 beside the checkpoints' 2" in finding.detail
    assert "dump_0.pt, sub/notes.json" in finding.detail


def test_the_command_prints_and_its_status_tells(tmp_path, capsys):
    """0 without a warning, 1 with one, 2 without such a folder; --json for programs."""
    os.chmod(tmp_path, 0o700)
    (tmp_path / "config.yaml").write_text("{}")
    assert doctor(security=str(tmp_path)) == 0
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == [
        "Open",
        "Keys",
        "File",
        "Pickles",
    ]
    os.chmod(tmp_path, 0o777)
    assert doctor(json=True, security=str(tmp_path)) == 1
    states = [finding["state"] for finding in json.loads(capsys.readouterr().out)]
    assert states == ["ok", "ok", "warn", "ok"]
    assert doctor(security=str(tmp_path / "none")) == 2
    assert "there is no such folder" in capsys.readouterr().err


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
