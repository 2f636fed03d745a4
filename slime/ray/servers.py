"""`RolloutServers`: the engines of a run, embedded or external, and the router before them."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Mapping
from typing import Any

import ray

from slime.exceptions import ProcessDied
from slime.ray import actors
from slime.ray.utils import reason_of_death, slime_error_of, wait_for
from slime.supervision.records import expect_end

HEALTH_TIMEOUT_S = 10.0
logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class PublishedWeights:
    """What every engine serves, for one that starts later: references to {name: array} in Ray's
    object store, or the folder that all of them have read. checksum: of all tensors, None where no
    engine was there to compute it.
    """

    version: str
    checksum: str | None
    buckets: tuple[Any, ...] = ()
    folder: str | None = None


@dataclasses.dataclass
class RolloutServers:
    """The engines of a run. `engines` are Ray actors whose weights we set; external servers have
    none. `lost`: numbers of engines that are gone and whose successor is not there yet. outlives:
    the death of an engine does not end the run.
    """

    engines: list[Any]
    urls: list[str]
    router: Any | None = None
    lost: set[int] = dataclasses.field(default_factory=set)
    outlives: bool = False

    @property
    def living(self) -> dict[int, Any]:
        """Our engines by their number, without lost ones."""
        return {rank: engine for rank, engine in enumerate(self.engines) if rank not in self.lost}

    def addresses(self) -> dict[int, str]:
        """Every engine's address by its number; of lost ones, those of external servers only."""
        return {
            rank: url
            for rank, url in enumerate(self.urls)
            if not self.engines or rank not in self.lost
        }

    @property
    def client_urls(self) -> list[str]:
        """Where requests go: the router where there is one, else every engine."""
        return [self.router.url] if self.router is not None else self.urls

    def failures(self) -> list[str]:
        """One sentence per engine of ours that is gone or whose thread has failed: why requests to
        it get no answer.
        """
        found = []
        for rank, engine in enumerate(self.engines):  # none where they are external
            url = self.urls[rank]
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
        freed = self._ask("release_memory", what="freeing the engines' memory", timeout_s=timeout_s)
        if not all(freed):
            logger.info(
                "%d of %d engines have requests and keep their memory.",
                freed.count(False),
                len(freed),
            )

    def resume_memory(self, *, timeout_s: float) -> None:
        """Our engines take it again."""
        self._ask("resume_memory", what="giving the engines memory", timeout_s=timeout_s)

    def checksums(self, *, timeout_s: float) -> list[str]:
        """Each engine's checksum of its weights."""
        return self._ask("weights_checksum", what="checksums of the engines", timeout_s=timeout_s)

    def _ask(self, method: str, *, what: str, timeout_s: float) -> list[Any]:
        answers = ask_engines(
            self.living, method, what=what, timeout_s=timeout_s, outlives=self.outlives
        )
        return list(answers.values())

    def stop(self) -> None:
        """Ends the router, then the engines. Their processes are gone when it returns."""
        if self.router is not None:
            self.router.stop()
        if self.living:
            ask_engines(
                self.living,
                "shutdown",
                what="stopping the engines",
                timeout_s=15,
                outlives=self.outlives,
                option=None,
            )
        for rank, engine in enumerate(self.engines):
            expect_end(f"engine {rank}")
            actors.kill(engine)
        self.engines = []


def ask_engines(
    engines: Mapping[int, Any],
    method: str,
    *values: object,
    what: str,
    timeout_s: float,
    outlives: bool,
    option: str | None = "--step-timeout",
) -> dict[int, Any]:
    """Each engine's answer by its number. The death of one is a ProcessDied that names it, or, with
    `outlives`, leaves it out of the answers.
    """
    refs = {rank: getattr(engine, method).remote(*values) for rank, engine in engines.items()}
    names = {rank: f"engine {rank}" for rank in refs}
    if not outlives:
        found = wait_for(
            list(refs.values()),
            what=what,
            timeout_s=timeout_s,
            names=list(names.values()),
            option=option,
        )
        return dict(zip(refs, found, strict=True))
    answers, deadline = {}, time.monotonic() + timeout_s
    for rank, ref in refs.items():
        left = max(0.1, deadline - time.monotonic())
        try:
            (answers[rank],) = wait_for(
                [ref], what=what, timeout_s=left, names=[names[rank]], option=option
            )
        except ProcessDied as error:
            logger.info("%s", error)
    return answers
