"""Rules between the options of slime/config/reward.py: where the reward comes from."""

from __future__ import annotations

import argparse

from slime.config.rules.registry import rule
from slime.config.rules.rollout import generates


@rule("length_penalty", "length_penalty_buffer", "rollout_max_response_len")
def a_length_penalty_has_a_budget_and_is_applied(args: argparse.Namespace):
    name, budget, buffer = (
        args.length_penalty,
        args.rollout_max_response_len,
        args.length_penalty_buffer,
    )
    if name != "none" and (
        args.custom_reward_post_process_path or args.custom_convert_samples_to_train_data_path
    ):
        return (
            f"--length-penalty {name} is not applied beside a custom reward post-process or a "
            "custom converter. Remove one of them."
        )
    if name in ("soft_overlong", "linear") and budget is None:
        return (
            f"--length-penalty {name} is about --rollout-max-response-len, which is missing. "
            "Give it."
        )
    if buffer is not None and (name != "soft_overlong" or not 1 <= buffer <= budget):
        return (
            f"--length-penalty-buffer is {buffer}: soft_overlong alone reads it, from 1 to "
            f"--rollout-max-response-len {budget}."
        )


@rule(
    "rm_type",
    "custom_rm_path",
    "rm_url",
    "rollout_function_path",
    "custom_generate_function_path",
    "debug_train_only",
)
def reward_is_chosen(args: argparse.Namespace):
    # a generate function may set the reward itself; where it does not, scoring says that no reward
    # function was given
    chosen = args.rm_type or args.custom_rm_path or args.custom_generate_function_path
    if generates(args) and not chosen:
        return (
            "--rm-type is missing: name a built-in scorer, for instance exact_match or math, or "
            "give --custom-rm-path."
        )
    if (
        args.rm_type is not None
        and args.rm_type.split("boxed_")[-1] == "remote_rm"
        and args.rm_url is None
    ):
        return "--rm-type remote_rm needs --rm-url, the address of the reward model."
