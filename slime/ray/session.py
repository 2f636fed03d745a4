"""Starts or joins the Ray session of a run, and ends its processes when the run ends, for whatever
reason.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import logging
import os
import shutil
import signal
import socket
import threading
import types
from collections.abc import Iterator

import ray
from ray._private import ray_constants, services

from slime.exceptions import ConfigError
from slime.ray import actors
from slime.ray.cluster_folder import end_processes_of, guard, make_folder, remove_folder, sweep
from slime.ray.cluster_token import token_authentication
from slime.ray.run_watch import RunWatch, watched_run
from slime.ray.utils import add_default_ray_env_vars
from slime.rollout import fully_async_rollout, sglang_rollout
from slime.rollout.sample_hooks import set_current_rollout_id
from slime.tracking.tracking import configure_logger, log_dir_of
from slime.utils.misc import load_function

OBJECT_STORE_BYTES = 2 * 1024**3
# a cluster that is alive answers in milliseconds; Ray itself would try for minutes
CLUSTER_ANSWER_S = 10.0
logger = logging.getLogger(__name__)


ENDING = (signal.SIGTERM, signal.SIGINT)


def _interrupt(signum: int, frame: types.FrameType | None) -> None:
    # A second signal must not break the cleanup that the first one began.
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt(signal.Signals(signum).name)


@contextlib.contextmanager
def interruptible(*, to_the_end: bool = False) -> Iterator[None]:
    """Inside, SIGTERM ends the run in the same orderly way as Ctrl-C, once: what follows is
    ignored until the outermost block ends, or with `to_the_end` until the process does. Signals are
    the main thread's; in another this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, _interrupt) for number in ENDING}
    try:
        yield
    finally:
        has_come = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        is_inner = previous[signal.SIGINT] is _interrupt
        if not (has_come and (is_inner or to_the_end)):
            for number, handler in previous.items():
                signal.signal(number, handler)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Inside, signals wait: the first of them takes effect at the end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    previous = {
        number: signal.signal(number, lambda signum, frame: came.append(signum))
        for number in ENDING
    }
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        if came and callable(handler := previous[signal.Signals(came[0])]):
            handler(came[0], None)


@contextlib.contextmanager
def run_session(args: argparse.Namespace) -> Iterator[RunWatch]:
    """What the actors of a run live in: a Ray session, or this process with --local; with the watch
    over its processes.
    """
    if not args.local:
        configure_logger("driver", log_dir=log_dir_of(args))
        with ray_session(args) as watch:
            yield watch
        return
    configure_logger("local", log_dir=log_dir_of(args))
    load_function.cache_clear()  # a notebook may have defined its functions anew
    with (
        actors.local_actors(warning_filters=add_default_ray_env_vars()["PYTHONWARNINGS"]),
        interruptible(),
    ):
        try:
            yield RunWatch()
        finally:
            # what a process that ends with its run may keep
            sglang_rollout.EVAL_PROMPT_DATASET.clear()
            fully_async_rollout.stop_global_worker()
            set_current_rollout_id(None)


@contextlib.contextmanager
def ray_session(args: argparse.Namespace) -> Iterator[RunWatch]:
    """A connection to the cluster of `--ray-address`, or a private local one that is stopped, with
    its files, at the end.
    """
    os.environ |= {
        name: value for name, value in add_default_ray_env_vars().items() if name.startswith("RAY_")
    }
    os.environ.setdefault("RAY_DEDUP_LOGS", "1")
    address = args.ray_address or os.environ.get("RAY_ADDRESS")
    if address:
        require_cluster(
            address,
            named_by="--ray-address" if args.ray_address else "RAY_ADDRESS in the environment",
        )
    for left in sweep():
        logger.info("%s was left by a run that was killed: it is removed", left)
    folder = make_folder()
    guardian = guard(folder)

    def clean_up() -> None:
        # An interrupt inside ray.init leaves processes that Ray does not know of yet.
        end_processes_of(folder)
        remove_folder(folder)
        if guardian is not None:
            guardian.poll()  # it has ended with the others

    # Registered before Ray's own exit handler, so it runs after it.
    atexit.register(remove_folder, folder)

    def join_cluster() -> None:
        ray.init(address=address, logging_level=logging.ERROR, log_to_driver=True)

    def start_cluster() -> None:
        ray.init(
            address="local",
            num_cpus=args.num_cpus or os.cpu_count(),
            include_dashboard=False,
            object_store_memory=_object_store_bytes(),
            logging_level=logging.ERROR,
            log_to_driver=True,
            _temp_dir=f"{folder}/r",
        )

    try:
        with contextlib.ExitStack() as stack:
            if not address:
                stack.enter_context(loopback_only())
                stack.enter_context(token_authentication(folder))
            start = join_cluster if address else start_cluster
            # Ray's core has put its own handlers in place, which print a stack and abort.
            with watched_run(folder, clean_up, start) as watch, interruptible():
                yield watch
    finally:
        with uninterrupted():
            ray.shutdown()
            clean_up()


def require_cluster(address: str, *, named_by: str, timeout_s: float = CLUSTER_ANSWER_S) -> None:
    """Raises ConfigError in one sentence unless a Ray cluster answers at `address` within
    `timeout_s`.

    `address` is what ray.init takes: host:port, ray://host:port, or auto.
    """
    remedy = (
        f"Start the cluster (ray start --head), correct {named_by}, or leave it out: the run "
        "then starts Ray by itself."
    )
    if address == "local":
        return
    if address == "auto":
        try:
            address = services.canonicalize_bootstrap_address_or_die(address)
        except ConnectionError as error:
            raise ConfigError(
                f"{named_by} is auto, but no Ray cluster runs on this machine. {remedy}"
            ) from error
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(
            f"{named_by} is {address!r}, which is no address. Write HOST:PORT, or auto."
        )
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s):
            pass
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"no Ray cluster answers at {address} ({named_by}): {error}. {remedy}"
        ) from error
    if not address.startswith("ray://") and not _answers_as_ray(address, timeout_s):
        raise ConfigError(
            f"{address} ({named_by}) accepts connections, but does not answer as a Ray cluster "
            f"within {timeout_s:g} s. {remedy}"
        )


def _answers_as_ray(address: str, timeout_s: float) -> bool:
    """Whether the cluster's control store answers. Asked from a thread of its own: Ray's client
    would wait for a minute, then abort.
    """
    answered = threading.Event()

    def ask() -> None:
        with contextlib.suppress(Exception):
            client = ray._raylet.GcsClient  # type: ignore[attr-defined]  # compiled, without stubs
            client(address=address).internal_kv_keys(b"", None)
            answered.set()

    threading.Thread(target=ask, name="ask-ray", daemon=True).start()
    return answered.wait(timeout_s)


@contextlib.contextmanager
def loopback_only() -> Iterator[None]:
    """Inside, a private Ray session listens on 127.0.0.1 alone, so that the processes of a run on
    one machine cannot be reached from others.

    Ray has this as its mode for machines that cannot form a cluster; its servers bind to loopback
    when that is the node's address.
    """
    name = ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR
    before, constant = os.environ.get(name), ray_constants.ENABLE_RAY_CLUSTER
    os.environ[name], ray_constants.ENABLE_RAY_CLUSTER = "0", False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = constant
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _object_store_bytes() -> int:
    """At most 2 GiB and at most a third of what /dev/shm has free: more would fall back to slow
    files.
    """
    free = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else OBJECT_STORE_BYTES
    return max(128 * 1024**2, min(OBJECT_STORE_BYTES, free // 3))
