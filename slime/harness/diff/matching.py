"""Which sample of A is compared with which sample of B.

By place where both sides have the same samples in the same order. Else by identity, so that one
sample more or less does not make every sample after it differ; what remains is matched by place.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

import numpy as np

from slime.harness.diff.columns import Columns
from slime.harness.diff.compare import Pairs

IDENTITIES = ("index", "rollout_id")
# share of the smaller side that identities must match, else places are the better guess
_ENOUGH = 0.5


@dataclasses.dataclass(frozen=True)
class Matching:
    """Pairs of rows, ascending in A; rows that only one side has; `moved`: pairs whose order among
    the pairs differs.
    """

    pairs: Pairs
    only_a: np.ndarray
    only_b: np.ndarray
    moved: np.ndarray

    @property
    def is_by_place(self) -> bool:
        """Whether row i is compared with row i, and both sides have all rows."""
        return not (len(self.only_a) or len(self.only_b) or len(self.moved))


def match_by_place(num_a: int, num_b: int) -> Matching:
    """Row i with row i; what the longer side has more is its own."""
    shared = min(num_a, num_b)
    rows = np.arange(shared, dtype=np.int64)
    return Matching(
        Pairs(rows, rows),
        np.arange(shared, num_a, dtype=np.int64),
        np.arange(shared, num_b, dtype=np.int64),
        np.zeros(0, dtype=np.int64),
    )


def match(
    ids_a: Sequence[np.ndarray] | None, ids_b: Sequence[np.ndarray] | None, num_a: int, num_b: int
) -> Matching:
    """Matches rows by identity [N] columns, or by place where there are none or they are equal."""
    if not ids_a or not ids_b or len(ids_a) != len(ids_b):
        return match_by_place(num_a, num_b)
    if num_a == num_b and all(np.array_equal(x, y) for x, y in zip(ids_a, ids_b, strict=True)):
        return match_by_place(num_a, num_b)
    pairs = _pairs_of(ids_a, ids_b)
    if len(pairs) < _ENOUGH * min(num_a, num_b):
        return match_by_place(num_a, num_b)
    taken_a, taken_b = {row for row, _ in pairs}, {row for _, row in pairs}
    # the same place on both sides, under another identity: one sample, renamed
    if num_a == num_b:
        pairs += [(row, row) for row in range(num_a) if row not in taken_a and row not in taken_b]
        pairs.sort()
    rows = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    order = np.argsort(np.argsort(rows[:, 1], kind="stable"), kind="stable")
    return Matching(
        Pairs(rows[:, 0], rows[:, 1]),
        np.setdiff1d(np.arange(num_a), rows[:, 0]),
        np.setdiff1d(np.arange(num_b), rows[:, 1]),
        np.flatnonzero(order != np.arange(len(rows))),
    )


def _pairs_of(ids_a: Sequence[np.ndarray], ids_b: Sequence[np.ndarray]) -> list[tuple[int, int]]:
    """Rows with one identity, those in the same place first: where an identity stands twice on one
    side by mistake, the sample that has it on both is not matched with the one that took it.
    """
    shared = min(len(ids_a[0]), len(ids_b[0]))
    same = np.logical_and.reduce(
        [x[:shared] == y[:shared] for x, y in zip(ids_a, ids_b, strict=True)]
    )
    in_place = np.flatnonzero(same)
    rest_a = np.setdiff1d(np.arange(len(ids_a[0])), in_place)
    rest_b = np.setdiff1d(np.arange(len(ids_b[0])), in_place)
    keys_a, keys_b = _keys([x[rest_a] for x in ids_a]), _keys([x[rest_b] for x in ids_b])
    row_in_b = {key: int(row) for row, key in zip(rest_b, keys_b, strict=True)}
    pairs = [
        (int(row), row_in_b[key])
        for row, key in zip(rest_a, keys_a, strict=True)
        if key in row_in_b
    ]
    return sorted([*((row, row) for row in in_place.tolist()), *pairs])


def _keys(ids: Sequence[np.ndarray]) -> list[tuple[int, ...]]:
    """One key per row: its identities, and how many rows before it have the same."""
    counts: collections.Counter[tuple[int, ...]] = collections.Counter()
    keys = []
    for key in zip(*(column.tolist() for column in ids), strict=True):
        keys.append((*key, counts[key]))
        counts[key] += 1
    return keys


def identities_of(columns: Columns, names: Sequence[str]) -> list[np.ndarray] | None:
    """The identity columns, -1 where a sample has none; None where the table lacks them or no
    sample has one.
    """
    found = [columns.numbers(name) for name in names if name in columns]
    known = [column for column in found if column is not None]
    if not known or bool((known[0] < 0).all()):
        return None
    return known


def match_by_source(sources_a: np.ndarray, sources_b: np.ndarray, samples: Matching) -> Matching:
    """Matches rows that are made of samples (`sources_*` [N]: the sample's row) by their samples,
    the k-th row of a sample with the k-th of its match.
    """
    if samples.is_by_place and np.array_equal(sources_a, sources_b):
        return match_by_place(len(sources_a), len(sources_b))
    label = {int(row): number for number, row in enumerate(samples.pairs.b)}
    names_a = {int(row): number for number, row in enumerate(samples.pairs.a)}
    # what has no match gets a name that the other side does not have
    labels_a = np.array([names_a.get(row, -2 - row) for row in sources_a.tolist()], dtype=np.int64)
    start = -2 - int(max(sources_a, default=0)) - 1
    labels_b = np.array([label.get(row, start - row) for row in sources_b.tolist()], dtype=np.int64)
    keys_a, keys_b = _keys([labels_a]), _keys([labels_b])
    row_in_b = {key: row for row, key in enumerate(keys_b)}
    rows = np.array(
        [(row, row_in_b[key]) for row, key in enumerate(keys_a) if key in row_in_b],
        dtype=np.int64,
    ).reshape(-1, 2)
    order = np.argsort(np.argsort(rows[:, 1], kind="stable"), kind="stable")
    return Matching(
        Pairs(rows[:, 0], rows[:, 1]),
        np.setdiff1d(np.arange(len(sources_a)), rows[:, 0]),
        np.setdiff1d(np.arange(len(sources_b)), rows[:, 1]),
        np.flatnonzero(order != np.arange(len(rows))),
    )


def same_grouping(values: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Numbers of `values[rows]` replaced by the place of their first occurrence: equal for two
    sides that group the same rows, whatever they call the groups.
    """
    chosen = values[rows]
    _, first, inverse = np.unique(chosen, return_index=True, return_inverse=True)
    return first[inverse]
