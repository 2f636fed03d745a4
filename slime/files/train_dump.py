"""Train dumps: what training computed per sample in one rollout, in whole-batch order, one file.
Nothing in them is executed when read.

A path that ends in .parquet is written as a table, see `train_table`; any other is a safetensors
file, so arrays keep their bits and any safetensors reader opens it. Its
metadata holds one JSON text under "slime": format, rollout_id, rank (of the writer), num_samples,
num_whole (samples of the rollout batch, also those no rank trained), dp_shards (per data-parallel
rank: partition, micro-batches, steps), fields (by name: kind), left_out (by name: why).

    kind    tensors                                    one entry is
    rows    NAME [rows, ...], NAME.offsets [N + 1]     an array with a row per token
    number  NAME [N]                                   a number
    json    NAME [bytes], NAME.offsets [N + 1]         a JSON text
    whole   NAME [num_whole], or json                  of a sample of the whole rollout batch

The last tensor, "crc32" [1 + tensors], is over the header and over each tensor before it.
"""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from slime.exceptions import ConfigError, RolloutDataError
from slime.files import atomic, tables
from slime.files.json_values import decode_json, encode_each
from slime.files.train_record import TensorOutline, TrainDump
from slime.files.train_table import read_train_table

FORMAT = "slime-train-2"
CHECKS = "crc32"
DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
}
CODES = {name: code for code, name in DTYPES.items()}


def train_dump_path(path_template: str, rollout_id: int, *, rank: int | str) -> Path:
    """The file of one rollout: {rollout_id} in the template is replaced, and {rank} by the writer's
    rank. `ConfigError` without {rollout_id}.
    """
    try:
        name, other = (
            path_template.format(rollout_id=value, rank=rank)
            for value in (rollout_id, rollout_id + 1)
        )
    except (KeyError, IndexError, ValueError) as error:
        raise ConfigError(
            f"The dump path {path_template!r} has a placeholder other than {{rollout_id}} and "
            f"{{rank}}: {error}"
        ) from None
    if name == other:
        raise ConfigError(
            f"The dump path {path_template!r} needs {{rollout_id}}, or each rollout overwrites the "
            "one before."
        )
    return Path(name)


# --- writing --------------------------------------------------------------------------------------


class TrainDumpWriter:
    """Writes tensors one after the other, each let go of before the next is made. The file appears
    under its name when `commit` has it whole.
    """

    def __init__(
        self, path: Path, header: Mapping[str, Any], outlines: Sequence[TensorOutline]
    ) -> None:
        self.path = path
        self._outlines = list(outlines)
        checks = TensorOutline(CHECKS, "uint32", (1 + len(self._outlines),))
        head = _safetensors_head(header, [*self._outlines, checks])
        self._checks = [zlib.crc32(head)]
        self._pending = atomic.PendingFile(path)
        # closed by commit or abandon
        self._file = open(self._pending.temporary, "wb")  # noqa: SIM115
        try:
            self._file.write(head)
        except OSError:  # the caller has no writer to abandon yet
            self.abandon()
            raise

    def write(self, name: str, values: np.ndarray) -> None:
        """The next tensor. ValueError where it is not the one that was announced."""
        expected = self._outlines[len(self._checks) - 1]
        if (name, values.dtype.name, values.shape) != (
            expected.name,
            expected.dtype,
            expected.shape,
        ):
            raise ValueError(
                f"{expected} was announced, {name} {values.dtype.name} {values.shape} came"
            )
        data = np.ascontiguousarray(values).tobytes()
        self._checks.append(zlib.crc32(data))
        self._file.write(data)

    def commit(self) -> Path:
        """Closes the file and gives it its name."""
        if len(self._checks) != 1 + len(self._outlines):
            raise ValueError(
                f"{len(self._checks) - 1} of {len(self._outlines)} tensors were written"
            )
        self._file.write(np.array(self._checks, dtype=np.uint32).tobytes())
        self._file.close()
        self._pending.commit()
        return self.path

    def abandon(self) -> None:
        """Removes what was written."""
        # closing writes what is buffered, which a full disk refuses
        with contextlib.suppress(OSError):
            self._file.close()
        self._pending.abandon()


def _safetensors_head(header: Mapping[str, Any], outlines: Sequence[TensorOutline]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"slime": json.dumps({"format": FORMAT, **header})}}
    start = 0
    for outline in outlines:
        end = start + outline.num_bytes
        entries[outline.name] = {
            "dtype": CODES[outline.dtype],
            "shape": list(outline.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def encode_entries(entries: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Objects as rows: `(bytes of their JSON texts, bytes per entry [N])`. `RolloutDataError` for
    an object that JSON and arrays cannot hold.
    """
    texts = encode_each(entries)
    return np.frombuffer(b"".join(texts), dtype=np.uint8), np.array(
        [len(text) for text in texts], dtype=np.int64
    )


# --- reading --------------------------------------------------------------------------------------


def is_train_dump(path: str | os.PathLike) -> bool:
    """Whether the file begins as a safetensors file does: eight bytes of length, then a JSON
    object.
    """
    with open(path, "rb") as file:
        return file.read(9)[8:] == b"{"


def read_train_dump(path: str | os.PathLike) -> TrainDump:
    """The dump, every array with the bits that were saved. `RolloutDataError` naming the file, and
    the field where one is damaged.
    """
    path = Path(path)
    if path.is_file() and tables.is_table(path):
        return read_train_table(path)
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise RolloutDataError(f"There is no train dump at {path}.") from None
    header, tensors = _parse(path, data)
    token_fields: dict[str, list[np.ndarray]] = {}
    sample_fields: dict[str, Any] = {}
    whole_fields: dict[str, Any] = {}
    for name, kind in header["fields"].items():
        place: dict[str, Any] = (
            whole_fields
            if kind.startswith("whole")
            else token_fields
            if kind == "rows"
            else sample_fields
        )
        if kind in ("number", "whole"):
            place[name] = tensors[name]
            continue
        offsets = tensors[f"{name}.offsets"]
        entries = [
            tensors[name][low:high]
            for low, high in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)
        ]
        place[name] = (
            entries if kind == "rows" else [decode_json(entry.tobytes()) for entry in entries]
        )
    return TrainDump.of_header(
        path,
        header,
        token_fields=token_fields,
        sample_fields=sample_fields,
        whole_fields=whole_fields,
    )


def _parse(path: Path, data: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The JSON header and all tensors by name, checked."""
    try:
        return _checked_tensors(path, data)
    except RolloutDataError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError) as error:
        raise RolloutDataError(
            f"{path} is damaged: its head does not fit its tensors ({type(error).__name__}: {error})."
        ) from error


def _checked_tensors(path: Path, data: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    size = 8 + int.from_bytes(data[:8], "little")
    try:
        entries = json.loads(data[8:size])
        header = json.loads(entries.pop("__metadata__")["slime"])
        form = header["format"]
    except (ValueError, KeyError, TypeError, AttributeError):
        form = None
    if form != FORMAT:
        raise RolloutDataError(
            f"{path} is not a train dump of this version ({FORMAT}), or its head is damaged; it "
            f"begins with {data[:40]!r}."
        )
    end = size + max(entry["data_offsets"][1] for entry in entries.values())
    if len(data) != end:
        raise RolloutDataError(
            f"{path} has {len(data)} bytes, its head says {end}. It was cut short or edited."
        )

    def bytes_of(name: str) -> bytes:
        low, high = entries[name]["data_offsets"]
        return data[size + low : size + high]

    names = [name for name in entries if name != CHECKS]
    checks = np.frombuffer(bytes_of(CHECKS), dtype=np.uint32).tolist()
    found = [zlib.crc32(data[:size]), *(zlib.crc32(bytes_of(name)) for name in names)]
    damaged = [
        name for name, a, b in zip(["the head", *names], checks, found, strict=True) if a != b
    ]
    if damaged:
        raise RolloutDataError(
            f"{path} is damaged: the checksums of {', '.join(damaged[:5])} do not fit."
        )
    return header, {
        name: np.frombuffer(bytes_of(name), dtype=DTYPES[entries[name]["dtype"]])
        .reshape(entries[name]["shape"])
        .copy()
        for name in names
    }
