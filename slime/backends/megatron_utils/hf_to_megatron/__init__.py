"""Hugging Face weights into this rank's Megatron parameters, for any layout; no Ray, no HTTP."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from slime.backends.megatron_utils.hf_to_megatron.common import (
    SafetensorReader,
    _tensor_parallel_shard,
)
from slime.backends.megatron_utils.local_params import local_parameters
from slime.exceptions import ConfigError
from slime.models.families import FAMILIES, is_derived_tensor
from slime.models.megatron_fields import contradictions
from slime.models.param_mapping import WeightSizes, combine, match
from slime.models.shape import read_model_shape
from slime.models.weight_shapes import expected_hf_names

__all__ = [
    "SafetensorReader",
    "load_hf_weights",
    "llama_hf_tensor",
    "qwen2_hf_tensor",
    "qwen3_hf_tensor",
    "qwen3_moe_hf_tensor",
]

Loader = Callable[[str, SafetensorReader, Mapping[str, Any]], torch.Tensor]


def _loader(family: str) -> Loader:
    def hf_tensor(
        megatron_name: str, reader: SafetensorReader, hf_config: Mapping[str, Any]
    ) -> torch.Tensor:
        """The whole parameter `megatron_name` (numbers counted over the whole model), vocabulary
        not padded.
        """
        return _whole(family, megatron_name, reader, WeightSizes.from_hf(hf_config))

    return hf_tensor


_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"

_LOADERS = {family: _loader(family) for family in FAMILIES}
_LOADERS["qwen3"] = _LOADERS["llama"]  # one function by two names
llama_hf_tensor, qwen2_hf_tensor = _LOADERS["llama"], _LOADERS["qwen2"]
qwen3_hf_tensor, qwen3_moe_hf_tensor = _LOADERS["qwen3"], _LOADERS["qwen3_moe"]


def _whole(
    family: str, megatron_name: str, reader: SafetensorReader, sizes: WeightSizes
) -> torch.Tensor:
    found = match(family, megatron_name)
    return combine(found.rule, [reader.get_tensor(name) for name in found.hf_names], sizes)


@torch.no_grad()
def load_hf_weights(
    args: argparse.Namespace, model: Sequence[torch.nn.Module], folder: str | Path
) -> None:
    """Fills every parameter of this rank's model chunks from a Hugging Face folder; a critic's
    value head is left as it is.

    Raises `ConfigError` for a missing or unexpected tensor, or one of another shape than the
    model's.
    """
    shape = read_model_shape(folder)
    problems = contradictions(vars(args), shape)
    if problems:
        raise ConfigError(f"{folder} holds another model: {' '.join(problems)}")
    reader = SafetensorReader(folder)
    others = set(reader.names()) - set(expected_hf_names(shape))
    unexpected = sorted(name for name in others if not is_derived_tensor(name))
    if unexpected:
        raise ConfigError(
            f"{folder} has {len(unexpected)} tensors that a {shape.model_type} model of "
            f"{shape.num_layers} layers does not, {unexpected[0]!r} first."
        )
    if shape.tie_word_embeddings and _HEAD in reader:
        # Transformers ignores the tensor, but the config may be the wrong one of the two.
        if not torch.equal(reader.get_tensor(_HEAD), reader.get_tensor(_EMBEDDING)):
            raise ConfigError(
                f"{folder}: {_HEAD} differs from {_EMBEDDING}, but the model ties them."
            )
    for local in local_parameters(model):
        if local.is_value_head:
            continue
        name = (
            "embedding.word_embeddings.weight"
            if shape.tie_word_embeddings and local.name == "output_layer.weight"
            else local.name
        )
        whole = _whole(shape.model_type, name, reader, WeightSizes.of(shape))
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
