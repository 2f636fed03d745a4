"""`slime train` and `slime train-async`: from the command line to a loop that runs.

Imports no more than the options need: a wrong flag is answered before Ray and torch are imported.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Sequence

from slime.config.resume import nothing_left
from slime.exceptions import ConfigError
from slime.tracking.plain_output import keep_output_plain
from slime.utils.arguments import parse_args


def train(argv: Sequence[str] | None = None) -> int:
    """`slime train`: the synchronous loop."""
    return launch(argv, "slime.train")


def train_async(argv: Sequence[str] | None = None) -> int:
    """`slime train-async`: the loop with one rollout in flight ahead."""
    return launch(argv, "slime.train_async")


def launch(argv: Sequence[str] | None, loop: str) -> int:
    """Parses the options, runs the loop of module `loop` inside a Ray session, and returns the exit
    status: 0 done, 1 failed or with problems in its report, 2 bad options, 130 interrupted.
    """
    started = time.monotonic()
    keep_output_plain()
    try:
        args = parse_args(argv)
        module = importlib.import_module(loop)
        getattr(module, "check", lambda args: None)(args)
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
        args, module.train, started
    )
