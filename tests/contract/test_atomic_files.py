"""A file is the earlier one or the new one, whole, whatever goes wrong while it is written."""

import errno
import os
import re
import stat
from pathlib import Path

import orjson
import pytest
from support.full_disk import full_disk
from support.options import write_run_inputs

import slime
from slime.config.yaml_file import write_resolved_config
from slime.exceptions import RolloutDataError
from slime.files import atomic
from slime.files.rollout_dump import save_debug_rollout_data
from slime.gate.history import GateHistory
from slime.prompts.data_source import read_state, write_json
from slime.utils.arguments import parse_args
from slime.utils.types import Sample

NUM_GPUS = 0

SLIME = Path(slime.__file__).parent


def by_path(path, content):
    with atomic.replacing(path) as temporary:
        temporary.write_bytes(content)


WRITERS = {
    "text": lambda path, content: atomic.write_text(path, content.decode()),
    "bytes": atomic.write_bytes,
    "pieces": lambda path, content: atomic.write_bytes(path, (content[:2], content[2:])),
    "a library's file": by_path,
}


@pytest.fixture(params=WRITERS)
def write(request):
    return WRITERS[request.param]


def names_below(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_file_holds_what_was_written_and_nothing_lies_beside_it(tmp_path, write):
    """The folder is made, the earlier content is replaced, and no temporary file stays."""
    path = tmp_path / "new" / "folder" / "file"
    write(path, b"first, and longer")
    write(path, b"zweite Zeile\n")
    assert path.read_bytes() == b"zweite Zeile\n"
    assert names_below(path.parent) == ["file"]


def test_a_disk_that_fills_in_the_middle_leaves_the_earlier_file(tmp_path, write):
    """After 3 of 100 bytes the disk is full: the earlier file stays whole and no temporary one."""
    path = tmp_path / "file"
    write(path, b"earlier")
    with full_disk(after=3), pytest.raises(OSError) as error:
        write(path, b"x" * 100)
    assert error.value.errno == errno.EFBIG
    assert path.read_bytes() == b"earlier" and names_below(tmp_path) == ["file"]


def test_a_failed_flush_to_the_disk_leaves_the_earlier_file(tmp_path, write, monkeypatch):
    """Some file systems report a full disk only when the file is flushed; it must not have its
    name by then."""
    path = tmp_path / "file"
    write(path, b"earlier")

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device"):
        write(path, b"new")
    assert path.read_bytes() == b"earlier" and names_below(tmp_path) == ["file"]


def test_an_error_of_the_one_who_writes_leaves_the_earlier_file(tmp_path):
    """A piece that cannot be made, after others were written, costs the new file only."""
    path = tmp_path / "file"
    atomic.write_bytes(path, b"earlier")

    def pieces():
        yield b"x" * 100_000
        raise KeyError("a sample that cannot be encoded")

    with pytest.raises(KeyError):
        atomic.write_bytes(path, pieces())
    assert path.read_bytes() == b"earlier" and names_below(tmp_path) == ["file"]


def test_content_reaches_the_disk_before_the_name_and_the_folder_after(
    tmp_path, write, monkeypatch
):
    """A rename that outlives a power failure while the content does not leaves an empty file under
    the final name."""
    path, steps = tmp_path / "file", []
    fsync, replace = os.fsync, os.replace

    def recorded_fsync(descriptor):
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        steps.append("sync folder" if is_folder else f"sync {os.fstat(descriptor).st_size} bytes")
        fsync(descriptor)

    def recorded_replace(source, target):
        steps.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "replace", recorded_replace)
    write(path, b"12345")
    assert steps == ["sync 5 bytes", "rename", "sync folder"]


def test_a_file_system_without_folder_syncs_takes_files_all_the_same(tmp_path, monkeypatch):
    """EINVAL for a folder is not an error, because the file has its name by then; EIO is one."""
    fsync, answer = os.fsync, errno.EINVAL

    def refused_for_folders(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(answer, os.strerror(answer))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refused_for_folders)
    atomic.write_bytes(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"new"
    answer = errno.EIO
    with pytest.raises(OSError, match="Input/output error"):
        atomic.write_bytes(tmp_path / "file", b"newer")


def test_permissions_are_those_of_open_and_the_recorded_options_are_private(tmp_path):
    """Others of the group read dumps as the umask allows; config.yaml is read by its owner alone."""
    before = os.umask(0o027)
    try:
        for name, writer in WRITERS.items():
            writer(tmp_path / name, b"content")
            assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o640, name
        write_options(tmp_path)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "config.yaml").stat().st_mode) == 0o600


def test_a_link_is_replaced_and_its_target_stays(tmp_path, write):
    """A link at the path is replaced, so that a file elsewhere is never overwritten through it."""
    target, path = tmp_path / "target", tmp_path / "link"
    target.write_bytes(b"another's")
    path.symlink_to(target)
    write(path, b"new")
    assert not path.is_symlink() and path.read_bytes() == b"new"
    assert target.read_bytes() == b"another's"


def test_a_pending_file_appears_when_it_is_committed(tmp_path):
    """A writer with a life of its own: abandoned nothing appears, committed the whole file."""
    for decide, names in (("abandon", []), ("commit", ["file"])):
        pending = atomic.PendingFile(tmp_path / "file")
        pending.temporary.write_bytes(b"whole")
        assert not (tmp_path / "file").exists()
        getattr(pending, decide)()
        pending.abandon()
        assert names_below(tmp_path) == names


def test_a_new_folder_appears_when_it_is_whole_and_a_killed_one_is_removed(tmp_path):
    """An error leaves none; what a killed process left goes with the next of that name, what a
    living one writes, and a folder of another name, stay; nothing is replaced."""
    living, other = f".out.{os.getppid()}", ".outer.999999999"
    for name in (".out.999999999", living, other):
        (tmp_path / name / "part").mkdir(parents=True)
    with pytest.raises(KeyError), atomic.new_folder(tmp_path / "out") as folder:
        (folder / "file").write_bytes(b"half")
        raise KeyError("x")
    assert names_below(tmp_path) == sorted([living, other])
    with atomic.new_folder(tmp_path / "out") as folder:
        (folder / "file").write_bytes(b"whole")
        assert not (tmp_path / "out").exists()
    assert names_below(tmp_path) == sorted([living, other, "out"])
    assert (tmp_path / "out" / "file").read_bytes() == b"whole"
    with pytest.raises(FileExistsError), atomic.new_folder(tmp_path / "out"):
        pass


def write_rollout_dump(folder):
    samples = [Sample(index=i, response="x" * 500) for i in range(10)]
    return save_debug_rollout_data(
        f"{folder}/{{rollout_id}}.jsonl", samples, rollout_id=7, evaluation=False
    )


def write_data_position(folder):
    write_json(folder / "state.json", {"position": list(range(1000))})
    return folder / "state.json"


def write_gate_history(folder):
    GateHistory(3).write(folder / "gate_history_7.jsonl", 7)
    return folder / "gate_history_7.jsonl"


def write_options(folder):
    inputs = folder.with_name(f"{folder.name}_inputs")
    inputs.mkdir(exist_ok=True)
    write_resolved_config(parse_args(write_run_inputs(inputs)), folder / "config.yaml")
    return folder / "config.yaml"


@pytest.mark.parametrize(
    "write_file", [write_rollout_dump, write_data_position, write_gate_history, write_options]
)
def test_each_of_our_files_survives_a_full_disk(tmp_path, write_file):
    """Rollout dumps, data positions, gate histories and recorded options: the earlier file stays
    readable, and no temporary file is left."""
    path = write_file(tmp_path)
    before = path.read_bytes()
    with full_disk(after=20), pytest.raises(OSError):
        write_file(tmp_path)
    assert path.read_bytes() == before and names_below(tmp_path) == [path.name]


def test_a_sample_that_cannot_be_dumped_leaves_no_half_dump(tmp_path):
    """The samples before it were written by then; the dump's name must not appear."""
    samples = [Sample(index=0), Sample(index=1, metadata={"f": object()})]
    with pytest.raises(RolloutDataError, match="Sample 1 cannot be dumped"):
        save_debug_rollout_data(
            f"{tmp_path}/{{rollout_id}}.jsonl", samples, rollout_id=7, evaluation=False
        )
    assert names_below(tmp_path) == []


def test_a_dump_of_the_rollout_is_its_head_a_line_per_sample_and_a_hash(tmp_path):
    """The head says how many samples follow."""
    lines = write_rollout_dump(tmp_path).read_bytes().splitlines()
    assert orjson.loads(lines[0])["num_samples"] == len(lines) - 2 == 10
    assert orjson.loads(lines[-1]).keys() == {"blake2b"}
    write_data_position(tmp_path)
    assert read_state(tmp_path / "state.json") == {"position": list(range(1000))}


RENAMES = re.compile(
    r"\bos\.(replace|rename|fsync)\(|\bmkstemp\(|\bNamedTemporaryFile\(|\.rename\(|\.replace\((path|final)\)"
)
# what renames something other than one file
FOLDERS_AND_LINKS = {
    "backends/megatron_utils/checkpoint_files.py": "checkpoint folders",
    "backends/megatron_utils/hf_checkpoint_saver.py": "model folders and their shards",
    "tracking/tracking.py": "the link runs/latest, and records of an earlier run",
    "recording/writer.py": "folders of rollouts that are removed",
    "harness/golden_cut.py": "the folder of a golden run, made beside its place",
}


def test_one_module_replaces_files():
    """A second writer would have guarantees of its own."""
    found = {
        path.relative_to(SLIME).as_posix()
        for path in SLIME.rglob("*.py")
        if RENAMES.search(path.read_text(encoding="utf-8"))
    }
    assert found == {"files/atomic.py", *FOLDERS_AND_LINKS}


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
