"""What the training ranks record of a rollout: per-token fields in whole-batch order, the numbers
of each step, digests of the weights, and on request the weights themselves.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from slime.backends.megatron_utils.agreement import RanksFailed, agreed, gathered
from slime.backends.megatron_utils.initialize import is_megatron_main_rank
from slime.exceptions import SlimeError
from slime.files.jsonl import encode as encode_record
from slime.files.train_dump_utils import gather_train_data
from slime.files.train_record import TensorOutline
from slime.files.train_table import TensorCollector
from slime.recording.manifest import (
    CRITIC,
    CRITIC_WEIGHTS_FOLDER,
    TRAIN,
    WEIGHTS_FOLDER,
    rollout_folder,
)
from slime.recording.writer import FAILURES, PartWriter, lines_part, table_part, writer_of
from slime.tracking.spans import spanned
from slime.tracking.tracking import collected_metrics

T = TypeVar("T")
logger = logging.getLogger(__name__)
_DIGEST_ROWS = 1 << 22  # numbers that are widened at a time


class TrainRecorder:
    """One rank's share of the recording. The main rank writes. Every rank takes part in what is
    collective, whatever failed on it: the failure is kept until the next exchange between all
    ranks, which ends the recording on all of them at the same place.
    """

    def __init__(self, args: argparse.Namespace, role: str) -> None:
        self.root, self.every = Path(args.record), args.record_every
        self.with_weights = args.record_weights
        self._is_policy = role == "actor"
        self._writer: PartWriter | None = None
        if is_megatron_main_rank():
            self._writer = writer_of(args, TRAIN if self._is_policy else CRITIC)
        self._digests: list[dict[str, str]] | None = None  # after the last recorded rollout
        self._failure: Exception | None = None  # of this rank, not yet known to the others
        self._has_ended = False  # the same on all ranks

    @contextlib.contextmanager
    def rollout(
        self,
        rollout_id: int,
        model: Sequence[torch.nn.Module],
        save: Callable[[str], Any],
    ) -> Iterator[None]:
        """Records the rollout that is trained inside. `save(folder)` writes a checkpoint there,
        called by all ranks.
        """
        if rollout_id % self.every or self._has_ended:
            self._digests = None
            yield
            return
        if self._writer is not None:
            self._writer.begin(rollout_id)
        before: list[dict[str, str]] = []
        if self._is_policy:
            before = self._digests or self._from_all(lambda: digests_of(_named(model)))
        if self.with_weights and not self._has_ended:
            self._save_weights(rollout_id, save)
        with collected_metrics() as metrics:
            yield
        after: list[dict[str, str]] = []
        if self._is_policy and not self._has_ended:
            self._digests = after = self._from_all(lambda: digests_of(_named(model)))
        if self._writer is not None:
            self._finish(metrics, before, after)

    @spanned("record")
    def fields(self, rollout_id: int, rollout_data: Mapping[str, Any]) -> None:
        """Gathers what training computed per token and sample, and queues it. Called by all ranks
        of the policy, inside `rollout`.
        """
        if rollout_id % self.every or self._has_ended:
            return
        try:
            self._gather_fields(rollout_id, rollout_data)
        except FAILURES as error:
            self._failure = error

    def _gather_fields(self, rollout_id: int, rollout_data: Mapping[str, Any]) -> None:
        collectors: list[TensorCollector] = []

        def collect(
            path: Path, header: Mapping[str, Any], outlines: Sequence[TensorOutline]
        ) -> TensorCollector:
            collectors.append(TensorCollector(path, header, outlines))
            return collectors[-1]

        gather_train_data(
            lambda rank: self.root, rollout_data, rollout_id=rollout_id, open_writer=collect
        )
        if self._writer is None or not collectors:
            return
        collector = collectors[0]

        def write(path: Path) -> int | None:
            return table_part(collector.table())(path)

        shares = {
            f"dp {rank}": len(shard["partition"])
            for rank, shard in enumerate(collector.header["dp_shards"])
        }
        self._writer.add("train", write, shares=shares, cp_size=collector.header.get("cp_size"))

    def close(self, timeout_s: float | None = None) -> None:
        """Waits for what is being written."""
        if self._writer is not None:
            self._writer.close(timeout_s)

    def _from_all(self, action: Callable[[], T]) -> list[T]:
        """Every rank's result, by rank. Where it, or anything since the exchange before, failed on
        some rank, the recording ends on all of them, with a warning of the main rank, and the
        result is [].
        """

        def attempt() -> T:
            if self._failure is not None:
                raise self._failure
            return action()

        try:
            return gathered(attempt)
        except RanksFailed as error:
            self._has_ended = True
            if self._writer is not None:
                self._writer.stop(error)
            return []

    def _save_weights(self, rollout_id: int, save: Callable[[str], Any]) -> None:
        """All ranks see the same outcome of a checkpoint."""
        name = WEIGHTS_FOLDER if self._is_policy else CRITIC_WEIGHTS_FOLDER
        folder = str(rollout_folder(self.root, rollout_id) / name)
        try:
            agreed(lambda: save(folder))
        except SlimeError as error:
            self.with_weights = False
            if self._writer is not None:
                logger.warning("weights are no longer recorded: %s", error)

    def _finish(
        self,
        metrics: list[dict[str, Any]],
        before: list[dict[str, str]],
        after: list[dict[str, str]],
    ) -> None:
        assert self._writer is not None
        try:
            lines = [encode_record(record) for record in metrics]
        except FAILURES as error:
            self._writer.stop(error)
            return

        def write_weights(path: Path) -> None:
            record = {"before": before, "after": after}
            path.write_bytes(encode_record(record))

        self._writer.add("steps" if self._is_policy else "critic_steps", lines_part(lines))
        if self._is_policy:
            self._writer.add("weights", write_weights)
        self._writer.finish(world_size=dist.get_world_size())


def _named(model: Sequence[torch.nn.Module]) -> dict[str, torch.Tensor]:
    """This rank's parameters by name."""
    return {
        (f"{chunk}." if len(model) > 1 else "") + name: parameter
        for chunk, module in enumerate(model)
        for name, parameter in module.named_parameters()
    }


def digests_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """By name 32 hex digits that change with any bit of the tensor: the sum of its words, and their
    sum weighted by place, modulo 2^64. It finds differences; it does not resist an attacker.

    Computed where the tensor is, so that a large model is not copied to the host.
    """
    return {name: _digest(tensor.detach()) for name, tensor in tensors.items()}


def _digest(tensor: torch.Tensor) -> str:
    words = tensor.contiguous().reshape(-1)
    size = words.element_size()
    words = words.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size])
    plain = torch.zeros((), dtype=torch.int64, device=words.device)
    weighted = torch.zeros_like(plain)
    for start in range(0, words.numel(), _DIGEST_ROWS):
        block = words[start : start + _DIGEST_ROWS].to(torch.int64)
        places = torch.arange(start + 1, start + 1 + block.numel(), device=block.device)
        plain += block.sum()
        weighted += (block * (places * 2 + 1)).sum()
    return "".join(f"{int(total.item()) & (2**64 - 1):016x}" for total in (plain, weighted))
