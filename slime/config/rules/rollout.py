"""Rules of the rollout: what a rollout function needs to make samples."""

from __future__ import annotations

import argparse

from slime.algorithms.table import LOSSES
from slime.config.derive import FULLY_ASYNC
from slime.config.rules.registry import rule

SYNCHRONOUS = "slime.rollout.sglang_rollout.generate_rollout"
SUPERVISED = "slime.rollout.sft_rollout.generate_rollout"
NONZERO_STD = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"
SFT_HINT = (
    f" For supervised fine-tuning on given conversations: --rollout-function-path {SUPERVISED}."
)


def generates(args: argparse.Namespace) -> bool:
    """Whether slime's own rollout functions sample responses in this run: a user's function has its
    own needs.
    """
    return args.rollout_function_path in (SYNCHRONOUS, FULLY_ASYNC) and not args.debug_train_only


@rule("rollout_max_prompt_len", "rollout_max_context_len")
def prompt_leaves_room(args: argparse.Namespace):
    if (
        None not in (args.rollout_max_prompt_len, args.rollout_max_context_len)
        and args.rollout_max_prompt_len >= args.rollout_max_context_len
    ):
        return (
            f"--rollout-max-prompt-len {args.rollout_max_prompt_len} leaves no room for a response "
            "within --rollout-max-context-len "
            f"{args.rollout_max_context_len}. Use {args.rollout_max_context_len - 1} or less."
        )


@rule(
    "rollout_max_response_len",
    "rollout_max_context_len",
    "debug_train_only",
    "rollout_function_path",
    "loss_type",
)
def responses_end(args: argparse.Namespace):
    if (
        generates(args)
        and args.rollout_max_response_len is None
        and args.rollout_max_context_len is None
    ):
        hint = SFT_HINT if LOSSES[args.loss_type].is_supervised else ""
        return (
            "--rollout-max-response-len is missing: give it (tokens), or "
            f"--rollout-max-context-len; responses would not end.{hint}"
        )


@rule("rollout_batch_order", "rollout_function_path")
def fully_async_batches_are_filled_in_order_of_completion(args: argparse.Namespace):
    if args.rollout_function_path == FULLY_ASYNC and args.rollout_batch_order == "submission":
        return (
            "--rollout-batch-order submission cannot hold with the fully asynchronous rollout, "
            "whose batches are the first groups to finish. "
            f"Leave it out, or use --rollout-function-path {SYNCHRONOUS}."
        )


@rule(
    "dynamic_sampling_filter_path",
    "n_samples_per_prompt",
    "rollout_function_path",
    "debug_train_only",
)
def the_filter_can_keep_a_group(args: argparse.Namespace):
    if (
        generates(args)
        and args.dynamic_sampling_filter_path == NONZERO_STD
        and args.n_samples_per_prompt == 1
    ):
        return (
            f"--dynamic-sampling-filter-path {NONZERO_STD} keeps groups whose rewards differ, and "
            "--n-samples-per-prompt 1 makes groups of one: "
            "it would drop every group. Use --n-samples-per-prompt 2 or more, or leave the filter out."
        )


@rule("keep_old_actor", "partial_rollout", "rollout_function_path")
def kept_weights_are_those_of_the_whole_rollout(args: argparse.Namespace):
    spans_versions = args.partial_rollout or "fully_async" in args.rollout_function_path
    if args.keep_old_actor and spans_versions:
        cause = (
            "--partial-rollout"
            if args.partial_rollout
            else f"--rollout-function-path {args.rollout_function_path}"
        )
        return (
            f"--keep-old-actor with {cause}: the tokens of one rollout are of several versions of "
            "the weights, and two are kept, so old log-probs would "
            "be of the wrong one. Remove --keep-old-actor; --use-rollout-logprobs takes each token's log-prob from the engine that sampled it."
        )


@rule("partial_rollout", "mask_offpolicy_in_partial_rollout")
def off_policy_mask_needs_partial_rollout(args: argparse.Namespace):
    if args.mask_offpolicy_in_partial_rollout and not args.partial_rollout:
        return (
            "--mask-offpolicy-in-partial-rollout needs --partial-rollout: without it no token "
            "of an earlier policy is kept."
        )


@rule("apply_chat_template", "rollout_function_path")
def supervised_training_renders_conversations_itself(args: argparse.Namespace):
    if args.apply_chat_template and args.rollout_function_path == SUPERVISED:
        return (
            "supervised training renders conversations itself and needs them as they are: "
            "remove --apply-chat-template."
        )
