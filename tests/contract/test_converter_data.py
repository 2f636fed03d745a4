"""What a custom converter or a plug-in may hand over, and what is refused by name: nothing it put
in is dropped or changed silently.
"""

import math
import pickle

import numpy as np
import pytest
import torch

from slime.data.batch import localize
from slime.data.columns import ColumnsConfig, build_train_columns, compute_rewards
from slime.data.fields import Extent, Missing, Reduce, Rows, Scope
from slime.data.sample import Sample
from slime.data.schedule import ScheduleConfig
from slime.data.split import SplitConfig, split_by_dp
from slime.exceptions import RolloutDataError
from slime.metrics.contributions import merge_all
from slime.metrics.train_metrics import TrainMetricsConfig, pass_rates, phase_contributions

NUM_GPUS = 0
CONFIG = ColumnsConfig(divide_by_std=False)


def lists(count=4, **changes):
    """A converter's dict: sample i has 5 + i tokens, the last 2 + i of them response, and reward 10
    * i.
    """
    data = {
        "tokens": [list(range(5 + i)) for i in range(count)],
        "response_lengths": [2 + i for i in range(count)],
        "rewards": [10.0 * i for i in range(count)],
        "raw_reward": [10.0 * i for i in range(count)],
        "loss_masks": [[1] * (2 + i) for i in range(count)],
    }
    return {**data, **changes}


def split(data, dp_size=2):
    count = len(data["tokens"])
    schedule = ScheduleConfig(dp_size, dp_size, token_cap=32, packing="balanced")
    return split_by_dp(data, SplitConfig(count, count, schedule, pad_to=8))


def arrive(data, dp_size=2):
    return [
        localize(shard, rank, dp_size=dp_size)
        for rank, shard in enumerate(split(data, dp_size).shards)
    ]


def by_position(batches, name):
    """{position in the whole batch: this sample's entry} over all ranks."""
    return {p: v for batch in batches for p, v in zip(batch["partition"], batch[name], strict=True)}


# --- values that a converter provides -------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, None])
def test_a_converters_reward_that_is_no_number_never_reaches_a_gradient(bad):
    """A sample whose reward from a converter is None, NaN or infinite is counted as bad_reward, and
    only the others train."""
    result = split(lists(rewards=[0.0, bad, 20.0, 30.0]))
    batches = [localize(shard, rank) for rank, shard in enumerate(result.shards)]
    assert result.plan.dropped == {"bad_reward": 1}
    assert by_position(batches, "rewards") == {0: 0.0, 2: 20.0, 3: 30.0}
    assert batches[0].whole("valid") == [True, False, True, True]


@pytest.mark.parametrize("name", ["rollout_log_probs", "teacher_log_probs"])
@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_a_converters_log_prob_that_is_no_number_never_reaches_a_gradient(name, bad):
    """A sample with such a log-prob among its three does not train, nor does one with the token id
    -7."""
    values = [[-0.5] * (2 + i) for i in range(4)]
    values[1][2] = bad
    data = lists(rewards=[0.0, 10.0, 20.0, 30.0], **{name: values})
    data["tokens"][2] = [*data["tokens"][2][:-1], -7]
    result = split(data)
    batches = [localize(shard, rank) for rank, shard in enumerate(result.shards)]
    assert (
        result.plan.dropped == {"bad_logprob": 1, "bad_token": 1}
        and result.plan.num_trained_samples == 2
    )
    assert by_position(batches, "rewards") == {0: 0.0, 3: 30.0}


@pytest.mark.parametrize(
    "valid",
    [torch.tensor([1, 1, 0, 1]), torch.tensor([True, True, False, True]), np.array([1, 1, 0, 1])],
)
def test_numbers_per_sample_may_come_as_tensors_or_arrays(valid):
    """Tensors and arrays are accepted for numbers per sample; 0 and 1 in `valid` are verdicts, so
    one sample is rejected and not four."""
    result = split(
        lists(valid=valid, rewards=torch.arange(4.0), response_lengths=torch.arange(4) + 2)
    )
    assert (result.plan.dropped, result.plan.num_trained_samples) == ({"invalid": 1}, 3)
    batches = [localize(shard, rank) for rank, shard in enumerate(result.shards)]
    assert by_position(batches, "rewards") == {0: 0.0, 1: 1.0, 3: 3.0}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"loss_masks": [[2] * (2 + i) for i in range(4)]}, "position 0 has the value 2"),
        (
            {"loss_masks": [np.full(2 + i, -1, np.int8) for i in range(4)]},
            r"loss_masks\[0\] has values that do not fit uint8",
        ),
        (
            {"loss_masks": [None] + [[1] * (2 + i) for i in range(1, 4)]},
            "1 of 4 samples have no loss_masks",
        ),
        (
            {"tokens": [np.full(5 + i, 2**31, np.uint32) for i in range(4)]},
            r"tokens\[0\] has values that do not fit int32",
        ),
        (
            {"rewards": torch.zeros(4, 2)},
            r"rewards must be one number per sample \(float32\), got shape \(4, 2\)",
        ),
        ({"response_lengths": [2.5, 3, 4, 5]}, "response_lengths has values that do not fit int32"),
        ({"rewards": ["a", "b", "c", "d"]}, "rewards must hold numbers"),
        ({"mine": 3}, "'mine' has 3 for 4 samples"),
        ({"mine": torch.tensor(3)}, r"'mine' has tensor\(3\) for 4 samples"),
        ({"mine": {0: "a", 1: "b", 2: "c", 3: "d"}}, "'mine' has {0: 'a', .* for 4 samples"),
        (
            {"rollout_log_probs": [torch.zeros(2 + i, 1) for i in range(4)]},
            r"rollout_log_probs\[0\] must have one number per token, got shape \[2, 1\]",
        ),
        (
            {"loss_masks": [[[1]] * (2 + i) for i in range(4)]},
            r"loss_masks\[0\] must have one number per token, got shape \[2, 1\]",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_name(changes, said):
    """A value that does not fit its field is refused by name; a silent conversion (a mask of 255s,
    a length of 2 for 2.5) would train something else than was meant."""
    with pytest.raises(RolloutDataError, match=said):
        arrive(lists(**changes))


@pytest.mark.parametrize(
    "mine",
    [
        torch.arange(12).reshape(4, 3),
        np.arange(12).reshape(4, 3),
        [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]],
    ],
)
def test_an_undeclared_field_travels_with_its_sample_whatever_holds_it(mine):
    """A tensor, an array or a list arrives row by row with its sample: the row that starts with 3 *
    i belongs to sample i on every rank."""
    with pytest.warns(UserWarning, match="Undeclared fields"):
        batches = arrive(lists(mine=mine))
    assert {p: int(row[0]) for p, row in by_position(batches, "mine").items()} == {
        0: 0,
        1: 3,
        2: 6,
        3: 9,
    }


def test_a_converter_may_add_to_slimes_own_columns_and_edit_them():
    """A converter that calls `build_train_columns` and changes the result gets the same checks as
    one that makes lists."""
    samples = [
        Sample(index=i, tokens=list(range(5 + i)), response_length=2 + i, reward=10.0 * i)
        for i in range(4)
    ]

    def changed(**changes):
        batch = build_train_columns(samples, compute_rewards(samples, CONFIG)[:2], CONFIG)
        for name, value in changes.items():
            batch[name] = value
        return batch

    batch = changed(mine=["of 0", "of 1", "of 2", "of 3"], rewards=[None, 1.0, 2.0, 3.0])
    batch["loss_masks"][2] = [0, 1, 0, 0]
    with pytest.warns(UserWarning, match="Undeclared fields"):
        result = split(batch)
    batches = [localize(shard, rank) for rank, shard in enumerate(result.shards)]
    assert by_position(batches, "mine") == {
        i: f"of {i}" for i in (1, 2, 3)
    } and result.plan.dropped == {"bad_reward": 1}
    assert by_position(batches, "rollout_mask_sums") == {1: 3, 2: 1, 3: 5}
    for bad, said in (
        ({"mine": [1, 2, 3, 4, 5, 6]}, "'mine' has 6 entries for 4 samples"),
        ({"mine": 3.0}, "'mine' has 3.0 for 4 samples"),
        (
            {"loss_masks": [[3] * (2 + i) for i in range(4)]},
            "loss mask at position 0 has the value 3",
        ),
    ):
        with pytest.raises(RolloutDataError, match=said):
            split(changed(**bad))


def test_a_declared_field_that_is_not_per_sample_arrives_on_every_rank(declared):
    """A declared field per step, such as one temperature, arrives whole on every rank."""
    declared("temperatures", scope=Scope.STEP, extent=Extent.EQUAL)
    assert [batch["temperatures"] for batch in arrive(lists(temperatures=[0.7, 0.9]))] == [
        [0.7, 0.9]
    ] * 2


# --- declarations ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("declaration", "said"),
    [
        ({"scope": "sample"}, "scope='sample'.*Scope.SAMPLE"),
        ({"reduce": "sum"}, "reduce='sum'.*Reduce.SUM"),
        ({"wire_dtype": "float33"}, "'float33'.*numpy dtype"),
        ({"reduce": Reduce.SAMPLE_MEAN}, "needs numbers: give wire_dtype"),
        (
            {"reduce": Reduce.TOKEN_MEAN, "wire_dtype": "float32"},
            "can be reduced by Reduce.SAMPLE_MEAN",
        ),
        (
            {
                "scope": Scope.TOKEN,
                "rows": Rows.TOTAL,
                "wire_dtype": "float32",
                "reduce": Reduce.MEAN,
            },
            "rows=Rows.RESPONSE",
        ),
        (
            {
                "scope": Scope.TOKEN,
                "rows": Rows.RESPONSE,
                "wire_dtype": "float32",
                "cp_sharded": True,
            },
            "needs to_device=True",
        ),
        ({"scope": Scope.STEP, "reduce": Reduce.SUM}, "can be reduced by nothing"),
    ],
)
def test_a_declaration_that_cannot_be_kept_is_refused_when_it_is_made(declared, declaration, said):
    """A contradictory declaration is refused at `declare_field`, and not hours later or as a metric
    that never appears."""
    with pytest.raises(RolloutDataError, match=said):
        declared("mine", **declaration)


def make_samples(count=4, **metadata):
    return [
        Sample(
            index=i,
            group_index=i // 2,
            tokens=list(range(5 + i)),
            response_length=2 + i,
            reward=float(i % 2),
            metadata={
                name: values[i] for name, values in metadata.items() if values[i] is not None
            },
            status=Sample.Status.COMPLETED,
        )
        for i in range(count)
    ]


def convert(samples):
    return build_train_columns(samples, compute_rewards(samples, CONFIG)[:2], CONFIG)


def test_a_number_that_some_samples_lack_is_an_error_or_the_declared_fill(declared):
    """A declared number that only some samples have is an error with their positions, or the
    declared fill; it never becomes NaN."""
    declared("difficulty", source="metadata.difficulty", wire_dtype="float32")
    declared(
        "weight", source="metadata.weight", wire_dtype="float32", missing=Missing.FILL, fill=0.5
    )
    with pytest.raises(
        RolloutDataError, match=r"2 of 4 samples have no difficulty, for example positions \[1, 3\]"
    ):
        convert(make_samples(difficulty=[1.0, None, 3.0, None]))
    assert convert(make_samples(weight=[1.0, None, None, 4.0]))["weight"] == [1.0, 0.5, 0.5, 4.0]


@pytest.mark.parametrize("wire_dtype", ["int32", "float32"])
def test_a_rejected_sample_may_lack_a_number_that_the_others_have(declared, wire_dtype):
    """A rejected sample may lack a required number, because it does not train."""
    declared("difficulty", source="metadata.difficulty", wire_dtype=wire_dtype)
    samples = make_samples(difficulty=[1, 2, 3, None])
    samples[3].valid = False
    columns = convert(samples)
    assert by_position(arrive(columns), "difficulty") == {0: 1, 1: 2, 2: 3}
    # what stands in for it is no number where the dtype has that: a mean over all samples must not
    # read a 0
    assert (
        np.isnan(columns.array("difficulty")[3])
        if wire_dtype == "float32"
        else columns.array("difficulty")[3] == 0
    )


@pytest.mark.parametrize("mask", [[0, 0, 0], np.zeros(3, np.uint8), torch.zeros(3)])
def test_a_fully_masked_sample_does_not_move_its_siblings_baseline(mask):
    """A fully masked sample is outside its group's mean: [1, 0, 0, 1] without the last gives [2/3,
    -1/3, -1/3, 0]."""
    samples = make_samples()
    for sample, reward in zip(samples, (1.0, 0.0, 0.0, 1.0), strict=True):
        sample.reward, sample.group_index, sample.response_length = reward, 0, 3
    samples[3].loss_mask = mask
    _, rewards, statistics = compute_rewards(samples, CONFIG)
    assert rewards == pytest.approx([2 / 3, -1 / 3, -1 / 3, 0])
    assert statistics.num_excluded_samples == 1


# --- tampering ------------------------------------------------------------------------------------


def reverse(shard, name):
    shard[name] = list(shard[name])[::-1]


def swap_two(shard, name):
    entries = list(shard[name])
    shard[name] = [entries[1], entries[0], *entries[2:]]


def _first_sample_twice(micro_batches):
    """As many entries as before; the sample at local position 1 is not among them."""
    return [[0 if i == 1 else i for i in indices] for indices in micro_batches]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s: reverse(s, "partition"), "not in the order of the samples"),
        (lambda s: reverse(s, "total_lengths"), "position 0 has response_length 9 but 5 tokens"),
        (lambda s: swap_two(s, "tokens"), r"tokens\[0\] has .* rows"),
        (
            lambda s: s.update(micro_batch_indices=s["micro_batch_indices"] + [[]]),
            "micro-batches where its steps have",
        ),
        (
            lambda s: s.update(micro_batch_indices=[[0]] * len(s["micro_batch_indices"])),
            "do not hold each of its",
        ),
        (
            lambda s: s.update(micro_batch_indices=_first_sample_twice(s["micro_batch_indices"])),
            "do not hold each of its",
        ),
        (lambda s: s.update(num_microbatches=[0]), r"where its steps have \[0\]"),
        (lambda s: s.update(num_microbatches=[99]), r"where its steps have \[99\]"),
        (lambda s: s.update(owner_ranks=[0] * 8), "not what was scheduled"),
        (
            lambda s: s.update(owner_ranks=[1 - rank for rank in s["owner_ranks"]]),
            "not what was scheduled",
        ),
    ],
    ids=[
        "partition",
        "total_lengths",
        "tokens",
        "too many",
        "repeated",
        "swapped for another",
        "fewer",
        "counts",
        "owners",
        "other owners",
    ],
)
def test_a_shard_that_was_changed_on_the_wire_is_refused(change, said):
    """A shard with the right counts is refused if its order, lengths and micro-batches contradict
    each other."""
    shard = pickle.loads(pickle.dumps(next(iter(split(lists(8)).shards))))  # noqa: S301  our own bytes
    localize(shard.copy(), 0, dp_size=2)
    change(shard)
    with pytest.raises(RolloutDataError, match=said):
        localize(shard, 0, dp_size=2)


# --- metrics that do not depend on the layout -----------------------------------------------------


@pytest.mark.parametrize(("dp_size", "cp_size"), [(1, 2), (2, 1), (2, 2), (8, 2)])
def test_sums_and_quantiles_count_each_sample_once_on_every_layout(declared, dp_size, cp_size):
    """Each sample counts once, though context-parallel ranks share it and every rank holds whole
    fields: 1 + 2 + 6 = 9, third quartile 4 (counted twice: 5)."""
    values = [1.0, 2.0, 6.0]
    fields = {}
    for extent in (Extent.LOCAL, Extent.WHOLE):
        for reduce in (Reduce.SUM, Reduce.QUANTILES, Reduce.MEAN, Reduce.MAX):
            name = f"{extent.value}_{reduce.value}"
            declared(name, wire_dtype="float64", extent=extent, reduce=reduce)
            fields[name] = values
    found = merge_all(
        [
            phase_contributions(batch, cp_size=cp_size, cp_rank=rank)
            for batch in arrive(lists(3, **fields, loss_masks=None), dp_size)
            for rank in range(cp_size)
        ]
    )
    for extent in ("local", "whole"):
        assert found[f"{extent}_sum"] == 9
        quartiles = [found[f"{extent}_quantiles/quantile_{share}"] for share in (25, 50, 75, 100)]
        assert quartiles == [1.5, 2.0, 4.0, 6.0]
        assert (found[f"{extent}_mean"], found[f"{extent}_max"]) == (3, 6)


def test_pass_at_k_does_not_depend_on_the_order_of_a_rollouts_samples():
    """A rollout of two samples of which one is solved counts as solved in any order: 1 of 3
    rollouts."""
    data = lists(raw_reward=[1.0, 0.0, 0.0, 0.0], rollout_ids=[0, 0, 1, 2], group_ids=[0, 0, 0, 0])
    for order in ([0, 1, 2, 3], [1, 0, 2, 3], [3, 2, 1, 0]):
        batch = arrive({name: [values[i] for i in order] for name, values in data.items()})[0]
        assert pass_rates(batch, config=TrainMetricsConfig())["pass@1"] == pytest.approx(1 / 3)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
