"""Each way to run `slime train`, on the real command line, engine and ranks; one run covers many
options that may stand together.
"""

import concurrent.futures
import http.client
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import small_run

from slime.commands.run_security import descendants, listening_ports
from slime.harness.diff.command import main as diff_main
from slime.harness.replay.command import main as replay_main

NUM_GPUS = 0


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    from examples.addition.prepare import prepare

    return Path(prepare(tmp_path_factory.mktemp("addition")))


def metrics_are_finite(run_dir):
    """Every number that was logged, and the ledger of every rollout balances."""
    for record in small_run.records(run_dir):
        for name, value in record.get("metrics", {}).items():
            assert not isinstance(value, float) or math.isfinite(value), (name, value)
    parts = [
        small_run.series(run_dir, f"rollout/ledger/{name}")
        for name in ("sampled", "trained", "dropped")
    ]
    return all(
        sampled == trained + dropped for sampled, trained, dropped in zip(*parts, strict=True)
    )


def assert_same_dumps(a, b):
    """Every field of every sample of the rollout dumps, and every bit of the training dumps
    (log-probs, advantages, returns).
    """
    for kind in ("rollout_data", "train_data"):
        names = sorted(path.name for path in (a / kind).iterdir())
        assert names and names == sorted(path.name for path in (b / kind).iterdir())
        assert diff_main([str(a / kind), str(b / kind)]) == 0
    for name in names:
        assert (a / "train_data" / name).read_bytes() == (b / "train_data" / name).read_bytes(), (
            name
        )


def processes_of(run_dir):
    """(process id, command line) of the running processes of a run, Ray's among them."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                command, environment = (
                    (entry / "cmdline").read_bytes(),
                    (entry / "environ").read_bytes(),
                )
            except OSError:
                continue
            if str(run_dir).encode() in command + environment:
                found.append((int(entry.name), command.decode(errors="replace")))
    return found


@pytest.mark.timeout(300)
def test_ppo_trains_a_critic_beside_the_policy(data, tmp_path):
    """The critic minimizes its value loss while --loss-type is the policy's; with gamma = lambda =
    1, value + advantage = return = reward."""
    options = [
        "--advantage-estimator",
        "ppo",
        "--num-critic-only-steps",
        1,
        "--num-rollout",
        2,
        "--use-kl-loss",
        "--kl-loss-coef",
        0.1,
    ]
    options += [
        "--save",
        tmp_path / "policy",
        "--critic-save",
        tmp_path / "critic",
        "--ref-load",
        data / "model",
    ]
    small_run.run(data, tmp_path, *options)
    assert metrics_are_finite(tmp_path)
    critic = small_run.series(tmp_path, "train/critic-value_loss")
    assert len(critic) == 4 and critic[-1] < critic[0]
    # the first rollout trained the critic alone
    assert len(small_run.series(tmp_path, "train/pg_loss")) == 2
    (value,), (advantage,), (reward,) = (
        small_run.series(tmp_path, f"rollout/{name}")
        for name in ("values", "advantages", "raw_reward")
    )
    assert value + advantage == pytest.approx(reward, abs=1e-6)
    assert max(small_run.series(tmp_path, "rollout/logprob_abs_diff/max")) < 1e-4
    assert [
        (tmp_path / role / "latest_checkpointed_iteration.txt").read_text().strip()
        for role in ("policy", "critic")
    ] == ["1", "1"]


@pytest.mark.timeout(300)
def test_ranks_that_are_ended_while_engines_generate_go_on_as_if_they_had_not_been(data, tmp_path):
    """With --release-train and --no-save-optim the run trains to the same bits as one whose state
    stays in memory; steps and versions count on, and the engines' log-probs are the trainer's."""
    options = [
        "--release-train",
        "--num-rollout",
        2,
        "--no-save-optim",
        "--no-save-rng",
        "--dump-details",
        tmp_path / "dumps",
    ]
    small_run.run(data, tmp_path, *options)
    assert metrics_are_finite(tmp_path)
    assert max(small_run.series(tmp_path, "rollout/logprob_abs_diff/max")) < 1e-4
    steps = [
        record["step"]
        for record in small_run.records(tmp_path)
        if "train/loss" in record.get("metrics", {})
    ]
    assert steps == [0, 1, 2, 3]
    assert small_run.series(tmp_path, "perf/weight_version") == [2, 3]
    assert small_run.series(tmp_path, "train/weights_checksum_changed") == [1, 1]
    assert not (tmp_path / "suspended").exists() or not list((tmp_path / "suspended").iterdir())
    # In one process: state that never leaves its memory, and state that does; all three train on
    # the same bits and to the same bits.
    resident, offloaded = tmp_path / "resident", tmp_path / "offloaded"
    for run_dir, switches in (
        (resident, ["--no-offload-train", "--no-offload-rollout"]),
        (offloaded, ["--offload"]),
    ):
        options = ["--local", "--num-rollout", 2, "--dump-details", run_dir / "dumps", *switches]
        small_run.run(data, run_dir, *options)
    for run_dir in (tmp_path, offloaded):
        assert_same_dumps(resident / "dumps", run_dir / "dumps")


@pytest.mark.timeout(300)
def test_old_log_probs_come_from_the_weights_that_sampled(data, tmp_path, monkeypatch):
    """train-async trains on samples of older weights; --keep-old-actor computes their log-probs
    with those, so the engine's agree to 1e-4."""
    options = [
        "--num-rollout",
        4,
        "--global-batch-size",
        32,
        "--update-weights-interval",
        2,
        "--keep-old-actor",
        "--record",
        tmp_path / "rec",
        "--record-weights",
    ]
    small_run.run(data, tmp_path, *options, asynchronous=True)
    assert metrics_are_finite(tmp_path)
    assert small_run.series(tmp_path, "perf/weight_version") == [2, 3]
    # rollout 1 was sampled before the first update, rollout 2 before the second; 3 with the weights
    # after it
    assert small_run.series(tmp_path, "rollout/staleness/mean") == [0, 1, 2, 1]
    assert max(small_run.series(tmp_path, "rollout/logprob_abs_diff/max")) < 1e-4
    moved = small_run.series(tmp_path, "train/ppo_kl")
    # later rollouts are off-policy
    assert abs(moved[0]) < 1e-6 and max(abs(value) for value in moved[1:]) > 1e-4
    # a replay of rollout 2 has the weights that sampled it, which are not those of the engines
    monkeypatch.setenv("PYTHONPATH", f"{small_run.ROOT}{os.pathsep}{small_run.ROOT / 'tests'}")
    assert replay_main([str(tmp_path / "rec"), "--rollout", "2", "--stage", "train"]) == 0


@pytest.mark.timeout(300)
def test_distillation_in_bfloat16_with_dynamic_batches(data, tmp_path):
    """In bfloat16 with the first weights as reference and teacher, `opd_reverse_kl` is 0 in the
    first rollout and above 0 in the second."""
    options = [
        "--use-opd",
        "--opd-type",
        "megatron",
        "--opd-teacher-load",
        data / "model",
        "--kl-coef",
        0.1,
        "--bf16",
        "--num-rollout",
        2,
    ]
    options += [
        "--advantage-estimator",
        "reinforce_plus_plus",
        "--normalize-advantages",
        "--global-batch-size",
        32,
    ]
    options += [
        "--use-dynamic-batch-size",
        "--max-tokens-per-gpu",
        256,
        "--use-distributed-optimizer",
        "--calculate-per-token-loss",
    ]
    options += [
        "--recompute-granularity",
        "full",
        "--recompute-method",
        "uniform",
        "--recompute-num-layers",
        1,
    ]
    options += [
        "--save-hf",
        tmp_path / "hf_{rollout_id}",
        "--check-weight-update-equal",
        "--actor-num-gpus-per-node",
        2,
    ]
    small_run.run(data, tmp_path, *options)
    assert metrics_are_finite(tmp_path)
    reverse_kl = small_run.series(tmp_path, "train/opd_reverse_kl")
    assert reverse_kl[0] == 0 and abs(reverse_kl[1]) > 1e-3
    # bfloat16 has 8 bits
    assert max(small_run.series(tmp_path, "train/train_rollout_logprob_abs_diff")) < 0.02
    assert json.loads((tmp_path / "hf_1" / "config.json").read_text())["model_type"] == "qwen3"


@pytest.mark.timeout(300)
def test_plug_ins_and_an_external_engine(data, tmp_path):
    """Every hook is called with its documented arguments; an external server behind a key gets each
    version over the disk."""
    engine = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "slime.cli",
            "serve",
            "--hf-checkpoint",
            data / "model",
            "--port",
            "0",
            "--deterministic",
        ],
        cwd=small_run.ROOT,
        env={**os.environ, **small_run.ENVIRONMENT, "SLIME_API_KEY": "key7"},
        text=True,
        stdout=subprocess.PIPE,
    )
    try:
        url = engine.stdout.readline().split(" at ")[1].split(",")[0]
        plug = "support.training_plugins."
        options = [
            "--rollout-external-engine-addrs",
            url,
            "--sglang-api-key",
            "key7",
            "--update-weight-transport",
            "disk",
        ]
        options += [
            "--update-weight-disk-dir",
            tmp_path / "weights",
            "--check-weight-update-equal",
            "--num-rollout",
            2,
        ]
        options += [
            "--custom-generate-function-path",
            f"{plug}generate",
            "--custom-rm-path",
            f"{plug}group_reward",
            "--group-rm",
        ]
        options += [
            "--reward-key",
            "score",
            "--custom-reward-post-process-path",
            f"{plug}rewards_above_half",
        ]
        options += [
            "--rollout-sample-hook-path",
            f"{plug}sample_hook",
            "--rollout-sample-filter-path",
            f"{plug}remove_first",
        ]
        options += [
            "--rollout-all-samples-process-path",
            f"{plug}all_groups",
            "--custom-rollout-log-function-path",
            f"{plug}rollout_log",
        ]
        options += [
            "--custom-advantage-function-path",
            f"{plug}advantages",
            "--rollout-data-postprocess-path",
            f"{plug}train_data",
        ]
        options += ["--loss-type", "custom_loss", "--custom-loss-function-path", f"{plug}loss"]
        small_run.run(data, tmp_path, *options)
    finally:
        engine.terminate()
        engine.communicate(timeout=20)
    assert metrics_are_finite(tmp_path)
    # 8 prompts x 4 rollouts x 2 samples
    assert small_run.series(tmp_path, "rollout/ledger/sampled") == [64, 64]
    assert len(small_run.series(tmp_path, "train/one")) == 4  # 32 rollouts in steps of 16
    assert max(small_run.series(tmp_path, "rollout/logprob_abs_diff/max")) < 1e-4
    assert (tmp_path / "weights" / "weight_v3").is_dir() and not (
        tmp_path / "weights" / "weight_v2"
    ).exists()
    notes = [json.loads(line) for line in (tmp_path / "plugins.jsonl").read_text().splitlines()]
    assert [n["num_groups"] for n in notes if n["hook"] == "all_groups"] == [8, 8]
    assert [
        (n["rollout_id"], n["num_samples"], n["seen_in"])
        for n in notes
        if n["hook"] == "rollout_log"
    ] == [(0, 64, [0]), (1, 64, [1])]
    trained = [n["advantages"] for n in notes if n["hook"] == "train_data"]
    assert [len(values) for values in trained] == [64, 64] and all(
        -0.5 <= value <= 0.5 for values in trained for value in values
    )


def answer_without_key(port):
    """The status of a request without a key; None where no HTTP is spoken: Ray's, torch's and
    gloo's own protocols.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port.number, timeout=2)
    try:
        connection.request("POST", "/pause_generation")
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def assert_closed_to_strangers(driver):
    """Every process of a run listens on loopback alone, and what speaks HTTP there asks for the
    key that the run has made.
    """
    found = listening_ports(descendants(driver))
    assert len(found) >= 6, "control store, node manager, workers, the engine, the ranks' store"
    assert all(port.is_loopback for port in found), found
    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        answers = [one for one in pool.map(answer_without_key, found) if one is not None]
    assert 401 in answers and set(answers) <= {401, 400, 404, 405}, answers


@pytest.mark.timeout(300)
def test_a_killed_rank_ends_the_run_with_its_name(data, tmp_path):
    """A run listens on loopback alone and asks for its key. SIGKILL of rank 1 ends it with one
    sentence that names it; no collective hangs, and no process stays."""
    process = small_run.start(data, tmp_path, "--actor-num-gpus-per-node", 2, "--num-rollout", 1000)
    metrics = tmp_path / "metrics.jsonl"
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and not (
        metrics.exists() and "train/step" in metrics.read_text()
    ):
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.2)
    ranks = sorted(
        pid for pid, command in processes_of(tmp_path) if command.startswith("ray::TrainWorker")
    )
    assert_closed_to_strangers(process.pid)
    os.kill(ranks[1], signal.SIGKILL)
    output, _ = process.communicate(timeout=90)
    assert process.returncode == 1, output[-3000:]
    errors = [line for line in output.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and f"(process {ranks[1]}) has died: it crashed" in errors[0]
    assert errors[0].startswith("error: actor rank ") and "Its last phase: " in errors[0]
    assert len(output.splitlines()) < 40
    deadline = time.monotonic() + 10
    while processes_of(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert processes_of(tmp_path) == []
    assert not [
        path
        for path in Path("/tmp").glob("slime-ray-*/session_*")
        if path.name.endswith(f"_{process.pid}")
    ]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
