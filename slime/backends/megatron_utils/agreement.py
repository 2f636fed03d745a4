"""Steps that all ranks take together: what fails on one rank is raised on every rank, at the same
place.

Between two collectives a rank may fail alone: its disk is full, a file is gone. If it raised there,
its peers would wait for it in the next collective, or take the payload of another one for theirs.
So every such step runs in `agreed` or `gathered`, which exchange its outcome first.

    rank 0: agreed(write) writes        -> RanksFailed("rank 1: [Errno 28] No space left ...")
    rank 1: agreed(write) raises OSError -> the same RanksFailed, caused by the OSError
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch.distributed as dist
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException

from slime.exceptions import SlimeError

T = TypeVar("T")


class RanksFailed(SlimeError):
    """A step failed on some rank; the message names each and its error. Raised on every rank."""


def gathered(action: Callable[[], T]) -> list[T]:
    """Runs `action` on every rank and returns the results in the order of the ranks. Called by all
    ranks together.

    What the action raises on some rank is a `RanksFailed` on every one. The action itself has no
    collective but those of this module and of torch.distributed.checkpoint, which do the same.
    """
    outcome: tuple[str | None, Any]
    cause: Exception | None = None
    try:
        outcome = (None, action())
    except RanksFailed:  # the other ranks have raised it at the same place
        raise
    except CheckpointException as error:  # torch has raised it on every rank
        problems = [
            f"rank {rank}: {described(failure[0])}"
            for rank, failure in sorted(error.failures.items())
        ]
        raise RanksFailed("; ".join(problems)) from error
    except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks wait for the outcome
        outcome, cause = (f"rank {dist.get_rank()}: {described(error)}", None), error
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, outcome)
    failures = [problem for problem, _ in everyone if problem is not None]
    if failures:
        raise RanksFailed("; ".join(failures)) from cause
    return [cast(T, result) for _, result in everyone]


def agreed(action: Callable[[], T]) -> T:
    """Runs `action` on every rank and returns this rank's result, which stays here. Errors as in
    `gathered`.
    """
    own: list[T] = []
    gathered(lambda: own.append(action()))
    return own[0]


def described(error: BaseException) -> str:
    """The error in one line: an `OSError`'s and our own text says it all, of others the class is
    named too.
    """
    text = " ".join(str(error).split())
    if isinstance(error, OSError | SafetensorError | SlimeError):
        return text
    return f"{type(error).__name__}: {text}"
