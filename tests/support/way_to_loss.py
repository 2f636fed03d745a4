"""Runs `slime train --local` and writes what it passes on the way to the loss, as a program:

    python -m support.way_to_loss words.json found.json

{"calls": the functions of slime from the loop to the first loss, outermost first; "files": those
with a function that is given or returns the rollout batch, between the start of the train actor and
the first loss}. Files are relative to slime/.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import slime

ROOT = f"{Path(slime.__file__).parent}/"


class Way:
    """What is seen between the start of the train actor and its first loss."""

    def __init__(self, batch_type: type) -> None:
        self.batch_type = batch_type
        self.calls: list[str] = []
        self.files: dict[str, None] = {}

    def watch(self, frame: FrameType, event: str, arg: Any) -> None:
        """A profile function: notes the file of a call that takes or returns the batch."""
        path = frame.f_code.co_filename
        if path.startswith(ROOT) and event in ("call", "return"):
            values = list(frame.f_locals.values()) if event == "call" else [arg]
            if any(isinstance(value, self.batch_type) for value in values):
                self.files[path.removeprefix(ROOT)] = None

    def arrive(self, frame: FrameType | None) -> None:
        """Notes the calls that led to `frame`, the first time."""
        sys.setprofile(None)
        while frame is not None and not (self.calls and self.calls[-1] == "train.py train"):
            path = frame.f_code.co_filename
            if path.startswith(ROOT):
                self.calls.append(f"{path.removeprefix(ROOT)} {frame.f_code.co_name}")
            frame = frame.f_back


def main(words: list[str]) -> dict[str, Any]:
    """The run with these options, and what was found."""
    from slime.local import train

    import slime.accelerator.before_megatron  # noqa: F401  isort: skip

    from slime.backends.megatron_utils import loss
    from slime.backends.megatron_utils.actor import MegatronTrainRayActor
    from slime.data.batch import RolloutBatch

    way = Way(RolloutBatch)
    start, compute_loss = MegatronTrainRayActor.train, loss.policy_loss_function

    def watched_start(self: Any, *args: Any, **kwargs: Any) -> Any:
        sys.setprofile(way.watch)
        return start(self, *args, **kwargs)

    def watched_loss(*args: Any) -> Any:
        if not way.calls:
            way.arrive(sys._getframe(1))
        return compute_loss(*args)

    MegatronTrainRayActor.train = watched_start  # type: ignore[method-assign]
    loss.policy_loss_function = watched_loss
    train(words)
    calls = [*reversed(way.calls), "backends/megatron_utils/loss.py policy_loss_function"]
    return {"calls": calls, "files": list(way.files)}


if __name__ == "__main__":
    found = main(json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps(found, indent=1))
