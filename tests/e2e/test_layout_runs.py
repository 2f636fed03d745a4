"""Whole runs with the model split over four ranks: tensor parallel 2 x context parallel 2, dense and mixture of experts."""

import pytest
from support import small_run

NUM_GPUS = 0

SPLIT = (
    "--actor-num-gpus-per-node 4 --num-cpus 5 --tensor-model-parallel-size 2 --context-parallel-size 2 --sequence-parallel "
    "--num-rollout 2 --step-timeout 200 --startup-timeout 200"
).split()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("example", ["moe", pytest.param("addition", marks=pytest.mark.slow_layouts)])
def test_a_model_split_over_four_ranks_trains_and_serves(example, tmp_path):
    """The engine computes with whole weights that were gathered from all ranks after training: its log-probs stay the trainer's, step after step."""
    from importlib import import_module

    data = import_module(f"examples.{example}.prepare").prepare(tmp_path / "data")
    run_dir = tmp_path / "run"
    small_run.run(data, run_dir, *SPLIT, "--check-weight-update-equal", timeout=280)
    distances = small_run.series(run_dir, "rollout/logprob_abs_diff/max")
    assert len(distances) == 2
    assert 0 < max(distances) < 1e-4
    losses = small_run.series(run_dir, "train/loss")
    assert len(losses) == 4 and all(abs(loss) < 10 for loss in losses)
    assert small_run.series(run_dir, "rollout/ledger/sampled") == [32, 32]
    assert min(small_run.series(run_dir, "train/weight_delta")) > 0


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
