"""One part of each metric, as pure functions of what a rank, or a micro-batch, holds. A contribution
carries what an exact reduction needs, and nothing else.

    losses      metrics["ratio/max"] = maximum(tokens.trained(ratio))       step_metrics.py
    batches     result[spec.metric_name] = tokens.rollout_mean(values_T)    batch_values.py
    samples     parts["truncated_ratio"] = mean(cut, len(cut))              rollout_metrics.py

Sums are kept as two float64 numbers (the rounded sum and what the rounding lost), so that a metric
is the same number however the samples are spread over ranks, also where positive and negative terms
cancel. Suffixes: `_N` samples of this rank, `_T` its response tokens.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from slime.data.fields import Reduce
from slime.data.ragged import as_array
from slime.typing import Numbers

BLOCK_TOKENS = 1 << 18


@dataclasses.dataclass(frozen=True)
class Contribution:
    """One rank's part of one metric. `total` + `residue` is the sum; `values` are all values, for
    quantiles.
    """

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
    total = _fsum(values)
    if not math.isfinite(total):
        return total, 0.0
    values.append(-total)
    return total, math.fsum(values)


def _fsum(values: Sequence[float]) -> float:
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):  # of infinities, or beyond what a float holds
        with np.errstate(all="ignore"):
            return float(np.sum(values))


def _flat(values: Numbers | float) -> np.ndarray:
    """`values` (numbers, an array or a tensor on any device) as float64 [n]."""
    return as_array(values).astype(np.float64).reshape(-1)


def mean(total_terms: Numbers | float, count: float) -> Contribution:
    """Part of a mean: the sum of `total_terms` over `count`. The mean over no count is left out of
    the metrics.
    """
    total, residue = exact_sum(_flat(total_terms).tolist())
    return Contribution(Reduce.MEAN, total=total, residue=residue, count=float(count))


def total(terms: Numbers | float) -> Contribution:
    """Part of a sum."""
    value, residue = exact_sum(_flat(terms).tolist())
    return Contribution(Reduce.SUM, total=value, residue=residue)


def maximum(values: Numbers) -> Contribution:
    """Part of a maximum; nothing where there are no values."""
    array = _flat(values)
    return Contribution(Reduce.MAX, extreme=float(array.max()) if array.size else None)


def minimum(values: Numbers) -> Contribution:
    """Part of a minimum; nothing where there are no values."""
    array = _flat(values)
    return Contribution(Reduce.MIN, extreme=float(array.min()) if array.size else None)


# What a declared field or a length with Reduce.QUANTILES is logged as: suffix of the metric's name,
# share.
QUARTILES = (
    ("/quantile_25", 0.25),
    ("/quantile_50", 0.5),
    ("/quantile_75", 0.75),
    ("/quantile_100", 1.0),
)


def quantiles(values: Numbers, points: Sequence[tuple[str, float]]) -> Contribution:
    """Part of exact quantiles: `points` are (suffix of the metric's name, share in [0, 1])."""
    return Contribution(
        Reduce.QUANTILES,
        values=_flat(values),
        points=tuple(points),
    )


def summary(values: Numbers) -> dict[str, Contribution]:
    """Parts of `mean`, `median`, `max` and `min` of the values, which are in no metric where there
    are none.
    """
    array = _flat(values)
    return {
        "mean": mean(array, len(array)),
        "median": quantiles(array, (("", 0.5),)),
        "max": maximum(array),
        "min": minimum(array),
    }


def of_values(reduce: Reduce, values: Numbers) -> Contribution | None:
    """Part of the reduction of single values, those left out that are not finite. None for a
    reduction that must know whose the values are.
    """
    array = _flat(values)
    array = array[np.isfinite(array)]
    makers: dict[Reduce, Callable[[], Contribution]] = {
        Reduce.MEAN: lambda: mean(array, len(array)),
        Reduce.SUM: lambda: total(array),
        Reduce.MIN: lambda: minimum(array),
        Reduce.MAX: lambda: maximum(array),
        Reduce.QUANTILES: lambda: quantiles(array, QUARTILES),
    }
    return makers[reduce]() if reduce in makers else None


def add_prefix(parts: Mapping[str, Contribution], prefix: str) -> dict[str, Contribution]:
    """`parts` with `prefix` before every name."""
    return {f"{prefix}{name}": part for name, part in parts.items()}


def merge(parts: Sequence[Contribution], *, name: str = "a metric") -> dict[str, float]:
    """`{suffix: value}` of one metric from all its parts ("" for its own name); {} where no part
    has anything. ValueError that names the metric where parts have unlike reductions.

    Quantiles interpolate linearly between neighbours, as numpy does.
    """
    reduce = parts[0].reduce
    if any(part.reduce is not reduce for part in parts):
        raise ValueError(
            f"{name} is reduced in several ways: {sorted({part.reduce.value for part in parts})}. "
            "Give each reduction a name of its own."
        )
    if reduce is Reduce.QUANTILES:
        values = np.sort(np.concatenate([part.values for part in parts]))
        return (
            {suffix: float(np.quantile(values, share)) for suffix, share in parts[0].points}
            if values.size
            else {}
        )
    if reduce in (Reduce.MAX, Reduce.MIN):
        extremes = [part.extreme for part in parts if part.extreme is not None]
        largest = np.max if reduce is Reduce.MAX else np.min  # a NaN of any rank stays one
        return {"": float(largest(extremes))} if extremes else {}
    value = _fsum([number for part in parts for number in (part.total, part.residue)])
    if reduce is Reduce.SUM:
        return {"": value}
    count = math.fsum(part.count for part in parts)
    return {"": value / count} if count else {}


def merge_all(per_rank: Sequence[dict[str, Contribution]]) -> dict[str, float]:
    """The metrics of all ranks, or of all micro-batches: the union of their keys, each reduced over
    those that have it.
    """
    names = list(dict.fromkeys(name for contributions in per_rank for name in contributions))
    metrics: dict[str, float] = {}
    for name in names:
        parts = [contributions[name] for contributions in per_rank if name in contributions]
        metrics.update(
            {f"{name}{suffix}": value for suffix, value in merge(parts, name=name).items()}
        )
    return metrics


# --- per-token and per-sample fields --------------------------------------------------------------


class SegmentPlan:
    """Where each sample's values stand in a concatenation of `lengths_N` values, the blocks of
    whole samples to walk over, and the memory for one block. Made once per batch and used for every
    field.
    """

    def __init__(self, lengths_N: npt.ArrayLike) -> None:
        self.lengths_N = np.asarray(lengths_N, dtype=np.int64)
        self.num_tokens = int(self.lengths_N.sum())
        # reduceat would give an empty sample its neighbour's value
        self.filled = np.flatnonzero(self.lengths_N)
        ends = np.cumsum(self.lengths_N)[self.filled]
        self.starts = ends - self.lengths_N[self.filled]
        firsts = np.flatnonzero(np.diff(self.starts // BLOCK_TOKENS, prepend=-1))
        lasts = np.append(firsts[1:], len(self.filled))[: len(firsts)]
        lows, highs = self.starts[firsts], ends[lasts - 1]
        self.starts_in_block = self.starts - np.repeat(lows, lasts - firsts)
        self.blocks = list(
            zip(firsts.tolist(), lasts.tolist(), lows.tolist(), highs.tolist(), strict=True)
        )
        self.longest_block = int((highs - lows).max(initial=0))

    @functools.cached_property
    def buffer(self) -> np.ndarray:
        """float64 [longest block]. One that stays in the cache: fresh memory for every block costs
        more than the sums.
        """
        return np.empty(self.longest_block)


def segment_sums(
    values_T: np.ndarray, plan: SegmentPlan, mask_T: np.ndarray | None = None
) -> np.ndarray:
    """float64 [N]: the sum of each sample's values, added in float64, in their order; entries where
    `mask_T` is False are not read.

    `values_T` is the concatenation of the samples' values. ValueError where it has more or fewer
    than the plan's lengths say.
    """
    if len(values_T) != plan.num_tokens:
        raise ValueError(
            f"{len(values_T)} values where the samples of this rank have {plan.num_tokens} "
            "response tokens"
        )
    sums = np.empty(len(plan.filled))
    for first, last, low, high in plan.blocks:
        block = plan.buffer[: high - low]
        np.copyto(block, values_T[low:high], casting="unsafe")
        if mask_T is not None:
            np.copyto(block, 0.0, where=~mask_T[low:high])
        np.add.reduceat(block, plan.starts_in_block[first:last], 0, None, sums[first:last])
    sums_N = np.zeros(len(plan.lengths_N))
    sums_N[plan.filled] = sums
    return sums_N


@dataclasses.dataclass(frozen=True)
class SampleTokens:
    """This rank's response tokens: how many each sample has here, which are trained, and each
    sample's denominators.

    `plan`: tokens on this rank; `mask_T` bool over them, None where all are trained; `mask_sums_N`:
    trainable tokens of the full response; `rollout_mask_sums_N`: of its whole rollout. `copies`:
    ranks that report the same samples (context parallelism), each with its own tokens. Sums are
    remembered by the memory they are of, so values must not change while this object is in use.
    """

    plan: SegmentPlan
    mask_T: np.ndarray | None
    mask_sums_N: np.ndarray
    rollout_mask_sums_N: np.ndarray
    copies: int = 1
    known: dict[tuple[int, int, str], tuple[np.ndarray, np.ndarray]] = dataclasses.field(
        default_factory=dict, repr=False
    )

    def masked_sums(self, values_T: np.ndarray) -> np.ndarray:
        """float64 [N]: the sum of each sample's trained tokens. `values_T` as in `segment_sums`."""
        # group estimators make one tensor, which is both the advantages and the returns
        key = (values_T.ctypes.data, values_T.strides[0], values_T.dtype.str)
        if key not in self.known:
            # keeps the array, so that its address stays its own
            self.known[key] = (values_T, segment_sums(values_T, self.plan, self.mask_T))
        return self.known[key][1]

    @functools.cached_property
    def rollout_count(self) -> float:
        """This rank's part of the number of rollouts that have a trainable token."""
        has = self.rollout_mask_sums_N > 0
        # a rollout's samples share one count, in proportion to their tokens, wherever they are
        return (
            math.fsum((self.mask_sums_N[has] / self.rollout_mask_sums_N[has]).tolist())
            / self.copies
        )

    def rollout_mean(self, values_T: np.ndarray) -> Contribution:
        """Masked token mean within each rollout, then the mean over rollouts that have a trainable
        token.
        """
        has = self.rollout_mask_sums_N > 0
        return mean(
            self.masked_sums(values_T)[has] / self.rollout_mask_sums_N[has], self.rollout_count
        )

    def token_mean(self, values_T: np.ndarray) -> Contribution:
        """Mean over all trained tokens."""
        return mean(self.masked_sums(values_T), int(self.mask_sums_N.sum()) / self.copies)

    def sample_mean(
        self, values_T: np.ndarray, chosen_N: np.ndarray, *, sign: int = 1
    ) -> Contribution:
        """`sign` times the masked token mean within each chosen sample, then the mean over those
        that have a trainable token.
        """
        has = chosen_N & (self.mask_sums_N > 0)
        return mean(
            sign * self.masked_sums(values_T)[has] / self.mask_sums_N[has],
            int(has.sum()) / self.copies,
        )


def weighted_mean(values_N: npt.ArrayLike, weights_N: npt.ArrayLike) -> Contribution:
    """Mean with weights; non-finite values are left out together with their weight."""
    values, weights = (
        np.asarray(values_N, dtype=np.float64),
        np.asarray(weights_N, dtype=np.float64),
    )
    keep = np.isfinite(values)
    return mean(values[keep] * weights[keep], math.fsum(weights[keep].tolist()))


def length_share_by_quarter(lengths: npt.ArrayLike, longest: int) -> list[Contribution]:
    """Share of `lengths` in each quarter of (0, longest]: four parts of means. Longer ones count in
    the last quarter.
    """
    lengths = np.asarray(lengths, dtype=np.float64)
    quarter = np.clip(np.ceil(4 * lengths / longest) - 1, 0, 3).astype(int)
    counts = np.bincount(quarter, minlength=4)
    return [mean([count], len(lengths)) for count in counts.tolist()]
