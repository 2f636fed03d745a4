"""Rules between the options of slime/config/evaluation.py: data, a function and a score."""

from __future__ import annotations

import argparse

from slime.config.derive import FULLY_ASYNC
from slime.config.rules.registry import rule
from slime.config.rules.rollout import SUPERVISED, SYNCHRONOUS

DISTILLATION_REWARD = "slime.rollout.on_policy_distillation.reward_func"


@rule("eval_interval", "eval_prompt_data", "eval_config")
def evaluation_has_data(args: argparse.Namespace):
    if args.eval_interval is not None and not args.eval_prompt_data and not args.eval_config:
        return (
            f"--eval-interval {args.eval_interval} needs --eval-prompt-data NAME PATH (or "
            "--eval-config FILE.yaml)."
        )
    if args.eval_prompt_data and args.eval_config:
        return (
            "--eval-prompt-data and --eval-config exclude each other. Put the data sets of the "
            "first into the file of the second."
        )


@rule("eval_interval", "eval_function_path", "debug_train_only")
def evaluation_has_a_function(args: argparse.Namespace):
    if (
        args.eval_interval is None
        or args.debug_train_only
        or args.eval_function_path not in (FULLY_ASYNC, SUPERVISED)
    ):
        return None
    return (
        f"--eval-interval {args.eval_interval} asks for evaluations, which "
        f"{args.eval_function_path} does not make. Give --eval-function-path "
        f"{SYNCHRONOUS}, or leave out --eval-interval."
    )


@rule("eval_interval", "eval_prompt_data", "eval_config", "custom_rm_path", "rm_type")
def evaluation_of_a_distilled_policy_has_a_score(args: argparse.Namespace):
    if (
        args.eval_interval is None
        or args.eval_config
        or args.rm_type is not None
        or args.custom_rm_path != DISTILLATION_REWARD
    ):
        return None
    return (
        f"--eval-interval {args.eval_interval} has no score: --custom-rm-path "
        f"{DISTILLATION_REWARD} asks the teacher for log-probs. Give --rm-type, which "
        "scores evaluations then, or an --eval-config with rm_type or custom_rm_path for each data set."
    )


@rule("eval_prompt_data")
def evaluation_sets_are_pairs(args: argparse.Namespace):
    if args.eval_prompt_data and len(args.eval_prompt_data) != 1 and len(args.eval_prompt_data) % 2:
        words = " ".join(args.eval_prompt_data)
        return (
            f"--eval-prompt-data takes pairs NAME PATH, got {len(args.eval_prompt_data)} words: "
            f"{words}. Give each data set a name."
        )
