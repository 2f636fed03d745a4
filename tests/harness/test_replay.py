"""`slime replay`: every stage of a recorded rollout, run again from its recorded input, gives what was
recorded; what the options change is found in the stage that they change."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from support import small_run

from slime.exceptions import ConfigError, RolloutDataError, SlimeError
from slime.harness.replay import command, stages
from slime.recording.reader import Recording

NUM_GPUS = 0

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module", autouse=True)
def importable():
    """The reward function of the small run is found by the processes that a replay starts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "tests")]))
        yield


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A recording of two rollouts of a small run, with weights; its checkpoints beside it."""
    from examples.addition.prepare import prepare

    root = tmp_path_factory.mktemp("replay")
    data = Path(prepare(root / "data"))
    options = ["--num-rollout", 2, "--local", "--record", root / "rec", "--record-weights"]
    words = small_run.command(
        data, root / "run", *options, "--save", root / "save", "--save-interval", 1
    )
    done = subprocess.run(words, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return root


def replayed(root, *words):
    """The exit status of `slime replay` over the recording."""
    return command.main([str(root / "rec"), *map(str, words)])


def differing(root, capsys, *words):
    """(exit status, what was printed)."""
    status = replayed(root, *words)
    return status, capsys.readouterr().out


def test_every_stage_gives_what_was_recorded(recorded, capsys):
    """Verdicts, scores, baselines, columns, schedule and metrics are bit for bit the recorded ones,
    and no Ray cluster was started for it."""
    status, text = differing(recorded, capsys, "--rescore")
    assert status == 0, text
    for rollout_id in (0, 1):
        for stage in stages.STAGES:
            assert f"rollout {rollout_id} {stage}" in text
    assert "not replayed" not in text


@pytest.mark.parametrize("stage, words, field", [
    ("gate", ["--gate-min-response-tokens", "5"], "reason"),
    ("rewards", ["--advantage-estimator", "rloo"], "rewards"),
    ("schedule", ["--global-batch-size", "8"], "step"),
])  # fmt: skip
def test_an_option_shows_in_the_stage_that_it_changes(recorded, capsys, stage, words, field):
    """Options beside the recording replace the recorded ones."""
    status, text = differing(recorded, capsys, "--rollout", "1", "--stage", stage, *words)
    assert status == 1 and field in text


def test_a_training_is_repeated_bit_for_bit(recorded, capsys):
    """Every field, loss, gradient norm and weight of the recorded step, from the recorded weights."""
    status, text = differing(recorded, capsys, "--rollout", "1", "--stage", "train")
    assert status == 0, text


def test_a_training_starts_from_the_nearest_checkpoint(recorded, capsys, tmp_path):
    """Without --record-weights, the checkpoint before the rollout is as good."""
    copy = tmp_path / "rec"
    shutil.copytree(recorded / "rec", copy)
    shutil.rmtree(copy / "rollout_000001" / "weights")
    status = command.main([str(copy), "--rollout", "1", "--stage", "train"])
    assert status == 0, capsys.readouterr().out
    shutil.move(recorded / "save", tmp_path / "elsewhere")
    try:
        shutil.rmtree(copy / "rollout_000000")
        with pytest.raises(ConfigError, match="--record-weights"):
            command.main([str(copy), "--rollout", "1", "--stage", "train"])
    finally:
        shutil.move(tmp_path / "elsewhere", recorded / "save")


def test_another_estimator_is_another_step(recorded, capsys):
    """What would this step have been? Baselines, advantages, loss and weights differ, the samples
    do not."""
    words = ("--rollout", "1", "--stage", "train", "--advantage-estimator", "rloo")
    status, text = differing(recorded, capsys, *words)
    assert status == 1 and "rewards" in text and "grad_norm" in text


def test_a_training_that_fails_says_how_its_output_ends(recorded):
    """Options that cannot be are named by the run that gets them."""
    with pytest.raises(SlimeError, match="--ref-load"):
        replayed(recorded, "--rollout", "1", "--stage", "train", "--ref-load", "/nowhere/at/all")


def test_a_training_that_hangs_is_ended(recorded):
    """--timeout bounds it; the message names where its log is."""
    with pytest.raises(SlimeError, match="did not end within 0 s .--timeout.*logs"):
        replayed(recorded, "--rollout", "1", "--stage", "train", "--timeout", "0.2")


def test_what_is_asked_for_must_be_there(recorded, tmp_path):
    """A folder that is none, a rollout that was not recorded, a flag that is none, an output inside
    the recording."""
    with pytest.raises(RolloutDataError, match="no recording"):
        command.main([str(tmp_path)])
    with pytest.raises(RolloutDataError, match="it has 0, 1"):
        replayed(recorded, "--rollout", "7")
    with pytest.raises(ConfigError, match="--no-such-flag"):
        replayed(recorded, "--no-such-flag")
    with pytest.raises(ConfigError, match="lies in the recording"):
        replayed(recorded, "--out", recorded / "rec" / "new")
    with pytest.raises(ConfigError, match="exists"):
        replayed(recorded, "--out", tmp_path)


def test_output_of_a_replay_is_a_recording_that_can_be_kept(recorded, tmp_path):
    """--out keeps the parts that were made again, each listed and whole."""
    assert (
        replayed(recorded, "--rollout", "0", "--stage", "columns", "--out", tmp_path / "out") == 0
    )
    folder = tmp_path / "out" / "columns" / "rollout_000000"
    listed = json.loads((folder / "manifest.rollout.json").read_text())["parts"]
    assert list(listed) == ["columns"] and (folder / "columns.parquet").is_file()
    assert Recording(recorded / "rec").rollout(0).problems() == []


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
