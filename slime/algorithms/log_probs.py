"""Log-probability and entropy of rows of logits whose vocabulary is split over ranks. The
collectives come in as functions.

The order of the operations is part of the contract (comparisons are made at 1e-8): m = max; z = x -
m; s = sum exp(z); softmax = exp(z) / s; log_prob = z[target] - log s; entropy = m + log s - sum
softmax * x.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

Reduce = Callable[[torch.Tensor], torch.Tensor]


def _identity(values: torch.Tensor) -> torch.Tensor:
    return values


@dataclasses.dataclass(frozen=True)
class VocabularyShard:
    """This rank's columns of the logits: it owns ids [start, start + width of the logits). The two
    functions reduce a tensor in place over the ranks that hold the other columns, and return it;
    the defaults are those of one rank.
    """

    start: int = 0
    reduce_max: Reduce = _identity
    reduce_sum: Reduce = _identity


def softmax_parts(
    x: torch.Tensor, shard: VocabularyShard = VocabularyShard()
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns (m [T], log s [T], softmax [T, V]) of rows `x` [T, V of this rank]. A token's
    log-prob is (x[token] - m) - log s.

    torch.log_softmax sums float32 one number after the other on the CPU: over a real vocabulary its
    log-probs are all off to one side. A sum of its own is added in pairs.
    """
    maximum = shard.reduce_max(x.max(dim=-1).values)
    softmax = (x - maximum.unsqueeze(-1)).exp_()  # in place: [T, V] is the largest tensor of a step
    total = shard.reduce_sum(softmax.sum(dim=-1))
    softmax /= total.unsqueeze(-1)
    return maximum, total.log(), softmax


class _LogProbAndEntropy(torch.autograd.Function):
    """The gradients are written out because the logits are the largest tensor of a step: one
    softmax is kept instead of a chain of temporaries, and no collective runs in the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        shard: VocabularyShard,
        keep_mask: torch.Tensor | None,
        entropy_mode: str,
    ):
        width = logits.size(-1)
        columns = targets - shard.start
        owned = (columns >= 0) & (columns < width)
        columns = torch.where(owned, columns, 0).unsqueeze(-1)
        kept = logits
        if keep_mask is not None:
            # the sampled token stays whatever the replayed nucleus says, or its log-prob would be
            # -inf
            keep = keep_mask.scatter(
                -1, columns, owned.unsqueeze(-1) | keep_mask.gather(-1, columns)
            )
            kept = logits.masked_fill(~keep, float("-inf"))
        # a rank whose columns are all masked contributes exp(-inf) = 0, because the maximum is
        # finite over the ranks
        maximum, log_total, softmax = softmax_parts(kept, shard)
        target_z = torch.where(owned, kept.gather(-1, columns).squeeze(-1) - maximum, 0)
        log_prob = shard.reduce_sum(target_z) - log_total

        entropy = logits.new_zeros(logits.size(0))
        full_softmax = softmax
        weighted_sum = None
        if entropy_mode != "none":
            if keep_mask is not None:
                maximum, log_total, full_softmax = softmax_parts(logits, shard)
            weighted_sum = shard.reduce_sum((full_softmax * logits).sum(dim=-1))
            entropy = maximum + log_total - weighted_sum
        ctx.entropy_grad = entropy_mode == "grad"
        if ctx.entropy_grad:
            ctx.save_for_backward(softmax, columns, owned, full_softmax, logits, weighted_sum)
        else:
            ctx.mark_non_differentiable(entropy)
            ctx.save_for_backward(softmax, columns, owned)
        return log_prob.unsqueeze(-1), entropy

    @staticmethod
    def backward(ctx: Any, grad_log_prob: torch.Tensor, grad_entropy: torch.Tensor):
        softmax, columns, owned, *rest = ctx.saved_tensors
        grad = -softmax
        grad.scatter_add_(-1, columns, owned.unsqueeze(-1).to(grad.dtype))
        grad *= grad_log_prob
        if ctx.entropy_grad:
            full_softmax, logits, weighted_sum = rest
            grad += (
                full_softmax * (weighted_sum.unsqueeze(-1) - logits) * grad_entropy.unsqueeze(-1)
            )
        return grad, None, None, None, None


def compute_log_probs_and_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    shard: VocabularyShard,
    *,
    keep_mask: torch.Tensor | None = None,
    with_entropy: bool = False,
    with_entropy_grad: bool = True,
    chunk_size: int = -1,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns (log-prob [T, 1] of `targets` in nats, entropy [T] in nats or None) for `logits` [T,
    V of this rank], `targets` [T] global ids.

    `keep_mask` (bool [T, V of this rank]) restricts the distribution of the log-prob, never of the
    entropy. `chunk_size` > 0 works on that many rows at a time. Zero rows give zeros of shape (0,)
    for both, still connected to the logits, so that backward runs everywhere.
    """
    if logits.size(0) == 0:
        nothing = logits.sum(dim=-1)
        return nothing, nothing if with_entropy else None
    if not with_entropy:
        mode = "none"
    else:
        mode = "grad" if with_entropy_grad else "value"
    if not 0 < chunk_size < logits.size(0):
        log_probs, entropies = _LogProbAndEntropy.apply(logits, targets, shard, keep_mask, mode)
        return log_probs, entropies if with_entropy else None
    chunks, chunk_targets = logits.split(chunk_size), targets.split(chunk_size)
    masks = [None] * len(chunks) if keep_mask is None else keep_mask.split(chunk_size)
    parts = [
        _LogProbAndEntropy.apply(chunk, target, shard, mask, mode)
        for chunk, target, mask in zip(chunks, chunk_targets, masks, strict=True)
    ]
    log_probs, entropies = (torch.cat(part) for part in zip(*parts, strict=True))
    return log_probs, entropies if with_entropy else None


def build_topp_keep_mask(
    row_indices: torch.Tensor,
    counts: torch.Tensor,
    ids: torch.Tensor,
    *,
    num_rows: int,
    width: int,
    vocab_start: int,
) -> torch.Tensor:
    """Returns bool [num_rows, width]: all True, except rows with replayed nucleus ids, which keep
    only their ids.

    Entry k of `row_indices` [K] is the row of response token k (-1: not on this rank), `counts` [K]
    its number of ids, `ids` all ids one after another as global vocabulary ids. A token with no ids
    (nobody sampled it) keeps its whole row.
    """
    device = row_indices.device
    mask = torch.ones((num_rows, width), dtype=torch.bool, device=device)
    restricted = row_indices[(counts > 0) & (row_indices >= 0)]
    mask[restricted] = False
    id_rows = torch.repeat_interleave(row_indices, counts.to(torch.int64))
    columns = ids.to(torch.int64) - vocab_start
    here = (id_rows >= 0) & (columns >= 0) & (columns < width)
    mask[id_rows[here], columns[here]] = True
    return mask
