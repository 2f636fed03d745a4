"""A pool of processes for graders that may hang, eat the memory or crash: each call has a
wall-clock limit and is killable.

Works the same from a thread, an event loop and a Ray actor: no signals, no fork, only pipes with a
deadline. A worker that overruns its time is killed, with every process that it started, and one new
one takes its place. Each has a guard (`grader_guard`), which does that also when this process is
killed, and which bounds what all graders of the pool print.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import dataclasses
import functools
import json
import logging
import os
import queue
import secrets
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from slime.rollout.rm_hub import grader_guard
from slime.rollout.rm_hub.answers import boxed_answer
from slime.rollout.rm_hub.labels import label_answers
from slime.rollout.rm_hub.outcomes import GRADER_ERROR, GRADER_TIMEOUT, GraderOutcome
from slime.supervision.records import Record, register

logger = logging.getLogger(__name__)

# What a new process may take to start, and a grader to import what it needs (sympy takes half a
# second on a free core).
START_TIMEOUT_S = 60.0
REPOSITORY = Path(__file__).resolve().parents[3]
WORKER = "slime.rollout.rm_hub.grader_worker"
# What the graders of a pool may print to stderr, all together, and what a grader may write to the
# answers' descriptor beside its answer.
OUTPUT_LIMIT_MIB = 4
STRAY_LIMIT_BYTES = 4 << 20
# What a guard may take to end with the processes of its grader; its own limit is KILL_SECONDS.
KILL_TIMEOUT_S = 10.0


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
        self._spawner = _Spawner()
        self._threads = concurrent.futures.ThreadPoolExecutor(
            settings.num_workers, thread_name_prefix="slime-grader"
        )
        self._workers: set[_Worker] = set()
        self._closed = False
        self._lock, self._num_waiting = threading.Lock(), 0

    def grade(self, grader: str, response: str, label: object) -> GraderOutcome:
        """The outcome of one grading; waits for a free worker, then at most `timeout_s`."""
        too_long = _too_long(response, label, self.settings.max_length)
        if too_long:
            return GraderOutcome(error=GRADER_ERROR, detail=too_long)
        request = {"grader": grader, "response": response, "label": label}
        try:
            worker = self._free_worker()
        except _WorkerGone as error:
            return GraderOutcome(error=GRADER_ERROR, detail=str(error))
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

    def _free_worker(self) -> _Worker | None:
        """The next worker without a task, None for one that is still to be started."""
        with self._lock:
            self._num_waiting += 1
            # each of those before may start a process, import what it needs, grade, and be killed
            longest_s = 2 * START_TIMEOUT_S + self.settings.timeout_s + 2 * KILL_TIMEOUT_S
            wait_s = longest_s * self._num_waiting
        try:
            return self._idle.get(timeout=wait_s)
        except queue.Empty:
            raise _WorkerGone(
                f"none of {self.settings.num_workers} graders came free within {wait_s:.0f} s"
            ) from None
        finally:
            with self._lock:
                self._num_waiting -= 1

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


@dataclasses.dataclass(frozen=True)
class Spawned:
    """A guard that runs, and this process's ends of the pipes: requests and answers of the grader,
    and the one whose end ends both.
    """

    guard: subprocess.Popen
    requests: int
    answers: int

    def close(self) -> None:
        """Closes the pipes of requests and answers."""
        for fd in (self.requests, self.answers):
            os.close(fd)


class _WorkerGone(RuntimeError):
    """The process ended by itself, or could not be started."""


class _Worker:
    """One grader process, its guard, and the pipes to both."""

    def __init__(self, spawned: Spawned) -> None:
        self._spawned = spawned
        self._killing, self._asking = threading.Lock(), threading.Lock()
        self.is_healthy = True
        self._buffer = b""
        self._prepared: set[str] = set()
        self._pid: int | None = None
        self._record: Record | None = None  # for the watch over the run's processes
        for fd in (spawned.requests, spawned.answers):
            os.set_blocking(fd, False)
        try:
            deadline = time.monotonic() + START_TIMEOUT_S
            self._pid = int(self._await_answer("start", deadline, "start")["value"])
        except (TimeoutError, _WorkerGone) as error:
            self.kill()
            raise _WorkerGone(f"a grader process did not start: {error}") from error
        self._record = register("grader", self._pid)

    def is_alive(self) -> bool:
        return self.is_healthy and self._spawned.guard.poll() is None

    def ask(self, request: dict[str, Any], timeout_s: float) -> GraderOutcome:
        """The answer to a request, or GRADER_TIMEOUT after `timeout_s`; then the process is to be
        killed.

        The time starts once the grader's imports are done.
        """
        grader = request["grader"]
        if grader not in self._prepared:
            outcome = self._exchange(
                {"prepare": grader}, START_TIMEOUT_S, f"the import of {grader}"
            )
            if outcome.error is not None:
                return outcome
            self._prepared.add(grader)
        return self._exchange(request, timeout_s, grader)

    def _exchange(self, request: dict[str, Any], timeout_s: float, what: str) -> GraderOutcome:
        deadline = time.monotonic() + timeout_s
        secret = secrets.token_hex(16)
        try:
            with self._asking:
                self._send({**request, "secret": secret}, deadline, what)
                answer = self._await_answer(secret, deadline, what)
        except TimeoutError:
            self.is_healthy = False
            return GraderOutcome(
                error=GRADER_TIMEOUT, detail=f"{what} took longer than {timeout_s} s"
            )
        except (OSError, ValueError) as error:
            self.is_healthy = False
            raise _WorkerGone(f"the grader process answered with no result: {error}") from error
        if "error" in answer:
            return GraderOutcome(error=GRADER_ERROR, detail=answer["error"])
        return GraderOutcome(value=answer["value"])

    def _send(self, request: dict[str, Any], deadline: float, what: str) -> None:
        data = json.dumps(request, default=str).encode() + b"\n"
        while data:
            if not _poll(self._spawned.requests, select.POLLOUT, deadline):
                raise TimeoutError(what)
            data = data[os.write(self._spawned.requests, data) :]

    def _await_answer(self, secret: str, deadline: float, what: str) -> dict[str, Any]:
        """The answer on the line that begins with `secret`; other lines are none of ours."""
        answers, prefix, stray = self._spawned.answers, secret.encode() + b" ", 0
        while stray <= STRAY_LIMIT_BYTES:
            *lines, self._buffer = self._buffer.split(b"\n")
            for number, line in enumerate(lines):
                if line.startswith(prefix):
                    self._buffer = b"\n".join([*lines[number + 1 :], self._buffer])
                    return json.loads(line[len(prefix) :])
            if not _poll(answers, select.POLLIN, deadline):
                raise TimeoutError(what)
            data = os.read(answers, 1 << 16)
            if not data:
                self.is_healthy = False
                raise _WorkerGone(
                    f"the grader process ended with status {self._status()} during {what}"
                )
            stray += len(data)
            self._buffer += data
        self.is_healthy = False
        raise _WorkerGone(
            f"{what} wrote {stray} bytes to the descriptor of the answers; at most "
            f"{STRAY_LIMIT_BYTES}"
        )

    def _status(self) -> int | str:
        try:
            return self._spawned.guard.wait(KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return "unknown"

    def kill(self) -> None:
        """Ends the grader and every process that it started. Safe to call twice."""
        with self._killing:
            self.is_healthy = False
            guard = self._spawned.guard
            if guard.stdin is None or guard.stdin.closed:
                return
            if self._record is not None:
                self._record.sign_off()
            guard.stdin.close()
            try:
                guard.wait(KILL_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                guard.kill()
                guard.wait()
            if guard.returncode < 0 and self._pid is not None:  # somebody killed the guard
                _kill_group(self._pid)
            # Another thread may still wait for an answer; now it gets the end of the pipe.
            with self._asking:
                self._spawned.close()


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def _poll(fd: int, event: int, deadline: float) -> bool:
    remaining_s = deadline - time.monotonic()
    if remaining_s <= 0:
        return False
    poller = select.poll()  # unlike select.select, without a limit on the number of open files
    poller.register(fd, event)
    return bool(poller.poll(max(1, int(remaining_s * 1000))))


class _Spawner:
    """Starts workers from one thread that lives as long as the process.

    Linux sends the parent-death signal when the *thread* that started a process ends, so a
    short-lived thread would take its workers with it.
    """

    def __init__(self) -> None:
        self._requests: queue.Queue[concurrent.futures.Future | None] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._budget = _budget_pipe(OUTPUT_LIMIT_MIB)

    def spawn(self) -> Spawned:
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
                future.set_result(_popen(self._budget))
            except OSError as error:
                future.set_exception(error)
        os.close(self._budget)


def _budget_pipe(limit_mib: int) -> int:
    """The reading end of a pipe with one byte for each chunk that the graders may print; guards
    take them out.
    """
    readable, writable = os.pipe()
    os.set_blocking(readable, False)
    chunks = limit_mib * 2**20 // grader_guard.OUTPUT_CHUNK_BYTES
    os.write(writable, b"." * chunks + grader_guard.LAST_BYTE)
    os.close(writable)
    return readable


def _popen(budget: int) -> Spawned:
    paths = [str(REPOSITORY), *(path for path in sys.path if path)]
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
        "OMP_NUM_THREADS": "1",
    }
    guard_requests, requests = os.pipe()
    answers, guard_answers = os.pipe()
    numbers = (os.getpid(), guard_requests, guard_answers, budget, OUTPUT_LIMIT_MIB)
    try:
        guard = subprocess.Popen(
            [sys.executable, "-I", "-S", grader_guard.__file__, *map(str, numbers), WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=(guard_requests, guard_answers, budget),
            env=env,
            start_new_session=True,
        )
    except OSError:
        for fd in (requests, answers):
            os.close(fd)
        raise
    finally:
        for fd in (guard_requests, guard_answers):
            os.close(fd)
    return Spawned(guard, requests, answers)
