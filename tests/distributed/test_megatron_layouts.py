"""Real Megatron-core over gloo: every parallel layout computes what one unpacked Hugging Face model
in plain torch computes.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pytest
import torch
from support.distributed import run_distributed
from support.megatron_worker import folder_tensors, reference_run, run_layouts
from support.tiny_models import make_tiny_checkpoint

NUM_GPUS = 0

TP2, PP2, CP2 = (
    {"tensor_model_parallel_size": 2},
    {"pipeline_model_parallel_size": 2},
    {"context_parallel_size": 2},
)
EP2 = {"expert_model_parallel_size": 2}
SP = {"sequence_parallel": True}
VPP = {"num_layers_per_virtual_pipeline_stage": 1}
DISTRIBUTED = {"use_distributed_optimizer": True}
RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}

MODELS = {
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {},
    "llama-tied": {"tie_word_embeddings": True},
    "llama-biased": {"attention_bias": True, "mlp_bias": True},
}
# name: (model, options). Each architecture meets each axis at
# least once.
TWO_RANKS = {
    "tp2-qwen2": ("qwen2", TP2),
    "tp2-padded-vocab-tied-llama": ("llama-tied", {**TP2, "make_vocab_size_divisible_by": 128}),
    "tp2-sp-biased-llama": ("llama-biased", {**TP2, **SP}),
    "tp2-sp-distributed-optimizer-qwen3": ("qwen3", {**TP2, **SP, **DISTRIBUTED}),
    "pp2-tied-llama": ("llama-tied", PP2),
    "pp2-vpp2-qwen3": ("qwen3", {**PP2, **VPP}),
    "cp2-qwen2": ("qwen2", CP2),
    "cp2-recompute-qwen3": ("qwen3", {**CP2, **RECOMPUTE}),
    "dp2-selective-recompute-qwen3": ("qwen3", {"recompute_granularity": "selective"}),
    "dp2-distributed-optimizer-llama": ("llama-tied", DISTRIBUTED),
    "ep2-moe": ("qwen3_moe", EP2),
    "tp2-sp-moe": ("qwen3_moe", {**TP2, **SP}),
    "pp2-moe": ("qwen3_moe", PP2),
}
FOUR_RANKS = {
    "tp2-cp2-sp-distributed-optimizer": ("qwen3", {**TP2, **CP2, **SP, **DISTRIBUTED}),
    "tp2-pp2-sp": ("qwen2", {**TP2, **PP2, **SP}),
    "cp2-pp2-tied": ("llama-tied", {**CP2, **PP2}),
    "pp2-vpp2-dp2-tied": ("llama-tied", {**PP2, **VPP}),
    "dp2-cp2-distributed-optimizer": ("qwen3", {**CP2, **DISTRIBUTED}),
    "tp2-sp-ep2-etp1-moe": ("qwen3_moe", {**TP2, **SP, **EP2, "expert_tensor_parallel_size": 1}),
    "tp2-sp-ep2-moe-distributed-optimizer": ("qwen3_moe", {**TP2, **SP, **EP2, **DISTRIBUTED}),
    "cp2-ep2-moe": ("qwen3_moe", {**CP2, **EP2}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A four-layer checkpoint per family."""
    root = tmp_path_factory.mktemp("checkpoints")
    return {
        name: str(
            make_tiny_checkpoint(
                root / name, name.partition("-")[0], num_hidden_layers=4, **overrides
            )
        )
        for name, overrides in MODELS.items()
    }


@pytest.fixture(scope="module")
def references(folders):
    return {name: reference_run(folder) for name, folder in folders.items()}


def _run(folders, layouts, world_size, timeout):
    cases = {name: (folders[family], options) for name, (family, options) in layouts.items()}
    by_rank = run_distributed(run_layouts, world_size, cases, timeout=timeout)
    return {name: [results[name] for results in by_rank] for name in layouts}


@pytest.fixture(scope="module")
def two_ranks(folders):
    return _run(folders, TWO_RANKS, 2, 150)


@pytest.fixture(scope="module")
def four_ranks(folders):
    return _run(folders, FOUR_RANKS, 4, 400)


def _check(results, reference, folder):
    log_probs = {}
    for rank_result in results:
        log_probs.update(rank_result["log_probs"])
    assert sorted(log_probs) == sorted(reference["log_probs"])
    for index, expected in reference["log_probs"].items():
        torch.testing.assert_close(
            log_probs[index],
            expected,
            rtol=0,
            atol=1e-5,
            msg=lambda text, i=index: f"sample {i}: {text}",
        )

    metrics = next(rank_result["metrics"] for rank_result in results if rank_result["metrics"])
    assert [step["train/loss"] for step in metrics] == pytest.approx(reference["losses"], rel=1e-5)
    assert [step["train/grad_norm"] for step in metrics] == pytest.approx(
        reference["grad_norms"], rel=1e-4
    )

    (before,) = (rank_result["before"] for rank_result in results if rank_result["before"])
    stored = folder_tensors(folder)
    assert sorted(before) == sorted(stored)
    for name, tensor in stored.items():
        assert before[name].dtype == tensor.dtype
        assert torch.equal(before[name], tensor), name

    (after,) = (rank_result["after"] for rank_result in results if rank_result["after"])
    for name, expected in reference["after"].items():
        torch.testing.assert_close(
            after[name], expected, rtol=0, atol=3e-6, msg=lambda text, n=name: f"{n}: {text}"
        )
        assert not torch.equal(after[name], stored[name]), f"{name} did not train"


@pytest.mark.parametrize("layout", TWO_RANKS)
def test_two_ranks_compute_what_plain_torch_computes(layout, two_ranks, references, folders):
    """Two ranks give plain torch's log-probs, loss, gradient norm, and exported weights before
    (byte for byte) and after two AdamW steps."""
    family = TWO_RANKS[layout][0]
    _check(two_ranks[layout], references[family], folders[family])


@pytest.mark.slow_layouts
@pytest.mark.parametrize("layout", FOUR_RANKS)
def test_four_ranks_compute_what_plain_torch_computes(layout, four_ranks, references, folders):
    """Combinations of two axes give the same numbers."""
    family = FOUR_RANKS[layout][0]
    _check(four_ranks[layout], references[family], folders[family])


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
