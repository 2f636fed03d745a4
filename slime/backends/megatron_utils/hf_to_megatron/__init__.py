"""Hugging Face weights into this rank's Megatron parameters, for any tensor, pipeline and expert
layout.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from slime.backends.megatron_utils.hf_to_megatron.common import (
    SafetensorReader,
    _tensor_parallel_shard,
)
from slime.exceptions import ConfigError
from slime.models.hf_config import megatron_fields_from_hf, read_hf_config, text_config
from slime.models.param_mapping import Shape, combine, expected_hf_names, match

__all__ = [
    "SafetensorReader",
    "load_hf_weights",
    "llama_hf_tensor",
    "qwen2_hf_tensor",
    "qwen3_hf_tensor",
    "qwen3_moe_hf_tensor",
]

# Derived from the config, not trained, and left in some old checkpoints.
_IGNORED = re.compile(r"rotary_emb\.inv_freq$|_scale_inv$")


def _loader(family: str) -> Callable[[str, SafetensorReader, Mapping[str, Any]], torch.Tensor]:
    def hf_tensor(
        megatron_name: str, reader: SafetensorReader, hf_config: Mapping[str, Any]
    ) -> torch.Tensor:
        """The whole parameter `megatron_name` (numbers counted over the whole model), vocabulary
        not padded.
        """
        found = match(family, megatron_name)
        return combine(
            found.rule,
            [reader.get_tensor(name) for name in found.hf_names],
            Shape.from_hf(hf_config),
        )

    return hf_tensor


llama_hf_tensor = qwen3_hf_tensor = _loader("llama")
qwen2_hf_tensor = _loader("qwen2")
qwen3_moe_hf_tensor = _loader("qwen3_moe")

_LOADERS = {
    "llama": llama_hf_tensor,
    "qwen2": qwen2_hf_tensor,
    "qwen3": qwen3_hf_tensor,
    "qwen3_moe": qwen3_moe_hf_tensor,
}


@torch.no_grad()
def load_hf_weights(args: Any, model: Sequence[torch.nn.Module], folder: str | Path) -> None:
    """Fills every parameter of this rank's model chunks from a Hugging Face folder; a critic's
    value head is left as it is.

    Raises `ConfigError` for a missing or unexpected tensor, or one of another shape than the
    model's.
    """
    from slime.backends.megatron_utils.local_params import local_parameters

    hf_config = text_config(read_hf_config(folder))
    family = hf_config["model_type"]
    fields = megatron_fields_from_hf(hf_config)
    reader = SafetensorReader(folder)
    unexpected = set(reader.names()) - set(expected_hf_names(family, fields))
    unexpected = sorted(name for name in unexpected if not _IGNORED.search(name))
    if unexpected:
        raise ConfigError(
            f"{folder} has {len(unexpected)} tensors that a {family} model of "
            f"{fields['num_layers']} layers does not, {unexpected[0]!r} first."
        )
    tied = not args.untie_embeddings_and_output_weights
    for local in local_parameters(model):
        if local.is_value_head:
            continue
        name = (
            "embedding.word_embeddings.weight"
            if tied and local.name == "output_layer.weight"
            else local.name
        )
        whole = _LOADERS[family](name, reader, hf_config)
        if local.is_vocab:
            whole = _pad_rows(whole, local.parameter.shape[0] * local.parallel_size)
        part = whole
        if local.is_sharded:
            part = _tensor_parallel_shard(
                local.name,
                whole,
                parallel_size=local.parallel_size,
                parallel_rank=local.parallel_rank,
                partition_dim=local.partition_dim,
                partition_stride=local.partition_stride,
            )
        if part.shape != local.parameter.shape:
            raise ConfigError(
                f"{local.name} is {list(local.parameter.shape)} in the model, but "
                f"{list(part.shape)} from {folder}. "
                "The model options contradict the folder's config.json."
            )
        local.parameter.copy_(part)


def _pad_rows(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    if rows <= tensor.shape[0]:
        return tensor
    return torch.cat((tensor, tensor.new_zeros(rows - tensor.shape[0], *tensor.shape[1:])))
