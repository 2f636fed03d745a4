"""Rules of batch sizes: batches, steps and micro-batches divide."""

from __future__ import annotations

import argparse

from slime.config.rules.registry import either, nearest_divisors, rule


@rule("rollout_batch_size", "n_samples_per_prompt", "global_batch_size", "num_steps_per_rollout")
def batches_divide(args: argparse.Namespace):
    if args.rollout_batch_size is None or args.global_batch_size is None:
        return None
    samples = args.rollout_batch_size * args.n_samples_per_prompt
    product = (
        f"--rollout-batch-size {args.rollout_batch_size} x --n-samples-per-prompt "
        f"{args.n_samples_per_prompt} = {samples} samples"
    )
    steps = args.num_steps_per_rollout
    if min(samples, args.global_batch_size) < 1 or (steps is not None and steps < 1):
        return None
    if steps is not None and samples % steps:
        return (
            f"{product} do not divide over --num-steps-per-rollout {steps}. Use "
            f"{either(nearest_divisors(samples, steps))}."
        )
    if steps is not None and args.global_batch_size * steps != samples:
        return (
            f"{product} in --num-steps-per-rollout {steps} make {samples // steps} per step, but "
            "--global-batch-size is "
            f"{args.global_batch_size}. Use --global-batch-size {samples // steps}, or leave one of the two out."
        )
    if samples % args.global_batch_size and not vars(args).get("keep_trailing_rollouts"):
        fits = either(nearest_divisors(samples, args.global_batch_size))
        return (
            f"{product} do not divide into steps of --global-batch-size {args.global_batch_size}. "
            f"Use {fits}, or --keep-trailing-rollouts."
        )


@rule("over_sampling_batch_size", "rollout_batch_size")
def over_sampling_is_not_under_sampling(args: argparse.Namespace):
    if (
        None not in (args.over_sampling_batch_size, args.rollout_batch_size)
        and args.over_sampling_batch_size < args.rollout_batch_size
    ):
        return (
            f"--over-sampling-batch-size {args.over_sampling_batch_size} is below "
            f"--rollout-batch-size {args.rollout_batch_size}. "
            f"Use {args.rollout_batch_size} or more, or leave it out."
        )


@rule("use_dynamic_batch_size", "max_tokens_per_gpu")
def dynamic_batches_have_a_cap(args: argparse.Namespace):
    if args.use_dynamic_batch_size and args.max_tokens_per_gpu is None:
        return (
            "--use-dynamic-batch-size needs --max-tokens-per-gpu: the tokens of one micro-batch "
            "on one GPU, for instance 8192."
        )


@rule("max_tokens_per_gpu", "log_probs_max_tokens_per_gpu", "micro_batch_packing")
def one_cap_serves_both_passes(args: argparse.Namespace):
    if args.log_probs_max_tokens_per_gpu != args.max_tokens_per_gpu:
        return (
            f"--log-probs-max-tokens-per-gpu {args.log_probs_max_tokens_per_gpu} differs from "
            f"--max-tokens-per-gpu {args.max_tokens_per_gpu}: "
            "one schedule serves both passes here. Leave the first out."
        )


@rule("use_dynamic_batch_size", "balance_by_flops")
def flops_balance_needs_dynamic_batches(args: argparse.Namespace):
    if args.balance_by_flops and not args.use_dynamic_batch_size:
        return (
            "--balance-by-flops needs --use-dynamic-batch-size (and --max-tokens-per-gpu): "
            "fixed micro-batches cannot be balanced."
        )
