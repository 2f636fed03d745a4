"""The real sglang-router (extra `router`) as a child process on loopback, and its workers over its
own HTTP API.

What release 0.3.2 does to /generate, seen on the wire: it writes the request anew, so fields it
does not know are lost without an error (return_arrays, custom_params, a misspelled sampling
parameter); sampling_params must be one object, a list of them is a 422; responses, single, list and
stream, pass unchanged; the client's Authorization header is passed on. It has no /abort_request
(404): aborts, pauses and weight updates go to every engine directly.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import importlib.util
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import IO, Any, cast

from slime.exceptions import ConfigError, EngineError
from slime.supervision.records import Record, register

START_TIMEOUT_SECONDS = 60.0
WORKER_TIMEOUT_SECONDS = 60.0
REQUEST_TIMEOUT_SECONDS = 10.0
STOP_TIMEOUT_SECONDS = 10.0
POLL_SECONDS = 0.1
LOG_LINES = 40


@dataclasses.dataclass(frozen=True)
class RouterConfig:
    """port None takes a free one. attach: a router runs there already, start none."""

    host: str = "127.0.0.1"
    port: int | None = None
    policy: str = "cache_aware"
    api_key: str | None = dataclasses.field(default=None, repr=False)
    request_timeout_seconds: int = 1800
    max_concurrent_requests: int = -1
    attach: bool = False

    def __post_init__(self) -> None:
        if self.attach and self.port is None:
            raise ConfigError(
                "--sglang-router-ip names a router that runs already; give its port with "
                "--sglang-router-port."
            )


class SglangRouter:
    """A router that lives as long as this object's owner: `start`, `add_worker`, `stop`. Context
    manager.
    """

    def __init__(self, config: RouterConfig | None = None) -> None:
        self.config = config or RouterConfig()
        self.port: int | None = None
        self._process: subprocess.Popen | None = None
        self._record: Record | None = None  # for the watch over the run's processes
        self._log: collections.deque[str] = collections.deque(maxlen=LOG_LINES)
        self._added: list[str] = []

    @property
    def url(self) -> str:
        """Base URL for clients. EngineError before `start`."""
        if self.port is None:
            raise EngineError("the router is not started.")
        host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
        return f"http://{host}:{self.port}"

    def start(self) -> SglangRouter:
        """Returns self once the router answers. EngineError if the extra is missing, the port is
        taken, or it does not come up.
        """
        if self.config.attach:
            self.port = self.config.port
            self._wait_until(self._answers, START_TIMEOUT_SECONDS, "answer")
            return self
        if importlib.util.find_spec("sglang_router") is None:
            raise EngineError(
                "--use-sglang-router needs the package sglang-router, which is not installed."
                " Install it with `pip install 'slime-rl[router]'`, or leave the flag out."
            )
        self.port = _usable_port(self.config.host, self.config.port)
        command = self._command(self.port, _usable_port("127.0.0.1", None))
        started = threading.Event()
        failure: list[BaseException] = []
        # The kernel takes the end of the *thread* that forked for the end of the parent: this one
        # lives as long as the router.
        owner = threading.Thread(
            target=self._own, args=(command, started, failure), name="slime-router", daemon=True
        )
        owner.start()
        started.wait()
        if failure:
            raise EngineError(f"the router could not be started: {failure[0]}")
        self._wait_until(self._answers, START_TIMEOUT_SECONDS, "answer")
        self._record = register("the router", cast(subprocess.Popen, self._process).pid)
        return self

    def _command(self, port: int, metrics_port: int) -> list[str]:
        config = self.config
        command = [
            sys.executable,
            "-m",
            "slime.backends.sglang_utils.router_child",
            str(os.getpid()),
        ]
        command += [
            "--host",
            config.host,
            "--port",
            str(port),
            "--policy",
            config.policy,
            "--log-level",
            "warn",
        ]
        command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)]
        command += ["--worker-startup-check-interval", "1", "--shutdown-grace-period-secs", "2"]
        command += ["--request-timeout-secs", str(config.request_timeout_seconds)]
        command += ["--max-concurrent-requests", str(config.max_concurrent_requests)]
        # Who tries again decides what is counted: the rollout client does, the router does not.
        command += ["--disable-retries"]
        return command

    def _own(
        self, command: list[str], started: threading.Event, failure: list[BaseException]
    ) -> None:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
            self._process = process
            # not on the command line, which every user of the machine can read
            with cast(IO[str], process.stdin) as pipe:
                pipe.write(f"{self.config.api_key or ''}\n")
        except OSError as error:
            failure.append(error)
            return
        finally:
            started.set()
        # Read to the end, or the router would block on a full pipe; the last lines explain a
        # failure.
        for line in cast(IO[str], process.stdout):
            self._log.append(line.rstrip())
        process.wait()

    def _answers(self) -> bool:
        try:
            return self._request("GET", "/health")[0] == 200
        except EngineError:
            return False

    def _wait_until(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if self._process is not None and self._process.poll() is not None:
                raise EngineError(
                    f"the router ended with status {self._process.returncode}. Its last "
                    f"words:\n{self.last_log()}"
                )
            if time.monotonic() > deadline:
                self.stop()
                raise EngineError(
                    f"the router did not {what} within {seconds:.0f} s. Its last "
                    f"words:\n{self.last_log()}"
                )
            time.sleep(POLL_SECONDS)

    def last_log(self) -> str:
        """Returns the last lines that the router wrote."""
        return "\n".join(self._log)

    def workers(self, *, also_failed: bool = False) -> dict[str, str]:
        """Returns worker id by URL of the workers that are registered and healthy; `also_failed`:
        of the others too.
        """
        status, answer = self._request("GET", "/workers")
        if status != 200:
            raise EngineError(f"the router answered {status} to GET /workers: {answer}")
        return {
            worker["url"].rstrip("/"): worker["id"]
            for worker in answer["workers"]
            if also_failed or worker.get("is_healthy", True)
        }

    def add_worker(
        self, url: str, *, api_key: str | None = None, timeout: float = WORKER_TIMEOUT_SECONDS
    ) -> str:
        """Registers an engine, waits until the router finds it healthy, and returns its worker id.
        EngineError if it does not.
        """
        url = url.rstrip("/")
        body = {"url": url} if api_key is None else {"url": url, "api_key": api_key}
        status, answer = self._request("POST", "/workers", body)
        if status not in (200, 201, 202):
            raise EngineError(f"the router refused the worker {url} with {status}: {answer}")
        self._added.append(url)
        self._wait_until(lambda: url in self.workers(), timeout, f"find the engine {url} healthy")
        return self.workers()[url]

    def remove_worker(self, url: str, *, timeout: float = WORKER_TIMEOUT_SECONDS) -> None:
        """Takes an engine out and waits until it is gone. EngineError if the router does not know
        it.
        """
        url = url.rstrip("/")
        known = self.workers(also_failed=True)
        worker = known.get(url)
        if worker is None:
            raise EngineError(f"the router has no worker {url}; it has {sorted(known)}.")
        # The router asks for its own id here: a URL is answered with 400.
        status, answer = self._request("DELETE", f"/workers/{worker}")
        if status not in (200, 202):
            raise EngineError(f"the router refused to remove {url} with {status}: {answer}")
        self._wait_until(
            lambda: url not in self.workers(also_failed=True), timeout, f"remove the engine {url}"
        )

    def _request(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        headers = {"Content-Type": "application/json"}
        if self.config.api_key:
            headers["Authorization"] = f"Bearer {self.config.api_key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        # No proxy from the environment between us and loopback.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=REQUEST_TIMEOUT_SECONDS) as response:
                return response.status, _json_or_text(response.read())
        except urllib.error.HTTPError as error:
            return error.code, _json_or_text(error.read())
        except (OSError, ValueError) as error:
            raise EngineError(
                f"the router at {self.url} does not answer {method} {path}: {error}"
            ) from None

    def stop(self) -> None:
        """Ends the router, and nothing listens afterwards; from one that ran already it only takes
        out the engines that were added. Harmless when called twice.
        """
        if self.config.attach:
            self._leave()
            return
        process, self._process = self._process, None
        if process is None:
            return
        if self._record is not None:
            self._record.sign_off()
        process.terminate()
        try:
            process.wait(timeout=STOP_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _leave(self) -> None:
        added, self._added = self._added, []
        try:
            known = self.workers()
            for url in added:
                if url in known:
                    self.remove_worker(url, timeout=STOP_TIMEOUT_SECONDS)
        except EngineError:
            # It is gone, or going: then there is nothing to take out.
            return

    def __enter__(self) -> SglangRouter:
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.stop()


def router_config_from_args(args: argparse.Namespace) -> RouterConfig:
    """Returns the router's configuration from the flat options namespace."""
    return RouterConfig(
        host=args.sglang_router_ip or "127.0.0.1",
        port=args.sglang_router_port,
        policy=args.sglang_router_policy,
        api_key=args.sglang_api_key or None,
        attach=args.sglang_router_ip is not None,
    )


def start_router(args: argparse.Namespace, engine_urls: list[str]) -> SglangRouter:
    """Returns a router with all `engine_urls` registered and healthy. EngineError names what does
    not answer; nothing is left running.
    """
    router = SglangRouter(router_config_from_args(args)).start()
    try:
        for url in engine_urls:
            router.add_worker(url, api_key=args.sglang_api_key or None)
    except BaseException:
        router.stop()
        raise
    return router


def _usable_port(host: str, port: int | None) -> int:
    try:
        with socket.create_server((host, port or 0)) as probe:
            return probe.getsockname()[1]
    except OSError as error:
        raise EngineError(
            f"the router cannot listen on {host} port {port}: {error.strerror}. Give another "
            "--sglang-router-port."
        ) from None


def _json_or_text(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except ValueError:
        return raw.decode(errors="replace")
