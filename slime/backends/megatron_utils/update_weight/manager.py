"""The calls that a weight update makes to the rollout manager."""

from __future__ import annotations

import argparse
from typing import Any

from slime.ray.utils import wait_for


def ask_manager(args: argparse.Namespace, method: Any, *values: object) -> Any:
    """The rollout manager's answer. SlimeError after --step-timeout."""
    return wait_for(
        [method.remote(*values)],
        what="weight update (the rollout manager)",
        timeout_s=args.step_timeout,
    )[0]
