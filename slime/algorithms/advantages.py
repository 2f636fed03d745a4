"""Per-token advantages and returns: pure functions over padded [B, T] or ragged [T] tensors.

`_N` = samples, `_T` = response tokens of all samples one after another, `[B, T]` = one sample per
row, zero-padded on the right.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from slime.algorithms.reducers import repeat_per_token


def chunked_discounted_sum(
    rewards: torch.Tensor, discount: float, *, chunk_size: int = 128
) -> torch.Tensor:
    """Returns S [B, T] with S_t = rewards_t + discount * S_{t+1}, S after the end = 0; dtype and
    device of `rewards`.

    Inside a chunk sums over 1, 2, 4, ... steps are made of each other, so that only T / chunk_size
    steps are sequential. A row's bits depend on nothing but the row: not on the other rows (as
    those of a matrix product do), and not on T, as zeros on the right stay exactly zero.
    """
    batch, length = rewards.shape
    if length == 0:
        return rewards.clone()
    width = min(chunk_size, length)
    num_chunks = -(-length // width)
    padded = torch.nn.functional.pad(rewards, (0, num_chunks * width - length))
    sums = padded.reshape(batch, num_chunks, width).clone()
    span = 1
    while span < width:
        # the product is rounded before it is added: a fused multiply-add would round otherwise at
        # the end of a row
        sums[..., :-span] += sums[..., span:] * discount**span
        span *= 2
    base = torch.tensor(discount, dtype=torch.float64, device=rewards.device)
    carry_powers = (base ** (width - torch.arange(width, device=rewards.device))).to(rewards.dtype)
    carry = rewards.new_zeros(batch, 1)
    for index in reversed(range(num_chunks)):
        sums[:, index] += carry * carry_powers
        carry = sums[:, index, :1]
    return sums.reshape(batch, num_chunks * width)[:, :length]


def _temporal_differences(
    rewards: torch.Tensor, values: torch.Tensor, gamma: float
) -> torch.Tensor:
    next_values = torch.nn.functional.pad(values[:, 1:], (0, 1))
    return rewards + gamma * next_values - values


def generalized_advantages(
    rewards: torch.Tensor,
    values: torch.Tensor,
    *,
    gamma: float,
    lambd: float,
    chunk_size: int = 128,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (advantages, returns = advantages + values), both [B, T]: GAE (arXiv:1506.02438 eq.
    16), the value after the last step is 0.
    """
    deltas = _temporal_differences(rewards, values, gamma)
    advantages = chunked_discounted_sum(deltas, gamma * lambd, chunk_size=chunk_size)
    return advantages, advantages + values


def generalized_advantages_stepwise(
    rewards: torch.Tensor, values: torch.Tensor, *, gamma: float, lambd: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns what `generalized_advantages` does, one time step after another: the definition, to
    compare with.
    """
    deltas = _temporal_differences(rewards, values, gamma)
    advantages = torch.zeros_like(deltas)
    following = deltas.new_zeros(deltas.size(0))
    for step in reversed(range(deltas.size(1))):
        following = deltas[:, step] + gamma * lambd * following
        advantages[:, step] = following
    return advantages, advantages + values


@dataclasses.dataclass(frozen=True)
class ResponseColumns:
    """Full responses of N samples. `masks_T` and `kl_T` are [T] one after another; NaN at masked
    positions is allowed.
    """

    rewards_N: torch.Tensor
    lengths_N: tuple[int, ...]
    masks_T: torch.Tensor
    kl_T: torch.Tensor


@dataclasses.dataclass(frozen=True)
class EstimatorConfig:
    """`kl_coef` weighs the KL inside the reward; `gamma` is the discount."""

    kl_coef: float = 0.0
    gamma: float = 1.0


def _pad(values_T: torch.Tensor, lengths_N: Sequence[int]) -> torch.Tensor:
    """Returns [N, longest]: one row per sample, zeros on the right."""
    return torch.nn.utils.rnn.pad_sequence(values_T.split(list(lengths_N)), batch_first=True)


def _unpad(padded: torch.Tensor, lengths_N: Sequence[int]) -> torch.Tensor:
    lengths = torch.tensor(lengths_N, dtype=torch.int64, device=padded.device)
    steps = torch.arange(padded.size(1), device=padded.device)
    return padded[steps.unsqueeze(0) < lengths.unsqueeze(1)]


def find_last_trained_tokens(masks_T: torch.Tensor, lengths_N: Sequence[int]) -> torch.Tensor:
    """Returns int64 [N]: the place in [T] of each sample's last token with mask 1, or -1 for a
    sample without one.
    """
    places = torch.where(masks_T != 0, torch.arange(masks_T.numel(), device=masks_T.device), -1)
    samples = repeat_per_token(torch.arange(len(lengths_N), device=masks_T.device), lengths_N)
    last = torch.full((len(lengths_N),), -1, dtype=torch.int64, device=masks_T.device)
    return last.scatter_reduce(0, samples, places, reduce="amax")


def place_rewards(
    rewards_N: torch.Tensor, masks_T: torch.Tensor, lengths_N: Sequence[int]
) -> torch.Tensor:
    """Returns [T]: each sample's reward at its last trained token, 0 elsewhere; a fully masked
    sample has no place for it.
    """
    last = find_last_trained_tokens(masks_T, lengths_N)
    present = last >= 0
    return rewards_N.new_zeros(masks_T.numel()).index_copy(0, last[present], rewards_N[present])


def kl_penalty(kl_T: torch.Tensor, masks_T: torch.Tensor, *, kl_coef: float) -> torch.Tensor:
    """Returns [T]: kl_coef * KL at trained tokens, 0 elsewhere (arXiv:2203.02155 puts it in the
    reward).
    """
    return torch.where(masks_T != 0, kl_coef * kl_T, 0)


def token_rewards(columns: ResponseColumns, config: EstimatorConfig) -> torch.Tensor:
    """Returns [T]: the reward at each sample's last trained token minus the KL penalty at each
    trained token.
    """
    penalty = kl_penalty(columns.kl_T, columns.masks_T, kl_coef=config.kl_coef)
    return (
        place_rewards(columns.rewards_N.to(penalty.dtype), columns.masks_T, columns.lengths_N)
        - penalty
    )


def group_advantages(
    columns: ResponseColumns, config: EstimatorConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the sample's (group-normalized) reward at each of its tokens: GRPO (arXiv:2402.03300
    sec. 4.1.2), and likewise GSPO, CISPO, RLOO (arXiv:2402.14740) and Dr. GRPO (arXiv:2503.20783),
    which differ in the baseline or in the loss.
    """
    advantages = repeat_per_token(columns.rewards_N.to(columns.kl_T.dtype), columns.lengths_N)
    return advantages, advantages


def reinforce_plus_plus_advantages(
    columns: ResponseColumns, config: EstimatorConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the discounted sum of the token rewards: REINFORCE++ (arXiv:2501.03262); whitening
    follows over the whole batch.
    """
    rewards = _pad(token_rewards(columns, config), columns.lengths_N)
    returns = _unpad(chunked_discounted_sum(rewards, config.gamma), columns.lengths_N)
    return returns, returns


def reinforce_plus_plus_baseline_advantages(
    columns: ResponseColumns, config: EstimatorConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns reward (minus its group's mean, taken before) - kl_coef * KL per token:
    REINFORCE++-baseline (arXiv:2501.03262).
    """
    penalty = kl_penalty(columns.kl_T, columns.masks_T, kl_coef=config.kl_coef)
    advantages = repeat_per_token(columns.rewards_N.to(penalty.dtype), columns.lengths_N) - penalty
    return advantages, advantages


def masked_generalized_advantages(
    rewards_T: torch.Tensor,
    values_T: torch.Tensor,
    masks_T: torch.Tensor | None,
    lengths_N: Sequence[int],
    *,
    gamma: float,
    lambd: float,
    chunked: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (advantages, returns) [T] of ragged responses; tokens with mask 0 are skipped by the
    recursion and read 0 in both.
    """
    if masks_T is None:
        kept, lengths = None, list(lengths_N)
    else:
        kept = masks_T != 0
        samples = repeat_per_token(torch.arange(len(lengths_N), device=masks_T.device), lengths_N)
        lengths = torch.bincount(samples[kept], minlength=len(lengths_N)).tolist()
    if not sum(lengths):
        return torch.zeros_like(values_T), torch.zeros_like(values_T)
    pick = (lambda flat: flat) if kept is None else (lambda flat: flat[kept])
    gae = generalized_advantages if chunked else generalized_advantages_stepwise
    padded = gae(
        _pad(pick(rewards_T), lengths), _pad(pick(values_T), lengths), gamma=gamma, lambd=lambd
    )
    advantages, returns = (_unpad(result, lengths) for result in padded)
    if kept is None:
        return advantages, returns
    zeros = torch.zeros_like(values_T)
    return zeros.masked_scatter(kept, advantages), zeros.masked_scatter(kept, returns)


def distillation_advantages(
    advantages: torch.Tensor,
    student_log_probs: torch.Tensor,
    teacher_log_probs: torch.Tensor,
    *,
    coef: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (advantages - coef * reverse KL, reverse KL = student - teacher log-prob) per token:
    on-policy distillation (arXiv:2306.13649; Lu et al. 2025, "On-policy distillation").
    """
    reverse_kl = student_log_probs - teacher_log_probs
    return advantages - coef * reverse_kl, reverse_kl
