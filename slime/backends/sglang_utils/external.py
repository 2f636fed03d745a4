"""External engines, which slime did not start: asks each server for its sizes, from which the
number of engines and their layout follow.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import requests

from slime.config.derive import apply_derived
from slime.exceptions import ConfigError, EngineError
from slime.ray.servers import RolloutServers

# the second is the name in older SGLang releases
INFO_ROUTES = ("/server_info", "/get_server_info")
WORKER_TYPE_OF_MODE = {
    None: "regular",
    "": "regular",
    "null": "regular",
    "prefill": "prefill",
    "decode": "decode",
}


@dataclasses.dataclass(frozen=True)
class ExternalEngineInfo:
    """One server: its address, its role (`regular`, or `prefill` and `decode` of a disaggregated
    pair), and the devices that it uses.
    """

    url: str
    host: str
    port: int
    worker_type: str
    num_gpus: int
    disaggregation_bootstrap_port: int | None = None
    server_info: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def is_pd_worker(self) -> bool:
        """Whether the server does only the prefill or only the decode part of a request."""
        return self.worker_type != "regular"

    @property
    def parallel_config(self) -> dict[str, int]:
        """{"tp_size", "pp_size", "dp_size", "ep_size"}; a size that the server does
        not report is 1.
        """
        return {
            name: _size(self.server_info, name)
            for name in ("tp_size", "pp_size", "dp_size", "ep_size")
        }

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as plain values that JSON can hold;
        `ExternalEngineInfo(**info.to_dict())` is equal.
        """
        return dataclasses.asdict(self)


def _size(info: Mapping[str, Any], name: str) -> int:
    value = info.get(name)
    return 1 if value is None else int(value)


def normalize_external_engine_addr(addr: str) -> str:
    """Returns "http://host:port" for "host:port", "http://host:port/" and the like. ConfigError
    without a host or a port.
    """
    url = addr.strip().rstrip("/")
    url = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(url)
        complete = parts.scheme in ("http", "https") and parts.hostname and parts.port
    except ValueError:
        complete = False
    if not complete:
        raise ConfigError(
            f"--rollout-external-engine-addrs: {addr!r} is no address. Write host:port or "
            "http://host:port."
        )
    return url


def get_server_info(
    url: str, timeout: float = 30.0, *, api_key: str | None = None
) -> dict[str, Any]:
    """Returns what the server at `url` reports of itself. EngineError if it does not answer within
    `timeout` seconds, or not with a JSON object.
    """
    reason: Any = None
    headers: dict[str, Any] = (
        {} if api_key is None else {"headers": {"Authorization": f"Bearer {api_key}"}}
    )
    for route in INFO_ROUTES:
        try:
            reply = requests.get(f"{url}{route}", timeout=timeout, **headers)
            reply.raise_for_status()
            info = reply.json()
        except (requests.RequestException, ValueError) as error:
            reason = error
            if getattr(getattr(error, "response", None), "status_code", None) == 404:
                continue
            break
        if isinstance(info, dict):
            return info
        reason = f"it answered {type(info).__name__} where an object was expected"
        break
    raise EngineError(f"the engine at {url} reports no server info ({INFO_ROUTES[0]}): {reason}.")


def discover_external_engines(
    addrs: Sequence[str], timeout: float = 30.0, *, api_key: str | None = None
) -> list[ExternalEngineInfo]:
    """Returns what each server reports of itself, in order of `addrs`. ConfigError for an address
    that is none or given twice.
    """
    return _ask(external_engine_urls(addrs), timeout=timeout, api_key=api_key)


def external_engine_urls(addrs: Sequence[str]) -> list[str]:
    """Returns the servers' URLs, in order. ConfigError for an address that is none or
    given twice.
    """
    urls = [normalize_external_engine_addr(addr) for addr in addrs]
    repeated = sorted({url for url in urls if urls.count(url) > 1})
    if repeated:
        raise ConfigError(
            f"--rollout-external-engine-addrs names {', '.join(repeated)} more than once."
        )
    return urls


def _ask(
    urls: Sequence[str], *, timeout: float = 30.0, api_key: str | None
) -> list[ExternalEngineInfo]:
    return [_describe(url, get_server_info(url, timeout=timeout, api_key=api_key)) for url in urls]


def _describe(url: str, info: dict[str, Any]) -> ExternalEngineInfo:
    mode = info.get("disaggregation_mode")
    if mode not in WORKER_TYPE_OF_MODE:
        known = ", ".join(str(name) for name in WORKER_TYPE_OF_MODE if name)
        raise EngineError(
            f"the engine at {url} has disaggregation_mode {mode!r}; known are {known}."
        )
    # attention replicas live on the tensor-parallel devices; other replicas have devices of their
    # own
    replicas = 1 if info.get("enable_dp_attention") else _size(info, "dp_size")
    parts = urlsplit(url)
    worker_type = WORKER_TYPE_OF_MODE[mode]
    return ExternalEngineInfo(
        url=url,
        host=parts.hostname or "",
        port=parts.port or 0,
        worker_type=worker_type,
        num_gpus=_size(info, "tp_size") * _size(info, "pp_size") * replicas,
        disaggregation_bootstrap_port=info.get("disaggregation_bootstrap_port")
        if worker_type == "prefill"
        else None,
        server_info=info,
    )


def external_engine_init_kwargs(info: ExternalEngineInfo) -> dict[str, Any]:
    """Returns what an engine handle needs to reach the server: host, port, and the bootstrap port
    of a prefill worker.
    """
    kwargs: dict[str, Any] = {"host": info.host, "port": info.port}
    if info.disaggregation_bootstrap_port is not None:
        kwargs["disaggregation_bootstrap_port"] = info.disaggregation_bootstrap_port
    return kwargs


def apply_external_engine_info_to_args(
    args: argparse.Namespace, logger: logging.Logger | None = None
) -> None:
    """Asks the servers of `args.rollout_external_engine_addrs` and puts what follows into `args`:
    `rollout_external`, `rollout_external_engine_infos`, `rollout_num_engines`, `rollout_num_gpus`
    and, where all engines have one size, `rollout_num_gpus_per_engine`.

    Does nothing without addresses.
    """
    if args.rollout_external_engine_addrs:
        _apply_infos(
            args,
            discover_external_engines(
                args.rollout_external_engine_addrs, api_key=vars(args).get("sglang_api_key")
            ),
            logger,
        )


def _apply_infos(
    args: argparse.Namespace, infos: Sequence[ExternalEngineInfo], logger: logging.Logger | None
) -> None:
    sizes = {info.num_gpus for info in infos}
    values: dict[str, Any] = {
        "rollout_external": True,
        "rollout_external_engine_infos": [info.to_dict() for info in infos],
        "rollout_num_engines": len(infos),
        "rollout_num_gpus": sum(info.num_gpus for info in infos),
    }
    if len(sizes) == 1:
        values["rollout_num_gpus_per_engine"] = sizes.pop()
    apply_derived(args, values)
    if logger is None:
        return
    for info in infos:
        logger.info("external engine %s: %s, %s", info.url, info.worker_type, info.parallel_config)


def external_engine_infos_from_args(args: argparse.Namespace) -> list[ExternalEngineInfo]:
    """Returns what `apply_external_engine_info_to_args` stored; [] where nothing was."""
    stored = vars(args).get("rollout_external_engine_infos") or []
    return [
        entry if isinstance(entry, ExternalEngineInfo) else ExternalEngineInfo(**entry)
        for entry in stored
    ]


def start_external_rollout_servers(
    args: argparse.Namespace,
    *,
    start_router: Callable[[Any, list[str]], Any],
    wait_for_answers: Callable[[list[str]], None] | None = None,
) -> Any:
    """Returns the `RolloutServers` of the given addresses, behind a router where the options ask
    for one. `wait_for_answers` gets the URLs before anything is asked of the servers.

    ConfigError for a disaggregated worker: requests go to whole engines.
    """
    urls = external_engine_urls(args.rollout_external_engine_addrs)
    if wait_for_answers is not None:
        wait_for_answers(urls)
    infos = _ask(urls, api_key=vars(args).get("sglang_api_key"))
    _apply_infos(args, infos, logging.getLogger(__name__))
    partial = [f"{info.url} ({info.worker_type})" for info in infos if info.is_pd_worker]
    if partial:
        raise ConfigError(
            f"--rollout-external-engine-addrs: {', '.join(partial)} do only a part of a request. "
            "Start the engines without --disaggregation-mode, or give the address of the router before them."
        )
    return RolloutServers([], urls, start_router(args, urls) if args.use_sglang_router else None)
