"""Upstream's names for the formulas of `slime.algorithms`: lists of per-sample tensors in, lists
out. No formula lives here.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from slime.algorithms import advantages as advantage_formulas
from slime.algorithms.advantages import EstimatorConfig, ResponseColumns
from slime.algorithms.corrections import compute_sequence_kl, opsm_keep_mask
from slime.algorithms.kl import approximate_kl
from slime.algorithms.log_probs import VocabularyShard, compute_log_probs_and_entropy
from slime.algorithms.policy_loss import ClipConfig, cispo_loss, clipped_policy_loss
from slime.algorithms.reducers import repeat_per_token, sum_per_sample

if TYPE_CHECKING:
    from slime.data.context_parallel import ResponseLayout


def compute_approx_kl(
    log_probs: torch.Tensor,
    log_probs_base: torch.Tensor,
    kl_loss_type: str,
    importance_ratio: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns the per-token KL estimate of kind k1, k2, k3 or low_var_kl (`slime.algorithms.kl`);
    ValueError for another kind.
    """
    return approximate_kl(
        log_probs, log_probs_base, kind=kl_loss_type, importance_ratio=importance_ratio
    )


def compute_policy_loss(
    ppo_kl: torch.Tensor,
    advantages: torch.Tensor,
    eps_clip: float,
    eps_clip_high: float,
    eps_clip_c: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns PPO's clipped loss and the clip fraction, both element-wise
    (`clipped_policy_loss`).
    """
    return clipped_policy_loss(
        ppo_kl, ppo_kl, advantages, ClipConfig(eps_clip, eps_clip_high, eps_clip_c)
    )


def compute_cispo_loss(
    ppo_kl: torch.Tensor,
    log_probs: torch.Tensor,
    advantages: torch.Tensor,
    eps_clip: float,
    eps_clip_high: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns CISPO's loss and the clip fraction, both element-wise (`cispo_loss`)."""
    return cispo_loss(ppo_kl, log_probs, advantages, ClipConfig(eps_clip, eps_clip_high))


def _sequence_kl(
    full_log_probs: Sequence[torch.Tensor],
    full_old_log_probs: Sequence[torch.Tensor],
    loss_masks: Sequence[torch.Tensor],
) -> torch.Tensor:
    lengths = [len(log_probs) for log_probs in full_log_probs]
    masks = _concatenate_masks(loss_masks, full_log_probs[0])
    samples = repeat_per_token(torch.arange(len(lengths), device=masks.device), lengths)
    mask_sums = sum_per_sample(masks, samples, num_samples=len(lengths))
    difference = torch.cat(list(full_old_log_probs)) - torch.cat(list(full_log_probs))
    return compute_sequence_kl(difference, masks, samples, mask_sums)


def _concatenate_masks(loss_masks: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    return torch.cat(list(loss_masks)).to(device=like.device, dtype=like.dtype)


def compute_gspo_kl(
    full_log_probs: Sequence[torch.Tensor],
    full_old_log_probs: Sequence[torch.Tensor],
    local_log_probs: Sequence[torch.Tensor],
    loss_masks: Sequence[torch.Tensor],
) -> torch.Tensor:
    """Returns [L]: each sample's masked mean of old - new log-prob over its full response, once per
    local token of it.
    """
    if not full_log_probs:
        return torch.empty(0)
    kl = _sequence_kl(full_log_probs, full_old_log_probs, loss_masks)
    return repeat_per_token(kl, [len(log_probs) for log_probs in local_log_probs])


def compute_opsm_mask(
    args: argparse.Namespace,
    full_log_probs: Sequence[torch.Tensor],
    full_old_log_probs: Sequence[torch.Tensor],
    advantages: Sequence[torch.Tensor],
    loss_masks: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (keep mask [T] of 0.0 and 1.0, sum over samples of dropped / trained tokens). Reads
    `args.opsm_delta` (nats).

    `advantages` may be CP-local while the rest is full; every dropped local token counts then, as
    their masks are not known here.
    """
    if not full_log_probs:
        return torch.empty(0), torch.zeros(())
    lengths = [len(advantage) for advantage in advantages]
    kl = _sequence_kl(full_log_probs, full_old_log_probs, loss_masks)
    keep = opsm_keep_mask(kl, torch.cat(list(advantages)), lengths, delta=args.opsm_delta)
    mask_sums = torch.stack([mask.sum() for mask in loss_masks]).to(keep.device)
    whole = [len(mask) for mask in loss_masks] == lengths
    masks = _concatenate_masks(loss_masks, keep) if whole else torch.ones_like(keep)
    samples = repeat_per_token(torch.arange(len(lengths), device=keep.device), lengths)
    dropped = sum_per_sample((1 - keep) * masks, samples, num_samples=len(lengths))
    return keep, (dropped / mask_sums.clamp(min=1)).sum()


def _vocabulary_shard(width: int, tp_group: dist.ProcessGroup | None) -> VocabularyShard:
    """Returns the columns of this rank: without torch.distributed all of them; otherwise `tp_group`
    (None = the world) holds the rest.
    """
    if (
        not (dist.is_available() and dist.is_initialized())
        or dist.get_world_size(group=tp_group) == 1
    ):
        return VocabularyShard()

    def reduce_max(values: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=tp_group)
        return values

    def reduce_sum(values: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(values, op=dist.ReduceOp.SUM, group=tp_group)
        return values

    return VocabularyShard(dist.get_rank(group=tp_group) * width, reduce_max, reduce_sum)


def calculate_log_probs_and_entropy(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    tp_group: dist.ProcessGroup | None,
    with_entropy: bool = False,
    chunk_size: int = -1,
    log_prob_keep_mask: torch.Tensor | None = None,
    with_entropy_grad: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns (log-prob [T, 1], entropy [T] or None) in nats of `tokens` [T] (global ids) under
    `logits` [T, V / tp].

    Rank r of `tp_group` owns the columns from r * V / tp on. `log_prob_keep_mask` (bool, local
    columns) restricts the log-prob's distribution, not the entropy's; the target always stays. No
    rows give zeros of shape (0,).
    """
    return compute_log_probs_and_entropy(
        logits,
        tokens,
        _vocabulary_shard(logits.size(-1), tp_group),
        keep_mask=log_prob_keep_mask,
        with_entropy=with_entropy,
        with_entropy_grad=with_entropy_grad,
        chunk_size=chunk_size,
    )


def _as_rewards(
    rewards: torch.Tensor | Sequence[float], kl: Sequence[torch.Tensor]
) -> torch.Tensor:
    dtype, device = (kl[0].dtype, kl[0].device) if len(kl) else (torch.float32, None)
    return torch.as_tensor(rewards, dtype=dtype, device=device)


def get_grpo_returns(
    rewards: torch.Tensor | Sequence[float], kl: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Returns per sample a tensor like `kl[i]` filled with `rewards[i]`."""
    lengths = [len(values) for values in kl]
    return (
        list(repeat_per_token(_as_rewards(rewards, kl), lengths).split(lengths)) if lengths else []
    )


def get_reinforce_plus_plus_baseline_advantages(
    rewards: torch.Tensor | Sequence[float],
    kl: Sequence[torch.Tensor],
    loss_masks: Sequence[torch.Tensor],
    kl_coef: float,
) -> list[torch.Tensor]:
    """Returns per sample reward - kl_coef * KL at each token. `loss_masks` are cut like `kl`, or
    full while `kl` is CP-local (then the penalty is not masked here: the loss is).
    """
    lengths = [len(values) for values in kl]
    if not lengths:
        return []
    flat_kl = torch.cat(list(kl))
    same = [len(mask) for mask in loss_masks] == lengths
    masks = _concatenate_masks(loss_masks, flat_kl) if same else torch.ones_like(flat_kl)
    columns = ResponseColumns(_as_rewards(rewards, kl), tuple(lengths), masks, flat_kl)
    flat, _ = advantage_formulas.reinforce_plus_plus_baseline_advantages(
        columns, EstimatorConfig(kl_coef=kl_coef)
    )
    return list(flat.split(lengths))


def get_reinforce_plus_plus_returns(
    rewards: torch.Tensor | Sequence[float],
    kl: Sequence[torch.Tensor],
    loss_masks: Sequence[torch.Tensor],
    response_lengths: Sequence[int],
    total_lengths: Sequence[int],
    kl_coef: float,
    gamma: float,
) -> list[torch.Tensor]:
    """Returns per sample the discounted sum of token rewards (CP-local if CP is on): -kl_coef * KL
    at trained tokens plus the reward at the last trained token. A sample may be all response where
    CP is off. AssertionError for a sample without a trained token.
    """
    from slime.backends.megatron_utils.cp_utils import (
        all_gather_responses_with_cp,
        get_cp_size,
        get_response_layout,
    )

    if not len(kl):
        return []
    for index, mask in enumerate(loss_masks):
        assert mask.any(), (
            f"sample {index} has no token with loss mask 1, so its reward has no token to stand on"
        )
    if get_cp_size() == 1:
        # returns need no token that predicts the first one, so a sample may be all response
        total_lengths = [
            max(int(total), int(r) + 1)
            for total, r in zip(total_lengths, response_lengths, strict=True)
        ]
    layout = get_response_layout(total_lengths, response_lengths)
    full_kl = all_gather_responses_with_cp(torch.cat(list(kl)), layout)
    columns = ResponseColumns(
        _as_rewards(rewards, kl),
        layout.response_lengths,
        _concatenate_masks(loss_masks, full_kl),
        full_kl,
    )
    returns, _ = advantage_formulas.reinforce_plus_plus_advantages(
        columns, EstimatorConfig(kl_coef=kl_coef, gamma=gamma)
    )
    return cut_to_local(returns, layout)


def cut_to_local(full_T: torch.Tensor, layout: ResponseLayout) -> list[torch.Tensor]:
    """Returns per sample the entries of `full_T` (all full responses) that this rank owns."""
    local = (
        full_T
        if layout.whole
        else full_T.index_select(0, layout.response_indices.to(full_T.device))
    )
    return list(local.split(list(layout.local_lengths)))


@torch.no_grad()
def get_advantages_and_returns_batch(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    values_list: Sequence[torch.Tensor],
    rewards_list: Sequence[torch.Tensor],
    gamma: float,
    lambd: float,
    chunked: bool = True,
    loss_masks: Sequence[torch.Tensor] | None = None,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Returns (advantages, returns) per sample by GAE; all lists are CP-local if CP is on, the
    recursion runs over full responses.

    With `loss_masks` (full responses) tokens with mask 0 are skipped by the recursion and read 0 in
    both results.
    """
    from slime.backends.megatron_utils.cp_utils import (
        all_gather_responses_with_cp,
        get_response_layout,
    )

    layout = get_response_layout(total_lengths, response_lengths)
    if not len(values_list):
        return [], []
    local = torch.stack(
        [torch.cat(list(values_list)), torch.cat(list(rewards_list)).to(values_list[0].dtype)],
        dim=1,
    )
    values, rewards = all_gather_responses_with_cp(local, layout).unbind(dim=1)
    masks = None if loss_masks is None else torch.cat(list(loss_masks)).to(values.device)
    advantages, returns = advantage_formulas.masked_generalized_advantages(
        rewards, values, masks, layout.response_lengths, gamma=gamma, lambd=lambd, chunked=chunked
    )
    return cut_to_local(advantages, layout), cut_to_local(returns, layout)


def vanilla_gae(
    rewards: torch.Tensor, values: torch.Tensor, gamma: float, lambd: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (advantages, returns) [B, T] by GAE, one time step after another."""
    return advantage_formulas.generalized_advantages_stepwise(
        rewards, values, gamma=gamma, lambd=lambd
    )


def chunked_gae(
    rewards: torch.Tensor, values: torch.Tensor, gamma: float, lambd: float, chunk_size: int = 128
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (advantages, returns) [B, T] by GAE, `chunk_size` time steps at a time."""
    return advantage_formulas.generalized_advantages(
        rewards, values, gamma=gamma, lambd=lambd, chunk_size=chunk_size
    )


def chunked_discounted_returns(
    rewards: torch.Tensor, discount: float, chunk_size: int = 128
) -> torch.Tensor:
    """Returns S [B, T] with S_t = rewards_t + discount * S_{t+1}; keeps dtype and device; zeros on
    the right stay zero.
    """
    return advantage_formulas.chunked_discounted_sum(rewards, discount, chunk_size=chunk_size)
