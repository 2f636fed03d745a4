"""Options for tests that build a Megatron model without a command line: every default, the model
shape from a Hugging Face folder.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any


def megatron_args(hf_folder: str | Path, **overrides: Any) -> argparse.Namespace:
    """Returns a namespace with the defaults of the megatron and checkpoint options, the folder's
    shape, and `overrides`.
    """
    from slime.config import checkpoint, megatron
    from slime.models.megatron_fields import megatron_fields
    from slime.models.shape import read_model_shape

    classes = (
        megatron.ParallelOptions, megatron.ModelShapeOptions, megatron.OptimizerOptions, megatron.NumericsOptions,
        checkpoint.CheckpointOptions, checkpoint.WeightUpdateOptions, checkpoint.TrainedParameterOptions,
    )  # fmt: skip
    values: dict[str, Any] = {"expert_model_parallel_size": 1, "calculate_per_token_loss": False}
    for cls in classes:
        values.update(dataclasses.asdict(cls()))
    values.update(megatron_fields(read_model_shape(hf_folder)))
    values.update(
        hf_checkpoint=str(hf_folder), make_vocab_size_divisible_by=1, lr=1e-3, lr_decay_style="constant", seed=7,
        global_batch_size=4, num_rollout=10, rollout_batch_size=4, n_samples_per_prompt=1, distributed_timeout_minutes=1,
        seq_length=512,
    )  # fmt: skip
    values.update(overrides)
    return argparse.Namespace(**values)
