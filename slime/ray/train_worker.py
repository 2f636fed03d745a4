"""`TrainWorker`: the Ray actor that hosts one training rank. The backend is imported in the rank's
process only, so the driver stays light.
"""

from __future__ import annotations

from typing import Any

from slime.utils.misc import load_function

MEGATRON_ACTOR = "slime.backends.megatron_utils.actor.MegatronTrainRayActor"


class TrainWorker:
    """One rank of the class at `actor_path` (a `TrainRayActor`)."""

    def __init__(
        self,
        actor_path: str,
        world_size: int,
        rank: int,
        master_addr: str | None,
        master_port: int | None,
    ) -> None:
        self._actor = load_function(actor_path)(world_size, rank, master_addr, master_port)

    def call(self, method: str, *args: object, **kwargs: object) -> Any:
        """What the rank's `method` returns."""
        return getattr(self._actor, method)(*args, **kwargs)
