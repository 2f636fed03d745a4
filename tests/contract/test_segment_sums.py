"""Per-sample sums in float64, at every length, whatever stands at masked positions; and how a
batch's fields become what is summed.
"""

import math
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.data.batch import RolloutBatch, Stage
from slime.data.ragged import Ragged
from slime.exceptions import RolloutDataError
from slime.metrics import contributions as c
from slime.metrics.contributions import SampleTokens, SegmentPlan, merge_all, segment_sums
from slime.metrics.train_metrics import flat_tokens, phase_contributions

NUM_GPUS = 0
BLOCK = 16  # small, so that samples of a few tokens cross its bounds

lengths = st.lists(st.sampled_from([0, 1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK]), max_size=12)


def draw_values(size, seed):
    """float32 of both signs and magnitudes from 2**-40 to 2**40, so that large ones cancel and
    small ones must survive.
    """
    rng = np.random.default_rng(seed)
    return (rng.normal(size=size) * 2.0 ** rng.integers(-40, 40, size)).astype(
        np.float32
    ), rng.random(size) < 0.5


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), lengths_N=lengths, masked=st.booleans())
def test_sums_are_those_of_exact_arithmetic_and_masked_nan_changes_nothing(seed, lengths_N, masked):
    """Sums equal math.fsum over each sample's trained values to float64, with NaN at masked
    positions; lengths 0, 1 and around a block's bound."""
    values, mask = draw_values(sum(lengths_N), seed)
    mask = mask if masked else None
    if masked:
        values[~mask] = np.nan
    with mock.patch.object(c, "BLOCK_TOKENS", BLOCK):
        plan = SegmentPlan(lengths_N)
    sums = segment_sums(values, plan, mask)
    bounds = np.concatenate(([0], np.cumsum(lengths_N))).astype(int)
    for low, high, found in zip(bounds[:-1], bounds[1:], sums, strict=True):
        kept = values[low:high] if mask is None else values[low:high][mask[low:high]]
        exact = math.fsum(kept.tolist())
        # the bound of any order of float64 additions: one rounding each (Higham, Accuracy and
        # Stability, 4.4); float32 is 5e8 times off
        assert abs(found - exact) <= len(kept) * 2.0**-53 * math.fsum(np.abs(kept).tolist()), (
            low,
            high,
        )


def test_float32_rounding_does_not_enter():
    """2**20 terms of 1 + 2**-23: the last bit of each is an eighth in the sum, which a float32 sum
    of this size would round away.
    """
    values = np.full(2**20, 1 + 2.0**-23, dtype=np.float32)
    assert segment_sums(values, SegmentPlan([2**20])).tolist() == [2**20 + 2.0**-3]


def test_more_or_fewer_values_than_the_samples_have_is_an_error():
    """A number of values that does not fit the samples is an error."""
    with pytest.raises(
        ValueError, match="4 values where the samples of this rank have 5 response tokens"
    ):
        segment_sums(np.zeros(4, np.float32), SegmentPlan([2, 3]))


def test_memory_seen_twice_is_summed_once_and_other_memory_is_not_mistaken_for_it():
    """Memory seen twice, as advantages and returns of a group estimator, is summed once; another
    array at a reused address is summed anew."""
    tokens = SampleTokens(SegmentPlan([2, 3]), None, np.array([2.0, 3.0]), np.array([2.0, 3.0]))
    flat = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    first = tokens.masked_sums(flat.numpy())
    assert tokens.masked_sums(flat.numpy()) is first and first.tolist() == [3.0, 12.0]
    for factor in range(2, 8):
        assert tokens.masked_sums((flat * factor).numpy()).tolist() == [3.0 * factor, 12.0 * factor]
    every_second = torch.arange(10.0)[::2].numpy()
    assert tokens.masked_sums(every_second).tolist() == [2.0, 18.0]
    assert tokens.masked_sums(torch.arange(5.0).numpy()).tolist() == [1.0, 9.0]
    ten = np.arange(10, dtype=np.float32)
    assert tokens.masked_sums(ten[:5]).tolist() == [1.0, 9.0]
    # the same first address, other steps
    assert tokens.masked_sums(ten[::2]).tolist() == [2.0, 18.0]
    # and the same steps, other numbers
    assert tokens.masked_sums(ten[:5].view(np.int32)).tolist() != [1.0, 9.0]


def test_what_rounding_lost_travels_with_a_ranks_sum():
    """A rank's sum carries its rounding error: of 1e16 + 1 the 1 remains when another rank has
    -1e16."""
    parts = [c.total([1e16, 1.0]), c.total([-1e16])]
    assert (parts[0].total, parts[0].residue) == (1e16, 1.0)
    assert c.merge(parts) == {"": 1.0}
    assert c.merge([c.mean([1e16, 1.0], 1), c.mean([-1e16], 1)]) == {"": 0.5}


def test_values_for_more_or_fewer_tokens_than_there_are_are_refused():
    """One value too many is refused, though the sums of the first samples would be right."""
    for count in (2, 4):
        with pytest.raises(
            ValueError,
            match=f"{count} values where the samples of this rank have 3 response tokens",
        ):
            segment_sums(np.zeros(count), SegmentPlan([1, 2]))


def test_a_value_that_is_no_number_leaves_a_weighted_mean_with_its_weight():
    """A NaN leaves a weighted mean with its weight: (1 * 1 + 4 * 3) / (1 + 3) = 3.25; with the
    weight kept it would be 1.3."""
    assert c.merge([c.weighted_mean([1.0, math.nan, 4.0], [1.0, 6.0, 3.0])]) == {"": 3.25}


def test_a_length_at_a_quarters_end_belongs_to_that_quarter():
    """In quarters of (0, 8], 1 and 2 are in the first, 4 ends the second, 5 begins the third, 8
    ends the fourth; 9 is above the maximum."""
    shares = [c.merge([part])[""] for part in c.length_share_by_quarter([1, 2, 4, 5, 8, 9], 8)]
    assert shares == [2 / 6, 1 / 6, 1 / 6, 2 / 6]


def test_ranks_that_report_the_same_samples_share_one_count():
    """Two samples of 1 and 3 trained tokens are one rollout; two context-parallel ranks report
    them, each with its own tokens.
    """
    values = np.array([4.0, 1.0, 2.0, 3.0])
    for copies in (1, 2):
        tokens = SampleTokens(
            SegmentPlan([1, 3]), None, np.array([1.0, 3.0]), np.array([4.0, 4.0]), copies=copies
        )
        parts = (
            tokens.rollout_mean(values),
            tokens.token_mean(values),
            tokens.sample_mean(values, np.array([True, True])),
        )
        assert [part.total for part in parts] == [4 / 4 + 6 / 4, 10, 4 / 1 + 6 / 3]
        assert [part.count for part in parts] == [1 / copies, 4 / copies, 2 / copies]
    one = SampleTokens(SegmentPlan([1, 3]), None, np.array([1.0, 3.0]), np.array([4.0, 4.0]))
    chosen = one.sample_mean(values, np.array([False, True]), sign=-1)
    assert (chosen.total, chosen.count) == (-2, 1)


# --- fields of a batch ----------------------------------------------------------------------------


def batch_of(values, kind):
    """A rank's batch with this `kl` per sample."""
    data: dict = {
        "loss_masks": [torch.ones(len(v), dtype=torch.int32) for v in values],
        "response_lengths": [len(v) for v in values],
        "kl": values if kind is list else Ragged.of_tensors(values),
    }
    return RolloutBatch({**data, "partition": list(range(len(values)))}, stage=Stage.LOCAL)


@pytest.mark.parametrize("kind", (list, Ragged))
def test_an_entry_that_a_hook_replaced_is_what_the_metric_shows(kind):
    """A metric shows a hook's edit of the list, in place or by a new entry."""
    batch = batch_of([torch.tensor([1.0]), torch.tensor([2.0, 4.0])], kind)
    batch["kl"][0] = torch.tensor([7.0])
    batch["kl"][1][0] = 6.0
    assert merge_all([phase_contributions(batch)])["kl"] == (7.0 + 5.0) / 2


def test_one_column_on_the_cpu_is_read_where_it_is():
    """A column on the CPU is read without a copy and without making its list."""
    batch = batch_of([torch.tensor([1.0]), torch.tensor([2.0, 4.0])], Ragged)
    flat = flat_tokens(batch, "kl", np.array([1, 2]))
    assert flat.ctypes.data == batch.raw("kl").values.data_ptr() and batch.raw("kl")._list is None


@pytest.mark.parametrize("kind", (list, Ragged))
def test_a_sample_with_another_length_is_named_though_the_total_fits(kind):
    """Two samples with exchanged lengths, whose total fits, are refused."""
    batch = batch_of([torch.zeros(3), torch.zeros(2)], kind)
    with pytest.raises(
        RolloutDataError, match="kl has 3 values for the 2 response tokens of the sample at 0"
    ):
        flat_tokens(batch, "kl", np.array([2, 3]))
    with pytest.raises(RolloutDataError, match="kl has 2 entries where this rank has 1 samples"):
        flat_tokens(batch, "kl", np.array([5]))


def test_lists_of_two_precisions_and_of_bfloat16_lose_nothing():
    """float64 entries beside float32 ones keep their precision, and bfloat16, which numpy lacks, is
    read."""
    mixed = batch_of([torch.tensor([1.0]), torch.tensor([1 / 3, 2.0], dtype=torch.float64)], list)
    assert flat_tokens(mixed, "kl", np.array([1, 2])).tolist() == [1.0, 1 / 3, 2.0]
    halves = batch_of(list(torch.tensor([0.5, 1.5, 2.5], dtype=torch.bfloat16).split([1, 2])), list)
    assert flat_tokens(halves, "kl", np.array([1, 2])).tolist() == [0.5, 1.5, 2.5]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
