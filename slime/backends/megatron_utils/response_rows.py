"""The rows of packed logits that predict responses, and what is computed from them: one gather and
one softmax per micro-batch, never over prompt rows and, where the loss masks are known, never over
tokens that do not train.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import cast

import torch
from megatron.core import mpu

from slime.algorithms.log_probs import build_topp_keep_mask
from slime.backends.megatron_utils.cp_utils import (
    all_gather_responses_with_cp,
    check_lengths,
    get_cp_size,
    get_logits_layout,
    get_response_layout,
)
from slime.backends.megatron_utils.loss_config import LossConfig
from slime.data.context_parallel import ResponseLayout
from slime.exceptions import RolloutDataError
from slime.utils.ppo_utils import calculate_log_probs_and_entropy

# of each sample, None without a nucleus
PerSample = Sequence[torch.Tensor | None]


@dataclasses.dataclass(frozen=True)
class PackedResponses:
    """What the samples of one micro-batch are: full sequences of ids, their lengths in tokens, and
    optionally the loss masks of the responses (rows with mask 0 are then left out) and the nucleus
    that each sampled token was drawn from.
    """

    unconcat_tokens: Sequence[torch.Tensor]
    total_lengths: Sequence[int]
    response_lengths: Sequence[int]
    loss_masks: Sequence[torch.Tensor] | None = None
    top_p_token_ids: PerSample | None = None
    top_p_token_offsets: PerSample | None = None


def squeeze_logits(logits: torch.Tensor) -> torch.Tensor:
    """Returns [T, V] of fp32 (or fp64) logits [1, T, V]; AssertionError for anything else: a bf16
    softmax loses the log-probs' digits.
    """
    assert logits.dtype in (torch.float32, torch.float64), (
        f"logits must be fp32, got {logits.dtype}"
    )
    assert logits.dim() == 3 and logits.size(0) == 1, (
        f"logits must be [1, T, V], got {tuple(logits.shape)}"
    )
    return logits.squeeze(0)


def take_rows(rows: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Returns `rows` [T, ...] at `indices` (int64, CPU, increasing per sample), as a view where
    they are one run.
    """
    count = indices.numel()
    if count:
        first, last = int(indices[0]), int(indices[-1])
        if last - first + 1 == count and bool((indices.diff() == 1).all()):
            return rows[first : last + 1]
    return rows.index_select(0, indices.to(rows.device))


def take_targets(
    packed: PackedResponses, layout: ResponseLayout, device: torch.device
) -> torch.Tensor:
    """Returns the ids [L] of this rank's response tokens. RolloutDataError naming the sample whose
    ids do not have its total length.
    """
    if not len(packed.unconcat_tokens):
        return torch.empty(0, dtype=torch.int64, device=device)
    check_lengths(
        packed.unconcat_tokens,
        [int(length) for length in packed.total_lengths],
        name="unconcat_tokens",
    )
    tokens = torch.cat(list(packed.unconcat_tokens))
    return tokens.index_select(0, layout.token_indices.to(tokens.device)).to(
        device=device, dtype=torch.int64
    )


def find_trained(packed: PackedResponses, layout: ResponseLayout) -> torch.Tensor | None:
    """Returns the places in [L] of tokens that train (int64, CPU), or None for all of them."""
    if packed.loss_masks is None or not len(packed.loss_masks):
        return None
    check_lengths(packed.loss_masks, layout.response_lengths, name="loss_masks")
    masks = torch.cat([mask.reshape(-1) for mask in packed.loss_masks]).cpu() != 0
    masks = masks[layout.response_indices]
    return None if bool(masks.all()) else torch.nonzero(masks).squeeze(-1)


def nucleus_counts_and_ids(
    packed: PackedResponses, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (ids per response token [sum of responses], all ids one after another). A sample
    without a nucleus counts 0 everywhere.
    """
    counts, ids = [], []
    ids_and_offsets = (packed.top_p_token_ids, packed.top_p_token_offsets)
    entries = zip(
        *cast(tuple[PerSample, PerSample], ids_and_offsets), packed.response_lengths, strict=True
    )
    for index, (token_ids, offsets, length) in enumerate(entries):
        if token_ids is None or offsets is None:
            counts.append(torch.zeros(int(length), dtype=torch.int64))
            continue
        offsets = torch.as_tensor(offsets).to(torch.int64)
        if offsets.numel() != length + 1 or int(offsets[-1]) != len(token_ids):
            raise RolloutDataError(
                f"nucleus of sample {index} of the micro-batch: {offsets.numel()} offsets ending "
                "at "
                f"{int(offsets[-1]) if offsets.numel() else None} for {length} response tokens and "
                f"{len(token_ids)} ids; "
                "expected response length + 1 offsets, the last one the number of ids."
            )
        counts.append(offsets.diff())
        ids.append(torch.as_tensor(token_ids))
    empty = torch.empty(0, dtype=torch.int64)
    return torch.cat([empty, *counts]).to(device), torch.cat(ids).to(device) if ids else empty.to(
        device
    )


def build_nucleus_mask(
    packed: PackedResponses,
    response_indices: torch.Tensor,
    row_indices: torch.Tensor,
    *,
    num_rows: int,
    width: int,
    device: torch.device,
) -> torch.Tensor:
    """Returns bool [num_rows, width] for rows `row_indices`, which predict the tokens at
    `response_indices` of all full responses.
    """
    counts, ids = nucleus_counts_and_ids(packed, device)
    rows = torch.full((counts.numel(),), -1, dtype=torch.int64, device=device)
    rows[response_indices.to(device)] = row_indices.to(device)
    vocab_start = mpu.get_tensor_model_parallel_rank() * width
    return build_topp_keep_mask(
        rows, counts, ids, num_rows=num_rows, width=width, vocab_start=vocab_start
    )


def compute_response_log_probs(
    logits: torch.Tensor, config: LossConfig, packed: PackedResponses, *, with_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns (log-probs [L], entropy [L] or None) in nats at the rollout temperature, of the
    response tokens that this rank owns (zigzag).

    Tokens with mask 0 read 0 when `packed` has loss masks. With no token at all the results are
    empty and still connected to the logits.
    """
    rows = squeeze_logits(logits)
    layout = get_logits_layout(
        packed.total_lengths,
        packed.response_lengths,
        num_rows=rows.size(0),
        allgather_cp=config.allgather_cp,
    )
    kept = find_trained(packed, layout)
    row_indices = layout.row_indices if kept is None else layout.row_indices[kept]
    response_indices = layout.response_indices if kept is None else layout.response_indices[kept]
    targets = take_targets(packed, layout, rows.device)
    targets = targets if kept is None else targets[kept.to(targets.device)]
    selected = take_rows(rows, row_indices)
    if config.log_prob_temperature != 1.0:
        selected = selected / config.log_prob_temperature
    keep_mask = None
    if packed.top_p_token_ids is not None and len(packed.top_p_token_ids):
        keep_mask = build_nucleus_mask(
            packed,
            response_indices,
            torch.arange(row_indices.numel()),
            num_rows=row_indices.numel(),
            width=rows.size(-1),
            device=rows.device,
        )
    log_probs, entropy = calculate_log_probs_and_entropy(
        selected,
        targets,
        mpu.get_tensor_model_parallel_group(),
        with_entropy=with_entropy,
        chunk_size=config.log_probs_chunk_size,
        log_prob_keep_mask=keep_mask,
        with_entropy_grad=config.entropy_coef != 0,
    )
    results = [log_probs.reshape(-1)]
    if with_entropy:
        results.append(cast(torch.Tensor, entropy))
    if kept is not None:
        results = [
            values.new_zeros(layout.num_local_tokens).index_copy(0, kept.to(values.device), values)
            for values in results
        ]
    if config.allgather_cp and get_cp_size() > 1:
        results = [_to_zigzag(values, layout, packed) for values in results]
    return results[0], results[1] if with_entropy else None


def _to_zigzag(
    values: torch.Tensor, layout: ResponseLayout, packed: PackedResponses
) -> torch.Tensor:
    """Returns this rank's zigzag part [L'] of values that lie on the ranks contiguously."""
    zigzag = get_response_layout(packed.total_lengths, packed.response_lengths)
    return all_gather_responses_with_cp(values, layout).index_select(
        0, zigzag.response_indices.to(values.device)
    )
