"""A run whose engine is killed in one rollout and frozen in another trains to the same bits as one
that nothing happened to: real Ray, Megatron-core and engine."""

import json
import math
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also as `python tests/...`
from support import engine_faults, small_run

from slime.harness.diff.command import main as diff_main

NUM_GPUS = 0

# Figures of time, of a process's own, and of the healing.
OTHER = ("perf/", "gate/time/", "rollout/engines_restarted", "rollout/resampled_requests")
OPTIONS = (
    "--num-rollout 3 --rollout-max-response-len 24 --sglang-max-running-requests 8 "
    "--custom-rm-path support.engine_faults.reward"
).split()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    from examples.addition.prepare import prepare

    return Path(prepare(tmp_path_factory.mktemp("addition")))


def metrics_of(run_dir):
    """{(axis, step, name): value} of everything that does not tell the time."""
    return {
        (record["step_key"], record["step"], name): value
        for record in small_run.records(run_dir)
        if "step_key" in record
        for name, value in record["metrics"].items()
        if not name.startswith(OTHER)
    }


@pytest.mark.timeout(300)
def test_a_killed_and_a_frozen_engine_are_replaced_and_nothing_else_changes(
    data, tmp_path, monkeypatch
):
    """SIGKILL in rollout 1 and SIGSTOP in rollout 2, while requests run and wait: every sample,
    every trained value, every weight and every metric is that of an undisturbed run; what was
    sampled again is counted."""
    whole, healed = tmp_path / "whole", tmp_path / "healed"
    dumps = [whole / "dumps", healed / "dumps"]
    small_run.run(data, whole, *OPTIONS, "--local", "--dump-details", dumps[0])
    monkeypatch.setenv(engine_faults.VARIABLE, "1:9,2:19")
    options = ["--use-fault-tolerance", "--rollout-health-check-interval", 1]
    options += ["--rollout-health-check-timeout", 3, "--dump-details", dumps[1]]
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
    for kind in ("rollout_data", "train_data"):
        assert diff_main([str(folder / kind) for folder in dumps]) == 0
    for one in sorted((dumps[0] / "train_data").iterdir()):
        assert one.read_bytes() == (dumps[1] / "train_data" / one.name).read_bytes(), one.name
    found, expected = metrics_of(healed), metrics_of(whole)
    assert found.keys() == expected.keys()
    assert {
        key: (found[key], value)
        for key, value in expected.items()
        if found[key] != value and not math.isnan(value)
    } == {}


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
