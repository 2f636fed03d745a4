"""What stands at a path that an option names may be anything: a pipe, a socket, a device, an empty
folder, a link to itself. Each is a sentence at once, never a wait, and none is answered with the
same path."""

import os
import socket
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pytest
from support.options import write_run_inputs

from slime.exceptions import ConfigError
from slime.utils.arguments import parse_args

NUM_GPUS = 0

FILE_OPTIONS = ("--config", "--custom-config-path", "--eval-config", "--megatron-config-path")
MODEL_OPTIONS = ("--hf-checkpoint", "--load", "--ref-load")


def make_odd(path, kind):
    """Makes what is no prompt file, no options file and no model folder at `path`."""
    path.parent.mkdir(exist_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        short = Path(path.name)  # a socket's path is short
        before = os.getcwd()
        os.chdir(path.parent)
        try:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(short))
        finally:
            os.chdir(before)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "link to itself":
        path.symlink_to(path)
    else:
        path.mkdir()
    return str(path)


def problem_of(words):
    start = time.monotonic()
    with pytest.raises(ConfigError) as caught:
        parse_args(words)
    assert time.monotonic() - start < 8
    return str(caught.value)


@pytest.mark.parametrize("kind", ["pipe", "socket", "device", "link to itself", "empty folder"])
@pytest.mark.parametrize("option", ["--prompt-data", "--eval-prompt-data"])
def test_odd_prompt_files_are_named(tmp_path, option, kind):
    """Prompts for training and for evaluation, also after a slice."""
    path = make_odd(tmp_path / "odd" / "rows.jsonl", kind)
    given = [option, *(["one"] if "eval" in option else []), path + "@[0:2]"]
    said = problem_of([*write_run_inputs(tmp_path), *given, "--eval-interval", "1"])
    assert path in said and "Did you mean" not in said


@pytest.mark.parametrize("kind", ["pipe", "socket", "device", "link to itself", "empty folder"])
@pytest.mark.parametrize("option", FILE_OPTIONS)
def test_odd_option_files_are_named(tmp_path, option, kind):
    """Files of options in YAML."""
    path = make_odd(tmp_path / "odd" / "options.yaml", kind)
    said = problem_of([*write_run_inputs(tmp_path), option, path, "--eval-interval", "1"])
    assert path in said and f"Did you mean {path}" not in said


@pytest.mark.parametrize("kind", ["pipe", "socket", "device", "link to itself", "empty folder"])
@pytest.mark.parametrize("option", MODEL_OPTIONS)
def test_odd_model_folders_are_named(tmp_path, option, kind):
    """Model folders and checkpoints."""
    path = make_odd(tmp_path / "odd" / "model", kind)
    said = problem_of([*write_run_inputs(tmp_path), option, path])
    assert path in said and f"Did you mean {path}" not in said


@pytest.mark.parametrize("content", [b"\xff3\n", b"", b"\0", b"9" * 5000, "\u0663".encode()])
@pytest.mark.parametrize("option", ["--load", "--ref-load"])
def test_a_damaged_pointer_to_the_latest_checkpoint_is_named(tmp_path, option, content):
    """The pointer file of a checkpoint folder with a damaged byte is refused before anything
    starts."""
    (tmp_path / "run4" / "iter_0000003").mkdir(parents=True)
    (tmp_path / "run4" / "latest_checkpointed_iteration.txt").write_bytes(content)
    said = problem_of([*write_run_inputs(tmp_path), option, str(tmp_path / "run4")])
    assert "latest_checkpointed_iteration.txt holds" in said and len(said) < 2000


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
