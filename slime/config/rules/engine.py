"""Rules about engines: how they are laid out and how weights reach them."""

from __future__ import annotations

import argparse

from slime.config.rules.registry import rule


@rule(
    "rollout_num_gpus",
    "rollout_num_gpus_per_engine",
    "debug_train_only",
    "rollout_external_engine_addrs",
)
def engines_divide(args: argparse.Namespace):
    if (
        args.debug_train_only
        or args.rollout_external_engine_addrs
        or not args.rollout_num_gpus
        or args.rollout_num_gpus_per_engine < 1
    ):
        return None
    if args.rollout_num_gpus % args.rollout_num_gpus_per_engine:
        fits = (
            -(-args.rollout_num_gpus // args.rollout_num_gpus_per_engine)
            * args.rollout_num_gpus_per_engine
        )
        return (
            f"--rollout-num-gpus {args.rollout_num_gpus} does not divide into engines of "
            "--rollout-num-gpus-per-engine "
            f"{args.rollout_num_gpus_per_engine}. Use {fits}."
        )


@rule("update_weight_transport", "update_weight_disk_dir")
def disk_transport_has_a_folder(args: argparse.Namespace):
    if args.update_weight_transport == "disk" and args.update_weight_disk_dir is None:
        return (
            "--update-weight-transport disk needs --update-weight-disk-dir, a folder that all "
            "nodes share."
        )


@rule("offload_rollout", "rollout_external_engine_addrs")
def external_engines_keep_their_memory(args: argparse.Namespace):
    if args.offload_rollout and args.rollout_external_engine_addrs:
        return (
            "--offload-rollout frees the memory of engines that the run starts; those of "
            "--rollout-external-engine-addrs are not its own. Leave it out."
        )


@rule(
    "rollout_external_engine_addrs",
    "update_weight_transport",
    "debug_train_only",
    "debug_rollout_only",
)
def external_engines_get_weights(args: argparse.Namespace):
    trains_and_generates = not (args.debug_train_only or args.debug_rollout_only)
    if (
        args.rollout_external_engine_addrs
        and args.update_weight_transport != "disk"
        and trains_and_generates
    ):
        return (
            f"--update-weight-transport {args.update_weight_transport} reaches only engines that "
            "the run starts; those of "
            "--rollout-external-engine-addrs would keep their weights. Use --update-weight-transport disk --update-weight-disk-dir FOLDER."
        )


@rule(
    "update_weight_mode",
    "update_weight_transport",
    "colocate",
    "update_weight_local_checkpoint_dir",
)
def delta_updates_are_possible(args: argparse.Namespace):
    if args.update_weight_mode != "delta":
        return None
    problems = []
    if args.update_weight_transport != "disk":
        problems.append("--update-weight-mode=delta requires --update-weight-transport=disk.")
    if args.colocate:
        problems.append("--update-weight-mode=delta is not supported with --colocate.")
    if args.update_weight_local_checkpoint_dir is None:
        problems.append("--update-weight-mode=delta requires --update-weight-local-checkpoint-dir.")
    return problems


@rule("sglang_api_key", "no_api_key")
def key_is_one_or_none(args: argparse.Namespace):
    if args.no_api_key and args.sglang_api_key:
        return "--no-api-key and --sglang-api-key exclude each other. Leave one out."
