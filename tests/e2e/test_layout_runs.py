"""Whole runs under layouts: the model split over four ranks (tensor parallel 2 x context parallel
2, dense and mixture of experts), and the same recorded rollouts trained on one and on two
data-parallel ranks.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pytest
from support import small_run
from support.layout_batch import make_folders, write_rollouts
from support.layout_matrix import (
    CANCELLING,
    GRADIENT_TOLERANCE,
    VALUE_TOLERANCE,
    command_line,
    named_metrics,
    read_metrics,
    relative,
)

NUM_GPUS = 0

SPLIT = (
    "--actor-num-gpus-per-node 4 --num-cpus 5 --tensor-model-parallel-size 2 "
    "--context-parallel-size 2 --sequence-parallel "
    "--num-rollout 2 --step-timeout 200 --startup-timeout 200"
).split()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "example", ["moe", pytest.param("addition", marks=pytest.mark.slow_layouts)]
)
def test_a_model_split_over_four_ranks_trains_and_serves(example, tmp_path):
    """The engine gets whole weights gathered from all four ranks: its log-probs stay the trainer's,
    step after step."""
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


# What a forward pass has a part in: equal to float32's accuracy. All other metrics come from the
# samples alone: equal to float64's.
OF_THE_MODEL = (
    "advantages",
    "returns",
    "kl",
    "log_probs",
    "ref_log_probs",
    "correct_entropy",
    "logprob_abs_diff",
    "logprob_kl",
)


@pytest.fixture(scope="module")
def replayed(tmp_path_factory):
    """{data-parallel size: metrics by step key} of runs on the same recorded rollouts, at the same
    time, which need no prompts.
    """
    root = tmp_path_factory.mktemp("replay")
    folders, template = make_folders(root / "models", ("qwen3",)), write_rollouts(root)
    processes = {}
    for dp_size in (1, 2):
        run_dir = root / f"dp{dp_size}"
        run_dir.mkdir()
        words = command_line(
            "reinforce++", "dp1 trailing", folders, run_dir
        )  # --normalize-advantages, a KL in the reward
        words += [
            "--actor-num-gpus-per-node",
            str(dp_size),
            "--num-rollout",
            "4",
            "--load-debug-rollout-data",
            template,
        ]
        words += ["--gate-keep-truncated", "--no-live-view", "--no-write-report"]
        processes[dp_size] = small_run.launch(
            [sys.executable, "-m", "slime.train", *words], run_dir
        )
    for process in processes.values():
        small_run.finish(process, timeout=150)
    return {dp_size: read_metrics(root / f"dp{dp_size}") for dp_size in processes}


@pytest.mark.timeout(200)
def test_recorded_rollouts_train_alike_on_one_and_on_two_ranks(replayed):
    """Recorded rollouts give the same numbers on one and on two ranks. The last step is one rollout
    of two samples, one micro-batch (the second step has three), so that the second rank's is empty;
    nothing hangs."""
    name, empty = "schedule/empty_micro_batches", {}
    for dp_size, metrics in replayed.items():
        empty[dp_size] = [values[name] for _, values in metrics["rollout/step"] if name in values]
    assert empty == {1: [0, 0, 0], 2: [2, 2, 2]}
    one, two = (named_metrics(replayed[dp_size]) for dp_size in (1, 2))
    assert sorted(one) == sorted(two)
    exact = 0
    for key, value in one.items():
        family, _, name = key.partition(" ")[2].partition("/")
        if family == "train" or name.partition("/")[0] in OF_THE_MODEL:
            tolerance = (
                GRADIENT_TOLERANCE if name in ("grad_norm", "weight_delta") else VALUE_TOLERANCE
            )
            scale = 1.0 if name.partition("/")[0] in CANCELLING else 0.0
            assert relative(two[key], value, scale=scale) < tolerance, (key, value, two[key])
        else:
            exact += 1
            assert two[key] == (
                value if isinstance(value, str) else pytest.approx(value, rel=1e-9, abs=0)
            ), key
    assert exact > 100
    # one of the second six is masked whole
    assert [one[f"{step} train/global_batch_size"] for step in (0, 1, 2)] == [6, 5, 1]


@pytest.mark.timeout(200)
def test_a_rollout_that_trains_nothing_does_not_end_the_run(replayed):
    """With whitening, a rollout that is masked whole has steps of gradient 0, one that is rejected
    whole has no step, and the next one trains."""
    for metrics in replayed.values():
        named = named_metrics(metrics)
        ledger = [
            [named[f"{i} rollout/ledger/{name}"] for name in ("sampled", "trained", "dropped")]
            for i in range(4)
        ]
        assert ledger == [[18, 15, 3], [18, 0, 18], [18, 0, 18], [18, 15, 3]]
        assert named["1 rollout/ledger/dropped/fully_masked"] == 16
        assert [named.get(f"{i} rollout/num_samples") for i in range(4)] == [15, 0, None, 15]
        assert named["2 rollout/ledger/dropped/too_short"] == 18
        norms = {step: values["train/grad_norm"] for step, values in metrics["train/step"]}
        assert [step for step, norm in norms.items() if norm == 0] == [3, 4, 5]
        assert sorted(norms) == list(range(9))  # three of each rollout but the rejected one
        assert named["2 train/weight_delta"] == 0 < named["3 train/weight_delta"]
        assert not [
            name
            for name in named
            if name.startswith(("1 rollout/advantages", "2 rollout/advantages"))
        ]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
