"""Checks options against what they name: model folder, layout, gate, rewards and prompt files.

Each function returns problems as sentences; `input_problems` asks all of them.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from slime.backends.megatron_utils.layout import layout_problems
from slime.config.derive import apply_derived, derive, is_hf_folder
from slime.config.machine_rules import missing_path
from slime.config.resume import resume_problems
from slime.config.yaml_file import parse_megatron_role_args
from slime.exceptions import ConfigError
from slime.gate.gate import gate_config_from_args
from slime.models.megatron_fields import contradictions, megatron_fields
from slime.models.shape import read_model_shape
from slime.prompts.dataset import RowFormat, build_sample
from slime.prompts.eval_config import eval_datasets_of
from slime.prompts.prompt_files import parse_generalized_path, read_rows
from slime.rollout.rm_hub.type_names import missing_key_problem, rm_type_problem

# Reading every row of every prompt file before the start finds the bad one in time; a huge file is
# left to the loader after this.
PREFLIGHT_SECONDS = 3.0


def model_problems(args: argparse.Namespace) -> list[str]:
    """Fills in the model shape from --hf-checkpoint/config.json; returns what contradicts it or is
    not supported.
    """
    if not is_hf_folder(args.hf_checkpoint):
        return []  # machine_problems has said so
    try:
        shape = read_model_shape(args.hf_checkpoint)
    except ConfigError as error:
        return [f"--hf-checkpoint: {error}"]
    problems = contradictions(vars(args), shape)
    derived = {
        name: value for name, value in megatron_fields(shape).items() if getattr(args, name) is None
    }
    if args.seq_length is None:
        derived["seq_length"] = derived.get("max_position_embeddings", args.max_position_embeddings)
    apply_derived(args, derived)
    apply_derived(args, derive(args))
    return problems


def layout_rules(args: argparse.Namespace) -> list[str]:
    """Returns why the parallel layout cannot work for this model and number of ranks."""
    ranks = args.actor_num_nodes * args.actor_num_gpus_per_node
    return layout_problems(args, world_size=None if args.debug_rollout_only or ranks < 1 else ranks)


def role_problems(args: argparse.Namespace) -> list[str]:
    """Returns what is wrong with the file of --megatron-config-path, which is read when the
    training processes start.
    """
    if args.megatron_config_path is None:
        return []
    try:
        for role in ("actor", "critic"):
            parse_megatron_role_args(args, args.megatron_config_path, role)
    except ConfigError as error:
        return [f"--megatron-config-path: {error}"]
    return []


def gate_problems(args: argparse.Namespace) -> list[str]:
    """Returns what is wrong with the --gate-* options, as the gate itself would say at its first
    rollout.
    """
    try:
        config = gate_config_from_args(args)
    except ConfigError as error:
        return [str(error)]
    longest = args.rollout_max_response_len
    if longest is not None and config.min_response_tokens > longest:
        return [
            (
                f"--gate-min-response-tokens {config.min_response_tokens} exceeds "
                f"--rollout-max-response-len {longest}: no response could be valid."
            )
        ]
    return []


def reward_problems(args: argparse.Namespace) -> list[str]:
    """Returns which reward types do not exist, lack their package or their key: of --rm-type and of
    each evaluation dataset. Those of rows are checked with the rows.
    """
    named = [("--rm-type", args.rm_type)]
    if args.eval_config is not None and Path(args.eval_config).is_file():
        try:
            named += [
                (f"--eval-config {args.eval_config}: {dataset.name}: rm_type", dataset.rm_type)
                for dataset in eval_datasets_of(args)
            ]
        except (ConfigError, TypeError) as error:
            return [str(error)]
    problems = [(name, problem) for name, rm_type in named if (problem := rm_type_problem(rm_type))]
    if problem := missing_key_problem(args):
        problems.append(("--rm-type", problem))
    return list({problem: f"{name}: {problem}" for name, problem in problems[::-1]}.values())[::-1]


def dataset_problems(args: argparse.Namespace, *, seconds: float = PREFLIGHT_SECONDS) -> list[str]:
    """Returns the first bad row (file, line, reason) of each prompt file; reading stops after
    `seconds` without an error.
    """
    files = []
    if (
        args.prompt_data is not None
        and args.rollout_global_dataset
        and not args.load_debug_rollout_data
    ):
        files.append(
            ("--prompt-data", args.prompt_data, args.input_key, args.label_key, args.tool_key)
        )
    if args.eval_interval is not None:
        try:
            files += [
                (*place, one.path, one.input_key, one.label_key, one.tool_key)
                for one, place in _evaluation_files(args)
            ]
        except (ConfigError, TypeError):
            pass  # said where the reward types are looked at
    deadline = time.monotonic() + seconds
    problems = []
    for flag, path, input_key, label_key, tool_key in files:
        problem = _first_bad_row(args, path, (input_key, label_key, tool_key), deadline)
        if problem is not None:
            problems.append(
                f"{flag}: {problem}"
                if isinstance(problem, str)
                else missing_path(flag, parse_generalized_path(path)[0], "file")
            )
    return problems


def _evaluation_files(args: argparse.Namespace) -> list[tuple[Any, tuple[str]]]:
    """(evaluation dataset, (where it was given,)) of --eval-config, else of --eval-prompt-data."""
    if args.eval_config is not None and not Path(args.eval_config).is_file():
        return []
    where = f"--eval-config {args.eval_config}: {{}}" if args.eval_config else "--eval-prompt-data"
    return [(one, (where.format(one.name),)) for one in eval_datasets_of(args)]


def _first_bad_row(
    args: argparse.Namespace, path: str, keys: tuple, deadline: float
) -> str | FileNotFoundError | None:
    form = RowFormat(
        prompt_key=keys[0], label_key=keys[1], tool_key=keys[2], metadata_key=args.metadata_key
    )
    try:
        for number, row in enumerate(read_rows(path)):
            # The template is left to the loader: rendering needs the tokenizer, and that needs
            # seconds.
            problem = rm_type_problem(build_sample(row, form).metadata.get("rm_type"))
            if problem is not None:
                return f"{row.place}: rm_type {problem}"
            if number % 256 == 0 and time.monotonic() > deadline:
                break
    except FileNotFoundError as error:
        # A folder that is there and holds no prompts has its own sentence; near names would give
        # back the same path.
        return str(error) if Path(parse_generalized_path(path)[0]).expanduser().exists() else error
    except ConfigError as error:
        return str(error)
    except OSError as error:
        return f"{path}: {error}."
    return None


def input_problems(args: argparse.Namespace) -> list[str]:
    """Every problem of the options with what they name, and of users' functions with their tables.

    Fills in the model's shape from its folder on the way; the order is the order of the message.
    """
    return (
        model_problems(args)
        + layout_rules(args)
        + role_problems(args)
        + gate_problems(args)
        + reward_problems(args)
        + resume_problems(args)
        + dataset_problems(args)
    )
