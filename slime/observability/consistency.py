"""How far the trainer's log-probs of the sampled tokens are from the engine's: the same weights should give the same numbers.

Let d = trainer - engine log-prob of a sampled token, in nats. Over trained tokens only, exact over all ranks:
abs diff mean, max and quantiles of |d|; k1 = mean(-d), k3 = mean(exp(d) - 1 - d), both estimates of KL(engine || trainer)
(J. Schulman, "Approximating KL divergence", 2020); the mean of |d| by quarter of the response and by data source.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from slime.observability import contributions as c
from slime.observability.contributions import Contribution
from slime.observability.train_metric_utils import flat_tokens, raw_entry, sample_tokens

QUANTILES = (("/p50", 0.5), ("/p90", 0.9), ("/p99", 0.99))
QUARTERS = ("q1", "q2", "q3", "q4")


def consistency_contributions(batch: Mapping[str, Any], *, cp_size: int = 1, cp_rank: int = 0) -> dict[str, Contribution]:
    """This rank's part of the metrics below `rollout/`; {} for a batch that lacks either kind of log-probs."""
    if raw_entry(batch, "log_probs") is None or raw_entry(batch, "rollout_log_probs") is None or "loss_masks" not in batch:
        return {}
    tokens = sample_tokens(batch, cp_size=cp_size, cp_rank=cp_rank)
    sample_T = np.repeat(np.arange(len(tokens.plan.lengths_N)), tokens.plan.lengths_N)
    kept = slice(None) if tokens.mask_T is None else tokens.mask_T
    trainer_T, engine_T = (flat_tokens(batch, name, tokens.plan.lengths_N) for name in ("log_probs", "rollout_log_probs"))
    difference = (trainer_T.astype(np.float64) - engine_T)[kept]
    distance = np.abs(difference)
    result = {
        "logprob_abs_diff/mean": c.mean(distance, len(distance)),
        "logprob_abs_diff/max": c.maximum(distance),
        "logprob_abs_diff": c.quantiles(distance, QUANTILES),
        "logprob_kl/k1": c.mean(-difference, len(difference)),
        "logprob_kl/k3": c.mean(_k3(difference), len(difference)),
    }
    result |= _by_label("position", _quarters(sample_T, batch, cp_size=cp_size, cp_rank=cp_rank)[kept], QUARTERS, distance)
    names = batch.get("source_names")
    if names is not None and len(names):
        sources = sorted(set(names))
        label_of = {name: index for index, name in enumerate(sources)}
        label_N = np.array([label_of[name] for name in names])
        result |= _by_label("source", label_N[sample_T[kept]], sources, distance)
    return result


def _k3(difference: np.ndarray) -> np.ndarray:
    # beyond this a token is lost whatever the number is, and exp would overflow
    bounded = np.minimum(difference, 20.0)
    return np.expm1(bounded) - bounded


def _by_label(kind: str, label_T: np.ndarray, names: Sequence[str], distance: np.ndarray) -> dict[str, Contribution]:
    return {
        f"logprob_abs_diff/{kind}/{name}": c.mean(distance[label_T == index], int((label_T == index).sum()))
        for index, name in enumerate(names)
    }


def _quarters(sample_T: np.ndarray, batch: Mapping[str, Any], *, cp_size: int, cp_rank: int) -> np.ndarray:
    """int64 [tokens on this rank]: the quarter of its response in which each token stands."""
    responses = np.asarray(batch["response_lengths"], dtype=np.int64)
    starts = np.cumsum(responses) - responses
    whole_T = np.arange(int(responses.sum())) - np.repeat(starts, responses)
    if cp_size > 1:
        from slime.utils.cp_layout import plan_response_layout

        totals = np.asarray(batch["total_lengths"], dtype=np.int64)
        whole_T = whole_T[plan_response_layout(totals, responses, cp_size=cp_size, cp_rank=cp_rank).response_indices.numpy()]
    return np.minimum(3, 4 * whole_T // np.maximum(1, responses[sample_T]))


def consistency_alarm(metrics: Mapping[str, float], threshold: float) -> str | None:
    """What to say when the mean difference exceeds `threshold` nats, and what to look at; None when all is well."""
    mean = metrics.get("rollout/logprob_abs_diff/mean")
    if mean is None or mean <= threshold:
        return None
    return (
        f"trainer and engine disagree by {mean:.3g} nats a token on average (largest {metrics['rollout/logprob_abs_diff/max']:.3g}), more than "
        f"--logprob-diff-alarm {threshold:g}. Check that both run the same weights (perf/weight_version), data type and temperature, and that "
        "the response ids are those that were sampled."
    )
