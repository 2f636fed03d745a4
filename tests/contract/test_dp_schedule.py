"""The schedule: which rank trains which sample, in micro-batches that are equally many on every
rank."""

import dataclasses
import random
import time
import types

import numpy as np
import pytest

from slime.data.flops import FlopsModel, calculate_fwd_flops
from slime.data.packing import minimum_bins, pack_balanced
from slime.data.partitioning import (
    expand_bins_by_splitting,
    first_fit_pack,
    get_reverse_idx,
    get_seqlen_balanced_partitions,
    greedy_partition,
    karmarkar_karp,
)
from slime.data.schedule import (
    ScheduleConfig,
    build_dp_schedule,
    group_by_rollout,
    plan_schedule,
    plan_step_sizes,
)
from slime.exceptions import ConfigError

NUM_GPUS = 0

SIZES = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "vocab_size": 100,
    "ffn_hidden_size": 128,
    "num_experts": None,
    "num_layers": 2,
    "kv_channels": 16,
}


def bare_args(**changes):
    options = {
        "micro_batch_size": 1,
        "use_dynamic_batch_size": False,
        "max_tokens_per_gpu": None,
        "balance_data": False,
        "balance_by_flops": False,
    }
    return types.SimpleNamespace(**{**options, **SIZES, **changes})


def parallel(dp_size=1, *, cp_size=1, vpp_size=1, group=1):
    return {
        "dp_size": dp_size,
        "cp_size": cp_size,
        "vpp_size": vpp_size,
        "microbatch_group_size_per_vp_stage": group,
    }


def naive_first_fit(lengths, cap):
    bins, loads = [], []
    for i, length in enumerate(lengths):
        for k in range(len(bins)):
            if loads[k] + length <= cap:
                bins[k].append(i)
                loads[k] += length
                break
        else:
            bins.append([i])
            loads.append(length)
    return bins


def check_plan(plan, lengths, dp_size, cap=None):
    """The invariants every schedule has: one count of micro-batches per step, a disjoint cover,
    flattening indices, the cap.
    """
    covered = sorted(i for part in plan.partitions for i in part)
    assert covered == sorted(set(range(len(lengths))) - set(plan.dropped))
    for rank in range(dp_size):
        micro_batches = plan.micro_batch_indices[rank]
        assert len(micro_batches) == sum(plan.num_microbatches)
        assert [i for indices in micro_batches for i in indices] == list(
            range(len(plan.partitions[rank]))
        )
        for indices in micro_batches:
            tokens = sum(lengths[plan.partitions[rank][i]] for i in indices)
            assert cap is None or tokens <= cap or len(indices) == 1


# --- upstream's call ------------------------------------------------------------------------------


def test_the_pinned_example_of_balanced_data_holds():
    """The balanced result is the one that upstream's tests pin, tie-breaking and the final sort
    included."""
    partitions, micro_batches, counts, sizes = build_dp_schedule(
        bare_args(balance_data=True),
        parallel(2),
        [1, 2, 3, 4, 5, 7, 9, 10],
        global_batch_size=8,
        rollout_indices=list(range(8)),
    )
    assert partitions == [[1, 2, 5, 6], [0, 3, 4, 7]]
    assert (micro_batches[0], counts, sizes) == ([[0], [1], [2], [3]], [4], [8])


def test_less_than_one_step_is_refused_by_name():
    """A batch smaller than one step fails with upstream's assertion, which names num_rollouts."""
    with pytest.raises(AssertionError, match="num_rollouts"):
        build_dp_schedule(
            bare_args(), parallel(1), [1, 2, 3], global_batch_size=4, rollout_indices=[0, 1, 2]
        )


def test_first_fit_fills_in_given_order_and_static_blocks_are_consecutive():
    """First fit in the given order, by hand: cap 1000, lengths [900, 300, 700, 100, 1200, 50] ->
    bins {0,3}, {1,2}, {4}, {5}. Static blocks are consecutive."""
    assert first_fit_pack([900, 300, 700, 100, 1200, 50], 1000) == [[0, 3], [1, 2], [4], [5]]
    args = bare_args(use_dynamic_batch_size=True, max_tokens_per_gpu=1000)
    partitions, micro_batches, counts, _ = build_dp_schedule(
        args,
        parallel(2),
        [900, 300, 700, 100, 1200, 50],
        global_batch_size=6,
        rollout_indices=list(range(6)),
    )
    assert partitions == [[0, 3, 4], [1, 2, 5]]
    assert micro_batches == [[[0, 1], [2]], [[0, 1], [2]]] and counts == [2]
    partitions, *_ = build_dp_schedule(
        bare_args(micro_batch_size=2),
        parallel(2),
        [5] * 8,
        global_batch_size=8,
        rollout_indices=list(range(8)),
    )
    assert partitions == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_a_last_static_block_that_is_not_full_is_a_micro_batch_too():
    """Five samples in blocks of two are three micro-batches: the fifth one trains."""
    partitions, micro_batches, counts, _ = build_dp_schedule(
        bare_args(micro_batch_size=2),
        parallel(1),
        [5] * 5,
        global_batch_size=5,
        rollout_indices=list(range(5)),
    )
    assert (partitions, micro_batches, counts) == ([[0, 1, 2, 3, 4]], [[[0, 1], [2, 3], [4]]], [3])


def test_options_become_the_schedule_that_they_ask_for():
    """Each option reaches the schedule's config, those that balance by FLOPs with the model's
    sizes; a missing cap or size is refused."""
    config = ScheduleConfig.from_args(
        bare_args(micro_batch_packing="balanced"), parallel(2, cp_size=2)
    )
    assert (config.packing, config.balance_data, config.flops) == (
        "balanced",
        False,
        FlopsModel.from_args(bare_args()),
    )
    config = ScheduleConfig.from_args(bare_args(balance_by_flops=True), parallel(2))
    assert (
        config.balance_data
        and config.balance_by_flops
        and config.flops == FlopsModel.from_args(bare_args())
    )
    assert ScheduleConfig.from_args(bare_args(), parallel(2)).flops is None
    with pytest.raises(ConfigError, match="--use-dynamic-batch-size needs --max-tokens-per-gpu"):
        ScheduleConfig.from_args(bare_args(use_dynamic_batch_size=True), parallel(2))
    with pytest.raises(ConfigError, match="need the model's sizes"):
        ScheduleConfig.from_args(bare_args(balance_data=True, hidden_size=None), parallel(2))


def test_parts_of_equal_flops_are_not_parts_of_equal_tokens():
    """Balanced by squares, [6, 5, 4, 3, 2] splits into 36 + 9 = 25 + 16 + 4; by tokens into 6 + 4 =
    5 + 3 + 2."""
    config = ScheduleConfig(
        dp_size=1,
        align=1,
        token_cap=10,
        balance_by_flops=True,
        flops=FlopsModel(linear=0.0, quadratic=1.0),
    )
    plan = plan_schedule([6, 5, 4, 3, 2], range(5), step_sizes=[5], config=config)
    assert sorted(
        sorted(plan.partitions[0][i] for i in items) for items in plan.micro_batch_indices[0]
    ) == [[0, 3], [1, 2, 4]]


def test_context_parallel_size_widens_the_cap_and_vpp_aligns_the_count():
    """The cap is per GPU, so CP widens it; interleaved pipelines get a multiple of their group of
    micro-batches."""
    args = bare_args(use_dynamic_batch_size=True, max_tokens_per_gpu=50)
    _, micro_batches, counts, _ = build_dp_schedule(
        args, parallel(1, cp_size=2), [60, 40], global_batch_size=2, rollout_indices=[0, 1]
    )
    assert (micro_batches, counts) == ([[[0, 1]]], [1])  # 100 tokens are 50 on each of two GPUs
    args = bare_args(use_dynamic_batch_size=True, max_tokens_per_gpu=50)
    config = parallel(2, cp_size=2, vpp_size=2, group=4)
    partitions, micro_batches, counts, _ = build_dp_schedule(
        args, config, [60, 40, 30, 70], global_batch_size=4, rollout_indices=[0, 1, 2, 3]
    )
    assert counts == [4]
    assert sorted(i for part in partitions for i in part) == [0, 1, 2, 3]
    # 100 tokens fit two GPUs of 50; aligned to 2 * 4 = 8 micro-batches, so every sample is alone
    # and four are empty
    assert sum(1 for rank in micro_batches for indices in rank if not indices) == 4


def test_all_samples_of_a_rollout_stay_in_one_step():
    """Siblings share a loss denominator and therefore train in one step."""
    ids = [7, 3, 7, 5, 3, 9, 9, 9]
    assert group_by_rollout(ids) == [[0, 2], [1, 4], [3], [5, 6, 7]]
    plan = plan_schedule(
        [10] * 8, ids, step_sizes=[2, 2], config=ScheduleConfig(dp_size=1, align=1)
    )
    first = plan.num_microbatches[0]
    step_one = [
        plan.partitions[0][i] for indices in plan.micro_batch_indices[0][:first] for i in indices
    ]
    assert sorted(step_one) == [0, 1, 2, 4]


# --- ranks with less than others ------------------------------------------------------------------


def test_a_light_rank_runs_as_many_micro_batches_as_a_heavy_one():
    """Both ranks run the same number of micro-batches: dp 2, cap 1000, lengths [900, 900, 900, 100,
    100]."""
    for packing in ("first_fit", "balanced"):
        config = ScheduleConfig(dp_size=2, align=2, token_cap=1000, packing=packing)
        lengths = [900, 900, 900, 100, 100]
        plan = plan_schedule(lengths, range(5), step_sizes=[5], config=config)
        check_plan(plan, lengths, 2, cap=1000)
        assert plan.num_microbatches == [2]


@pytest.mark.parametrize(("samples", "dp_size"), [(3, 4), (1, 8), (9, 4), (206, 4)])
@pytest.mark.parametrize("packing", ["static", "first_fit", "balanced"])
def test_any_number_of_samples_spreads_over_any_number_of_ranks(samples, dp_size, packing):
    """3 rows on 4 ranks leave one rank with empty micro-batches, which still joins every
    collective."""
    cap = None if packing == "static" else 100
    config = ScheduleConfig(
        dp_size=dp_size,
        align=dp_size,
        token_cap=cap,
        packing="balanced" if packing == "balanced" else "first_fit",
    )
    lengths = [10 + i % 7 for i in range(samples)]
    plan = plan_schedule(lengths, range(samples), step_sizes=[samples], config=config)
    check_plan(plan, lengths, dp_size, cap=cap)
    if samples < dp_size:
        assert sum(not part for part in plan.partitions) == dp_size - samples
        assert plan.steps[0].num_empty >= dp_size - samples


# --- steps ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rollouts", "size", "expected", "keep", "sizes"),
    [
        (16, 8, 16, False, [8, 8]),
        (15, 8, 16, False, [8, 7]),  # one rejected: the planned two steps share what there is
        (9, 8, 16, False, [5, 4]),
        (1, 8, 16, False, [1]),
        (0, 8, 16, False, []),
        (10, 4, 10, False, [4, 4]),  # two trailing
        (10, 4, 10, True, [4, 4, 2]),
        (9, 4, 10, True, [4, 4, 1]),
        (255, 256, 256, False, [255]),
    ],
)
def test_steps_follow_from_counts_alone(rollouts, size, expected, keep, sizes):
    """Step sizes depend on the number of trainable rollouts alone, so marking a sample has the same
    steps as dropping it."""
    assert plan_step_sizes(rollouts, size, expected_rollouts=expected, keep_trailing=keep) == sizes


def test_trailing_rollouts_are_listed_or_trained_with_their_true_size():
    """Rollouts beyond the last full step are listed as dropped, or train in a last, smaller
    step."""
    config = ScheduleConfig(dp_size=2, align=2)
    plan = plan_schedule([5] * 10, range(10), step_sizes=[4, 4], config=config)
    assert plan.dropped == [8, 9] and plan.metrics()["schedule/dropped_samples"] == 2
    plan = plan_schedule([5] * 10, range(10), step_sizes=[4, 4, 2], config=config)
    assert plan.dropped == [] and plan.global_batch_sizes == [4, 4, 2]
    check_plan(plan, [5] * 10, 2)


def test_no_global_batch_size_is_an_error_that_says_so():
    """A global batch size of 0 is refused."""
    with pytest.raises(ConfigError, match="--global-batch-size"):
        plan_step_sizes(4, 0, expected_rollouts=4, keep_trailing=False)


# --- first fit ------------------------------------------------------------------------------------


def test_fast_first_fit_gives_naive_first_fits_bins():
    """The O(n log n) first fit gives the naive one's bins in the same order, also for lengths of 0,
    at the cap and above it."""
    rng = random.Random(0)
    for _ in range(300):
        lengths = [rng.randint(0, 30) for _ in range(rng.randint(0, 60))]
        cap = rng.randint(1, 25)
        assert first_fit_pack(lengths, cap) == naive_first_fit(lengths, cap)


def test_first_fit_of_65536_samples_takes_well_under_half_a_second():
    """First fit of 65,536 samples takes less than half a second; the quadratic form takes 5 s for
    16,000."""
    rng = np.random.default_rng(0)
    lengths = np.minimum(8192, rng.lognormal(7.2, 0.8, 65536)).astype(int).tolist()
    best = min(_seconds(lambda: first_fit_pack(lengths, 16384)) for _ in range(3))
    assert best < 0.5, f"{best:.2f} s"


def _seconds(fn):
    start = time.process_time()
    fn()
    return time.process_time() - start


def test_splitting_bins_halves_the_fullest_and_stops_at_singletons():
    """To reach an aligned count, the fullest bin by tokens is split, and a single sample is not."""
    bins = [[0, 1, 2, 3], [4]]
    expand_bins_by_splitting(bins, 3, [8, 1, 1, 6, 100])
    assert sorted(map(sorted, bins)) == [[0], [1, 2, 3], [4]]
    expand_bins_by_splitting(bins, 99, [8, 1, 1, 6, 100])
    assert sorted(map(sorted, bins)) == [[0], [1], [2], [3], [4]]
    bins = [[0, 1], [2, 3]]
    expand_bins_by_splitting(bins, 3, [1, 1, 9, 9])
    assert sorted(map(sorted, bins)) == [[0, 1], [2], [3]]


class CountingLengths(list):
    """Lengths that count how often one of them is asked for."""

    reads = 0

    def __getitem__(self, index):
        self.reads += 1
        return super().__getitem__(index)


@pytest.mark.parametrize("count", [512, 4096])
def test_splitting_bins_asks_for_a_length_a_few_times_however_many_bins_there_are(count):
    """Splitting reads each length a few times, however many bins there are; recomputing all sums
    would cost 64 times as much for 8 times the bins."""
    lengths = (
        np.minimum(8192, np.random.default_rng(0).lognormal(7.2, 0.8, count)).astype(int).tolist()
    )
    bins, counting = first_fit_pack(lengths, 16384), CountingLengths(lengths)
    assert len(bins) < count // 8
    expand_bins_by_splitting(bins, count // 2, counting)
    assert len(bins) == count // 2 and counting.reads < 8 * count


@pytest.mark.parametrize("packing", ["first_fit", "balanced"])
def test_a_step_of_8192_samples_is_planned_in_under_a_second(packing):
    """A step of 8192 samples is planned in under a second, while all ranks wait; it takes a tenth
    of that here, and the bound leaves room for a busy machine."""
    lengths = np.minimum(8192, np.random.default_rng(0).lognormal(7.2, 0.8, 8192)).astype(int)
    config = ScheduleConfig(dp_size=8, align=8, token_cap=16384, packing=packing, balance_data=True)
    best = min(
        _seconds(lambda: plan_schedule(lengths, range(8192), step_sizes=[8192], config=config))
        for _ in range(3)
    )
    assert best < 1.0, f"{best:.2f} s"


def test_karmarkar_karp_balances_and_equal_size_means_equal_count():
    """Karmarkar-Karp parts are balanced by sum, and with equal_size by count; both cover every
    position once."""
    parts = karmarkar_karp([8, 7, 6, 5, 4], 2, equal_size=False)
    assert sorted(sum([8, 7, 6, 5, 4][i] for i in part) for part in parts) == [14, 16]
    with pytest.raises(AssertionError, match="5 items do not divide"):
        karmarkar_karp([8, 7, 6, 5, 4], 2, equal_size=True)
    assert [
        len(part) for part in get_seqlen_balanced_partitions(list(range(12)), 3, equal_size=True)
    ] == [4, 4, 4]
    assert sorted(
        i for part in greedy_partition([3, 1, 2, 2], 2, equal_size=True) for i in part
    ) == [0, 1, 2, 3]
    # the long one takes one of the two places of its part, whatever its sum; without places the
    # sums decide: 4 + 1 = 3 + 2
    assert greedy_partition([5, 1, 1, 1], 2, equal_size=True) == [[0, 3], [1, 2]]
    assert greedy_partition([1, 2, 3, 4], 2, equal_size=False) == [[3, 0], [2, 1]]
    assert get_reverse_idx([2, 0, 1]) == [1, 2, 0]


# --- balanced -------------------------------------------------------------------------------------


@pytest.mark.parametrize("cap", [9216, 16384, 32768])
@pytest.mark.parametrize("count", [256, 1024])
def test_balanced_packing_meets_the_lower_bound_and_evens_the_ranks(count, cap):
    """Balanced packing needs as many micro-batches as the aligned lower bound, none above the cap,
    and the busiest rank is within 0.5 % of the mean."""
    for seed in range(3):
        rng = np.random.default_rng(seed)
        lengths = np.clip(rng.lognormal(np.log(2000) - 0.32, 0.8, count), 16, 8192).astype(int)
        work = FlopsModel(linear=1.0, quadratic=2e-5).of(lengths)
        ranks = pack_balanced(lengths, work, cap=cap, num_ranks=8, align=8)
        bins = [items for rank in ranks for items in rank]
        assert sorted(i for items in bins for i in items) == list(range(count))
        assert max(lengths[items].sum() for items in bins) <= cap
        assert len(bins) == max(8, -(-minimum_bins(lengths, cap=cap) // 8) * 8)
        loads = [sum(work[items].sum() for items in rank) for rank in ranks]
        assert max(loads) / np.mean(loads) <= 1.005


def test_balanced_packing_of_anything_keeps_its_promises():
    """Balanced packing is valid for no sample, one sample, samples above the cap, and fewer samples
    than ranks."""
    rng = random.Random(1)
    for _ in range(500):
        lengths = [rng.randint(0, 25) for _ in range(rng.randint(0, 12))]
        cap, ranks = rng.randint(5, 20), rng.choice([1, 2, 3, 4])
        align = ranks * rng.choice([1, 2])
        packed = pack_balanced(lengths, lengths, cap=cap, num_ranks=ranks, align=align)
        assert (
            len(packed) == ranks
            and len({len(bins) for bins in packed}) == 1
            and sum(map(len, packed)) % align == 0
        )
        assert sorted(i for bins in packed for items in bins for i in items) == list(
            range(len(lengths))
        )
        assert all(
            sum(lengths[i] for i in items) <= cap or len(items) == 1
            for bins in packed
            for items in bins
        )


def test_two_samples_of_more_than_half_the_cap_never_share_a_bin():
    """Three samples of 60 tokens need three bins of 100, though their sum fits into two."""
    assert minimum_bins(np.array([60, 60, 60]), cap=100) == 3
    assert minimum_bins(np.array([50, 50, 50]), cap=100) == 2
    assert minimum_bins(np.array([130, 10]), cap=100) == 2


def test_the_report_tells_bins_fill_and_imbalance():
    """The schedule's metrics give the number of bins, their fill and the imbalance between
    ranks."""
    first_fit = ScheduleConfig(dp_size=1, align=1, token_cap=100)
    (report,) = plan_schedule([60, 60, 80], range(3), step_sizes=[3], config=first_fit).steps
    # 200 tokens would fit two of 100
    assert (report.num_micro_batches, report.lower_bound) == (3, 2)
    static = ScheduleConfig(dp_size=2, align=2)
    plan = plan_schedule([30, 10, 10, 10, 5, 5], range(6), step_sizes=[4, 2], config=static)
    # ranks have 40 and 20 tokens, 30 on average; then 5 and 5: the worst step is what an operator
    # looks for
    assert [step.work_max_over_mean for step in plan.steps] == [40 / 30, 1.0]
    assert plan.metrics()["schedule/work_max_over_mean"] == 40 / 30
    config = ScheduleConfig(dp_size=2, align=2, token_cap=100, packing="balanced")
    plan = plan_schedule([60, 40, 50, 50], range(4), step_sizes=[4], config=config)
    report = plan.steps[0]
    assert (
        report.num_micro_batches,
        report.lower_bound,
        report.fill,
        report.work_max_over_mean,
    ) == (2, 2, 1.0, 1.0)
    assert plan.metrics()["schedule/fill"] == 1.0
    assert dataclasses.asdict(report)["num_empty"] == 0
    assert not [name for name in plan.metrics() if "/step_" in name]


def test_each_of_several_steps_is_reported():
    """Each step is reported by itself, so that a half-empty second step shows beside a full first
    one."""
    config = ScheduleConfig(dp_size=1, align=1, token_cap=100, packing="balanced")
    found = plan_schedule([60, 40, 25, 25], range(4), step_sizes=[2, 2], config=config).metrics()
    assert (
        found["schedule/step_0/fill"],
        found["schedule/step_1/fill"],
        found["schedule/fill"],
    ) == (1.0, 0.5, 0.75)
    assert (
        found["schedule/step_1/micro_batches"]
        == found["schedule/step_1/micro_batches_lower_bound"]
        == 1
    )


# --- FLOPs ----------------------------------------------------------------------------------------


def test_forward_flops_are_the_sum_of_the_matrices():
    """One layer by hand at s = 3: qkv 2*s*4*(2+2)*2, attention s*s*2*(2+2), output 2*s*4*4, mlp
    2*s*4*8*3, head 2*s*4*10."""
    args = types.SimpleNamespace(
        hidden_size=4,
        num_attention_heads=2,
        num_query_groups=1,
        vocab_size=10,
        ffn_hidden_size=8,
        num_experts=None,
        num_layers=1,
        kv_channels=2,
    )
    s = 3
    expected = (
        2 * s * 4 * 4 * 2 + s * s * 2 * 4 + 2 * s * 4 * 4 + 2 * s * 4 * 8 * 3 + 2 * s * 4 * 10
    )
    assert calculate_fwd_flops([s], args) == expected
    assert calculate_fwd_flops([s, s], args) == 2 * expected
    assert calculate_fwd_flops([2 * s], args) > 2 * expected


def test_moe_and_mla_sizes_change_the_estimate():
    """The estimate counts active and shared experts in their layers, and MLA's head sizes."""
    moe = types.SimpleNamespace(
        **{
            **SIZES,
            "num_experts": 8,
            "moe_router_topk": 2,
            "moe_ffn_hidden_size": 32,
            "moe_layer_freq": [0, 1],
        }
    )
    attention, dense, head = 2 * (2 * 64 * 8 * 16 + 2 * 4 * 16 * 64), 2 * 64 * 128 * 3, 2 * 64 * 100
    assert (
        FlopsModel.from_args(moe).linear
        == attention + dense + head + 2 * 64 * (2 * 32) * 3 + 2 * 64 * 8
    )
    moe.moe_shared_expert_intermediate_size = 16
    assert (
        FlopsModel.from_args(moe).linear
        == attention + dense + head + 2 * 64 * (2 * 32 + 16) * 3 + 2 * 64 * 8
    )
    every_second = types.SimpleNamespace(**{**vars(moe), "num_layers": 3, "moe_layer_freq": 2})
    listed = types.SimpleNamespace(**{**vars(moe), "num_layers": 3, "moe_layer_freq": [1, 0, 1]})
    assert FlopsModel.from_args(every_second) == FlopsModel.from_args(listed)
    mla = types.SimpleNamespace(
        **SIZES,
        multi_latent_attention=True,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_head_dim=16,
        qk_pos_emb_head_dim=8,
        v_head_dim=16,
    )
    assert FlopsModel.from_args(mla).quadratic == 2 * 4 * (24 + 16)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
