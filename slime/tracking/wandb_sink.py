"""Weights & Biases from metric records. One process of a run writes to it; W&B is imported only
when it was asked for.
"""

from __future__ import annotations

import argparse
import os
import threading
from typing import Any

from slime.config.observability import resolve_wandb_run_id
from slime.exceptions import ConfigError
from slime.files.jsonl import NOT_FINITE

# which column is the x axis of which metrics
AXES = {
    "train/step": ("train/*",),
    "rollout/step": ("rollout/*", "multi_turn/*", "passrate/*", "perf/*", "gate/*"),
    "eval/step": ("eval/*",),
}
FINISH_TIMEOUT_S = 60.0


def build_init_arguments(args: argparse.Namespace, run_dir: str) -> dict[str, Any]:
    """Returns the keyword arguments of `wandb.init` for these options; the recorded options hold no
    secrets.
    """
    run_id = resolve_wandb_run_id(args.wandb_run_id, run_dir)
    name = os.path.basename(run_dir)
    group = args.wandb_group or name
    return {
        "project": args.wandb_project or "slime",
        "entity": args.wandb_team,
        "group": f"{group}_{run_id}" if args.wandb_random_suffix else group,
        "name": args.run_name or name,
        "id": run_id,
        "resume": "allow",
        "mode": args.wandb_mode or os.environ.get("WANDB_MODE", "online"),
        "dir": args.wandb_dir or run_dir,
        "config": public_options(args),
    }


def public_options(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the options as plain values, without those whose names mark them as secret."""
    secret_words = ("key", "secret", "password", "token")
    secrets = {
        name
        for name in vars(args)
        if name.split("_")[-1] in secret_words and isinstance(vars(args)[name], str)
    }
    secrets.add("as_requested")  # a dict that holds them again
    plain = (bool, int, float, str, type(None))
    return {
        name: value if isinstance(value, plain) else str(value)
        for name, value in vars(args).items()
        if name not in secrets
        or name.startswith(("input_", "label_", "metadata_", "tool_", "reward_", "eval_"))
    }


class WandbSink:
    """One W&B run with an own step axis per family of metrics."""

    name = "wandb"

    def __init__(self, args: argparse.Namespace, run_dir: str) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(
                "--use-wandb needs the package wandb: pip install 'slime-rl[wandb]'"
            ) from error
        init_arguments = build_init_arguments(args, run_dir)
        settings: dict[str, Any] = {"init_timeout": 60, "console": "off"}
        if args.wandb_host:
            settings["base_url"] = args.wandb_host
        if args.wandb_key and init_arguments["mode"] == "online":
            settings["api_key"] = args.wandb_key
        os.makedirs(init_arguments["dir"], exist_ok=True)
        self._run = wandb.init(settings=wandb.Settings(**settings), **init_arguments)
        for axis, families in AXES.items():
            self._run.define_metric(axis)
            for family in families:
                self._run.define_metric(family, step_metric=axis)

    def write(self, metrics: dict[str, Any], step_key: str) -> None:
        """Logs one record. Its step is a column, so W&B's own counter never rejects an older step
        of another axis.
        """
        self._run.log(
            {
                name: float(value) if value in NOT_FINITE else value
                for name, value in metrics.items()
            }
        )

    def close(self) -> None:
        """Uploads the rest, for at most a minute: a tracker that does not answer must not keep a
        finished run alive.
        """
        finisher = threading.Thread(target=self._run.finish, name="wandb-finish", daemon=True)
        finisher.start()
        finisher.join(FINISH_TIMEOUT_S)
        if finisher.is_alive():
            raise TimeoutError(
                f"W&B did not finish within {FINISH_TIMEOUT_S:.0f} s; `wandb sync` sends the rest"
            )
