"""Starting, addressing and stopping the engines of a run: embedded ones as Ray actors, or external
servers by URL.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import logging
import time
from typing import Any

from slime.backends.sglang_utils.external import start_external_rollout_servers
from slime.backends.sglang_utils.router import start_router
from slime.backends.torch_engine.engine_config import engine_config_from_args
from slime.backends.torch_engine.ray_actor import EngineActor
from slime.exceptions import EngineError
from slime.ray import actors
from slime.ray.placement import ENGINE_FRACTION, Placement, bundle_strategy, device_options
from slime.ray.rollout_validation import validate_server_group_gpu_indices
from slime.ray.servers import HEALTH_TIMEOUT_S, RolloutServers
from slime.ray.utils import add_default_ray_env_vars, wait_for
from slime.tracking.spans import trace_folder
from slime.utils.async_utils import run
from slime.utils.http_utils import (
    HttpStatusError,
    get_rollout_num_engines,
    init_http_client,
    pause_before_try,
    request_once,
    send_key_to,
)

MIN_HEALTH_TRIES = 4
logger = logging.getLogger(__name__)


def start_rollout_servers(args: argparse.Namespace, pg: Placement) -> RolloutServers:
    """Engines that answer /health, placed on the rollout devices; returns once all of them do."""
    if args.debug_train_only:
        return RolloutServers([], [])
    if args.rollout_external_engine_addrs:
        return _external_servers(args)
    check_placement(args, pg)
    engines = [create_engine(args, pg, rank) for rank in range(get_rollout_num_engines(args))]
    infos = wait_for(
        [engine.start.remote(args.rollout_engine_start_timeout) for engine in engines],
        what="starting the engines",
        timeout_s=args.rollout_engine_start_timeout,
        names=[f"engine {rank}" for rank in range(len(engines))],
        option="--rollout-engine-start-timeout",
    )
    servers = RolloutServers(engines, [info["url"] for info in infos])
    if args.use_sglang_router:
        servers.router = start_router(args, servers.urls)
    return servers


def _external_servers(args: argparse.Namespace) -> RolloutServers:
    def wait_for_answers(urls: list[str]) -> None:
        init_http_client(args)
        send_key_to(urls)
        run(_check_external_engines(urls, timeout_s=args.rollout_engine_start_timeout))

    return start_external_rollout_servers(
        args, start_router=start_router, wait_for_answers=wait_for_answers
    )


async def _check_external_engines(urls: list[str], *, timeout_s: float) -> None:
    """Returns once every server answers /health. EngineError for one that does not: at once where
    nothing listens at its address, otherwise after `timeout_s`, which a server that still loads its
    model has.
    """
    deadline = time.monotonic() + timeout_s
    for url in urls:
        for attempt in itertools.count(1):
            try:
                await request_once("GET", f"{url}/health", timeout_s=HEALTH_TIMEOUT_S)
                break
            except EngineError as error:
                starting = isinstance(error, HttpStatusError) and error.status >= 500
                if time.monotonic() > deadline or not (starting or attempt < MIN_HEALTH_TRIES):
                    raise EngineError(
                        f"the engine at {url} does not answer: {error} Start it, or correct "
                        "--rollout-external-engine-addrs."
                    ) from error
                await asyncio.sleep(pause_before_try(attempt))


def check_placement(args: argparse.Namespace, placement: Placement) -> None:
    """ConfigError where the engines do not fit onto the rollout devices."""
    _, _, ids = placement
    validate_server_group_gpu_indices(
        worker_type="regular",
        gpu_offset=0,
        num_gpus_per_engine=args.rollout_num_gpus_per_engine,
        num_gpus_per_engine_on_node=args.rollout_num_gpus_per_engine,
        num_engines=get_rollout_num_engines(args),
        num_available_gpus=len(ids),
        rollout_num_gpus=args.rollout_num_gpus,
        rollout_num_gpus_per_engine=args.rollout_num_gpus_per_engine,
    )


def create_engine(args: argparse.Namespace, placement: Placement, rank: int) -> Any:
    """The actor of engine `rank` on its device; it has loaded nothing yet."""
    group, order, _ = placement
    options = device_options(ENGINE_FRACTION) | {
        "scheduling_strategy": bundle_strategy(
            group, order[rank * args.rollout_num_gpus_per_engine]
        ),
        "runtime_env": {
            "env_vars": add_default_ray_env_vars(
                {"OMP_NUM_THREADS": str(args.rollout_engine_threads)}
            )
        },
        # one of them waits for the end
        "max_concurrency": 5,
    }
    config = engine_config_from_args(args, rank)
    return actors.start(EngineActor, config, rank, trace_folder(args), **options)
