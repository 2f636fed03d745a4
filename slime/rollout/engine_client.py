"""The engines as the rollout side sees them: their addresses, one generation request, and the order
to abort.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from slime.exceptions import ConfigError, EngineError
from slime.rollout.engine_roster import MAX_LOSSES, EngineRoster
from slime.utils import http_utils

T = TypeVar("T")

RETRY_WARNING_INTERVAL_S = 5.0
logger = logging.getLogger(__name__)
_last_warning: dict[str, float] = {}  # by engine


@dataclasses.dataclass(frozen=True)
class Engines:
    """Base addresses ("http://127.0.0.1:15000") of equal engines, or of the one router
    before them. roster: which of them take requests now, in a run that outlives a lost engine.
    """

    urls: tuple[str, ...]
    is_router: bool = False
    roster: EngineRoster | None = None


_engines: Engines | None = None


def set_engines(
    urls: list[str] | tuple[str, ...],
    *,
    is_router: bool = False,
    roster: EngineRoster | None = None,
) -> None:
    """Sets the addresses to which this process sends requests. Called after the engines start."""
    global _engines
    _engines = Engines(tuple(url.rstrip("/") for url in urls), is_router, roster)
    http_utils.send_key_to(_engines.urls)


def get_engines(args: argparse.Namespace) -> Engines:
    """The engines that were set, else the router of --sglang-router-ip, else
    --rollout-external-engine-addrs.
    """
    if _engines is not None and _engines.roster is not None:
        return dataclasses.replace(_engines, urls=_engines.roster.urls() or _engines.urls)
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
    try. With --use-fault-tolerance the same body is also sent again where its engine is lost, as
    `ask_engine` says.
    """
    is_router = get_engines(args).is_router
    headers = {"X-SMG-Routing-Key": session_id} if session_id and is_router else None

    def call(url: str, attempt: int) -> Coroutine[Any, Any, Any]:
        body = payload if attempt == 0 else {**payload, **_renamed(payload, attempt)}
        return http_utils.request_once("POST", f"{url}/generate", body, headers=headers)

    rid = payload.get("rid")
    return await ask_engine(
        args, call, key=key, num_samples=len(rid) if isinstance(rid, list) else 1
    )


async def ask_engine(
    args: argparse.Namespace,
    call: Callable[[str, int], Coroutine[Any, Any, T]],
    *,
    key: int | None = None,
    num_samples: int = 1,
) -> T:
    """What call(an engine's address, number of the attempt from 0) returns, for `num_samples`.

    An EngineError that may pass is tried again on the next engine, --rollout-request-retries times.
    In a run that outlives a lost engine, a call that failed with its engine is made again on
    another one, or on its successor, and is no such try; EngineError for one that has lost
    `MAX_LOSSES` engines, NoEngineLeft where none comes back.
    """
    roster = get_engines(args).roster
    retries = getattr(args, "rollout_request_retries", 5)
    attempt = tries = num_lost = 0
    while True:
        engines = get_engines(args)
        if roster is not None:
            engines = dataclasses.replace(engines, urls=await roster.wait_for_urls())
        url = choose_url(engines, (key or 0) + tries)
        try:
            if roster is None:
                return await call(url, attempt)
            losses_before = roster.num_losses(url)
            return await roster.watched(url, call(url, attempt))
        except EngineError as error:
            if not http_utils.is_worth_retrying(error):
                raise
            attempt += 1
            if roster is not None and await roster.has_lost(
                url, losses_before, num_samples=num_samples
            ):
                num_lost += 1
                if num_lost == MAX_LOSSES:
                    raise EngineError(
                        f"{num_lost} engines were lost while they worked on this request, the last "
                        f"with: {error}. It may be what ends them"
                    ) from error
                continue
            if tries == retries:
                raise
            tries += 1
            _log_retry(url, error, f"try {tries + 1} of {retries + 1} follows")
            await asyncio.sleep(http_utils.pause_before_try(tries))


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

    def abort(url: str) -> Coroutine[Any, Any, Any]:
        call = http_utils.post(f"{url}/abort_request", {"abort_all": True}, max_retries=2)
        return call if engines.roster is None else engines.roster.watched(url, call)

    results = await asyncio.gather(*(abort(url) for url in urls), return_exceptions=True)
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
