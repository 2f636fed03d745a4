"""Process groups beside the main one, and whitening over ranks."""

from __future__ import annotations

import datetime
import os
import socket
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

T = TypeVar("T")
_GLOO_GROUP: dist.ProcessGroup | None = None


def stay_on_loopback() -> None:
    """Lets the communication of this process listen on the loopback interface, where the
    environment does not name another one. For runs on one machine.
    """
    for _, name in socket.if_nameindex():
        if name.startswith("lo"):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)
            return


def loopback_store(
    host: str, port: int, rank: int, world_size: int, timeout: datetime.timedelta
) -> dist.TCPStore:
    """The store at which ranks of one machine meet; rank 0 listens on `host` alone, where torch's
    own would listen on all interfaces. `OSError` where the port is taken.
    """
    descriptor = None
    if rank == 0:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        descriptor = socket.create_server((host, port), family=family).detach()
    return dist.TCPStore(host, port, world_size, rank == 0, timeout, master_listen_fd=descriptor)


def init_gloo_group() -> dist.ProcessGroup:
    """Returns a gloo group over the whole world, made on the first call. Every rank
    must call it.
    """
    global _GLOO_GROUP
    if _GLOO_GROUP is None:
        _GLOO_GROUP = dist.new_group(backend="gloo")
    return _GLOO_GROUP


def set_gloo_group(group: dist.ProcessGroup | None) -> None:
    """Makes `group` the one that `get_gloo_group` returns; None forgets it."""
    global _GLOO_GROUP
    _GLOO_GROUP = group


def get_gloo_group() -> dist.ProcessGroup:
    """Returns the gloo group over the whole world. RuntimeError before `init_gloo_group`."""
    if _GLOO_GROUP is None:
        raise RuntimeError(
            "there is no gloo group yet: call init_gloo_group() on every rank first."
        )
    return _GLOO_GROUP


def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: datetime.timedelta | None = None,
    world_size: int = -1,
    rank: int = -1,
    store: dist.Store | None = None,
    group_name: str | None = None,
    pg_options: object = None,
) -> dist.ProcessGroup:
    """Returns a further main process group, independent of the default one (for example trainer
    rank 0 with the engines).

    Either `store` with `world_size` and `rank`, or `init_method` ("env://" by default). Groups of
    one store do not meet: keys carry `group_name`.
    """
    if store is not None and init_method is not None:
        raise ValueError("give init_process_group either a store or an init_method, not both.")
    timeout = timeout or dist.distributed_c10d.default_pg_timeout
    if store is None:
        store, rank, world_size = next(
            dist.rendezvous(init_method or "env://", rank, world_size, timeout=timeout)
        )
        store.set_timeout(timeout)
        store = dist.PrefixStore(cast(str, group_name), store)  # torch refuses None itself
    elif world_size <= 0 or rank < 0:
        raise ValueError(
            f"a store needs world_size > 0 and rank >= 0, got world_size={world_size}, rank={rank}."
        )
    group, _ = dist.distributed_c10d._new_process_group_helper(
        world_size,
        rank,
        [],
        dist.Backend(backend) if backend else dist.Backend("undefined"),
        store,
        group_name=cast(Any, group_name),  # a type of its own in newer versions of torch
        backend_options=pg_options,
        timeout=timeout,
    )
    dist.distributed_c10d._world.pg_group_ranks[group] = {
        index: index for index in range(world_size)
    }
    return group


def _sum_over_ranks(values: torch.Tensor, process_group: dist.ProcessGroup | None) -> torch.Tensor:
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(values, group=process_group)
    return values


def distributed_masked_whiten(
    values: torch.Tensor,
    mask: torch.Tensor,
    process_group: dist.ProcessGroup | None = None,
    shift_mean: bool = True,
    epsilon: float = 1e-8,
    *,
    allow_empty: bool = False,
) -> torch.Tensor:
    """Returns (values - mean) / sqrt(variance + epsilon), or values / sqrt(variance + epsilon)
    without `shift_mean`; shape and dtype of `values`.

    Mean and variance are over the positions with mask 1 on all ranks of `process_group` (None = the
    world); the variance has Bessel's correction from two positions on. Two passes in fp64: squares
    of large values with a small spread do not cancel. Every rank must call it, also with no values.
    When no position at all is unmasked, every rank raises ValueError, or with `allow_empty` every
    rank returns `values` as they are.
    """
    trained = mask.to(values.device) != 0
    selected = torch.where(trained, values, 0).to(torch.float64)
    totals = _sum_over_ranks(
        torch.stack([trained.sum().to(torch.float64), selected.sum()]), process_group
    )
    count, total = totals.tolist()
    if count == 0 and allow_empty:
        return values
    if count == 0:
        raise ValueError(
            "cannot whiten: no position has mask 1 on any rank (global mask sum is 0). Every "
            "response of this step is masked; "
            "check the loss masks and the filters."
        )
    mean = total / count
    squares = torch.where(trained, selected - mean, 0.0).square().sum().reshape(1)
    variance = _sum_over_ranks(squares, process_group) / max(count - 1, 1)
    scale = torch.rsqrt(variance + epsilon)
    shifted = values.to(torch.float64) - (mean if shift_mean else 0.0)
    return (shifted * scale).to(values.dtype)


class Attempts:
    """One rank's steps between collectives. The first failure is kept, steps after it do not run,
    and the rank takes part in every collective all the same.
    """

    def __init__(self) -> None:
        self.failure: Exception | None = None

    def __call__(self, step: Callable[[], T], otherwise: T) -> T:
        """What the step returns, or `otherwise`."""
        if self.failure is None:
            try:
                return step()
            except Exception as error:  # noqa: BLE001 - the other ranks wait, whatever it is
                self.failure = error
        return otherwise

    @property
    def words(self) -> str:
        """The failure, for other ranks; "" without one."""
        return f"{type(self.failure).__name__}: {self.failure}" if self.failure else ""


def gather_to_source(
    value: object, *, size: int, source_rank: int, group: dist.ProcessGroup
) -> list[Any] | None:
    """Every rank's `value`, in group order, on global rank `source_rank`; None on the others.
    Called by all ranks of the group.
    """
    is_source = dist.get_rank() == source_rank
    gathered: list[Any] | None = [None] * size if is_source else None
    dist.gather_object(value, gathered, dst=source_rank, group=group)
    return gathered
