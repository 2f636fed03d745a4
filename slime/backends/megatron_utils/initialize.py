"""Model-parallel process groups and seeds of one training rank."""

from __future__ import annotations

import argparse
import datetime
import os
import random

import numpy as np
import torch
import torch.distributed as dist

from slime.accelerator import get_accelerator
from slime.backends.megatron_utils.model_provider import virtual_pipeline_size
from slime.utils.misc import load_function


def init(args: argparse.Namespace) -> None:
    """Prepares this process for Megatron-core: device, default process group (if there is none
    yet), model-parallel groups, seeds.

    Must run in every rank, before any other function of this package. Calls
    `args.custom_megatron_init_path(args)` at the end where one is given.
    """
    accelerator = get_accelerator()
    accelerator.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    accelerator.prepare_megatron()
    from megatron.core import mpu

    timeout = args.distributed_timeout_minutes
    if not dist.is_initialized():
        dist.init_process_group(
            backend=args.distributed_backend or accelerator.communication_backend,
            timeout=datetime.timedelta(minutes=timeout),
        )
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=_virtual_size(args),
        context_parallel_size=args.context_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        distributed_timeout_minutes=timeout,
        create_gloo_process_groups=True,
    )
    seed_model_parallel(args.seed)
    if args.custom_megatron_init_path is not None:
        load_function(args.custom_megatron_init_path)(args)


def seed_model_parallel(seed: int) -> None:
    """Seeds Python, numpy, torch and Megatron's random streams of this rank.

    Pipeline stages get different seeds; data-parallel replicas the same; tensor-parallel ranks
    share the default stream and have one of their own, from which dropout inside parallel layers
    draws.
    """
    from megatron.core import mpu, tensor_parallel

    stage_seed = seed + 100 * mpu.get_pipeline_model_parallel_rank()
    random.seed(stage_seed)
    np.random.seed(stage_seed % 2**32)
    torch.manual_seed(stage_seed)
    tensor_parallel.model_parallel_cuda_manual_seed(stage_seed)


def is_megatron_main_rank() -> bool:
    """True on exactly one rank: data-parallel (with context) rank 0, tensor-parallel rank 0, last
    pipeline stage.
    """
    from megatron.core import mpu

    return (
        mpu.get_data_parallel_rank(with_context_parallel=True) == 0
        and mpu.get_tensor_model_parallel_rank() == 0
        and mpu.is_pipeline_last_stage(ignore_virtual=True)
    )


def _virtual_size(args: argparse.Namespace) -> int | None:

    return virtual_pipeline_size(args)
