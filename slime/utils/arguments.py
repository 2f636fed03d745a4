"""`parse_args`: from the command line to one checked namespace. Composes `slime.config` with what a
model folder and a dataset say.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from slime.config.cli import CommandLine, format_help, join_problems, parse_command_line, reset_arg
from slime.config.derive import adjustments, apply_derived, derive
from slime.config.machine_rules import cuda_is_here, machine_problems, missing_path
from slime.config.megatron import megatron_fields
from slime.config.ranges import range_problem, range_problems
from slime.config.resume import resume_problems
from slime.config.rules import broken_rules
from slime.config.specs import all_specs, flag_of, nearest_names, require_choice, specs_by_name
from slime.config.yaml_file import format_resolved
from slime.exceptions import ConfigError
from slime.preflight.functions import hook_problems
from slime.tested_versions import requirement

__all__ = ["parse_args", "parse_megatron_role_args", "reset_arg", "resolve", "slime_validate_args"]

# Reading every row of every prompt file before the start finds the bad one in time; a huge file is
# left to the loader after this.
PREFLIGHT_SECONDS = 3.0


def parse_args(
    argv: Sequence[str] | Callable | None = None, add_custom_arguments: Callable | None = None
) -> argparse.Namespace:
    """Returns all options, derived and checked. `--help` and `--print-config` print and raise
    SystemExit(0).

    `parse_args(add_custom_arguments)` is upstream's call. Warnings go to stderr. Beside the options
    the namespace has `dry_run`, `given_options` (option -> where it was given), `flag_counts`, and
    `as_requested` (values before disk and clock had their say). Raises ConfigError that lists every
    problem: unknown flags and keys, wrong types, broken rules, missing files.
    """
    if callable(argv):
        argv, add_custom_arguments = None, argv
    line = parse_command_line(argv, add_custom_arguments)
    if line.help_word is not None:
        print(format_help(all_specs(), line.help_word), end="")
        raise SystemExit(0)
    for warning in line.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    args = resolve(line)
    if line.print_config:
        print(format_resolved(args, all_specs()), end="")
        raise SystemExit(0)
    return args


def resolve(line: CommandLine) -> argparse.Namespace:
    """Returns the namespace of a parsed command line with all derived values. Raises ConfigError
    with every problem there is.
    """
    if not megatron_fields():
        raise ConfigError(
            "megatron-core is not installed, so its options are unknown and nothing can train. "
            f"pip install '{requirement('megatron-core')}'"
        )
    args = line.args
    args.dry_run, args.given_options, args.flag_counts = line.dry_run, line.given, line.counts
    out_of_range = range_problems(args)
    # The other checks compute with these numbers: they get the defaults, and the run ends anyway.
    defaults = {name: specs_by_name()[name].default for name in out_of_range}
    args = argparse.Namespace(**{**vars(args), **defaults})
    for warning in adjustments(args):
        print(f"warning: {warning}", file=sys.stderr)
    apply_derived(args, derive(args))
    problems = (
        list(out_of_range.values())
        + broken_rules(args, unusable=out_of_range)
        + machine_problems(args)
        + model_problems(args)
        + layout_rules(args)
        + role_problems(args)
        + gate_problems(args)
        + reward_problems(args)
        + resume_problems(args)
        + dataset_problems(args)
    )
    if args.accelerator != "auto" and not cuda_is_here(args):
        # get_accelerator() asks the environment, which reaches every process of the run; a user's
        # module may ask while it is imported.
        os.environ["SLIME_ACCELERATOR"] = args.accelerator
    problems += hook_problems(args)
    if problems:
        raise ConfigError(join_problems(list(dict.fromkeys(problems))))
    return args


def slime_validate_args(args: argparse.Namespace) -> None:
    """Derives and checks in place, on any namespace: steps and rules whose options are missing from
    it are skipped.

    Raises ConfigError (a ValueError) with every broken rule.
    """
    apply_derived(args, derive(args))
    problems = broken_rules(args)
    if problems:
        raise ConfigError(join_problems(problems))


def model_problems(args: argparse.Namespace) -> list[str]:
    """Fills in the model shape from --hf-checkpoint/config.json; returns what contradicts it or is
    not supported.
    """
    from slime.config.derive import is_hf_folder
    from slime.models.megatron_fields import contradictions, megatron_fields
    from slime.models.shape import read_model_shape

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
    from slime.backends.megatron_utils.layout import layout_problems

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
    from slime.gate.gate import gate_config_from_args

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
    from slime.prompts.eval_config import eval_datasets_of
    from slime.rollout.rm_hub.type_names import missing_key_problem, rm_type_problem

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
                else missing_path(flag, path, "file")
            )
    return problems


def _evaluation_files(args: argparse.Namespace) -> list[tuple[Any, tuple[str]]]:
    """(evaluation dataset, (where it was given,)) of --eval-config, else of --eval-prompt-data."""
    from slime.prompts.eval_config import eval_datasets_of

    if args.eval_config is not None and not Path(args.eval_config).is_file():
        return []
    where = f"--eval-config {args.eval_config}: {{}}" if args.eval_config else "--eval-prompt-data"
    return [(one, (where.format(one.name),)) for one in eval_datasets_of(args)]


def _first_bad_row(
    args: argparse.Namespace, path: str, keys: tuple, deadline: float
) -> str | FileNotFoundError | None:
    from slime.prompts.dataset import RowFormat, build_sample
    from slime.prompts.prompt_files import parse_generalized_path, read_rows
    from slime.rollout.rm_hub.type_names import rm_type_problem

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


def parse_megatron_role_args(args: argparse.Namespace, path: str, role: str) -> argparse.Namespace:
    """Returns a copy of `args` with the overrides that YAML file `path` has for `role`: `megatron:
    [{role: ..., overrides: {...}}]`.

    Raises ConfigError for a file of another form, an unknown option, or a value of a wrong type,
    each with its place.
    """
    import yaml

    try:
        with open(path, encoding="utf-8") as file:
            content = yaml.safe_load(file)
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: {error}") from error
    entries = content.get("megatron") if isinstance(content, dict) else None
    if not isinstance(entries, list):
        raise ConfigError(f"{path}: expected `megatron:` with a list of {{role, overrides}}.")
    result = copy.copy(args)
    for entry in entries:
        if not isinstance(entry, dict) or set(entry) - {"role", "overrides"} or "role" not in entry:
            raise ConfigError(
                f"{path}: an entry of `megatron` must have the keys role and overrides, got "
                f"{entry!r}."
            )
        if entry["role"] == role:
            for name, value in (entry.get("overrides") or {}).items():
                setattr(result, name, _role_value(path, role, name, value))
    return result


def _role_value(path: str, role: str, name: str, value: object) -> Any:
    specs = specs_by_name()
    if name not in specs:
        near = nearest_names(name, specs)
        raise ConfigError(
            f"{path}: role {role}: unknown option {name!r}."
            + (f" Did you mean {near[0]!r}?" if near else "")
        )
    spec = specs[name]
    # YAML reads 1e-6 as text, and 1 where 1.0 is meant.
    if spec.kind is float and isinstance(value, int | str) and not isinstance(value, bool):
        try:
            value = float(value)
        except ValueError:
            pass
    items = value if spec.many and isinstance(value, list) else [value]
    if not (value is None and spec.optional) and not all(type(item) is spec.kind for item in items):
        raise ConfigError(
            f"{path}: role {role}: {flag_of(name)} is {value!r}, must be {spec.type_name}."
        )
    try:
        for item in items:
            require_choice(spec, item)
    except ValueError as error:
        raise ConfigError(f"{path}: role {role}: {flag_of(name)}: {error}") from error
    if (problem := range_problem(spec, value)) is not None:
        raise ConfigError(f"{path}: role {role}: {flag_of(name)} {problem}")
    return value
