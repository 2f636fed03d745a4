"""The embedded engine as a Ray actor: a plain class, which `slime.ray.rollout_servers` starts as an
actor.

Clients generate over HTTP (`start()["url"]`); weights come through actor calls, whose numpy arrays
Ray passes through shared memory.
"""

from __future__ import annotations

import concurrent.futures
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np

from slime.backends.torch_engine.engine_config import EngineConfig, engine_config_from
from slime.exceptions import EngineError
from slime.supervision.heart import start_heart
from slime.supervision.records import this_node
from slime.tracking.spans import open_writer, span, spanned, stop_tracing

# One step of the engine takes seconds at most.
STEP_TIMEOUT_S = 600.0
T = TypeVar("T")


class EngineActor:
    """One engine in this process. `options` is an EngineConfig or a dict of its fields; `rank` is
    the engine's index, for messages; its spans are written to `trace_folder` (None: not at all).
    """

    def __init__(
        self,
        options: EngineConfig | Mapping[str, Any],
        rank: int,
        trace_folder: str | None = None,
    ) -> None:
        self._config = engine_config_from(options)
        self._rank = rank
        start_heart(f"engine {rank}")
        self._trace_folder = trace_folder
        self._thread: Any = None
        self._is_over = threading.Event()

    def start(self, timeout: float = 600.0) -> dict[str, Any]:
        """Loads the model, serves it and returns {"url", "pid", "host", "port"}. ConfigError or
        EngineError says why it cannot.
        """
        # torch is imported here, not when the class is pickled to its worker.
        if self._thread is not None:
            raise EngineError(f"engine {self._rank} runs already at {self._server.url}.")
        from slime.backends.torch_engine.server_thread import EngineServerThread

        if self._trace_folder is not None:
            process = f"engine-{self._rank}"
            open_writer(self._trace_folder, process, role="engine", rank=self._rank)
        thread = EngineServerThread(self._config)
        with span("load_engine"):
            server = thread.start(timeout=timeout)
        self._thread = thread
        return {"url": server.url, "pid": os.getpid(), "host": server.host, "port": server.port}

    def process(self) -> tuple[int, str]:
        """The process id, and where it counts."""
        return os.getpid(), this_node()

    def health(self, timeout: float = 10.0) -> bool:
        """True while the engine can generate. EngineError with the stack if its thread has failed,
        or if its server is stuck for `timeout` seconds.
        """
        engine = self._server.loaded.engine
        if engine.failure is not None:
            raise EngineError(f"engine {self._rank} has failed: {engine.failure_stack}")
        if not self._thread.answers(timeout):
            raise EngineError(f"the server of engine {self._rank} is stuck for {timeout:g} s")
        return True

    def until_shutdown(self) -> None:
        """Returns after `shutdown`: who waits for it hears of the process's death at once."""
        self._is_over.wait()

    @spanned("pause")
    def pause(self) -> None:
        """Freezes generation: when this returns no step is under way, and running requests keep
        their place.
        """
        engine = self._server.loaded.engine
        engine.pause()
        self._between_steps(lambda engine: None, "pause")

    def resume(self) -> None:
        """Goes on after `pause`."""
        self._server.loaded.engine.resume()

    def abort_all(self) -> None:
        """Ends all requests with what they have so far."""
        self._server.loaded.engine.abort(all_requests=True)

    def flush_cache(self) -> int:
        """Forgets cached prompts and returns how many there were."""
        return self._between_steps(lambda engine: engine.flush_cache(), "forget its cache")

    @spanned("release_memory")
    def release_memory(self) -> bool:
        """Gives the KV cache's memory back until `resume_memory`; False, and the engine goes on,
        while requests run.
        """
        return self._between_steps(lambda engine: engine.release_memory(), "free its memory")

    @spanned("resume_memory")
    def resume_memory(self) -> None:
        """Makes generation possible again after `release_memory`."""
        self._between_steps(lambda engine: engine.resume_memory(), "take its memory")

    def begin_weight_update(self, version: str | int) -> None:
        """Opens an update. An unfinished one is dropped."""
        self._server.updater.begin(str(version))

    @spanned("receive_weights")
    def update_weights(
        self, named: Mapping[str, np.ndarray], *, checksum: str | None = None
    ) -> None:
        """Takes one bucket by Hugging Face name; bfloat16 travels as uint16 arrays. EngineError,
        with nothing taken, if one does not fit.
        """
        self._server.updater.add(named, checksum=checksum)

    @spanned("apply_weights")
    def end_weight_update(self, version: str | int, checksum: str | None = None) -> str:
        """Applies the update between two steps and returns the checksum of what came
        (slime/files/checksum.py).

        EngineError, and the old weights stay, if a weight is missing or the checksum differs from
        `checksum`.
        """
        return self._server.updater.end(str(version), checksum=checksum)

    def update_weights_from_disk(self, folder: str, version: str | int) -> str:
        """Loads all weights of a Hugging Face folder and returns their checksum. EngineError, and
        the old weights stay, if they do not fit.
        """
        return self._server.updater.update_from_disk(folder, str(version))

    def weights_checksum(self) -> str:
        """Returns the checksum of the weights in use."""
        return self._server.updater.checksum()

    def weight_version(self) -> str:
        """Returns the label of the weights in use."""
        return self._server.loaded.engine.weight_version

    def shutdown(self) -> None:
        """Answers what runs (as aborted), closes the socket and ends the threads. Harmless when
        called twice.
        """
        self._is_over.set()
        if self._thread is not None:
            self._thread.stop()
            self._thread = None
        stop_tracing()

    def _between_steps(self, action: Callable[[Any], T], what: str) -> T:
        """What `action` returns in the engine's thread. EngineError where it does not get there."""
        engine = self._server.loaded.engine
        try:
            return engine.between_steps(lambda: action(engine)).result(STEP_TIMEOUT_S)
        except concurrent.futures.TimeoutError:
            raise EngineError(
                f"engine {self._rank} did not {what} within {STEP_TIMEOUT_S:.0f} s: its step does "
                "not end."
            ) from None

    @property
    def _server(self) -> Any:
        if self._thread is None:
            raise EngineError(f"engine {self._rank} is not started: call start() first.")
        return self._thread.server
