"""Per-token losses of policy and critic. `ppo_kl` = old - new log-prob everywhere, so the
importance ratio is exp(-ppo_kl). All tensors are [T].
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from slime.algorithms.ratios import importance_ratio


@dataclasses.dataclass(frozen=True)
class ClipConfig:
    """The trust region: ratio in [1 - eps_clip, 1 + eps_clip_high]; `eps_clip_c` > 1 turns dual
    clip on.
    """

    eps_clip: float = 0.2
    eps_clip_high: float = 0.2
    eps_clip_c: float | None = None


def clipped_policy_loss(
    ppo_kl: torch.Tensor, log_probs: torch.Tensor, advantages: torch.Tensor, clip: ClipConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (loss, clip fraction) per token: max(-r A, -clamp(r) A), PPO (arXiv:1707.06347 eq. 7)
    with a separate upper bound ("clip higher", DAPO, arXiv:2503.14476). With `eps_clip_c` = c: for
    A < 0 at most -c A, dual clip (arXiv:1912.09729).

    `log_probs` is not used: the ratio carries the gradient, and a token whose log ratio is beyond
    MAX_LOG_RATIO has none.
    """
    ratio = importance_ratio(-ppo_kl)
    unclipped = -ratio * advantages
    clipped = -ratio.clamp(1 - clip.eps_clip, 1 + clip.eps_clip_high) * advantages
    loss = torch.maximum(unclipped, clipped)
    clip_fraction = (clipped > unclipped).to(ratio.dtype)
    if clip.eps_clip_c is not None:
        assert clip.eps_clip_c > 1, f"dual clip needs eps_clip_c > 1, got {clip.eps_clip_c}"
        loss = torch.where(advantages < 0, torch.minimum(-clip.eps_clip_c * advantages, loss), loss)
    return loss, clip_fraction


def cispo_loss(
    ppo_kl: torch.Tensor, log_probs: torch.Tensor, advantages: torch.Tensor, clip: ClipConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (loss, clip fraction) per token: -sg(clamp(r)) A log pi, CISPO (MiniMax-M1,
    arXiv:2506.13585): clipping bounds the weight of a token but never removes its gradient, which
    flows through `log_probs` only.
    """
    ratio = importance_ratio(-ppo_kl.detach())
    clamped = ratio.clamp(1 - clip.eps_clip, 1 + clip.eps_clip_high)
    return -clamped * advantages * log_probs, (clamped != ratio).to(ratio.dtype)


PolicyLoss = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, ClipConfig], tuple[torch.Tensor, torch.Tensor]
]


def clipped_value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, *, value_clip: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (loss, clip fraction) per token: max((v - R)^2, (v_old + clamp(v - v_old,
    +-value_clip) - R)^2), the value loss of PPO's reference implementation (openai/baselines ppo2;
    discussed in arXiv:2006.05990).
    """
    clipped_values = old_values + (values - old_values).clamp(-value_clip, value_clip)
    unclipped = (values - returns).square()
    clipped = (clipped_values - returns).square()
    return torch.maximum(unclipped, clipped), (clipped > unclipped).to(values.dtype)
