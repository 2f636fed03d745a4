"""The console script: it finds the right command, answers a wrong one, and imports only what is
needed."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import errno
import json
import os
import subprocess

import pytest
from support.options import write_run_inputs

from slime import __version__
from slime.cli import COMMANDS, Command, available_commands, main, usage
from slime.exceptions import ConfigError

NUM_GPUS = 0
ROOT = Path(__file__).resolve().parents[2]


def test_a_wrong_command_is_answered_with_the_right_one(capsys):
    """A wrong command is answered with the nearest one and status 2."""
    assert main(["trian"]) == 2
    assert "unknown command 'trian'. Did you mean train?" in capsys.readouterr().err
    assert main(["zzz"]) == 2
    assert "Commands: train" in capsys.readouterr().err


def test_without_words_the_commands_are_listed(capsys):
    """`slime` alone lists the commands."""
    assert main([]) == 2
    assert main(["--help"]) == 0
    assert "usage: slime COMMAND" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"slime {__version__}\n"


def test_every_listed_command_exists():
    """Every listed command can be imported."""
    commands = available_commands()
    assert set(commands) <= set(COMMANDS) and {"train", "train-async", "doctor"} <= set(commands)
    assert all(name in usage(commands) for name in commands)


def test_errors_of_a_command_are_one_line_and_status_2(monkeypatch, capsys):
    """A user's mistake is one line with status 2 and no traceback."""
    module = type(sys)("a_command_for_this_test")

    def broken(words):
        raise ConfigError("--x is 1. Use 2.")

    module.broken = broken
    monkeypatch.setitem(sys.modules, "a_command_for_this_test", module)
    monkeypatch.setattr(
        "slime.cli.available_commands",
        lambda: {"broken": Command("a_command_for_this_test:broken", "Fails.", raw=True)},
    )
    assert main(["broken"]) == 2
    assert capsys.readouterr().err == "error: --x is 1. Use 2.\n"


def test_print_config_prints_yaml_and_nothing_else(tmp_path, capsys):
    """--print-config prints YAML and nothing else, so that its output can be redirected to a
    file."""
    import yaml

    with pytest.raises(SystemExit) as stopped:
        main(["train", *write_run_inputs(tmp_path), "--print-config"])
    assert stopped.value.code == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["rollout_batch_size"] == 4
    assert (printed["derived"]["global_batch_size"], printed["derived"]["num_layers"]) == (8, 2)


def test_an_unknown_flag_ends_with_status_2_and_the_nearest_name():
    """In a process of its own an unknown flag ends with status 2 and the nearest name."""
    command = [sys.executable, "-m", "slime.cli", "train", "--n-sample-per-prompt", "4"]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, timeout=60, check=False
    )
    assert done.returncode == 2
    assert (
        done.stderr
        == "error: Unknown flag --n-sample-per-prompt. Did you mean --n-samples-per-prompt?\n"
    )
    assert done.stdout == ""


def test_our_own_commands_name_a_mistyped_flag():
    """Commands whose flags tyro makes from functions name a mistyped flag."""
    done = subprocess.run(
        [sys.executable, "-m", "slime.cli", "doctor", "--jsno"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2 and "--json" in done.stderr + done.stdout


def test_doctor_prints_json():
    """`slime doctor --json` prints JSON."""
    done = subprocess.run(
        [sys.executable, "-m", "slime.cli", "doctor", "--json"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    findings = json.loads(done.stdout)
    assert {"Python", "torch", "ray", "megatron-core"} <= {finding["name"] for finding in findings}
    assert done.returncode == (1 if any(finding["state"] == "fail" for finding in findings) else 0)


def test_a_reader_that_has_gone_ends_a_command_without_a_traceback(monkeypatch):
    """`slime audit RUN | head` ended with Python's traceback; another broken pipe is an error."""

    def broken(words):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr("slime.cli.load_entry", lambda command: broken)
    with pytest.raises(BrokenPipeError):
        main(["audit", "x"])
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as stream:
        stream.write("a line that nobody reads")
        monkeypatch.setattr("sys.stdout", stream)
        assert main(["audit", "x"]) == 141


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
