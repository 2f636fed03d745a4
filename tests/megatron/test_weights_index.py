"""A foreign checkpoint: its index and its objects are read as data, and nothing that a file names
is run."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import io
import pickle
import shutil

import pytest
import torch
import torch.distributed as dist
from support.megatron_worker import built, exported
from support.tiny_models import make_tiny_checkpoint
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from slime.backends.megatron_utils import checkpoint_files as files
from slime.backends.megatron_utils.weights_index import read_index
from slime.exceptions import ConfigError

NUM_GPUS = 0

EMBEDDING = "embedding.word_embeddings.weight"
EXTRA_STATE = "decoder.layers.self_attention.linear_proj._extra_state/shard_0_2"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(Hugging Face folder, checkpoint of one rank, the model's tensors). Tests change copies."""
    from slime.backends.megatron_utils.checkpoint import save_checkpoint

    root = tmp_path_factory.mktemp("saved")
    dist.init_process_group("gloo", init_method=f"file://{root / 'store'}", rank=0, world_size=1)
    folder = make_tiny_checkpoint(root / "hf", "llama")
    with built(folder) as (args, *state):
        save_checkpoint(args, 0, *state, save_dir=str(root / "save"))
        tensors = exported(args, state[0])
    yield folder, root / "save", tensors
    dist.destroy_process_group()


@pytest.fixture
def copy(saved, tmp_path):
    """The folder iteration 0 of a checkpoint that may be changed."""
    shutil.copytree(saved[1], tmp_path / "save")
    return tmp_path / "save" / "iter_0000000"


def _load(saved, iteration_folder):
    """Loads as --load does, after the manifest was made to fit what the folder holds now: the
    sender of a checkpoint can do that.
    """
    manifest = files.hash_files(iteration_folder, files.files_below(iteration_folder))
    files.publish(iteration_folder, iteration_folder.with_name("iter_0000001"), manifest)
    iteration_folder.with_name("iter_0000001").rename(iteration_folder)
    with built(saved[0], load_dir=str(iteration_folder.parent), no_load_optim=True) as (
        args,
        model,
        *_,
    ):
        return exported(args, model)


def _edited_index(folder, edit):
    index = pickle.loads((folder / ".metadata").read_bytes())
    edit(index)
    (folder / ".metadata").write_bytes(pickle.dumps(index))


def _text(value):
    return b"\x8c" + bytes([len(value)]) + value.encode()


def _call(module, name, argument):
    """Pickle code of protocol 4 that calls module.name(argument) and drops the result; a dotted
    name goes through the module.
    """
    return _text(module) + _text(name) + b"\x93" + _text(argument) + b"\x85R0"


def test_a_checkpoint_comes_back_with_every_tensor(saved, copy):
    assert (copy / ".metadata").is_file()
    loaded = _load(saved, copy)
    assert sorted(loaded) == sorted(saved[2])
    assert all(torch.equal(loaded[name], tensor) for name, tensor in saved[2].items())


@pytest.mark.parametrize(
    "module, name",
    [
        ("torch.serialization", "os.mkdir"),  # a module that indexes name, and what it imports
        ("torch.distributed.checkpoint.filesystem", "os.mkdir"),
        ("torch.distributed.checkpoint.metadata", "torch.os.mkdir"),
        ("os", "mkdir"),
        ("torch", "Size.__init_subclass__"),
    ],
)
def test_an_index_that_calls_something_first_runs_nothing_and_is_named(saved, copy, module, name):
    """An index whose pickle begins with a call is refused and runs nothing, although everything
    else and the manifest's hashes fit."""
    path, ran = copy / ".metadata", copy.parent / "ran"
    honest = path.read_bytes()
    assert honest[:2] == b"\x80\x04"
    path.write_bytes(honest[:2] + _call(module, name, str(ran)) + honest[2:])
    with pytest.raises(ConfigError) as refused:
        _load(saved, copy)
    assert not ran.exists()
    assert str(path) in str(refused.value) and f"{module}.{name}" in str(refused.value)


class _External(pickle._Pickler):
    """Writes "elsewhere" as an object that the file does not hold: whoever reads it has to fetch
    it.
    """

    def persistent_id(self, obj):
        return "file:///etc/hostname" if obj == "elsewhere" else None


def test_an_index_that_points_outside_itself_is_refused(saved, copy):
    content = io.BytesIO()
    index = pickle.loads((copy / ".metadata").read_bytes())
    index.planner_data = "elsewhere"
    _External(content, protocol=4).dump(index)
    (copy / ".metadata").write_bytes(content.getvalue())
    with pytest.raises(ConfigError, match="the external object 'file:///etc/hostname'"):
        _load(saved, copy)


class _Harmful:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        import os

        return os.mkdir, (self.path,)


@pytest.mark.parametrize("key", [EXTRA_STATE, EMBEDDING])
def test_an_object_of_the_checkpoint_that_would_run_code_runs_nothing(saved, copy, key):
    """A pickled object of the checkpoint, such as a layer's extra state or a tensor that the index
    calls an object, is refused and runs nothing."""
    ran, content = copy.parent / "ran", io.BytesIO()
    torch.save([_Harmful(str(ran))], content)
    (copy / "__9_9.distcp").write_bytes(content.getvalue())

    def edit(index):
        for place in [place for place in index.storage_data if place.fqn == key]:
            info = index.storage_data.pop(place)
            info.relative_path, info.offset, info.length = (
                "__9_9.distcp",
                0,
                len(content.getvalue()),
            )
            index.storage_data[MetadataIndex(key)] = info
        index.state_dict_metadata[key] = BytesStorageMetadata()

    _edited_index(copy, edit)
    with pytest.raises(ConfigError) as refused:
        _load(saved, copy)
    assert not ran.exists()
    assert str(copy) in str(refused.value) and key.split("/")[0] in str(refused.value)


def _outside(index):
    next(
        iter(index.storage_data.values())
    ).relative_path = "../../latest_checkpointed_iteration.txt"


def _beyond(index):
    next(iter(index.storage_data.values())).length = 10**9


def _unplaced(index):
    index.storage_data.clear()


def _larger_chunk(index):
    index.state_dict_metadata[EMBEDDING].chunks[0].sizes = torch.Size([105, 32])


def _not_a_number(index):
    index.state_dict_metadata[EMBEDDING].size = ("104", 32)


def _no_table(index):
    index.storage_data = None


@pytest.mark.parametrize(
    "edit, said",
    [
        (_outside, "'../../latest_checkpointed_iteration.txt', expected a file of this folder"),
        (_beyond, "beyond the end of __0_0.distcp"),
        (_unplaced, "no file is named for a part of"),
        (_larger_chunk, f"a part of {EMBEDDING} lies at [0, 0] with [105, 32], outside [104, 32]"),
        (_not_a_number, "'104' in place of a number"),
        (_no_table, "a NoneType in place of a table"),
    ],
)
def test_an_index_whose_values_do_not_fit_together_is_named(copy, edit, said):
    _edited_index(copy, edit)
    with pytest.raises(ConfigError) as refused:
        read_index(copy)
    assert str(copy / ".metadata") in str(refused.value) and said in str(refused.value)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80\x04",
        b"\x80\x04.",
        b"no pickle",
        b"\x80\x04N.",
        b"\x80\x04\x8c\x01aQ.",
        b"\x80\x04K\x01K\x02a.",
    ],
)
def test_bytes_that_are_no_index_are_named(tmp_path, content):
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(ConfigError, match=r"\.metadata"):
        read_index(tmp_path)


def test_an_index_of_an_older_python_is_read(copy):
    """An index of Python 3.11.2, which writes enumeration members as getattr(class, name), is
    read."""
    old = (copy / ".metadata").read_bytes()
    member = b"\x8c\x14_MEM_FORMAT_ENCODING"
    assert old.count(member) == 1
    expected = {
        name: getattr(entry, "size", None)
        for name, entry in read_index(copy).state_dict_metadata.items()
    }
    # ... class MEMOIZE STACK_GLOBAL MEMOIZE BININT1 0 TUPLE1 MEMOIZE REDUCE -> (getattr) (class,
    # 'NAME') TUPLE2 REDUCE
    start = old.index(member) + len(member)
    assert (
        old[start : start + 3] == b"\x94\x93\x94"
        and old[start + 3 : start + 8] == b"K\x00\x85\x94R"
    )
    call = _text("_TORCH_CONTIGUOUS") + b"\x86\x94R"
    module = old.rindex(b"h", 0, old.index(member))
    changed = (
        old[:module]
        + _text("builtins")
        + _text("getattr")
        + b"\x93"
        + old[module : start + 3]
        + call
        + old[start + 8 :]
    )
    (copy / ".metadata").write_bytes(_without_frames(changed))
    read = {
        name: getattr(entry, "size", None)
        for name, entry in read_index(copy).state_dict_metadata.items()
    }
    assert read == expected


def _without_frames(content):
    """The same pickle without its length marks, which an insertion makes wrong."""
    assert content[2:3] == b"\x95"
    return content[:2] + content[11:]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q", *sys.argv[1:]]))
