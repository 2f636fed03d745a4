"""`save_debug_train_data`: the ranks' fields gathered, one at a time, on the rank that writes the
train dump. The format is in `train_dump`.

All ranks of tensor rank 0 and the last pipeline stage send what they hold; the first of them
writes. Fields that are sharded over context-parallel ranks are put back together; of fields that
these ranks share, one copy is sent.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from slime.accelerator.process_groups import Attempts, gather_to_source
from slime.data.batch import RolloutBatch, Stage
from slime.data.context_parallel import plan_response_layout
from slime.data.fields import CONTRACT, Extent, Origin, Scope
from slime.data.ragged import Ragged, as_array, concatenated_ranges, is_tensor, num_entries
from slime.exceptions import RolloutDataError
from slime.files.train_dump import (
    CODES,
    TrainDumpWriter,
    encode_entries,
    read_train_dump,  # noqa: F401  (its reader, under the same name)
    train_dump_path,
)
from slime.files.train_record import TensorOutline
from slime.files.train_table import TABLE_SUFFIX, TrainTableWriter

logger = logging.getLogger(__name__)

Gather = Callable[[Any], "list[Any] | None"]
Share = Callable[[Any], "list[Any]"]
HAS_OFFSETS = ("rows", "json", "whole json")
LAYOUT_FIELDS = tuple(spec.name for spec in CONTRACT if spec.scope in (Scope.STEP, Scope.LAYOUT))


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a rank is among those that hold the fields."""

    dp_rank: int = 0
    cp_rank: int = 0
    cp_size: int = 1


@dataclasses.dataclass(frozen=True)
class RankRows:
    """One rank's entries of one field: `values` [rows, ...] and rows per sample [n]; one row per
    sample for numbers.
    """

    values: np.ndarray
    lengths: np.ndarray


# --- what one rank holds --------------------------------------------------------------------------


def field_kinds(batch: RolloutBatch) -> tuple[dict[str, str], dict[str, str]]:
    """`(kind by field, reason by field that no dump holds)` of this rank's batch."""
    kinds: dict[str, str] = {}
    left_out: dict[str, str] = {}
    for name in dict.keys(batch):
        spec, value = CONTRACT.find(name), batch.raw(name)
        if (
            value is None
            or name in LAYOUT_FIELDS
            or (spec is not None and spec.origin is Origin.ARRIVAL)
        ):
            continue
        whole = spec is not None and spec.extent is Extent.WHOLE
        if num_entries(value) != (batch.num_whole if whole else batch.num_samples):
            left_out[name] = "it does not have one entry per sample"
        elif spec is not None and spec.scope is Scope.TOKEN:
            kinds[name] = "rows"
        else:
            numeric = spec is not None and spec.wire_dtype is not None and _is_numeric(batch, name)
            kinds[name] = (
                ("whole" if whole else "number") if numeric else ("whole json" if whole else "json")
            )
    return kinds, left_out


def _is_numeric(batch: RolloutBatch, name: str) -> bool:
    value = batch.raw(name)
    return not isinstance(value, list) or all(entry is not None for entry in value)


def rank_rows(batch: RolloutBatch, name: str, kind: str) -> RankRows:
    """This rank's entries as arrays on the CPU. `RolloutDataError` naming the field where they
    cannot be.
    """
    if kind.endswith("json"):
        try:
            return RankRows(*encode_entries(list(batch[name])))
        except RolloutDataError as error:
            raise RolloutDataError(f"{name}: {error}") from error
    if kind in ("number", "whole"):
        values = (
            as_array(batch.raw(name), what=name)
            if is_tensor(batch.raw(name))
            else batch.array(name)
        )
        return RankRows(_compact(values, name), np.ones(len(values), dtype=np.int64))
    column = batch.column(name)
    if isinstance(column, Ragged):
        values, lengths = as_array(column.dense_values(), what=name), column.lengths
    else:
        parts = [as_array(entry, what=name) for entry in column.as_list()]
        values = np.concatenate(parts) if parts else np.zeros(0, dtype=np.float32)
        lengths = np.array([len(part) for part in parts])
    return RankRows(_compact(values, name), np.asarray(lengths, dtype=np.int64))


def _compact(values: np.ndarray, name: str) -> np.ndarray:
    """Integers in the dtype they have on the wire, which is smaller than the model's and holds them
    all.
    """
    spec = CONTRACT.find(name)
    dtype = spec.wire_dtype if spec is not None else None
    if dtype in CODES and np.dtype(dtype).kind in "iub" and values.dtype != dtype:
        return as_array(values, dtype, what=name)
    return values


def _is_cp_sharded(name: str) -> bool:
    spec = CONTRACT.find(name)
    return spec is not None and spec.cp_sharded


def sends(batch: RolloutBatch, name: str, kind: str, place: Place) -> bool:
    """Whether this rank sends the field: it has it, and no other rank sends the same entries."""
    if name not in batch or batch.raw(name) is None:
        return False
    if kind.startswith("whole"):
        return place.dp_rank == 0 and place.cp_rank == 0
    return place.cp_rank == 0 or _is_cp_sharded(name)


# --- what the writer makes of it ------------------------------------------------------------------


def restore_responses(
    parts: Sequence[RankRows], totals: np.ndarray, responses: np.ndarray, *, name: str
) -> RankRows:
    """Full responses of one data-parallel rank from what its context-parallel ranks (in order) own.
    `RolloutDataError` where a part does not fit.
    """
    if len(parts) == 1:
        _check_rows(parts[0].lengths, responses, name=name)
        return parts[0]
    filled = next((part.values for part in parts if len(part.values)), parts[0].values)
    full = np.empty((int(responses.sum()), *filled.shape[1:]), dtype=filled.dtype)
    for cp_rank, part in enumerate(parts):
        layout = plan_response_layout(
            totals.tolist(), responses.tolist(), cp_size=len(parts), cp_rank=cp_rank
        )
        _check_rows(
            part.lengths,
            np.asarray(layout.local_lengths),
            name=f"{name} of context-parallel rank {cp_rank}",
        )
        full[layout.response_indices.numpy()] = part.values
    return RankRows(full, responses)


def _check_rows(found: np.ndarray, expected: np.ndarray, *, name: str) -> None:
    if not np.array_equal(found, expected):
        bad = (
            int(np.flatnonzero(found != expected)[0])
            if len(found) == len(expected)
            else min(len(found), len(expected))
        )
        raise RolloutDataError(
            f"{name}: {found.tolist()[bad:][:3]} rows from sample {bad} on, expected "
            f"{expected.tolist()[bad:][:3]}."
        )


def in_batch_order(per_dp_rank: Sequence[RankRows], order: np.ndarray) -> RankRows:
    """All ranks' entries, one after the other, rearranged: entry i is entry order[i] of the
    concatenation.
    """
    filled = [rows.values for rows in per_dp_rank if len(rows.values)] or [per_dp_rank[0].values]
    values, lengths = np.concatenate(filled), np.concatenate([rows.lengths for rows in per_dp_rank])
    starts = np.cumsum(lengths) - lengths
    return RankRows(values[concatenated_ranges(starts[order], lengths[order])], lengths[order])


@dataclasses.dataclass(frozen=True)
class Outline:
    """What a rank sends to the writer before any data: its place, its samples, and the sizes of the
    fields that it will send.
    """

    place: Place
    shard: dict[str, Any]  # partition, lengths and layout
    sizes: dict[str, tuple[int, tuple[int, ...], str]]  # by field: rows, shape of a row, dtype
    problems: dict[str, str]  # by field: why it cannot be dumped


def outline_of(
    batch: RolloutBatch,
    kinds: Mapping[str, str],
    place: Place,
    kept: dict[str, RankRows] | None = None,
) -> Outline:
    """This rank's outline. `kept` takes the rows of the fields that the rank will send."""
    sizes, problems = {}, {}
    for name, kind in kinds.items():
        if not sends(batch, name, kind, place):
            continue
        try:
            rows = rank_rows(batch, name, kind)
        except RolloutDataError as error:
            problems[name] = str(error)
            continue
        sizes[name] = (len(rows.values), rows.values.shape[1:], rows.values.dtype.name)
        if kept is not None:
            kept[name] = rows
    shard = {
        name: np.asarray(batch.array(name), dtype=np.int64).tolist()
        for name in ("partition", "total_lengths", "response_lengths")
    }
    shard |= {name: _plain(batch[name]) for name in LAYOUT_FIELDS if name in batch}
    return Outline(place, shard, sizes, problems)


def _plain(value: Any) -> Any:
    """Nested lists of ints."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return [_plain(entry) for entry in value] if isinstance(value, list | tuple) else int(value)


class DumpWriter(Protocol):
    """Takes the tensors that were announced, in order. `commit` returns the file's path, None where
    there is no file.
    """

    def write(self, name: str, values: np.ndarray) -> None: ...

    def commit(self) -> Path | None: ...

    def abandon(self) -> None: ...


OpenWriter = Callable[[Path, Mapping[str, Any], Sequence[TensorOutline]], DumpWriter]


def writer_for(path: Path) -> OpenWriter:
    """The writer of the format that the file's name asks for: a table for .parquet, else
    safetensors.
    """
    return TrainTableWriter if path.suffix == TABLE_SUFFIX else TrainDumpWriter


class DumpAssembly:
    """The writer's side: from every rank's outline it knows the file before the data; then it takes
    the fields, one at a time.

    The first thing that goes wrong is kept for `finish`, so that the other ranks, which only send,
    are never left waiting.
    """

    def __init__(
        self, path: Path, batch: RolloutBatch, kinds: Mapping[str, str], open_writer: OpenWriter
    ) -> None:
        self.path, self.batch, self._open_writer = path, batch, open_writer
        self.kinds = dict(kinds)
        self._failure: Exception | None = None
        self._writer: DumpWriter | None = None
        self._outlines: list[Outline] = []
        # (dp_rank, cp_rank) -> index of what it sends
        self._rank_at: dict[tuple[int, int], int] = {}
        self._shards: dict[int, dict[str, Any]] = {}  # by dp_rank
        self._order = np.zeros(0, dtype=np.int64)

    def begin(
        self, sent: Sequence[Outline | str], header: Mapping[str, Any], left_out: Mapping[str, str]
    ) -> None:
        """Opens the file, where every rank sent its outline and none what failed on it."""
        try:
            outlines = [one for one in sent if isinstance(one, Outline)]
            if failures := [one for one in sent if isinstance(one, str)]:
                raise RolloutDataError("; ".join(failures))
            self._open(outlines, header, left_out)
        except Exception as error:  # noqa: BLE001 - kept for finish, whatever it is
            self._failure = error

    def _open(
        self, outlines: list[Outline], header: Mapping[str, Any], left_out: Mapping[str, str]
    ) -> None:
        left_out = dict(left_out)
        for outline in outlines:
            left_out.update(outline.problems)
        self.kinds = {name: kind for name, kind in self.kinds.items() if name not in left_out}
        self._outlines = outlines
        self._rank_at = {
            (outline.place.dp_rank, outline.place.cp_rank): i for i, outline in enumerate(outlines)
        }
        self._shards = {
            dp_rank: outlines[i].shard
            for (dp_rank, cp_rank), i in sorted(self._rank_at.items())
            if cp_rank == 0
        }
        if left_out:
            logger.warning("train dump %s: left out %s", self.path, left_out)
        positions = np.concatenate(
            [np.asarray(shard["partition"], dtype=np.int64) for shard in self._shards.values()]
        )
        if len(np.unique(positions)) != len(positions):
            raise RolloutDataError(
                "Two data-parallel ranks trained samples with the same position in the whole batch."
            )
        self._order = np.argsort(positions, kind="stable")
        header = {
            **header,
            "num_samples": len(positions),
            "num_whole": self.batch.num_whole,
            "dp_shards": list(self._shards.values()),
            "fields": self.kinds,
            "left_out": left_out,
        }
        self._writer = self._open_writer(self.path, header, self._tensors())

    def _tensors(self) -> list[TensorOutline]:
        result = []
        for name, kind in self.kinds.items():
            sizes = [outline.sizes[name] for outline in self._outlines if name in outline.sizes]
            _, trailing, dtype = next((size for size in sizes if size[0]), sizes[0])
            result.append(TensorOutline(name, dtype, (sum(size[0] for size in sizes), *trailing)))
            if kind in HAS_OFFSETS:
                count = self.batch.num_whole if kind == "whole json" else len(self._order)
                result.append(TensorOutline(f"{name}.offsets", "int64", (count + 1,)))
        return result

    def add(self, name: str, parts: list[RankRows | None]) -> None:
        """Writes the next field from what every rank sent (None: nothing)."""
        if self._writer is None or self._failure is not None or name not in self.kinds:
            return
        try:
            rows = self._merge(name, parts)
            self._writer.write(name, rows.values)
            if self.kinds[name] in HAS_OFFSETS:
                self._writer.write(
                    f"{name}.offsets", np.concatenate(([0], np.cumsum(rows.lengths)))
                )
        except Exception as error:  # noqa: BLE001 - kept for finish, whatever it is
            self._failure = error

    def _merge(self, name: str, parts: list[RankRows | None]) -> RankRows:
        if self.kinds[name].startswith("whole"):
            return next(part for part in parts if part is not None)
        sharded = _is_cp_sharded(name)
        per_dp_rank = []
        for dp_rank, shard in self._shards.items():
            cp_ranks = range(self._outlines[0].place.cp_size if sharded else 1)
            found = [parts[self._rank_at[dp_rank, cp_rank]] for cp_rank in cp_ranks]
            sent = [part for part in found if part is not None]
            missing = len(sent) < len(found)
            if missing and shard["partition"]:
                raise RolloutDataError(
                    f"Data-parallel rank {dp_rank} has no {name}, others have it."
                )
            if sharded and not missing:
                totals, responses = (
                    np.asarray(shard[key], dtype=np.int64)
                    for key in ("total_lengths", "response_lengths")
                )
                per_dp_rank.append(restore_responses(sent, totals, responses, name=name))
            elif not missing:
                per_dp_rank.append(sent[0])
        return in_batch_order(per_dp_rank, self._order)

    def finish(self, failure: Exception | None) -> Path | None:
        """Gives the file its name, where `failure` is None and nothing failed here; None, said in
        the log, where the disk failed. Raises `RolloutDataError` where ranks did not fit together.
        """
        self._failure = self._failure or failure
        try:
            if self._writer is not None and self._failure is None:
                return self._writer.commit()
        except OSError as error:
            self._failure = error
        if self._writer is not None:
            self._writer.abandon()
        if not isinstance(self._failure, OSError):
            raise RolloutDataError(f"train dump {self.path}: {self._failure}") from self._failure
        logger.error(
            "train dump %s was not written (%s); training goes on without it",
            self.path,
            self._failure,
        )
        return None


def restore_context_parallel_fields_to_cpu(
    rollout_data: Mapping[str, Any],
    gather_tensor: Callable[[Any, int, int], Any],
    *,
    keep_restored: bool,
) -> dict[str, Any] | None:
    """Returns `rollout_data` with every context-parallel field restored to full responses on the
    CPU; None unless `keep_restored`.

    `gather_tensor(tensor, total_length, response_length)` is a collective that every
    context-parallel rank enters once per tensor, in the same order; one tensor is restored at a
    time. Raises `RolloutDataError` (a ValueError) without one tensor per sample, TypeError for what
    is no tensor.
    """
    restored = dict(rollout_data)
    lengths = list(
        zip(rollout_data["total_lengths"], rollout_data["response_lengths"], strict=True)
    )
    for name in sorted(
        name
        for name in dict.keys(restored)
        if _is_cp_sharded(name) and rollout_data[name] is not None
    ):
        entries = list(rollout_data[name])
        if len(entries) != len(lengths):
            raise RolloutDataError(
                f"{name} must have one tensor per sample: {len(entries)} for {len(lengths)} "
                "samples."
            )
        wrong = next((type(entry).__name__ for entry in entries if not is_tensor(entry)), None)
        if wrong is not None:
            raise TypeError(f"{name} must hold tensors, found {wrong}.")
        full = []
        for entry, (total, response) in zip(entries, lengths, strict=True):
            whole = gather_tensor(entry, int(total), int(response))
            if keep_restored:
                full.append(whole.detach().cpu())
        restored[name] = full
    return restored if keep_restored else None


# --- the shell ------------------------------------------------------------------------------------


def write_train_dump(
    path: Path,
    rollout_data: Mapping[str, Any],
    *,
    header: Mapping[str, Any],
    place: Place,
    gather: Gather,
    share: Share,
    open_writer: OpenWriter | None = None,
    at_once: bool = False,
) -> Path | None:
    """Writes the dump on the rank on which `gather(value)` returns every rank's value, and returns
    its path; None on the others.

    `at_once` gathers all fields in one step, for a writer that keeps them in memory anyway.
    `share(value)` returns every rank's value on all of them. Both are called equally often on each
    rank, whatever fails on any; the failure is raised after the last one, where it happened and
    on the rank that writes. `header` has "rollout_id" and "rank". A failing disk is logged
    and leaves no file; data that do not fit raise `RolloutDataError`.
    """
    attempt = Attempts()
    nothing = RolloutBatch({}, stage=Stage.LOCAL)
    batch = attempt(lambda: _as_batch(rollout_data), nothing)
    kinds, left_out = attempt(lambda: field_kinds(batch), field_kinds(nothing))
    shared = share((kinds, left_out, attempt.words))
    if failures := [words for _, _, words in shared if words]:
        raise RolloutDataError(f"train dump {path}: {'; '.join(failures)}") from attempt.failure
    for other_kinds, other_left_out, _ in shared:
        left_out.update(other_left_out)
        # one rank with a None among its numbers makes the field JSON on all
        kinds.update(
            {
                name: kind
                for name, kind in other_kinds.items()
                if name not in kinds or kind.endswith("json")
            }
        )
    kinds = {name: kinds[name] for name in sorted(kinds) if name not in left_out}
    kept: dict[str, RankRows] | None = {} if at_once else None
    outline = attempt(lambda: outline_of(batch, kinds, place, kept), Outline(place, {}, {}, {}))
    everyone = gather((attempt.words or outline, kept))
    assembly = None
    if everyone is not None:
        assembly = DumpAssembly(path, batch, kinds, open_writer or writer_for(path))
        assembly.begin([sent for sent, _ in everyone], header, left_out)
    for name in kinds:
        if at_once:
            parts = None if everyone is None else [rows.get(name) for _, rows in everyone]
        else:
            rows_of = functools.partial(rank_rows, batch, name, kinds[name])
            parts = gather(attempt(rows_of, None) if name in outline.sizes else None)
        if assembly is not None and parts is not None:
            assembly.add(name, parts)
    if assembly is not None:
        return assembly.finish(attempt.failure)
    if attempt.failure is not None:
        raise attempt.failure
    return None


def _as_batch(rollout_data: Mapping[str, Any]) -> RolloutBatch:
    if isinstance(rollout_data, RolloutBatch):
        return rollout_data
    return RolloutBatch(rollout_data, stage=Stage.LOCAL)


def save_debug_train_data(
    args: argparse.Namespace, *, rollout_id: int, rollout_data: Mapping[str, Any]
) -> Path | None:
    """Writes the train dump of this rollout to --save-debug-train-data's path, and returns its
    path on the rank that wrote it.

    Called by all ranks; those of tensor rank 0 and the last pipeline stage take part, the first of
    them writes.
    """
    if args.save_debug_train_data is None:
        return None
    return gather_train_data(
        lambda rank: train_dump_path(args.save_debug_train_data, rollout_id, rank=rank),
        rollout_data,
        rollout_id=rollout_id,
    )


def gather_train_data(
    path_of: Callable[[int], Path],
    rollout_data: Mapping[str, Any],
    *,
    rollout_id: int,
    open_writer: OpenWriter | None = None,
) -> Path | None:
    """Gathers this rollout's fields from all ranks on the one that writes, as `write_train_dump`.
    Called by all ranks. `path_of(rank)`: the file, by the writer's rank.
    """
    import torch.distributed as dist
    from megatron.core import mpu

    if mpu.get_tensor_model_parallel_rank() != 0 or not mpu.is_pipeline_last_stage():
        return None
    group = mpu.get_data_parallel_group_gloo(with_context_parallel=True)
    size = mpu.get_data_parallel_world_size(with_context_parallel=True)
    source = mpu.get_data_parallel_src_rank(with_context_parallel=True)
    cp_size = max(1, mpu.get_context_parallel_world_size())
    place = Place(
        mpu.get_data_parallel_rank(), mpu.get_context_parallel_rank() if cp_size > 1 else 0, cp_size
    )

    def share(value: object) -> list[Any]:
        values: list[Any] = [None] * size
        dist.all_gather_object(values, value, group=group)
        return values

    return write_train_dump(
        path_of(source),
        rollout_data,
        header={"rollout_id": rollout_id, "rank": source, "cp_size": cp_size},
        place=place,
        gather=lambda value: gather_to_source(value, size=size, source_rank=source, group=group),
        share=share,
        open_writer=open_writer,
        at_once=open_writer is not None,
    )
