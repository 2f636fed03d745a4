"""A Hugging Face folder from the trained model: the same files from every parallel layout."""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from slime.backends.megatron_utils.agreement import RanksFailed, agreed, gathered
from slime.backends.megatron_utils.hf_to_megatron.common import SafetensorReader
from slime.backends.megatron_utils.update_weight.gather import NamedTensors, iter_hf_weight_buckets
from slime.exceptions import SaveError
from slime.files.disk_space import disk_space
from slime.models.shape import read_model_shape

MAX_SHARD_BYTES = 4 * 1024**3
_WEIGHT_SUFFIXES = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".gguf",
    ".safetensors.index.json",
    ".bin.index.json",
)


def save_hf_model_direct_to_path(
    args: argparse.Namespace, folder: str | Path, model: Sequence[torch.nn.Module]
) -> None:
    """Writes weights, config and tokenizer files to `folder`, which appears as a whole or not at
    all. Called by all ranks together.

    Each tensor is written in the dtype that `args.hf_checkpoint` stores it in; everything but
    weights is copied from there. Raises ValueError when `folder` is the --hf-checkpoint folder
    itself, `SaveError` on all ranks when writing fails; nothing of the folder is left then.
    """
    folder, source = Path(folder), Path(args.hf_checkpoint)
    if folder.resolve() == source.resolve():
        raise ValueError(
            f"{folder} is the same directory as --hf-checkpoint. Choose another --save-hf."
        )
    temporary = folder.with_name(f".{folder.name}.writing")
    writer: _SafetensorShardWriter | None = None
    try:
        reader, shape = agreed(lambda: (SafetensorReader(source), read_model_shape(source)))
        failure: Exception | None = None
        for bucket in iter_hf_weight_buckets(args, model, shape):
            # A failure must not end the loop: the other ranks still send.
            if not bucket or failure is not None:
                continue
            try:
                if writer is None:
                    shutil.rmtree(temporary, ignore_errors=True)
                    temporary.mkdir(parents=True)
                    writer = _SafetensorShardWriter(temporary)
                writer.write([(name, tensor.to(reader.dtype(name))) for name, tensor in bucket])
            except Exception as error:  # noqa: BLE001 - raised on all ranks after the loop
                failure = error

        def finish() -> None:
            if failure is not None:
                raise failure
            if writer is not None:
                writer.finalize()
                _copy_hf_assets(source, temporary)
                _replace(folder, temporary)

        agreed(finish)
    except RanksFailed as error:

        def clean_up() -> str:
            state = disk_space(folder.parent)
            if writer is not None:
                shutil.rmtree(temporary, ignore_errors=True)
            return state

        state = gathered(clean_up)[0]
        raise SaveError(
            f"The Hugging Face weights {folder} were not saved: {error}; {state}."
        ) from error


class _SafetensorShardWriter:
    """Collects tensors and writes a file whenever `max_bytes` are full. The cuts depend on nothing
    but the order and sizes.
    """

    def __init__(self, folder: Path, *, max_bytes: int = MAX_SHARD_BYTES) -> None:
        self._folder, self._max_bytes = folder, max_bytes
        self._pending: dict[str, torch.Tensor] = {}
        self._pending_bytes = 0
        self._total_bytes = 0
        self._shards: list[list[str]] = []

    def write(self, named_tensors: NamedTensors) -> None:
        """Takes tensors in order."""
        for name, tensor in named_tensors:
            size = tensor.numel() * tensor.element_size()
            if self._pending and self._pending_bytes + size > self._max_bytes:
                self._flush()
            self._pending[name] = tensor.contiguous()
            self._pending_bytes += size
            self._total_bytes += size

    def finalize(self) -> None:
        """Writes what is left, gives the files their final names, and writes the index."""
        self._flush()
        count = len(self._shards)
        weight_map = {}
        for number, names in enumerate(self._shards, start=1):
            final = f"model-{number:05d}-of-{count:05d}.safetensors"
            (self._folder / self._temporary_name(number)).rename(self._folder / final)
            weight_map.update(dict.fromkeys(names, final))
        index = {
            "metadata": {"total_size": self._total_bytes},
            "weight_map": dict(sorted(weight_map.items())),
        }
        (self._folder / "model.safetensors.index.json").write_text(
            json.dumps(index, indent=2) + "\n"
        )

    def _flush(self) -> None:
        if self._pending:
            self._shards.append(list(self._pending))
            save_file(
                self._pending,
                self._folder / self._temporary_name(len(self._shards)),
                metadata={"format": "pt"},
            )
            self._pending, self._pending_bytes = {}, 0

    @staticmethod
    def _temporary_name(number: int) -> str:
        return f".model-{number:05d}.safetensors"


def _copy_hf_assets(source: str | Path, target: str | Path) -> None:
    """Copies the files of a Hugging Face folder that are not weights (config, tokenizer,
    templates).
    """
    for path in sorted(Path(source).iterdir()):
        if path.is_file() and not path.name.endswith(_WEIGHT_SUFFIXES):
            shutil.copyfile(path, Path(target) / path.name)


def _replace(folder: Path, temporary: Path) -> None:
    for path in temporary.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    old = folder.with_name(f".{folder.name}.replaced")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    try:
        temporary.rename(folder)
    except OSError:
        if old.exists():
            old.rename(folder)
        raise
    shutil.rmtree(old, ignore_errors=True)
