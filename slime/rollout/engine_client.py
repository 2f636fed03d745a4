"""The engines as the rollout side sees them: their addresses, one generation request, and the order
to abort.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import logging
import time
from typing import Any

from slime.exceptions import ConfigError, EngineError
from slime.utils import http_utils

RETRY_WARNING_INTERVAL_S = 5.0
logger = logging.getLogger(__name__)
_last_warning: dict[str, float] = {}  # by engine


@dataclasses.dataclass(frozen=True)
class Engines:
    """Base addresses ("http://127.0.0.1:15000") of equal engines, or of the one router
    before them.
    """

    urls: tuple[str, ...]
    is_router: bool = False


_engines: Engines | None = None


def set_engines(urls: list[str] | tuple[str, ...], *, is_router: bool = False) -> None:
    """Sets the addresses to which this process sends requests. Called after the engines start."""
    global _engines
    _engines = Engines(tuple(url.rstrip("/") for url in urls), is_router)
    http_utils.send_key_to(_engines.urls)


def get_engines(args: argparse.Namespace) -> Engines:
    """The engines that were set, else the router of --sglang-router-ip, else
    --rollout-external-engine-addrs.
    """
    if _engines is not None and _engines.urls:
        return _engines
    if getattr(args, "sglang_router_ip", None):
        host = http_utils._wrap_ipv6(args.sglang_router_ip)
        return Engines((f"http://{host}:{args.sglang_router_port}",), is_router=True)
    if getattr(args, "rollout_external_engine_addrs", None):
        return Engines(
            tuple(with_scheme(address) for address in args.rollout_external_engine_addrs)
        )
    raise ConfigError(
        "there is no engine to send requests to: none was started, and neither --sglang-router-ip "
        "nor "
        "--rollout-external-engine-addrs is given."
    )


def with_scheme(address: str) -> str:
    """The address as a URL: "10.0.0.1:30000" becomes "http://10.0.0.1:30000"."""
    return (address if "://" in address else f"http://{address}").rstrip("/")


def choose_url(engines: Engines, key: int | None) -> str:
    """One engine's address; equal keys (a prompt's group) get the same one, so that its prefix
    cache serves them all.
    """
    return engines.urls[(key or 0) % len(engines.urls)]


async def request_generate(
    args: argparse.Namespace,
    payload: dict[str, Any],
    *,
    key: int | None = None,
    session_id: str | None = None,
) -> Any:
    """The engine's answer to one /generate body.

    Connection errors, timeouts and 5xx are tried again, each time on the next engine and under a
    new request id, since the lost one may still be running; 4xx never. EngineError after the last
    try.
    """
    engines = get_engines(args)
    retries = getattr(args, "rollout_request_retries", 5)
    headers = {"X-SMG-Routing-Key": session_id} if session_id and engines.is_router else None
    for attempt in range(retries + 1):
        url = choose_url(engines, (key or 0) + attempt)
        body = payload if attempt == 0 else {**payload, **_renamed(payload, attempt)}
        try:
            return await http_utils.request_once("POST", f"{url}/generate", body, headers=headers)
        except EngineError as error:
            if attempt == retries or not http_utils.is_worth_retrying(error):
                raise
            _log_retry(url, error, f"try {attempt + 2} of {retries + 1} follows")
            await asyncio.sleep(http_utils.pause_before_try(attempt + 1))
    raise AssertionError("the loop returns or raises")


def _log_retry(url: str, error: EngineError, what_follows: str) -> None:
    """One warning per engine and few seconds: a dead engine fails every request that runs on it,
    and each of their repetitions.
    """
    now = time.monotonic()
    is_news = now - _last_warning.get(url, -RETRY_WARNING_INTERVAL_S) >= RETRY_WARNING_INTERVAL_S
    if is_news:
        _last_warning[url] = now
    logger.log(logging.WARNING if is_news else logging.DEBUG, "%s; %s", error, what_follows)


def _renamed(payload: dict[str, Any], attempt: int) -> dict[str, Any]:
    rid = payload.get("rid")
    if rid is None:
        return {}
    return {
        "rid": [f"{one}-try{attempt}" for one in rid]
        if isinstance(rid, list)
        else f"{rid}-try{attempt}"
    }


async def abort_engines(args: argparse.Namespace) -> None:
    """Aborts the running requests of every engine; each request returns the tokens it has.
    Unreachable engines are logged.
    """
    engines = get_engines(args)
    urls = await _workers_behind(engines.urls[0]) if engines.is_router else engines.urls
    http_utils.send_key_to(urls)
    results = await asyncio.gather(
        *(
            http_utils.post(f"{url}/abort_request", {"abort_all": True}, max_retries=2)
            for url in urls
        ),
        return_exceptions=True,
    )
    for url, result in zip(urls, results, strict=True):
        if isinstance(result, BaseException):
            logger.warning("the abort request to engine %s failed: %s", url, result)


async def _workers_behind(router: str) -> list[str]:
    """Addresses of a router's engines: newer routers list them at /workers, older ones at
    /list_workers.
    """
    try:
        return [worker["url"] for worker in (await http_utils.get(f"{router}/workers"))["workers"]]
    except http_utils.HttpStatusError as error:
        if error.status != 404:
            raise
        return (await http_utils.get(f"{router}/list_workers"))["urls"]
