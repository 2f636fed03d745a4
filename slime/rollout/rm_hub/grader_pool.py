"""A pool of processes for graders that may hang, eat the memory or crash: each call has a
wall-clock limit and is killable.

Works the same from a thread, an event loop and a Ray actor: no signals, no fork, only pipes with a
deadline. A worker that overruns its time is killed and one new one takes its place.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import dataclasses
import functools
import itertools
import json
import logging
import os
import queue
import select
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any, cast

from slime.rollout.rm_hub.answers import boxed_answer
from slime.rollout.rm_hub.labels import label_answers
from slime.rollout.rm_hub.outcomes import GRADER_ERROR, GRADER_TIMEOUT, GraderOutcome

logger = logging.getLogger(__name__)

# What a new process may take to start, and a grader to import what it needs (sympy takes half a
# second on a free core).
START_TIMEOUT_S = 60.0
REPOSITORY = Path(__file__).resolve().parents[3]


@dataclasses.dataclass(frozen=True)
class PoolSettings:
    """Processes of the pool, seconds that one grading may take, longest expression in
    characters.
    """

    num_workers: int = 2
    timeout_s: float = 10.0
    max_length: int = 2000


class GraderPool:
    """Grades by name in other processes. Thread-safe; processes start with the first calls."""

    def __init__(self, settings: PoolSettings) -> None:
        self.settings = settings
        self.num_restarts = 0
        self._idle: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        for _ in range(settings.num_workers):
            self._idle.put(None)  # a place for a worker that is not started yet
        self._ids = itertools.count()
        self._spawner = _Spawner()
        self._threads = concurrent.futures.ThreadPoolExecutor(
            settings.num_workers, thread_name_prefix="slime-grader"
        )
        self._workers: set[_Worker] = set()
        self._closed = False

    def grade(self, grader: str, response: str, label: object) -> GraderOutcome:
        """The outcome of one grading; waits for a free worker, then at most `timeout_s`."""
        too_long = _too_long(response, label, self.settings.max_length)
        if too_long:
            return GraderOutcome(error=GRADER_ERROR, detail=too_long)
        request = {"id": next(self._ids), "grader": grader, "response": response, "label": label}
        worker = self._idle.get()
        try:
            if worker is None or not worker.is_alive():
                worker = self._start()
            outcome = worker.ask(request, self.settings.timeout_s)
            if outcome.error is not None and not worker.is_healthy:
                self._retire(worker)
                worker = self._restarted()
            return outcome
        except _WorkerGone as error:
            if worker is not None:
                self._retire(worker)
            worker = None
            return GraderOutcome(error=GRADER_ERROR, detail=str(error))
        finally:
            self._idle.put(worker)

    async def grade_async(self, grader: str, response: str, label: object) -> GraderOutcome:
        """`grade`, awaited from any event loop."""
        return await asyncio.get_running_loop().run_in_executor(
            self._threads, self.grade, grader, response, label
        )

    def close(self) -> None:
        """Kills every worker; the pool cannot be used afterwards."""
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in list(self._workers):
            self._retire(worker)
        self._spawner.close()

    def _start(self) -> _Worker:
        if self._closed:
            raise _WorkerGone("the grader pool is closed")
        worker = _Worker(self._spawner.spawn())
        self._workers.add(worker)
        return worker

    def _restarted(self) -> _Worker | None:
        """The successor of a killed worker, started at once so that the next call need not wait for
        it.
        """
        self.num_restarts += 1
        try:
            return self._start()
        except (_WorkerGone, OSError) as error:
            logger.warning("a grader process could not be started again: %s", error)
            return None

    def _retire(self, worker: _Worker) -> None:
        self._workers.discard(worker)
        worker.kill()


@functools.lru_cache(maxsize=4)
def shared_pool(settings: PoolSettings) -> GraderPool:
    """This process's pool for the given settings; closed at its exit."""
    pool = GraderPool(settings)
    atexit.register(pool.close)
    return pool


def _too_long(response: str, label: object, limit: int) -> str | None:
    """Why an expression is not graded: the boxed answer (the last box) or the label exceeds the
    limit.
    """
    texts = [
        ("answer", boxed_answer(response) or ""),
        *(("label", text) for text in label_answers(label)),
    ]
    for what, text in texts:
        if len(text) > limit:
            return f"the {what} has {len(text)} characters, --grader-max-length is {limit}"
    return None


Pipes = tuple[IO[bytes], IO[bytes]]


class _WorkerGone(RuntimeError):
    """The process ended by itself, or could not be started."""


class _Worker:
    """One grader process and the pipes to it."""

    def __init__(self, process: subprocess.Popen) -> None:
        self.process = process
        self._stdin, self._stdout = cast(Pipes, (process.stdin, process.stdout))
        self.is_healthy = True
        self._buffer = b""
        self._prepared: set[str] = set()
        os.set_blocking(self._stdout.fileno(), False)
        try:
            self._await_line(time.monotonic() + START_TIMEOUT_S, "start")
        except (TimeoutError, _WorkerGone) as error:
            self.kill()
            raise _WorkerGone(f"a grader process did not start: {error}") from error

    def is_alive(self) -> bool:
        return self.is_healthy and self.process.poll() is None

    def ask(self, request: dict[str, Any], timeout_s: float) -> GraderOutcome:
        """The answer to a request, or GRADER_TIMEOUT after `timeout_s`; then the process is to be
        killed.

        The time starts once the grader's imports are done.
        """
        grader = request["grader"]
        if grader not in self._prepared:
            outcome = self._exchange(
                {"id": -1, "prepare": grader}, START_TIMEOUT_S, f"the import of {grader}"
            )
            if outcome.error is not None:
                return outcome
            self._prepared.add(grader)
        return self._exchange(request, timeout_s, grader)

    def _exchange(self, request: dict[str, Any], timeout_s: float, what: str) -> GraderOutcome:
        try:
            self._stdin.write(json.dumps(request, default=str).encode() + b"\n")
            self._stdin.flush()
            answer = json.loads(self._await_line(time.monotonic() + timeout_s, what))
        except TimeoutError:
            self.is_healthy = False
            return GraderOutcome(
                error=GRADER_TIMEOUT, detail=f"{what} took longer than {timeout_s} s"
            )
        except (OSError, ValueError) as error:
            self.is_healthy = False
            raise _WorkerGone(f"the grader process answered with no result: {error}") from error
        if answer.get("id") != request["id"]:
            self.is_healthy = False
            raise _WorkerGone(
                f"the grader process answered request {answer.get('id')}, not {request['id']}"
            )
        if "error" in answer:
            return GraderOutcome(error=GRADER_ERROR, detail=answer["error"])
        return GraderOutcome(value=answer["value"])

    def _await_line(self, deadline: float, what: str) -> bytes:
        stdout = self._stdout.fileno()
        while b"\n" not in self._buffer:
            remaining = deadline - time.monotonic()
            if remaining <= 0 or not _poll_readable(stdout, remaining):
                raise TimeoutError(what)
            data = os.read(stdout, 1 << 16)
            if not data:
                self.is_healthy = False
                raise _WorkerGone(
                    f"the grader process ended with status {self.process.wait()} during {what}"
                )
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        return line

    def kill(self) -> None:
        self.is_healthy = False
        self.process.kill()
        self.process.wait()
        for pipe in (self._stdin, self._stdout):
            try:
                pipe.close()
            except OSError:  # what was left to be written has no reader any more
                continue


def _poll_readable(fd: int, timeout_s: float) -> bool:
    poller = select.poll()  # unlike select.select, without a limit on the number of open files
    poller.register(fd, select.POLLIN | select.POLLHUP)
    return bool(poller.poll(max(1, int(timeout_s * 1000))))


class _Spawner:
    """Starts workers from one thread that lives as long as the process.

    Linux sends the parent-death signal when the *thread* that started a process ends, so a
    short-lived thread would take its workers with it.
    """

    def __init__(self) -> None:
        self._requests: queue.Queue[concurrent.futures.Future | None] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def spawn(self) -> subprocess.Popen:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._serve, name="slime-grader-spawner", daemon=True
                )
                self._thread.start()
        future: concurrent.futures.Future = concurrent.futures.Future()
        self._requests.put(future)
        try:
            return future.result(timeout=START_TIMEOUT_S)
        except (OSError, concurrent.futures.TimeoutError) as error:
            raise _WorkerGone(f"a grader process could not be started: {error}") from error

    def close(self) -> None:
        self._requests.put(None)

    def _serve(self) -> None:
        while (future := self._requests.get()) is not None:
            try:
                future.set_result(_popen())
            except OSError as error:
                future.set_exception(error)


def _popen() -> subprocess.Popen:
    paths = [str(REPOSITORY), *(path for path in sys.path if path)]
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.Popen(
        [sys.executable, "-m", "slime.rollout.rm_hub.grader_worker", str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=env,
        start_new_session=True,
    )
