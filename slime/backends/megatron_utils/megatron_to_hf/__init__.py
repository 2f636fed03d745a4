"""Whole Megatron parameters to Hugging Face tensors, after they are gathered; no Ray, no HTTP.

The inverse of `hf_to_megatron`, from the same rules.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch

from slime.models.param_mapping import WeightSizes, match, split

__all__ = [
    "convert_llama_to_hf",
    "convert_qwen2_to_hf",
    "convert_qwen3_to_hf",
    "convert_qwen3_moe_to_hf",
]

Converter = Callable[[Any, str, torch.Tensor], list[tuple[str, torch.Tensor]]]


def _converter(family: str) -> Converter:
    def convert(
        args: argparse.Namespace, name: str, param: torch.Tensor
    ) -> list[tuple[str, torch.Tensor]]:
        """[(Hugging Face name, tensor)] of one whole parameter; `name` counts over the whole model,
        "module." prefixes are ignored.
        """
        found = match(family, name)
        return list(
            zip(found.hf_names, split(found.rule, param, WeightSizes.from_args(args)), strict=True)
        )

    return convert


convert_llama_to_hf = _converter("llama")
convert_qwen2_to_hf = _converter("qwen2")
convert_qwen3_to_hf = _converter("qwen3")
convert_qwen3_moe_to_hf = _converter("qwen3_moe")


def _convert_to_hf_core(
    args: argparse.Namespace, model_name: str, name: str, param: torch.Tensor
) -> list[tuple[str, torch.Tensor]]:
    """As the family's converter; `model_name` is a model type of config.json."""
    return _converter(model_name)(args, name, param)
