"""Packing samples into micro-batches under a token cap so that all ranks have the same number of micro-batches and near-equal work."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

MAX_ROUNDS = 64  # each adds one aligned block of micro-batches; best fit never needs more than twice the lower bound


def pack_balanced(
    lengths: Sequence[int], work: Sequence[float], *, cap: int, num_ranks: int, align: int
) -> list[list[list[int]]]:
    """Per rank, `count / num_ranks` micro-batches of positions, with `count` the smallest multiple of `align` that was found to fit.

    No micro-batch holds more than `cap` tokens, except one whose single sample is longer. Ranks differ in work as little as was found.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    work = np.asarray(work, dtype=np.float64)
    over = np.flatnonzero(lengths > cap)
    minimum = len(over) + -(-int(lengths[lengths <= cap].sum()) // cap)
    count = max(align, -(-minimum // align) * align)
    for _ in range(MAX_ROUNDS):
        bins = _best_fit(lengths, cap=cap, count=count)
        if bins is not None:
            break
        count += align
    else:
        bins = [[i] for i in range(len(lengths))]
        bins += [[] for _ in range(-len(bins) % align)]
    return _spread(bins, work, num_ranks=num_ranks)


def _best_fit(lengths: np.ndarray, *, cap: int, count: int) -> list[list[int]] | None:
    """Longest first, each into the emptiest of `count` bins that it fits; None where one does not fit."""
    bins: list[list[int]] = [[] for _ in range(count)]
    heap = [(0, k) for k in range(count)]
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        load, k = heapq.heappop(heap)
        if load and load + lengths[i] > cap:
            return None
        bins[k].append(i)
        heapq.heappush(heap, (load + int(lengths[i]), k))
    return bins


def _spread(bins: list[list[int]], work: np.ndarray, *, num_ranks: int) -> list[list[list[int]]]:
    """Deals bins to ranks, equally many each, heaviest first to the lightest rank with room."""
    room = len(bins) // num_ranks
    ranks: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    heap = [(0.0, r) for r in range(num_ranks)]
    for items in sorted(bins, key=lambda items: (-float(work[items].sum()), items)):
        load, r = heapq.heappop(heap)
        ranks[r].append(items)
        if len(ranks[r]) < room:
            heapq.heappush(heap, (load + float(work[items].sum()), r))
    return ranks
