"""This rank's parameters under their names in the whole model, and how each is cut."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import mpu
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from slime.backends.megatron_utils.model_provider import ValueHead
from slime.models.param_mapping import strip_module_prefix

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

_LAYER = re.compile(r"^(decoder\.layers\.)(\d+)")
_EXPERT = re.compile(r"(\.experts\.local_experts\.|\.experts\.linear_fc[12]\.(?:weight|bias))(\d+)")


@dataclasses.dataclass(frozen=True)
class LocalParameter:
    """One parameter of this rank. `name` counts layers and experts over the whole model."""

    name: str
    parameter: torch.nn.Parameter
    is_sharded: bool
    partition_dim: int
    partition_stride: int
    parallel_size: int
    parallel_rank: int
    is_value_head: bool

    @property
    def is_vocab(self) -> bool:
        return (
            self.name in ("embedding.word_embeddings.weight", "output_layer.weight")
            and not self.is_value_head
        )


def local_parameters(model: Sequence[torch.nn.Module]) -> Iterator[LocalParameter]:
    """Every parameter of the model chunks of this rank, wrapped or not, in the
    chunks' own order.
    """
    for chunk in model:
        bare = unwrap(chunk)
        config = bare.config
        offset = get_transformer_layer_offset(config, vp_stage=bare.vp_stage)
        value_head = getattr(bare, "output_layer", None)
        value_head = value_head if isinstance(value_head, ValueHead) else None
        experts_per_rank = (
            config.num_moe_experts or 0
        ) // mpu.get_expert_model_parallel_world_size()
        first_expert = experts_per_rank * mpu.get_expert_model_parallel_rank()
        parameter: Any  # carries Megatron's marks
        for raw_name, parameter in bare.named_parameters():
            name = _LAYER.sub(partial(_shifted, by=offset), strip_module_prefix(raw_name))
            is_expert = ".experts." in name
            if is_expert:
                name = _EXPERT.sub(partial(_shifted, by=first_expert), name)
            size = (
                mpu.get_expert_tensor_parallel_world_size()
                if is_expert
                else mpu.get_tensor_model_parallel_world_size()
            )
            rank = (
                mpu.get_expert_tensor_parallel_rank()
                if is_expert
                else mpu.get_tensor_model_parallel_rank()
            )
            cut = size > 1 and bool(getattr(parameter, "tensor_model_parallel", False))
            yield LocalParameter(
                name=name,
                parameter=parameter,
                is_sharded=cut,
                partition_dim=parameter.partition_dim if cut else -1,
                partition_stride=parameter.partition_stride if cut else 1,
                parallel_size=size if cut else 1,
                parallel_rank=rank if cut else 0,
                is_value_head=value_head is not None
                and any(parameter is own for own in value_head.parameters()),
            )


def _shifted(found: re.Match[str], *, by: int) -> str:
    """The name with the number of the whole model: the rank's own number and `by`."""
    return f"{found[1]}{int(found[2]) + by}"


def unwrap(chunk: torch.nn.Module) -> GPTModel:
    """The GPTModel inside DDP and Float16Module."""
    inner: Any = chunk
    while hasattr(inner, "module"):
        inner = inner.module
    return inner
