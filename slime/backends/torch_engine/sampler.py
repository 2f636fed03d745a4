"""Draws one token per sequence from the logits of a batch, and returns its log-prob.

The log-prob is that of `log_softmax(logits / temperature)` (temperature 1 for greedy requests): the
policy that a trainer recomputes, before penalties, min_new_tokens, top_k, top_p and min_p change
what can be drawn. Where the request asks for the ids that truncation kept, the trainer normalizes
over these ids, and so does the log-prob.

The token is drawn by inverse transform: the first one whose cumulated probability (float64) exceeds
u, with u from `noise`. Every row is computed on its own; `_V` is the vocabulary, `_B` the rows of
the batch.
"""

from __future__ import annotations

import dataclasses
from typing import cast

import numpy as np
import torch

from slime.algorithms.log_probs import VocabularyShard, compute_log_probs_and_entropy, softmax_parts

# Elements of one [rows, vocab] block; bounds the memory of the float64 copies.
MAX_BLOCK_ELEMENTS = 2**24


@dataclasses.dataclass(frozen=True)
class PenaltyRows:
    """Rows whose logits are changed by penalties. Counts are over the response, `seen_in_prompt`
    also over the prompt.
    """

    rows: torch.Tensor
    response_counts: torch.Tensor
    seen_in_prompt: torch.Tensor
    repetition: torch.Tensor
    frequency: torch.Tensor
    presence: torch.Tensor


@dataclasses.dataclass(frozen=True)
class SamplingBatch:
    """Parameters by row. Arrays are [B]; the optional parts are None when no row asks for them.

    banned: (rows, token ids) pairs that must not be drawn (end tokens before min_new_tokens).
    keep_rows: rows whose nucleus (the tokens left after truncation) is reported.
    """

    uniforms: np.ndarray
    temperatures: np.ndarray
    top_ks: np.ndarray | None = None
    top_ps: np.ndarray | None = None
    min_ps: np.ndarray | None = None
    penalties: PenaltyRows | None = None
    banned: tuple[torch.Tensor, torch.Tensor] | None = None
    keep_rows: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class SampledTokens:
    """Token ids (int64 [B]) and log-probs (float32 [B]) on the CPU; `kept` has one array of token
    ids per entry of keep_rows.
    """

    tokens: np.ndarray
    log_probs: np.ndarray
    kept: list[np.ndarray]


def draw_tokens(logits: torch.Tensor, batch: SamplingBatch) -> SampledTokens:
    """Returns one token per row of float32 `logits` [M, V]; rows from B on are padding and are left
    out of the result.
    """
    count = len(batch.temperatures)
    greedy = batch.temperatures == 0.0
    scaled = logits
    if not (greedy | (batch.temperatures == 1.0)).all():
        divisors = np.ones(logits.shape[0], dtype=np.float32)
        divisors[:count] = np.where(greedy, 1.0, batch.temperatures)
        scaled = logits / torch.from_numpy(divisors).to(logits.device)[:, None]
    maximum, log_total, probabilities = softmax_parts(scaled)
    edited = _edited(scaled, batch)
    if edited is not None:
        probabilities = softmax_parts(edited)[2]
    truncates = batch.top_ks is not None
    if truncates:
        probabilities = _truncated(probabilities, batch)
    tokens = _inverse_transform(
        probabilities[:count], torch.from_numpy(batch.uniforms).to(logits.device)
    )
    if greedy.any():
        rows = torch.from_numpy(np.flatnonzero(greedy)).to(logits.device)
        source = scaled if edited is None else edited
        tokens[rows] = source[rows].argmax(dim=-1)
    chosen = scaled[:count].gather(1, tokens[:, None])[:, 0] - maximum[:count] - log_total[:count]
    kept = []
    if batch.keep_rows is not None:
        rows = torch.from_numpy(batch.keep_rows).to(logits.device)
        keep = (probabilities[rows] > 0).scatter_(1, tokens[rows, None], True)
        chosen[rows] = compute_log_probs_and_entropy(
            scaled[rows], tokens[rows], VocabularyShard(), keep_mask=keep
        )[0][:, 0]
        kept = [row.nonzero(as_tuple=True)[0].cpu().numpy() for row in keep]
    return SampledTokens(tokens=tokens.cpu().numpy(), log_probs=chosen.cpu().numpy(), kept=kept)


def _edited(scaled: torch.Tensor, batch: SamplingBatch) -> torch.Tensor | None:
    """Returns the logits to draw from where they differ from those the log-prob is taken of, else
    None.
    """
    if batch.penalties is None and batch.banned is None:
        return None
    edited = scaled.clone()
    if batch.penalties is not None:
        _apply_penalties(
            edited, batch.penalties, torch.from_numpy(batch.temperatures).to(edited.device)
        )
    if batch.banned is not None:
        edited[batch.banned] = float("-inf")
    return edited


def _apply_penalties(
    edited: torch.Tensor, penalties: PenaltyRows, temperatures: torch.Tensor
) -> None:
    """Changes rows in place. Penalties act on logits before the temperature: repetition (Keskar et
    al. 2019) divides positive and multiplies negative logits of tokens in prompt or response;
    frequency and presence are subtracted by count in the response.
    """
    rows = penalties.rows
    divisors = temperatures[rows].float()
    divisors = torch.where(divisors == 0, torch.ones_like(divisors), divisors)[:, None]
    logits = edited[rows] * divisors
    seen = (penalties.response_counts > 0) | penalties.seen_in_prompt
    repetition = penalties.repetition[:, None]
    logits = torch.where(
        seen, torch.where(logits > 0, logits / repetition, logits * repetition), logits
    )
    logits = logits - penalties.frequency[:, None] * penalties.response_counts
    logits = logits - penalties.presence[:, None] * (penalties.response_counts > 0)
    edited[rows] = logits / divisors


def _truncated(probabilities: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Returns probabilities with 0 for tokens outside top_k, then top_p of what is left, then below
    min_p times the largest.
    """
    vocab = probabilities.shape[1]
    limits_of_rows = (batch.top_ks, batch.top_ps, batch.min_ps)
    top_ks, top_ps, min_ps = cast("tuple[np.ndarray, np.ndarray, np.ndarray]", limits_of_rows)
    needs = (top_ks > 0) & (top_ks < vocab) | (top_ps < 1.0) | (min_ps > 0.0)
    if not needs.any():
        return probabilities
    rows = torch.from_numpy(np.flatnonzero(needs)).to(probabilities.device)
    top_ks = np.where(top_ks > 0, top_ks, vocab)[needs]
    limits = [
        torch.from_numpy(values).to(probabilities.device)[:, None]
        for values in (top_ks, top_ps[needs], min_ps[needs])
    ]
    ordered, order = torch.sort(probabilities[rows], dim=-1, descending=True, stable=True)
    ordered = ordered.double()
    ranks = torch.arange(vocab, device=ordered.device)
    ordered = ordered * (ranks[None, :] < limits[0])
    # A token stays while the mass before it is below top_p; the first one always does.
    cumulated = ordered.cumsum(dim=-1)
    before = cumulated - ordered
    keep = before < limits[1] * cumulated[:, -1:]
    keep[:, 0] = True
    keep &= ordered >= limits[2] * ordered[:, :1]
    keep &= ordered > 0
    mask = torch.zeros_like(keep).scatter_(1, order, keep)
    result = probabilities.clone()
    result[rows] = probabilities[rows] * mask
    return result


def _inverse_transform(probabilities: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Returns int64 [B]: per row the first token whose cumulated probability exceeds u times the
    row's sum.
    """
    block = max(1, MAX_BLOCK_ELEMENTS // probabilities.shape[1])
    chosen = []
    for start in range(0, probabilities.shape[0], block):
        part = probabilities[start : start + block]
        cumulated = part.double().cumsum(dim=-1)
        thresholds = uniforms[start : start + block, None] * cumulated[:, -1:]
        index = (cumulated <= thresholds).sum(dim=-1)
        # u * sum can round up to the sum itself: then take the last token that has any probability.
        index = torch.minimum(index, (cumulated < cumulated[:, -1:]).sum(dim=-1))
        chosen.append(index)
    return chosen[0] if len(chosen) == 1 else torch.cat(chosen)
