"""The helper of every distributed test: it returns results by rank and turns a hang into stacks."""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pytest
import torch
import torch.distributed as dist
from support.distributed import DistributedFailure, run_distributed

NUM_GPUS = 0


def _sum_over_ranks(rank, world_size, offset):
    value = torch.tensor([rank + offset])
    dist.all_reduce(value)
    return rank, value


def _one_rank_raises(rank, world_size):
    if rank == 1:
        raise ValueError("rank one is out")
    dist.barrier()


def _sleep_on_rank_0(rank, world_size):
    if rank == 0:
        time.sleep(60)


def test_results_come_back_in_rank_order_from_one_group():
    """Results come back in rank order, and collectives run: 10 + 11 = 21 on both ranks."""
    (rank0, sum0), (rank1, sum1) = run_distributed(_sum_over_ranks, 2, 10)
    assert (rank0, rank1) == (0, 1)
    assert sum0.item() == sum1.item() == 21


def test_a_rank_that_raises_is_named_and_the_waiting_rank_shows_where_it_waits():
    """A rank that raises is named, and a waiting rank's stack shows where it waits."""
    started = time.monotonic()
    with pytest.raises(DistributedFailure, match="rank one is out") as failure:
        run_distributed(_one_rank_raises, 2, timeout=60)
    assert "_one_rank_raises" in str(failure.value)
    assert time.monotonic() - started < 45


def test_a_hanging_rank_is_killed_with_its_stack():
    """A hanging rank is killed, and the message has the line that hangs."""
    with pytest.raises(DistributedFailure, match="rank 0") as failure:
        run_distributed(_sleep_on_rank_0, 1, timeout=8)
    assert "_sleep_on_rank_0" in str(failure.value)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
