"""The index of a distributed checkpoint, read as data.

torch writes the index (`.metadata`) as a pickle and reads it by running what it names. A checkpoint
may come from anywhere, so torch never reads that file here: `read_index` takes it apart into inert
records, imports nothing, checks every value, and builds the index that torch's loader gets. A name
that no index needs is refused, whatever it would resolve to.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from slime.exceptions import ConfigError

INDEX = ".metadata"

_METADATA = "torch.distributed.checkpoint.metadata"
_STRATEGY = "megatron.core.dist_checkpointing.strategies.torch"
# Every name that torch and Megatron put into an index: (module, name), exactly. Each becomes a
# record of its own name, also getattr, which Python 3.11.0 to 3.11.3 write for the members of an
# enumeration.
_RECORDS = frozenset(
    {(_METADATA, name) for name in (
        "Metadata", "TensorStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING", "ChunkStorageMetadata",
        "BytesStorageMetadata", "MetadataIndex", "StorageMeta")}
    | {(_STRATEGY, "MCoreMetadata"), (_STRATEGY, "MCoreSavePlan")}
    | {("torch.distributed.checkpoint.filesystem", "_StorageInfo"), ("torch.serialization", "_get_layout")}
    | {("torch", "Size"), ("torch", "strided"), ("builtins", "getattr"), ("pathlib", "PosixPath"), ("pathlib._local", "PosixPath")}
)  # fmt: skip
_DTYPES = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}


def read_index(folder: str | Path) -> Metadata:
    """The index of the distributed checkpoint in `folder`, for torch's loader.

    Raises `ConfigError`, which names the file, for an index that names anything but index entries,
    and for a damaged one: an entry without its place in a file, a place outside the folder or
    beyond a file's end, a chunk outside its tensor.
    """
    path = Path(folder) / INDEX
    try:
        with open(path, "rb") as file:
            root = _IndexReader(file).load()
        return _built(root, path.parent)
    except _Forbidden as error:
        raise ConfigError(
            f"{path} names {error}, which no index of a checkpoint needs: reading it with torch "
            "would run it. Do not load this checkpoint."
        ) from None
    # a damaged pickle raises whatever its bytes happen to ask for
    except Exception as error:
        raise ConfigError(
            f"{path} is damaged ({error or type(error).__name__}). Resume from an earlier "
            "checkpoint with --ckpt-step."
        ) from error


class _Forbidden(Exception):
    """A name outside `_RECORDS`."""


class _Record:
    """Stands for one object of the index: what it was made of and filled with. Making and filling
    one runs nothing else.
    """

    kind = ""

    def __new__(cls, *values: object) -> _Record:
        record = super().__new__(cls)
        record.values, record.state = values, {}
        return record

    def __init__(self, *values: object) -> None:
        """`__new__` keeps the values: a pickle may skip this call."""

    def __setstate__(self, state: Any) -> None:
        self.state = state

    values: tuple[Any, ...]
    state: Any


class _IndexReader(pickle.Unpickler):
    """Makes records of the names in `_RECORDS`, dtypes, and plain values; imports nothing."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)
        # classes of this reader alone, so that what a file does to one ends with the reader
        self._classes = {pair: type(pair[1], (_Record,), {"kind": pair[1]}) for pair in _RECORDS}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._classes:
            return self._classes[module, name]
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        raise _Forbidden(f"{module}.{name}")

    def persistent_load(self, pid: object) -> Any:
        raise _Forbidden(f"the external object {str(pid)[:80]!r}")


def _built(root: object, folder: Path) -> Metadata:
    state = _fields(root, "Metadata")
    entries: dict[str, Any] = {}
    wanted: list[MetadataIndex] = []
    for name, record in _mapping(state["state_dict_metadata"]).items():
        if not isinstance(name, str):
            raise ValueError(f"the name of an entry is {name!r}")
        entries[name] = _entry(name, record)
        chunks = getattr(entries[name], "chunks", None)
        wanted += (
            [MetadataIndex(name)]
            if chunks is None
            else [MetadataIndex(name, chunk.offsets) for chunk in chunks]
        )
    places = dict(
        _place(key, value, folder) for key, value in _mapping(state["storage_data"]).items()
    )
    missing = [index.fqn for index in wanted if index not in places]
    if missing:
        raise ValueError(f"no file is named for a part of {missing[0]}")
    return Metadata(state_dict_metadata=entries, storage_data=places)


def _entry(name: str, record: object) -> TensorStorageMetadata | BytesStorageMetadata:
    if _kind(record) == "BytesStorageMetadata":
        return BytesStorageMetadata()
    state = _fields(record, "TensorStorageMetadata")
    properties = _state(state["properties"], "TensorProperties")
    dtype = properties["dtype"] if isinstance(properties, Mapping) else properties[0]
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"the dtype of {name} is {dtype!r}")
    size = _size(state["size"])
    chunks = []
    for part in state["chunks"]:
        chunk = _fields(part, "ChunkStorageMetadata")
        offsets, sizes = _size(chunk["offsets"]), _size(chunk["sizes"])
        inside = all(
            low + length <= total for low, length, total in zip(offsets, sizes, size, strict=True)
        )
        if not inside:
            raise ValueError(
                f"a part of {name} lies at {list(offsets)} with {list(sizes)}, outside {list(size)}"
            )
        chunks.append(ChunkStorageMetadata(offsets=offsets, sizes=sizes))
    return TensorStorageMetadata(properties=TensorProperties(dtype=dtype), size=size, chunks=chunks)


def _place(key: object, value: object, folder: Path) -> tuple[MetadataIndex, _StorageInfo]:
    index, place = _fields(key, "MetadataIndex"), _fields(value, "_StorageInfo")
    name, file, offset = index["fqn"], place["relative_path"], index.get("offset")
    start, length = _count(place["offset"]), _count(place["length"])
    if (
        not isinstance(name, str)
        or not isinstance(file, str)
        or not file
        or file != Path(file).name
    ):
        raise ValueError(f"{name!r} lies in {file!r}, expected a file of this folder")
    if place.get("transform_descriptors"):
        raise ValueError(f"{name} is compressed, which slime does not read")
    if start + length > (folder / file).stat().st_size:
        raise ValueError(f"{name} ends at byte {start + length}, beyond the end of {file}")
    return MetadataIndex(
        name, None if offset is None else _size(offset), index.get("index")
    ), _StorageInfo(file, start, length)


def _kind(record: object) -> str:
    return record.kind if isinstance(record, _Record) else type(record).__name__


def _state(record: Any, kind: str) -> Any:
    if _kind(record) != kind:
        raise ValueError(f"it holds a {_kind(record)} in place of a {kind}")
    return record.state


def _fields(record: object, kind: str) -> Mapping[str, Any]:
    return _mapping(_state(record, kind))


def _mapping(value: object) -> Mapping[Any, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"it holds a {_kind(value)} in place of a table")
    return value


def _size(value: Any) -> torch.Size:
    # torch.Size is made from one tuple; older versions of torch stored plain sequences
    values: Any = value.values[0] if _kind(value) == "Size" else value
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise ValueError(f"a size is {_kind(values)}")
    return torch.Size([_count(number) for number in values])


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"it holds {str(value)[:40]!r} in place of a number of bytes or elements")
    return value
