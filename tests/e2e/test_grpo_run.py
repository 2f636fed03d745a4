"""Whole runs: prompts, engine over HTTP, reward, GRPO, Megatron-core on two data-parallel ranks,
weight sync, evaluation, checkpoints.

One uninterrupted run of four rollouts is the reference; the others must agree with it."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also as `python tests/...`
from support import small_run

from slime.files.jsonl import read_jsonl
from slime.harness.consistency_report import build_report
from slime.harness.diff.inputs import Choice, compare_paths
from slime.harness.diff.values import Tolerance

NUM_GPUS = 0

EXACT = (
    "rollout/raw_reward",
    "rollout/rollout_log_probs",
    "train/loss",
    "train/grad_norm",
    "rollout/response_lengths",
)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    from examples.addition.prepare import prepare

    return Path(prepare(tmp_path_factory.mktemp("addition")))


@pytest.fixture(scope="module")
def whole_run(data, tmp_path_factory):
    """Four rollouts of two optimizer steps on two data-parallel ranks, with evaluation and a
    checkpoint after two.
    """
    folder = tmp_path_factory.mktemp("whole")
    options = [
        "--actor-num-gpus-per-node",
        2,
        "--num-rollout",
        4,
        "--save",
        folder / "checkpoints",
        "--save-interval",
        2,
    ]
    options += [
        "--eval-prompt-data",
        "addition",
        data / "eval.jsonl",
        "--eval-interval",
        2,
        "--eval-max-response-len",
        6,
    ]
    options += [
        "--eval-temperature",
        0,
        "--check-weight-update-equal",
        "--dump-details",
        folder / "dumps",
    ]
    small_run.run(data, folder, *options)
    return folder


def processes_with(text):
    """Ids of running processes whose command line or environment mentions `text`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                content = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
            except OSError:
                continue
            if text.encode() in content:
                found.append(int(entry.name))
    return found


@pytest.mark.timeout(300)
def test_every_sample_is_trained_or_dropped_for_a_reason(whole_run):
    """In every rollout of a real run, 8 prompts x 4 samples are the trained ones plus those dropped
    for a reason."""
    assert small_run.series(whole_run, "rollout/ledger/sampled") == [32] * 4
    trained = small_run.series(whole_run, "rollout/ledger/trained")
    dropped = small_run.series(whole_run, "rollout/ledger/dropped")
    assert [a + b for a, b in zip(trained, dropped, strict=True)] == [32] * 4
    assert min(trained) > 0


@pytest.mark.timeout(300)
def test_trainer_and_engine_agree_on_log_probs(whole_run):
    """Trainer and engine differ by less than 1e-4 nats in every step, so that the weights that
    sampled are the weights that train."""
    differences = small_run.series(whole_run, "train/train_rollout_logprob_abs_diff")
    assert len(differences) == 8
    assert max(differences) < 1e-4
    largest = small_run.series(whole_run, "rollout/logprob_abs_diff/max")
    assert len(largest) == 4
    assert 0 < max(largest) < 1e-4


@pytest.mark.timeout(300)
def test_every_update_reaches_the_engine(whole_run):
    """Each update is a version at the engine, and training changed the weights
    (--check-weight-update-equal compared every byte)."""
    assert small_run.series(whole_run, "perf/weight_version") == [2, 3, 4, 5]
    assert small_run.series(whole_run, "train/weights_checksum_changed") == [1] * 4


@pytest.mark.timeout(300)
def test_evaluation_is_before_training_and_after_each_interval(whole_run):
    """Evaluations run before training and after each interval."""
    steps = [r["step"] for r in small_run.records(whole_run) if r.get("step_key") == "eval/step"]
    assert sorted(set(steps)) == [0, 2, 4]


@pytest.mark.timeout(300)
def test_a_resumed_run_continues_the_same_stream(data, whole_run, tmp_path):
    """Resumed after rollout 1, a run has the numbers of the uninterrupted one: prompts, samples,
    rewards, losses, gradients."""
    options = [
        "--actor-num-gpus-per-node",
        2,
        "--num-rollout",
        4,
        "--load",
        whole_run / "checkpoints",
        "--ckpt-step",
        1,
    ]
    small_run.run(data, tmp_path, *options)
    for name in EXACT:
        whole, resumed = small_run.series(whole_run, name), small_run.series(tmp_path, name)
        assert resumed == whole[len(whole) // 2 :], name
    # what the gate compares with comes from the checkpoint: times differ, and what a cache of
    # compared texts had seen
    whole, resumed = (
        [gate_numbers(r) for r in read_jsonl(d / "gate.jsonl")[0] if not r["evaluation"]]
        for d in (whole_run, tmp_path)
    )
    assert [record["rollout_id"] for record in resumed] == [2, 3] and resumed == whole[2:]
    assert resumed[0]["drift"]["psi_previous"] is not None


def gate_numbers(record):
    """A record of gate.jsonl without what depends on the clock and on earlier work of
    the process.
    """
    counts = {
        name: count for name, count in record["counts"].items() if not name.startswith("cache_")
    }
    return {**record, "counts": counts, "seconds": 0, "gate_seconds": 0, "share_of_iteration": 0}


@pytest.mark.timeout(300)
def test_a_recorded_run_replays_on_one_rank_without_an_engine(data, whole_run, tmp_path):
    """A run recorded on two ranks replays on one without an engine, as docs/debugging.md says:
    every field of every trained sample comes back."""
    samples = whole_run / "dumps" / "rollout_data" / "{rollout_id}.parquet"
    options = [
        "--actor-num-gpus-per-node",
        1,
        "--num-rollout",
        4,
        "--load-debug-rollout-data",
        samples,
    ]
    small_run.run(
        data, tmp_path, *options, "--save-debug-train-data", tmp_path / "{rollout_id}.parquet"
    )
    for rollout_id in range(4):
        recorded = whole_run / "dumps" / "train_data" / f"{rollout_id}.parquet"
        (found,) = compare_paths(
            recorded, tmp_path / recorded.name, Choice(tolerance=Tolerance(rtol=1e-5, atol=1e-6))
        ).rollouts
        assert found.identical, found.first
        assert found.num_samples == 32
        assert {
            "tokens",
            "loss_masks",
            "rewards",
            "rollout_log_probs",
            "log_probs",
            "advantages",
            "raw_reward",
        } <= {one.field for one in found.fields}


@pytest.mark.timeout(300)
def test_the_worst_tokens_of_a_run_are_shown_in_their_text(whole_run):
    """`slime consistency RUN` reports agreement, and its largest difference is the logged one."""
    report = build_report(whole_run, top=3)
    assert [step.step for step in report.steps] == [0, 1, 2, 3] and not report.has_alarm
    largest = max(small_run.series(whole_run, "rollout/logprob_abs_diff/mean"))
    assert report.steps[report.step].metrics["rollout/logprob_abs_diff/mean"] == largest
    assert abs(report.tokens[0].difference) == pytest.approx(
        report.steps[report.step].metrics["rollout/logprob_abs_diff/max"], rel=1e-6
    )
    assert all(
        "<|assistant|>" in token.before + token.text
        for token in report.tokens
        if token.response_token == 0
    )
    assert all(token.weight_versions == [str(report.step + 1)] for token in report.tokens)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("layout", ["tensor", "pipeline"])
def test_a_model_split_over_two_ranks_trains_the_same(data, whole_run, tmp_path, layout):
    """With TP=2 or PP=2 the losses of the first steps agree with DP=2 within 1e-4."""
    options = [
        "--actor-num-gpus-per-node",
        2,
        "--num-rollout",
        2,
        f"--{layout}-model-parallel-size",
        2,
    ]
    small_run.run(data, tmp_path, *options)
    whole, split = (
        small_run.series(whole_run, "train/loss"),
        small_run.series(tmp_path, "train/loss"),
    )
    assert len(split) == 4
    assert split == pytest.approx(whole[:4], abs=1e-4)
    assert small_run.series(tmp_path, "train/grad_norm")[:2] == pytest.approx(
        small_run.series(whole_run, "train/grad_norm")[:2], rel=1e-3
    )


@pytest.mark.timeout(300)
def test_an_interrupted_run_leaves_nothing_behind(data, tmp_path):
    """SIGTERM during training ends every process of the run, engine and Ray included, and prints
    how to continue."""
    process = small_run.start(data, tmp_path, "--actor-num-gpus-per-node", 2, "--num-rollout", 1000)
    deadline = time.monotonic() + 150
    while time.monotonic() < deadline and not (tmp_path / "metrics.jsonl").exists():
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output[-3000:]
    assert "interrupted" in output
    deadline = time.monotonic() + 10
    while processes_with(str(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert processes_with(str(tmp_path)) == []


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
