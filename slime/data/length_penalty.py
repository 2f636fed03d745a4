"""Penalties on the length of a response, added to the scored reward before the group's baseline.
The raw reward stays as it was scored.

Budget 100 tokens, buffer 20, weight 1, `soft_overlong`: 80 tokens -> 0, 90 -> -0.5, 100 and more ->
-1. Suffix `_N`: samples.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

from slime.data.rewards import is_solved


@dataclasses.dataclass(frozen=True)
class LengthPenalty:
    """Which penalty, and its numbers. `budget` and `buffer` are tokens; a reward of at least
    `solved_from` (None: exactly 1) is a right answer.
    """

    name: str = "none"
    weight: float = 1.0
    budget: int = 0
    buffer: int = 0
    solved_from: float | None = None

    @staticmethod
    def from_args(args: argparse.Namespace) -> LengthPenalty:
        """From --length-penalty and its options; the budget is --rollout-max-response-len, the
        buffer by default a fifth of it.
        """
        budget = args.rollout_max_response_len or 0
        buffer = args.length_penalty_buffer
        return LengthPenalty(
            name=args.length_penalty,
            weight=args.length_penalty_weight,
            budget=budget,
            buffer=math.ceil(budget / 5) if buffer is None else buffer,
            solved_from=args.passrate_threshold,
        )


def compute_length_penalties(
    lengths: Sequence[int],
    rewards: Sequence[float] | np.ndarray,
    group_ids: Sequence[int],
    counts: Sequence[bool] | np.ndarray,
    *,
    penalty: LengthPenalty,
) -> np.ndarray:
    """What is added to each reward, float64 [N]: 0 for a sample that does not count in a baseline
    or has no finite reward, and such a sample does not change the penalty of another.

    soft_overlong: 0 up to budget - buffer tokens, then linear down to -weight at the budget (DAPO,
    arXiv 2503.14476, eq. 13). linear: -weight * length / budget, at most -weight. group_relative:
    weight * (0.5 - (length - shortest) / (longest - shortest)) within the group, at most 0 for a
    wrong answer, 0 where all are equally long (Kimi k1.5, arXiv 2501.12599, section 2.3.3).
    """
    lengths_N, rewards_N = (
        np.asarray(lengths, dtype=np.float64),
        np.asarray(rewards, dtype=np.float64),
    )
    counts_N = np.asarray(counts, dtype=bool) & np.isfinite(rewards_N)
    compute: dict[str, Callable[[], np.ndarray]] = {
        "none": lambda: np.zeros(len(lengths_N)),
        "soft_overlong": lambda: (
            -np.clip(
                (lengths_N - (penalty.budget - penalty.buffer)) / max(penalty.buffer, 1), 0.0, 1.0
            )
        ),
        "linear": lambda: -np.clip(lengths_N / max(penalty.budget, 1), 0.0, 1.0),
        "group_relative": lambda: _group_relative(
            lengths_N, rewards_N, np.asarray(group_ids), counts_N, penalty
        ),
    }
    return np.where(counts_N, penalty.weight * compute[penalty.name](), 0.0)


def _group_relative(
    lengths_N: np.ndarray,
    rewards_N: np.ndarray,
    group_ids: np.ndarray,
    counts_N: np.ndarray,
    penalty: LengthPenalty,
) -> np.ndarray:
    _, group_N = np.unique(group_ids, return_inverse=True)
    low_G, high_G = (
        np.full(group_N.max(initial=-1) + 1, np.inf),
        np.full(group_N.max(initial=-1) + 1, -np.inf),
    )
    np.minimum.at(low_G, group_N[counts_N], lengths_N[counts_N])
    np.maximum.at(high_G, group_N[counts_N], lengths_N[counts_N])
    span_N = (high_G - low_G)[group_N]
    spread = np.isfinite(span_N) & (span_N > 0)
    bonus_N = np.zeros(len(lengths_N))
    bonus_N[spread] = 0.5 - (lengths_N - low_G[group_N])[spread] / span_N[spread]
    return np.where(is_solved(rewards_N, penalty.solved_from), bonus_N, np.minimum(bonus_N, 0.0))


def penalty_metrics(
    penalties_N: np.ndarray, rewards_N: np.ndarray, counts_N: np.ndarray
) -> dict[str, float]:
    """`rollout/length_penalty/...`: mean and share of the samples that count, and the mean reward
    with the penalty. {} where none counts.
    """
    counts_N = counts_N & np.isfinite(rewards_N)
    if not counts_N.any():
        return {}
    chosen = penalties_N[counts_N]
    return {
        "rollout/length_penalty/mean": float(chosen.mean()),
        "rollout/length_penalty/share": float((chosen < 0).mean()),
        "rollout/length_penalty/shaped_reward": float((rewards_N[counts_N] + chosen).mean()),
    }
