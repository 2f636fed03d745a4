"""SGLang's HTTP API over the engine, in aiohttp. docs/engine.md lists every endpoint and field."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import secrets
import socket
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import orjson
from aiohttp import web

from slime.backends.torch_engine.build import LoadedEngine, load_engine
from slime.backends.torch_engine.engine_config import EngineConfig
from slime.backends.torch_engine.http_json import (
    answer_errors,
    connection_logger,
    error_response,
    json_response,
    read_json_body,
)
from slime.backends.torch_engine.kv_cache import PAGE_SIZE
from slime.backends.torch_engine.protocol import (
    MAX_BATCH,
    EngineLimits,
    GenerateCall,
    build_responses,
    parse_generate,
)
from slime.backends.torch_engine.request import Request
from slime.backends.torch_engine.request_guard import RequestGuard
from slime.backends.torch_engine.sampling_params import BadRequest, shown
from slime.backends.torch_engine.silent_connections import SilentConnections, noting
from slime.backends.torch_engine.streaming import ResponseStream
from slime.backends.torch_engine.weight_endpoints import add_weight_routes
from slime.backends.torch_engine.weight_update import WeightUpdater
from slime.exceptions import EngineError

KEEPALIVE_SECONDS = 120.0
# The rest of a body that nobody reads is awaited for so long, then the connection is closed.
LINGERING_SECONDS = 2.0
HEALTH_GENERATE_TIMEOUT = 20.0
SHUTDOWN_SECONDS = 5.0
BACKLOG = 4096
PAUSE_MODES = ("in_place", "abort")
# What a call may bring and get that is read and answered in the event loop itself.
SHORT_BYTES, FEW_RESPONSES, MANY_TOKENS = 16 * 1024, 8, 4096


@dataclasses.dataclass
class Waiter:
    """One HTTP call that waits for `remaining` requests."""

    remaining: int
    future: asyncio.Future

    def one_finished(self) -> None:
        """Counts down; the last one resolves the future."""
        self.remaining -= 1
        if self.remaining == 0 and not self.future.done():
            self.future.set_result(None)


class EngineServer:
    """One engine behind HTTP, in the event loop that `start` is called in.

    The constructor binds first and loads the model then, so that a port in use is reported before
    minutes of loading. ConfigError or EngineError says what does not work.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self._socket = _bind(config.host, config.port)
        self.host, self.port = config.host, self._socket.getsockname()[1]
        try:
            self.loaded: LoadedEngine = load_engine(config, notify=self._notify)
        except BaseException:
            self._socket.close()
            raise
        self.updater = WeightUpdater(self.loaded)
        self._guard = RequestGuard(config.host, config.api_key)
        self._runner: web.AppRunner | None = None
        self._loop: asyncio.AbstractEventLoop  # from `start` on
        self._silent: SilentConnections
        self._sweeper: asyncio.Task
        self._waiters: dict[Request, Waiter] = {}
        self._stream_events: dict[Request, asyncio.Event] = {}
        self._seeds = np.random.default_rng(config.random_seed)
        self._started_at = time.time()
        decoder = self.loaded.decoder.config
        self._limits = EngineLimits(
            decoder.vocab_size,
            self.loaded.context_length,
            self.loaded.engine.longest_response,
            max_responses=min(config.max_waiting_requests, MAX_BATCH),
        )

    @property
    def url(self) -> str:
        """Base URL of the server."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    @property
    def served_name(self) -> str:
        """Name of the model that the server reports."""
        return self.config.served_model_name or str(self.config.hf_checkpoint)

    async def start(self) -> None:
        """Starts to answer."""
        self._loop = asyncio.get_running_loop()
        self._runner = web.AppRunner(
            self._application(),
            access_log=None,
            logger=connection_logger,
            handler_cancellation=True,
            keepalive_timeout=KEEPALIVE_SECONDS,
            lingering_time=LINGERING_SECONDS,
        )
        await self._runner.setup()
        assert self._runner.server is not None, "a runner has its server after setup"
        self._silent = SilentConnections(self._runner.server)
        self._sweeper = asyncio.create_task(self._silent.sweep_for_ever())
        await web.SockSite(self._runner, self._socket, shutdown_timeout=SHUTDOWN_SECONDS).start()
        self.loaded.engine.start()

    async def stop(self) -> None:
        """Aborts what runs, answers it, and closes the socket."""
        await asyncio.to_thread(self.loaded.engine.stop)
        if self._runner is not None:
            self._sweeper.cancel()
            await self._runner.cleanup()
        self._socket.close()

    def _application(self) -> web.Application:
        app = web.Application(
            middlewares=[self._guard.middleware, answer_errors],
            client_max_size=self.config.max_request_bytes,
        )
        app.router.add_post("/generate", self._generate)
        app.middlewares.insert(0, noting(lambda: self._silent))
        for path, handler in {
            "/health": self._health,
            "/health_generate": self._health_generate,
            "/get_model_info": self._model_info,
            "/model_info": self._model_info,
            "/get_server_info": self._server_info,
            "/server_info": self._server_info,
            "/get_load": self._load,
            "/v1/models": self._models,
        }.items():
            app.router.add_get(path, handler)
        for path, handler in {
            "/flush_cache": self._flush_cache,
            "/abort_request": self._abort,
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
        }.items():
            app.router.add_post(path, handler)
        app.router.add_get("/flush_cache", self._flush_cache)
        add_weight_routes(app, self.loaded, self.updater)
        return app

    # ---- generation ----

    def _notify(self, finished: list[Request], progressed: list[Request]) -> None:
        self._loop.call_soon_threadsafe(self._wake, finished, progressed)

    def _wake(self, finished: list[Request], progressed: list[Request]) -> None:
        for request in finished:
            waiter = self._waiters.pop(request, None)
            if waiter is not None:
                waiter.one_finished()
        if self._stream_events:
            for request in (*progressed, *finished):
                event = self._stream_events.get(request)
                if event is not None:
                    event.set()

    def _next_seed(self) -> int:
        return int(self._seeds.integers(0, 2**63))

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await read_json_body(request)
        is_short = request.content_length is not None and request.content_length <= SHORT_BYTES
        # A text takes seconds to encode, and so does a call for thousands of responses, while every
        # other client waits for the loop.
        if is_short and body.get("text") is None and _asks_for_few(body):
            call = self._parse(body)
        else:
            call = await asyncio.to_thread(self._parse, body)
        if call.options.stream:
            return await self._stream(request, call)
        await self._run(call.requests)
        failed = next((item.error for item in call.requests if item.error), None)
        if failed:
            return error_response(500, failed)
        num_tokens = sum(len(item.output_ids) for item in call.requests)
        if len(call.requests) + num_tokens <= MANY_TOKENS:
            return self._answer(call)
        return await asyncio.to_thread(self._answer, call)

    def _answer(self, call: GenerateCall) -> web.Response:
        responses = build_responses(call.requests, call.options, tokenizer=self.loaded.tokenizer)
        return json_response(responses if call.is_list else responses[0])

    def _parse(self, body: dict[str, Any]) -> GenerateCall:
        return parse_generate(
            body, self._limits, tokenizer=self.loaded.tokenizer, next_seed=self._next_seed
        )

    async def _run(self, requests: list[Request]) -> None:
        """Waits until all `requests` have finished. If the client goes away, they are aborted."""
        waiter = Waiter(len(requests), self._loop.create_future())
        self._submit(requests, waiter)
        try:
            await waiter.future
        except asyncio.CancelledError:
            self._drop(requests)
            raise

    def _submit(self, requests: list[Request], waiter: Waiter | None = None) -> None:
        if waiter is not None:
            self._waiters.update(dict.fromkeys(requests, waiter))
        try:
            self.loaded.engine.submit(requests)
        except EngineError as error:
            for item in requests:
                self._waiters.pop(item, None)
            raise web.HTTPServiceUnavailable(text=str(error)) from None

    def _drop(self, requests: list[Request]) -> None:
        for item in requests:
            self._waiters.pop(item, None)
            self._stream_events.pop(item, None)
        self.loaded.engine.abort_requests(requests)

    async def _stream(self, request: web.Request, call: GenerateCall) -> web.StreamResponse:
        item = call.requests[0]
        stream = ResponseStream(item, call.options, self.loaded.tokenizer)
        event = self._stream_events[item] = asyncio.Event()
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        )
        try:
            self._submit([item])
            await response.prepare(request)
            while item.finish_reason is None:
                await event.wait()
                event.clear()
                if item.finish_reason is None and stream.is_due():
                    await response.write(_event(stream.event(now=time.monotonic())))
            if item.error:
                await response.write(
                    _event(
                        {
                            "error": {
                                "message": item.error,
                                "type": "InternalServerError",
                                "code": 500,
                            }
                        }
                    )
                )
            else:
                await response.write(
                    _event(
                        build_responses([item], call.options, tokenizer=self.loaded.tokenizer)[0]
                    )
                )
            await response.write(b"data: [DONE]\n\n")
            await response.write_eof()
        except (asyncio.CancelledError, ConnectionError):
            self._drop([item])
            raise
        finally:
            self._stream_events.pop(item, None)
        return response

    # ---- control ----

    async def _abort(self, request: web.Request) -> web.Response:
        body = await read_json_body(request)
        rid, everything = body.get("rid"), body.get("abort_all", False)
        if not isinstance(everything, bool):
            raise BadRequest(f"abort_all is {shown(everything)}, expected true or false.")
        is_named = isinstance(rid, str) and rid
        if not is_named and not (everything and rid in (None, "")):
            raise BadRequest(
                f"rid is {shown(rid)}, expected the rid of a request, or abort_all true."
            )
        self.loaded.engine.abort(rid, all_requests=everything)
        return json_response({"success": True})

    async def _pause(self, request: web.Request) -> web.Response:
        body = await read_json_body(request)
        mode = body.get("mode", "in_place")
        if mode not in PAUSE_MODES:
            raise BadRequest(f"mode is {shown(mode)}, expected one of {', '.join(PAUSE_MODES)}.")
        if mode == "abort":
            self.loaded.engine.abort(all_requests=True)
        self.loaded.engine.pause()
        # Answer when no step is under way any more.
        await self._between_steps(lambda: None)
        return json_response({"success": True, "mode": mode})

    async def _continue(self, request: web.Request) -> web.Response:
        self.loaded.engine.resume()
        return json_response({"success": True})

    async def _flush_cache(self, request: web.Request) -> web.Response:
        count = await self._between_steps(self.loaded.engine.flush_cache)
        return json_response({"success": True, "flushed_prompts": count})

    async def _between_steps(self, function: Callable[[], Any]) -> Any:
        try:
            return await asyncio.wrap_future(self.loaded.engine.between_steps(function))
        except EngineError as error:
            raise web.HTTPServiceUnavailable(text=str(error)) from None

    # ---- information ----

    async def _health(self, request: web.Request) -> web.Response:
        failure = self.loaded.engine.failure
        if failure is None:
            return web.Response()
        # open to everybody: what failed is for those with the key
        why = f": {failure}" if self._guard.has_key(request) else "."
        return error_response(503, f"the engine has failed{why}")

    async def _health_generate(self, request: web.Request) -> web.Response:
        if self.loaded.engine.is_paused:
            return error_response(
                503, "generation is paused; /health answers for the process alone."
            )
        body = {
            "input_ids": [0],
            "sampling_params": {"max_new_tokens": 1, "temperature": 0},
            "rid": f"HEALTH_{secrets.token_hex(8)}",
        }
        call = parse_generate(body, self._limits, tokenizer=None, next_seed=lambda: 0)
        try:
            await asyncio.wait_for(self._run(call.requests), HEALTH_GENERATE_TIMEOUT)
        except asyncio.TimeoutError:
            return error_response(503, f"no token came within {HEALTH_GENERATE_TIMEOUT:.0f} s.")
        error = call.requests[0].error
        return web.Response() if error is None else error_response(503, error)

    async def _model_info(self, request: web.Request) -> web.Response:
        decoder = self.loaded.decoder.config
        return json_response(
            {
                "model_path": str(self.config.hf_checkpoint),
                "served_model_name": self.served_name,
                "tokenizer_path": str(self.config.hf_checkpoint),
                "is_generation": True,
                "model_type": decoder.model_type,
                "vocab_size": decoder.vocab_size,
                "max_context_length": self.loaded.context_length,
                "eos_token_ids": list(self.loaded.eos_token_ids),
                "weight_version": self.loaded.engine.weight_version,
            }
        )

    async def _server_info(self, request: web.Request) -> web.Response:
        engine, config = self.loaded.engine, self.config
        return json_response(
            {
                "version": "slime-torch-engine",
                "model_path": str(config.hf_checkpoint),
                "served_model_name": self.served_name,
                "host": self.host,
                "port": self.port,
                "pid": os.getpid(),
                "device": str(self.loaded.decoder.device),
                "dtype": self.loaded.dtype_name,
                "tp_size": 1,
                "dp_size": 1,
                "status": "ready" if engine.failure is None else "failed",
                "uptime_seconds": time.time() - self._started_at,
                "context_length": self.loaded.context_length,
                "max_running_requests": self.loaded.max_running,
                "max_total_num_tokens": engine.total_pages * PAGE_SIZE,
                "enable_deterministic_inference": config.deterministic,
                "random_seed": config.random_seed,
                "weight_version": engine.weight_version,
                "is_paused": engine.is_paused,
                "total_generated_tokens": engine.total_generated,
                "total_steps": engine.total_steps,
                "internal_states": [{"load": engine.load()}],
            }
        )

    async def _load(self, request: web.Request) -> web.Response:
        load = self.loaded.engine.load()
        return json_response(
            [
                {
                    "dp_rank": 0,
                    "num_reqs": load["running"] + load["waiting"],
                    "num_waiting_reqs": load["waiting"],
                    "num_tokens": load["tokens"],
                }
            ]
        )

    async def _models(self, request: web.Request) -> web.Response:
        card = {
            "id": self.served_name,
            "object": "model",
            "created": int(self._started_at),
            "owned_by": "slime",
            "max_model_len": self.loaded.context_length,
        }
        return json_response({"object": "list", "data": [card]})


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host.strip("[]"), port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise EngineError(
            f"the engine cannot listen on {host} port {port}: {error.strerror or error}. If "
            "another process uses the port, choose"
            " another one, or 0 for any free one."
        ) from None


def _asks_for_few(body: dict[str, Any]) -> bool:
    """Whether the prompts of a short body get few responses each."""
    params = body.get("sampling_params")
    n = params.get("n") if isinstance(params, dict) else None
    return not isinstance(params, list) and (
        n is None or (isinstance(n, int) and n <= FEW_RESPONSES)
    )


def _event(value: object) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"
