"""Hugging Face tensors <-> Megatron parameters: one set of rules in two directions, for any cut."""

import argparse

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.backends.megatron_utils.megatron_to_hf import (
    _convert_to_hf_core,
    convert_qwen3_moe_to_hf,
)
from slime.backends.megatron_utils.sharding import shard, unshard
from slime.exceptions import ConfigError
from slime.models.param_mapping import WeightSizes, combine, match, split

NUM_GPUS = 0

SIZES = WeightSizes(num_heads=4, num_kv_heads=2, vocab_size=10)


def test_queries_keys_and_values_are_interleaved_by_group():
    """4 query heads in 2 groups of head size 1: Megatron's rows are q0 q1 k0 v0, q2 q3 k1 v1."""
    q, k, v = (torch.tensor(rows).float()[:, None] for rows in ([0, 1, 2, 3], [10, 11], [20, 21]))
    rule = match("qwen3", "decoder.layers.5.self_attention.linear_qkv.weight").rule
    whole = combine(rule, [q, k, v], SIZES)
    assert whole[:, 0].tolist() == [0, 1, 10, 20, 2, 3, 11, 21]
    for expected, part in zip((q, k, v), split(rule, whole, SIZES), strict=True):
        assert torch.equal(part, expected)


def test_the_order_of_export_is_the_models_own():
    """Parameters are exported layer by layer, within a layer by its parts, the head last, in the
    same order for every layout."""
    names = [
        "embedding.word_embeddings.weight",
        "decoder.layers.0.self_attention.linear_qkv.weight",
        "decoder.layers.0.mlp.linear_fc2.weight",
        "decoder.layers.1.self_attention.linear_qkv.weight",
        "decoder.layers.10.self_attention.linear_qkv.weight",
        "output_layer.weight",
    ]
    assert sorted(reversed(names), key=lambda name: match("llama", name).order) == names


def test_names_of_layers_and_experts_are_those_of_the_whole_model():
    """Exported names number layers and experts of the whole model and have no prefix of a
    wrapper."""
    args = argparse.Namespace(num_attention_heads=4, num_query_groups=2, vocab_size=10)
    named = convert_qwen3_moe_to_hf(
        args,
        "module.module.decoder.layers.3.mlp.experts.local_experts.7.linear_fc1.weight",
        torch.arange(8.0).view(4, 2),
    )
    assert [name for name, _ in named] == [
        "model.layers.3.mlp.experts.7.gate_proj.weight",
        "model.layers.3.mlp.experts.7.up_proj.weight",
    ]
    assert named[1][1].tolist() == [[4.0, 5.0], [6.0, 7.0]]


def test_padding_rows_of_the_vocabulary_do_not_leave():
    """Padding rows are not exported: 10 tokens of a table of 16 rows."""
    args = argparse.Namespace(num_attention_heads=4, num_query_groups=2, vocab_size=10)
    ((name, tensor),) = _convert_to_hf_core(args, "llama", "output_layer.weight", torch.ones(16, 3))
    assert name == "lm_head.weight" and tensor.shape == (10, 3)


def test_an_unknown_parameter_is_an_error():
    """A parameter without a rule is an error; left out, the engine would lack it."""
    with pytest.raises(ConfigError, match="has no counterpart"):
        match("llama", "decoder.layers.0.mlp.new_thing.weight")
    with pytest.raises(ConfigError, match="'rwkv' is not supported"):
        match("rwkv", "output_layer.weight")


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(
        [
            "decoder.layers.0.mlp.linear_fc1.weight",
            "decoder.layers.0.self_attention.linear_proj.weight",
        ]
    ),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([0, 1]),
    st.sampled_from([1, 2]),
)
def test_cutting_and_putting_together_is_the_identity(name, size, dim, stride):
    """Cutting and putting together is the identity for any stride and for the gated MLP, whose
    halves are cut one by one."""
    if "linear_fc1" in name:
        dim = 0
    whole = torch.arange(16 * 16).view(16, 16)
    parts = [
        shard(name, whole, size=size, rank=rank, dim=dim, stride=stride) for rank in range(size)
    ]
    assert torch.equal(unshard(name, parts, dim=dim, stride=stride), whole)


def test_a_rank_of_the_gated_mlp_holds_a_part_of_both_halves():
    """With gate rows 0..3 and up rows 4..7, rank 1 of 2 holds 2, 3, 6, 7."""
    whole = torch.arange(8)[:, None]
    assert shard("decoder.layers.0.mlp.linear_fc1.weight", whole, size=2, rank=1, dim=0)[
        :, 0
    ].tolist() == [2, 3, 6, 7]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
