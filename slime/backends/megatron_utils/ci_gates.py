"""Checks the training metrics of a CI run (`--ci-test`). Pure."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class CiGates:
    """The gates that are on, and their thresholds."""

    enabled: bool
    check_kl: bool
    log_prob_diff_threshold: float
    save_grad_norm: str | None
    load_grad_norm: str | None

    @staticmethod
    def from_args(args: argparse.Namespace) -> CiGates:
        return CiGates(
            enabled=args.ci_test,
            check_kl=not args.ci_disable_kl_checker,
            log_prob_diff_threshold=args.ci_train_rollout_logprob_abs_diff_threshold,
            save_grad_norm=args.ci_save_grad_norm,
            load_grad_norm=args.ci_load_grad_norm,
        )


def ci_problems(
    gates: CiGates,
    metrics: Mapping[str, float],
    grad_norm: float,
    *,
    role: str,
    rollout_id: int,
    step_id: int,
) -> list[str]:
    """Returns one sentence per gate that does not hold after a step; [] without --ci-test.

    On the policy's first step of a rollout the policy is the one that sampled: ppo_kl must be 0,
    and in the first rollout kl_loss too. A gradient norm is compared with the file of
    --ci-load-grad-norm within 1 %.
    """
    if not gates.enabled:
        return []
    problems = []
    difference = metrics.get("train_rollout_logprob_abs_diff")
    if difference is not None and not difference <= gates.log_prob_diff_threshold:
        problems.append(
            f"train_rollout_logprob_abs_diff is {difference:.3g}, above "
            f"{gates.log_prob_diff_threshold:.3g}."
        )
    if gates.check_kl and step_id == 0:
        for name in ("ppo_kl", "kl_loss") if rollout_id == 0 else ("ppo_kl",):
            value = metrics.get(name)
            if value is not None and not abs(value) < 1e-8:
                problems.append(f"{name} of the first step is {value:.3g}; it must be below 1e-8.")
    if gates.load_grad_norm is not None:
        expected = float(Path(_path(gates.load_grad_norm, role, rollout_id, step_id)).read_text())
        if not math.isclose(grad_norm, expected, rel_tol=0.01):
            problems.append(
                f"grad_norm is {grad_norm:.6g}, but {expected:.6g} was recorded; they may differ "
                "by 1 %."
            )
    return problems


def _path(template: str, role: str, rollout_id: int, step_id: int) -> str:
    return template.format(role=role, rollout_id=rollout_id, step_id=step_id)


def save_grad_norm(
    gates: CiGates, grad_norm: float, *, role: str, rollout_id: int, step_id: int
) -> None:
    """Writes the norm to the file of --ci-save-grad-norm, if one is asked for."""
    if gates.save_grad_norm is not None:
        path = Path(_path(gates.save_grad_norm, role, rollout_id, step_id))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(repr(grad_norm))
