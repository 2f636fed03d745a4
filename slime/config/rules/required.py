"""What a run cannot do without: a model, prompts, a number of rollouts."""

from __future__ import annotations

import argparse

from slime.config.rules.registry import rule


@rule("hf_checkpoint")
def hf_checkpoint_is_given(args: argparse.Namespace):
    if args.hf_checkpoint is None:
        return (
            "--hf-checkpoint is missing: give a Hugging Face folder with config.json, tokenizer "
            "and weights."
        )


@rule("prompt_data", "rollout_global_dataset", "debug_train_only", "load_debug_rollout_data")
def prompts_are_given(args: argparse.Namespace):
    needs_prompts = args.rollout_global_dataset and not args.load_debug_rollout_data
    if needs_prompts and args.prompt_data is None:
        return (
            "--prompt-data is missing: give a .jsonl, .parquet, .json or .csv file, or "
            "--disable-rollout-global-dataset if your rollout "
            "function brings its own data."
        )


@rule("rollout_batch_size")
def rollout_batch_size_is_given(args: argparse.Namespace):
    if args.rollout_batch_size is None:
        return (
            "--rollout-batch-size is missing: give the number of prompts per rollout, for "
            "instance 32."
        )


@rule("num_rollout", "num_epoch", "rollout_global_dataset", "load_debug_rollout_data")
def number_of_rollouts_is_given(args: argparse.Namespace):
    if args.num_rollout is None and args.num_epoch is None:
        return "--num-rollout is missing: give it, or --num-epoch."
    if args.num_rollout is None and not args.rollout_global_dataset:
        return (
            "--num-epoch counts passes over --prompt-data, which "
            "--disable-rollout-global-dataset turns off. Use --num-rollout."
        )
    if args.num_rollout is None and args.load_debug_rollout_data:
        return (
            "--num-epoch counts passes over --prompt-data, which --load-debug-rollout-data does "
            "not read. Use --num-rollout, as many as were recorded."
        )


@rule("debug_train_only", "debug_rollout_only")
def only_one_half_is_debugged(args: argparse.Namespace):
    if args.debug_train_only and args.debug_rollout_only:
        return (
            "--debug-train-only and --debug-rollout-only exclude each other "
            "(--load-debug-rollout-data implies the first). Remove one."
        )
