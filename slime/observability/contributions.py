"""One rank's part of each metric, as pure functions of a batch. A contribution carries what an exact reduction needs, and nothing else.

Sums are kept as two float64 numbers (the rounded sum and what the rounding lost), so that a metric is the same number however the samples
are spread over ranks, also where positive and negative terms cancel. Suffixes: `_N` samples of this rank, `_T` its response tokens.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from slime.utils.rollout_fields import Reduce

BLOCK_TOKENS = 1 << 16


@dataclasses.dataclass(frozen=True)
class Contribution:
    """One rank's part of one metric. `total` + `residue` is the sum; `values` are all values, for quantiles."""

    reduce: Reduce
    total: float = 0.0
    residue: float = 0.0
    count: float = 0.0
    extreme: float | None = None
    values: np.ndarray | None = None
    points: tuple[tuple[str, float], ...] = ()


def exact_sum(values: Iterable[float]) -> tuple[float, float]:
    """`(rounded sum, what rounding it lost)`."""
    values = list(values)
    total = math.fsum(values)
    if not math.isfinite(total):
        return total, 0.0
    values.append(-total)
    return total, math.fsum(values)


def mean(total_terms: Any, count: float) -> Contribution:
    """Part of a mean: the sum of `total_terms` over `count`. The mean over no count is left out of the metrics."""
    total, residue = exact_sum(np.asarray(total_terms, dtype=np.float64).reshape(-1).tolist())
    return Contribution(Reduce.MEAN, total=total, residue=residue, count=float(count))


def total(terms: Any) -> Contribution:
    """Part of a sum."""
    value, residue = exact_sum(np.asarray(terms, dtype=np.float64).reshape(-1).tolist())
    return Contribution(Reduce.SUM, total=value, residue=residue)


def maximum(values: Any) -> Contribution:
    """Part of a maximum; nothing where there are no values."""
    array = np.asarray(values, dtype=np.float64)
    return Contribution(Reduce.MAX, extreme=float(array.max()) if array.size else None)


def minimum(values: Any) -> Contribution:
    """Part of a minimum; nothing where there are no values."""
    array = np.asarray(values, dtype=np.float64)
    return Contribution(Reduce.MIN, extreme=float(array.min()) if array.size else None)


def quantiles(values: Any, points: Sequence[tuple[str, float]]) -> Contribution:
    """Part of exact quantiles: `points` are (suffix of the metric's name, share in [0, 1])."""
    return Contribution(Reduce.QUANTILES, values=np.asarray(values, dtype=np.float64).reshape(-1), points=tuple(points))


def merge(parts: Sequence[Contribution]) -> dict[str, float]:
    """`{suffix: value}` of one metric from every rank's part ("" for its own name); {} where no rank has anything.

    Quantiles interpolate linearly between neighbours, as numpy does.
    """
    reduce = parts[0].reduce
    if any(part.reduce is not reduce for part in parts):
        raise ValueError(f"ranks disagree about the reduction: {sorted({part.reduce.value for part in parts})}")
    if reduce is Reduce.QUANTILES:
        values = np.sort(np.concatenate([part.values for part in parts]))
        return {suffix: float(np.quantile(values, share)) for suffix, share in parts[0].points} if values.size else {}
    if reduce in (Reduce.MAX, Reduce.MIN):
        extremes = [part.extreme for part in parts if part.extreme is not None]
        return {"": max(extremes) if reduce is Reduce.MAX else min(extremes)} if extremes else {}
    value = math.fsum(number for part in parts for number in (part.total, part.residue))
    if reduce is Reduce.SUM:
        return {"": value}
    count = math.fsum(part.count for part in parts)
    return {"": value / count} if count else {}


def merge_all(per_rank: Sequence[dict[str, Contribution]]) -> dict[str, float]:
    """The metrics of all ranks: the union of their keys, each reduced over the ranks that have it."""
    names = list(dict.fromkeys(name for contributions in per_rank for name in contributions))
    metrics: dict[str, float] = {}
    for name in names:
        parts = [contributions[name] for contributions in per_rank if name in contributions]
        metrics.update({f"{name}{suffix}": value for suffix, value in merge(parts).items()})
    return metrics


# --- per-token and per-sample fields -------------------------------------------------------------------------------------


def segment_sums(values_T: Any, lengths_N: np.ndarray, mask_T: np.ndarray | None = None) -> np.ndarray:
    """float64 [N]: the sum of each sample's values, in float64; entries where `mask_T` is False are not read.

    `values_T` is the concatenation, or a list with one CPU tensor per sample. Block by block, so that the float64 copy stays in the cache.
    ValueError where there are more or fewer values than the lengths say.
    """
    expected = len(lengths_N) if isinstance(values_T, list) else int(np.sum(lengths_N))
    if len(values_T) != expected:
        raise ValueError(f"{len(values_T)} entries where the samples of this rank have {expected}")
    sums_N = np.zeros(len(lengths_N))
    ends = np.cumsum(lengths_N)
    filled = np.flatnonzero(lengths_N)
    starts = (ends - lengths_N)[filled]
    first = 0
    while first < len(filled):
        low = int(starts[first])
        last = max(first + 1, int(np.searchsorted(starts, low + BLOCK_TOKENS)))
        high = int(ends[filled[last - 1]])
        if isinstance(values_T, list):
            block = _concatenate(values_T[filled[first] : filled[last - 1] + 1]).astype(np.float64)
        else:
            block = values_T[low:high].astype(np.float64)
        if len(block) != high - low:
            raise ValueError(f"{len(block)} values for the {high - low} response tokens of some samples")
        if mask_T is not None:
            np.copyto(block, 0.0, where=~mask_T[low:high])
        sums_N[filled[first:last]] = np.add.reduceat(block, starts[first:last] - low)
        first = last
    return sums_N


def _concatenate(tensors: list) -> np.ndarray:
    import torch

    return torch.cat(tensors).detach().numpy()


@dataclasses.dataclass(frozen=True)
class SampleTokens:
    """This rank's response tokens: how many each sample has here, which are trained, and each sample's denominators.

    `lengths_N`: tokens on this rank; `mask_T` bool over them, None where all are trained; `mask_sums_N`: trainable tokens of the full response;
    `rollout_mask_sums_N`: of its whole rollout. `copies`: ranks that report the same samples (context parallelism), each with its own tokens.
    """

    lengths_N: np.ndarray
    mask_T: np.ndarray | None
    mask_sums_N: np.ndarray
    rollout_mask_sums_N: np.ndarray
    copies: int = 1

    def masked_sums(self, values_T: Any) -> np.ndarray:
        """float64 [N]: the sum of each sample's trained tokens. `values_T` as in `segment_sums`."""
        return segment_sums(values_T, self.lengths_N, self.mask_T)

    def rollout_mean(self, values_T: Any) -> Contribution:
        """Masked token mean within each rollout, then the mean over rollouts that have a trainable token."""
        has = self.rollout_mask_sums_N > 0
        denominators = self.rollout_mask_sums_N[has]
        # a rollout's samples share one count, in proportion to their tokens, wherever they are
        count = math.fsum((self.mask_sums_N[has] / denominators).tolist()) / self.copies
        return mean(self.masked_sums(values_T)[has] / denominators, count)

    def token_mean(self, values_T: Any) -> Contribution:
        """Mean over all trained tokens."""
        return mean(self.masked_sums(values_T), int(self.mask_sums_N.sum()) / self.copies)

    def sample_mean(self, values_T: Any, chosen_N: np.ndarray) -> Contribution:
        """Masked token mean within each chosen sample, then the mean over those that have a trainable token."""
        has = chosen_N & (self.mask_sums_N > 0)
        return mean(self.masked_sums(values_T)[has] / self.mask_sums_N[has], int(has.sum()) / self.copies)


def weighted_mean(values_N: Any, weights_N: Any) -> Contribution:
    """Mean with weights; non-finite values are left out together with their weight."""
    values, weights = np.asarray(values_N, dtype=np.float64), np.asarray(weights_N, dtype=np.float64)
    keep = np.isfinite(values)
    return mean(values[keep] * weights[keep], math.fsum(weights[keep].tolist()))


def length_share_by_quarter(lengths: Any, longest: int) -> list[Contribution]:
    """Share of `lengths` in each quarter of (0, longest]: four parts of means. Longer ones count in the last quarter."""
    lengths = np.asarray(lengths, dtype=np.float64)
    quarter = np.clip(np.ceil(4 * lengths / longest) - 1, 0, 3).astype(int)
    counts = np.bincount(quarter, minlength=4)
    return [mean([count], len(lengths)) for count in counts.tolist()]
