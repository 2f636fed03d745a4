"""What a group of samples subtracts from its rewards, by advantage estimator: the half of the
advantage that needs every sibling and is computed before the batch is split
(`slime.data.rewards.normalize_rewards`). No torch: the rollout side reads this table.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Baseline:
    """`leave_one_out`: the mean of the other members of the group, else of all of them.
    `may_divide_by_std`: the result is also divided by the group's standard deviation, unless
    --disable-grpo-std-normalization.
    """

    leave_one_out: bool = False
    may_divide_by_std: bool = False


# Estimators that are not named here (ppo, reinforce_plus_plus) take the raw reward.
# GRPO arXiv:2402.03300; Dr. GRPO (no std) arXiv:2503.20783; RLOO arXiv:2402.14740;
# REINFORCE++-baseline arXiv:2501.03262.
BASELINES: dict[str, Baseline] = {
    "grpo": Baseline(may_divide_by_std=True),
    "gspo": Baseline(may_divide_by_std=True),
    "cispo": Baseline(may_divide_by_std=True),
    "dr_grpo": Baseline(),
    "reinforce_plus_plus_baseline": Baseline(),
    "rloo": Baseline(leave_one_out=True),
}
