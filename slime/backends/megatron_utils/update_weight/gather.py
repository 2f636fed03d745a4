"""All weights of the model as Hugging Face tensors on one rank, bucket by bucket, from any parallel
layout.

Every shard of a parameter is held by one or more ranks; the lowest of them sends it to the main
rank, straight and once. So one plan covers tensor, pipeline and expert parallelism, and no rank but
the main one ever holds more than its own shards.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from slime.backends.megatron_utils.initialize import is_megatron_main_rank
from slime.backends.megatron_utils.local_params import LocalParameter, local_parameters
from slime.backends.megatron_utils.sharding import unshard
from slime.models.param_mapping import WeightSizes, match, split
from slime.models.shape import ModelShape

NamedTensors = list[tuple[str, torch.Tensor]]


@dataclasses.dataclass(frozen=True)
class _Held:
    """What one rank sends to the others about one of its parameters."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    shard: int
    num_shards: int
    dim: int
    stride: int

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class _Transfer:
    """One whole parameter: which rank sends which shard. Equal on all ranks."""

    name: str
    owners: tuple[int, ...]  # by shard
    held: tuple[_Held, ...]  # by shard

    @property
    def num_bytes(self) -> int:
        return sum(shard.num_bytes for shard in self.held)


class HfWeightExporter:
    """The plan of one model's export. Made by all ranks together; its layout must not change
    afterwards.
    """

    def __init__(
        self, args: argparse.Namespace, model: Sequence[torch.nn.Module], shape: ModelShape
    ) -> None:
        self._family = shape.model_type
        self._sizes = WeightSizes.of(shape)
        self._local = {
            local.name: local for local in local_parameters(model) if not local.is_value_head
        }
        if not args.untie_embeddings_and_output_weights:
            # The last stage's copy of the embedding.
            self._local.pop("output_layer.weight", None)
        self._rank = dist.get_rank()
        mine = (is_megatron_main_rank(), [_describe(local) for local in self._local.values()])
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        self.main_rank = next(rank for rank, (is_main, _) in enumerate(everyone) if is_main)
        self._transfers = self._plan([held for _, held in everyone])

    def buckets(self, buffer_size: int) -> Iterator[NamedTensors]:
        """Yields equally often on all ranks: on the main rank [(Hugging Face name, CPU tensor)],
        elsewhere an empty list.

        A bucket ends with the parameter that fills `buffer_size` bytes. All ranks must exhaust the
        iterator together.
        """
        for bucket in _cut(self._transfers, buffer_size):
            yield self._gather(bucket)

    def _plan(self, held_by_rank: list[list[_Held]]) -> list[_Transfer]:
        by_name: dict[str, dict[int, tuple[int, _Held]]] = {}
        for rank, held_list in enumerate(held_by_rank):
            for held in held_list:
                by_name.setdefault(held.name, {}).setdefault(held.shard, (rank, held))
        transfers = []
        for name in sorted(by_name, key=lambda name: match(self._family, name).order):
            shards = by_name[name]
            parts = [shards[index] for index in range(next(iter(shards.values()))[1].num_shards)]
            transfers.append(
                _Transfer(name, tuple(rank for rank, _ in parts), tuple(held for _, held in parts))
            )
        return transfers

    @torch.no_grad()
    def _gather(self, bucket: Sequence[_Transfer]) -> NamedTensors:
        pieces_of: dict[int, list[_Held]] = {}
        for transfer in bucket:
            for owner, held in zip(transfer.owners, transfer.held, strict=True):
                pieces_of.setdefault(owner, []).append(held)
        if self._rank != self.main_rank:
            mine = pieces_of.get(self._rank)
            if mine:
                flat = torch.cat([_as_bytes(self._local[held.name].parameter) for held in mine])
                dist.send(flat, self.main_rank)
            return []
        received: dict[tuple[str, int], torch.Tensor] = {}
        for owner in sorted(pieces_of):
            if owner == self._rank:
                for held in pieces_of[owner]:
                    received[held.name, held.shard] = (
                        self._local[held.name].parameter.detach().cpu()
                    )
                continue
            device = next(iter(self._local.values())).parameter.device
            flat = torch.empty(
                sum(held.num_bytes for held in pieces_of[owner]), dtype=torch.uint8, device=device
            )
            dist.recv(flat, owner)
            parts = flat.cpu().split([held.num_bytes for held in pieces_of[owner]])
            for held, part in zip(pieces_of[owner], parts, strict=True):
                received[held.name, held.shard] = _from_bytes(part, held)
        named: NamedTensors = []
        for transfer in bucket:
            shards = [received.pop((transfer.name, index)) for index in range(len(transfer.held))]
            whole = unshard(
                transfer.name, shards, dim=transfer.held[0].dim, stride=transfer.held[0].stride
            )
            found = match(self._family, transfer.name)
            # A copy: the receiver may keep it while training changes the parameter in place.
            tensors = [
                part.clone(memory_format=torch.contiguous_format)
                for part in split(found.rule, whole, self._sizes)
            ]
            named += zip(found.hf_names, tensors, strict=True)
        return named


def iter_hf_weight_buckets(
    args: argparse.Namespace,
    model: Sequence[torch.nn.Module],
    shape: ModelShape,
    *,
    buffer_size: int | None = None,
) -> Iterator[NamedTensors]:
    """Yields the model's weights as lists of (Hugging Face name, CPU tensor), of about
    `args.update_weight_buffer_size` bytes each.

    All ranks must iterate to the end, together; only the main rank (`is_megatron_main_rank`) gets
    tensors, the others get as many empty lists. The order and the cuts do not depend on the
    parallel layout. Tensors are in the parameters' dtype.
    """
    exporter = model[0].__dict__.get("_hf_weight_exporter")
    if exporter is None:
        exporter = HfWeightExporter(args, model, shape)
        # Not a submodule; kept on the model because the plan holds for exactly as long.
        model[0].__dict__["_hf_weight_exporter"] = exporter
    yield from exporter.buckets(
        args.update_weight_buffer_size if buffer_size is None else buffer_size
    )


def _describe(local: LocalParameter) -> _Held:
    return _Held(
        name=local.name,
        shape=tuple(local.parameter.shape),
        dtype=local.parameter.dtype,
        shard=local.parallel_rank,
        num_shards=local.parallel_size,
        dim=local.partition_dim,
        stride=local.partition_stride,
    )


def _cut(transfers: Sequence[_Transfer], buffer_size: int) -> Iterator[list[_Transfer]]:
    bucket: list[_Transfer] = []
    filled = 0
    for transfer in transfers:
        bucket.append(transfer)
        filled += transfer.num_bytes
        if filled >= buffer_size:
            yield bucket
            bucket, filled = [], 0
    if bucket:
        yield bucket


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _from_bytes(flat: torch.Tensor, held: _Held) -> torch.Tensor:
    # A slice of the message may start at any byte; a dtype view needs an aligned start.
    return flat.clone().view(held.dtype).view(held.shape)
