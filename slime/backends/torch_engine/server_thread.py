"""An engine server in a thread of this process: for Ray actors and tests."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading

from slime.backends.torch_engine.engine_config import EngineConfig
from slime.backends.torch_engine.process_tuning import tune_process
from slime.backends.torch_engine.server import EngineServer
from slime.exceptions import EngineError

STOP_TIMEOUT_SECONDS = 90.0


class EngineServerThread:
    """`start` loads the model, binds and returns; `stop` answers what runs and closes. Context
    manager.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._thread = threading.Thread(target=self._run, name="slime-engine-http", daemon=True)
        self._ready: concurrent.futures.Future[EngineServer] = concurrent.futures.Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop_event: asyncio.Event  # as long as there is a loop

    @property
    def server(self) -> EngineServer:
        """The running server. EngineError if it was not started."""
        if not self._ready.done():
            raise EngineError("the engine server was not started.")
        return self._ready.result()

    def start(self, timeout: float = 600.0) -> EngineServer:
        """Returns the server once it listens. ConfigError or EngineError says why it cannot;
        EngineError after `timeout` seconds.
        """
        tune_process()
        self._thread.start()
        try:
            return self._ready.result(timeout=timeout)
        except concurrent.futures.TimeoutError:
            raise EngineError(
                f"the engine did not listen within {timeout:.0f} s (model "
                f"{self._config.hf_checkpoint})."
            ) from None

    def answers(self, timeout: float) -> bool:
        """Whether the server's event loop takes up something new within `timeout` seconds."""
        if self._loop is None or self._loop.is_closed():
            return False
        taken = threading.Event()
        self._loop.call_soon_threadsafe(taken.set)
        return taken.wait(timeout)

    def stop(self) -> None:
        """Stops the server; nothing listens afterwards. Harmless when it does not run."""
        if self._loop is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop_event.set)
            self._thread.join(timeout=STOP_TIMEOUT_SECONDS)

    def __enter__(self) -> EngineServer:
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop_event = asyncio.Event()
        try:
            server = EngineServer(self._config)
            await server.start()
        except BaseException as error:  # noqa: BLE001 - `start` raises it in the caller's thread
            self._ready.set_exception(error)
            return
        self._ready.set_result(server)
        await self._stop_event.wait()
        await server.stop()
