"""The asynchronous loop: generates one rollout while the one before trains (off-policy by one).

    python -m slime.train_async --config run.yaml        or slime train-async --config run.yaml

Engines and trainers need devices of their own, so `--colocate` is refused.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from slime.commands.launch import launch
from slime.exceptions import ConfigError
from slime.ray.utils import wait_for
from slime.train import (
    Run,
    evaluate,
    evaluate_at_start,
    generate,
    save,
    train_on,
    update_weights,
)


def check(args: argparse.Namespace) -> None:
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


def train(run: Run) -> None:
    """Runs rollouts `start_rollout_id .. num_rollout - 1` with one rollout in flight ahead of the
    trainer.
    """
    args = run.args
    check(args)
    evaluates = args.eval_interval is not None and not args.debug_train_only
    evaluate_at_start(run)
    ahead = generate(run, run.start_rollout_id) if run.start_rollout_id < run.num_rollout else None
    for rollout_id in range(run.start_rollout_id, run.num_rollout):
        (shards,) = wait_for([ahead], what=f"rollout {rollout_id}", timeout_s=args.step_timeout)
        ahead = generate(run, rollout_id + 1) if rollout_id + 1 < run.num_rollout else None
        if args.debug_rollout_only:
            continue
        train_on(run, rollout_id, shards)
        if run.is_due_to_save(rollout_id):
            save(run, rollout_id)
        if (rollout_id + 1) % args.update_weights_interval == 0 and not args.debug_train_only:
            if ahead is not None:
                # No weights may change under a running generation, or one sample would mix two
                # policies unnoticed.
                wait_for([ahead], what=f"rollout {rollout_id + 1}", timeout_s=args.step_timeout)
            update_weights(run)
        if evaluates and run.is_due(rollout_id, args.eval_interval):
            if ahead is not None:
                # The end of a generation aborts every request on the engines, those of an
                # evaluation too.
                wait_for([ahead], what=f"rollout {rollout_id + 1}", timeout_s=args.step_timeout)
            evaluate(run, rollout_id + 1)


def main(argv: Sequence[str] | None = None) -> int:
    """`slime train-async`."""
    return launch(argv, "slime.train_async")


if __name__ == "__main__":
    raise SystemExit(main())
