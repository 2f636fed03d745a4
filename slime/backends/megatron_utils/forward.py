"""What a forward pass gives per sample: logits rows, log-probs and entropies, values. The functions
that `forward_only` runs on each micro-batch, under upstream's names and signatures.

Imports the rows of a pack and the layout; knows no loss and no advantage.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

import torch

from slime.backends.megatron_utils.cp_utils import get_logits_layout, get_response_layout
from slime.backends.megatron_utils.loss_config import LossConfig
from slime.backends.megatron_utils.response_rows import (
    PackedResponses,
    build_nucleus_mask,
    compute_response_log_probs,
    squeeze_logits,
    take_rows,
    take_targets,
)


def get_responses(
    logits: torch.Tensor,
    *,
    args: argparse.Namespace,
    unconcat_tokens: Sequence[torch.Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    apply_temperature: bool = True,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields per sample (logits rows [R, V] that predict its response, response ids [R]), CP-local;
    divided by the rollout temperature if asked. `logits` is fp32 [1, T, V].
    """
    config = LossConfig.from_args(args)
    rows = squeeze_logits(logits)
    packed = PackedResponses(unconcat_tokens, total_lengths, response_lengths)
    layout = get_logits_layout(
        total_lengths, response_lengths, num_rows=rows.size(0), allgather_cp=config.allgather_cp
    )
    selected = take_rows(rows, layout.row_indices)
    if apply_temperature and config.log_prob_temperature != 1.0:
        selected = selected / config.log_prob_temperature
    lengths = list(layout.local_lengths)
    targets = take_targets(packed, layout, rows.device)
    if lengths:
        yield from zip(selected.split(lengths), targets.split(lengths), strict=True)


def get_log_probs_and_entropy(
    logits: torch.Tensor,
    *,
    args: argparse.Namespace,
    unconcat_tokens: Sequence[torch.Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    with_entropy: bool = False,
    non_loss_data: bool = True,
    top_p_token_ids: Sequence[torch.Tensor] | None = None,
    top_p_token_offsets: Sequence[torch.Tensor] | None = None,
) -> tuple[torch.Tensor, dict[str, list[torch.Tensor]]]:
    """Returns (empty tensor, {"log_probs": per sample [R], "entropy": likewise if asked}) in nats,
    CP-local, at the rollout temperature.

    The entropy is of the whole distribution, also where a nucleus restricts the log-probs; it has a
    gradient if `entropy_coef` is not 0.
    """
    config = LossConfig.from_args(args)
    packed = PackedResponses(
        unconcat_tokens, total_lengths, response_lengths, None, top_p_token_ids, top_p_token_offsets
    )
    log_probs, entropy = compute_response_log_probs(
        logits, config, packed, with_entropy=with_entropy
    )
    lengths = list(get_response_layout(total_lengths, response_lengths).local_lengths)
    result = {"log_probs": list(log_probs.split(lengths)) if lengths else []}
    if entropy is not None:
        result["entropy"] = list(entropy.split(lengths)) if lengths else []
    return torch.empty(0, device=logits.device), result


def get_values(
    logits: torch.Tensor,
    *,
    args: argparse.Namespace,
    unconcat_tokens: Sequence[torch.Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    with_entropy: bool = False,
    non_loss_data: bool = True,
) -> tuple[torch.Tensor, dict[str, list[torch.Tensor]]]:
    """Returns (empty tensor, {"values": per sample [R]}), CP-local, of a critic's output fp32 [1,
    T, 1]. No temperature.
    """
    values = [
        rows.squeeze(-1)
        for rows, _ in get_responses(
            logits,
            args=args,
            unconcat_tokens=unconcat_tokens,
            total_lengths=total_lengths,
            response_lengths=response_lengths,
            apply_temperature=False,
        )
    ]
    return torch.empty(0, device=logits.device), {"values": values}


def _build_topp_keep_mask(
    T: int,
    vocab_local: int,
    device: torch.device,
    top_p_token_ids: Sequence[torch.Tensor],
    top_p_token_offsets: Sequence[torch.Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    allgather_cp: bool,
) -> torch.Tensor:
    """Returns bool [T, vocab_local] over all rows of the packed logits: True, except that a row
    which predicts a sampled response token keeps only the token's nucleus.
    """
    packed = PackedResponses(
        (), total_lengths, response_lengths, None, top_p_token_ids, top_p_token_offsets
    )
    layout = get_logits_layout(
        total_lengths, response_lengths, num_rows=T, allgather_cp=allgather_cp
    )
    return build_nucleus_mask(
        packed,
        layout.response_indices,
        layout.row_indices,
        num_rows=T,
        width=vocab_local,
        device=torch.device(device),
    )
