"""Reads a file of torch.save as data: `torch.load(weights_only=True)`, with a few stand-ins for
numpy's pickled arrays. No function that a file names is called but torch's own and those here.

torch's reader of plain data handles one number at a time, in Python. Long lists of numbers, which
is what dumps of samples are made of, are therefore cut out of the stream before it is read, and
decoded as arrays.
"""

from __future__ import annotations

import contextlib
import gc
import io
import re
import secrets
import zipfile
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any, BinaryIO

import numpy as np

from slime.exceptions import RolloutDataError

# Of numpy's dtypes, those of numbers: as they are named in a pickle.
_NUMPY_CODES = frozenset({"b1", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8"})
_INTEGER, _FLOAT = rb"K[\s\S]|M[\s\S]{2}|J[\s\S]{4}", rb"G[\s\S]{8}"
# pickle's opcodes of a list's batch, of at most 1000 numbers: ( numbers e
_NUMBERS = re.compile(rb"\(((?:%b){48,1000}|(?:%b){48,1000})e" % (_INTEGER, _FLOAT))
_BEGIN = re.compile(rb"\((?=G[\s\S]{8}G|[KMJ])")
_BATCH = 1000
# by opcode, the bytes of a number with its opcode, and which bits of the following four are its own
_WIDTHS, _BITS = np.zeros(256, dtype=np.int64), np.zeros(256, dtype=np.uint32)
_WIDTHS[[*b"KMJ"]], _BITS[[*b"KMJ"]] = (2, 3, 5), (0xFF, 0xFFFF, 0xFFFFFFFF)
_WORTH_IT = 1 << 20  # bytes of numbers for which the file is written anew
_AT_ONCE = 2048  # batches


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
    with _collecting_nothing():
        source, batches, mark = _without_numbers(file)
        if batches:
            try:
                value, used = _plain(_load(source), batches, mark)
            except RolloutDataError:
                used = -1
            # a text that looks like a list's numbers was cut in two: rare enough to begin again
            if used == len(batches):
                return value
            file.seek(0)
            source = file
        return _plain(_load(source), [], mark)[0]


@contextlib.contextmanager
def _collecting_nothing() -> Iterator[None]:
    """No garbage collection: it would look through the many objects of a file again and again while
    they are made, and all of them stay.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _load(source: IO[bytes]) -> Any:
    import torch

    others = torch.serialization.get_safe_globals()
    # what a library of this process allows, Megatron-core for one, is not allowed here
    torch.serialization.clear_safe_globals()
    try:
        with torch.serialization.safe_globals(ALLOWED):
            return torch.load(source, map_location="cpu", weights_only=True)
    except RolloutDataError:
        raise
    except Exception as error:  # noqa: BLE001 - torch raises many types for a damaged file
        raise RolloutDataError(_reason(error)) from error
    finally:
        torch.serialization.add_safe_globals(others)


def data_beginning(file: BinaryIO, size: int = 4096) -> bytes:
    """The first bytes of the pickled part, which hold the outermost keys. RolloutDataError where the
    file is no zip archive of torch.save.
    """
    beginning = file.read(2 * size)
    is_stored = beginning.startswith(b"PK\x03\x04") and beginning[8:10] == b"\0\0"
    if is_stored and b"data.pkl" in beginning[:300]:
        return beginning  # torch.save writes it first: no need to read a directory of tensors
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
    mark = secrets.token_hex(16)
    with _archive(file) as archive:
        name = _data_name(archive)
        whole = _content(archive, name)
        data, spans = memoryview(whole), list(_number_spans(whole))
        if sum(end - start for start, end in spans) < _WORTH_IT:
            file.seek(0)
            return file, [], mark
        kept: list[bytes | memoryview] = []
        place = 0
        for number, (start, end) in enumerate(spans):
            text = f"{mark}{number}".encode()
            # in place of ( numbers e: a text and the opcode that appends it
            kept += [data[place : start - 1], b"X", len(text).to_bytes(4, "little"), text, b"a"]
            place = end + 1
        result = io.BytesIO()
        with zipfile.ZipFile(result, "w") as copy:
            for entry in archive.infolist():
                is_data = entry.filename == name
                content = b"".join([*kept, data[place:]]) if is_data else _content(archive, entry)
                copy.writestr(entry.filename, content)
    result.seek(0)
    return result, _decode([data[start:end] for start, end in spans]), mark


def _number_spans(content: bytes) -> Iterator[tuple[int, int]]:
    """Where the numbers of each long batch begin and end. Whole batches of numbers of one width are
    found by their opcodes alone, others number by number.
    """
    place = 0
    while found := _BEGIN.search(content, place):
        start = found.end()
        for code, width in ((b"G", 9), (b"K", 2)):
            end = start + width * _BATCH
            if content[start:end:width] == code * _BATCH and content[end : end + 1] == b"e":
                break
        else:
            match = _NUMBERS.match(content, found.start())
            if match is None:
                place = start
                continue
            end = match.end(1)
        yield start, end
        place = end + 1


def _content(archive: zipfile.ZipFile, entry: zipfile.ZipInfo | str) -> bytes:
    try:
        return archive.read(entry)
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
        raise RolloutDataError(f"damaged: {str(error)[:200]}") from error


def _decode(batches: Sequence[memoryview]) -> list[np.ndarray]:
    """The numbers of each batch of opcodes: float64, int32, or uint8."""
    result: list[np.ndarray] = []
    mixed = []
    for batch in batches:
        if batch[0] == ord("G"):
            pairs = np.frombuffer(batch, dtype=[("op", "u1"), ("value", ">f8")])
            result.append(pairs["value"].astype(np.float64))
            continue
        ops = np.frombuffer(batch, dtype=np.uint8)
        if len(ops) % 2 == 0 and (ops[::2] == ord("K")).all():
            result.append(ops[1::2].copy())  # of its own, so that the file is let go
            continue
        mixed.append(len(result))
        result.append(ops)
    for start in range(0, len(mixed), _AT_ONCE):
        places = mixed[start : start + _AT_ONCE]
        decoded = _in_lockstep([result[place] for place in places])
        for place, numbers in zip(places, decoded, strict=True):
            result[place] = numbers
    return result


def _in_lockstep(batches: list[np.ndarray]) -> list[np.ndarray]:
    """The integers of batches of opcodes of different widths: the k-th of all batches at once."""
    lengths = np.array([len(batch) for batch in batches])
    ends = np.cumsum(lengths)
    data = np.concatenate([*batches, np.zeros(4, dtype=np.uint8)])
    words = np.ndarray(len(data) - 3, "<u4", data, strides=(1,))  # the four bytes from each on
    columns: list[tuple[np.ndarray, np.ndarray]] = []  # the rows that have a k-th number, and these
    rows, at = np.arange(len(batches)), ends - lengths
    while len(rows):
        ops = data[at]
        columns.append((rows, words[at + 1] & _BITS[ops]))
        at = at + _WIDTHS[ops]
        going = at < ends[rows]
        if not going.all():
            rows, at = rows[going], at[going]
    out = np.zeros((len(columns), len(batches)), dtype=np.uint32)
    counts = np.zeros(len(batches), dtype=np.int64)
    for k, (rows, values) in enumerate(columns):
        out[k, rows] = values
        counts[rows] = k + 1
    numbers = np.ascontiguousarray(out.T).view(np.int32)
    return [numbers[i, :count].copy() for i, count in enumerate(counts.tolist())]


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
    # torch's own words begin with how to run the file's code
    text = text.rpartition("WeightsUnpickler error:")[2]
    first = text.strip().splitlines()[0][:300] if text.strip() else ""
    return f"cannot be read ({type(error).__name__}: {first})"


def _plain(value: Any, numbers: list[np.ndarray], mark: str) -> tuple[Any, int]:
    """(`value` with the numbers back in their lists, as arrays; how many batches came back). Each
    container once: a file may hold one many times, or within itself.
    """
    seen: dict[int, Any] = {}
    waiting: list[Any] = []
    used = 0

    def visit(one: Any) -> Any:
        nonlocal used
        if isinstance(one, _NumpyArray):
            return one.array
        if not isinstance(one, list | dict):
            return one
        if id(one) in seen:
            return seen[id(one)]
        found = one
        if isinstance(one, list) and numbers:
            count = sum(isinstance(entry, str) and entry.startswith(mark) for entry in one)
            used += count
            found = _joined(one, numbers, mark) if count else one
        seen[id(one)] = found
        kept.append(one)  # an id is of one object only while that lives
        if found is one:
            waiting.append(one)
        return found

    kept: list[Any] = []
    result = visit(value)
    while waiting:
        container = waiting.pop()
        places = list(container) if isinstance(container, dict) else range(len(container))
        for place in places:
            old = container[place]
            if isinstance(old, list | dict | _NumpyArray):
                container[place] = visit(old)
    return result, used


def _joined(entries: list, numbers: list[np.ndarray], mark: str) -> Any:
    """A list whose batches were cut out: an array where all of it are numbers, else a list."""
    parts: list[Any] = []
    for entry in entries:
        is_batch = isinstance(entry, str) and entry.startswith(mark)
        parts.append(numbers[int(entry[len(mark) :])] if is_batch else [entry])
    plain = [
        isinstance(part, np.ndarray)
        or (isinstance(part[0], float) or (type(part[0]) is int and abs(part[0]) < 2**31))
        for part in parts
    ]
    if all(plain):
        return np.concatenate(parts)
    return [
        one for part in parts for one in (part.tolist() if isinstance(part, np.ndarray) else part)
    ]
