"""A run that loses an engine, or a training rank, trains to the same bits as one that nothing
happened to: real Ray, Megatron-core and engine."""

import json
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also as `python tests/...`
from support import engine_faults, small_run
from support.phase_faults import Strike, Striker
from support.same_run import differences

from slime.harness.ledger import main as ledger_main

NUM_GPUS = 0

OPTIONS = (
    "--num-rollout 3 --rollout-max-response-len 24 --sglang-max-running-requests 8 "
    "--custom-rm-path support.engine_faults.reward"
).split()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    from examples.addition.prepare import prepare

    return Path(prepare(tmp_path_factory.mktemp("addition")))


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """The folder of a run that nothing happens to."""
    folder = tmp_path_factory.mktemp("whole")
    small_run.run(data, folder, *OPTIONS, "--local", "--dump-details", folder / "dumps")
    return folder


@pytest.mark.timeout(300)
def test_a_killed_and_a_frozen_engine_are_replaced_and_nothing_else_changes(
    data, whole, tmp_path, monkeypatch
):
    """SIGKILL in rollout 1 and SIGSTOP in rollout 2, while requests run and wait: every sample,
    every trained value, every weight and every metric is that of an undisturbed run; what was
    sampled again is counted."""
    healed = tmp_path / "healed"
    monkeypatch.setenv(engine_faults.VARIABLE, "1:9,2:19")
    options = ["--use-fault-tolerance", "--rollout-health-check-interval", 1]
    options += ["--rollout-health-check-timeout", 3, "--dump-details", healed / "dumps"]
    output = small_run.run(data, healed, *OPTIONS, *options)
    faults = [json.loads(line) for line in (healed / "faults.jsonl").read_text().splitlines()]
    assert [fault["rollout"] for fault in faults] == [1, 2], "both faults happened"
    assert all(fault["load"]["running"] > 0 for fault in faults), "in the middle of a rollout"
    restarted = small_run.series(healed, "rollout/engines_restarted")
    assert restarted[0] == 0 and restarted[1] >= 1 and restarted[2] >= 1
    resampled = small_run.series(healed, "rollout/resampled_requests")
    assert resampled[0] == 0 and min(resampled[1:]) >= 4
    assert f"It had process id {faults[0]['pid']}" in output and "it is frozen: " in output
    for fault in faults:
        assert not os.path.exists(f"/proc/{fault['pid']}")
    assert differences(whole, healed) == []


@pytest.mark.timeout(300)
def test_a_killed_training_rank_is_started_again_and_nothing_else_changes(data, whole, tmp_path):
    """SIGKILL in the backward pass of rollout 1, and once more while its successor loads: the ranks
    go on from the state after rollout 0; nothing is trained, logged or generated twice."""
    healed = tmp_path / "healed"
    options = ["--recovery-interval", 1, "--dump-details", healed / "dumps"]
    process = small_run.start(data, healed, *OPTIONS, *options)
    rank = "actor rank 0"
    strikes = [Strike(rank, "rollout 1: .*forward_backward"), Strike(rank, "init")]
    Striker(process.pid, strikes)
    output = small_run.finish(process)
    assert all(strike.pid is not None for strike in strikes)
    for strike in strikes:
        assert f"{rank} (process {strike.pid}) has died" in output
    assert small_run.series(healed, "rollout/training_restarts") == [0, 1, 0]
    assert differences(whole, healed) == []


@pytest.mark.timeout(300)
def test_a_killed_rollout_manager_is_started_again_and_nothing_else_changes(data, whole, tmp_path):
    """SIGKILL in the middle of rollout 1: its successor starts engines, which get the weights that
    those before had, and generates the rollout again; rollout 0 is not repeated."""
    healed = tmp_path / "healed"
    options = ["--recovery-interval", 1, "--dump-details", healed / "dumps"]
    process = small_run.start(data, healed, *OPTIONS, *options)
    strike = Strike("the rollout manager", "rollout 1: .*generate")
    Striker(process.pid, [strike])
    output = small_run.finish(process)
    assert f"the rollout manager (process {strike.pid}) has died" in output
    assert small_run.series(healed, "rollout/manager_restarts") == [0, 1, 0]
    assert differences(whole, healed) == []
    assert ledger_main([str(healed)]) == 0


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
