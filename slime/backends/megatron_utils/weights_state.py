"""Model weights in Megatron-core's distributed checkpoint format (torch_dist), loadable under any
layout and by Megatron's own tools.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_checkpoint
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import merge, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factory_merges
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess, save_preprocess
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreLoadPlanner,
    MCoreSavePlanner,
    _replace_sharded_keys_with_state_dict_keys,
    _replace_state_dict_keys_with_sharded_keys,
    _restore_dict_types,
    _unwrap_pyt_sharded_tensor,
    mcore_to_pyt_state_dict,
)
from megatron.core.dist_checkpointing.utils import extract_sharded_base
from megatron.core.dist_checkpointing.validation import (
    determine_global_metadata,
    validate_sharding_integrity,
)
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)

from slime.backends.megatron_utils.agreement import agreed
from slime.backends.megatron_utils.local_params import unwrap
from slime.backends.megatron_utils.weights_index import INDEX, read_index
from slime.exceptions import ConfigError

# what Megatron's own saving names its strategy, which its loading looks for
_FORMAT = CheckpointingConfig("torch_dist", 1)


def save_weights(folder: str | Path, model: Sequence[torch.nn.Module]) -> None:
    """Writes the weights of all ranks into `folder` (which exists and is shared). Called by all
    ranks together. Raises `RanksFailed` on all of them where one cannot write.

    Megatron's `save` is not called: rank 0 writes files of its own between collectives there, and
    helper processes are forked from a process with threads. These are its other steps.
    """
    folder, is_first = Path(folder), dist.get_rank() == 0
    sharded, common = agreed(
        lambda: save_preprocess(_sharded(model), validate_access_integrity=False)
    )
    shardings = determine_global_metadata(sharded)[1]
    agreed(lambda: validate_sharding_integrity(shardings))
    agreed(lambda: _write_common(folder, common) if is_first else None)
    state, writer = agreed(lambda: (_torch_state(sharded), _writer(folder)))
    planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
    agreed(lambda: torch_checkpoint.save(state, storage_writer=writer, planner=planner))
    agreed(lambda: save_config(_FORMAT, str(folder)) if is_first else None)


def _write_common(folder: Path, common: dict[str, Any]) -> None:
    # torch's own file writer reports a full disk without the system's error
    content = io.BytesIO()
    torch.save(common, content)
    (folder / COMMON_STATE_FNAME).write_bytes(content.getbuffer())


def _torch_state(sharded: dict[str, Any]) -> dict[str, Any]:
    flat, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, keep_only_main_replica=True)
    return mcore_to_pyt_state_dict(flat, False)


def _writer(folder: Path) -> torch_checkpoint.FileSystemWriter:
    return torch_checkpoint.FileSystemWriter(
        folder, single_file_per_rank=True, sync_files=False, thread_count=1
    )


def load_weights_into(folder: str | Path, model: Sequence[torch.nn.Module]) -> None:
    """Fills the model from a distributed checkpoint of any layout. Called by all ranks together.

    Raises `ConfigError` for another checkpoint format, for an index or an object that would run
    code when read, and where a parameter of the model is missing or has another shape.
    """
    folder = Path(folder)
    if not (folder / INDEX).is_file():
        raise ConfigError(
            f"{folder} is not a distributed checkpoint (torch_dist). Convert it with Megatron, or "
            "load a Hugging Face folder."
        )
    index = read_index(folder)
    # Megatron's `load` is not called: it reads the index and common.pt by itself. These are its
    # other steps.
    wanted, others, factories = load_preprocess(_sharded(model))
    wanted, _ = extract_sharded_base(wanted)
    validate_sharding_integrity(determine_global_metadata(wanted)[1])
    merge(others, _load_sharded(folder, index, wanted))
    loaded = apply_factory_merges(others, factories)
    for position, chunk in enumerate(model):
        unwrap(chunk).load_state_dict(loaded[_key(position, len(model))], strict=True)


def _load_sharded(folder: Path, index: Metadata, wanted: dict[str, Any]) -> dict[str, Any]:
    """`wanted` with the checkpoint's values: Megatron's loading strategy, on an index that is read
    already.
    """
    leaves = list(nested_values(wanted))
    _check_kinds(folder, index, leaves)
    flat, flat_mapping, rename_mapping = _replace_state_dict_keys_with_sharded_keys(wanted)
    state = mcore_to_pyt_state_dict(flat, True)
    tensors = [leaf for leaf in leaves if isinstance(leaf, ShardedTensor)]
    planner = _LoadPlanner(
        shapes_validation_sharded_tensors=[
            leaf for leaf in tensors if not leaf.allow_shape_mismatch
        ],
        allow_shape_mismatch_sharded_tensors={
            leaf.key: leaf for leaf in tensors if leaf.allow_shape_mismatch
        },
        flatten_state_dict=False,
        flatten_sharded_tensors=False,
    )
    try:
        torch_checkpoint.load(state, storage_reader=_IndexedReader(folder, index), planner=planner)
    except CheckpointException as error:
        reasons = sorted({str(failure[0]) for failure in error.failures.values()})
        raise ConfigError(f"{folder} cannot be loaded: {'; '.join(reasons)}") from error
    values = {key: _unwrap_pyt_sharded_tensor(value) for key, value in state.items()}
    result = _replace_sharded_keys_with_state_dict_keys(values, flat_mapping, rename_mapping)
    _restore_dict_types(result, wanted)
    return result


def _check_kinds(folder: Path, index: Metadata, leaves: Sequence[Any]) -> None:
    """The checkpoint has a tensor for each tensor of the model, and an object for each object."""
    for leaf in leaves:
        is_tensor = isinstance(leaf, ShardedTensor)
        entry = index.state_dict_metadata.get(leaf.key if is_tensor else leaf.unique_key)
        if not isinstance(entry, TensorStorageMetadata if is_tensor else BytesStorageMetadata):
            found = "has no" if entry is None else "has another kind of value for"
            raise ConfigError(
                f"{folder} {found} {leaf.key}, which this model needs. Was it saved from another "
                "architecture?"
            )


class _IndexedReader(FileSystemReader):
    """Reads tensors from the files of a checkpoint by an index that was read before; never the
    index file.
    """

    def __init__(self, folder: Path, index: Metadata) -> None:
        super().__init__(folder)
        self._index = index

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        return self._index


class _LoadPlanner(MCoreLoadPlanner):
    """Megatron's planner, whose objects (a layer's extra state) are plain values: torch's would run
    what they name.
    """

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        try:
            with torch.serialization.safe_globals([io.BytesIO]):
                self.state_dict[name] = torch.load(value, weights_only=True)
        except (pickle.UnpicklingError, EOFError, RuntimeError) as error:
            raise ConfigError(
                f"the object {name} is damaged, or would run code when read "
                f"({str(error).splitlines()[0]}). Do not load this checkpoint."
            ) from error


def _sharded(model: Sequence[torch.nn.Module]) -> dict[str, Any]:
    return {
        _key(index, len(model)): unwrap(chunk).sharded_state_dict()
        for index, chunk in enumerate(model)
    }


def _key(index: int, num_chunks: int) -> str:
    return "model" if num_chunks == 1 else f"model{index}"
