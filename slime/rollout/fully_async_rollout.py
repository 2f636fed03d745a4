"""Generation that never stops: a worker keeps groups in flight across rollouts, and each rollout
takes those that are done.

For use with `slime train-async`. Whether a finished group stays is decided in group_selection.py,
as in the synchronous rollout: groups that an abort left unfinished go back to the data source, and
the worker replaces those that the filter drops. The state of the data source knows which groups are
out, so that a resume generates them again.
"""

from __future__ import annotations

import argparse
import asyncio
import atexit
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from slime.data.sample import Sample
from slime.exceptions import ConfigError, RolloutDataError
from slime.prompts.data_source import group_id_of
from slime.rollout.base_types import RolloutFnTrainOutput
from slime.rollout.group_loop import report_progress
from slime.rollout.group_selection import EngineAborts, GroupSelection, SelectionConfig, first_index
from slime.rollout.sglang_rollout import GenerateState, generate_and_rm_group
from slime.utils.async_utils import run
from slime.utils.http_utils import close_session

if TYPE_CHECKING:
    from slime.prompts.data_source import DataSource

logger = logging.getLogger(__name__)

_global_worker: AsyncRolloutWorker | None = None
_worker_lock = threading.Lock()


def _get_global_worker(args: argparse.Namespace, data_buffer: DataSource) -> AsyncRolloutWorker:
    """This process's worker, started on the first call and again if its thread died."""
    global _global_worker
    with _worker_lock:
        if (
            _global_worker is None
            or not cast(threading.Thread, _global_worker.worker_thread).is_alive()
        ):
            _global_worker = AsyncRolloutWorker(
                args, data_buffer, concurrency=SelectionConfig.from_args(args).fetch_size
            )
            _global_worker.start()
        return _global_worker


def stop_global_worker() -> None:
    """Stops this process's worker, if there is one."""
    global _global_worker
    with _worker_lock:
        if _global_worker is not None:
            _global_worker.stop()
            _global_worker = None


atexit.register(stop_global_worker)


class AsyncRolloutWorker:
    """Keeps at most `concurrency` groups in flight, and at most as many finished ones waiting
    beside them.

    Finished groups stand in `output_queue` as (group id, group), first done first out.
    `poll_interval` is in seconds.
    """

    def __init__(
        self, args: argparse.Namespace, data_buffer: DataSource, concurrency: int = 10
    ) -> None:
        self.args = args
        self.data_buffer = data_buffer
        self.concurrency = concurrency
        self.running = False
        self.poll_interval = 1.0
        # Without a bound: a task's callback runs on the event loop and must never wait.
        self.output_queue: queue.Queue[tuple[int, list]] = queue.Queue()
        self.worker_thread: threading.Thread | None = None
        self.state = GenerateState(args)
        self.error: BaseException | None = None
        # get_samples is called by this worker's thread, add_samples and commit by the rollout's.
        self.buffer_lock = threading.Lock()
        self.engine_aborts = EngineAborts()  # of groups over all rollouts
        self.is_exhausted = False  # whether the data source had no group when it was asked last
        self.num_active = 0  # groups in flight
        # ends the loop's pause; callable from any thread
        self._wake_up: Callable[[], object] = lambda: None

    def start(self) -> None:
        """Starts the worker's thread; does nothing when it runs."""
        if self.worker_thread is None or not self.worker_thread.is_alive():
            self.running = True
            self.worker_thread = threading.Thread(
                target=self._run, name="slime-fully-async", daemon=True
            )
            self.worker_thread.start()

    def stop(self) -> None:
        """Ends the worker; groups in flight are cancelled."""
        self.running = False
        self._wake_up()
        if self.worker_thread is not None and self.worker_thread is not threading.current_thread():
            self.worker_thread.join(timeout=5)

    def queue_size(self) -> int:
        """Finished groups that wait."""
        return self.output_queue.qsize()

    def get_completed_groups(self, limit: int | None = None) -> list[tuple[int, list]]:
        """Finished groups in order of completion, at most `limit` of them; the others stay in the
        queue.
        """
        completed: list[tuple[int, list]] = []
        while limit is None or len(completed) < limit:
            try:
                completed.append(self.output_queue.get_nowait())
            except queue.Empty:
                break
        if completed:
            self._wake_up()
        return completed

    def _run(self) -> None:
        try:
            asyncio.run(self._loop())
        except BaseException as error:  # noqa: BLE001 - handed to the rollout that waits for this thread
            self.error = error
            logger.debug("the asynchronous worker ended", exc_info=True)

    async def _loop(self) -> None:
        """Tops up the groups in flight while the trainer keeps up."""
        active: set[asyncio.Task] = set()
        loop, taken = asyncio.get_running_loop(), asyncio.Event()
        self._wake_up = lambda: loop.call_soon_threadsafe(taken.set)
        try:
            while self.running:
                for task in [task for task in active if task.done()]:
                    active.discard(task)
                    task.result()  # ConfigError and the like end the worker
                self._top_up(active)
                self.num_active = len(active)
                waiter = asyncio.ensure_future(taken.wait())
                await asyncio.wait(
                    {*active, waiter},
                    timeout=self.poll_interval,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                waiter.cancel()
                taken.clear()
        finally:
            self._wake_up = lambda: None
            for task in active:
                task.cancel()
            await asyncio.gather(*active, return_exceptions=True)
            await close_session()

    def _top_up(self, active: set[asyncio.Task]) -> None:
        while len(active) < self.concurrency and self.output_queue.qsize() < self.concurrency:
            with self.buffer_lock:
                groups = self.data_buffer.get_samples(1)
                self.is_exhausted = not groups
            if not groups:
                return
            for group in groups:
                task = asyncio.create_task(
                    generate_and_rm_group(
                        self.args, group, dict(self.state.sampling_params), evaluation=False
                    )
                )
                group_id = group_id_of(group)
                task.add_done_callback(self._make_done_cb(-1 if group_id is None else group_id))
                active.add(task)

    def _make_done_cb(self, gid: int) -> Callable[[asyncio.Task], None]:
        """The callback that puts a finished task's group into the queue."""

        def done(task: asyncio.Task) -> None:
            try:
                result = task.result()
            except (asyncio.CancelledError, Exception):  # noqa: BLE001 - `_loop` raises it, where it ends the worker
                return
            self.output_queue.put((gid, result))

        return done


async def _generate_rollout_async(
    args: argparse.Namespace, rollout_id: int, data_buffer: DataSource
) -> list[list[Sample]]:
    """Exactly `rollout_batch_size` finished groups, in order of sample index."""
    output = await _collect(args, rollout_id, data_buffer)
    return cast("list[list[Sample]]", output.samples)


async def _collect(
    args: argparse.Namespace, rollout_id: int, data_buffer: DataSource
) -> RolloutFnTrainOutput:
    worker = _get_global_worker(args, data_buffer)
    selection = GroupSelection(args, rollout_id, getattr(worker, "engine_aborts", None))
    target, remaining = selection.config.target, selection.config.fetch_size
    kept: list[list] = []
    seen: list[list] = []  # every group that this rollout took
    used_ids: list[int] = []
    started = time.monotonic()
    while len(kept) < target:
        completed = worker.get_completed_groups(limit=target - len(kept))
        for group_id, group in completed:
            seen.append(group)
            is_named = group_id >= 0
            if selection.is_unfinished(group_id if is_named else first_index(group), group):
                _give_back(worker, data_buffer, selection.give_back(group, fetched=group))
                continue
            verdict = selection.verdict_against(group, remaining=remaining, num_kept=len(kept))
            used_ids += [group_id] if is_named else []
            if verdict is None:
                kept.append(group)
                continue
            selection.drop_filtered(verdict, group)
            # The worker goes on without being asked; the groups of a rollout are counted as the
            # synchronous one fetches them.
            remaining -= 1
            if remaining < target:
                remaining += selection.config.fetch_size
        report_progress(
            "generate", len(kept) * selection.config.group_size, selection.failures.total
        )
        if len(kept) < target and not completed:
            _check_alive(worker, rollout_id, num_kept=len(kept), target=target)
            await asyncio.sleep(min(0.05, worker.poll_interval))
    logger.info(
        "rollout %d: %d groups taken in %.1f s", rollout_id, target, time.monotonic() - started
    )
    output = selection.output(kept)
    commit = getattr(data_buffer, "commit", None)
    if commit is not None:
        with _buffer_lock(worker):
            commit(rollout_id, used_ids)
    with _buffer_lock(worker):
        selection.process_all(seen, data_buffer)
    return output


def _give_back(worker: AsyncRolloutWorker, data_buffer: DataSource, group: list) -> None:
    """Puts an unfinished group back into the data source, which the worker asks again."""
    with _buffer_lock(worker):
        data_buffer.add_samples([group])
        worker.is_exhausted = False


def _buffer_lock(worker: AsyncRolloutWorker) -> Any:
    return getattr(worker, "buffer_lock", None) or contextlib.nullcontext()


def _check_alive(
    worker: AsyncRolloutWorker, rollout_id: int, *, num_kept: int, target: int
) -> None:
    """Raises what ended the worker, or that nothing more will come: no wait without an end."""
    error = getattr(worker, "error", None)
    if error is not None:
        raise error
    thread = getattr(worker, "worker_thread", None)
    if thread is not None and not thread.is_alive() and not worker.queue_size():
        raise RolloutDataError(
            f"rollout {rollout_id}: the asynchronous worker was stopped; {num_kept} of {target} "
            "groups are kept."
        )
    is_idle = getattr(worker, "is_exhausted", False) and not worker.num_active
    if is_idle and not worker.queue_size():
        raise RolloutDataError(
            f"rollout {rollout_id}: the data source has no more prompts; {num_kept} of {target} "
            "groups are kept."
        )


def generate_rollout_fully_async(
    args: argparse.Namespace, rollout_id: int, data_buffer: DataSource, evaluation: bool = False
) -> RolloutFnTrainOutput:
    """One rollout's groups, taken from what the worker has finished. ConfigError (a ValueError) for
    evaluation.
    """
    if evaluation:
        raise ConfigError(
            "fully asynchronous rollout has no evaluation; give --eval-function-path for it."
        )
    return run(_collect(args, rollout_id, data_buffer))
