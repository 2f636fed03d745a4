"""Samples with something wrong in them, at random: any field, or any entry inside one, replaced by
any kind of junk.
"""

from __future__ import annotations

import math
import random

import numpy as np

from slime.data.sample import Sample, Status

JUNK = [
    None, -1, 0, 1, 2**31, 2**70, -(2**70), 1.5, math.nan, math.inf, True, "", "x", "\ud800", "\udfff text \ud800", "\u200b", b"bytes",
    [], [None], [[]], ["a"], [1.5], [-1], [2**40], [math.nan], {}, {"k": 1}, (), (1, 2), np.zeros(0), np.zeros((2, 2)), np.array(["a"]),
    np.array([1, 2], dtype=np.uint64), np.array(3), np.array([None, 1]), object(), Status.ABORTED, "stop", "length", range(5), 1j,
]  # fmt: skip
FIELDS = (
    "tokens",
    "response",
    "response_length",
    "rollout_log_probs",
    "loss_mask",
    "status",
    "finish_reason",
    "reward",
)
FIELDS += ("group_index", "index", "prompt", "metadata", "valid", "invalid_reason")


def mutate(rng: random.Random, sample: Sample) -> Sample:
    """One to three random changes of fields or of entries inside them."""
    for _ in range(rng.randint(1, 3)):
        field = rng.choice(FIELDS)
        value = getattr(sample, field)
        if isinstance(value, list) and value and rng.random() < 0.5:
            value = list(value)
            action = rng.randrange(3)
            if action == 0:
                value[rng.randrange(len(value))] = rng.choice(JUNK)
            elif action == 1:
                del value[rng.randrange(len(value))]
            else:
                value.insert(rng.randrange(len(value)), rng.choice(JUNK))
            setattr(sample, field, value)
        else:
            setattr(sample, field, rng.choice(JUNK))
    return sample
