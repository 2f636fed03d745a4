"""Generation over server-sent events: what arrived before a lost connection or an abort is not
lost.

For `--custom-generate-function-path slime.rollout.sglang_streaming_rollout.generate_streaming`.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import orjson

from slime.data.sample import Sample
from slime.exceptions import EngineError
from slime.rollout.engine_client import ask_engine, choose_url, get_engines
from slime.rollout.request_spans import traced_request
from slime.rollout.sglang_rollout import GenerateState, prepare_request, store_reply
from slime.utils import http_utils

logger = logging.getLogger(__name__)


async def generate_streaming(
    args: argparse.Namespace, sample: Sample, sampling_params: dict[str, Any]
) -> Sample:
    """The sample with what one streamed generation made of it.

    Each event holds the whole response so far, so the last one is the result. When the stream
    breaks off after some tokens they are kept, and the sample is ABORTED: it is continued under
    partial rollout and generated again without. EngineError where nothing arrived. With
    --use-fault-tolerance a broken stream is asked for again from its beginning.
    """
    state = GenerateState(args)
    request = prepare_request(args, state, sample, sampling_params)
    if request is None:
        return sample
    body = {**request, "stream": True}
    with traced_request([sample]) as note:
        if get_engines(args).roster is None:
            url = choose_url(get_engines(args), sample.group_index)
            last = await _so_far(f"{url}/generate", body, sample)
        else:

            def call(url: str, attempt: int) -> Coroutine[Any, Any, dict[str, Any]]:
                return _to_the_end(f"{url}/generate", body)

            last = await ask_engine(args, call, key=sample.group_index)
        note([last])
    if last["meta_info"].get("finish_reason") is None:
        last = {**last, "meta_info": {**last["meta_info"], "finish_reason": {"type": "abort"}}}
    store_reply(args, state, sample, last, sampling_params)
    return sample


async def _to_the_end(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """The last event of a stream that is not broken off."""
    last = None
    async for event in _events(url, body):
        last = event
    if last is None:
        raise EngineError(f"{url} ended its stream without an event")
    return last


async def _so_far(url: str, body: dict[str, Any], sample: Sample) -> dict[str, Any]:
    """The last event that arrived."""
    last = None
    try:
        async for event in _events(url, body):
            last = event
    except EngineError as error:
        if last is None:
            raise
        logger.warning(
            "sample %s: the stream broke off, its tokens so far are kept: %s", sample.index, error
        )
    if last is None:
        raise EngineError(f"{url} ended its stream without an event")
    return last


async def _events(url: str, payload: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """The JSON of each "data: ..." line up to "data: [DONE]". EngineError for an error event or a
    broken stream.
    """
    async for line in http_utils.stream_lines("POST", url, payload):
        if not line.startswith(b"data:"):
            continue
        data = line.removeprefix(b"data:").strip()
        if data == b"[DONE]":
            return
        try:
            event = orjson.loads(data)
        except orjson.JSONDecodeError as error:
            raise EngineError(f"{url} sent an event that is not JSON: {data[:100]!r}") from error
        if "error" in event:
            raise EngineError(f"{url} sent an error: {event['error']}")
        yield event
    raise EngineError(f"{url} closed the stream before its end mark")
