"""Model weights in Megatron-core's distributed checkpoint format (torch_dist), loadable under any layout and by Megatron's own tools."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as torch_checkpoint
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)

from slime.backends.megatron_utils.local_params import unwrap
from slime.exceptions import ConfigError


class _SaveInThisProcess(TorchDistSaveShardedStrategy):
    """The format of Megatron's strategy, written without its helper processes: they cost seconds, and fork a process with threads."""

    def __init__(self) -> None:
        super().__init__("torch_dist", 1)

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        flat, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        torch_checkpoint.save(
            mcore_to_pyt_state_dict(flat, False),
            storage_writer=torch_checkpoint.FileSystemWriter(
                checkpoint_dir, single_file_per_rank=True, sync_files=False, thread_count=1
            ),
            planner=MCoreSavePlanner(
                dedup_replicated_tensors=not self.keep_only_main_replica, flatten_state_dict=False
            ),
        )


def save_weights(folder: str | Path, model: Sequence[torch.nn.Module]) -> None:
    """Writes the weights of all ranks into `folder` (which exists and is shared). Called by all ranks together."""
    dist_checkpointing.save(_sharded(model), str(folder), sharded_strategy=_SaveInThisProcess())


def load_weights_into(folder: str | Path, model: Sequence[torch.nn.Module]) -> None:
    """Fills the model from a distributed checkpoint of any layout. Called by all ranks together.

    Raises `ConfigError` for another checkpoint format, and for an index file that would run code when read.
    """
    folder = Path(folder)
    if not (folder / ".metadata").is_file():
        raise ConfigError(
            f"{folder} is not a distributed checkpoint (torch_dist). Convert it with Megatron, or load a Hugging Face folder."
        )
    _check_index(folder / ".metadata")
    wanted = _sharded(model)
    loaded = dist_checkpointing.load(wanted, str(folder))
    for index, chunk in enumerate(model):
        unwrap(chunk).load_state_dict(loaded[_key(index, len(model))], strict=True)


def _sharded(model: Sequence[torch.nn.Module]) -> dict[str, Any]:
    return {_key(index, len(model)): unwrap(chunk).sharded_state_dict() for index, chunk in enumerate(model)}


def _key(index: int, num_chunks: int) -> str:
    return "model" if num_chunks == 1 else f"model{index}"


class _IndexOnly(pickle.Unpickler):
    """Reads a torch_dist index with nothing but the classes that such an index consists of."""

    _MODULES = ("torch.distributed.checkpoint.", "torch.serialization")
    _NAMES = {
        ("torch", "Size"), ("torch", "device"), ("torch", "strided"), ("collections", "OrderedDict"), ("pathlib", "PosixPath"),
        ("torch.storage", "TypedStorage"), ("torch._utils", "_rebuild_tensor_v2"),
    }  # fmt: skip

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(
            getattr(torch, name, None), torch.dtype | torch.layout | torch.memory_format
        )
        if is_dtype or module.startswith(self._MODULES) or (module, name) in self._NAMES:
            return super().find_class(module, name)
        raise ConfigError(
            f"The checkpoint's index names {module}.{name}, which no index needs. Do not load this checkpoint."
        )


def _check_index(path: Path) -> None:
    """torch reads this file with plain pickle; it is read here first, by a reader that can only make index entries."""
    with open(path, "rb") as file:
        try:
            _IndexOnly(file).load()
        except (pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError) as error:
            raise ConfigError(
                f"{path} is damaged ({error}). Resume from an earlier checkpoint with --ckpt-step."
            ) from error
