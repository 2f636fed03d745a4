"""Layouts that cannot work are refused before a process starts, with values that would."""

import argparse

import pytest

from slime.backends.megatron_utils.layout import layout_problems

NUM_GPUS = 0

GOOD = {
    "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "context_parallel_size": 1, "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": None, "sequence_parallel": False, "num_layers_per_virtual_pipeline_stage": None,
    "num_layers": 12, "num_attention_heads": 12, "num_query_groups": 4, "ffn_hidden_size": 96, "num_moe_experts": None,
    "moe_token_dispatcher_type": None, "recompute_granularity": None, "recompute_method": None, "recompute_num_layers": None,
}  # fmt: skip
TP, PP, CP, EP = (
    f"{axis}_model_parallel_size" for axis in ("tensor", "pipeline", "context", "expert")
)
CP = "context_parallel_size"
VPP = "num_layers_per_virtual_pipeline_stage"


def _problems(world_size=None, **changes):
    return layout_problems(argparse.Namespace(**{**GOOD, **changes}), world_size=world_size)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {TP: 4, "sequence_parallel": True},
        {PP: 3, VPP: 2},
        {EP: 2, "num_moe_experts": 4},
        {
            TP: 2,
            "sequence_parallel": True,
            EP: 2,
            "expert_tensor_parallel_size": 1,
            "num_moe_experts": 4,
        },
        {
            "num_layers": None,
            "num_attention_heads": None,
            "num_query_groups": None,
            "ffn_hidden_size": None,
            PP: 5,
        },
    ],
)
def test_layouts_that_work_have_no_problem(changes):
    """Layouts that work have no problem, also when the model's shape is not known yet."""
    assert _problems(**changes) == []


@pytest.mark.parametrize(
    "changes, words",
    [
        ({TP: 3}, "12 attention heads and 4 key/value heads. Use 1 or 2 or 4."),
        ({TP: 4, "ffn_hidden_size": 98, "sequence_parallel": True}, "98 channels. Use 1 or 2 or 7"),
        ({PP: 5}, "12 layers. Use 1 or 2 or 3 or 4"),
        ({VPP: 2}, "needs --pipeline-model-parallel-size of at least 2"),
        (
            {PP: 2, VPP: 4},
            "the 6 layers of a pipeline stage into at least two equal parts. Use 1 or 2 or 3.",
        ),
        ({PP: 2, VPP: 6}, "at least two equal parts"),
        ({PP: 12, VPP: 1}, "Drop it: one layer per stage"),
        ({EP: 2}, "this one is dense. Use 1."),
        ({EP: 3, "num_moe_experts": 4}, "4 experts. Use 1 or 2 or 4."),
        (
            {
                TP: 2,
                "sequence_parallel": True,
                "expert_tensor_parallel_size": 1,
                "num_moe_experts": 4,
            },
            "unreduced. Use 2",
        ),
        ({TP: 2, "num_moe_experts": 4}, "only with --sequence-parallel"),
        ({PP: 2, "moe_token_dispatcher_type": "allgather"}, "Use alltoall"),
        ({"recompute_granularity": "full"}, "Add --recompute-method uniform"),
        (
            {"recompute_granularity": "full", "recompute_method": "block"},
            "and --recompute-num-layers",
        ),
        ({"recompute_granularity": "full", "recompute_num_layers": 1}, "needs --recompute-method"),
        ({"recompute_method": "block"}, "needs --recompute-granularity full"),
        ({CP: 0}, "--context-parallel-size is 0; it must be at least 1."),
    ],
)
def test_a_layout_that_cannot_work_is_explained(changes, words):
    """Each layout that cannot work gives one problem with a value that would."""
    (problem,) = _problems(**changes)
    assert words in problem


def test_ranks_that_do_not_divide_are_counted():
    """6 ranks with tensor 2 x context 2 are refused with the two ranks that have no group."""
    (problem,) = _problems(world_size=6, **{TP: 2, CP: 2})
    assert "6 training ranks" in problem and "= 4 ranks. Use 4 or 8 ranks" in problem
    assert _problems(world_size=8, **{TP: 2, CP: 2}) == []


def test_all_problems_are_reported_at_once():
    """All problems of a layout are reported at once."""
    assert len(_problems(**{TP: 3, PP: 5, EP: 2})) == 3


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
