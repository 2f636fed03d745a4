"""Where the tokens of a packed row are: positions and attention buckets, with and without context
parallelism.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.data.packed_plan import PackedPlan, packed_plan
from slime.exceptions import RolloutDataError

NUM_GPUS = 0


def _plan(lengths, cp_size=1, cp_rank=0):
    return PackedPlan(
        np.array(lengths), cp_size=cp_size, cp_rank=cp_rank, device=torch.device("cpu")
    )


def test_positions_start_again_with_every_sequence():
    """Rotary positions start at 0 with every sequence of the row."""
    assert _plan([3, 1, 2]).positions_T.tolist() == [0, 1, 2, 0, 0, 1]


def test_context_parallel_ranks_hold_mirrored_chunks():
    """8 tokens on 2 ranks are 4 chunks of 2: rank 0 holds chunks 0 and 3, rank 1 holds chunks 1 and
    2.
    """
    assert _plan([8, 4], 2, 0).positions_T.tolist() == [0, 1, 6, 7, 0, 3]
    assert _plan([8, 4], 2, 1).positions_T.tolist() == [2, 3, 4, 5, 1, 2]


def test_a_length_that_does_not_divide_into_chunks_is_an_error():
    """6 tokens on 2 ranks, chunks of one and a half, are an error."""
    with pytest.raises(RolloutDataError, match="6 tokens .* multiple of 4"):
        _plan([8, 6], 2, 0)


def test_equal_lengths_need_no_gather():
    """Sequences of equal length need no gather."""
    plan = _plan([5, 5, 5])
    assert plan.restore_T is None
    assert plan.buckets[0].query_rows is None and plan.buckets[0].shape == (3, 5)


def test_a_long_sequence_does_not_pad_the_short_ones():
    """A long sequence does not pad the short ones: 30 of 8 tokens padded to 1000 would cost a
    hundred times the work."""
    plan = _plan([8] * 30 + [1000, 600, 400])
    assert [bucket.shape for bucket in plan.buckets] == [(2, 1000), (1, 400), (30, 8)]


def test_equal_boundaries_share_one_plan():
    """Rows with equal boundaries share one plan, as those of the reference, log-prob and training
    pass do."""
    first, second = (torch.tensor([0, 3, 8], dtype=torch.int32) for _ in range(2))
    assert packed_plan(first, cp_size=1, cp_rank=0) is packed_plan(second, cp_size=1, cp_rank=0)
    assert packed_plan(first, cp_size=1, cp_rank=0) is not packed_plan(
        torch.tensor([0, 4, 8]), cp_size=1, cp_rank=0
    )
    bounds = torch.tensor([0, 8])
    by_rank = [
        packed_plan(bounds, cp_size=2, cp_rank=rank).positions_T.tolist() for rank in (0, 1, 0)
    ]
    assert by_rank == [[0, 1, 6, 7], [2, 3, 4, 5], [0, 1, 6, 7]]


def test_angles_are_kept_for_the_layers_and_made_again_for_other_ones():
    """Rotary angles are kept for all layers and computed again for other frequencies, scale or
    type."""
    plan, radians = _plan([2, 1]), torch.arange(3.0).view(3, 1, 1, 1)
    cos, sin = plan.rotary_tables(radians, 1.0, torch.float32)
    assert torch.equal(sin.flatten(), torch.tensor([0.0, 1.0, 0.0]).sin()) and torch.equal(
        cos.flatten(), torch.tensor([0.0, 1.0, 0.0]).cos()
    )
    assert plan.rotary_tables(radians, 1.0, torch.float32)[0] is cos
    assert torch.equal(
        plan.rotary_tables(2 * radians, 1.0, torch.float32)[1].flatten(),
        torch.tensor([0.0, 2.0, 0.0]).sin(),
    )
    assert torch.equal(
        plan.rotary_tables(radians, 3.0, torch.float32)[0].flatten(),
        3 * torch.tensor([0.0, 1.0, 0.0]).cos(),
    )
    assert plan.rotary_tables(radians, 3.0, torch.bfloat16)[0].dtype == torch.bfloat16


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 200), min_size=1, max_size=12).filter(any))
def test_every_token_comes_back_from_its_bucket(lengths):
    """Gathering into buckets and restoring is the identity for any lengths, empty sequences
    included."""
    plan = _plan(lengths)
    tokens = torch.arange(sum(lengths))
    flat = [
        tokens if bucket.query_rows is None else tokens[bucket.query_rows].flatten()
        for bucket in plan.buckets
    ]
    restored = torch.cat(flat)
    restored = restored if plan.restore_T is None else restored[plan.restore_T]
    assert torch.equal(restored, tokens)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=6), st.sampled_from([2, 3]))
def test_keys_of_all_ranks_line_up_by_position(chunk_counts, cp_size):
    """Key p of a sequence is the token at position p, whichever rank holds it; a query sees keys up
    to its own position."""
    lengths = [count * 2 * cp_size for count in chunk_counts]
    plans = [_plan(lengths, cp_size, rank) for rank in range(cp_size)]
    # The gathered tokens name themselves: 1000 * sequence + position.
    names = [
        torch.repeat_interleave(torch.arange(len(lengths)) * 1000, torch.tensor(lengths) // cp_size)
        + plan.positions_T
        for plan in plans
    ]
    gathered = torch.cat(names)
    for plan, local in zip(plans, names, strict=True):
        for bucket in plan.buckets:
            queries = (
                local.view(bucket.shape) if bucket.query_rows is None else local[bucket.query_rows]
            )
            keys = gathered[bucket.key_rows]
            mask = bucket.mask.expand(bucket.shape[0], 1, -1, -1)[:, 0]
            for row, sequence in enumerate((queries[:, 0] // 1000).tolist()):
                length = lengths[sequence]
                assert keys[row, :length].tolist() == list(
                    range(sequence * 1000, sequence * 1000 + length)
                )
                for column in range(length // cp_size):
                    position = int(queries[row, column]) % 1000
                    assert mask[row, column].nonzero().flatten().tolist() == list(
                        range(position + 1)
                    )


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
