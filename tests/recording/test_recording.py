"""A recording holds what the manager was given and what it made of it, and never disturbs a run."""

import logging
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import pytest
from support.full_disk import full_disk
from support.manager import dirty_rollout, manager_of

from slime.config.recording import RecordingOptions
from slime.recording import manifest
from slime.recording import writer as writer_module
from slime.recording.reader import Recording, recorded_samples
from slime.recording.run_record import begin_recording
from slime.recording.writer import PartWriter

NUM_GPUS = 0


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    """(manager that has recorded rollout 3 of sixteen samples, the recording)."""
    manager = manager_of(dirty_rollout(), tmp_path, monkeypatch, record=str(tmp_path / "rec"))
    begin_recording(manager.args)
    manager.recorder.writer.run = 0
    manager.generate(3)
    manager.recorder.close()
    return manager, Recording(tmp_path / "rec")


def test_a_rollout_reads_back_as_the_manager_had_it(recorded):
    """Samples with their verdicts, the whole batch and who trains which row, all of one rollout."""
    _, recording = recorded
    rollout = recording.rollout(3)
    assert recording.rollouts == [3] and rollout.problems() == []
    samples = rollout.judged_samples()
    assert [one.to_dict() for one in samples.batch if one.index not in (1,)] == [
        one.to_dict() for one in dirty_rollout() if one.index != 1
    ]
    assert np.isnan(samples.batch[1].rollout_log_probs[2])
    assert samples.reasons[4] == "bad_token" and not samples.valid[4]
    assert samples.judged(4).invalid_reason == "bad_token" and samples.judged(0).valid
    batch, raw_rows = rollout.columns()
    assert [len(entry) for entry in batch["tokens"]] == [
        len(samples.batch[row].tokens) for row in raw_rows
    ]
    schedule = rollout.schedule()
    trained = schedule["dp_rank"] >= 0
    assert trained.sum() == sum(rollout.json("rollout")["split"]["num_trained_by_rank"])
    assert not trained[list(raw_rows).index(4)]
    assert rollout.json("rollout")["parallel"]["dp_size"] == 2
    assert rollout.options().global_batch_size == 16


def test_a_later_run_gets_the_samples_that_the_gate_was_given(recorded):
    """--load-debug-rollout-data takes the folder of a recording."""
    manager, recording = recorded
    samples = recorded_samples(recording.root, 3)
    assert [one.index for one in samples] == list(range(16)) and samples[4].valid
    manager.args.load_debug_rollout_data = str(recording.root)
    assert [one.index for one in manager._replayed_samples(3)] == list(range(16))


def test_a_full_disk_ends_the_recording_and_not_the_run(tmp_path, monkeypatch, caplog):
    """One warning; what the manifests list by then stays whole."""
    manager = manager_of(dirty_rollout(), tmp_path, monkeypatch, record=str(tmp_path / "rec"))
    begin_recording(manager.args)
    manager.generate(0)
    manager.recorder.close()
    with full_disk(after=2000), caplog.at_level(logging.WARNING):
        boxes = manager.generate(1)
        manager.recorder.close()
    assert len(boxes) == 2 and manager.recorder.writer.failed
    assert [r.message for r in caplog.records if "has stopped" in r.message].__len__() == 1
    for rollout_id in Recording(tmp_path / "rec").rollouts:
        assert Recording(tmp_path / "rec").rollout(rollout_id).problems() == []


def test_a_disk_that_hangs_does_not_keep_the_run_from_ending(tmp_path, monkeypatch, caplog):
    """The writer is left behind after its time-out, with a warning that names the folder."""
    monkeypatch.setattr(writer_module, "CLOSE_TIMEOUT_S", 0.2)
    writer = PartWriter(tmp_path, manifest.ROLLOUT, run=0)
    writer.begin(0)
    writer.add("gate", lambda path: time.sleep(1.0))
    started = time.monotonic()
    with caplog.at_level(logging.WARNING):
        writer.close()
    assert time.monotonic() - started < 0.9 and str(tmp_path) in caplog.text


def test_only_the_newest_rollouts_are_kept(tmp_path):
    """--record-keep counts rollouts, whatever their numbers."""
    writer = PartWriter(tmp_path, manifest.ROLLOUT, run=0, keep=2)
    for rollout_id in range(5):
        writer.begin(rollout_id)
        writer.add("gate", lambda path: path.write_bytes(b"{}") and None)
        writer.finish()
    writer.close()
    assert manifest.recorded_rollouts(tmp_path) == [3, 4]


def test_the_options_have_defaults_that_record_nothing():
    """Nobody records who did not ask for it."""
    assert RecordingOptions().record is None and RecordingOptions().record_every == 1


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
