"""Whatever happens to a recording, the run goes on with the same numbers and one warning, and what
the manifests list is whole.
"""

import logging
import shutil
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also as `python tests/...`

from support.full_disk import full_disk
from support.manager import dirty_rollout, manager_of

from slime.files import atomic, tables
from slime.recording import manifest, rollout_side
from slime.recording import writer as writer_module
from slime.recording.manifest import ROLLOUT, TRAIN
from slime.recording.reader import Recording
from slime.recording.run_record import begin_recording
from slime.recording.writer import PartWriter, prune

NUM_GPUS = 0
TIMES = ("time", "seconds", "perf/")


def start(folder, monkeypatch, samples=dirty_rollout, **options):
    """A manager that records into `folder`/rec."""
    manager = manager_of(samples(), folder, monkeypatch, record=str(folder / "rec"), **options)
    begin_recording(manager.args)
    return manager


def numbers_of(manager, rollout_id):
    """What a rollout gave to training and logged, without what clocks say."""
    boxes = manager.generate(rollout_id)
    shards = [
        {
            name: np.asarray(box.inner[name], dtype=object).tolist()
            for name in ("partition", "rewards")
        }
        for box in boxes
    ]
    logged = {
        name: repr(value)
        for name, value in manager.logged.items()
        if not any(word in name for word in TIMES)
    }
    return repr(shards), logged


@pytest.fixture
def expected(tmp_path_factory, monkeypatch):
    """The numbers of three rollouts that are not recorded."""
    manager = manager_of(dirty_rollout(), tmp_path_factory.mktemp("plain"), monkeypatch)
    return [numbers_of(manager, rollout_id) for rollout_id in range(3)]


def vanish(manager, monkeypatch):
    shutil.rmtree(manager.args.record)


def file_in_its_place(manager, monkeypatch):
    shutil.rmtree(manager.args.record)
    Path(manager.args.record).write_text("no folder")


def read_only(manager, monkeypatch):
    def refuse(self, *args, **kw):
        raise OSError(30, "Read-only file system", str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)


def table_fails(manager, monkeypatch):
    def fail(*args):
        raise AssertionError("no table of this")

    monkeypatch.setattr(rollout_side, "columns_table", fail)


def disk_fails_in_the_thread(manager, monkeypatch):
    def fail(path, table, metadata=None):
        path.write_bytes(b"half")
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(tables, "write_table_to", fail)


def source_fails(manager, monkeypatch):
    class Source:
        def state_dict(self):
            return {}

    manager.data_source = Source()


@pytest.mark.parametrize(
    "break_it",
    [vanish, file_in_its_place, read_only, table_fails, disk_fails_in_the_thread, source_fails],
)
def test_what_breaks_costs_the_recording_and_not_the_run(
    break_it, expected, tmp_path, monkeypatch, caplog
):
    """One warning from this process, the numbers of a run without --record, and parts that
    verify."""
    manager = start(tmp_path, monkeypatch)
    with caplog.at_level(logging.WARNING):
        found = [numbers_of(manager, 0)]
        manager.recorder.close()
        with monkeypatch.context() as during:
            break_it(manager, during)
            found += [numbers_of(manager, rollout_id) for rollout_id in (1, 2)]
            manager.recorder.close()
    assert found == expected
    assert (
        len(
            [r for r in caplog.records if "has stopped" in r.message and str(tmp_path) in r.message]
        )
        == 1
    )
    assert manager.recorder.writer.failed
    root = tmp_path / "rec"
    for rollout_id in manifest.recorded_rollouts(root):
        assert Recording(root).rollout(rollout_id).problems() == []
    assert not list(tmp_path.glob("rec/rollout_*/.*"))


def test_a_recording_that_cannot_be_begun_is_one_warning(tmp_path, monkeypatch, caplog):
    """The run goes on with options that record nothing, so no other process warns of it again."""
    (tmp_path / "file").write_text("no folder")
    record = str(tmp_path / "file" / "rec")
    manager = manager_of(dirty_rollout(), tmp_path, monkeypatch, record=record)
    args = begin_recording(manager.args)
    manager.recorder = rollout_side.RolloutRecorder.from_args(args)
    manager.generate(0)
    assert args.record is None and manager.args.record == record
    assert len([one for one in caplog.records if "recording" in one.message]) == 1


def test_a_full_disk_keeps_the_numbers_too(expected, tmp_path, monkeypatch, caplog):
    """The limit strikes in the middle of a part."""
    manager = start(tmp_path, monkeypatch)
    found = [numbers_of(manager, 0)]
    manager.recorder.close()
    with full_disk(after=3000), caplog.at_level(logging.WARNING):
        found += [numbers_of(manager, rollout_id) for rollout_id in (1, 2)]
        manager.recorder.close()
    assert found == expected and manager.recorder.writer.failed
    assert [Recording(tmp_path / "rec").rollout(i).problems() for i in (0, 1)] == [[], []]


def test_a_slow_disk_costs_parts_and_no_time(expected, tmp_path, monkeypatch, caplog):
    """The queue is full: the rest of the rollout is left out, one warning says so, and its manifest
    is not complete."""
    # a rollout is seven entries; two of the next fit too, whether or not the thread has taken one
    monkeypatch.setattr(writer_module, "QUEUE_SIZE", 9)
    manager = start(tmp_path, monkeypatch)
    gate, real = threading.Event(), atomic.PendingFile.commit

    def commit(self):
        if threading.current_thread().name == "recording":
            assert gate.wait(30)
        real(self)

    monkeypatch.setattr(atomic.PendingFile, "commit", commit)
    with caplog.at_level(logging.WARNING):
        found = [numbers_of(manager, rollout_id) for rollout_id in range(3)]
    gate.set()
    manager.recorder.close()
    assert found == expected and not manager.recorder.writer.failed
    assert manager.recorder.writer.num_skipped == 2
    assert len([r for r in caplog.records if "recorded in part" in r.message]) == 1
    recording = Recording(tmp_path / "rec")
    assert recording.rollout(0).manifests[ROLLOUT].facts["complete"]
    assert "complete" not in recording.rollout(1).manifests[ROLLOUT].facts
    assert recording.rollout(1).problems() == [] and "samples" in recording.rollout(1)
    manager.generate(3)
    manager.recorder.close()
    assert recording.rollout(3).manifests[ROLLOUT].facts["complete"]


def test_what_no_file_holds_is_described(tmp_path, monkeypatch):
    """A plug-in may keep a socket in a sample; the recording has its description and the rest."""
    odd = threading.Lock()

    def with_object():
        samples = dirty_rollout()
        samples[0].metadata = {"lock": odd, "kept": 1}
        samples[2].label = "\ud83d half"
        samples[3].train_metadata = {"lock": odd}
        return samples

    manager = start(tmp_path, monkeypatch, with_object)
    manager.generate(0)
    manager.recorder.close()
    rollout = Recording(tmp_path / "rec").rollout(0)
    samples = rollout.judged_samples().samples
    assert samples[0].metadata["kept"] == 1 and "lock object" in str(samples[0].metadata["lock"])
    assert samples[2].label == "\ud83d half" and "columns" in rollout


def test_replies_do_not_pile_up_when_nothing_is_recorded(tmp_path, monkeypatch):
    """A recording that has ended, and rollouts that --record-every leaves out, keep no reply in
    memory; a rollout holds the replies since the gate before."""
    manager = start(tmp_path, monkeypatch, record_every=2)
    recorder = manager.recorder
    for rollout_id in range(4):
        recorder.add_reply(f"http://user:pw@host/{rollout_id}?api_key=abc&x=1", b"{}", b"{}", 200)
        manager.generate(rollout_id)
    recorder.close()
    recording = Recording(tmp_path / "rec")
    assert recording.rollouts == [0, 2]
    texts = [recording.rollout(i).path("replies").read_text() for i in (0, 2)]
    assert [text.count("\n") for text in texts] == [1, 1]
    assert "/0?" in texts[0] and "/2?" in texts[1]
    assert "pw" not in str(texts) and "abc" not in str(texts)
    recorder.writer.stop(OSError("full"))
    recorder.add_reply("http://host/", None, b"{}", 200)
    assert not recorder._replies


# --- retention ------------------------------------------------------------------------------------


def write_rollout(writer, rollout_id, size=10, **kw):
    writer.begin(rollout_id, **kw)
    name = {ROLLOUT: "gate", TRAIN: "steps"}[writer.writer]
    writer.add(name, lambda path: path.write_bytes(b"x" * size) and None)
    writer.finish()
    writer.close()


@pytest.mark.parametrize(
    "keep,left", [(1, [5]), (2, [4, 5]), (4, [2, 3, 4, 5]), (9, list(range(6)))]
)
def test_the_newest_rollouts_are_kept_when_the_trainers_are_one_behind(tmp_path, keep, left):
    """train-async generates the next rollout while one trains: the one that trains stays, however
    few are kept; at the end as many are left as were asked for."""
    rollouts = PartWriter(tmp_path, ROLLOUT, run=0, keep=keep)
    trained = PartWriter(tmp_path, TRAIN, run=0)
    write_rollout(rollouts, 0)
    for rollout_id in range(6):
        trained.begin(rollout_id)
        if rollout_id < 5:
            write_rollout(rollouts, rollout_id + 1)
        trained.add("steps", lambda path: path.write_bytes(b"x") and None)
        trained.finish()
        trained.close()
        assert "steps" in Recording_at(tmp_path, rollout_id).parts
    prune(tmp_path, keep=keep, max_bytes=None)
    assert manifest.recorded_rollouts(tmp_path) == left


def Recording_at(root, rollout_id):
    return manifest.read_manifest(manifest.rollout_folder(root, rollout_id), TRAIN)


def test_a_limit_of_bytes_removes_the_oldest_and_their_evaluations(tmp_path):
    """The newest rollout stays even where it alone is too large."""
    rollouts = PartWriter(tmp_path, ROLLOUT, run=0, max_bytes=9000)
    trained = PartWriter(tmp_path, TRAIN, run=0)
    for rollout_id in range(6):
        write_rollout(rollouts, rollout_id, evaluation=True, size=100)
        write_rollout(rollouts, rollout_id, size=2000)
        write_rollout(trained, rollout_id)
    kept = manifest.recorded_rollouts(tmp_path)
    assert kept[-1] == 5 and 2 <= len(kept) <= 4
    assert min(manifest.recorded_rollouts(tmp_path, evaluation=True)) >= kept[0]
    assert sum(writer_module.folder_bytes(folder) for folder in tmp_path.iterdir()) < 13000
    write_rollout(rollouts, 6, size=20000)
    write_rollout(trained, 6)
    prune(tmp_path, keep=None, max_bytes=9000)
    assert manifest.recorded_rollouts(tmp_path) == [6]


def test_a_resumed_run_replaces_what_it_does_again(tmp_path):
    """Rollouts of an earlier attempt are those of other weights; their parts must not stand beside
    new ones."""
    for run, rollouts_of in ((0, range(5)), (1, range(3, 5))):
        rollouts = PartWriter(tmp_path, ROLLOUT, run=run, keep=4)
        trained = PartWriter(tmp_path, TRAIN, run=run)
        for rollout_id in rollouts_of:
            write_rollout(rollouts, rollout_id)
            folder = manifest.rollout_folder(tmp_path, rollout_id)
            assert not manifest.manifest_path(folder, TRAIN).exists()
            write_rollout(trained, rollout_id)
    runs = {
        rollout_id: manifest.read_manifest(
            manifest.rollout_folder(tmp_path, rollout_id), ROLLOUT
        ).run
        for rollout_id in manifest.recorded_rollouts(tmp_path)
    }
    assert runs == {1: 0, 2: 0, 3: 1, 4: 1}


def test_a_rollout_that_is_removed_while_it_is_written_ends_nothing(tmp_path, caplog):
    """--record-keep, or a user who frees the disk, removes folders that a slow rank still writes
    to."""
    writer = PartWriter(tmp_path, TRAIN, run=0)
    with caplog.at_level(logging.WARNING):
        writer.begin(0)
        writer.add("steps", lambda path: shutil.rmtree(path.parent) or None)
        writer.add("weights", lambda path: path.write_bytes(b"x") and None)
        writer.finish()
        write_rollout(writer, 1)
    assert not writer.failed and not caplog.records
    assert [path.name for path in tmp_path.iterdir()] == ["rollout_000001"]


@pytest.mark.parametrize("fails", [False, True])
def test_parts_that_wait_together_are_listed_together(tmp_path, monkeypatch, fails):
    """Each manifest is a write that the disk must confirm. A part that cannot be written costs
    itself and what follows; what was whole before is listed."""
    written = []
    write = writer_module.write_manifest
    monkeypatch.setattr(
        writer_module, "write_manifest", lambda *a: (written.append(list(a[1].parts)), write(*a))
    )
    may_go_on = threading.Event()

    def second(path):
        path.write_bytes(b"y")
        if fails:
            raise OSError("the disk is full")

    writer = PartWriter(tmp_path, TRAIN, run=0)
    writer.begin(0)
    writer.add("train", lambda path: may_go_on.wait(30) and path.write_bytes(b"x") and None)
    writer.add("steps", second)
    writer.add("weights", lambda path: path.write_bytes(b"z") and None)
    writer.finish()
    may_go_on.set()
    writer.close()
    listed = ["train"] if fails else ["train", "steps", "weights"]
    found = manifest.read_manifest(manifest.rollout_folder(tmp_path, 0), TRAIN)
    assert written == [listed] and list(found.parts) == listed
    assert bool(found.facts.get("complete")) is not fails and writer.failed is fails


def test_a_link_in_the_place_of_a_rollout_is_not_followed(tmp_path):
    """Removing it would empty a folder that is not the recording's."""
    other = tmp_path / "other"
    other.mkdir()
    (other / "manifest.rollout.json").write_text("{}")
    root = tmp_path / "rec"
    root.mkdir()
    (root / "rollout_000000").symlink_to(other)
    writer = PartWriter(root, ROLLOUT, run=0)
    writer.begin(0)
    assert writer.failed and [path.name for path in other.iterdir()] == ["manifest.rollout.json"]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
