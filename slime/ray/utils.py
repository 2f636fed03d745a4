"""Ray helpers that every actor uses: environment variables, a lock, and a wait with a time limit
that names the actors without an answer.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import ray

from slime import exceptions
from slime.exceptions import EngineError, ProcessDied, SlimeError
from slime.ray import actors
from slime.supervision.heart import start_heart
from slime.supervision.records import FOLDER_VARIABLE
from slime.tracking.plain_output import PLAIN
from slime.tracking.spans import span
from slime.typing import ActorHandle

NOSET_VISIBLE_DEVICES_ENV_VARS_LIST = [
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES",
    "RAY_EXPERIMENTAL_NOSET_ROCR_VISIBLE_DEVICES",
    "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES",
    "RAY_EXPERIMENTAL_NOSET_HABANA_VISIBLE_MODULES",
    "RAY_EXPERIMENTAL_NOSET_NEURON_RT_VISIBLE_CORES",
    "RAY_EXPERIMENTAL_NOSET_TPU_VISIBLE_CHIPS",
    "RAY_EXPERIMENTAL_NOSET_ONEAPI_DEVICE_SELECTOR",
]

DEATH_NOTICE_S = 3.0  # how much later than its peers' errors the death of a process may be heard of

OTHER_ERRORS_S = 0.5  # how much later than the first the same error of another rank may arrive

LOCK_POLL_S = 0.1
WAIT_POLL_S = 10.0
LOCK_OF_UPDATES = "the lock of weight updates"  # its role
TRAINING_RANKS = "the training ranks"  # as the holder of the lock

# Passed on from the driver to every actor, so that a test or a user sets them once.
_FORWARDED = (
    "SLIME_ACCELERATOR",
    "HF_HUB_OFFLINE",
    "HF_HOME",
    "TOKENIZERS_PARALLELISM",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    FOLDER_VARIABLE,
    *PLAIN,
)

# Warnings of Megatron-core at import, before our logging is set up: both states are intended.
_EXPECTED_WARNINGS = (
    "ignore:Apex is not installed,ignore:Transformer Engine and Apex are not "
    "installed,ignore:full scope is deprecated"
)

# How long actors may take to leave in good order when a run ends; busy ones are ended with the
# session. Two groups fit into 10 seconds.
STOP_TIMEOUT_S = 3.5


def ray_noset_visible_devices(env_vars: Mapping[str, str] = os.environ) -> bool:
    """True if Ray is configured not to set the visible devices of its workers."""
    return any(env_vars.get(name) for name in NOSET_VISIBLE_DEVICES_ENV_VARS_LIST)


def get_physical_gpu_id() -> str:
    """The id of this actor's GPU as the machine counts, "" without one."""
    ids = ray.get_gpu_ids()
    return str(ids[0]) if ids else ""


TASK_EVENTS = "RAY_task_events_report_interval_ms"


def add_default_ray_env_vars(env: dict[str, str] | None = None) -> dict[str, str]:
    """`env` plus what every actor needs: one thread a process unless asked otherwise, visible
    devices left alone, no usage ping.
    """
    defaults = dict.fromkeys(NOSET_VISIBLE_DEVICES_ENV_VARS_LIST, "1")
    defaults |= {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "RAY_USAGE_STATS_ENABLED": "0",
        # The control store would keep an entry of each of the last 100,000 calls: 70 MB in 1,000
        # short rollouts, which nobody reads.
        TASK_EVENTS: os.environ.get(TASK_EVENTS, "0"),
    }
    defaults["PYTHONWARNINGS"] = _EXPECTED_WARNINGS
    defaults |= {name: os.environ[name] for name in _FORWARDED if name in os.environ}
    return defaults | (env or {})


@actors.remote(num_cpus=0)
class Lock:
    """A non-blocking lock between actors. `acquire(holder)` returns whether it succeeded;
    `release()` requires that the lock is held.
    """

    def __init__(self) -> None:
        start_heart(LOCK_OF_UPDATES)
        self._locked = False
        self._holder = ""

    def acquire(self, holder: str = "") -> bool:
        got = not self._locked
        if got:
            self._locked, self._holder = True, holder
        return got

    def release(self) -> None:
        assert self._locked, "release of a lock that is not held"
        self._locked = False

    def release_of(self, holder: str) -> None:
        """Releases it where `holder`, whose process has ended, holds it."""
        if self._locked and self._holder == holder:
            self._locked = False


@contextlib.contextmanager
def held(lock: ActorHandle, *, timeout_s: float, holder: str = "") -> Iterator[None]:
    """Holds the engines' lock: two updates must not interleave their buckets."""
    deadline = time.monotonic() + timeout_s
    while not actors.get(lock.acquire.remote(holder), timeout=timeout_s):
        if time.monotonic() > deadline:
            raise EngineError(f"another weight update has held the engines for {timeout_s:.0f} s")
        time.sleep(LOCK_POLL_S)
    try:
        yield
    finally:
        actors.get(lock.release.remote(), timeout=timeout_s)


def wait_for(
    refs: Sequence[Any],
    *,
    what: str,
    timeout_s: float,
    names: Sequence[str] | None = None,
    option: str | None = "--step-timeout",
    meanwhile: Callable[[], object] | None = None,
) -> list[Any]:
    """The results of `refs` in order. Raises the first failure as soon as it happens, whichever
    actor it is on, and SlimeError after `timeout_s` seconds, which `option` sets: with one rank
    dead, its peers would otherwise wait in a collective.

    meanwhile: is called every few seconds, and may raise what ends the wait.

    A process that died is a ProcessDied that names the operation and, with `names` (one a
    reference), whose it was.
    """
    deadline = time.monotonic() + timeout_s
    pending = list(refs)
    with span("wait", what=what):
        while pending:
            left = deadline - time.monotonic()
            if left <= 0:
                silent = (
                    ""
                    if names is None
                    else f" ({', '.join(names[list(refs).index(ref)] for ref in pending)})"
                )
                limit = (
                    f"{timeout_s:.0f} s"
                    if option is None
                    else f"{option} {timeout_s:g} s; raise it if that is too short"
                )
                raise SlimeError(
                    f"{what}: {len(pending)} of {len(refs)} actors{silent} gave no answer within "
                    f"{limit}"
                )
            done, pending = actors.wait(pending, num_returns=1, timeout=min(left, WAIT_POLL_S))
            if not done and meanwhile is not None:
                meanwhile()
            try:
                actors.get(done)
            except Exception as error:
                death = _death_among([*done, *pending], error)
                if death is None:
                    raise
                dead, cause = death
                whose = None if names is None else names[list(refs).index(dead)]
                of = "" if whose is None else f" of {whose}"
                died = ProcessDied(f"{what}: the process{of} died. {reason_of_death(cause)}")
                died.whose = whose
                raise died from cause
        return actors.get(list(refs))


def _hear(refs: list[Any]) -> None:
    """Takes note of the errors that other ranks raised with the first: Ray prints a page for each
    that nobody has asked for.
    """
    if not refs:
        return
    ended, _ = actors.wait(refs, num_returns=len(refs), timeout=OTHER_ERRORS_S)
    for ref in ended:
        with contextlib.suppress(Exception):
            actors.get(ref)


def _death_among(refs: list[Any], first: Exception) -> tuple[Any, Exception] | None:
    """(reference, error) of an actor whose process died, None where none did. `first` is what
    refs[0] raised: where the others share a collective with a dead one, a lost connection is often
    the first that is heard of it.
    """
    if isinstance(first, ray.exceptions.RayActorError):
        return None if first.actor_init_failed else (refs[0], first)
    if isinstance(first, SlimeError):
        return None
    ended, _ = (
        actors.wait(refs[1:], num_returns=len(refs) - 1, timeout=DEATH_NOTICE_S)
        if len(refs) > 1
        else ([], [])
    )
    for ref in ended:
        try:
            actors.get(ref)
        except ray.exceptions.RayActorError as error:
            return ref, error
        except Exception:  # noqa: BLE001 - another consequence
            continue
    return None


_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_RAISED = re.compile(r"^slime\.exceptions\.(\w+): ", re.MULTILINE)


def plain_text(error: BaseException) -> str:
    """The error's message without the colours that Ray puts into it."""
    return _COLOURS.sub("", str(error)).strip()


def slime_error_of(error: BaseException) -> SlimeError | None:
    """The error that slime raised on purpose, here or in an actor (also in its constructor), with
    its own message alone; None if it is another error. What an actor got from a further actor is
    followed to its beginning.
    """
    while isinstance(error, ray.exceptions.RayTaskError):
        error = error.cause
    if isinstance(error, SlimeError):
        return error
    if isinstance(error, ray.exceptions.RayError):
        # Of a constructor that failed Ray keeps the text only; the last error of a chain is what
        # was raised.
        text = plain_text(error)
        found = list(_RAISED.finditer(text))
        if found:
            kind = getattr(exceptions, found[-1].group(1), SlimeError)
            return kind(text[found[-1].end() :].strip())
    return None


def reason_of_death(error: Exception) -> str:
    """One sentence on how an actor's process ended, from Ray's page about it."""
    text = plain_text(error)
    pid = re.search(r"^\s*pid: (\d+)", text, re.MULTILINE)
    number = f"It had process id {pid.group(1)}. " if pid else ""
    if "OUT_OF_MEMORY" in text or "memory monitor" in text:
        return number + (
            "Ray ended it because memory ran out: use smaller batches, fewer processes, or a larger "
            "machine."
        )
    if "SYSTEM_ERROR" in text:
        return number + (
            "It crashed or was killed from outside; if the kernel killed it for lack of memory, "
            "dmesg has a line about it."
        )
    return number + " ".join(text.split())[:300]
