"""The rollout manager as a process of a run."""

from __future__ import annotations

import argparse
import gc

from slime.ray.rollout import RolloutManager
from slime.supervision.heart import ROLLOUT_MANAGER, start_heart
from slime.tracking.spans import span
from slime.tracking.tracking import finish_tracking
from slime.utils.misc import Box


class RolloutManagerActor(RolloutManager):
    """`RolloutManager` in its process. What its start raises, `ready` raises: Ray would abort the
    process, with pages of native stack.
    """

    def __init__(self, args: argparse.Namespace, pg: tuple) -> None:
        start_heart(ROLLOUT_MANAGER)
        self._failure: Exception | None = None
        self._is_warm = False
        try:
            super().__init__(args, pg)
        except Exception as error:  # noqa: BLE001 - raised again by `ready`
            self._failure = error

    def generate(self, rollout_id: int) -> list[Box] | None:
        boxes = super().generate(rollout_id)
        if not self._is_warm:
            # What a first rollout loaded stays. Python's full collections would walk over all of
            # it, 0.2 s in the middle of a later rollout.
            with span("collect_garbage"):
                gc.collect()
                gc.freeze()
            self._is_warm = True
        return boxes

    def ready(self) -> None:
        """Returns once the engines answer; raises what kept the manager from starting."""
        if self._failure is not None:
            raise self._failure

    def dispose(self) -> None:
        """Stops engines and writers, as far as they were started."""
        if self._failure is None:
            super().dispose()
        else:
            finish_tracking(self.args, primary=False)
