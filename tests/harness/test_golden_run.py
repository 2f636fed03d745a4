"""The golden run, replayed: the code makes of its inputs, bit for bit, what it made when it was
recorded, and within the layout matrix's tolerances on other layouts.
"""

import json
import re
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pytest

from slime.harness import golden
from slime.harness.golden_check import read_notes, this_machine
from slime.harness.replay.stages import STAGES
from slime.recording.reader import Recording

NUM_GPUS = 0

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
RUN = GOLDEN / "run"
LAYOUTS = {
    "dp2": ["--actor-num-gpus-per-node", "2"],
    "pp2": ["--pipeline-model-parallel-size", "2"],
    "cp2": ["--context-parallel-size", "2"],
}


def check(capsys, monkeypatch, folder, *words):
    """(exit status, the report as JSON, what was printed) of `slime golden check RUN`, run in a
    folder where the recorded run's model is not."""
    monkeypatch.chdir(folder)
    status = golden.main(["check", str(RUN), "--json", *words])
    text = capsys.readouterr().out
    return status, json.loads(text.splitlines()[-1])


def test_every_stage_makes_what_it_made(capsys, monkeypatch, tmp_path):
    """Verdicts, scores, baselines, columns, schedule and metrics of three rollouts are the recorded
    ones; a change of the data path shows here first."""
    status, report = check(capsys, monkeypatch, tmp_path)
    assert status == 0, report["first_difference"]
    assert len(report["rollouts"]) == 3 * len(STAGES) and not report["notes"]
    assert all(one["num_samples"] for one in report["rollouts"].values())


@pytest.mark.timeout(300)
def test_training_is_repeated(capsys, monkeypatch, tmp_path):
    """Every field, loss, gradient norm and weight digest of a rollout that starts from an
    optimizer's state, without the model's folder: bit for bit on the machine that recorded it."""
    status, report = check(capsys, monkeypatch, tmp_path, "--stage", "train", "--rollout", "1")
    assert status == 0, report["first_difference"]
    (found,) = report["rollouts"].values()
    fields = {one["field"]: one for one in found["fields"]}
    assert {"log_probs", "ref_log_probs", "advantages", "train/loss", "train/grad_norm"} <= set(
        fields
    )
    if dict(read_notes(RUN).machine) == this_machine():
        assert fields["after"]["stage"] == "weights after"
        assert all(one["entries"] == 0 for one in fields.values())


@pytest.mark.slow_layouts
@pytest.mark.timeout(600)
@pytest.mark.parametrize("rollout_id", ["0", "2"])
def test_training_of_the_other_rollouts_is_repeated(rollout_id, capsys, monkeypatch, tmp_path):
    """The first rollout has no optimizer state yet; the last one has the oldest tokens."""
    words = ["--stage", "train", "--rollout", rollout_id]
    status, report = check(capsys, monkeypatch, tmp_path, *words)
    assert status == 0, report["first_difference"]


@pytest.mark.slow_layouts
@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_another_layout_trains_the_same(layout, capsys, monkeypatch, tmp_path):
    """Two data-parallel, pipeline or context-parallel ranks give the recorded numbers within the
    layout matrix's tolerances."""
    words = ["--stage", "train", "--rollout", "1", *LAYOUTS[layout]]
    status, report = check(capsys, monkeypatch, tmp_path, *words)
    assert status == 0, report["first_difference"]
    (found,) = report["rollouts"].values()
    assert any("the layout differs" in note for note in found["notes"])


def test_the_run_has_every_kind_of_trouble():
    """A golden run proves nothing about what is not in it."""
    recording = Recording(RUN)
    reasons, dropped, masked, spans, executions, trailing = Counter(), Counter(), 0, 0, 0, 0
    for rollout_id in recording.rollouts:
        rollout = recording.rollout(rollout_id)
        samples = rollout.judged_samples()
        reasons.update(reason for reason in samples.reasons if reason)
        dropped.update(reason for reason in samples.dropped_by if reason)
        masked += sum(0 < sum(one.loss_mask or []) < one.response_length for one in samples.batch)
        spans += sum(len({version for version, _ in one.weight_version_spans}) > 1
                     and one.weight_version_spans[0][0] != one.weight_version_spans[-1][0]
                     for one in samples.batch)  # fmt: skip
        ids = Counter(one.rollout_id for one in samples.batch if one.rollout_id is not None)
        executions += max(ids.values()) > 1
        groups = Counter(one.group_index for one in samples.batch)
        assert len(set(groups.values())) > 1  # ragged
        split = rollout.json("rollout")["split"]
        trailing += split["dropped"]["trailing"]
        assert len(split["num_microbatches"]) == 2 and min(split["num_microbatches"]) > 1
        assert rollout.problems() == []
    assert len(recording.rollouts) == 3
    assert {"empty", "too_short", "truncated", "bad_token", "bad_logprob", "bad_reward",
            "aborted"} <= set(reasons)  # fmt: skip
    assert any(name.startswith("dynamic_filter") for name in dropped)
    assert masked >= 9 and spans >= 6 and executions == 3 and trailing >= 3


@pytest.mark.parametrize("name, limit", [("run", 1 << 20), ("collapsed", 1 << 18)])
def test_the_recordings_are_small_and_hold_nothing_of_a_machine(name, limit):
    """They are part of the repository: no path, no host, no command line of the machine that made
    them."""
    files = [path for path in (GOLDEN / name).rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < limit
    machine = re.compile(rb"(?<![\w./])/(home|root|tmp|work|usr|var|opt|mnt|data)/[\w.]")
    assert [path for path in files if machine.search(path.read_bytes())] == []
    record = json.loads((GOLDEN / name / "run_0000.json").read_bytes())
    assert record["command"] == [] and "api_key" not in json.dumps(record)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
