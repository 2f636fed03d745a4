"""Random states as plain values: after a restore, the numbers drawn since the state was taken are
drawn again."""

import json
import random

import numpy as np
import pytest
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from slime.accelerator import get_accelerator
from slime.backends.megatron_utils.rng_state import collect_rng_state, restore_rng_state

NUM_GPUS = 0


def draw():
    return (
        random.random(),
        float(np.random.rand()),
        float(torch.rand(1)),
        random.gauss(0, 1),
        float(np.random.randn()),
    )


def test_every_generator_goes_on_where_it_was():
    """Python's, numpy's and torch's generators continue through JSON, also in the middle of a pair
    of normal numbers."""
    get_accelerator().prepare_megatron()
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    draw()
    state = json.loads(json.dumps(collect_rng_state()))
    expected = [draw() for _ in range(3)]
    random.seed(7), np.random.seed(8), torch.manual_seed(9)
    restore_rng_state(state)
    assert [draw() for _ in range(3)] == expected


def test_megatrons_named_streams_are_part_of_the_state():
    """The state includes Megatron's named streams, such as the dropout of a tensor-parallel
    rank."""
    get_accelerator().prepare_megatron()
    tracker = get_cuda_rng_tracker()
    before = tracker.get_states()
    try:
        tracker.set_states({"model-parallel-rng": torch.Generator().manual_seed(5).get_state()})
        state = json.loads(json.dumps(collect_rng_state()))
        tracker.set_states({"model-parallel-rng": torch.Generator().manual_seed(6).get_state()})
        restore_rng_state(state)
        assert torch.equal(
            tracker.get_states()["model-parallel-rng"], torch.Generator().manual_seed(5).get_state()
        )
    finally:
        tracker.set_states(before)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
