"""Model chunks in Megatron's DDP, the optimizer, and the schedule of learning rate and weight
decay.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import (
    OptimizerConfig,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import Float16Module

from slime.accelerator import get_accelerator
from slime.backends.megatron_utils.model_provider import (
    build_model,
    build_transformer_config,
    params_dtype,
)
from slime.config.resume import evaluates_only
from slime.exceptions import ConfigError

if TYPE_CHECKING:
    from megatron.core.optimizer import MegatronOptimizer


def setup_model_and_optimizer(
    args: argparse.Namespace, role: str = "actor"
) -> tuple[list[DistributedDataParallel], MegatronOptimizer | None, OptimizerParamScheduler | None]:
    """Returns (model chunks of this rank in DDP, one per virtual pipeline stage; optimizer;
    scheduler), the last two None in a run that only evaluates.

    The weights are zero (a critic's value head excepted): `checkpoint.load_checkpoint` fills them
    and tells the optimizer. The scheduler exists also for a constant rate: without it Megatron's
    optimizer would decay norms and biases too.
    """
    model = build_model_chunks(args, role=role)
    if evaluates_only(args):
        return model, None, None
    config = OptimizerConfig(**_fields_of(OptimizerConfig, args), params_dtype=params_dtype(args))
    optimizer = get_megatron_optimizer(
        config,
        model,
        config_overrides=get_standard_config_overrides(config),
        use_gloo_process_groups=True,
    )
    scheduler = build_scheduler(args, optimizer)
    model_config = model[0].config
    model_config.grad_scale_func = optimizer.scale_loss
    model_config.finalize_model_grads_func = finalize_model_grads
    if model[0].ddp_config.overlap_grad_reduce:
        no_syncs, grad_syncs = (
            [chunk.no_sync for chunk in model],
            [chunk.start_grad_sync for chunk in model],
        )
        model_config.no_sync_func = no_syncs if len(model) > 1 else no_syncs[0]
        if model[0].ddp_config.align_param_gather or len(model) > 1:
            model_config.grad_sync_func = grad_syncs if len(model) > 1 else grad_syncs[0]
    return model, optimizer, scheduler


def build_model_chunks(
    args: argparse.Namespace, role: str = "actor"
) -> list[DistributedDataParallel]:
    """This rank's model chunks in Megatron's DDP, weights zero, without an optimizer."""
    config = build_transformer_config(args)
    virtual = config.virtual_pipeline_model_parallel_size
    stages: list[int | None] = [None] if virtual is None else list(range(virtual))
    chunks = [build_model(args, config, role=role, vp_stage=stage) for stage in stages]
    if get_accelerator().name != "cpu":
        chunks = [chunk.to(get_accelerator().device()) for chunk in chunks]
    if config.bf16 or config.fp16:
        chunks = [Float16Module(config, chunk) for chunk in chunks]
    ddp_fields = {"grad_reduce_in_fp32": True, **_fields_of(DistributedDataParallelConfig, args)}
    return [
        DistributedDataParallel(
            config, DistributedDataParallelConfig(**ddp_fields), chunk, disable_bucketing=index > 0
        )
        for index, chunk in enumerate(chunks)
    ]


def training_tensors(
    model: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer
) -> Iterator[torch.Tensor]:
    """Every tensor that training alone needs: parameters, buffers, gradients (Megatron's flat ones
    too), and the optimizer's state.
    """
    for chunk in model:
        for _, tensor in (*chunk.named_parameters(), *chunk.named_buffers()):
            yield tensor
            if tensor.grad is not None:
                yield tensor.grad
        for flat in (*chunk.buffers, *chunk.expert_parallel_buffers):
            yield flat.grad_data
            if flat.param_data is not None:
                yield flat.param_data
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if part is None or part.is_stub_optimizer:
            continue
        for group in part.optimizer.param_groups:
            yield from group["params"]
        for state in part.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def build_scheduler(
    args: argparse.Namespace, optimizer: MegatronOptimizer
) -> OptimizerParamScheduler:
    """The schedule of learning rate and weight decay. Its clock counts samples: an optimizer step
    advances it by its global batch.

    Raises `ConfigError` when a decaying rate has no known end.
    """
    decay_samples = _decay_samples(args)
    if args.lr_warmup_fraction is not None:
        warmup_samples = int(args.lr_warmup_fraction * decay_samples)
    else:
        warmup_samples = args.lr_warmup_iters * args.global_batch_size
    given = vars(args)
    wsd_iters = given.get("lr_wsd_decay_iters")
    start_wd = args.weight_decay if args.start_weight_decay is None else args.start_weight_decay
    end_wd = args.weight_decay if args.end_weight_decay is None else args.end_weight_decay
    return OptimizerParamScheduler(
        optimizer,
        init_lr=args.lr_warmup_init,
        max_lr=args.lr,
        min_lr=args.min_lr if args.min_lr is not None else 0.0,
        lr_warmup_steps=warmup_samples,
        # A constant rate never reaches the end; Megatron still wants the end to come after the
        # warm-up.
        lr_decay_steps=max(decay_samples, warmup_samples + 1),
        lr_decay_style=args.lr_decay_style,
        start_wd=start_wd,
        end_wd=end_wd,
        wd_incr_steps=decay_samples,
        wd_incr_style=args.weight_decay_incr_style,
        use_checkpoint_opt_param_scheduler=not args.override_opt_param_scheduler,
        override_opt_param_scheduler=args.override_opt_param_scheduler,
        wsd_decay_steps=None if wsd_iters is None else wsd_iters * args.global_batch_size,
        lr_wsd_decay_style=given.get("lr_wsd_decay_style") or "exponential",
    )


def _decay_samples(args: argparse.Namespace) -> int:
    if args.lr_decay_iters is not None:
        return args.lr_decay_iters * args.global_batch_size
    if args.num_rollout is not None:
        return max(1, args.num_rollout) * args.rollout_batch_size * args.n_samples_per_prompt
    if args.lr_decay_style == "constant":
        return 2**31
    raise ConfigError(
        f"--lr-decay-style {args.lr_decay_style} needs to know its end. Give --lr-decay-iters or "
        "--num-rollout, or use --lr-decay-style constant."
    )


def _fields_of(config_class: type, args: argparse.Namespace) -> dict[str, Any]:
    """The values of `args` for the fields of a Megatron config dataclass; fields without a value
    (None) are left to its default.
    """
    given = vars(args)
    return {
        field.name: given[field.name]
        for field in dataclasses.fields(config_class)
        if field.init and field.name != "params_dtype" and given.get(field.name) is not None
    }
