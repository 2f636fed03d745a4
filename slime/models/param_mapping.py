"""Which Hugging Face tensors make which Megatron parameter: the rules of `families.py`, read in both
directions.

Names here are of the whole model: no "module." prefix, layer and expert numbers counted over all
pipeline stages and expert ranks. Letters: H hidden size, D head dimension, G key/value heads (query
groups), Q query heads.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from slime.exceptions import ConfigError
from slime.models.config_fields import ConfigFields
from slime.models.families import FAMILIES, Rule
from slime.models.shape import ModelShape, head_counts


@dataclasses.dataclass(frozen=True)
class WeightSizes:
    """What cutting and joining tensors needs to know of a model."""

    num_heads: int
    num_kv_heads: int
    vocab_size: int

    @staticmethod
    def of(shape: ModelShape) -> WeightSizes:
        """The sizes of a whole shape."""
        return WeightSizes(shape.num_heads, shape.num_kv_heads, shape.vocab_size)

    @staticmethod
    def from_hf(config: Mapping[str, Any]) -> WeightSizes:
        """The sizes of a config that may hold nothing else; ConfigError for an unusable one."""
        fields = ConfigFields(config, "hf_config")
        return WeightSizes(*head_counts(fields), fields.count("vocab_size"))

    @staticmethod
    def from_args(args: argparse.Namespace) -> WeightSizes:
        """The sizes of Megatron's options."""
        return WeightSizes(
            args.num_attention_heads,
            args.num_query_groups or args.num_attention_heads,
            args.vocab_size,
        )


@dataclasses.dataclass(frozen=True)
class Match:
    """A Megatron parameter found in a family's rules."""

    rule: Rule
    hf_names: tuple[str, ...]
    order: tuple[int, ...]  # sorts parameters into the order of export, the same from every layout


def strip_module_prefix(name: str) -> str:
    """`name` without the "module." that each wrapper (DDP, Float16Module) puts before it."""
    while name.startswith("module."):
        name = name[len("module.") :]
    return name


def match(family: str, name: str) -> Match:
    """Returns the rule for a Megatron parameter `name`. Raises `ConfigError` for a family or a
    parameter without one.
    """
    if family not in FAMILIES:
        raise ConfigError(
            f"Model family {family!r} is not supported. Known: {', '.join(FAMILIES)}."
        )
    name = strip_module_prefix(name)
    for index, rule in enumerate(FAMILIES[family].rules):
        found = rule.pattern.fullmatch(name)
        if found:
            numbers = {key: int(value) for key, value in found.groupdict().items()}
            hf_names = tuple(hf.format(**numbers) for hf in rule.hf)
            if "layer" not in numbers:
                return Match(rule, hf_names, (0 if index == 0 else 2, 0, index, 0))
            return Match(rule, hf_names, (1, numbers["layer"], index, numbers.get("expert", 0)))
    raise ConfigError(
        f"The Megatron parameter {name!r} has no counterpart in Hugging Face's {family} models."
    )


def combine(rule: Rule, tensors: Sequence[torch.Tensor], sizes: WeightSizes) -> torch.Tensor:
    """The whole Megatron parameter (vocabulary not yet padded) from the tensors named by `rule.hf`,
    in that order.
    """
    if rule.how == "glu":
        return torch.cat(tuple(tensors))
    if rule.how == "qkv":
        grouped = [tensor.view(sizes.num_kv_heads, -1, *tensor.shape[1:]) for tensor in tensors]
        return torch.cat(grouped, dim=1).flatten(0, 1)
    return tensors[0]


def split(rule: Rule, parameter: torch.Tensor, sizes: WeightSizes) -> list[torch.Tensor]:
    """The inverse of `combine`, in the order of `rule.hf`; padding rows of the vocabulary are
    dropped.
    """
    if rule.how == "vocab":
        return [parameter[: sizes.vocab_size]]
    if rule.how == "glu":
        return list(parameter.chunk(2))
    if rule.how == "qkv":
        per_group = sizes.num_heads // sizes.num_kv_heads
        # [G, (Q/G + 2) * D, ...]
        grouped = parameter.view(sizes.num_kv_heads, -1, *parameter.shape[1:])
        head_dim = grouped.shape[1] // (per_group + 2)
        return [
            part.flatten(0, 1)
            for part in grouped.split([per_group * head_dim, head_dim, head_dim], dim=1)
        ]
    return [parameter]
