"""How far the trainer's log-probs of the sampled tokens are from the engine's: the same weights
should give the same numbers.

Let d = trainer - engine log-prob of a sampled token, in nats. Over trained tokens only, exact over
all ranks: abs diff mean, max and quantiles of |d|; k1 = mean(-d), k3 = mean(exp(d) - 1 - d), both
estimates of KL(engine || trainer) (J. Schulman, "Approximating KL divergence", 2020); the mean of
|d| by quarter of the response, by data source, and, where some samples are of older weights than
those being trained, by weights.

Three further looks find what a mean hides: log-probs that are right but stand one token off,
sampled tokens that do not train, and trained tokens that were not sampled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from slime.data.context_parallel import plan_response_layout
from slime.metrics import contributions as c
from slime.metrics.batch_values import flat_tokens, raw_entry, sample_tokens
from slime.metrics.contributions import Contribution

QUANTILES = (("/p50", 0.5), ("/p90", 0.9), ("/p99", 0.99))
QUARTERS = ("q1", "q2", "q3", "q4")
WEIGHTS = ("same", "older")
SHIFTS = (-2, -1, 1, 2)
SHIFT_TOKENS = 4096  # of each rank: enough for a median
# A median below this is rounding: nothing can be told from it.
SMALLEST_GAP = 1e-4
# An engine's log-prob of exactly 0 where the trainer's is below this belongs to no sampled token.
CLEARLY_UNLIKELY = -0.1


def _has_both_log_probs(batch: Mapping[str, Any]) -> bool:
    """Whether trainer and engine can be compared: both log-probs are there, and masks."""
    return (
        raw_entry(batch, "log_probs") is not None
        and raw_entry(batch, "rollout_log_probs") is not None
        and "loss_masks" in batch
    )


def consistency_contributions(
    batch: Mapping[str, Any],
    *,
    cp_size: int = 1,
    cp_rank: int = 0,
    ages_N: np.ndarray | None = None,
    masks_older: bool = False,
) -> dict[str, Contribution]:
    """This rank's part of the metrics below `rollout/`; {} for a batch that lacks either kind of
    log-probs.

    ages_N: updates of the weights since each sample's oldest token was sampled, NaN where it is not
    known; None: the trainer's log-probs are of the weights that sampled. masks_older: tokens of
    older weights are outside the loss by an option.
    """
    if not _has_both_log_probs(batch):
        return {}
    tokens = sample_tokens(batch, cp_size=cp_size, cp_rank=cp_rank)
    sample_T = np.repeat(np.arange(len(tokens.plan.lengths_N)), tokens.plan.lengths_N)
    kept = slice(None) if tokens.mask_T is None else tokens.mask_T
    trainer_T, engine_T = (
        flat_tokens(batch, name, tokens.plan.lengths_N)
        for name in ("log_probs", "rollout_log_probs")
    )
    difference = (trainer_T.astype(np.float64) - engine_T)[kept]
    distance = np.abs(difference)
    result = {
        "logprob_abs_diff/mean": c.mean(distance, len(distance)),
        "logprob_abs_diff/max": c.maximum(distance),
        "logprob_abs_diff": c.quantiles(distance, QUANTILES),
        "logprob_kl/k1": c.mean(-difference, len(difference)),
        "logprob_kl/k3": c.mean(_k3(difference), len(difference)),
    }
    places_T = _places(sample_T, batch, cp_size=cp_size, cp_rank=cp_rank)
    quarter_T = np.minimum(
        3,
        4
        * places_T
        // np.maximum(1, np.asarray(batch["response_lengths"], dtype=np.int64)[sample_T]),
    )
    result |= _by_label("position", quarter_T[kept], QUARTERS, distance)
    if ages_N is not None:
        result |= _by_label("weights", (ages_N > 0).astype(int)[sample_T[kept]], WEIGHTS, distance)
    names = batch.get("source_names")
    if names is not None and len(names):
        sources = sorted(set(names))
        label_of = {name: index for index, name in enumerate(sources)}
        label_N = np.array([label_of[name] for name in names])
        result |= _by_label("source", label_N[sample_T[kept]], sources, distance)
    result |= _mask_shares(
        trainer_T,
        engine_T,
        tokens.mask_T,
        tokens.mask_sums_N[sample_T] > 0,
        count_untrained=not masks_older,
    )
    return result


def shift_contributions(
    batch: Mapping[str, Any], *, cp_size: int = 1, cp_rank: int = 0
) -> dict[str, Contribution]:
    """{k: the median of |trainer[i] - engine[i + k]| over pairs of trained tokens of one sample
    that this rank holds}, for k of SHIFTS and 0. Ranks' medians are weighed by their pairs: enough
    to see which k fits, and no number to log.
    """
    if not _has_both_log_probs(batch):
        return {}
    tokens = sample_tokens(batch, cp_size=cp_size, cp_rank=cp_rank)
    sample_T = np.repeat(np.arange(len(tokens.plan.lengths_N)), tokens.plan.lengths_N)
    place_T = _places(sample_T, batch, cp_size=cp_size, cp_rank=cp_rank)
    kept = slice(None) if tokens.mask_T is None else tokens.mask_T
    columns = (
        *(
            flat_tokens(batch, name, tokens.plan.lengths_N)
            for name in ("log_probs", "rollout_log_probs")
        ),
        sample_T,
        place_T,
    )
    trainer, engine, sample, place = (column[kept][:SHIFT_TOKENS] for column in columns)
    result = {}
    for k in (*SHIFTS, 0):
        size = max(0, len(trainer) - abs(k))
        mine, other = (
            (slice(0, size), slice(k, k + size))
            if k >= 0
            else (slice(-k, -k + size), slice(0, size))
        )
        pair = (sample[mine] == sample[other]) & (place[other] - place[mine] == k)
        gaps = np.abs(trainer[mine].astype(np.float64) - engine[other])[pair]
        result[str(k)] = c.mean([np.median(gaps) * len(gaps)] if len(gaps) else [], len(gaps))
    return result


def shifted_by(medians: Mapping[str, float]) -> int | None:
    """k where the engine's log-prob of token i + k is the trainer's of token i, from reduced
    `shift_contributions`; None where they stand at their tokens.
    """
    at_place = medians.get("0", 0.0)
    others = {k: medians[str(k)] for k in SHIFTS if str(k) in medians}
    best = min(others, key=others.__getitem__, default=None)
    return (
        best
        if best is not None and at_place > SMALLEST_GAP and 10 * others[best] < at_place
        else None
    )


def staleness_contributions(ages_N: np.ndarray) -> dict[str, Contribution]:
    """This rank's part of `staleness/mean` and `staleness/max`: updates of the weights between
    sampling and training, of samples that have versions.
    """
    known = ages_N[np.isfinite(ages_N)]
    return {"staleness/mean": c.mean(known, len(known)), "staleness/max": c.maximum(known)}


def _k3(difference: np.ndarray) -> np.ndarray:
    # beyond this a token is lost whatever the number is, and exp would overflow
    bounded = np.minimum(difference, 20.0)
    return np.expm1(bounded) - bounded


def _by_label(
    kind: str, label_T: np.ndarray, names: Sequence[str], distance: np.ndarray
) -> dict[str, Contribution]:
    return {
        f"logprob_abs_diff/{kind}/{name}": c.mean(
            distance[label_T == index], int((label_T == index).sum())
        )
        for index, name in enumerate(names)
    }


def _places(
    sample_T: np.ndarray, batch: Mapping[str, Any], *, cp_size: int, cp_rank: int
) -> np.ndarray:
    """int64 [tokens on this rank]: each token's place in its response."""
    responses = np.asarray(batch["response_lengths"], dtype=np.int64)
    starts = np.cumsum(responses) - responses
    whole_T = np.arange(int(responses.sum())) - np.repeat(starts, responses)
    if cp_size > 1:
        totals = np.asarray(batch["total_lengths"], dtype=np.int64)
        whole_T = whole_T[
            plan_response_layout(
                totals, responses, cp_size=cp_size, cp_rank=cp_rank
            ).response_indices.numpy()
        ]
    return whole_T


def _mask_shares(
    trainer_T: np.ndarray,
    engine_T: np.ndarray,
    mask_T: np.ndarray | None,
    trains_T: np.ndarray,
    *,
    count_untrained: bool,
) -> dict[str, Contribution]:
    """`mask/sampled_untrained`: the share of tokens with an engine's log-prob, in samples that
    train, whose mask is 0. `mask/trained_unsampled`: the share of trained tokens whose engine's
    log-prob is exactly 0, the value of tokens that were not sampled, though the trainer gives the
    token a probability below 1.
    """
    mask = np.ones(len(engine_T), dtype=bool) if mask_T is None else mask_T
    unsampled = mask & (engine_T == 0) & (trainer_T < CLEARLY_UNLIKELY)
    result = {"mask/trained_unsampled": c.mean([float(unsampled.sum())], int(mask.sum()))}
    if count_untrained:
        sampled = np.isfinite(engine_T) & (engine_T != 0) & trains_T
        result["mask/sampled_untrained"] = c.mean(
            [float((sampled & ~mask).sum())], int(sampled.sum())
        )
    return result


def shift_metric(shift: int) -> Contribution:
    """`logprob_shift`, of the one rank that knows it; there is no such metric where nothing is
    shifted.
    """
    return c.total([shift])
