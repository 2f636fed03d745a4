"""The headers of a folder's safetensors files: names, types, shapes and places of tensors, read in
milliseconds and without trusting any number of them. No torch.

A file is 8 bytes with the length of the header, the header as JSON, and the tensors one behind the
other.
"""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from pathlib import Path
from typing import Any

from slime.exceptions import ConfigError
from slime.models.hf_folder import read_json

INDEX = "model.safetensors.index.json"
# safetensors' own limit.
MAX_HEADER_BYTES = 100_000_000
# Bits of one element.
DTYPE_BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I16": 16, "I8": 8,
    "U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4, "C64": 64,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class TensorEntry:
    """One tensor: its type, shape, file, and the bytes of the file that hold it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    start: int
    stop: int


def weight_files(folder: str | Path) -> list[Path]:
    """The safetensors files of a Hugging Face folder. ConfigError where there are none, where one of
    the index is missing, and for one that is no regular file.
    """
    folder = Path(folder)
    weight_map = read_weight_map(folder)
    if weight_map is None:
        files = sorted(folder.glob("*.safetensors"))
    else:
        # A name from a file must not lead outside the folder.
        files = [folder / Path(name).name for name in sorted(set(weight_map.values()))]
    missing = [path.name for path in files if not path.exists()]
    if missing:
        raise ConfigError(
            f"{folder / INDEX} names {', '.join(missing[:5])}"
            + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
            + f": missing in {folder}. Download the folder again."
        )
    if not files:
        raise ConfigError(
            f"{folder} has no *.safetensors file. Convert pickled weights with transformers' "
            "save_pretrained first."
        )
    for path in files:
        if not path.is_file():
            raise ConfigError(f"{path} is no regular file. Download the folder again.")
    return files


def read_weight_map(folder: Path) -> dict[str, str] | None:
    """Tensor -> file of the index, None where the folder has none."""
    path = folder / INDEX
    if not path.exists():
        return None
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise ConfigError(f"{path} has no weight_map from tensors to files.")
    return weight_map


def read_header(path: Path) -> list[TensorEntry]:
    """The tensors of one file. ConfigError says what is wrong: cut, longer than its tensors, no
    JSON, tensors that overlap or whose bytes do not fit their shape.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(MAX_HEADER_BYTES, size - 8):
            raise ConfigError(
                f"{path} is cut or no safetensors file: it has {size} bytes, and its header is said "
                f"to have {length}. Download it again."
            )
        try:
            header = json.loads(file.read(length).decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                f"{path}: its header is not JSON ({error}). Download it again."
            ) from None
    if not isinstance(header, dict):
        raise ConfigError(f"{path}: its header is a {type(header).__name__}, not an object.")
    header.pop("__metadata__", None)
    entries = [_entry(path, 8 + length, name, value) for name, value in header.items()]
    entries.sort(key=lambda entry: (entry.start, entry.stop))
    stop = 8 + length
    for entry in entries:
        if entry.start != stop:
            raise ConfigError(
                f"{path}: {entry.name} begins at byte {entry.start}, what stands before it ends at "
                f"{stop}. Download it again."
            )
        stop = entry.stop
    if stop != size:
        what = "cut" if size < stop else "longer than its tensors"
        raise ConfigError(
            f"{path} is {what}: it has {size} bytes, its header describes {stop}. Download it again."
        )
    return entries


def _entry(path: Path, base: int, name: str, value: Any) -> TensorEntry:
    def is_count(number: object) -> bool:
        return type(number) is int and 0 <= number < 2**63

    fields = value if isinstance(value, dict) else {}
    dtype, shape, place = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    if (
        not isinstance(dtype, str)
        or not isinstance(shape, list)
        or not all(map(is_count, shape))
        or not isinstance(place, list)
        or len(place) != 2
        or not all(map(is_count, place))
    ):
        raise ConfigError(f"{path}: the header's entry of {name!r} is {str(value)[:100]}.")
    bits = DTYPE_BITS.get(dtype)
    if bits is not None and math.prod(shape) * bits != 8 * (place[1] - place[0]):
        raise ConfigError(
            f"{path}: {name} has shape {shape} of {dtype}, but {place[1] - place[0]} bytes."
        )
    return TensorEntry(name, dtype, tuple(shape), path, base + place[0], base + place[1])


def has_bad_number(dtype: str, data: bytes) -> bool:
    """Whether a NaN or an infinity stands in `data`, whole elements of F32, BF16 or F16; False for
    other types.
    """
    if dtype == "F32":
        exponent, words = 0x7F800000, struct.unpack(f"<{len(data) // 4}I", data)
    elif dtype in ("BF16", "F16"):
        exponent = 0x7F80 if dtype == "BF16" else 0x7C00
        words = struct.unpack(f"<{len(data) // 2}H", data)
    else:
        return False
    return any(word & exponent == exponent for word in words)
