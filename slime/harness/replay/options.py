"""The options of a replay: those of the recorded run, what is given beside them, and none of what a
run writes or sends.
"""

from __future__ import annotations

import argparse
import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slime.config.cli import parse_command_line
from slime.config.derive import apply_derived, derive
from slime.config.rules import broken_rules
from slime.config.secrets import with_stand_ins
from slime.config.specs import specs_by_name
from slime.config.yaml_file import DERIVED
from slime.exceptions import ConfigError
from slime.preflight.functions import hook_problems
from slime.preflight.inputs import gate_problems
from slime.recording.reader import RecordedRollout, Recording
from slime.rollout.rm_hub.type_names import rm_type_problem

# what a run writes, sends or asks for beside its numbers
LEFT_OUT = (
    "save",
    "critic_save",
    "save_interval",
    "save_hf",
    "record",
    "record_every",
    "record_keep",
    "record_max_gib",
    "record_weights",
    "save_debug_rollout_data",
    "save_debug_train_data",
    "dump_details",
    "run_dir",
    "run_name",
    "eval_interval",
    "use_wandb",
    "use_tensorboard",
    "write_report",
    "live_view",
    "num_rollout",
    "num_epoch",
    "start_rollout_id",
    "local",
    "debug_rollout_only",
    "ci_save_grad_norm",
    "ci_load_grad_norm",
    # the samples are recorded; nothing is generated
    "rollout_function_path",
    "eval_function_path",
    "data_source_path",
)


def replayed_options(rollout: RecordedRollout, words: Sequence[str]) -> argparse.Namespace:
    """The recorded options with those that `words` give, for a stage that runs in this process.
    ConfigError for words that are no options, and for values that cannot be together.
    """
    given = given_options(words)
    # an option that is newer than the recording has its default; no stage starts a rank
    defaults = {name: spec.default for name, spec in specs_by_name().items()}
    recorded = {**vars(rollout.options()), "local": False}
    args = argparse.Namespace(**{**defaults, **recorded, **given})
    if given:
        apply_derived(args, derive(args))
        problems = [text for text in broken_rules(args) if any(_names(text, n) for n in given)]
        if any(name.startswith("gate_") for name in given):
            # the gate itself reads the recorded tokenizer
            problems += gate_problems(argparse.Namespace(**{**vars(args), "hf_checkpoint": None}))
        if problems:
            raise ConfigError("\n".join(problems))
    return args


def given_options(words: Sequence[str]) -> dict[str, Any]:
    """The options of `slime train` that the words give, by name. ConfigError for words that are no
    options, and for reward types and functions that do not exist: nothing could be compared.
    """
    return dict(_parsed(tuple(words)))


@functools.lru_cache(maxsize=4)  # every stage of every rollout asks, and parsing takes 40 ms
def _parsed(words: tuple[str, ...]) -> Mapping[str, Any]:
    line = parse_command_line(list(words), None)
    if line.help_word is not None or line.print_config:
        raise ConfigError("slime replay takes options of slime train, without --help among them.")
    problems = hook_problems(line.args)
    if problem := rm_type_problem(line.args.rm_type):
        problems.insert(0, f"--rm-type: {problem}")
    if problems:
        raise ConfigError("\n".join(problems))
    values = dict(vars(line.args))
    return {name: values[name] for name in line.given}


def _names(text: str, name: str) -> bool:
    return "--" + name.replace("_", "-") in text


def recorded_config(recording: Recording, rollout: RecordedRollout) -> dict[str, Any]:
    """The content of a --config file for the recorded run, without `LEFT_OUT`."""
    known = specs_by_name()
    # keys and passwords were not recorded; no replay asks anybody for whom they were
    return {
        name: with_stand_ins(value)
        for name, value in recording.recorded_yaml(rollout.run).items()
        if name != DERIVED and name in known and name not in LEFT_OUT
    }


def tokenizer_folder(recording: Recording, options: Mapping[str, Any]) -> Path | None:
    """The recorded tokenizer, else the model folder of the options where it is there."""
    if recording.tokenizer_folder is not None:
        return recording.tokenizer_folder
    folder = options.get("hf_checkpoint")
    return Path(folder) if folder and os.path.isdir(folder) else None
