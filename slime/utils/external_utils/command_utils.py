"""Launching a training command from Python, for launch scripts and tests: the same command line as
in a shell, in a process of its own.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence

from slime.exceptions import ConfigError
from slime.utils.misc import exec_command

__all__ = ["exec_command", "execute_train"]

_MODULES = {"train.py": "slime.train", "train_async.py": "slime.train_async"}


def execute_train(
    train_args: str | Sequence[str],
    num_gpus_per_node: int | None = None,
    *,
    train_script: str = "train.py",
    extra_env_vars: Mapping[str, str] | None = None,
) -> None:
    """Runs `slime train` (or, with `train_script="train_async.py"`, `slime train-async`) and
    returns when it has ended well.

    `train_args` are the words of the command line, or one string that is split as a shell does.
    `num_gpus_per_node`: the run sees the first so many CUDA devices, unless CUDA_VISIBLE_DEVICES
    names others; a machine without CUDA has none to choose from. ConfigError for another script;
    subprocess.CalledProcessError, with the exit status, for a run that failed.
    """
    if train_script not in _MODULES:
        raise ConfigError(f"train_script {train_script!r} is none of {', '.join(_MODULES)}.")
    words = shlex.split(train_args) if isinstance(train_args, str) else list(train_args)
    environment = {**os.environ, **(extra_env_vars or {})}
    if num_gpus_per_node is not None:
        environment.setdefault("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(num_gpus_per_node))))
    command = [sys.executable, "-m", _MODULES[train_script], *words]
    subprocess.run(command, check=True, env=environment)
