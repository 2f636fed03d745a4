"""Every algorithm with all its facts, one entry each: advantage estimators, losses, estimators of
the KL. No torch: options, the rollout side and the trainer read the same entry.

A formula is named by its dotted path, `package.module.function`, and imported where it is computed.
A new estimator is its formula and one entry here: choices of the option, the critic, the group
baseline, the loss and the checks of options follow from the entry.
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any


def formula_at(path: str) -> Any:
    """The function that an entry names, looked up in its module at each call, so that one that
    users replace there is found.
    """
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


@dataclasses.dataclass(frozen=True)
class Baseline:
    """What a group of samples subtracts from its rewards: the half of the advantage that needs
    every sibling and is computed before the batch is split
    (`slime.data.rewards.normalize_rewards`).

    `leave_one_out`: the mean of the other members of the group, else of all of them.
    `may_divide_by_std`: the result is also divided by the group's standard deviation, unless
    --disable-grpo-std-normalization.
    """

    leave_one_out: bool = False
    may_divide_by_std: bool = False


@dataclasses.dataclass(frozen=True)
class Estimator:
    """One choice of --advantage-estimator.

    advantages: the function (ResponseColumns, EstimatorConfig) -> (advantages, returns), see
    `slime.algorithms.advantages`; it works on full responses where `whole_response`, else on any
    part of them. None where `needs_critic`: they are GAE over the critic's values, computed under
    upstream's name, which plug-ins replace. baseline: None where the raw reward is taken.
    needs_whitening: advantages must be
    whitened over the batch, which is the estimator's baseline. policy_loss: a `PolicyLoss` of
    `slime.algorithms.policy_loss`, None for the clipped one. sequence_ratio: the importance ratio is
    one per response, of its mean log-prob. constant_length: a response's loss is divided by a
    constant (--dr-grpo-length) and not by its tokens.
    """

    advantages: str | None
    baseline: Baseline | None = None
    whole_response: bool = False
    needs_critic: bool = False
    needs_whitening: bool = False
    policy_loss: str | None = None
    sequence_ratio: bool = False
    constant_length: bool = False

    def __post_init__(self) -> None:
        assert self.needs_critic == (self.advantages is None), (
            "an estimator has a formula of its own, or GAE over a critic's values"
        )


_GROUP = "slime.algorithms.advantages.group_advantages"
_BY_STD = Baseline(may_divide_by_std=True)

# GRPO arXiv:2402.03300; GSPO arXiv:2507.18071; CISPO arXiv:2506.13585; RLOO arXiv:2402.14740;
# Dr. GRPO (no std, constant length) arXiv:2503.20783; PPO arXiv:1707.06347; REINFORCE++
# arXiv:2501.03262.
ESTIMATORS: dict[str, Estimator] = {
    "grpo": Estimator(_GROUP, _BY_STD),
    "gspo": Estimator(_GROUP, _BY_STD, sequence_ratio=True),
    "cispo": Estimator(_GROUP, _BY_STD, policy_loss="slime.algorithms.policy_loss.cispo_loss"),
    "rloo": Estimator(_GROUP, Baseline(leave_one_out=True)),
    "dr_grpo": Estimator(_GROUP, Baseline(), constant_length=True),
    "reinforce_plus_plus": Estimator(
        "slime.algorithms.advantages.reinforce_plus_plus_advantages",
        whole_response=True,
        needs_whitening=True,
    ),
    "reinforce_plus_plus_baseline": Estimator(
        "slime.algorithms.advantages.reinforce_plus_plus_baseline_advantages",
        Baseline(),
        needs_whitening=True,
    ),
    "ppo": Estimator(None, needs_critic=True),
}


def estimator_named(name: str) -> Estimator:
    """The entry of an estimator. Raises NotImplementedError with the known names."""
    if name not in ESTIMATORS:
        raise NotImplementedError(
            f"unknown advantage estimator {name!r}. Use one of {', '.join(ESTIMATORS)}."
        )
    return ESTIMATORS[name]


@dataclasses.dataclass(frozen=True)
class Loss:
    """One loss of a model.

    function: (args, batch, logits, reducer) -> (loss, metrics); None: --custom-loss-function-path.
    for_critic: what a critic minimizes, and no choice of --loss-type. is_supervised: responses were
    not sampled, so that temperature and nucleus have no part in their log-probs. learns_from_reward:
    a higher reward is what the loss is for. may_read_log_probs: it may need the log-probs of before
    the first step, where the policy loss takes those of its own forward pass.
    """

    function: str | None
    for_critic: bool = False
    is_supervised: bool = False
    learns_from_reward: bool = False
    may_read_log_probs: bool = True


LOSSES: dict[str, Loss] = {
    "policy_loss": Loss(
        "slime.backends.megatron_utils.loss.policy_loss_function",
        learns_from_reward=True,
        may_read_log_probs=False,
    ),
    "value_loss": Loss("slime.backends.megatron_utils.loss.value_loss_function", for_critic=True),
    "sft_loss": Loss("slime.backends.megatron_utils.loss.sft_loss_function", is_supervised=True),
    "custom_loss": Loss(None),
}
LOSS_TYPES = tuple(name for name, loss in LOSSES.items() if not loss.for_critic)


@dataclasses.dataclass(frozen=True)
class KlEstimator:
    """One choice of --kl-loss-type. formula: of log pi - log pi_base. bound: the estimate is
    clamped to [-bound, bound].
    """

    formula: str
    bound: float | None = None


KL_ESTIMATORS: dict[str, KlEstimator] = {
    "k1": KlEstimator("slime.algorithms.kl.k1"),
    "k2": KlEstimator("slime.algorithms.kl.k2"),
    "k3": KlEstimator("slime.algorithms.kl.k3"),
    # GRPO's KL (arXiv:2402.03300 eq. 4), bounded
    "low_var_kl": KlEstimator("slime.algorithms.kl.k3", bound=10.0),
}
