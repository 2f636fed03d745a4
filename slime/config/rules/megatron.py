"""Rules between options of Megatron-core: precision and the schedule of the learning rate."""

from __future__ import annotations

import argparse

from slime.config.rules.registry import rule


@rule("bf16", "fp16")
def one_precision(args: argparse.Namespace):
    if args.bf16 and args.fp16:
        return "--bf16 and --fp16 exclude each other. Use --bf16."


@rule("lr_warmup_iters", "lr_warmup_fraction")
def one_warm_up(args: argparse.Namespace):
    if args.lr_warmup_iters and args.lr_warmup_fraction is not None:
        return (
            f"--lr-warmup-iters {args.lr_warmup_iters} and --lr-warmup-fraction "
            f"{args.lr_warmup_fraction} exclude each other. Remove one."
        )


@rule("override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler")
def one_schedule_after_a_resume(args: argparse.Namespace):
    if args.override_opt_param_scheduler and args.use_checkpoint_opt_param_scheduler:
        return (
            "--override-opt-param-scheduler and --use-checkpoint-opt-param-scheduler exclude "
            "each other. Remove one."
        )
