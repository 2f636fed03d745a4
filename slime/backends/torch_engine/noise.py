"""Randomness as a function of (seed, position): the same number whatever the batch, the order of
arrival or the machine.

The function is SplitMix64's finalizer (Steele, Lea, Flood 2014) applied to the seed and then to
seed and position, vectorised over the batch in 64-bit integers; its upper 53 bits make a float64 in
[0, 1).
"""

from __future__ import annotations

import numpy as np

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)


def mix64(values: np.ndarray) -> np.ndarray:
    """Returns a bijective scrambling of uint64 `values` [N]."""
    with np.errstate(over="ignore"):
        values = values + GOLDEN
        values = (values ^ (values >> np.uint64(30))) * MULTIPLIER_1
        values = (values ^ (values >> np.uint64(27))) * MULTIPLIER_2
    return values ^ (values >> np.uint64(31))


def uniform(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Returns float64 [N] in [0, 1) from uint64 `seeds` [N] and the index of the response token,
    `positions` [N].
    """
    scrambled = mix64(mix64(seeds) ^ mix64(positions.astype(np.uint64)))
    return (scrambled >> np.uint64(11)).astype(np.float64) * 2.0**-53


def seed_to_uint64(seed: int) -> int:
    """Returns `seed` modulo 2**64, so that negative seeds are legal and distinct."""
    return seed & 0xFFFFFFFFFFFFFFFF


def sibling_seed(seed: int, index: int) -> int:
    """Returns the seed of result `index` of a request with n > 1: the request's own for index 0, a
    scrambled one after that.
    """
    if index == 0:
        return seed_to_uint64(seed)
    values = np.array([seed_to_uint64(seed), index], dtype=np.uint64)
    return int(mix64(mix64(values[:1]) + mix64(values[1:]))[0])
