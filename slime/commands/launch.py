"""`slime train` and `slime train-async`: from the command line to a loop that runs.

Imports no more than the options need: a wrong flag is answered before Ray and torch are imported.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Callable, Sequence

from slime.config.resume import nothing_left
from slime.exceptions import ConfigError
from slime.tracking.plain_output import keep_output_plain
from slime.utils.arguments import parse_args


def train(argv: Sequence[str] | None = None) -> int:
    """`slime train`: the synchronous loop."""
    return launch(argv, "slime.train")


def train_async(argv: Sequence[str] | None = None) -> int:
    """`slime train-async`: the loop with one rollout in flight ahead."""
    return launch(argv, "slime.train_async", check=require_two_sides)


def require_two_sides(args: argparse.Namespace) -> None:
    """ConfigError for options with which engines and trainers take turns, all of them at once: here
    they work at the same time.
    """
    problems = [
        "slime train-async needs devices of their own for trainers and engines, which work at the "
        "same time: "
        f"remove --{name.replace('_', '-')}, or use slime train"
        for name in ("colocate", "offload_train", "offload_rollout", "release_train")
        if getattr(args, name)
    ]
    if args.local:
        problems.append(
            "slime train-async runs engines and trainers at the same time, --local one after the "
            "other: use slime train --local."
        )
    if problems:
        raise ConfigError("\n".join(problems))


def launch(
    argv: Sequence[str] | None,
    loop: str,
    *,
    check: Callable[[argparse.Namespace], None] | None = None,
) -> int:
    """Parses the options, runs the loop of module `loop` inside a Ray session, and returns the exit
    status: 0 done, 1 failed or with problems in its report, 2 bad options, 130 interrupted.
    `check` raises ConfigError for options with which that loop cannot run.
    """
    started = time.monotonic()
    keep_output_plain()
    try:
        args = parse_args(argv)
        if check is not None:
            check(args)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.dry_run:
        return importlib.import_module("slime.commands.dry_run").dry_run(args)
    if (
        args.num_rollout is not None
        and (sentence := nothing_left(args, num_rollout=args.num_rollout)) is not None
    ):
        print(sentence, file=sys.stderr)
        return 0
    return importlib.import_module("slime.commands.session").run_to_the_end(
        args, importlib.import_module(loop).train, started
    )
