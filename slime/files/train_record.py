"""A train dump in memory, and the outline of one before its data are there."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class TrainDump:
    """One rollout's dump. Entry i of `token_fields` and `sample_fields` is of the i-th trained
    sample in whole-batch order, whose position in the whole batch is `positions[i]`; `whole_fields`
    have one entry per sample of the whole batch.
    """

    path: Path
    rollout_id: int
    rank: int
    num_whole: int
    dp_shards: list[dict[str, Any]]
    left_out: dict[str, str]
    token_fields: dict[str, list[np.ndarray]]
    sample_fields: dict[str, Any]  # array [N], or a list of objects
    whole_fields: dict[str, Any]  # array [num_whole], or a list of objects

    @staticmethod
    def of_header(path: Path, header: Mapping[str, Any], **fields: Any) -> TrainDump:
        """The dump of a file's header and its `token_fields`, `sample_fields`, `whole_fields`.
        KeyError where the header lacks something.
        """
        names = ("rollout_id", "rank", "num_whole", "dp_shards", "left_out")
        return TrainDump(path=path, **{name: header[name] for name in names}, **fields)

    @property
    def positions(self) -> np.ndarray:
        return self.sample_fields["partition"]

    @property
    def num_samples(self) -> int:
        return len(self.positions)

    @property
    def owner_ranks(self) -> np.ndarray:
        """int64 [N]: the data-parallel rank that trained each sample."""
        owner_of = {
            position: rank
            for rank, shard in enumerate(self.dp_shards)
            for position in shard["partition"]
        }
        return np.array(
            [owner_of[position] for position in self.positions.tolist()], dtype=np.int64
        )

    def sample(self, i: int) -> dict[str, Any]:
        """Every field of the i-th trained sample by name; a whole-batch field gives the sample's
        own entry.
        """
        position = int(self.positions[i])
        fields = {**self.token_fields, **self.sample_fields}
        return {name: values[i] for name, values in fields.items()} | {
            name: values[position] for name, values in self.whole_fields.items()
        }


@dataclasses.dataclass(frozen=True)
class TensorOutline:
    """A tensor that will be written: shapes come first in the file, so they are known before the
    data.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize
