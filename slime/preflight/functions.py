"""Loads every user's function that the options name and checks it against the table of extension
points. Calls none of them.
"""

from __future__ import annotations

import argparse
import inspect
import warnings
from collections.abc import Iterator

from slime.config.extension_points import EXTENSION_POINTS
from slime.config.specs import specs_by_name
from slime.exceptions import ConfigError
from slime.plugins.loading import load_hook
from slime.prompts.eval_config import eval_datasets_of

# an evaluation dataset may have its own, and a sample
SAMPLE_OPTIONS = ("custom_rm_path", "custom_generate_function_path")


def hooks_of(args: argparse.Namespace) -> Iterator[tuple[str, str, str]]:
    """(option, path, where the path was given) of every user's function that the options and
    evaluation datasets name.
    """
    defaults = specs_by_name()
    for option, point in EXTENSION_POINTS.items():
        value = getattr(args, option)
        if (
            not value
            or value == defaults[option].default
            or (option == "eval_function_path" and value == args.rollout_function_path)
        ):
            continue
        for path in value if isinstance(value, list) else [value]:
            yield option, path, f"{point.flag} {path}"
    if not args.eval_config:
        return
    for dataset in eval_datasets_of(args):
        for option in SAMPLE_OPTIONS:
            path = getattr(dataset, option)
            if path and path != getattr(args, option):
                yield (
                    option,
                    path,
                    f"--eval-config {args.eval_config}: {dataset.name}: {option} {path}",
                )


def hook_problems(args: argparse.Namespace) -> list[str]:
    """One sentence per user's function that does not exist or cannot be called. Imports the modules
    that hold them.
    """
    problems = []
    try:
        hooks = list(hooks_of(args))
    except (ConfigError, TypeError) as error:
        return [str(error)]
    for option, path, where in hooks:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the processes that call the function show them
                load_hook(option, path, where=where)
        except ConfigError as error:
            problems.append(str(error))
    return problems


def format_hooks(args: argparse.Namespace) -> list[str]:
    """One line per user's function of a checked run: where it was given, and where it
    is defined.
    """
    lines = []
    for option, path, where in hooks_of(args):
        function = inspect.unwrap(load_hook(option, path, where=where))
        code = getattr(function, "__code__", None)
        lines.append(
            f"✓ {where}"
            + (f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else "")
        )
    return lines
