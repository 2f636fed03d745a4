"""Reading a Hugging Face folder tensor by tensor, and cutting a tensor for one rank."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from slime.backends.megatron_utils.sharding import shard
from slime.exceptions import ConfigError
from slime.models.safetensors_header import read_weight_map, weight_files

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_FP8_BLOCK = 128


class SafetensorReader:
    """The tensors of a folder's safetensors files by name, read one at a time when asked for.

    Raises `ConfigError` for a folder without safetensors files, a missing shard, or a file that is
    cut or malformed.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._file_of: dict[str, str] = {}
        self._open: dict[str, object] = {}
        self._last: tuple[str, torch.Tensor] | None = None
        files = weight_files(self.folder)
        weight_map = read_weight_map(self.folder)
        if weight_map is not None:
            self._file_of = {name: Path(file).name for name, file in weight_map.items()}
        else:
            for path in files:
                self._file_of.update(dict.fromkeys(self._handle(path.name).keys(), path.name))

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def names(self) -> list[str]:
        """All tensor names, sorted."""
        return sorted(self._file_of)

    def dtype(self, name: str) -> torch.dtype:
        """The dtype a tensor is stored in, from the file's header."""
        return _DTYPES[self._handle(self._file_of[name]).get_slice(name).get_dtype()]

    def get_tensor(self, name: str) -> torch.Tensor:
        """The tensor on the CPU; block-scaled fp8 (`<name>_scale_inv` beside it) comes as bfloat16.
        `ConfigError` where there is none.

        The last tensor is kept: two parameters made of it in a row cost one read.
        """
        if self._last is None or self._last[0] != name:
            self._last = (name, self._read(name))
        return self._last[1]

    def _read(self, name: str) -> torch.Tensor:
        if name not in self._file_of:
            raise ConfigError(
                f"{self.folder} has no tensor {name!r}; its config.json describes another model."
            )
        tensor = self._handle(self._file_of[name]).get_tensor(name)
        scale_name = f"{name}_scale_inv"
        if tensor.dtype == torch.float8_e4m3fn and scale_name in self._file_of:
            scale = self._handle(self._file_of[scale_name]).get_tensor(scale_name)
            scale = scale.repeat_interleave(_FP8_BLOCK, 0).repeat_interleave(_FP8_BLOCK, 1)
            tensor = (tensor.float() * scale[: tensor.shape[0], : tensor.shape[1]]).to(
                torch.bfloat16
            )
        return tensor

    def _handle(self, file: str):
        if file not in self._open:
            try:
                self._open[file] = safe_open(self.folder / file, framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                raise ConfigError(
                    f"{self.folder / file} is not a whole safetensors file: {error}"
                ) from error
        return self._open[file]


def _tensor_parallel_shard(
    name: str,
    tensor: torch.Tensor,
    *,
    parallel_size: int,
    parallel_rank: int,
    partition_dim: int,
    partition_stride: int = 1,
) -> torch.Tensor:
    """This rank's part of a whole Megatron parameter; the MLP's gate and up halves are cut one by
    one.
    """
    return shard(
        name,
        tensor,
        size=parallel_size,
        rank=parallel_rank,
        dim=partition_dim,
        stride=partition_stride,
    )
