"""`run_distributed`: real processes, a real gloo group, and a watchdog, so that a test of
collectives fails with stacks instead of hanging.
"""

from __future__ import annotations

import ctypes
import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

# Ranks that wait for a failed rank get this long to fail by themselves before their stacks are
# dumped.
GRACE_S = 3.0


class DistributedFailure(AssertionError):
    """A rank raised, died or hung. The message holds every rank's traceback or stack."""


def run_distributed(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120
) -> list[Any]:
    """Returns `[fn(rank, world_size, *args) for rank in range(world_size)]`, each run in its own
    process of one gloo default group.

    `fn` must be a module-level function of an importable module; its arguments and results must
    pickle. Raises `DistributedFailure` with the traceback of every rank that raised, and with the
    Python stacks of every rank that was still running `timeout` seconds after the start, or
    `GRACE_S` seconds after another rank failed.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="run_distributed_") as folder:
        processes, pipes = [], []
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_main,
                args=(fn, rank, world_size, args, folder, timeout, sender),
                daemon=True,
            )
            process.start()
            sender.close()
            processes.append(process)
            pipes.append(receiver)
        try:
            outcomes = _collect(processes, pipes, timeout)
            stacks = _dump_and_kill(processes, folder)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()
    failures = [
        f"--- rank {rank}: {text}\n{stacks.get(rank, '')}"
        for rank, (ok, text) in enumerate(outcomes)
        if not ok
    ]
    if failures:
        raise DistributedFailure(
            f"{len(failures)} of {world_size} ranks failed in {fn.__name__}\n" + "\n".join(failures)
        )
    return [value for _ok, value in outcomes]


def _collect(processes: list[Any], pipes: list[Any], timeout: float) -> list[tuple[bool, Any]]:
    """One `(ok, result or text)` per rank; stops waiting at the deadline, which the first failure
    shortens to `GRACE_S`.
    """
    deadline = time.monotonic() + timeout
    outcomes: dict[int, tuple[bool, Any]] = {}
    rank_of_pipe = {id(pipe): rank for rank, pipe in enumerate(pipes)}
    while len(outcomes) < len(pipes) and (left := deadline - time.monotonic()) > 0:
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in outcomes]
        for pipe in multiprocessing.connection.wait(waiting, timeout=left):
            rank = rank_of_pipe[id(pipe)]
            try:
                ok, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                processes[rank].join(5)
                ok, value = False, f"died without a result, exit code {processes[rank].exitcode}"
            outcomes[rank] = (ok, value)
            if not ok:
                deadline = min(deadline, time.monotonic() + GRACE_S)
    return [
        outcomes.get(rank, (False, "was still running; its stacks follow"))
        for rank in range(len(pipes))
    ]


def _dump_and_kill(processes: list[Any], folder: str) -> dict[int, str]:
    """Stacks of the ranks that still run, by rank; those ranks are killed."""
    for process in processes:
        process.join(0.5)
    running = {rank: process for rank, process in enumerate(processes) if process.is_alive()}
    for process in running.values():
        os.kill(process.pid, signal.SIGUSR1)
    if running:
        time.sleep(0.3)
    for process in running.values():
        process.kill()
    return {rank: _stacks_of(Path(folder) / f"stacks_{rank}.txt") for rank in running}


def _stacks_of(file: Path) -> str:
    """The stacks that a rank wrote; a rank that was still importing its test module has not opened
    the file.
    """
    return (
        file.read_text()
        if file.exists()
        else "it had not begun: its interpreter was still starting"
    )


def _rank_main(
    fn: Callable[..., Any],
    rank: int,
    world_size: int,
    args: tuple,
    folder: str,
    timeout: float,
    sender: Any,
) -> None:
    stacks = open(Path(folder) / f"stacks_{rank}.txt", "w")  # noqa: SIM115 - must stay open for the signal handler
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    if sys.platform == "linux":
        # A rank must not outlive a test process that was killed.
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout),
        )
        # Plain pickle: the reductions of torch.multiprocessing would tie a tensor to this process's
        # life.
        message = pickle.dumps((True, fn(rank, world_size, *args)))
        sender.send_bytes(message)
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:  # noqa: BLE001 - whatever ended the rank is the test's result
        sender.send_bytes(pickle.dumps((False, traceback.format_exc())))
    # Skips interpreter teardown, where leftover gloo threads may block.
    stacks.flush()
    os._exit(0)
