"""Forward passes and optimizer steps over a rollout's micro-batches, by
Megatron-core's schedules.
"""

from __future__ import annotations

import argparse
import logging
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.pipeline_parallel import get_forward_backward_func

from slime.backends.megatron_utils.checkpoint import load_checkpoint, save_checkpoint
from slime.backends.megatron_utils.ci_gates import CiGates, ci_problems, save_grad_norm
from slime.backends.megatron_utils.cp_utils import reduce_train_step_metrics
from slime.backends.megatron_utils.data import DataIterator, get_batch
from slime.backends.megatron_utils.initialize import is_megatron_main_rank
from slime.backends.megatron_utils.loss import get_rollout_top_p_logprob_kwargs, loss_function
from slime.backends.megatron_utils.loss_config import LossConfig
from slime.backends.megatron_utils.optimizer import setup_model_and_optimizer
from slime.backends.megatron_utils.optimizer_state import reset_optimizer_states
from slime.data.batch import RolloutBatch, Stage
from slime.data.ragged import Ragged
from slime.exceptions import RolloutDataError
from slime.metrics.statistics import compute_train_step
from slime.tracking.spans import span
from slime.tracking.tracking import log
from slime.utils.misc import load_function

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.optimizer import MegatronOptimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

__all__ = [
    "forward_only",
    "load_checkpoint",
    "save_checkpoint",
    "setup_model_and_optimizer",
    "train",
    "train_one_step",
]

logger = logging.getLogger(__name__)


def forward_only(
    f: Callable[..., tuple[torch.Tensor, dict[str, list[torch.Tensor]]]],
    args: argparse.Namespace,
    model: Sequence[torch.nn.Module],
    data_iterator: Sequence[Any],
    num_microbatches: Sequence[int],
    store_prefix: str = "",
    use_rollout_top_p_replay: bool = False,
) -> RolloutBatch:
    """Returns {store_prefix + key: one tensor per sample of this rank, in local order} on the last
    pipeline stage, {} on the others.

    f: `get_log_probs_and_entropy` or `get_values`, or a function like them. num_microbatches: per
    optimizer step. No gradient, dropout off; the model is back in training mode afterwards. All
    ranks call it together.
    """

    def forward_step(
        iterator: DataIterator, chunk: torch.nn.Module, return_schedule_plan: bool = False
    ) -> tuple[torch.Tensor, Any]:
        batch = _next_batch(args, iterator)
        nucleus = get_rollout_top_p_logprob_kwargs(args, batch) if use_rollout_top_p_replay else {}
        collect = partial(
            f,
            args=args,
            unconcat_tokens=batch["unconcat_tokens"],
            total_lengths=batch["total_lengths"],
            response_lengths=batch["response_lengths"],
            with_entropy=args.use_rollout_entropy,
            **nucleus,
        )
        return _run_chunk(chunk, batch), collect

    if args.custom_megatron_before_log_prob_hook_path is not None:
        load_function(args.custom_megatron_before_log_prob_hook_path)(args, model, store_prefix)
    for iterator in data_iterator:
        iterator.reset()
    for chunk in model:
        chunk.eval()
    collected: list[tuple[torch.Tensor, dict[str, list[torch.Tensor]]]] = []
    try:
        with torch.no_grad():
            for num in num_microbatches:
                collected += get_forward_backward_func()(
                    forward_step_func=forward_step,
                    forward_only=True,
                    collect_non_loss_data=True,
                    **_schedule_arguments(args, data_iterator, model, num),
                )
    finally:
        for chunk in model:
            chunk.train()
        for iterator in data_iterator:
            iterator.reset()
    if not mpu.is_pipeline_last_stage(ignore_virtual=True):
        return RolloutBatch(stage=Stage.LOCAL)
    return _in_local_order(collected, data_iterator[0].micro_batch_indices, store_prefix)


def train_one_step(
    args: argparse.Namespace,
    data_iterator: Sequence[Any],
    model: Sequence[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    opt_param_scheduler: OptimizerParamScheduler,
    *,
    num_microbatches: int,
    step_global_batch_size: int,
    role: str = "actor",
    before_update: Callable[[], None] | None = None,
) -> tuple[dict[str, float], float]:
    """One optimizer step over the next `num_microbatches` of the iterator. Returns (metrics,
    gradient norm before clipping). `before_update` is called when gradients are there and weights
    are as before.

    The metrics are whatever the loss reports, reduced over the step's samples and ranks; {} where
    this rank is not on the last pipeline stage. A gradient that is not finite on any rank leaves
    weights, optimizer and scheduler as they are: the norm is then NaN and `update_skipped` is 1.
    The scheduler's clock advances by `step_global_batch_size`. All ranks call it together.
    """

    def forward_step(
        iterator: DataIterator, chunk: torch.nn.Module, return_schedule_plan: bool = False
    ) -> tuple[torch.Tensor, Any]:
        batch = _next_batch(args, iterator)
        loss = partial(
            loss_function, args, batch, num_microbatches, step_global_batch_size, role=role
        )
        return _run_chunk(chunk, batch), loss

    for chunk in model:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    with span("forward_backward", num_microbatches=num_microbatches):
        losses = get_forward_backward_func()(
            forward_step_func=forward_step,
            forward_only=False,
            **_schedule_arguments(args, data_iterator, model, num_microbatches),
        )
    if before_update is not None:
        before_update()
    grad_norm = math.nan
    updated = False
    with span("optimizer_step"):
        if _gradients_are_finite(model):
            updated, grad_norm, _ = optimizer.step()
    if updated:
        opt_param_scheduler.step(increment=step_global_batch_size)
    else:
        logger.warning(
            "The gradient is not finite: this step changes nothing. Look at the rollout's "
            "log-probs and advantages."
        )
    if not mpu.is_pipeline_last_stage(ignore_virtual=True):
        return {}, _as_float(grad_norm)
    metrics = reduce_train_step_metrics(
        losses,
        calculate_per_token_loss=args.calculate_per_token_loss,
        step_global_batch_size=step_global_batch_size,
        cp_size=mpu.get_context_parallel_world_size(),
        dp_with_cp_group=mpu.get_data_parallel_group(with_context_parallel=True),
    )
    if not updated:
        metrics["update_skipped"] = 1.0
    return metrics, _as_float(grad_norm)


def train(
    args: argparse.Namespace,
    rollout_id: int,
    model: Sequence[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    opt_param_scheduler: OptimizerParamScheduler,
    data_iterator: Sequence[Any],
    *,
    role: str = "actor",
    last_step: int = -1,
    before_update: Callable[[], None] | None = None,
) -> list[dict[str, float]]:
    """All optimizer steps of one rollout. Returns per step the metrics that were logged, on the
    last pipeline stage ([] elsewhere).

    `last_step` is the value of the train axis that was logged before, -1 for none. `before_update`
    is called once: before the first step changes the weights, or where there is no step.

    The rollout data says how many steps, micro-batches and rollouts per step there are. Raises
    `RolloutDataError` when a CI gate (--ci-test) does not hold.
    """
    rollout_data = data_iterator[0].rollout_data
    steps = list(
        zip(rollout_data["num_microbatches"], rollout_data["global_batch_sizes"], strict=True)
    )
    for iterator in data_iterator:
        iterator.reset()
    for chunk in model:
        chunk.train()
    if args.reset_optimizer_states:
        reset_optimizer_states(optimizer)
    prefix = "train/critic-" if role == "critic" else "train/"
    gates = CiGates.from_args(args)
    logged = []
    if not steps and before_update is not None:
        before_update()
    for step_id, (num_microbatches, step_global_batch_size) in enumerate(steps):
        if args.custom_megatron_before_train_step_hook_path is not None:
            hook = load_function(args.custom_megatron_before_train_step_hook_path)
            hook(args, rollout_id, step_id, model, optimizer, opt_param_scheduler)
        with span("train_step"):
            metrics, grad_norm = train_one_step(
                args,
                data_iterator,
                model,
                optimizer,
                opt_param_scheduler,
                num_microbatches=int(num_microbatches),
                step_global_batch_size=int(step_global_batch_size),
                role=role,
                before_update=before_update if step_id == 0 else None,
            )
        if not mpu.is_pipeline_last_stage(ignore_virtual=True):
            continue
        named = {f"{prefix}{name}": value for name, value in metrics.items()}
        named[f"{prefix}grad_norm"] = grad_norm
        for index, group in enumerate(optimizer.param_groups):
            named[f"{prefix}lr-pg_{index}"] = group["lr"]
        named[f"{prefix}global_batch_size"] = float(step_global_batch_size)
        named["train/step"] = last_step = compute_train_step(
            args, rollout_id, step_id, last=last_step
        )
        logged.append(named)
        if not is_megatron_main_rank():
            continue
        log(args, named, "train/step")
        save_grad_norm(gates, grad_norm, role=role, rollout_id=rollout_id, step_id=step_id)
        problems = ci_problems(
            gates, metrics, grad_norm, role=role, rollout_id=rollout_id, step_id=step_id
        )
        if problems:
            raise RolloutDataError(
                f"CI gates of rollout {rollout_id}, step {step_id}: " + " ".join(problems)
            )
    return logged


def _next_batch(args: argparse.Namespace, iterator: DataIterator) -> dict[str, Any]:
    # Every field that the batch has per sample: a loss that needs one more finds it.
    return get_batch(
        iterator,
        None,
        pad_multiplier=args.data_pad_size_multiplier,
        allgather_cp=LossConfig.from_args(args).allgather_cp,
    )


def _run_chunk(chunk: torch.nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    multimodal = batch.get("multimodal_train_inputs") or {}
    return chunk(
        input_ids=batch["tokens"],
        # Rotary positions come from the packed sequences' boundaries.
        position_ids=None,
        attention_mask=None,
        labels=None,
        packed_seq_params=batch["packed_seq_params"],
        **multimodal,
    )


def _schedule_arguments(
    args: argparse.Namespace,
    data_iterator: Sequence[Any],
    model: Sequence[torch.nn.Module],
    num_microbatches: int,
) -> dict[str, Any]:
    return {
        "data_iterator": list(data_iterator),
        "model": list(model),
        "num_microbatches": num_microbatches,
        # The stages exchange the real lengths; these are only what the schedule's signature wants.
        "seq_length": args.seq_length or args.max_position_embeddings,
        "micro_batch_size": 1,
    }


def _in_local_order(
    collected: Sequence[tuple[torch.Tensor, dict[str, list[torch.Tensor]]]],
    micro_batch_indices: Sequence[Sequence[int]],
    prefix: str,
) -> RolloutBatch:
    positions = [int(position) for indices in micro_batch_indices for position in indices]
    results = RolloutBatch(stage=Stage.LOCAL)
    for key in collected[0][1] if collected else ():
        if not positions:
            results[prefix + key] = []
            continue
        values = [tensor for _, outputs in collected for tensor in outputs[key]]
        by_position = dict(zip(positions, values, strict=True))
        ordered = [by_position[position] for position in range(len(positions))]
        # one column: what follows, metrics among them, reads one piece of memory and not one per
        # micro-batch; a number per sample has no rows
        results[prefix + key] = Ragged.of_tensors(ordered) if ordered[0].dim() else ordered
    return results


def _gradients_are_finite(model: Sequence[DistributedDataParallel]) -> bool:
    """The same answer on all ranks; one of them alone must not step."""
    buffers = [
        buffer.grad_data
        for chunk in model
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
    ]
    # A sum is not finite if any entry is not.
    finite = torch.stack([torch.isfinite(data.sum()) for data in buffers]).all().to(torch.int32)
    dist.all_reduce(finite, op=dist.ReduceOp.MIN)
    return bool(finite.item())


def _as_float(value: float | torch.Tensor | None) -> float:
    return math.nan if value is None else float(value)
