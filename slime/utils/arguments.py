"""`parse_args`: from the command line to one checked namespace. Composes `slime.config` with what a
model folder and a dataset say.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from slime.config.cli import CommandLine, format_help, join_problems, parse_command_line, reset_arg
from slime.config.derive import adjustments, apply_derived, derive
from slime.config.machine_rules import cuda_is_here, machine_problems
from slime.config.megatron import megatron_fields
from slime.config.ranges import range_problems
from slime.config.rules import broken_rules
from slime.config.specs import all_specs, specs_by_name
from slime.config.yaml_file import format_resolved, parse_megatron_role_args
from slime.exceptions import ConfigError
from slime.tested_versions import requirement

__all__ = ["parse_args", "parse_megatron_role_args", "reset_arg", "resolve", "slime_validate_args"]


def parse_args(
    argv: Sequence[str] | Callable | None = None, add_custom_arguments: Callable | None = None
) -> argparse.Namespace:
    """Returns all options, derived and checked. `--help` and `--print-config` print and raise
    SystemExit(0).

    `parse_args(add_custom_arguments)` is upstream's call. Warnings go to stderr. Beside the options
    the namespace has `dry_run`, `given_options` (option -> where it was given), `flag_counts`, and
    `as_requested` (values before disk and clock were read). Raises ConfigError that lists every
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
    # late: --help and a wrong flag are answered before numpy is imported
    from slime.preflight.functions import hook_problems
    from slime.preflight.inputs import input_problems

    problems = (
        list(out_of_range.values())
        + broken_rules(args, unusable=out_of_range)
        + machine_problems(args)
        + input_problems(args)
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
