"""Reads a file of torch.save as data: `torch.load(weights_only=True)`, with a few stand-ins for
numpy's pickled arrays. No function that a file names is called but torch's own and those here.

torch's reader of plain data handles one number at a time, in Python. Long lists of numbers, which
is what dumps of samples are made of, are therefore cut out of the stream before it is read, and
decoded as arrays.
"""

from __future__ import annotations

import io
import re
import secrets
import zipfile
from collections.abc import Callable
from typing import IO, Any, BinaryIO

import numpy as np

from slime.data.ragged import is_tensor
from slime.exceptions import RolloutDataError

# Of numpy's dtypes, those of numbers: as they are named in a pickle.
_NUMPY_CODES = frozenset({"b1", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8"})
_INTEGER, _FLOAT = rb"K[\s\S]|M[\s\S]{2}|J[\s\S]{4}", rb"G[\s\S]{8}"
# pickle's opcodes of a list's batch: ( numbers e
_NUMBERS = re.compile(rb"\(((?:%b){48,}|(?:%b){48,})e" % (_INTEGER, _FLOAT))
_ONE_INTEGER = re.compile(_INTEGER)
_PADDING = b"\x00\x00\x00\x00"


class _Dtype:
    """Stands for numpy.dtype: keeps the code, if it is a number's; what a file says of it beyond
    that is not applied.
    """

    def __init__(self, code: str, align: object = False, copy: object = True) -> None:
        if code not in _NUMPY_CODES:
            raise RolloutDataError(f"holds a numpy array of type {str(code)[:40]!r}, not numbers")
        self.code = code

    def __setstate__(self, state: tuple) -> None:
        if isinstance(state, tuple) and len(state) > 1 and state[1] == ">":
            self.code = ">" + self.code


class _NumpyArray:
    """Stands for numpy.ndarray and what rebuilds one."""

    def __init__(self, *ignored: object) -> None:
        self.array = np.zeros(0)

    def __setstate__(self, state: tuple) -> None:
        _, shape, dtype, _, data = state
        if not isinstance(dtype, _Dtype) or not isinstance(data, bytes):
            raise RolloutDataError("holds a numpy array that is not plain numbers")
        self.array = np.frombuffer(data, dtype=dtype.code).reshape(shape)


def _numpy_scalar(dtype: _Dtype, data: bytes) -> Any:
    return np.frombuffer(data, dtype=dtype.code)[0].item()


# All that a file may name beside torch's tensors and containers.
ALLOWED: list[Callable | tuple[Callable, str]] = [
    _Dtype,
    _NumpyArray,
    (_Dtype, "numpy.dtype"),
    (_NumpyArray, "numpy.ndarray"),
    *(
        (stand_in, f"numpy.{core}.multiarray.{name}")
        for core in ("core", "_core")
        for name, stand_in in (("_reconstruct", _NumpyArray), ("scalar", _numpy_scalar))
    ),
]


def read_torch_file(file: BinaryIO) -> Any:
    """The value in a file of torch.save; long lists of plain numbers come as arrays. RolloutDataError
    for another file, for a damaged one, and for one that names a type that is not plain data.
    """
    import torch

    source, numbers, mark = _without_numbers(file)
    with torch.serialization.safe_globals(ALLOWED):
        try:
            value = torch.load(source, map_location="cpu", weights_only=True)
        except RolloutDataError:
            raise
        except Exception as error:  # noqa: BLE001 - torch raises many types for a damaged file
            raise RolloutDataError(_reason(error)) from error
    return _plain(value, numbers, mark)


def data_beginning(file: BinaryIO, size: int = 4096) -> bytes:
    """The first bytes of the pickled part, which hold the outermost keys. RolloutDataError where the
    file is no zip archive of torch.save.
    """
    with _archive(file) as archive, archive.open(_data_name(archive)) as data:
        return data.read(size)


def _archive(file: BinaryIO) -> zipfile.ZipFile:
    try:
        archive = zipfile.ZipFile(file)
    except zipfile.BadZipFile as error:
        raise RolloutDataError("no file of torch.save, or cut short") from error
    entries = archive.infolist()
    size = file.seek(0, io.SEEK_END)
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise RolloutDataError("has compressed parts, which torch.save never writes")
    if sum(entry.file_size for entry in entries) > size:
        raise RolloutDataError("claims to hold more bytes than it has")
    return archive


def _data_name(archive: zipfile.ZipFile) -> str:
    names = [name for name in archive.namelist() if name.endswith("data.pkl")]
    if len(names) != 1:
        raise RolloutDataError("no file of torch.save: it has no data.pkl")
    return names[0]


def _without_numbers(file: BinaryIO) -> tuple[IO[bytes], list[np.ndarray], str]:
    """(the file with each long batch of a list's numbers replaced by one text, the numbers, what the
    texts begin with). The text is random, so that no file can hold it.
    """
    numbers: list[np.ndarray] = []
    mark = secrets.token_hex(16)

    def replace(match: re.Match) -> bytes:
        text = f"{mark}{len(numbers)}".encode()
        numbers.append(_decode(match.group(1)))
        return b"X" + len(text).to_bytes(4, "little") + text + b"a"

    result = io.BytesIO()
    with _archive(file) as archive, zipfile.ZipFile(result, "w") as copy:
        name = _data_name(archive)
        for entry in archive.infolist():
            try:
                content = archive.read(entry)
            except (zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
                raise RolloutDataError(f"damaged: {str(error)[:200]}") from error
            copy.writestr(
                entry.filename,
                _NUMBERS.sub(replace, content) if entry.filename == name else content,
            )
    result.seek(0)
    return result, numbers, mark


def _decode(batch: bytes) -> np.ndarray:
    """The numbers of a batch of opcodes: float64, or int32."""
    if batch[:1] == b"G":
        pairs = np.frombuffer(batch, dtype=[("op", "u1"), ("value", ">f8")])
        return pairs["value"].astype(np.float64)
    if len(batch) % 2 == 0 and batch[::2].count(b"K") == len(batch) // 2:
        return np.frombuffer(batch, dtype=np.uint8)[1::2].astype(np.int32)
    padded = b"".join([(one[1:] + _PADDING)[:4] for one in _ONE_INTEGER.findall(batch)])
    return np.frombuffer(padded, dtype="<i4")


def _reason(error: Exception) -> str:
    text = str(error)
    found = re.search(r"GLOBAL:? ([\w.<>]+)", text) or re.search(
        r"unsupported GLOBAL ([\w.<>]+)", text
    )
    if found:
        return (
            f"its pickle names {found.group(1)[:100]}, which is no plain data; nothing of it was "
            "run. Save numbers, text, lists, dictionaries, arrays and tensors only"
        )
    first = text.strip().splitlines()[0][:300] if text.strip() else ""
    return f"cannot be read ({type(error).__name__}: {first})"


def _plain(value: Any, numbers: list[np.ndarray], mark: str) -> Any:
    """`value` with the numbers back in their lists, as arrays. Each container once: a file may hold
    one many times, or within itself.
    """
    seen: dict[int, Any] = {}

    def visit(one: Any) -> Any:
        if isinstance(one, _NumpyArray):
            return one.array
        if isinstance(one, list) and one and isinstance(one[0], str) and one[0].startswith(mark):
            return _joined(one, numbers, mark)
        if not isinstance(one, list | dict) or id(one) in seen:
            return seen.get(id(one), one)
        seen[id(one)] = one
        waiting.append(one)
        return one

    waiting: list[Any] = []
    result = visit(value)
    while waiting:
        container = waiting.pop()
        places = list(container) if isinstance(container, dict) else range(len(container))
        for place in places:
            old = container[place]
            if isinstance(old, list | dict | _NumpyArray) and not is_tensor(old):
                container[place] = visit(old)
    return result


def _joined(entries: list, numbers: list[np.ndarray], mark: str) -> Any:
    """A list whose batches were cut out: an array where all of it are numbers."""
    parts: list[np.ndarray] = []
    rest: list[Any] = []
    for entry in entries:
        if isinstance(entry, str) and entry.startswith(mark):
            parts.append(numbers[int(entry[len(mark) :])])
        elif isinstance(entry, bool | int | float) and (
            not isinstance(entry, int) or abs(entry) < 2**53
        ):
            parts.append(np.array([entry]))
        else:
            rest.append(entry)
    if not rest:
        return np.concatenate(parts)
    return [
        one
        for entry in entries
        for one in (
            numbers[int(entry[len(mark) :])].tolist()
            if isinstance(entry, str) and entry.startswith(mark)
            else [entry]
        )
    ]
