"""How far two samples of lengths are apart: population stability index and two-sample
Kolmogorov-Smirnov. numpy only.
"""

from __future__ import annotations

import math

import numpy as np

_SHARE_FLOOR = 1e-4


def population_stability_index(
    expected: np.ndarray, actual: np.ndarray, *, num_bins: int = 10
) -> float:
    """PSI >= 0 of `actual` [M] against `expected` [N]: sum over bins of (a - e) ln(a / e), a and e
    being shares.

    Bins are the quantiles of `expected`, equal edges merged. Shares are floored at 1e-4, so that an
    empty bin is finite. Usual reading: below 0.1 stable, 0.1 to 0.25 moved, above 0.25 another
    distribution. NaN if either is empty.
    """
    if not len(expected) or not len(actual):
        return math.nan
    edges = np.unique(np.quantile(expected, np.linspace(0, 1, num_bins + 1)[1:-1]))
    share_expected = np.bincount(
        np.searchsorted(edges, expected, side="left"), minlength=len(edges) + 1
    ) / len(expected)
    share_actual = np.bincount(
        np.searchsorted(edges, actual, side="left"), minlength=len(edges) + 1
    ) / len(actual)
    share_expected = np.maximum(share_expected, _SHARE_FLOOR)
    share_actual = np.maximum(share_actual, _SHARE_FLOOR)
    return float(((share_actual - share_expected) * np.log(share_actual / share_expected)).sum())


def expected_psi_noise(num_expected: int, num_actual: int, *, num_bins: int = 10) -> float:
    """Mean PSI of two samples of the *same* distribution: (bins - 1)(1/N + 1/M). Small batches
    drift by chance alone.
    """
    if not num_expected or not num_actual:
        return math.inf
    return (num_bins - 1) * (1 / num_expected + 1 / num_actual)


def kolmogorov_smirnov(first: np.ndarray, second: np.ndarray) -> tuple[float, float]:
    """(D, p): largest distance of the two empirical distribution functions, and its asymptotic
    two-sided p-value.

    p = Q(sqrt(nm/(n+m)) D) with Q(x) = 2 sum_{k>=1} (-1)^(k-1) exp(-2 k^2 x^2) (Kolmogorov). NaN,
    NaN if either is empty.
    """
    n, m = len(first), len(second)
    if not n or not m:
        return math.nan, math.nan
    first, second = np.sort(first), np.sort(second)
    points = np.concatenate([first, second])
    distance = np.abs(
        np.searchsorted(first, points, side="right") / n
        - np.searchsorted(second, points, side="right") / m
    ).max()
    x = math.sqrt(n * m / (n + m)) * distance
    if x < 0.2:  # the alternating series needs many terms here, and Q is 1 to double precision
        return float(distance), 1.0
    k = np.arange(1, 101)
    p = 2 * (np.where(k % 2 == 1, 1.0, -1.0) * np.exp(-2.0 * k**2 * x**2)).sum()
    return float(distance), float(min(max(p, 0.0), 1.0))
