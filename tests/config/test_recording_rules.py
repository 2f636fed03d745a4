"""A recording is never written into by the run that reads it, nor by another run: replay would
compare a run with itself.
"""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also as `python tests/...`

from support.options import write_run_inputs

from slime.exceptions import ConfigError
from slime.recording import manifest
from slime.utils.arguments import parse_args

NUM_GPUS = 0
READS = "which this run reads"


@pytest.fixture
def words(tmp_path):
    """A valid command line; `rec` beside it is a recording, `link` a link to it."""
    words = write_run_inputs(tmp_path)
    root = tmp_path / "rec"
    (root / "rollout_000000" / "weights").mkdir(parents=True)
    (root / "run_0000.json").write_text(f'{{"format": "{manifest.FORMAT}"}}')
    (root / "rollout_000000" / "weights" / "latest_checkpointed_iteration.txt").write_text("0")
    (tmp_path / "link").symlink_to(root)
    return words


def replay_of(words, tmp_path, source="rec"):
    return [*words, "--load-debug-rollout-data", str(tmp_path / source), "--debug-train-only"]


@pytest.mark.parametrize("name", ["rec", "rec/inside", "link", "link/inside", "new/../rec"])
@pytest.mark.parametrize(
    "flag",
    [
        "--record",
        "--run-dir",
        "--save",
        "--dump-details",
        "--save-debug-rollout-data",
        "--save-debug-train-data",
    ],
)
def test_a_replay_writes_nothing_into_its_recording(words, tmp_path, flag, name):
    """Under whatever name the folder is given, by whatever option writes."""
    (tmp_path / "new").mkdir()
    path = str(tmp_path / name) + ("/{rollout_id}.parquet" if "debug" in flag else "")
    with pytest.raises(ConfigError, match=READS):
        parse_args([*replay_of(words, tmp_path), flag, path])


@pytest.mark.parametrize("source", ["rec", "link", "rec/rollout_00000{rollout_id}/samples.parquet"])
def test_however_the_recording_is_read(words, tmp_path, source):
    """By its folder, by a link, or a part of it as a dump."""
    read = replay_of(words, tmp_path, source)
    with pytest.raises(ConfigError, match=READS):
        parse_args([*read, "--record", str(tmp_path / "rec")])
    assert parse_args([*read, "--record", str(tmp_path / "other")]).record.endswith("other")


def test_recorded_weights_are_read_only_too(words, tmp_path):
    """--load of the weights of a recorded rollout is no resumption of its run."""
    weights = str(tmp_path / "link" / "rollout_000000" / "weights")
    with pytest.raises(ConfigError, match=READS):
        parse_args([*words, "--load", weights, "--record", str(tmp_path / "rec")])


@pytest.mark.parametrize("key", ["record", "save_debug_train_data"])
def test_a_file_of_options_is_no_way_around(words, tmp_path, key):
    """--custom-config-path is merged last."""
    path = tmp_path / "custom.yaml"
    suffix = "/{rollout_id}.parquet" if "debug" in key else ""
    path.write_text(f"{key}: {tmp_path}/link{suffix}\n")
    with pytest.raises(ConfigError, match=READS):
        parse_args([*replay_of(words, tmp_path), "--custom-config-path", str(path)])


@pytest.mark.parametrize("name", ["rec", "link"])
def test_another_run_needs_another_folder(words, tmp_path, name):
    """It would replace the rollouts one by one; a run that resumes goes on in it."""
    with pytest.raises(ConfigError, match="holds the recording of another run.*Choose another"):
        parse_args([*words, "--record", str(tmp_path / name)])
    # weights to start from make no resumed run of it
    with pytest.raises(ConfigError, match="holds the recording of another run"):
        parse_args(
            [*words, "--record", str(tmp_path / name), "--ref-load", str(tmp_path / "model")]
        )


def test_a_run_that_resumes_goes_on_in_its_recording(words, tmp_path):
    """Also one that was killed before its first checkpoint and is started by the same command."""
    folder = str(tmp_path / "ckpt")
    again = [*words, "--record", str(tmp_path / "rec"), "--load", folder, "--save", folder]
    assert parse_args(again).record == str(tmp_path / "rec")


def test_checkpoints_stand_beside_the_recording(words, tmp_path):
    """A run that resumes from them could not go on recording."""
    with pytest.raises(ConfigError, match="is inside --record"):
        parse_args([*words, "--record", str(tmp_path / "new"), "--save", str(tmp_path / "new/c")])


def test_files_of_others_named_alike_are_no_recording(words, tmp_path):
    """Sweeps of other tools write run_0001.json too."""
    (tmp_path / "run_0001.json").write_text('{"lr": 1}')
    assert parse_args([*words, "--record", str(tmp_path / "new")]).record.endswith("new")


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
