"""Options of the algorithm: which advantages, which loss, which corrections. Formulas:
`slime/algorithms/`, docs: docs/algorithms.md.
"""

from __future__ import annotations

import dataclasses

from slime.algorithms.table import ESTIMATORS, KL_ESTIMATORS, LOSS_TYPES
from slime.config.extension_points import help_of
from slime.config.option import option


@dataclasses.dataclass(frozen=True)
class AlgorithmOptions:
    """Algorithm: advantages, losses, corrections"""

    loss_type: str = option(
        "policy_loss",
        "What the policy minimizes (a critic always minimizes its value_loss).",
        choices=LOSS_TYPES,
    )
    advantage_estimator: str = option(
        "grpo",
        "How rewards become per-token advantages; ppo trains a critic as well.",
        choices=ESTIMATORS,
    )
    dr_grpo_length: int | None = option(
        None,
        (
            "Constant token count that dr_grpo divides each response's loss by; None: "
            "--rollout-max-response-len."
        ),
        minimum=1,
    )

    kl_coef: float = option(
        0.0,
        "Weight of the KL to the reference inside the token reward. Excludes --kl-loss-coef.",
        minimum=0,
    )
    use_kl_loss: bool = option(
        False, "Add the KL to the reference model as a loss term, and report it."
    )
    kl_loss_coef: float = option(0.0, "Weight of that loss term; 0 only reports it.", minimum=0)
    kl_loss_type: str = option(
        "k1", "KL estimator, in the reward and in the loss.", choices=KL_ESTIMATORS
    )
    use_unbiased_kl: bool = option(
        False, "Weigh the KL loss by the ratio new / old policy, so that it is unbiased off-policy."
    )

    eps_clip: float = option(0.2, "The importance ratio is clipped below 1 - this.", minimum=0)
    eps_clip_high: float | None = option(
        None,
        "The importance ratio is clipped above 1 + this; None: --eps-clip.",
        minimum=0,
        infinite=True,
    )
    eps_clip_c: float | None = option(
        None,
        "Dual clip: the loss at a negative advantage is at most this times its size.",
        above=1,
        note="dual-clip PPO bounds the ratio from above for negative advantages",
    )
    value_clip: float = option(
        0.2,
        "The critic's value may move this far from the old one before its loss is clipped.",
        minimum=0,
        infinite=True,
    )
    entropy_coef: float = option(
        0.0,
        (
            "Weight of the entropy bonus. Other than 0 computes the full-vocabulary entropy with "
            "gradient."
        ),
    )
    report_entropy: bool = option(
        True,
        (
            "Report train/entropy_loss although --entropy-coef is 0; --no-report-entropy saves a "
            "pass "
            "over the logits."
        ),
    )
    use_rollout_entropy: bool = option(
        False, "Compute the entropy in the log-prob pass too: rollout/entropy, and for hooks."
    )

    gamma: float = option(
        1.0, "Discount per response token (ppo, reinforce_plus_plus).", minimum=0, maximum=1
    )
    lambd: float = option(1.0, "GAE's lambda (ppo).", minimum=0, maximum=1)
    normalize_advantages: bool = option(
        False,
        (
            "Whiten advantages over all trained tokens of all ranks. Needed by reinforce_plus_plus "
            "and "
            "its baseline form."
        ),
    )
    rewards_normalization: bool = option(
        True,
        "Subtract the group's baseline from the reward.",
        disable_flag="--disable-rewards-normalization",
    )
    fan_out_baseline: str = option(
        "execution",
        "Members of a group's baseline where one rollout emits several samples: execution takes a "
        "rollout's mean reward and gives all its samples one "
        "advantage, row takes every sample for itself.",
        choices=("execution", "row"),
    )
    grpo_std_normalization: bool = option(
        True,
        "Also divide by the group's standard deviation (grpo, gspo, cispo).",
        disable_flag="--disable-grpo-std-normalization",
    )
    compute_advantages_and_returns: bool = option(
        True,
        "Compute advantages; off for supervised fine-tuning.",
        disable_flag="--disable-compute-advantages-and-returns",
    )

    use_rollout_logprobs: bool = option(
        False, "Use the engine's log-probs as the old policy's. Excludes --use-tis."
    )
    use_tis: bool = option(
        False, "Truncated importance sampling: weigh the loss by the ratio trainer / engine."
    )
    tis_clip: float = option(2.0, "Upper bound of that ratio.", minimum=0, infinite=True)
    tis_clip_low: float = option(0.0, "Lower bound of that ratio.", minimum=0)
    get_mismatch_metrics: bool = option(
        False,
        (
            "Report the metrics of --custom-tis-function-path without changing the loss (unless "
            "--use-tis)."
        ),
    )
    use_opsm: bool = option(
        False,
        "Off-policy sequence masking: drop far responses of negative advantage from the loss.",
    )
    opsm_delta: float = option(
        1e-4,
        "Mean old - new log-prob per token, in nats, above which a response is far.",
        minimum=0,
    )

    use_opd: bool = option(
        False, "On-policy distillation: subtract the reverse KL to a teacher from the advantages."
    )
    opd_type: str | None = option(
        None,
        (
            "Where teacher log-probs come from: megatron (--opd-teacher-load) or sglang (samples "
            "carry "
            "them)."
        ),
        choices=("megatron", "sglang"),
    )
    opd_kl_coef: float = option(1.0, "Weight of that reverse KL.", minimum=0)
    opd_teacher_load: str | None = option(None, "Checkpoint folder of the Megatron teacher.")
    opd_teacher_ckpt_step: int | None = option(
        None, "Iteration of --opd-teacher-load; None: its latest.", minimum=0
    )
    reset_optimizer_states: bool = option(
        False,
        (
            "Start every rollout's training with fresh optimizer moments: its steps follow this "
            "rollout alone."
        ),
    )

    calculate_per_token_loss: bool = option(
        False,
        (
            "Divide by all loss tokens of the step, in place of the mean within each rollout and "
            "then "
            "over rollouts."
        ),
    )
    recompute_loss_function: bool = option(
        False, "Recompute the loss in the backward pass: less memory, more time."
    )
    log_probs_chunk_size: int = option(
        -1, "Rows of logits per log-prob computation; -1: all at once.", minimum=1, also=(-1,)
    )

    custom_loss_function_path: str | None = option(None, help_of("custom_loss_function_path"))
    custom_advantage_function_path: str | None = option(
        None, help_of("custom_advantage_function_path")
    )
    custom_tis_function_path: str | None = option(None, help_of("custom_tis_function_path"))
    custom_pg_loss_reducer_function_path: str | None = option(
        None, help_of("custom_pg_loss_reducer_function_path")
    )
