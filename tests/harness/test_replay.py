"""`slime replay`: every stage of a recorded rollout, run again from its recorded input, gives what was
recorded; what the options change is found in the stage that they change."""

import decimal
import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from support import recordings
from support.manager import dirty_rollout, manager_of
from support.rollout_args import rollout_args

from slime import cli
from slime.config.cli import parse_command_line
from slime.data.sample import Sample
from slime.exceptions import ConfigError, RolloutDataError
from slime.harness import golden
from slime.harness.replay import command, stages
from slime.harness.replay.options import recorded_config
from slime.recording.manifest import PARTS
from slime.recording.reader import Recording
from slime.recording.run_record import begin_recording

NUM_GPUS = 0

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden" / "run"


@pytest.fixture(scope="module", autouse=True)
def importable():
    """The reward function of the small run is found by the processes that a replay starts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "tests")]))
        yield


@pytest.fixture(scope="module")
def recorded(recorded_run):
    """The folder of a recording of two rollouts with weights; its checkpoints beside it."""
    return recorded_run.parent


def replayed(root, *words):
    """The exit status of `slime replay` over the recording."""
    return command.main([str(root / "recording"), *map(str, words)])


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
    assert "nothing to replay" not in text


@pytest.mark.parametrize("stage, words, field", [
    ("gate", ["--gate-min-response-tokens", "5"], "reason"),
    ("rewards", ["--advantage-estimator", "rloo"], "rewards"),
    ("schedule", ["--global-batch-size", "8"], "step"),
])  # fmt: skip
def test_an_option_shows_in_the_stage_that_it_changes(recorded, capsys, stage, words, field):
    """Options beside the recording replace the recorded ones."""
    status, text = differing(recorded, capsys, "--rollout", "1", "--stage", stage, *words)
    assert status == 1 and field in text


@pytest.mark.parametrize("options, own, expected", [
    ({"rm_type": "f1"}, {}, None),
    ({"rm_type": "f1"}, {"custom_rm_path": "a.b"}, "with --rescore"),
    ({"rm_type": "f1"}, {"metadata": {"rm_type": "remote_rm"}}, "with --rescore"),
    ({"rm_type": "f1"}, {"generate_function_path": "a.b"}, "with --rescore"),
    ({"custom_rm_path": "a.b"}, {}, "with --rescore"),
    ({}, {}, "no reward function scored"),
    ({}, {"metadata": {"rm_type": "f1"}}, "no reward function scored"),
    ({}, {"custom_rm_path": "a.b"}, "no reward function scored"),
    ({"rm_type": "f1"}, {"metadata": {"rm_type": "random"}}, "at random"),
    ({"custom_rm_path": "a.b", "reward_is_random": True}, {}, "at random"),
])  # fmt: skip
def test_a_score_is_made_again_where_a_scorer_made_it(options, own, expected):
    """Functions of the user, also those that a row names, are called with --rescore alone; what
    nothing scored (supervised training), or what was drawn, is not compared."""
    batch = [Sample(index=0), Sample(index=1, **own)]
    args = rollout_args(**{"rm_type": None, **options})
    for rescore in (False, True):
        why = stages._why_not_scored(args, batch, rescore=rescore)
        wanted = None if rescore and expected == "with --rescore" else expected
        assert why is None if wanted is None else wanted in why


async def reward_with_an_object(args, sample, **kwargs):
    """A reward function that keeps an object in the sample that no file can hold."""
    sample.metadata["price"] = decimal.Decimal("0.1")
    return 7.0


def test_what_a_scorer_leaves_in_a_sample_is_described_as_recording_does(recorded, capsys):
    """It made the stage one that cannot be replayed."""
    path = "harness.test_replay.reward_with_an_object"
    words = ("--rollout", 0, "--stage", "rewards", "--rescore", "--custom-rm-path", path)
    status, text = differing(recorded, capsys, *words)
    assert status == 1 and "rollout 0 rewards: different" in text, text


def convert(args, samples):
    """A converter of one's own: plain lists, with doubles that single precision does not hold."""
    return {
        "tokens": [one.tokens for one in samples],
        "response_lengths": [one.response_length for one in samples],
        "loss_masks": [[1] * one.response_length for one in samples],
        "rewards": [index / 3 for index, _ in enumerate(samples)],
        "raw_reward": [index / 3 for index, _ in enumerate(samples)],
    }


def test_columns_of_a_converter_are_compared_as_they_are_recorded(tmp_path, monkeypatch, capsys):
    """In the dtypes of the contract, not as the Python numbers that it returns; the rewards' stage
    has no columns of its own there."""
    manager = manager_of(
        dirty_rollout(), tmp_path, monkeypatch, record=str(tmp_path / "rec"), rm_type=None,
        custom_convert_samples_to_train_data_path=f"{__name__}.convert",
    )  # fmt: skip
    begin_recording(manager.args)
    manager.generate(0)
    manager.recorder.close()
    status = command.main([str(tmp_path / "rec"), "--stage", "columns", "--stage", "schedule"])
    assert status == 0, capsys.readouterr().out
    assert command.main([str(tmp_path / "rec"), "--stage", "rewards", "--rescore"]) == 2
    assert "makes rewards with its columns" in capsys.readouterr().out


def test_a_training_is_repeated_bit_for_bit(recorded, capsys):
    """Every field, loss, gradient norm and weight of the recorded step, from the recorded weights."""
    status, text = differing(recorded, capsys, "--rollout", "1", "--stage", "train")
    assert status == 0, text


def test_a_training_starts_from_the_nearest_checkpoint(recorded, capsys, tmp_path):
    """Without --record-weights, the checkpoint before the rollout is as good."""
    copy = tmp_path / "rec"
    shutil.copytree(recorded / "recording", copy)
    shutil.rmtree(copy / "rollout_000001" / "weights")
    status = command.main([str(copy), "--rollout", "1", "--stage", "train"])
    assert status == 0, capsys.readouterr().out
    shutil.move(recorded / "save", tmp_path / "elsewhere")
    try:
        shutil.rmtree(copy / "rollout_000000")
        assert command.main([str(copy), "--rollout", "1", "--stage", "train"]) == 2
        assert "--record-weights" in capsys.readouterr().out
    finally:
        shutil.move(tmp_path / "elsewhere", recorded / "save")


def test_another_estimator_is_another_step(recorded, capsys):
    """What would this step have been? Baselines, advantages, loss and weights differ, the samples
    do not."""
    words = ("--rollout", "1", "--stage", "train", "--advantage-estimator", "rloo")
    status, text = differing(recorded, capsys, *words)
    assert status == 1 and "rewards" in text and "grad_norm" in text


def test_a_training_that_fails_says_how_its_output_ends(recorded, capsys):
    """Options that cannot be are named by the run that gets them."""
    words = ("--rollout", "1", "--stage", "train", "--ref-load", "/nowhere/at/all")
    status, text = differing(recorded, capsys, *words)
    assert status == 2 and "could not be replayed" in text and "--ref-load" in text


def test_a_training_that_hangs_is_ended(recorded, capsys):
    """--timeout bounds it; the message names where its log is."""
    words = ("--rollout", "1", "--stage", "train", "--timeout", "0.2")
    status, text = differing(recorded, capsys, *words)
    assert status == 2
    assert re.search("did not end within 0 s .--timeout.*logs", text)


@pytest.mark.parametrize("stage, part", [
    ("gate", "samples"), ("gate", "gate"), ("rewards", "samples"), ("rewards", "columns"),
    ("columns", "columns"), ("schedule", "rollout"), ("metrics", "train"),
])  # fmt: skip
def test_a_stage_that_cannot_be_replayed_is_neither_equal_nor_different(
    recorded, capsys, tmp_path, stage, part
):
    """Exit status 2 with the reason: a damaged part says nothing about the code."""
    copy = recordings.copy_of(recorded / "recording", tmp_path / "rec")
    path = copy / "rollout_000001" / PARTS[part][0]
    path.write_bytes(path.read_bytes()[:-9])
    status = command.main([str(copy), "--rollout", "1", "--stage", stage, "--rescore"])
    text = capsys.readouterr().out
    assert status == 2 and f"rollout 1 {stage}: could not be replayed: " in text, text


def test_whatever_a_stage_raises_is_named_and_ends_no_other(recorded, capsys, tmp_path):
    """An error of the code under test is status 2 with its place, not Python's status 1, which
    says that something differs; a difference that is found as well is certain."""
    copy = recordings.copy_of(recorded / "recording", tmp_path / "rec")
    recordings.edit_json(copy, "gate", lambda record: record["state"].update(level="none"))
    words = [str(copy), "--rollout", "1"]
    assert command.main([*words, "--stage", "gate"]) == 2
    assert "ValueError: 'none' is not a valid Level" in capsys.readouterr().out
    assert command.main(words) == 2
    assert "rollout 1 schedule: identical" in capsys.readouterr().out
    assert command.main([*words, "--global-batch-size", "8"]) == 1
    assert "rollout 1 gate: could not be replayed" in capsys.readouterr().out


def test_a_stage_that_the_rollout_lacks_is_no_success_where_it_was_asked_for(
    recorded, capsys, tmp_path
):
    """A run that was killed before it trained: what there is replays, what is named and missing is
    status 2."""
    copy = recordings.copy_of(recorded / "recording", tmp_path / "rec")
    (copy / "rollout_000001" / "manifest.train.json").unlink()
    words = [str(copy), "--rollout", "1"]
    assert command.main(words) == 0
    assert command.main([*words, "--stage", "train"]) == 2
    assert "train: there is nothing to replay: the recording holds no" in capsys.readouterr().out
    (copy / "rollout_000001" / "manifest.rollout.json").unlink()
    shutil.copy(
        recorded / "recording" / "rollout_000001" / "manifest.train.json", copy / "rollout_000001"
    )
    assert command.main(words) == 2
    assert capsys.readouterr().out.count("there is nothing to replay") == 5


def test_a_training_that_makes_less_than_was_recorded_is_not_equal(recorded, monkeypatch, capsys):
    """What the repetition did not record, for a full disk, is named; what it did is compared."""
    again = Recording(recorded / "recording")
    half = again.rollout(1)
    del half.manifests["train"].parts["weights"]
    monkeypatch.setattr(again, "rollout", lambda number: half)
    monkeypatch.setattr(command, "replay_training", lambda *args, **options: again)
    status, text = differing(recorded, capsys, "--rollout", "1", "--stage", "train")
    assert status == 2 and "could not be replayed: the training made no weights" in text
    assert "rollout 1 train: identical" in text


@pytest.mark.parametrize("words, said", [
    (["--rtol", "nan"], "--rtol nan must be a finite number of at least 0"),
    (["--rtol", "inf"], "--rtol inf must be"),
    (["--atol", "-1"], "--atol -1.0 must be"),
    (["--timeout", "-4"], "--timeout -4.0 must be a finite number above 0"),
    (["--timeout", "nan"], "--timeout nan must be"),
])  # fmt: skip
def test_bounds_that_are_none_are_refused(words, said):
    """By `slime replay` and `slime golden check` alike."""
    with pytest.raises(ConfigError, match=said):
        command.main([str(GOLDEN), *words])
    with pytest.raises(ConfigError, match=said):
        golden.main(["check", str(GOLDEN), *words])


def test_a_rollout_that_is_named_twice_is_replayed_once(capsys):
    """The same for a stage."""
    words = ["--rollout", "1", "--stage", "schedule"] * 2
    assert command.main([str(GOLDEN), *words]) == 0
    assert capsys.readouterr().out.count("rollout 1 schedule:") == 1
    assert golden.main(["check", str(GOLDEN), *words]) == 0
    assert capsys.readouterr().out.count("rollout 1 schedule:") == 1


@pytest.mark.parametrize("record, said", [
    ({"format": "slime-recording-1", "options": 5}, "run_0000.json is damaged: its options are of the type int"),
    ({"format": "slime-recording-1"}, "run_0000.json is damaged: its options are of the type NoneType"),
    ([], "run_0000.json holds no JSON object"),
])  # fmt: skip
def test_a_run_record_without_options_is_a_sentence(record, said, tmp_path, capsys):
    """Status 2, for a golden run too: it is no difference of the code."""
    copy = recordings.copy_of(GOLDEN, tmp_path / "rec")
    (copy / "run_0000.json").write_text(json.dumps(record))
    for words in (["replay", str(copy), "--stage", "gate"], ["golden", "check", str(copy)]):
        assert cli.main(words) == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize("words, said", [
    (["--rm-type", "f2"], "'f2' is not a built-in reward type. Known: dapo, deepscaler, exact_match, f1"),
    (["--custom-rm-path", "no.such.function"], "--custom-rm-path no.such.function"),
    (["--gate-schedule", "soon"], "--gate-schedule 'soon' is not understood"),
])  # fmt: skip
def test_a_value_that_no_code_knows_is_an_error(words, said, capsys):
    """Status 2, for a golden run too: it was reported as rewards that differ."""
    for command_words in (["replay", str(GOLDEN)], ["golden", "check", str(GOLDEN)]):
        stage = ["--rollout", "0", "--stage", "rewards"]
        assert cli.main([*command_words, *stage, *words]) == 2
        assert said in capsys.readouterr().err


def test_a_rollout_in_the_place_of_its_recording_is_told_apart(capsys):
    """The error names the recording and the option to choose the rollout with."""
    assert cli.main(["replay", str(GOLDEN / "rollout_000001")]) == 2
    assert f"Name the recording, {GOLDEN}, and --rollout 1." in capsys.readouterr().err


def test_a_key_that_was_not_recorded_is_not_needed(recorded, tmp_path):
    """A --config file with *** in place of a password is refused; the options of a replay have a
    word there, since it asks nobody."""
    copy = recordings.copy_of(recorded / "recording", tmp_path / "rec")
    added = 'rm_url: "http://me:***@host/rm?api_key=***"\n'
    recordings.edit_run(
        copy, lambda record: record.update(options_yaml=record["options_yaml"] + added)
    )
    recording = Recording(copy)
    config = recorded_config(recording, recording.rollout(1))
    assert config["rm_url"] == "http://me:not-recorded@host/rm?api_key=not-recorded"
    (tmp_path / "replay.yaml").write_text(json.dumps(config))
    parse_command_line(["--config", str(tmp_path / "replay.yaml")])


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
        replayed(recorded, "--out", recorded / "recording" / "new")
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
    assert Recording(recorded / "recording").rollout(0).problems() == []


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
