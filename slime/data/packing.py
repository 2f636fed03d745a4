"""Packing samples into micro-batches under a token cap, so that all ranks have the same number of
micro-batches and near-equal work.

First the number of bins: the smallest multiple of `align` that the tokens allow. Then a packing
into that many bins, by heuristics from quick to thorough. Then bins are dealt to ranks and bins and
samples are exchanged between ranks until their work is even. Lower bounds and heuristics: Martello
and Toth, "Knapsack Problems", 1990, chapter 8; the subset sums per bin are the minimum bin slack of
Gupta and Ho, 1999.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Sequence

import numpy as np

# blocks of `align` bins beyond the lower bound before every sample gets its own bin
MAX_EXTRA_BLOCKS = 64
MAX_EXCHANGES_PER_RANK = 64
GOOD_ENOUGH = 1.0005  # busiest rank over the mean
SUBSET_SUM_LIMIT = 4_000_000  # samples times bins; above it only the quick heuristics run
PAIR_LIMIT = 1024  # samples of a rank that an exchange looks at

Bins = list[list[int]]


def pack_balanced(
    lengths: Sequence[int] | np.ndarray,
    work: Sequence[float] | np.ndarray,
    *,
    cap: int,
    num_ranks: int,
    align: int,
) -> list[list[list[int]]]:
    """Per rank, the same number of micro-batches, as lists of positions: the fewest that were found
    to fit, a multiple of `align` in all.

    No micro-batch holds more than `cap` tokens, except one whose single sample is longer. `work`
    [N] is what ranks are made even in. With fewer samples than micro-batches some are empty.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    work = np.asarray(work, dtype=np.float64)
    bins = _pack(lengths, cap=cap, align=align)
    ranks = _deal(bins, work, num_ranks=num_ranks)
    _exchange(ranks, lengths, work, cap=cap)
    return ranks


def minimum_bins(lengths: np.ndarray, *, cap: int) -> int:
    """A lower bound on the bins that lengths over and under the cap need."""
    fits = lengths <= cap
    needed = -(-int(lengths[fits].sum()) // cap)
    return int((~fits).sum()) + max(needed, int((lengths[fits] > cap / 2).sum()))


def _pack(lengths: np.ndarray, *, cap: int, align: int) -> Bins:
    count = max(align, -(-minimum_bins(lengths, cap=cap) // align) * align)
    over = np.flatnonzero(lengths > cap).tolist()
    order = [int(i) for i in np.argsort(-lengths, kind="stable") if lengths[i] <= cap]
    for _ in range(MAX_EXTRA_BLOCKS):
        room = count - len(over)
        for heuristic in (_emptiest_fit, _best_fit, _subset_sums):
            bins = heuristic(order, lengths, cap=cap, count=room)
            if bins is not None:
                return [[i] for i in over] + bins
        count += align
    singles = [[i] for i in over + order]
    return singles + [[] for _ in range(-len(singles) % align)]


def _emptiest_fit(order: list[int], lengths: np.ndarray, *, cap: int, count: int) -> Bins | None:
    """Longest first, each into the emptiest bin: even bins, where the cap leaves room for that."""
    bins: Bins = [[] for _ in range(count)]
    heap = [(0, k) for k in range(count)]
    for i in order:
        if not heap or heap[0][0] + lengths[i] > cap:
            return None
        load, k = heap[0]
        bins[k].append(i)
        heapq.heapreplace(heap, (load + int(lengths[i]), k))
    return bins


def _best_fit(order: list[int], lengths: np.ndarray, *, cap: int, count: int) -> Bins | None:
    """Longest first, each into the fullest bin it fits into."""
    bins: Bins = [[] for _ in range(count)]
    rooms = [(cap, k) for k in range(count)]  # ascending
    for i in order:
        length = int(lengths[i])
        place = bisect.bisect_left(rooms, (length, -1))
        if place == len(rooms):
            return None
        room, k = rooms.pop(place)
        bins[k].append(i)
        bisect.insort(rooms, (room - length, k))
    return bins


def _subset_sums(order: list[int], lengths: np.ndarray, *, cap: int, count: int) -> Bins | None:
    """Bin after bin: the longest sample left, and the subset of the others that fills the bin best.
    Sums are bits of an integer.
    """
    if len(order) * count > SUBSET_SUM_LIMIT:
        return None
    left = list(order)
    bins: Bins = []
    for _ in range(count):
        if not left:
            bins.append([])
            continue
        first, others = left[0], left[1:]
        chosen = _fullest_subset([int(lengths[i]) for i in others], cap - int(lengths[first]))
        taken = {others[j] for j in chosen}
        bins.append([first, *sorted(taken, key=lambda i: (-lengths[i], i))])
        left = [i for i in others if i not in taken]
    return bins if not left else None


def _fullest_subset(sizes: list[int], room: int) -> list[int]:
    """Positions of a subset of `sizes` with the largest sum <= room. Longer sizes are taken before
    shorter ones where both reach it.
    """
    mask = (1 << (room + 1)) - 1
    reachable = [1]
    used = []
    # long ones first: a short one is taken only where longer ones alone do not reach the sum, and
    # is left for a later bin otherwise
    for position in sorted(range(len(sizes)), key=lambda k: (-sizes[k], k)):
        if sizes[position] > room:
            continue
        reachable.append((reachable[-1] | reachable[-1] << sizes[position]) & mask)
        used.append(position)
        if reachable[-1] >> room:
            break
    target = reachable[-1].bit_length() - 1
    chosen = []
    for step in reversed(range(len(used))):
        if not (reachable[step] >> target) & 1:
            chosen.append(used[step])
            target -= sizes[used[step]]
    return chosen


def _deal(bins: Bins, work: np.ndarray, *, num_ranks: int) -> list[Bins]:
    """Bins to ranks, equally many each, heaviest first to the lightest rank with room."""
    room = len(bins) // num_ranks
    ranks: list[Bins] = [[] for _ in range(num_ranks)]
    heap = [(0.0, rank) for rank in range(num_ranks)]
    weights = [float(work[items].sum()) for items in bins]
    for k in sorted(range(len(bins)), key=lambda k: (-weights[k], k)):
        load, rank = heapq.heappop(heap)
        ranks[rank].append(bins[k])
        if len(ranks[rank]) < room:
            heapq.heappush(heap, (load + weights[k], rank))
    return ranks


def _exchange(ranks: list[Bins], lengths: np.ndarray, work: np.ndarray, *, cap: int) -> None:
    """Moves work from the busiest rank to a lighter one, by the exchange that evens the two best,
    until they are even or none helps.
    """
    loads = np.array([sum(float(work[items].sum()) for items in bins) for bins in ranks])
    mean = loads.mean()
    if mean <= 0 or len(ranks) < 2:
        return
    for _ in range(MAX_EXCHANGES_PER_RANK * len(ranks)):
        busy = int(loads.argmax())
        if loads[busy] <= GOOD_ENOUGH * mean:
            return
        for light in np.argsort(loads, kind="stable").tolist():
            gap = loads[busy] - loads[light]
            moved = (
                _best_exchange(ranks[busy], ranks[light], lengths, work, cap=cap, gap=gap)
                if gap > 0
                else 0.0
            )
            if moved:
                loads[busy] -= moved
                loads[light] += moved
                break
        else:
            return


def _best_exchange(
    busy: Bins, light: Bins, lengths: np.ndarray, work: np.ndarray, *, cap: int, gap: float
) -> float:
    """Applies the exchange of two bins, of two samples, or the move of a sample that leaves the
    smaller gap, and returns the work moved.

    0.0 where every legal one would widen the gap."""
    bin_gain = np.subtract.outer([work[b].sum() for b in busy], [work[b].sum() for b in light])
    samples = _sample_exchanges(busy, light, lengths, work, cap=cap)
    candidates = [(abs(gap / 2 - bin_gain), bin_gain)]
    if samples is not None:
        gain, legal = samples[2]
        candidates.append((np.where(legal, abs(gap / 2 - gain), np.inf), gain))
    scores = [float(score.min()) for score, _ in candidates]
    kind = int(np.argmin(scores))
    # what is left of the gap afterwards is twice the score: it must shrink by more than rounding
    if not scores[kind] < gap / 2 * (1 - 1e-9):
        return 0.0
    i, j = np.unravel_index(int(candidates[kind][0].argmin()), candidates[kind][0].shape)
    if kind == 0:
        busy[i], light[j] = light[j], busy[i]
    else:
        _swap_samples(busy, light, samples[0][i], samples[1][j])
    return float(candidates[kind][1][i, j])


def _sample_exchanges(busy: Bins, light: Bins, lengths: np.ndarray, work: np.ndarray, *, cap: int):
    """(samples of the busy rank, samples and empty places of the light one, (gain, legal)) as (bin,
    sample) pairs; sample -1 is a place.
    """
    give = [(k, i) for k, items in enumerate(busy) for i in items][:PAIR_LIMIT]
    take = [(k, -1) for k in range(len(light))] + [
        (k, i) for k, items in enumerate(light) for i in items
    ][:PAIR_LIMIT]
    if not give:
        return None
    busy_loads = np.array([lengths[items].sum() for items in busy])
    light_loads = np.array([lengths[items].sum() for items in light])
    give_bin, give_i = np.array(give).T
    take_bin, take_i = np.array(take).T
    give_len, take_len = lengths[give_i], np.where(take_i < 0, 0, lengths[take_i])
    gain = work[give_i][:, None] - np.where(take_i < 0, 0.0, work[take_i])[None, :]
    change = give_len[:, None] - take_len[None, :]
    fits_light = light_loads[take_bin][None, :] + change <= cap
    fits_busy = busy_loads[give_bin][:, None] - change <= cap
    # a sample over the cap keeps its own bin
    legal = fits_light & fits_busy & (give_len <= cap)[:, None] & (take_len <= cap)[None, :]
    return give, take, (gain, legal)


def _swap_samples(busy: Bins, light: Bins, give: tuple[int, int], take: tuple[int, int]) -> None:
    (busy_bin, i), (light_bin, j) = give, take
    busy[busy_bin] = [k for k in busy[busy_bin] if k != i] + ([j] if j >= 0 else [])
    light[light_bin] = [k for k in light[light_bin] if k != j] + [i]
