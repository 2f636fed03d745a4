"""Optimizer state as flat pieces of whole parameters, in safetensors files that any layout can
read.

Megatron's plain optimizers keep a state tensor per parameter shard, its distributed optimizer one
per range of a shard's flat elements. Both are written as pieces (parameter, tensor-parallel shard,
start, end), so that a run may resume with another tensor, pipeline, expert or data-parallel size,
and with the distributed optimizer on or off.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from safetensors import safe_open
from safetensors.torch import save_file

from slime.backends.megatron_utils.agreement import agreed, gathered
from slime.backends.megatron_utils.local_params import LocalParameter, local_parameters
from slime.backends.megatron_utils.sharding import shard, unshard
from slime.exceptions import ConfigError

if TYPE_CHECKING:
    from megatron.core.optimizer import MegatronOptimizer

INDEX = "optimizer_index.json"
_MOMENTS = frozenset({"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer"})
_MAIN_PARAM = "main_param"


@dataclasses.dataclass(frozen=True)
class _Slot:
    """Where the state of one range of one local parameter lives in an optimizer."""

    local: LocalParameter
    start: int
    end: int
    main_param: torch.Tensor  # what the inner optimizer updates, flat or not
    inner: Any  # the torch (or Transformer Engine) optimizer


def save_optimizer_state(
    folder: str | Path, model: Sequence[torch.nn.Module], optimizer: MegatronOptimizer
) -> None:
    """Writes this rank's pieces and, on rank 0, the index. Called by all ranks together; equal
    pieces are written once. Raises `RanksFailed` on all ranks where one cannot write.
    """
    rank = dist.get_rank()
    slots = agreed(lambda: list(_slots(model, optimizer)))
    mine = [(slot.local.name, slot.local.parallel_rank, slot.start, slot.end) for slot in slots]
    owner: dict[tuple, int] = {}
    for other, pieces in enumerate(gathered(lambda: mine)):
        for piece in pieces:
            owner.setdefault(piece, other)
    own = [(slot, piece) for slot, piece in zip(slots, mine, strict=True) if owner[piece] == rank]
    step = max((_step_of(slot) for slot in slots), default=0)
    written = gathered(lambda: (*_write_pieces(Path(folder), rank, own), step))

    def write_index() -> None:
        index = {
            "step": max(entry[2] for entry in written),
            "kinds": sorted({kind for entry in written for kind in entry[1]}),
            "params": _merge([entry[0] for entry in written]),
            "grad_scalers": [_scaler_state(part) for part in _parts(optimizer)],
        }
        (Path(folder) / INDEX).write_text(json.dumps(index))

    agreed(lambda: write_index() if rank == 0 else None)


def _write_pieces(
    folder: Path, rank: int, own: Sequence[tuple[_Slot, tuple[str, int, int, int]]]
) -> tuple[dict[str, Any], list[str]]:
    """Writes this rank's file; returns its part of the index, and the kinds of state in it."""
    tensors: dict[str, torch.Tensor] = {}
    described: dict[str, Any] = {}
    for slot, piece in own:
        for kind, tensor in _state_tensors(slot).items():
            tensors[_key(kind, *piece[:3])] = tensor.detach().reshape(-1).cpu().contiguous()
        entry = described.setdefault(slot.local.name, _describe(slot.local))
        entry["pieces"].append([piece[1], piece[2], piece[3], _file_name(rank)])
    save_file(tensors, str(folder / _file_name(rank)))
    return described, sorted({key.split("|")[0] for key in tensors})


@torch.no_grad()
def load_optimizer_state(
    folder: str | Path, model: Sequence[torch.nn.Module], optimizer: MegatronOptimizer
) -> None:
    """Fills this rank's optimizer state. Raises `ConfigError` where the checkpoint has no state for
    a parameter that is trained.
    """
    path = Path(folder) / INDEX
    if not path.exists():
        raise ConfigError(
            f"{folder} holds no optimizer state. Resume with --no-load-optim, or from a checkpoint "
            "saved with it."
        )
    index = json.loads(path.read_text())
    reader = _Reader(Path(folder), index["params"])
    kinds = [kind for kind in index["kinds"] if kind != _MAIN_PARAM]
    for slot in _slots(model, optimizer):
        if _keeps_main_param(slot):
            kind = _MAIN_PARAM if _MAIN_PARAM in index["kinds"] else None
            if kind is not None:
                slot.main_param.copy_(reader.piece(kind, slot).view(slot.main_param.shape))
        if not kinds:
            continue
        state = {
            kind: reader.piece(kind, slot).view(slot.main_param.shape).to(slot.main_param.device)
            for kind in kinds
        }
        if _step_is_per_tensor(slot.inner):
            state["step"] = torch.tensor(float(index["step"]), dtype=torch.float32)
        slot.inner.state[slot.main_param] = state
    for part, scaler in zip(_parts(optimizer), index["grad_scalers"], strict=False):
        if not _step_is_per_tensor(part.optimizer):
            for group in part.optimizer.param_groups:
                group["step"] = int(index["step"])
        if scaler is not None and part.grad_scaler is not None:
            part.grad_scaler.load_state_dict(
                {
                    key: torch.tensor([value]) if key == "scale" else value
                    for key, value in scaler.items()
                }
            )


class _Reader:
    """Pieces of whole parameters from the files of a checkpoint, put together for any cut."""

    def __init__(self, folder: Path, params: Mapping[str, Any]) -> None:
        self._folder, self._params = folder, params
        self._open: dict[str, Any] = {}

    def piece(self, kind: str, slot: _Slot) -> torch.Tensor:
        """Flat `[end - start]` state of the slot."""
        local = slot.local
        entry = self._params.get(local.name)
        if entry is None:
            raise ConfigError(
                f"The checkpoint {self._folder} has no optimizer state for {local.name}. Resume "
                "with --no-load-optim."
            )
        same_cut = (entry["num_shards"], entry["shape"]) == (
            local.parallel_size,
            list(local.parameter.shape),
        )
        if same_cut:
            return self._shard(kind, local.name, local.parallel_rank, slot.start, slot.end)
        count = torch.Size(entry["shape"]).numel()
        shards = [
            self._shard(kind, local.name, index, 0, count).view(entry["shape"])
            for index in range(entry["num_shards"])
        ]
        whole = unshard(local.name, shards, dim=entry["dim"], stride=entry["stride"])
        if local.is_vocab:
            whole = _resize_rows(whole, local.parameter.shape[0] * local.parallel_size)
        if local.is_sharded:
            whole = shard(
                local.name,
                whole,
                size=local.parallel_size,
                rank=local.parallel_rank,
                dim=local.partition_dim,
                stride=local.partition_stride,
            )
        if whole.shape != local.parameter.shape:
            raise ConfigError(
                f"{local.name} is {list(local.parameter.shape)} here, its optimizer state "
                f"{list(whole.shape)}."
            )
        return whole.reshape(-1)[slot.start : slot.end]

    def _shard(self, kind: str, name: str, index: int, start: int, end: int) -> torch.Tensor:
        """Flat elements [start, end) of one stored shard."""
        parts, at = [], start
        for piece_shard, low, high, file in sorted(self._params[name]["pieces"]):
            if piece_shard != index or high <= at or low >= end:
                continue
            stored = self._handle(file).get_slice(_key(kind, name, index, low))
            parts.append(stored[at - low : min(end, high) - low])
            at = min(end, high)
        if at != end:
            raise ConfigError(
                f"The optimizer state of {name} in {self._folder} is not complete: element {at} of "
                f"{end} is in no file."
            )
        # a copy in any case: a tensor over the file's memory could not be emptied (--offload-train)
        return torch.cat(parts)

    def _handle(self, file: str) -> Any:
        if file not in self._open:
            self._open[file] = safe_open(str(self._folder / file), framework="pt", device="cpu")
        return self._open[file]


def reset_optimizer_states(optimizer: MegatronOptimizer) -> None:
    """Zeroes moments and step counts, so that the next step is the first one of a new optimizer.
    Main weights stay.
    """
    for part in _parts(optimizer):
        for state in part.optimizer.state.values():
            for name in _MOMENTS & state.keys():
                state[name] = state[name].zero_() if isinstance(state[name], torch.Tensor) else 0
        for group in part.optimizer.param_groups:  # fused optimizers count steps per group
            if "step" in group:
                group["step"] = (
                    group["step"].zero_() if isinstance(group["step"], torch.Tensor) else 0
                )


def _parts(optimizer: MegatronOptimizer) -> list[Any]:
    """The Megatron optimizers inside a chained one that have parameters."""
    parts = (
        optimizer.chained_optimizers if hasattr(optimizer, "chained_optimizers") else [optimizer]
    )
    return [part for part in parts if not part.is_stub_optimizer]


def _slots(model: Sequence[torch.nn.Module], optimizer: MegatronOptimizer) -> Iterator[_Slot]:
    locals_by_id = {id(local.parameter): local for local in local_parameters(model)}
    for part in _parts(optimizer):
        if isinstance(part, DistributedOptimizer):
            for parameter, (group, order) in part.model_param_group_index_map.items():
                span = part._get_model_param_range_map(parameter)["param"]
                main = part.optimizer.param_groups[group]["params"][order]
                yield _Slot(locals_by_id[id(parameter)], span.start, span.end, main, part.optimizer)
            continue
        main_to_model = _model_params_by_main(part)
        for group in part.optimizer.param_groups:
            for main in group["params"]:
                local = locals_by_id[id(main_to_model.get(id(main), main))]
                yield _Slot(local, 0, local.parameter.numel(), main, part.optimizer)


def _model_params_by_main(part: MegatronOptimizer) -> dict[int, torch.Tensor]:
    """id(fp32 main parameter) -> low-precision model parameter, for Megatron's 16-bit optimizer."""
    pairs = zip(
        getattr(part, "fp32_from_float16_groups", []),
        getattr(part, "float16_groups", []),
        strict=True,
    )
    return {
        id(main): model
        for mains, models in pairs
        for main, model in zip(mains, models, strict=True)
    }


def _keeps_main_param(slot: _Slot) -> bool:
    """A float32 parameter is its own main parameter, and in the model's part of the checkpoint."""
    return slot.local.parameter.dtype != torch.float32


def _state_tensors(slot: _Slot) -> dict[str, torch.Tensor]:
    state = slot.inner.state.get(slot.main_param, {})
    count = slot.end - slot.start
    tensors = {
        kind: value
        for kind, value in state.items()
        if kind != "step" and isinstance(value, torch.Tensor) and value.numel() == count
    }
    if _keeps_main_param(slot):
        tensors[_MAIN_PARAM] = slot.main_param
    return tensors


def _step_of(slot: _Slot) -> int:
    state = slot.inner.state.get(slot.main_param, {})
    if "step" in state:
        return int(state["step"])
    return max(int(group.get("step", 0)) for group in slot.inner.param_groups)


def _step_is_per_tensor(inner: torch.optim.Optimizer) -> bool:
    """torch's Adam counts steps per tensor, Apex's and Transformer Engine's per group; SGD does not
    count.
    """
    return isinstance(inner, torch.optim.Adam | torch.optim.AdamW)


def _scaler_state(part: MegatronOptimizer) -> dict[str, float] | None:
    scaler = getattr(part, "grad_scaler", None)
    if scaler is None:
        return None
    return {key: float(value) for key, value in scaler.state_dict().items()}


def _describe(local: LocalParameter) -> dict[str, Any]:
    return {
        "shape": list(local.parameter.shape),
        "num_shards": local.parallel_size,
        "dim": local.partition_dim,
        "stride": local.partition_stride,
        "pieces": [],
    }


def _merge(described: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for params in described:
        for name, entry in params.items():
            merged.setdefault(name, {**entry, "pieces": []})["pieces"] += entry["pieces"]
    return merged


def _resize_rows(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    if rows <= tensor.shape[0]:
        return tensor[:rows]
    return torch.cat((tensor, tensor.new_zeros(rows - tensor.shape[0], *tensor.shape[1:])))


def _key(kind: str, name: str, index: int, start: int) -> str:
    return f"{kind}|{name}|{index}|{start}"


def _file_name(rank: int) -> str:
    return f"optimizer_{rank:05d}.safetensors"
