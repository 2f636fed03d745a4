"""Per-sample sums in float64: the same from arrays, lists and views of one storage, at every length, whatever stands at masked positions."""

import math
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.observability import contributions as c
from slime.observability.contributions import SampleTokens, SegmentPlan, borrow_flat, segment_sums

NUM_GPUS = 0
BLOCK = 16  # small, so that samples of a few tokens cross its bounds

lengths = st.lists(st.sampled_from([0, 1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK]), max_size=12)


def draw_values(size, seed):
    """float32 of both signs and magnitudes from 2**-40 to 2**40, so that large ones cancel and small ones must survive."""
    rng = np.random.default_rng(seed)
    return (rng.normal(size=size) * 2.0 ** rng.integers(-40, 40, size)).astype(np.float32), rng.random(size) < 0.5


def split_views(values, lengths_N):
    """As the training code leaves them: one tensor, split by sample."""
    return list(torch.from_numpy(values).split(lengths_N)) if lengths_N else []


def micro_batch_views(values, lengths_N):
    """Two samples per storage, as the log-prob pass leaves them."""
    whole = split_views(values, lengths_N)
    return [v for i in range(0, len(whole), 2) for v in torch.cat(whole[i : i + 2]).split(lengths_N[i : i + 2])]


def clones(values, lengths_N):
    return [view.clone() for view in split_views(values, lengths_N)]


LAYOUTS = {
    "array": lambda values, lengths_N: values,
    "split": split_views,
    "micro-batches": micro_batch_views,
    "clones": clones,
    "gradient": lambda values, lengths_N: [t.requires_grad_() for t in clones(values, lengths_N)],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), lengths_N=lengths, masked=st.booleans())
def test_sums_are_those_of_exact_arithmetic_and_masked_nan_changes_nothing(layout, seed, lengths_N, masked):
    """math.fsum over each sample's trained values, to what float64 can hold; lengths 0, 1 and around a block's bound."""
    values, mask = draw_values(sum(lengths_N), seed)
    mask = mask if masked else None
    if masked:
        values[~mask] = np.nan
    with mock.patch.object(c, "BLOCK_TOKENS", BLOCK):
        plan = SegmentPlan(lengths_N)
    sums = segment_sums(LAYOUTS[layout](values.copy(), lengths_N), plan, mask)
    bounds = np.concatenate(([0], np.cumsum(lengths_N))).astype(int)
    for low, high, found in zip(bounds[:-1], bounds[1:], sums, strict=True):
        kept = values[low:high] if mask is None else values[low:high][mask[low:high]]
        exact = math.fsum(kept.tolist())
        # the bound of any order of float64 additions: one rounding each (Higham, Accuracy and Stability, 4.4); float32 is 5e8 times off
        assert abs(found - exact) <= len(kept) * 2.0**-53 * math.fsum(np.abs(kept).tolist()), (low, high)


def test_float32_rounding_does_not_enter():
    """2**20 terms of 1 + 2**-23: the last bit of each is an eighth in the sum, which a float32 sum of this size would round away."""
    values = np.full(2**20, 1 + 2.0**-23, dtype=np.float32)
    assert segment_sums(values, SegmentPlan([2**20])).tolist() == [2**20 + 2.0**-3]


def test_only_tensors_in_order_and_without_gaps_are_taken_as_one():
    """A permuted, a shifted or a strided list has the same storage and other values: it must be gathered."""
    flat = torch.arange(12, dtype=torch.float32)
    plan = SegmentPlan([4, 0, 4, 4])
    a, nothing, b, d = flat.split([4, 0, 4, 4])
    borrowed = borrow_flat([a, nothing, b, d], plan)
    assert isinstance(borrowed, np.ndarray) and borrowed.ctypes.data == flat.data_ptr()
    repeated = flat[4:5].expand(4)
    same_bits = flat.view(torch.int32)[4:8]
    for wrong, sums in (
        ([b, nothing, a, d], [22, 0, 6, 38]),
        ([a, nothing, d, d], [6, 0, 38, 38]),
        ([a, nothing, repeated, d], [6, 0, 16, 38]),
        ([flat[1:5], nothing, b, d], [10, 0, 22, 38]),
        ([a, nothing, same_bits, d], [6, 0, float(same_bits.double().sum()), 38]),
    ):
        assert borrow_flat(wrong, plan) is wrong
        assert segment_sums(wrong, plan).tolist() == sums


def test_lists_of_two_precisions_and_of_bfloat16_lose_nothing():
    """float64 entries beside float32 ones are not rounded to them; numpy has no bfloat16."""
    plan = SegmentPlan([1, 2])
    mixed = [torch.tensor([1.0]), torch.tensor([1 / 3, 2.0], dtype=torch.float64)]
    assert segment_sums(mixed, plan).tolist() == [1.0, 1 / 3 + 2.0]
    halves = torch.tensor([0.5, 1.5, 2.5], dtype=torch.bfloat16)
    assert segment_sums(list(halves.split([1, 2])), plan).tolist() == [0.5, 4.0]


@pytest.mark.parametrize("make", (split_views, clones))
def test_a_sample_with_another_length_is_named_though_the_total_fits(make):
    """Two samples whose lengths are exchanged have the right total and each other's tokens."""
    with pytest.raises(ValueError, match="3 values for the 2 response tokens of the sample at 0"):
        segment_sums(make(np.zeros(5, np.float32), [3, 2]), SegmentPlan([2, 3]))
    with pytest.raises(ValueError, match="1 entries where this rank has 2 samples"):
        segment_sums(make(np.zeros(5, np.float32), [5]), SegmentPlan([2, 3]))


def test_memory_seen_twice_is_summed_once_and_other_memory_is_not_mistaken_for_it():
    """Advantages and returns of a group estimator are one tensor; a temporary's address may be used again."""
    tokens = SampleTokens(SegmentPlan([2, 3]), None, np.array([2.0, 3.0]), np.array([2.0, 3.0]))
    flat = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    first = tokens.masked_sums(list(flat.split([2, 3])))
    assert tokens.masked_sums(list(flat.split([2, 3]))) is first and first.tolist() == [3.0, 12.0]
    for factor in range(2, 8):
        assert tokens.masked_sums((flat * factor).numpy()).tolist() == [3.0 * factor, 12.0 * factor]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
