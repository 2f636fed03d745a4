"""What differs between the model families that trainer, engine and converters know: one frozen
description each, with the names of its weights.

Pure data: no torch, no config.json. A family of the same block (RMSNorm, rotary positions, grouped
queries, gated SiLU MLP) is added by one entry of `FAMILIES`; a new kind of weight by one `Rule`.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from types import MappingProxyType


@dataclasses.dataclass(frozen=True)
class Rule:
    """One Megatron parameter and the Hugging Face tensors it is made of.

    Names are of the whole model: no "module." prefix, `{layer}` and `{expert}` counted over all
    pipeline stages and expert ranks.
    """

    megatron: str
    hf: tuple[str, ...]
    # copy | vocab (rows are padded) | glu (gate over up) | qkv (by query group: its queries, key,
    # value)
    how: str = "copy"
    # The ModelShape field that is true where a model has the parameter; None: every model has it.
    feature: str | None = None
    # all | dense (layers with one MLP) | sparse (layers with experts)
    layers: str = "all"

    @functools.cached_property
    def pattern(self) -> re.Pattern[str]:
        escaped = re.escape(self.megatron)
        for number in ("layer", "expert"):
            escaped = escaped.replace(re.escape("{" + number + "}"), f"(?P<{number}>\\d+)")
        return re.compile(escaped)


def _layer(
    megatron: str,
    *hf: str,
    how: str = "copy",
    feature: str | None = None,
    layers: str = "all",
) -> Rule:
    return Rule(
        "decoder.layers.{layer}." + megatron,
        tuple("model.layers.{layer}." + name for name in hf),
        how,
        feature,
        layers,
    )


def _dense(megatron: str, *hf: str, how: str = "copy", feature: str | None = None) -> Rule:
    return _layer(megatron, *hf, how=how, feature=feature, layers="dense")


def _sparse(megatron: str, *hf: str, how: str = "copy") -> Rule:
    return _layer(megatron, *hf, how=how, layers="sparse")


_QKV = ("self_attn.q_proj.", "self_attn.k_proj.", "self_attn.v_proj.")
_GATE_UP = ("mlp.gate_proj.", "mlp.up_proj.")
_EXPERT = "mlp.experts.{expert}."
_EXPERT_GATE_UP = (_EXPERT + "gate_proj.weight", _EXPERT + "up_proj.weight")

# The order is the order of export. Two spellings of one parameter: Transformer Engine fuses norms
# into the next layer and groups experts; Megatron's local layers do not.
DENSE_RULES = (
    Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), "vocab"),
    _layer("input_layernorm.weight", "input_layernorm.weight"),
    _layer("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
    _layer("self_attention.linear_qkv.weight", *(name + "weight" for name in _QKV), how="qkv"),
    _layer(
        "self_attention.linear_qkv.bias",
        *(name + "bias" for name in _QKV),
        how="qkv",
        feature="qkv_bias",
    ),
    _layer("self_attention.q_layernorm.weight", "self_attn.q_norm.weight", feature="qk_norm"),
    _layer("self_attention.k_layernorm.weight", "self_attn.k_norm.weight", feature="qk_norm"),
    _layer("self_attention.linear_proj.weight", "self_attn.o_proj.weight"),
    _layer("self_attention.linear_proj.bias", "self_attn.o_proj.bias", feature="linear_bias"),
    _layer("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
    _layer("mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm.weight"),
    _dense("mlp.linear_fc1.weight", *(name + "weight" for name in _GATE_UP), how="glu"),
    _dense(
        "mlp.linear_fc1.bias",
        *(name + "bias" for name in _GATE_UP),
        how="glu",
        feature="linear_bias",
    ),
    _dense("mlp.linear_fc2.weight", "mlp.down_proj.weight"),
    _dense("mlp.linear_fc2.bias", "mlp.down_proj.bias", feature="linear_bias"),
    Rule("decoder.final_layernorm.weight", ("model.norm.weight",)),
    Rule("output_layer.weight", ("lm_head.weight",), "vocab"),
)
MOE_RULES = (
    _sparse("mlp.router.weight", "mlp.gate.weight"),
    _sparse("mlp.experts.local_experts.{expert}.linear_fc1.weight", *_EXPERT_GATE_UP, how="glu"),
    _sparse("mlp.experts.linear_fc1.weight{expert}", *_EXPERT_GATE_UP, how="glu"),
    _sparse("mlp.experts.local_experts.{expert}.linear_fc2.weight", _EXPERT + "down_proj.weight"),
    _sparse("mlp.experts.linear_fc2.weight{expert}", _EXPERT + "down_proj.weight"),
)


@dataclasses.dataclass(frozen=True)
class Family:
    """One model family of transformers. All of them are decoders with RMSNorm, rotary positions
    and a gated SiLU MLP; the fields say where they part.
    """

    model_type: str
    # Of config.json's `architectures`: the classes with a language-model head.
    architectures: tuple[str, ...]
    # Queries, keys and values have biases, whatever `attention_bias` is.
    always_qkv_bias: bool = False
    # `attention_bias` and `mlp_bias` exist.
    knows_linear_biases: bool = False
    # RMSNorm on the queries and keys of each head.
    qk_norm: bool = False
    # What a missing `max_window_layers` means where it (or `layer_types`) chooses the layers with
    # the sliding window; None: `use_sliding_window` concerns all layers.
    max_window_layers: int | None = None
    # Layers may have experts in place of the MLP.
    is_moe: bool = False

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The weights, in the order of export: the final norm and the head come last."""
        return DENSE_RULES[:-2] + MOE_RULES + DENSE_RULES[-2:] if self.is_moe else DENSE_RULES


# Keys are the model types of config.json.
FAMILIES = MappingProxyType(
    {
        family.model_type: family
        for family in (
            Family("llama", ("LlamaForCausalLM",), knows_linear_biases=True),
            Family("qwen2", ("Qwen2ForCausalLM",), always_qkv_bias=True, max_window_layers=28),
            Family("qwen3", ("Qwen3ForCausalLM",), qk_norm=True, max_window_layers=28),
            Family("qwen3_moe", ("Qwen3MoeForCausalLM",), qk_norm=True, is_moe=True),
        )
    }
)

_DERIVED_TENSOR = re.compile(r"rotary_emb\.inv_freq$")


def is_derived_tensor(name: str) -> bool:
    """Whether a Hugging Face tensor follows from config.json and is not read: some old checkpoints
    hold the rotary frequencies.
    """
    return _DERIVED_TENSOR.search(name) is not None
