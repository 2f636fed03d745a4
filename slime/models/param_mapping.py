"""Which Hugging Face tensors make which Megatron parameter, stated once and read in both
directions.

Names here are of the whole model: no "module." prefix, layer and expert numbers counted over all
pipeline stages and expert ranks. Letters: H hidden size, D head dimension, G key/value heads (query
groups), Q query heads.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from slime.exceptions import ConfigError
from slime.models.hf_config import text_config


@dataclasses.dataclass(frozen=True)
class Rule:
    """One Megatron parameter (`{layer}`, `{expert}` stand for numbers) and the Hugging Face tensors
    it is made of.
    """

    megatron: str
    hf: tuple[str, ...]
    how: str = (
        # copy | vocab (rows are padded) | glu (gate over up) | qkv (by query group: its queries,
        # key, value)
        "copy"
    )

    @functools.cached_property
    def pattern(self) -> re.Pattern[str]:
        escaped = re.escape(self.megatron)
        for number in ("layer", "expert"):
            escaped = escaped.replace(re.escape("{" + number + "}"), f"(?P<{number}>\\d+)")
        return re.compile(escaped)


def _layer(megatron: str, *hf: str, how: str = "copy") -> Rule:
    return Rule(
        "decoder.layers.{layer}." + megatron,
        tuple("model.layers.{layer}." + name for name in hf),
        how,
    )


_QKV = ("self_attn.q_proj.", "self_attn.k_proj.", "self_attn.v_proj.")
_EXPERT = "mlp.experts.{expert}."

# The order is the order of export. Two spellings of one parameter: Transformer Engine fuses norms
# into the next layer and groups experts; Megatron's local layers do not.
DENSE_RULES = (
    Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), "vocab"),
    _layer("input_layernorm.weight", "input_layernorm.weight"),
    _layer("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
    _layer("self_attention.linear_qkv.weight", *(name + "weight" for name in _QKV), how="qkv"),
    _layer("self_attention.linear_qkv.bias", *(name + "bias" for name in _QKV), how="qkv"),
    _layer("self_attention.q_layernorm.weight", "self_attn.q_norm.weight"),
    _layer("self_attention.k_layernorm.weight", "self_attn.k_norm.weight"),
    _layer("self_attention.linear_proj.weight", "self_attn.o_proj.weight"),
    _layer("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
    _layer("mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm.weight"),
    _layer("mlp.linear_fc1.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight", how="glu"),
    _layer("mlp.linear_fc2.weight", "mlp.down_proj.weight"),
    Rule("decoder.final_layernorm.weight", ("model.norm.weight",)),
    Rule("output_layer.weight", ("lm_head.weight",), "vocab"),
)
MOE_RULES = (
    _layer("mlp.router.weight", "mlp.gate.weight"),
    _layer(
        "mlp.experts.local_experts.{expert}.linear_fc1.weight",
        _EXPERT + "gate_proj.weight",
        _EXPERT + "up_proj.weight",
        how="glu",
    ),
    _layer(
        "mlp.experts.linear_fc1.weight{expert}",
        _EXPERT + "gate_proj.weight",
        _EXPERT + "up_proj.weight",
        how="glu",
    ),
    _layer("mlp.experts.local_experts.{expert}.linear_fc2.weight", _EXPERT + "down_proj.weight"),
    _layer("mlp.experts.linear_fc2.weight{expert}", _EXPERT + "down_proj.weight"),
)
# Keys are the model types of config.json.
FAMILIES: dict[str, tuple[Rule, ...]] = {
    "llama": DENSE_RULES,
    "qwen2": DENSE_RULES,
    "qwen3": DENSE_RULES,
    "qwen3_moe": DENSE_RULES[:-2] + MOE_RULES + DENSE_RULES[-2:],
}


@dataclasses.dataclass(frozen=True)
class Shape:
    """What the rules need to know of a model's sizes."""

    num_query_heads: int
    num_query_groups: int
    vocab_size: int

    @staticmethod
    def from_hf(config: Mapping[str, Any]) -> Shape:
        config = text_config(config)
        heads = config["num_attention_heads"]
        return Shape(heads, config.get("num_key_value_heads") or heads, config["vocab_size"])

    @staticmethod
    def from_args(args: Any) -> Shape:
        return Shape(
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
    for index, rule in enumerate(FAMILIES[family]):
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


def combine(rule: Rule, tensors: Sequence[torch.Tensor], shape: Shape) -> torch.Tensor:
    """The whole Megatron parameter (vocabulary not yet padded) from the tensors named by `rule.hf`,
    in that order.
    """
    if rule.how == "glu":
        return torch.cat(tuple(tensors))
    if rule.how == "qkv":
        grouped = [tensor.view(shape.num_query_groups, -1, *tensor.shape[1:]) for tensor in tensors]
        return torch.cat(grouped, dim=1).flatten(0, 1)
    return tensors[0]


def split(rule: Rule, parameter: torch.Tensor, shape: Shape) -> list[torch.Tensor]:
    """The inverse of `combine`, in the order of `rule.hf`; padding rows of the vocabulary are
    dropped.
    """
    if rule.how == "vocab":
        return [parameter[: shape.vocab_size]]
    if rule.how == "glu":
        return list(parameter.chunk(2))
    if rule.how == "qkv":
        per_group = shape.num_query_heads // shape.num_query_groups
        # [G, (Q/G + 2) * D, ...]
        grouped = parameter.view(shape.num_query_groups, -1, *parameter.shape[1:])
        head_dim = grouped.shape[1] // (per_group + 2)
        return [
            part.flatten(0, 1)
            for part in grouped.split([per_group * head_dim, head_dim, head_dim], dim=1)
        ]
    return [parameter]


def expected_hf_names(family: str, fields: Mapping[str, Any]) -> Iterator[str]:
    """Every tensor that a Hugging Face folder of this family may hold; `fields` are Megatron's
    (`megatron_fields_from_hf`).
    """
    experts = fields.get("num_moe_experts") or 0
    for rule in FAMILIES[family]:
        layers = range(fields["num_layers"]) if "{layer}" in rule.megatron else (0,)
        for layer in layers:
            for expert in range(experts) if "{expert}" in rule.megatron else (0,):
                yield from (hf.format(layer=layer, expert=expert) for hf in rule.hf)
