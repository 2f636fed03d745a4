"""A rank's batch on its device, and the micro-batches that the forward passes walk over.

Rows are laid out once for a whole rollout batch; a micro-batch is then a view. What is logged from
a batch is in `slime.metrics.train_metrics`, re-exported here under upstream's names.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from megatron.core import mpu

from slime.accelerator import get_accelerator
from slime.data.batch import RolloutBatch, Stage
from slime.data.build import column_dtype
from slime.data.context_parallel import plan_response_layout
from slime.data.fields import CONTRACT, Extent, FieldSpec, Scope
from slime.data.ragged import Ragged, UngatheredColumn, num_entries
from slime.data.rows import RowLayout, RowShape, plan_row_indices, plan_rows
from slime.exceptions import RolloutDataError
from slime.metrics.train_metrics import (  # noqa: F401  upstream imports them from here
    gather_log_data,
    log_consistency,
    log_multi_turn_data,
    log_passrate,
    log_perf_data,
    log_rollout_data,
)
from slime.typing import Array

# --- to the device --------------------------------------------------------------------------------


def to_train_device(
    batch: RolloutBatch, device: torch.device | str | int, *, cp_rank: int = 0, cp_size: int = 1
) -> RolloutBatch:
    """This rank's batch with the fields that the contract sends to the device there, in the model's
    dtypes, one copy per field.

    Fields that are sharded over context-parallel ranks are cut to this rank's response tokens.
    Nothing aliases the object store afterwards.
    """
    device = torch.device(device)
    moved = batch.copy()
    layout = None
    if cp_size > 1:
        layout = plan_response_layout(
            batch.array("total_lengths"),
            batch.array("response_lengths"),
            cp_size=cp_size,
            cp_rank=cp_rank,
        )
    for name in list(dict.keys(batch)):
        spec = CONTRACT.find(name)
        if spec is None or not spec.to_device or not spec.shipped:
            continue
        if spec.scope is Scope.SAMPLE:
            moved[name] = _sample_field_to_device(batch, spec, device)
            continue
        column = _as_ragged(batch, spec)
        if layout is not None and spec.cp_sharded:
            values = _copy_to(column.dense_values(), spec.device_dtype, device)
            values = values.index_select(0, layout.response_indices.to(device))
            lengths = np.asarray(layout.local_lengths, dtype=np.int64)
            moved[name] = Ragged(values, np.concatenate(([0], np.cumsum(lengths))))
        else:
            values = _copy_to(column.values, spec.device_dtype, device)
            moved[name] = Ragged(
                values, column.offsets, None if column.is_dense else column.lengths
            )
    return moved


def _as_ragged(batch: RolloutBatch, spec: FieldSpec) -> Ragged:
    column = batch.column(spec.name)
    if isinstance(column, UngatheredColumn):
        return column.gather(range(len(column)), dtype=column_dtype(spec, column))
    return cast(Ragged, column)


def _copy_to(values: Array, dtype: str | None, device: torch.device) -> torch.Tensor:
    """A tensor on `device` that shares no memory with `values` (numpy, perhaps read-only, or
    torch).
    """
    if isinstance(values, torch.Tensor):
        return values.to(device=device, dtype=getattr(torch, dtype) if dtype else None, copy=True)
    if device.type == "cpu":
        return torch.from_numpy(values.astype(dtype or values.dtype, copy=True))
    with warnings.catch_warnings():
        # read-only memory: it is only read, and the device gets its own
        warnings.simplefilter("ignore")
        tensor = torch.from_numpy(values)
    return tensor.to(device).to(getattr(torch, dtype) if dtype else tensor.dtype)


def _sample_field_to_device(batch: RolloutBatch, spec: FieldSpec, device: torch.device) -> Any:
    if spec.wire_dtype is not None:
        value = batch.raw(spec.name)
        return (
            value.to(device)
            if isinstance(value, torch.Tensor)
            else _copy_to(batch.array(spec.name), spec.device_dtype or spec.wire_dtype, device)
        )
    return [_move_media(entry, device) for entry in batch[spec.name]]


def _move_media(entry: object, device: torch.device) -> Any:
    """A sample's multimodal inputs with arrays and tensors on the device; other values pass."""
    if not isinstance(entry, Mapping):
        return entry
    moved = {}
    for key, value in entry.items():
        value = torch.from_numpy(value.copy()) if isinstance(value, np.ndarray) else value
        moved[key] = value.to(device) if isinstance(value, torch.Tensor) else value
    return moved


def tensors_to_cpu(tensors: list | None) -> list | None:
    """The tensors on the CPU; None entries, and None itself, pass."""
    return None if tensors is None else [None if t is None else t.detach().cpu() for t in tensors]


def tensors_to_gpu(
    tensors: list | None, device: torch.device | str | int | None = None
) -> list | None:
    """The entries (tensors or lists) as float32 on `device` (default: this process's accelerator);
    None entries, and None itself, pass.
    """
    if tensors is None:
        return None
    if device is None:
        device = get_accelerator().device()
    return [
        None if t is None else torch.as_tensor(t, dtype=torch.float32).to(device) for t in tensors
    ]


# --- micro-batches --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class PackedRows:
    """All rows of a rank for one `RowShape`: `tokens` and `loss_masks` [all rows], and where each
    row is.
    """

    tokens: torch.Tensor
    loss_masks: torch.Tensor
    cu_seqlens: torch.Tensor
    bounds: list[
        tuple[int, int, int, int, int]
    ]  # per micro-batch: its row, its slice of cu_seqlens, its longest sequence

    def row(self, index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
        """Views for micro-batch `index`: tokens [1, T], loss masks [1, T], sequence bounds, and the
        longest sequence.
        """
        low, high, first, last, longest = self.bounds[index]
        return (
            self.tokens[None, low:high],
            self.loss_masks[None, low:high],
            self.cu_seqlens[first:last],
            longest,
        )


def pack_rows(
    batch: Mapping[str, Any], micro_batches: Sequence[Sequence[int]], *, shape: RowShape
) -> PackedRows:
    """Lays out all samples of `batch` (a local `RolloutBatch`, or a dict of lists) in rows. What
    arrived laid out so is not copied.
    """
    layout = plan_rows(batch["total_lengths"], micro_batches, shape=shape)
    tokens, masks = (_laid_out(batch, name, layout, shape) for name in ("tokens", "loss_masks"))
    if tokens is None or masks is None:
        indices = plan_row_indices(
            batch["total_lengths"], batch["response_lengths"], layout, shape=shape
        )
        size = int(layout.row_offsets[-1])
        tokens = _place(_dense(batch, "tokens"), size, indices.places, indices.sources)
        if "loss_masks" in batch:
            masks = _place(
                _dense(batch, "loss_masks"), size, indices.mask_places, indices.mask_sources
            )
        else:
            masks = torch.zeros(size, dtype=torch.int32, device=tokens.device)
            masks[_index(indices.mask_places, masks)] = 1
    rows, cu = layout.row_offsets.tolist(), layout.cu_offsets.tolist()
    bounds = list(zip(rows[:-1], rows[1:], cu[:-1], cu[1:], layout.max_seqlens, strict=True))
    return PackedRows(tokens, masks, torch.from_numpy(layout.cu_seqlens).to(tokens.device), bounds)


def _place(dense: torch.Tensor, size: int, places: np.ndarray, sources: np.ndarray) -> torch.Tensor:
    rows = dense.new_zeros(size)
    rows[_index(places, dense)] = dense[_index(sources, dense)]
    return rows


def _index(positions: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(positions).to(like.device)


def _dense(batch: Mapping[str, Any], name: str) -> torch.Tensor:
    """The concatenation of the entries."""
    if isinstance(batch, RolloutBatch):
        values = _as_ragged(batch, CONTRACT[name]).dense_values()
        return (
            values
            if isinstance(values, torch.Tensor)
            else _copy_to(values, CONTRACT[name].device_dtype, torch.device("cpu"))
        )
    entries = [torch.as_tensor(entry) for entry in batch[name]]
    return torch.cat(entries) if entries else torch.zeros(0, dtype=torch.int64)


def _laid_out(
    batch: Mapping[str, Any], name: str, layout: RowLayout, shape: RowShape
) -> torch.Tensor | None:
    """The field's own buffer where the split already padded it to exactly these rows."""
    if not isinstance(batch, RolloutBatch) or shape.cp_size > 1 or name not in batch:
        return None
    column = batch.column(name)
    if (
        not isinstance(column, Ragged)
        or not isinstance(column.values, torch.Tensor)
        or len(column.values) != layout.row_offsets[-1]
    ):
        return None
    starts = layout.starts
    if name == "loss_masks":
        starts = starts + batch.array("total_lengths") - batch.array("response_lengths") - 1
    return column.values if np.array_equal(column.offsets[:-1], starts) else None


class DataIterator:
    """Walks over a rank's micro-batches, in order, over all steps. `micro_batch_indices`: local
    positions per micro-batch.
    """

    def __init__(
        self, rollout_data: Mapping[str, Any], micro_batch_indices: Sequence[Sequence[int]]
    ) -> None:
        self.rollout_data = rollout_data
        self.micro_batch_indices = micro_batch_indices
        self.offset = 0
        self._num_samples = sum(map(len, micro_batch_indices))
        self._local: set[str] = set()  # fields known to have an entry per sample of this rank
        self._rows: dict[RowShape, tuple[_Stamp, Any, PackedRows]] = {}

    def reset(self) -> DataIterator:
        """Back to the first micro-batch."""
        self.offset = 0
        return self

    def get_next(self, keys: Sequence[str] | None) -> dict[str, Any]:
        """The next micro-batch: for each key the entries of its samples, None where the batch lacks
        the field. `keys` None: every local field; what a hook added without a declaration is one if
        it is a list (tensor, array) with an entry per sample.

        IndexError past the last micro-batch; `RolloutDataError` for a field that is not about this
        rank's samples.
        """
        if self.offset >= len(self.micro_batch_indices):
            raise IndexError(
                f"all {len(self.micro_batch_indices)} micro-batches of this rollout batch were "
                "taken; call reset()"
            )
        indices = self.micro_batch_indices[self.offset]
        self.offset += 1
        if keys is None:
            keys = [
                name
                for name in dict.keys(cast(dict, self.rollout_data))
                if is_local_field(self.rollout_data, name)
            ]
            keys = [
                name
                for name in keys
                if name in CONTRACT or num_entries(self.rollout_data[name]) == self._num_samples
            ]
        return {key: self._take(key, indices) for key in keys}

    def _take(self, key: str, indices: Sequence[int]) -> Any:
        values = self.rollout_data.get(key)
        if values is None:
            return None
        if key not in self._local:
            if not is_local_field(self.rollout_data, key):
                raise RolloutDataError(
                    f"{key!r} is not a list over this rank's samples, so it has no part in a "
                    "micro-batch."
                )
            if num_entries(values) != self._num_samples:
                count = (
                    repr(values)[:40] if num_entries(values) is None else f"{len(values)} entries"
                )
                raise RolloutDataError(
                    f"{key!r} has {count} for the {self._num_samples} samples of this rank."
                )
            self._local.add(key)
        if not len(indices):
            return values[:0]
        low, high = indices[0], indices[-1] + 1
        if high - low == len(indices):
            return values[low:high]
        return (
            values[list(indices)]
            if isinstance(values, torch.Tensor)
            else [values[i] for i in indices]
        )

    def packed_rows(self, shape: RowShape) -> PackedRows:
        """The rows of all micro-batches, laid out once per shape and batch (the virtual pipeline
        stages share them).
        """
        batch = self.rollout_data
        cache: dict[Any, Any] = batch.cache if isinstance(batch, RolloutBatch) else self._rows
        known = cache.get(shape)
        # a hook may have edited the fields since: looked at when a walk begins
        if (
            known is not None
            and known[1] is self.micro_batch_indices
            and (self.offset > 0 or known[0] == _Stamp.of(batch))
        ):
            return known[2]
        rows = pack_rows(batch, self.micro_batch_indices, shape=shape)
        cache[shape] = (_Stamp.of(batch), self.micro_batch_indices, rows)
        return rows


@dataclasses.dataclass(frozen=True)
class _Stamp:
    """Unequal to another when tokens or loss masks were replaced or edited in between, entries and
    contents included.
    """

    versions: tuple[tuple[int, int | None], ...]
    # kept, as another buffer may get the id of one that is gone
    buffers: list[Any] = dataclasses.field(compare=False)

    @staticmethod
    def of(batch: Mapping[str, Any]) -> _Stamp:
        buffers = [
            buffer
            for name in ("tokens", "loss_masks")
            if name in batch
            for buffer in _buffers_of(batch, name)
        ]
        return _Stamp(
            tuple(
                (id(buffer), buffer._version if isinstance(buffer, torch.Tensor) else None)
                for buffer in buffers
            ),
            buffers,
        )


def _buffers_of(batch: Mapping[str, Any], name: str) -> list[Any]:
    if not isinstance(batch, RolloutBatch):
        return list(batch[name])
    column = batch.column(name)
    return [column.values] if isinstance(column, Ragged) else cast(UngatheredColumn, column).parts


def is_local_field(batch: Mapping[str, Any], name: str) -> bool:
    """Whether `batch[name]` is a list over this rank's samples."""
    spec = CONTRACT.find(name)
    if spec is None:
        return True
    if not spec.per_sample:
        return False
    whole = (
        batch.extent_of(name) is Extent.WHOLE
        if isinstance(batch, RolloutBatch) and batch.stage is not Stage.WHOLE
        else spec.extent is Extent.WHOLE
    )
    return not whole


def get_data_iterator(rollout_data: Mapping[str, Any]) -> list[DataIterator]:
    """One iterator per virtual pipeline stage of this rank, all over the same micro-batches."""
    stages = mpu.get_virtual_pipeline_model_parallel_world_size() or 1
    indices = rollout_data["micro_batch_indices"]
    return [DataIterator(rollout_data, indices) for _ in range(stages)]


def get_batch(
    data_iterator: DataIterator,
    keys: Sequence[str] | None,
    pad_multiplier: int = 128,
    allgather_cp: bool = False,
) -> dict[str, Any]:
    """The next micro-batch, ready for the model: the entries of `keys` (None: all) and

    tokens [1, T] (this context-parallel rank's, padded with 0 to a multiple of tp_size *
    pad_multiplier), unconcat_tokens (full, per sample), packed_seq_params (THD; bounds over all
    context-parallel ranks, padding as a last sequence), full_loss_masks [1, T] aligned to the
    logits that predict, and multimodal_train_inputs concatenated by key.
    """
    assert keys is None or "tokens" in keys, (
        f"a micro-batch needs 'tokens'; the keys are {list(keys)}"
    )
    cp_size = max(1, mpu.get_context_parallel_world_size())
    shape = RowShape(
        pad_to=max(1, mpu.get_tensor_model_parallel_world_size()) * pad_multiplier,
        cp_size=cp_size,
        cp_rank=mpu.get_context_parallel_rank() if cp_size > 1 else 0,
        contiguous=allgather_cp,
    )
    rows, index = data_iterator.packed_rows(shape), data_iterator.offset
    batch = data_iterator.get_next(keys)
    tokens, loss_masks, bounds, longest = rows.row(index)
    batch["unconcat_tokens"] = batch["tokens"]
    batch["tokens"] = tokens
    batch["full_loss_masks"] = loss_masks
    batch["packed_seq_params"] = _packed_seq_params(bounds, longest)
    if batch.get("multimodal_train_inputs") is not None:
        batch["multimodal_train_inputs"] = concatenate_media(batch["multimodal_train_inputs"])
    return batch


def _packed_seq_params(bounds: torch.Tensor, longest: int) -> Any:
    from megatron.core.packed_seq_params import PackedSeqParams

    # the longest sequence, never the row: Megatron would take an equal value for "one sequence" and
    # let positions run on
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def concatenate_media(entries: Sequence[Mapping[str, Any] | None]) -> dict[str, Any] | None:
    """The samples' multimodal inputs with tensors concatenated along their first dimension, by key;
    None where no sample has any.
    """
    present = [entry for entry in entries if entry]
    if not present:
        return None
    names = list(dict.fromkeys(name for entry in present for name in entry))
    merged: dict[str, Any] = {}
    for name in names:
        values = [entry[name] for entry in present if entry.get(name) is not None]
        merged[name] = (
            torch.cat(values)
            if values and all(isinstance(v, torch.Tensor) for v in values)
            else values
        )
    return merged
