"""TensorBoard event files from metric records."""

from __future__ import annotations

import argparse
import os
from typing import Any

from slime.exceptions import ConfigError
from slime.files.jsonl import NOT_FINITE

_STEP = "step"


def resolve_log_dir(
    run_dir: str, project: str | None, experiment: str | None, *, root: str | None = None
) -> str:
    """Returns `root` (the environment's TENSORBOARD_DIR) or <run_dir>/tensorboard, with the two
    names as folders below it.
    """
    return os.path.join(
        root or os.path.join(run_dir, "tensorboard"),
        *(part for part in (project, experiment) if part),
    )


class TensorBoardSink:
    """Writes every number of a record as a scalar at the record's step."""

    name = "tensorboard"

    def __init__(self, log_dir: str) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                "--use-tensorboard needs the package tensorboard: pip install "
                "'slime-rl[tensorboard]'"
            ) from error
        self._writer = SummaryWriter(log_dir=log_dir)

    def write(self, metrics: dict[str, Any], step_key: str) -> None:
        """Adds one scalar per numeric metric at `metrics[step_key]`, also where it is not finite;
        the step itself is no scalar.
        """
        step = int(metrics[step_key])
        for name, value in metrics.items():
            if name != step_key and (isinstance(value, bool | int | float) or value in NOT_FINITE):
                self._writer.add_scalar(name, float(value), step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class TensorboardAdapter:
    """Upstream's way to TensorBoard, for code that writes series of its own beside the run's:
    `log(data, step)`, then `finish()`.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        root = os.environ.get("TENSORBOARD_DIR")
        self._sink = TensorBoardSink(
            resolve_log_dir(args.run_dir, args.tb_project_name, args.tb_experiment_name, root=root)
        )

    def log(self, data: dict[str, Any], step: int) -> None:
        """Adds one scalar per number of `data` at `step`."""
        self._sink.write({**data, _STEP: step}, _STEP)

    def finish(self) -> None:
        self._sink.close()
