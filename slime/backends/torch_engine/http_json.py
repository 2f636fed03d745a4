"""Reads and writes JSON in aiohttp handlers, and turns errors into JSON that states the cause."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import orjson
from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage

from slime.backends.torch_engine.sampling_params import BadRequest
from slime.exceptions import EngineError

logger = logging.getLogger(__name__)

# For a whole JSON body, and for each part of weights.
BODY_SECONDS = 60.0
# Nobody else is served while JSON is read, and 60 MB of empty lists take seconds and gigabytes. So
# marks are counted before, those in texts too, in bodies from COUNTED_BYTES on.
COUNTED_BYTES = 2**20
MOST_MARKS = {b"[": 500_000, b"{": 500_000, b":": 500_000, b",": 4_000_000}


class _HideFaultsOfClients(logging.Filter):
    """Drops the stacks that aiohttp logs for bytes that are not HTTP/1 (the router tries HTTP/2 on
    every worker, and aiohttp has answered with a 400 by then) and for clients that have gone: any
    number of them could fill a disk.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return not isinstance(error, BadHttpMessage | ConnectionError)


connection_logger = logging.getLogger(__name__ + ".connections")
connection_logger.addFilter(_HideFaultsOfClients())


@web.middleware
async def answer_errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
):
    """Every refusal is JSON that states the cause; an error of the server is a 500 without a
    stack.
    """
    try:
        return await handler(request)
    except (BadRequest, EngineError) as error:
        return error_response(400, str(error))
    except web.HTTPRequestEntityTooLarge as error:
        return error_response(
            413,
            (
                f"the body is larger than this server takes: {error.text}. Send fewer prompts per "
                "request."
            ),
        )
    except web.HTTPException as error:
        return error_response(error.status, error.text or error.reason)
    except web.RequestPayloadError as error:
        # its chunks or its coding are broken: whole headers, and no body that can be read
        return error_response(400, f"the body cannot be read: {' '.join(str(error).split())}")
    except ConnectionError:
        raise
    except Exception as error:  # noqa: BLE001 - a fault of one request must not end the server
        logger.exception("%s %s failed", request.method, request.path)
        # The message may hold paths of this machine, and the client may be anybody.
        return error_response(
            500, f"internal error: {type(error).__name__}. The engine's log has the stack."
        )


async def arriving(part: Coroutine[Any, Any, bytes]) -> bytes:
    """The body, or a part of it, that arrives within BODY_SECONDS; a 408 where it does not."""
    try:
        return await asyncio.wait_for(part, BODY_SECONDS)
    except asyncio.TimeoutError:
        raise web.HTTPRequestTimeout(
            text=f"the body did not arrive within {BODY_SECONDS:g} s."
        ) from None


async def read_json_body(request: web.Request) -> dict[str, Any]:
    """Returns the body's JSON object; an empty body is an empty object. BadRequest if it is
    something else.
    """
    raw = await arriving(request.read())
    if not raw:
        return {}
    _check_marks(raw)
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise BadRequest(f"the body is a JSON {type(body).__name__}, expected an object.")
    return body


def _check_marks(raw: bytes) -> None:
    if len(raw) < COUNTED_BYTES:
        return
    for mark, most in MOST_MARKS.items():
        if (count := raw.count(mark)) > most:
            raise BadRequest(
                f"the body has {count} of {mark.decode()!r}, and this server reads at most {most}. "
                "Send fewer prompts per request."
            )


def json_response(value: object, *, status: int = 200) -> web.Response:
    """Returns a JSON response."""
    return web.Response(body=orjson.dumps(value), status=status, content_type="application/json")


def error_response(status: int, message: str) -> web.Response:
    """Returns {"error": {"message", "type", "code"}} with `status`."""
    kind = "BadRequestError" if status < 500 else "InternalServerError"
    return json_response(
        {"error": {"message": message, "type": kind, "code": status}}, status=status
    )
