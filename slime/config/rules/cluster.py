"""Rules about processes: which there are, their environment, and how batches travel."""

from __future__ import annotations

import argparse

from slime.algorithms.table import ESTIMATORS
from slime.config.rules.registry import rule


@rule("rollout_data_transport")
def rollout_batches_travel_through_the_object_store(args: argparse.Namespace):
    if args.rollout_data_transport != "object-store":
        return (
            f"--rollout-data-transport {args.rollout_data_transport} is not built in: shards "
            "travel through Ray's object store, where ranks of a "
            "node share one copy. Leave the option out."
        )


@rule("train_env_vars")
def environment_of_the_trainers_is_text(args: argparse.Namespace):
    wrong = {
        name: value for name, value in args.train_env_vars.items() if not isinstance(value, str)
    }
    if wrong:
        return f"--train-env-vars: values must be texts, got {wrong!r}. Write numbers in quotes."


@rule("local", "release_train")
def one_process_is_not_ended_between_rollouts(args: argparse.Namespace):
    if args.local and args.release_train:
        return (
            "--release-train ends the trainers' processes while engines generate, and --local "
            "has one process for both. Leave one of them out."
        )


@rule("local", "recovery_interval")
def one_process_cannot_be_started_again(args: argparse.Namespace):
    if args.local and args.recovery_interval:
        return (
            "--recovery-interval starts training processes again, and with --local training is a "
            "part of the run's only process. Leave one of them out."
        )


@rule("local", "use_fault_tolerance")
def one_process_has_no_successor(args: argparse.Namespace):
    if args.local and args.use_fault_tolerance:
        return (
            "--use-fault-tolerance starts a new process for an engine that died, and with --local "
            "the engine is a part of the run's only process. Leave one of them out."
        )


@rule(
    "local",
    "actor_num_nodes",
    "actor_num_gpus_per_node",
    "advantage_estimator",
    "use_sglang_router",
    "ray_address",
    "debug_rollout_only",
)
def one_process_holds_the_run(args: argparse.Namespace):
    if not args.local:
        return None
    problems = []
    ranks = args.actor_num_nodes * (args.actor_num_gpus_per_node or 1)
    if ranks > 1 and not args.debug_rollout_only:
        problems.append(
            f"--local trains on one rank, but --actor-num-nodes {args.actor_num_nodes} x "
            "--actor-num-gpus-per-node "
            f"{args.actor_num_gpus_per_node} = {ranks}. Use --actor-num-gpus-per-node 1."
        )
    if ESTIMATORS[args.advantage_estimator].needs_critic:
        problems.append(
            "--local holds one trained model, and --advantage-estimator "
            f"{args.advantage_estimator} trains a critic too. "
            "Leave --local out."
        )
    if args.use_sglang_router:
        problems.append(
            "--local starts no process, and --use-sglang-router is one. Leave one of them out."
        )
    if args.ray_address is not None:
        problems.append(
            f"--local uses no Ray, but --ray-address is {args.ray_address}. Leave one of them out."
        )
    return problems
