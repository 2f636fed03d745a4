"""HTTP client of the rollout side, and the helpers around ports and routers.

One aiohttp session per event loop, with keep-alive. What is tried again: connection errors,
timeouts and 5xx replies, with growing pauses and a cap. What never is: a 4xx reply, because the
same request would be refused again.
"""

from __future__ import annotations

import argparse
import asyncio
import atexit
import concurrent.futures
import contextlib
import dataclasses
import ipaddress
import logging
import multiprocessing.process
import os
import socket
import urllib.parse
import weakref
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import aiohttp
import orjson

from slime.exceptions import ConfigError, EngineError
from slime.files import exact_json
from slime.utils.misc import is_port_free

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 10.0
# Below the 5 s after which common servers close idle connections, so that no request meets a
# closing one.
KEEP_ALIVE_S = 3.0


class HttpStatusError(EngineError):
    """A reply other than 2xx. `status` is its code, `body` the beginning of its text."""

    def __init__(self, message: str, status: int = 0, body: str = "") -> None:
        super().__init__(message, status, body)
        self.status = status
        self.body = body

    def __str__(self) -> str:
        return self.args[0]


@dataclasses.dataclass(frozen=True)
class HttpSettings:
    """How requests are sent: connections at a time, seconds for one try, the key that engines ask
    for.
    """

    max_connections: int = 512
    timeout_s: float | None = 1800.0
    api_key: str | None = dataclasses.field(default=None, repr=False)


_settings = HttpSettings()
# called with the URL, the request's body, the reply's and its status; None: nobody listens
ReplyObserver = Callable[[str, "bytes | None", bytes, int], None]
_observer: ReplyObserver | None = None
# scheme://host:port of the servers that get the key: no reward model or other server does
_engine_origins: set[str] = set()
_sessions: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, aiohttp.ClientSession] = (
    weakref.WeakKeyDictionary()
)


def configure_http(settings: HttpSettings) -> None:
    """Sets how sessions opened from now on behave."""
    global _settings
    _settings = settings


def send_key_to(urls: Iterable[str]) -> None:
    """From now on requests of this process to these servers have the engines' key."""
    _engine_origins.update(_origin_of(url) for url in urls)


def _key_for(url: str) -> dict[str, str]:
    if not _settings.api_key or _origin_of(url) not in _engine_origins:
        return {}
    return {"Authorization": f"Bearer {_settings.api_key}"}


def _origin_of(url: str) -> str:
    parts = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
    return f"{parts.scheme}://{parts.netloc}".lower()


def observe_replies(observer: ReplyObserver | None) -> None:
    """Sets what is handed every reply to a POST of this process, as bytes; None ends it."""
    global _observer
    _observer = observer


def _observed(method: str, url: str, body: bytes | None, content: bytes, status: int) -> None:
    if _observer is not None and method == "POST":
        _observer(url, body, content, status)


def init_http_client(args: argparse.Namespace) -> None:
    """Sizes the client after the engines: `sglang_server_concurrency` requests for each of them.
    The key goes to the servers that the options name, and to those of `send_key_to`.
    """
    send_key_to(getattr(args, "rollout_external_engine_addrs", None) or ())
    if getattr(args, "sglang_router_ip", None):
        send_key_to([f"{_wrap_ipv6(args.sglang_router_ip)}:{args.sglang_router_port}"])
    engines = get_rollout_num_engines(args)
    if engines:
        configure_http(
            HttpSettings(
                max_connections=args.sglang_server_concurrency * engines,
                timeout_s=getattr(args, "rollout_request_timeout", HttpSettings.timeout_s),
                api_key=getattr(args, "sglang_api_key", None) or None,
            )
        )


def get_rollout_num_engines(args: argparse.Namespace) -> int:
    """Number of engines: `rollout_num_engines`, else GPUs over GPUs per engine; 0 without GPUs."""
    engines = getattr(args, "rollout_num_engines", None)
    if engines is not None:
        return engines
    gpus = getattr(args, "rollout_num_gpus", None)
    return gpus // args.rollout_num_gpus_per_engine if gpus else 0


def _session() -> aiohttp.ClientSession:
    loop = asyncio.get_running_loop()
    session = _sessions.get(loop)
    if session is None or session.closed:
        connector = aiohttp.TCPConnector(
            limit=_settings.max_connections, keepalive_timeout=KEEP_ALIVE_S
        )
        session = aiohttp.ClientSession(connector=connector, trust_env=False)
        if not _sessions:
            atexit.register(_close_at_exit)
        _sessions[loop] = session
    return session


def _close_at_exit() -> None:
    """Closes the sessions of loops that still run, so that no connection is reported as lost."""
    for loop, session in list(_sessions.items()):
        if loop.is_running() and not session.closed:
            with contextlib.suppress(
                asyncio.TimeoutError, concurrent.futures.TimeoutError, RuntimeError
            ):
                asyncio.run_coroutine_threadsafe(session.close(), loop).result(timeout=1.0)


async def close_session() -> None:
    """Closes the running loop's session; a later request opens a new one."""
    session = _sessions.pop(asyncio.get_running_loop(), None)
    if session is not None:
        await session.close()


async def request_once(
    method: str,
    url: str,
    payload: object = None,
    *,
    headers: dict | None = None,
    timeout_s: float | None = None,
) -> Any:
    """One try: the reply's JSON, or its text where it is not JSON, or None where it is empty.

    Raises HttpStatusError for any status but 2xx, EngineError when the engine cannot be reached,
    closes the connection or does not answer in time.
    """
    body = None if payload is None else exact_json.dumps(payload, option=orjson.OPT_SERIALIZE_NUMPY)
    send = {**_key_for(url), **(headers or {})}
    if body is not None:
        send = {"Content-Type": "application/json", **send}
    limit = aiohttp.ClientTimeout(total=_settings.timeout_s if timeout_s is None else timeout_s)
    try:
        async with _session().request(method, url, data=body, headers=send, timeout=limit) as reply:
            content = await reply.read()
            _observed(method, url, body, content, reply.status)
            if not 200 <= reply.status < 300:
                text = content[:500].decode("utf-8", errors="replace")
                raise HttpStatusError(
                    f"{method} {url} was answered with {reply.status}: {text}", reply.status, text
                )
    except asyncio.TimeoutError as error:
        raise EngineError(f"{method} {url} got no answer within {limit.total} s") from error
    except (aiohttp.ClientError, OSError) as error:
        raise EngineError(f"{method} {url} failed: {type(error).__name__}: {error}") from error
    try:
        return exact_json.loads(content) if content else None
    except orjson.JSONDecodeError:
        return content.decode("utf-8", errors="replace")


async def stream_lines(
    method: str, url: str, payload: object = None, *, timeout_s: float | None = None
) -> AsyncIterator[bytes]:
    """The reply's lines as they arrive, without their ends. Errors as in `request_once`, also in
    the middle.
    """
    limit = aiohttp.ClientTimeout(total=_settings.timeout_s if timeout_s is None else timeout_s)
    body = None if payload is None else exact_json.dumps(payload, option=orjson.OPT_SERIALIZE_NUMPY)
    send = {"Content-Type": "application/json", **_key_for(url)}
    try:
        async with _session().request(method, url, data=body, headers=send, timeout=limit) as reply:
            if not 200 <= reply.status < 300:
                text = (await reply.read())[:500].decode("utf-8", errors="replace")
                raise HttpStatusError(
                    f"{method} {url} was answered with {reply.status}: {text}", reply.status, text
                )
            pending, seen = b"", []
            async for chunk in reply.content.iter_any():
                if _observer is not None:
                    seen.append(chunk)
                *lines, pending = (pending + chunk).split(b"\n")
                for line in lines:
                    yield line.rstrip(b"\r")
            _observed(method, url, body, b"".join(seen), reply.status)
            if pending:
                yield pending
    except asyncio.TimeoutError as error:
        raise EngineError(f"{method} {url} did not end within {limit.total} s") from error
    except (aiohttp.ClientError, OSError) as error:
        raise EngineError(f"{method} {url} failed: {type(error).__name__}: {error}") from error


def is_worth_retrying(error: EngineError) -> bool:
    """False for a 4xx reply: the same request would be refused again."""
    return not (isinstance(error, HttpStatusError) and 400 <= error.status < 500)


def pause_before_try(attempt: int) -> float:
    """Seconds before try number `attempt` (1 = the first repetition): doubling, with a cap."""
    return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (attempt - 1))


async def request_with_retries(
    method: str,
    url: str,
    payload: object = None,
    *,
    max_retries: int,
    headers: dict | None = None,
    timeout_s: float | None = None,
) -> Any:
    """`request_once`, tried again at most `max_retries` times where that can help; then the last
    error.
    """
    for attempt in range(max_retries + 1):
        try:
            return await request_once(method, url, payload, headers=headers, timeout_s=timeout_s)
        except EngineError as error:
            if attempt == max_retries or not is_worth_retrying(error):
                raise
            logger.warning("%s; try %d of %d follows", error, attempt + 2, max_retries + 1)
            await asyncio.sleep(pause_before_try(attempt + 1))
    raise AssertionError("the loop returns or raises")


async def post(
    url: str, payload: object, max_retries: int = 60, headers: dict | None = None
) -> Any:
    """The reply to a POST, parsed where it is JSON. EngineError after the last try; 4xx is never
    tried again.
    """
    return await request_with_retries(
        "POST", url, payload, max_retries=max_retries, headers=headers
    )


async def get(url: str, max_retries: int = 3) -> Any:
    """The reply to a GET, parsed as JSON where it is JSON."""
    return await request_with_retries("GET", url, max_retries=max_retries)


def is_port_available(port: int) -> bool:
    """Whether nothing listens on `port` on this machine."""
    return is_port_free(port)


def find_available_port(base_port: int) -> int:
    """The first free port from `base_port` on. OSError if there is none."""
    for port in range(base_port, 65536):
        if is_port_free(port):
            return port
    raise OSError(f"no free port from {base_port} on")


def get_host_info() -> tuple[str, str]:
    """(host name, address by which other machines reach it; loopback when there is no network)."""
    name = socket.gethostname()
    chosen = os.environ.get("SLIME_HOST_IP")
    if chosen:
        return name, chosen
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # TEST-NET-1: chooses a route, sends nothing
            return name, probe.getsockname()[0]
        except OSError:
            return name, "127.0.0.1"


def _wrap_ipv6(host: str) -> str:
    """The host as it stands in a URL: IPv6 addresses in brackets."""
    try:
        return (
            f"[{host}]"
            if ipaddress.ip_address(host.strip("[]")).version == 6 and not host.startswith("[")
            else host
        )
    except ValueError:
        return host


def run_router(args: argparse.Namespace) -> None:
    """Runs the real sglang-router in this process until it ends. ConfigError when it is not
    installed.
    """
    try:
        from sglang_router.launch_router import launch_router
    except ImportError as error:
        raise ConfigError(
            "the router needs the package sglang-router: pip install 'slime-rl[router]'"
        ) from error
    launch_router(args)


def terminate_process(process: multiprocessing.process.BaseProcess, timeout: float = 1.0) -> None:
    """Ends a multiprocessing.Process: asks first, kills after `timeout` seconds."""
    if not process.is_alive():
        return
    process.terminate()
    process.join(timeout=timeout)
    if process.is_alive():
        process.kill()
        process.join()
