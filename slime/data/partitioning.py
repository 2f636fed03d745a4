"""Splitting lengths into balanced parts (Karmarkar and Karp's largest differencing) and packing
them into bins (first fit).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

# A part is (sum, number of items, items); tuples compare in that order, which makes every tie a
# defined one.
Part = tuple[float, int, tuple[int, ...]]


class _State:
    """k disjoint parts, largest first. The heap pops the state with the largest spread; ties go to
    the greater largest part.
    """

    __slots__ = ("parts", "spread")

    def __init__(self, parts: list[Part]) -> None:
        self.parts = sorted(parts, reverse=True)
        self.spread = self.parts[0][0] - self.parts[-1][0]

    def __lt__(self, other: _State) -> bool:
        if self.spread != other.spread:
            return self.spread > other.spread
        return self.parts[0] > other.parts[0]

    def merge(self, other: _State) -> _State:
        """Pairs the largest part of one with the smallest of the other."""
        pairs = zip(self.parts, reversed(other.parts), strict=True)
        return _State([(a[0] + b[0], a[1] + b[1], a[2] + b[2]) for a, b in pairs])


def karmarkar_karp(
    seqlen_list: Sequence[float], k_partitions: int, equal_size: bool
) -> list[list[int]]:
    """`k_partitions` lists of positions whose sums are near-equal; with `equal_size` they also have
    the same number of items.

    Items enter in ascending (length, position) order. AssertionError when `equal_size` and the
    count is not a multiple of k.
    """
    order = sorted(range(len(seqlen_list)), key=lambda i: (seqlen_list[i], i))
    empty: Part = (0, 0, ())
    if equal_size:
        assert len(order) % k_partitions == 0, (
            f"{len(order)} items do not divide into {k_partitions} parts of equal size"
        )
        blocks = [order[i : i + k_partitions] for i in range(0, len(order), k_partitions)]
    else:
        blocks = [[i] for i in order]
    heap = [
        _State([(seqlen_list[i], 1, (i,)) for i in block] + [empty] * (k_partitions - len(block)))
        for block in blocks
    ]
    heapq.heapify(heap)
    while len(heap) > 1:
        first, second = heapq.heappop(heap), heapq.heappop(heap)
        heapq.heappush(heap, first.merge(second))
    return [list(part[2]) for part in heap[0].parts] if heap else [[] for _ in range(k_partitions)]


def greedy_partition(
    seqlen_list: Sequence[float], k_partitions: int, equal_size: bool
) -> list[list[int]]:
    """Longest first into the lightest part (that has room, with `equal_size`)."""
    if equal_size:
        assert len(seqlen_list) % k_partitions == 0, (
            f"{len(seqlen_list)} items do not divide into {k_partitions} parts of equal size"
        )
    room = len(seqlen_list) // k_partitions if equal_size else len(seqlen_list)
    parts: list[list[int]] = [[] for _ in range(k_partitions)]
    heap: list[tuple[float, int]] = [(0, k) for k in range(k_partitions)]
    for i in sorted(range(len(seqlen_list)), key=lambda i: (-seqlen_list[i], i)):
        load, k = heapq.heappop(heap)
        parts[k].append(i)
        if len(parts[k]) < room:
            heapq.heappush(heap, (load + seqlen_list[i], k))
    return parts


def get_seqlen_balanced_partitions(
    seqlen_list: Sequence[float], k_partitions: int, equal_size: bool
) -> list[list[int]]:
    """`karmarkar_karp`, checked (no empty part, every position once) and with each part sorted
    ascending.
    """
    assert len(seqlen_list) >= k_partitions, (
        f"{len(seqlen_list)} items cannot fill {k_partitions} parts"
    )
    parts = [sorted(part) for part in karmarkar_karp(seqlen_list, k_partitions, equal_size)]
    assert all(parts), f"empty part among {k_partitions} of {len(seqlen_list)} items"
    assert sorted(i for part in parts for i in part) == list(range(len(seqlen_list))), (
        "parts are not a disjoint cover"
    )
    return parts


def first_fit_pack(total_lengths: Sequence[int], max_tokens_per_bin: int) -> list[list[int]]:
    """Bins of positions: each length, in order, goes to the first bin it fits into; a length over
    the cap sits alone.

    O(n log n): a tree holds the largest room below each node, unopened bins having all of it, so
    the first bin that fits is the leftmost leaf.
    """
    count = len(total_lengths)
    size = 1 << max(count - 1, 0).bit_length()
    room = [max_tokens_per_bin] * (2 * size)
    bins: list[list[int]] = []
    for position, length in enumerate(total_lengths):
        if length > max_tokens_per_bin:
            node = size + len(bins)
        else:
            node = 1
            while node < size:
                node *= 2
                if room[node] < length:
                    node += 1
        leaf = node - size
        if leaf == len(bins):
            bins.append([position])
        else:
            bins[leaf].append(position)
        room[node] -= length
        while node > 1:
            sibling = room[node ^ 1]
            best = room[node]
            if sibling > best:
                best = sibling
            node >>= 1
            if room[node] == best:
                break
            room[node] = best
    return bins


def expand_bins_by_splitting(
    bins: list[list[int]], target_count: int, lengths: Sequence[int]
) -> None:
    """Grows `bins` in place to `target_count` by halving, by tokens, the fullest bin with more than
    one sample; stops at singletons.
    """
    heap = [(-sum(lengths[i] for i in items), k) for k, items in enumerate(bins) if len(items) > 1]
    heapq.heapify(heap)
    while len(bins) < target_count and heap:
        _, k = heapq.heappop(heap)
        halves = get_seqlen_balanced_partitions([lengths[i] for i in bins[k]], 2, equal_size=False)
        first, second = ([bins[k][j] for j in half] for half in halves)
        bins[k] = first
        bins.append(second)
        for index in (k, len(bins) - 1):
            if len(bins[index]) > 1:
                heapq.heappush(heap, (-sum(lengths[i] for i in bins[index]), index))


def get_reverse_idx(idx_map: Sequence[int]) -> list[int]:
    """The inverse of a permutation: result[idx_map[i]] == i."""
    result = [0] * len(idx_map)
    for i, target in enumerate(idx_map):
        result[target] = i
    return result
