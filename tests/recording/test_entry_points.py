"""A real run records what other tools and other runs read: pandas, polars and duckdb join its
tables, `slime show` prints them, and training on them again gives the same numbers.
"""

import re
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also as `python tests/...`

from support import small_run

from slime.harness import show
from slime.recording.reader import Recording

NUM_GPUS = 0
PAGE = Path(__file__).resolve().parents[2] / "docs" / "harness.md"


@pytest.fixture(scope="module")
def runs(recorded_run, tmp_path_factory):
    """(recording of two rollouts and an evaluation, recording of a run that trained on it again)."""
    folder = tmp_path_factory.mktemp("runs")
    again = ["--debug-train-only", "--load-debug-rollout-data", recorded_run]
    again += ["--local", "--num-rollout", 2, "--record", folder / "again"]
    small_run.run(recorded_run.parent / "data", folder / "run", *again)
    return Recording(recorded_run), Recording(folder / "again")


@pytest.mark.timeout(240)
def test_every_part_is_there_and_whole(runs):
    """Each writer has said that it is complete, before its process ended."""
    first, again = runs
    assert first.rollouts == again.rollouts == [0, 1] and first.evaluations == [0, 2]
    for recording in runs:
        for rollout_id in recording.rollouts:
            rollout = recording.rollout(rollout_id)
            assert rollout.problems() == []
            assert {"samples", "gate", "columns", "schedule", "rollout", "train", "steps"} <= set(
                rollout.parts
            )
            assert all(one.facts["complete"] for one in rollout.manifests.values())
    assert "replies" in first.rollout(0)
    assert set(first.rollout(0, evaluation=True).parts) >= {"replies", "samples", "gate", "rollout"}
    hidden = [path for path in first.root.rglob(".*") if "weights" not in path.parts]
    assert not hidden  # a checkpoint has names of its own


def test_training_on_a_recording_again_computes_the_same_numbers(runs):
    """The recorded samples are what the gate was given: verdicts, columns, schedule and log-probs
    come out alike, bit for bit, and nothing is written into what is read."""
    first, again = (recording.rollout(1) for recording in runs)
    assert first.table("schedule").equals(again.table("schedule"))
    assert first.judged_samples().reasons == again.judged_samples().reasons
    for name, entries in first.train().token_fields.items():
        found = again.train().token_fields[name]
        assert all(map(np.array_equal, entries, found)), name
    steps = [
        {
            k: v
            for one in rollout.metric_records()
            for k, v in one["metrics"].items()
            if k.startswith("train/")
        }
        for rollout in (first, again)
    ]
    assert steps[0] and steps[0]["train/loss"] == steps[1]["train/loss"]


@pytest.mark.parametrize("tool", ["pandas", "polars", "duckdb"])
def test_the_code_of_the_page_joins_the_tables(runs, tool):
    """Nobody needs slime to read a recording; the page's code is what runs here."""
    pytest.importorskip(tool)
    (code,) = [
        block
        for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
        if f"import {tool}" in block
    ]
    rollout = runs[0].rollout(1)
    scope = {"folder": str(rollout.folder)}
    exec(code, scope)  # noqa: S102 - the page's own code
    rows = scope["rows"]
    if tool == "polars":
        rows = rows.to_dicts()
    else:
        rows = rows.to_dict("records")
    judged, train = rollout.judged_samples(), rollout.train()
    (batch, raw_rows) = rollout.columns()
    assert [row["raw_row"] for row in rows] == list(range(len(judged.samples)))
    for position, raw_row in enumerate(raw_rows.tolist()):
        row = rows[raw_row]
        assert row["prompt"] == judged.samples[raw_row].prompt
        assert row["rewards"] == pytest.approx(batch["rewards"][position])
        if position not in train.positions:
            assert row["mean_log_prob"] is None or np.isnan(row["mean_log_prob"])
            continue
        place = train.positions.tolist().index(position)
        assert row["mean_log_prob"] == pytest.approx(
            float(np.mean(train.token_fields["log_probs"][place], dtype=np.float64)), abs=1e-5
        )
        assert row["step"] == rollout.schedule()["step"][position]


def test_a_recording_is_shown_and_verified(runs, capsys):
    """Rollouts with their parts; a rollout's samples; a sample with the trainer's numbers."""
    root = runs[0].root
    assert show.main([str(root), "--verify"]) == 0
    shown = capsys.readouterr().out
    assert "rollout_000001" in shown and "eval_000000" in shown and "sizes and hashes" in shown
    folder = str(root / "rollout_000001")
    assert show.main([folder]) == 0
    assert "32 samples" in capsys.readouterr().out
    judged = runs[0].rollout(1).judged_samples()
    index = judged.samples[0].index
    assert show.main([folder, str(index)]) == 0
    shown = capsys.readouterr().out
    (trained,) = [e for e in runs[0].rollout(1).train().token_fields["log_probs"][:1]]
    assert f"{trained[0]:.5g}" in shown and "prompt" in shown
    assert show.main([folder, "99999"]) == 2
    assert "has no sample 99999; it has" in capsys.readouterr().err
    assert show.main([str(root), "3"]) == 2
    assert "name a rollout in it" in capsys.readouterr().err


def test_damage_is_found_and_named(runs, capsys):
    """One flipped bit needs --verify; a cut file does not."""
    root = runs[1].root
    path = root / "rollout_000000" / "gate.json"
    data = bytearray(path.read_bytes())
    data[10] ^= 1
    path.write_bytes(data)
    assert show.main([str(root)]) == 0
    assert show.main([str(root), "--verify"]) == 1
    assert "gate.json is damaged: its hash is" in capsys.readouterr().out
    path.write_bytes(data[:-5])
    (root / "rollout_000001" / "manifest.train.json").write_text("{")
    assert show.main([str(root)]) == 1
    shown = capsys.readouterr().out
    assert "gate.json has" in shown and "manifest.train.json" in shown


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
