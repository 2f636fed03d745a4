"""Computes what follows from the given options, once after parsing; deriving twice changes nothing.
What was given stays, except for switches that can have no effect (`adjustments`).

Each step reads the named options and returns new values. A step runs when the namespace has all
options it reads: the command line always has, a caller of `slime_validate_args` with upstream's
short namespace may not.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.metadata
import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from slime.algorithms.table import ESTIMATORS
from slime.config.observability import resolve_run_dir

FULLY_ASYNC = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"
CHECKPOINT_TRACKER = "latest_checkpointed_iteration.txt"

Step = Callable[[argparse.Namespace], dict[str, Any]]
STEPS: list[tuple[frozenset[str], Step]] = []


def step(*reads: str) -> Callable[[Step], Step]:
    """Registers a derivation that reads these options; order of registration is order
    of execution.
    """

    def register(function: Step) -> Step:
        STEPS.append((frozenset(reads), function))
        return function

    return register


def derive(args: argparse.Namespace) -> dict[str, Any]:
    """Returns all derived values of `args` that differ from what it holds; `args` itself is not
    touched.
    """
    work = argparse.Namespace(**vars(args))
    changed: dict[str, Any] = {}
    for reads, function in STEPS:
        if all(hasattr(work, name) for name in reads):
            for name, value in function(work).items():
                if not hasattr(work, name) or getattr(work, name) != value:
                    setattr(work, name, value)
                    changed[name] = value
    return changed


def uses_cuda(accelerator: str) -> bool:
    """Whether training would run on CUDA: as asked for, else by SLIME_ACCELERATOR, else by what
    torch's build and the machine offer.
    """
    if accelerator == "auto":
        accelerator = os.environ.get("SLIME_ACCELERATOR", "").strip().lower() or "auto"
    return cuda_is_usable() if accelerator == "auto" else accelerator == "cuda"


def cuda_is_usable() -> bool:
    """Whether torch, if it were imported, would find a CUDA device: it was built for CUDA, and a
    device is there and not hidden.
    """
    return why_no_cuda() is None


@functools.lru_cache(maxsize=1)
def why_no_cuda() -> str | None:
    """Returns why torch would find no CUDA device; None where it would."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return "torch is not installed"
    if version.endswith("+cpu"):
        return f"torch {version} is a CPU build"
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return f"CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']!r} hides every device"
    return None if Path("/dev/nvidiactl").exists() else "this machine has no NVIDIA driver"


def has_megatron_checkpoint(folder: str | None) -> bool:
    """Whether `folder` holds a published Megatron checkpoint: the tracker file that names the
    latest iteration.
    """
    return folder is not None and (Path(folder) / CHECKPOINT_TRACKER).is_file()


def is_hf_folder(folder: str | None) -> bool:
    """Whether `folder` looks like a Hugging Face model folder: it has a config.json."""
    return folder is not None and (Path(folder) / "config.json").is_file()


@step("dump_details", "save_debug_rollout_data", "save_debug_train_data")
def _dump_paths(args: argparse.Namespace) -> dict[str, Any]:
    if args.dump_details is None:
        return {}
    return {
        "save_debug_rollout_data": args.save_debug_rollout_data
        or f"{args.dump_details}/rollout_data/{{rollout_id}}.parquet",
        "save_debug_train_data": args.save_debug_train_data
        or f"{args.dump_details}/train_data/{{rollout_id}}.parquet",
    }


@step("load_debug_rollout_data", "debug_train_only")
def _train_only(args: argparse.Namespace) -> dict[str, Any]:
    return {"debug_train_only": True} if args.load_debug_rollout_data is not None else {}


@step("eps_clip", "eps_clip_high")
def _clip_range(args: argparse.Namespace) -> dict[str, Any]:
    return {"eps_clip_high": args.eps_clip} if args.eps_clip_high is None else {}


@step("reward_key", "eval_reward_key", "rollout_function_path", "eval_function_path")
def _evaluation(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "eval_reward_key": args.reward_key
        if args.eval_reward_key is None
        else args.eval_reward_key,
        "eval_function_path": args.rollout_function_path
        if args.eval_function_path is None
        else args.eval_function_path,
    }


@step("rollout_max_context_len", "eval_max_context_len", "rollout_max_prompt_len")
def _lengths(args: argparse.Namespace) -> dict[str, Any]:
    longest = args.rollout_max_context_len
    if longest is None:
        return {}
    return {
        "eval_max_context_len": longest
        if args.eval_max_context_len is None
        else args.eval_max_context_len,
        # One token of room, or nothing could be generated.
        "rollout_max_prompt_len": longest - 1
        if args.rollout_max_prompt_len is None
        else args.rollout_max_prompt_len,
    }


@step(
    "rollout_batch_size",
    "n_samples_per_prompt",
    "global_batch_size",
    "num_steps_per_rollout",
    "over_sampling_batch_size",
)
def _batch_sizes(args: argparse.Namespace) -> dict[str, Any]:
    values: dict[str, Any] = {}
    if args.rollout_batch_size is None:
        return values
    if args.over_sampling_batch_size is None:
        values["over_sampling_batch_size"] = args.rollout_batch_size
    executions = args.rollout_batch_size * args.n_samples_per_prompt
    if args.global_batch_size is None and (
        args.num_steps_per_rollout is None or args.num_steps_per_rollout > 0
    ):
        values["global_batch_size"] = executions // (args.num_steps_per_rollout or 1)
    return values


@step("rollout_batch_order", "rollout_function_path")
def _batch_order(args: argparse.Namespace) -> dict[str, Any]:
    if args.rollout_batch_order is not None:
        return {}
    return {
        "rollout_batch_order": "completion"
        if args.rollout_function_path == FULLY_ASYNC
        else "submission"
    }


@step("n_samples_per_prompt", "grpo_std_normalization")
def _group_of_one(args: argparse.Namespace) -> dict[str, Any]:
    # The standard deviation of one reward is zero: dividing by it would only amplify rounding.
    return {"grpo_std_normalization": False} if args.n_samples_per_prompt == 1 else {}


@step("max_tokens_per_gpu", "log_probs_max_tokens_per_gpu", "balance_by_flops", "balance_data")
def _packing(args: argparse.Namespace) -> dict[str, Any]:
    values: dict[str, Any] = {"balance_data": True} if args.balance_by_flops else {}
    if args.log_probs_max_tokens_per_gpu is None:
        values["log_probs_max_tokens_per_gpu"] = args.max_tokens_per_gpu
    return values


@step("accelerator", "actor_num_gpus_per_node", "actor_num_nodes")
def _actor_devices(args: argparse.Namespace) -> dict[str, Any]:
    if args.actor_num_gpus_per_node is not None:
        return {}
    return {"actor_num_gpus_per_node": 8 if uses_cuda(args.accelerator) else 1}


@step("critic_num_gpus_per_node", "critic_num_nodes", "actor_num_gpus_per_node", "actor_num_nodes")
def _critic_devices(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "critic_num_nodes": args.actor_num_nodes
        if args.critic_num_nodes is None
        else args.critic_num_nodes,
        "critic_num_gpus_per_node": args.actor_num_gpus_per_node
        if args.critic_num_gpus_per_node is None
        else args.critic_num_gpus_per_node,
    }


@step("accelerator", "distributed_backend")
def _backend(args: argparse.Namespace) -> dict[str, Any]:
    return (
        {"distributed_backend": "nccl" if uses_cuda(args.accelerator) else "gloo"}
        if args.distributed_backend is None
        else {}
    )


@step("colocate", "offload", "offload_train", "offload_rollout", "rollout_external_engine_addrs")
def _offload(args: argparse.Namespace) -> dict[str, Any]:
    default = bool(args.colocate or args.offload)
    frees_engines = default and not args.rollout_external_engine_addrs
    return {
        "offload_train": default if args.offload_train is None else args.offload_train,
        "offload_rollout": frees_engines if args.offload_rollout is None else args.offload_rollout,
    }


@step(
    "colocate",
    "rollout_num_gpus",
    "actor_num_gpus_per_node",
    "actor_num_nodes",
    "debug_rollout_only",
)
def _colocated_engines(args: argparse.Namespace) -> dict[str, Any]:
    if not args.colocate or args.debug_rollout_only:
        return {}
    actor_gpus = args.actor_num_gpus_per_node * args.actor_num_nodes
    # 0 means no engine at all, and more than the actor's means that the rest are engines alone:
    # both are meant.
    if args.rollout_num_gpus is None or 0 < args.rollout_num_gpus < actor_gpus:
        return {"rollout_num_gpus": actor_gpus}
    return {}


@step("rollout_num_gpus", "rollout_num_gpus_per_engine", "rollout_num_engines")
def _engines(args: argparse.Namespace) -> dict[str, Any]:
    if args.rollout_num_gpus is not None:
        return {}
    return {"rollout_num_gpus": (args.rollout_num_engines or 1) * args.rollout_num_gpus_per_engine}


def _reference_weights(args: argparse.Namespace) -> str | None:
    """Where the reference's weights lie: the same iteration that the reference takes, or the first
    step's KL would not be 0.
    """
    if args.ref_ckpt_step is None or not has_megatron_checkpoint(args.ref_load):
        return args.ref_load
    return str(Path(args.ref_load) / f"iter_{args.ref_ckpt_step:07d}")


@step(
    "load",
    "ref_load",
    "ref_ckpt_step",
    "no_load_optim",
    "no_load_rng",
    "finetune",
    "start_rollout_id",
    "save",
)
def _where_to_start(args: argparse.Namespace) -> dict[str, Any]:
    """Without a checkpoint to resume, training starts at rollout 0 from the reference's (or the
    Hugging Face folder's) weights.
    """
    if has_megatron_checkpoint(args.load):
        return {}
    return {
        "no_load_optim": True,
        "no_load_rng": True,
        "finetune": True,
        "load": args.load if is_hf_folder(args.load) else _reference_weights(args),
        "start_rollout_id": 0 if args.start_rollout_id is None else args.start_rollout_id,
    }


@step("advantage_estimator", "save", "critic_save", "load", "critic_load", "finetune")
def _critic_folders(args: argparse.Namespace) -> dict[str, Any]:
    """The critic is saved with its policy, and a resumed policy takes the critic that was saved
    with it.
    """
    if not ESTIMATORS[args.advantage_estimator].needs_critic:
        return {}
    values: dict[str, Any] = {}
    if args.critic_save is None and args.save is not None:
        values["critic_save"] = f"{args.save}/critic"
    if args.critic_load is None and not args.finetune and has_megatron_checkpoint(args.load):
        known = [
            folder
            for folder in (f"{args.load}/critic", args.critic_save)
            if has_megatron_checkpoint(folder)
        ]
        values.update({"critic_load": known[0]} if known else {})
    return values


@step("advantage_estimator")
def _critic(args: argparse.Namespace) -> dict[str, Any]:
    return {"use_critic": ESTIMATORS[args.advantage_estimator].needs_critic}


@step("rollout_external_engine_addrs")
def _external_engines(args: argparse.Namespace) -> dict[str, Any]:
    return {"rollout_external": bool(args.rollout_external_engine_addrs)}


# Derived values which depend on the disk or the clock: a recorded configuration does not hold what
# came of them.
VOLATILE = (
    "load",
    "finetune",
    "no_load_optim",
    "no_load_rng",
    "start_rollout_id",
    "run_dir",
    "critic_load",
)


@step(
    "sglang_api_key",
    "no_api_key",
    "rollout_external_engine_addrs",
    "debug_train_only",
)
def _engine_key(args: argparse.Namespace) -> dict[str, Any]:
    starts_engines = not (args.rollout_external_engine_addrs or args.debug_train_only)
    if args.sglang_api_key is not None or args.no_api_key or not starts_engines:
        return {}
    return {"sglang_api_key": secrets.token_urlsafe(32)}


@step("sequence_parallel", "tensor_model_parallel_size")
def _sequence_parallel(args: argparse.Namespace) -> dict[str, Any]:
    # As Megatron does: one rank has nothing to split. `adjustments` reports it.
    return (
        {"sequence_parallel": False}
        if args.sequence_parallel and args.tensor_model_parallel_size == 1
        else {}
    )


def adjustments(args: argparse.Namespace) -> list[str]:
    """Returns one sentence per given option that `derive` turns off because it can
    have no effect.
    """
    if args.sequence_parallel and args.tensor_model_parallel_size == 1:
        return [
            (
                "--sequence-parallel has no effect with --tensor-model-parallel-size 1 and was "
                "turned "
                "off."
            )
        ]
    return []


@step("num_moe_experts")
def _experts(args: argparse.Namespace) -> dict[str, Any]:
    # Megatron's command line, and code written for it, says num_experts.
    return {"num_experts": args.num_moe_experts}


DEBUGGING_S = 7 * 24 * 3600.0


@step("local", "reward_timeout")
def _no_hurry_in_a_debugger(args: argparse.Namespace) -> dict[str, Any]:
    """A user's function may stand at a breakpoint, which is no hang."""
    return {"reward_timeout": max(args.reward_timeout, DEBUGGING_S)} if args.local else {}


@step("run_dir", "run_name")
def _run_folder(args: argparse.Namespace) -> dict[str, Any]:
    return {"run_dir": resolve_run_dir(args.run_dir, args.run_name)}


@dataclasses.dataclass(frozen=True)
class DerivedSizes:
    """Each size of a run, named once. Ranks count processes; batch sizes are of the unit their
    comment says.
    """

    prompts_per_rollout: int
    samples_per_prompt: int
    samples_per_rollout: int  # rollout executions of one generate call
    samples_per_step: int  # rollout executions of one optimizer step: the global batch
    steps_per_rollout: int
    samples_per_rank_and_step: float
    actor_ranks: int
    data_parallel_size: int
    tensor_parallel_size: int
    pipeline_parallel_size: int
    context_parallel_size: int
    engines: int
    gpus_per_engine: int


def derived_sizes(args: argparse.Namespace) -> DerivedSizes:
    """Returns the sizes of a run from derived options. Divisions that do not come out even are the
    rules' business.
    """
    ranks = args.actor_num_nodes * args.actor_num_gpus_per_node
    tensor, pipeline, context = (
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.context_parallel_size,
    )
    data_parallel = max(1, ranks // (tensor * pipeline * context))
    samples = args.rollout_batch_size * args.n_samples_per_prompt
    if args.rollout_external_engine_addrs:
        engines = len(args.rollout_external_engine_addrs)
    else:
        engines = (
            args.rollout_num_engines or args.rollout_num_gpus // args.rollout_num_gpus_per_engine
        )
    return DerivedSizes(
        prompts_per_rollout=args.rollout_batch_size,
        samples_per_prompt=args.n_samples_per_prompt,
        samples_per_rollout=samples,
        samples_per_step=args.global_batch_size,
        steps_per_rollout=samples // args.global_batch_size,
        samples_per_rank_and_step=args.global_batch_size / data_parallel,
        actor_ranks=ranks,
        data_parallel_size=data_parallel,
        tensor_parallel_size=tensor,
        pipeline_parallel_size=pipeline,
        context_parallel_size=context,
        engines=0 if args.debug_train_only else engines,
        gpus_per_engine=args.rollout_num_gpus_per_engine,
    )


@dataclasses.dataclass(frozen=True)
class RankPlace:
    """Where one training rank sits on each parallel axis."""

    rank: int
    node: int
    tensor: int
    context: int
    data: int
    pipeline: int


def process_layout(sizes: DerivedSizes, *, ranks_per_node: int) -> list[RankPlace]:
    """Returns the coordinates of every training rank in Megatron's order: TP varies fastest, then
    CP, DP, PP.
    """
    places = []
    for rank in range(sizes.actor_ranks):
        rest, tensor = divmod(rank, sizes.tensor_parallel_size)
        rest, context = divmod(rest, sizes.context_parallel_size)
        pipeline, data = divmod(rest, sizes.data_parallel_size)
        places.append(RankPlace(rank, rank // ranks_per_node, tensor, context, data, pipeline))
    return places


def devices_needed(args: argparse.Namespace) -> tuple[int, int]:
    """Returns the devices (GPUs, or CPU cores without GPUs) for training and for engines; with
    --colocate they are the same ones.
    """
    actor = args.actor_num_nodes * args.actor_num_gpus_per_node
    engines = 0 if args.rollout_external_engine_addrs else args.rollout_num_gpus
    return (0 if args.debug_rollout_only else actor), (0 if args.debug_train_only else engines)


def apply_derived(args: argparse.Namespace, values: Mapping[str, Any]) -> None:
    """Puts derived values into the namespace, before anyone but the parser has seen it;
    `as_requested` remembers what was asked for.
    """
    if not hasattr(args, "as_requested"):
        args.as_requested = {name: getattr(args, name) for name in VOLATILE if hasattr(args, name)}
    for name, value in values.items():
        if hasattr(args, name):
            args.as_requested.setdefault(name, getattr(args, name))
        setattr(args, name, value)
