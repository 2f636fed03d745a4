"""`RolloutServers`: the engines of a run, embedded or external, and the router before them."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import ray

from slime.ray import actors
from slime.ray.utils import reason_of_death, slime_error_of, wait_for

HEALTH_TIMEOUT_S = 10.0
logger = logging.getLogger(__name__)


@dataclasses.dataclass
class RolloutServers:
    """The engines of a run. `engines` are Ray actors whose weights we set; external servers have
    none.
    """

    engines: list[Any]
    urls: list[str]
    router: Any | None = None

    @property
    def client_urls(self) -> list[str]:
        """Where requests go: the router where there is one, else every engine."""
        return [self.router.url] if self.router is not None else self.urls

    def failures(self) -> list[str]:
        """One sentence per engine of ours that is gone or whose thread has failed: why requests to
        it get no answer.
        """
        found = []
        for rank, (engine, url) in enumerate(zip(self.engines, self.urls, strict=True)):
            try:
                actors.get(engine.health.remote(), timeout=HEALTH_TIMEOUT_S)
            except ray.exceptions.GetTimeoutError:
                found.append(
                    f"engine {rank} ({url}) does not answer within {HEALTH_TIMEOUT_S:.0f} s."
                )
            except ray.exceptions.RayActorError as error:
                found.append(f"the process of engine {rank} ({url}) died. {reason_of_death(error)}")
            except Exception as error:  # noqa: BLE001 - Ray mixes its class into whatever the engine raised
                found.append(str(slime_error_of(error) or error))
        return found

    def release_memory(self, *, timeout_s: float) -> None:
        """Our engines give their caches' memory back; one that still has requests keeps it."""
        freed = wait_for(
            [engine.release_memory.remote() for engine in self.engines],
            what="freeing the engines' memory",
            timeout_s=timeout_s,
        )
        if not all(freed):
            logger.info(
                "%d of %d engines have requests and keep their memory.",
                freed.count(False),
                len(freed),
            )

    def resume_memory(self, *, timeout_s: float) -> None:
        """Our engines take it again."""
        wait_for(
            [engine.resume_memory.remote() for engine in self.engines],
            what="giving the engines memory",
            timeout_s=timeout_s,
        )

    def stop(self) -> None:
        """Ends the router, then the engines. Their processes are gone when it returns."""
        if self.router is not None:
            self.router.stop()
        if self.engines:
            wait_for(
                [engine.shutdown.remote() for engine in self.engines],
                what="stopping the engines",
                timeout_s=15,
                option=None,
            )
        for engine in self.engines:
            actors.kill(engine)
        self.engines = []
