"""A scripted double of a *remote* engine: an aiohttp server on loopback that speaks SGLang's API
and can misbehave on demand.

    with FakeEngine(lambda request: [5, 6, 7]) as engine:
        engine.faults.append(Fault(status=500))      # the next request only
        ... send requests to engine.url ...
    engine.requests                                  # every body that arrived, in order

`answer(request)` gives the response ids of one prompt; token number k of an answer has log-prob -(k
+ 1) / 8, exact in float32. An answer may also be a dict, which replaces the whole JSON reply of
that prompt.
"""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Callable
from typing import Any, cast

from aiohttp import web

from slime.files.wire_arrays import (
    LOG_PROB_DTYPE,
    LOG_PROBS_KEY,
    TOKEN_DTYPE,
    TOKEN_IDS_KEY,
    encode_array,
)


@dataclasses.dataclass
class Fault:
    """What goes wrong with one HTTP request: a status, a closed connection, or no answer for `hang`
    seconds.
    """

    status: int | None = None
    close: bool = False
    hang: float = 0.0


@dataclasses.dataclass
class Prompt:
    """One prompt of a request as the script sees it."""

    input_ids: list[int]
    sampling_params: dict[str, Any]
    rid: str | None
    number: int  # how many prompts arrived before it


def log_prob_of(position: int) -> float:
    return -(position + 1) / 8


class FakeEngine:
    """Runs in a thread of its own. `delay(prompt)` is the time of one prompt in seconds; an abort
    ends it early, with `partial(prompt)` of its tokens (default: none).
    """

    def __init__(
        self,
        answer: Callable[[Prompt], list[int] | dict] = lambda prompt: [5, 6, 7],
        *,
        delay: Callable[[Prompt], float] = lambda prompt: 0.0,
        partial: Callable[[Prompt], int] = lambda prompt: 0,
        decode: Callable[[list[int]], str] = lambda ids: " ".join(map(str, ids)),
        weight_version: str = "1",
    ) -> None:
        self.answer, self.delay, self.partial, self.decode = answer, delay, partial, decode
        self.weight_version = weight_version
        self.faults: list[Fault] = []
        self.requests: list[dict] = []
        self.headers: list[dict] = []
        self.num_prompts = 0
        self.num_aborts = 0
        self.running = 0
        self.most_running = 0

    def __enter__(self) -> FakeEngine:
        started = threading.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve(started)), daemon=True
        )
        self._thread.start()
        assert started.wait(10), "the fake engine did not start"
        return self

    def __exit__(self, *exc: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    async def _serve(self, started: threading.Event) -> None:
        self._loop, self._stop, self._abort = (
            asyncio.get_running_loop(),
            asyncio.Event(),
            asyncio.Event(),
        )
        app = web.Application(client_max_size=2**28)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/abort_request", self._abort_request)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        started.set()
        await self._stop.wait()
        await runner.cleanup()

    async def _abort_request(self, request: web.Request) -> web.Response:
        self.num_aborts += 1
        self._abort.set()
        self._abort = asyncio.Event()
        return web.json_response({})

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body)
        self.headers.append(dict(request.headers))
        if self.faults:
            fault = self.faults.pop(0)
            await asyncio.sleep(fault.hang)
            if fault.close:
                cast(asyncio.Transport, request.transport).close()
            if fault.status is not None or fault.close:
                return web.json_response({"error": "scripted"}, status=fault.status or 500)
        is_list = isinstance(body["input_ids"][0], list)
        ids = body["input_ids"] if is_list else [body["input_ids"]]
        params = body["sampling_params"] if is_list else [body["sampling_params"]]
        rids = body.get("rid") if is_list else [body.get("rid")]
        prompts = []
        for one, param, rid in zip(ids, params, rids or [None] * len(ids), strict=True):
            prompts.append(Prompt(one, param, rid, self.num_prompts))
            self.num_prompts += 1
        self.running += len(prompts)
        self.most_running = max(self.most_running, self.running)
        replies = await asyncio.gather(*(self._reply(prompt, body) for prompt in prompts))
        self.running -= len(prompts)
        return web.json_response(list(replies) if is_list else replies[0])

    async def _reply(self, prompt: Prompt, body: dict) -> dict:
        version = self.weight_version  # the version at the start labels the whole segment
        aborted = False
        seconds = self.delay(prompt)
        if seconds:
            try:
                await asyncio.wait_for(self._abort.wait(), seconds)
                aborted = True
            except asyncio.TimeoutError:
                aborted = False
        answer = self.answer(prompt)
        if isinstance(answer, dict):
            return answer
        limit = prompt.sampling_params["max_new_tokens"]
        tokens = answer[: self.partial(prompt)] if aborted else answer[:limit]
        kind = "abort" if aborted else "length" if len(answer) > limit else "stop"
        return make_reply(
            tokens, kind, text=self.decode(tokens), prompt=prompt, version=version, body=body
        )


def make_reply(
    tokens: list[int],
    kind: str = "stop",
    *,
    text: str = "",
    prompt: Prompt | None = None,
    version: str = "1",
    body: dict | None = None,
) -> dict:
    """A well-formed reply with the given ids."""
    log_probs = [log_prob_of(position) for position in range(len(tokens))]
    meta: dict[str, Any] = {
        "id": prompt.rid if prompt else "rid",
        "finish_reason": {"type": kind},
        "prompt_tokens": len(prompt.input_ids) if prompt else 0,
        "completion_tokens": len(tokens),
        "cached_tokens": 0,
        "weight_version": version,
    }
    if body and body.get("return_arrays"):
        meta[TOKEN_IDS_KEY] = encode_array(tokens, TOKEN_DTYPE)
        meta[LOG_PROBS_KEY] = encode_array(log_probs, LOG_PROB_DTYPE)
    else:
        meta["output_token_logprobs"] = [
            [lp, token, None] for lp, token in zip(log_probs, tokens, strict=True)
        ]
    return {"text": text, "output_ids": list(tokens), "meta_info": meta}
