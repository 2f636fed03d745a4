"""Rules about what a run writes: checkpoints and dumps."""

from __future__ import annotations

import argparse

from slime.config.option import flag_of
from slime.config.rules.registry import rule


@rule("save", "save_interval")
def saving_has_a_place(args: argparse.Namespace):
    if args.save_interval is not None and args.save is None:
        return f"--save-interval {args.save_interval} needs --save, the folder of checkpoints."


@rule("save_debug_rollout_data", "save_debug_train_data")
def dumps_have_two_paths(args: argparse.Namespace):
    if (
        args.save_debug_train_data is not None
        and args.save_debug_train_data == args.save_debug_rollout_data
    ):
        return (
            "--save-debug-train-data must not be equal to --save-debug-rollout-data "
            f"({args.save_debug_train_data}): one would overwrite the other."
        )


@rule("save_debug_rollout_data", "save_debug_train_data")
def dumps_have_a_file_per_rollout(args: argparse.Namespace):
    problems = []
    for name, others in (("save_debug_rollout_data", {}), ("save_debug_train_data", {"rank": 0})):
        template = getattr(args, name)
        if template is None:
            continue
        known = " and ".join(["{rollout_id}", *(f"{{{other}}}" for other in others)])
        try:
            names = {template.format(rollout_id=rollout_id, **others) for rollout_id in (0, 1)}
        except (KeyError, IndexError, ValueError) as error:
            problems.append(
                f"{flag_of(name)} {template} has a placeholder other than {known} ({error}). Double "
                f"a brace that is meant: {{{{."
            )
            continue
        if len(names) == 1:
            problems.append(
                f"{flag_of(name)} {template} needs {{rollout_id}}, or each rollout overwrites the "
                "one before."
            )
    return problems
