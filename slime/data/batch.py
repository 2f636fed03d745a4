"""`RolloutBatch`: the columns of one rollout batch or of one rank's shard, and `localize`, which
turns a shard into a rank's batch.

It behaves as `dict[str, list]`, whatever is inside. Whether a list covers the whole rollout batch
or this rank's samples is stated by the contract, and asked with `local(name)` / `whole(name)`: the
wrong question is an error, never a shorter list.

    whole batch --split_by_dp--> shard per rank --[ray.put / ray.get]--> localize --> local batch

On the wire a shard is numpy arrays, which the object store maps without copying them.

Three samples of 5, 4 and 6 tokens with rewards 1, 0 and 2, on two ranks:

                                        rank 0      rank 1
    local("partition")                  [0 1]       [2]
    local("total_lengths")              [5 4]       [6]
    whole("raw_reward")                 [1 0 2]     [1 0 2]
    local("local_raw_reward")           [1 0]       [2]
    whole("total_lengths")              RolloutDataError: it covers only this rank's samples
    local("raw_reward")                 RolloutDataError: use local("local_raw_reward")
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import numpy as np

from slime.data.build import build_column
from slime.data.fields import CONTRACT, Extent, Rows, Scope
from slime.data.ragged import (
    Column,
    Ragged,
    Scalars,
    UngatheredColumn,
    as_array,
    is_tensor,
    num_entries,
)
from slime.exceptions import RolloutDataError

_ABSENT = object()


class Stage(enum.Enum):
    """How far the batch has come. It decides which samples the lists cover."""

    WHOLE = "whole"  # on the rollout side, every list covers the whole batch
    SHARD = "shard"  # on the wire: this rank's lists, and the declared whole ones
    LOCAL = "local"  # on the training rank


class RolloutBatch(dict):
    """Fields by name. `batch[name]` is a list (a tensor [N] for numbers that live on the device);
    `batch.column(name)` the arrays behind it.
    """

    def __init__(
        self,
        entries: Mapping[str, Any] | Iterable = (),
        *,
        stage: Stage = Stage.WHOLE,
        info: dict | None = None,
    ) -> None:
        super().__init__()
        self.stage = stage
        # small: num_whole, dp_rank, dp_size, declared, ...
        self.info: dict[str, Any] = dict(info or {})
        self.cache: dict[str, Any] = {}  # derived layouts, never shipped
        for name, value in dict(entries).items():
            dict.__setitem__(self, name, value)

    # --- dict[str, list] --------------------------------------------------------------------------

    def __getitem__(self, name: str) -> Any:
        value = dict.__getitem__(self, name)
        return value.as_list() if isinstance(value, Column) else value

    def get(self, name: str, default: object = None) -> Any:
        return self[name] if name in self else default

    # overridden so that dict(batch) and {**batch} come through __getitem__
    def __iter__(self) -> Iterator[str]:
        return iter(dict.keys(self))

    def items(self):
        return [(name, self[name]) for name in dict.keys(self)]

    def values(self):
        return [self[name] for name in dict.keys(self)]

    def pop(self, name: str, default: object = _ABSENT) -> Any:
        if name not in self and default is not _ABSENT:
            return default
        value = self[name]
        del self[name]
        return value

    def popitem(self):
        name = next(reversed(dict.keys(self)))
        return name, self.pop(name)

    def setdefault(self, name: str, default: object = None) -> Any:
        if name not in self:
            self[name] = default
        return self[name]

    def update(self, *args: Any, **kw: Any) -> None:
        for other in args:
            # columns stay columns
            pairs = (
                [(name, other.raw(name)) for name in other]
                if isinstance(other, RolloutBatch)
                else dict(other).items()
            )
            for name, value in pairs:
                self[name] = value
        for name, value in kw.items():
            self[name] = value

    def copy(self) -> RolloutBatch:
        """A batch with the same columns; replacing a field in one leaves the other alone."""
        return RolloutBatch(
            {name: dict.__getitem__(self, name) for name in dict.keys(self)},
            stage=self.stage,
            info=self.info,
        )

    def __eq__(self, other: object) -> bool:
        return dict(self) == other

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None

    def __repr__(self) -> str:
        return f"RolloutBatch({self.stage.value}, {', '.join(dict.keys(self))})"

    # --- columns and extents ----------------------------------------------------------------------

    def raw(self, name: str) -> Any:
        """What is stored: a column, a list or a tensor."""
        return dict.__getitem__(self, name)

    def column(self, name: str) -> Column:
        """The arrays behind a numeric per-sample field. Edits made to its list are taken over."""
        value = dict.__getitem__(self, name)
        if isinstance(value, Column) and not value.was_edited():
            return value
        entries = value.as_list() if isinstance(value, Column) else value
        spec = CONTRACT[name]
        on_device = (
            spec.scope is Scope.TOKEN and isinstance(entries, list) and any(map(is_tensor, entries))
        )
        if self.stage is Stage.LOCAL and on_device:
            column = Ragged.of_tensors(_all_tensors(name, entries))
        else:
            column = build_column(spec, entries)
        if isinstance(value, Column) and isinstance(column, Column):
            # the holder of the list goes on seeing, and making, the edits
            column.adopt_list(entries)
            dict.__setitem__(self, name, column)
        return column

    def array(self, name: str) -> np.ndarray:
        """A per-sample number as a numpy array [N]."""
        value = dict.__getitem__(self, name)
        if isinstance(value, Scalars) and not value.was_edited():
            return value.values
        return as_array(self[name], what=name)

    def extent_of(self, name: str) -> Extent:
        """Which samples `batch[name]` covers at this stage."""
        spec = CONTRACT.find(name)
        if self.stage is Stage.WHOLE:
            return Extent.WHOLE if spec is None or spec.per_sample else spec.extent
        if spec is None:
            return Extent.LOCAL
        if self.stage is Stage.SHARD and spec.ships_whole:
            return Extent.WHOLE
        return spec.extent

    def whole(self, name: str) -> Any:
        """The list over every sample of the rollout batch. `RolloutDataError` where this batch
        holds only a rank's part.
        """
        extent = self.extent_of(name)
        if extent is Extent.LOCAL:
            raise RolloutDataError(
                f"{name!r} covers only this rank's {self.num_samples} samples, not the whole "
                f"rollout batch. Use local({name!r}), or declare "
                f"the field with extent=Extent.WHOLE."
            )
        return self[name]

    def local(self, name: str) -> Any:
        """The list over this rank's samples. `RolloutDataError` for a whole-batch field, naming its
        local view.
        """
        extent = self.extent_of(name)
        if extent is Extent.WHOLE:
            spec = CONTRACT.find(name)
            view = spec.local_view if spec is not None else None
            hint = (
                f"Use local({view!r})."
                if view and view in self
                else "Index whole() with batch['partition'], or split the batch first."
            )
            raise RolloutDataError(
                f"{name!r} covers the whole rollout batch, not this rank's samples. {hint}"
            )
        return self[name]

    @property
    def num_samples(self) -> int:
        """Samples the local lists cover (all of them before the split)."""
        if self.stage is not Stage.WHOLE and "partition" in self:
            return len(dict.__getitem__(self, "partition"))
        for name in ("tokens", "response_lengths", "total_lengths", "rewards"):
            if name in self:
                return len(dict.__getitem__(self, name))
        return 0

    @property
    def num_whole(self) -> int:
        """Samples of the whole rollout batch."""
        return int(self.info["num_whole"]) if "num_whole" in self.info else self.num_samples

    # --- the wire ---------------------------------------------------------------------------------

    def __reduce__(self):
        return _from_wire, (
            "slime-columns-1",
            self.stage.value,
            self.info,
            {name: _to_wire(dict.__getitem__(self, name)) for name in dict.keys(self)},
        )

    def num_bytes(self) -> int:
        """Bytes of the arrays that travel."""
        total = 0
        for name in dict.keys(self):
            value = dict.__getitem__(self, name)
            arrays = (
                (value.values, value.offsets)
                if isinstance(value, Ragged)
                else (value.values,)
                if isinstance(value, Scalars)
                else ()
            )
            total += sum(array.nbytes for array in arrays)
        return total


def _all_tensors(name: str, entries: list) -> list:
    for i, entry in enumerate(entries):
        if not is_tensor(entry):
            raise RolloutDataError(
                f"{name}[{i}] is a {type(entry).__name__} where other entries are tensors; a hook "
                "that replaces one gives a tensor."
            )
    return entries


def _to_wire(value: object) -> Any:
    if isinstance(value, Column) and value.was_edited():
        return ("list", value.as_list())
    if isinstance(value, Scalars):
        return ("scalars", value.values)
    if isinstance(value, Ragged):
        return (
            "ragged",
            value.values,
            value.offsets,
            None if value.is_dense and value.offsets[0] == 0 else value.lengths,
        )
    if isinstance(value, UngatheredColumn):
        return ("parts", value.parts)
    return ("list", value)


def _from_wire(format_name: str, stage: str, info: dict, wire: dict[str, tuple]) -> RolloutBatch:
    if format_name != "slime-columns-1":
        raise RolloutDataError(
            f"This shard was written as {format_name!r}; this version reads 'slime-columns-1'."
        )
    kinds = {"scalars": Scalars, "ragged": Ragged, "parts": UngatheredColumn}
    entries = {
        name: kinds[entry[0]](*entry[1:]) if entry[0] in kinds else entry[1]
        for name, entry in wire.items()
    }
    return RolloutBatch(entries, stage=Stage(stage), info=info)


# --- arrival --------------------------------------------------------------------------------------


def localize(shard: Mapping[str, Any], dp_rank: int, *, dp_size: int | None = None) -> RolloutBatch:
    """This rank's batch: `total_lengths` cut to the partition, whole fields kept and their local
    views added, every length checked.

    `shard` is what `split_by_dp` made, or a plain dict of lists with `partition` and a whole
    `total_lengths`. Raises `RolloutDataError` where the partition is not a set of positions, is not
    what the schedule gave this rank, or a list has another rank's length.
    """
    batch = shard.copy() if isinstance(shard, RolloutBatch) else RolloutBatch(shard)
    for spec in batch.info.get("declared", ()):
        CONTRACT.add(spec)  # nothing else imports a rollout plug-in here
    if "partition" not in batch:
        raise RolloutDataError(
            f"The shard for data-parallel rank {dp_rank} has no 'partition'; its keys are "
            f"{sorted(batch)}."
        )
    partition = np.asarray(batch["partition"], dtype=np.int64).reshape(-1)
    num_whole = _whole_size(batch)
    _check_partition(batch, partition, dp_rank=dp_rank, dp_size=dp_size, num_whole=num_whole)
    batch.stage = Stage.LOCAL
    batch.info = {**batch.info, "num_whole": num_whole, "dp_rank": dp_rank}
    for name in list(dict.keys(batch)):
        spec = CONTRACT.find(name)
        if spec is None or not spec.per_sample:
            continue
        view = (
            name if spec.ships_whole else spec.local_view if spec.extent is Extent.WHOLE else None
        )
        value = batch.raw(name)
        if view is None or value is None:
            continue
        if num_entries(value) != num_whole:
            raise RolloutDataError(
                f"{name!r} has {num_entries(value)} entries, but the whole batch has {num_whole} "
                "samples."
            )
        dict.__setitem__(batch, view, _take(value, partition))
    _check_counts(batch, num_local=len(partition), num_whole=num_whole)
    _check_micro_batches(batch, len(partition), dp_rank=dp_rank)
    if "owner_ranks" in batch:  # made by our own split: what must agree is there
        _check_order(batch, partition, dp_rank=dp_rank)
    else:
        _check_foreign_order(batch, dp_rank=dp_rank)
    return batch


def _check_micro_batches(batch: RolloutBatch, num_local: int, *, dp_rank: int) -> None:
    """Every sample in one micro-batch, and as many micro-batches as the steps have: else peers
    wait, or samples train twice or never.
    """
    if batch.get("micro_batch_indices") is None:
        return
    micro_batches = batch["micro_batch_indices"]
    if sorted(i for indices in micro_batches for i in indices) != list(range(num_local)):
        raise RolloutDataError(
            f"Data-parallel rank {dp_rank}: micro_batch_indices do not hold each of its "
            f"{num_local} samples once."
        )
    planned = batch.get("num_microbatches")
    if planned is not None and sum(planned) != len(micro_batches):
        raise RolloutDataError(
            f"Data-parallel rank {dp_rank} has {len(micro_batches)} micro-batches where its steps "
            f"have {list(planned)}."
        )


def _check_order(batch: RolloutBatch, partition: np.ndarray, *, dp_rank: int) -> None:
    """The lists stand in the partition's order: whole fields read through it agree with what was
    shipped sample by sample.
    """
    known, shipped = batch.array("all_rollout_ids")[partition], batch.array("rollout_ids")
    if not np.array_equal(known, shipped):
        differ = partition[known != shipped][:5].tolist()
        raise RolloutDataError(
            f"Data-parallel rank {dp_rank}: the partition is not in the order of the samples; "
            f"positions {differ} hold other rollouts."
        )
    check_rows(batch)


def _check_foreign_order(batch: RolloutBatch, *, dp_rank: int) -> None:
    """The same for a shard that slime did not make, as far as it can be checked: by identities
    where it has them, and by the lengths.
    """
    if "all_rollout_ids" in batch and "rollout_ids" in batch:
        known = np.asarray(batch["all_rollout_ids"])[np.asarray(batch["partition"], dtype=np.int64)]
        _compare_order(
            "rollout_ids",
            known.tolist(),
            np.asarray(batch["rollout_ids"]).tolist(),
            dp_rank=dp_rank,
        )
    if (
        "total_lengths" in batch
        and "tokens" in batch
        and all(hasattr(entry, "__len__") for entry in batch["tokens"])
    ):
        lengths = [int(length) for length in batch["total_lengths"]]
        _compare_order(
            "tokens", lengths, [len(entry) for entry in batch["tokens"]], dp_rank=dp_rank
        )


def _compare_order(name: str, expected: list[int], found: list[int], *, dp_rank: int) -> None:
    if found != expected and sorted(found) == sorted(expected):
        place = next(
            i for i, (left, right) in enumerate(zip(found, expected, strict=True)) if left != right
        )
        raise RolloutDataError(
            f"Data-parallel rank {dp_rank}: {name!r} is not in the order of the partition: entry "
            f"{place} belongs to another sample of this "
            f"rank ({found[place]} where the whole batch says {expected[place]}). Put every list into the partition's order."
        )


def _whole_size(batch: RolloutBatch) -> int:
    if "num_whole" in batch.info:
        return int(batch.info["num_whole"])
    for spec in CONTRACT:
        if (
            spec.name in batch
            and (spec.ships_whole or spec.extent is Extent.WHOLE)
            and spec.per_sample
        ):
            return len(batch.raw(spec.name))
    raise RolloutDataError(
        f"The shard has no whole-batch field such as 'total_lengths'; its keys are {sorted(batch)}."
    )


def _take(value: Any, positions: np.ndarray) -> Any:
    if isinstance(value, Scalars):
        return value.select(positions)
    if is_tensor(value) or isinstance(value, np.ndarray):
        return value[positions]
    return [value[position] for position in positions.tolist()]


def _check_partition(
    batch: RolloutBatch, partition: np.ndarray, *, dp_rank: int, dp_size: int | None, num_whole: int
) -> None:
    if len(partition) and (partition.min() < 0 or partition.max() >= num_whole):
        bad = partition[(partition < 0) | (partition >= num_whole)][:5].tolist()
        raise RolloutDataError(
            f"Data-parallel rank {dp_rank}: partition positions {bad} are outside a batch of "
            f"{num_whole} samples."
        )
    if len(np.unique(partition)) != len(partition):
        positions, counts = np.unique(partition, return_counts=True)
        raise RolloutDataError(
            f"Data-parallel rank {dp_rank}: partition repeats positions "
            f"{positions[counts > 1][:5].tolist()}."
        )
    written_for = batch.info.get("dp_rank", dp_rank)
    if written_for != dp_rank or (
        dp_size is not None and batch.info.get("dp_size", dp_size) != dp_size
    ):
        raise RolloutDataError(
            f"Data-parallel rank {dp_rank} of {dp_size} received the shard of rank {written_for} "
            f"of {batch.info.get('dp_size')}."
        )
    if "owner_ranks" in batch:
        owned = np.flatnonzero(batch.array("owner_ranks") == dp_rank)
        if not np.array_equal(np.sort(partition), owned):
            differ = np.setxor1d(partition, owned)[:5].tolist()
            raise RolloutDataError(
                f"Data-parallel rank {dp_rank}: the partition is not what was scheduled; positions "
                f"{differ} differ."
            )


def _check_counts(batch: RolloutBatch, *, num_local: int, num_whole: int) -> None:
    for name in dict.keys(batch):
        spec, value = CONTRACT.find(name), batch.raw(name)
        if (
            value is None
            or (spec is not None and not spec.per_sample)
            or num_entries(value) is None
        ):
            continue
        whole = spec is not None and spec.extent is Extent.WHOLE
        expected = num_whole if whole else num_local
        if len(value) != expected:
            covers = "the whole batch" if whole else "this rank"
            raise RolloutDataError(
                f"{name!r} has {len(value)} entries, but {covers} has {expected} samples."
            )


def check_rows(
    batch: RolloutBatch, names: Iterable[str] | None = None, *, positions: np.ndarray | None = None
) -> None:
    """Raises `RolloutDataError` naming the first sample whose entry of a TOKEN field has another
    length than its declaration says.

    `positions`: the samples that must fit (default all); `names`: the fields to look at (default
    all).
    """
    totals = np.asarray(batch.array("total_lengths"), dtype=np.int64)
    responses = np.asarray(batch.array("response_lengths"), dtype=np.int64)
    chosen = np.arange(len(totals)) if positions is None else positions
    bad = chosen[(responses[chosen] < 0) | (responses[chosen] > totals[chosen])]
    if len(bad):
        i = int(bad[0])
        raise RolloutDataError(
            f"Sample at position {i} has response_length {responses[i]} but {totals[i]} tokens in "
            "all."
        )
    for name in list(names) if names is not None else list(dict.keys(batch)):
        spec = CONTRACT.find(name)
        if spec is None or spec.scope is not Scope.TOKEN or spec.rows in (None, Rows.FREE):
            continue
        lengths = cast("Ragged | UngatheredColumn", batch.column(name)).lengths
        expected = cast(np.ndarray, spec.expected_rows(totals, responses))
        bad = chosen[lengths[chosen] != expected[chosen]]
        if len(bad):
            i = int(bad[0])
            raise RolloutDataError(
                f"{name}[{i}] has {lengths[i]} rows, expected {expected[i]} ({spec.rows.value}; "
                f"total_length {totals[i]}, "
                f"response_length {responses[i]}); {len(bad)} of {len(chosen)} samples differ."
            )


def check_masks(batch: RolloutBatch) -> None:
    """`RolloutDataError` naming the first sample whose loss mask holds something else
    than 0 and 1.
    """
    column = batch.column("loss_masks")
    masks = column.parts if isinstance(column, UngatheredColumn) else column.as_list()
    if masks and all(type(mask) is np.ndarray for mask in masks):
        joined = np.concatenate(masks)
        # one look at all of them, as nearly always all is well
        if not joined.size or joined.max() <= 1:
            return
    for i, mask in enumerate(masks):
        if mask.size and mask.max() > 1:
            raise RolloutDataError(
                f"The loss mask at position {i} has the value {int(mask.max())}; a loss mask holds "
                "0 and 1."
            )
