"""`TrainWorker`: the Ray actor that hosts one training rank. The backend is imported in the rank's
process only, so the driver stays light.
"""

from __future__ import annotations

from typing import Any

from slime.supervision.heart import start_heart
from slime.supervision.records import expect_end
from slime.tracking.phases import phase
from slime.utils.misc import load_function

MEGATRON_ACTOR = "slime.backends.megatron_utils.actor.MegatronTrainRayActor"


class TrainWorker:
    """One rank of the class at `actor_path` (a `TrainRayActor`); `name` is its role and number."""

    def __init__(
        self,
        name: str,
        actor_path: str,
        world_size: int,
        rank: int,
        master_addr: str | None,
        master_port: int | None,
    ) -> None:
        start_heart(name)
        try:
            with phase("import"):
                self._actor = load_function(actor_path)(world_size, rank, master_addr, master_port)
        except BaseException:
            expect_end(name)  # Ray ends the process of a constructor that raises
            raise

    def call(self, method: str, *args: object, **kwargs: object) -> Any:
        """What the rank's `method` returns."""
        with phase(method):
            return getattr(self._actor, method)(*args, **kwargs)
