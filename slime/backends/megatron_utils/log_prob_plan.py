"""Decides whether a rollout needs a log-prob pass before training, with the reason. Pure."""

from __future__ import annotations

import argparse
import dataclasses

from slime.algorithms.table import LOSSES, estimator_named


@dataclasses.dataclass(frozen=True)
class LogProbPlan:
    """What decides about the pass; one field a reason."""

    num_steps: int
    loss_type: str
    kl_coef: float
    use_rollout_logprobs: bool
    get_mismatch_metrics: bool
    estimator: str
    keep_old_actor: bool
    use_opd: bool
    use_rollout_entropy: bool

    @staticmethod
    def from_args(args: argparse.Namespace, num_steps: int) -> LogProbPlan:
        return LogProbPlan(
            num_steps=num_steps,
            loss_type=args.loss_type,
            kl_coef=args.kl_coef,
            use_rollout_logprobs=args.use_rollout_logprobs,
            get_mismatch_metrics=args.get_mismatch_metrics,
            estimator=args.advantage_estimator,
            keep_old_actor=args.keep_old_actor,
            use_opd=args.use_opd,
            use_rollout_entropy=args.use_rollout_entropy,
        )


def reasons_to_recompute_log_probs(plan: LogProbPlan) -> list[str]:
    """The reasons for a forward pass of the policy before training; empty means the first step's
    own log-probs are the old ones.

    With one optimizer step per rollout the policy that is trained is the policy before the step, so
    the pass would compute the same numbers twice.
    """
    estimator = estimator_named(plan.estimator)
    conditions = {
        (
            f"{plan.num_steps} optimizer steps per rollout: later steps need the log-probs of "
            "before "
            "the first"
        ): plan.num_steps > 1,
        f"loss type {plan.loss_type} may read log_probs": LOSSES[plan.loss_type].may_read_log_probs,
        "KL in the reward (--kl-coef) needs them": plan.kl_coef != 0,
        "--use-rollout-logprobs reports the trainer's beside the engine's": plan.use_rollout_logprobs,
        "--get-mismatch-metrics compares them": plan.get_mismatch_metrics,
        "the critic's advantages are computed before the step": estimator.needs_critic,
        "--keep-old-actor takes them from the older weights": plan.keep_old_actor,
        "distillation (--use-opd) needs the student's": plan.use_opd,
        f"{plan.estimator} compares whole responses": estimator.sequence_ratio,
        "--use-rollout-entropy asks for the entropy": plan.use_rollout_entropy,
    }
    return [reason for reason, holds in conditions.items() if holds]
