"""Context-parallel layout and reducers: every response token belongs to one rank, and every sum is
that of one rank.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.pretend_rank import pretend_rank

from slime.backends.megatron_utils import cp_utils
from slime.data.context_parallel import (
    compute_zigzag_ranges,
    plan_contiguous_layout,
    plan_response_layout,
)
from slime.data.rows import RowShape, plan_rows
from slime.exceptions import RolloutDataError
from slime.metrics import contributions as c

NUM_GPUS = 0

SAMPLES = st.lists(st.tuples(st.integers(1, 12), st.integers(0, 20)), min_size=0, max_size=6)


@pytest.mark.parametrize(
    ("total", "response", "owned"),
    [
        (11, 7, ([9], [3, 4, 5, 6, 7, 8])),
        (10, 2, ([], [7, 8])),
        (9, 8, ([0, 1, 2], [3, 4, 5, 6, 7])),
    ],
)
def test_zigzag_gives_each_rank_its_logit_positions(total, response, owned):
    """Each rank has the logits of its zigzag chunks; a signal cut by another rule would have
    another length (7 entries against 1)."""
    for cp_rank, positions in enumerate(owned):
        _, _, logits, tokens = compute_zigzag_ranges(total, response, cp_size=2, cp_rank=cp_rank)
        assert [p for low, high in logits for p in range(low, high)] == positions
        assert [p for low, high in tokens for p in range(low, high)] == [p + 1 for p in positions]


def test_offsets_of_a_rank_without_response_tokens_are_empty():
    """At total 10, response 2, CP 2 rank 0 owns only prompt tokens and has empty offsets."""
    with pretend_rank(cp_size=2, cp_rank=0):
        chunk, chunks, logits, tokens = cp_utils.get_logits_and_tokens_offset_with_cp(10, 2)
        assert (chunk, chunks) == (3, ((0, 3), (9, 12)))
        assert logits == tokens == ((0, 0), (0, 0))
        assert cp_utils.slice_log_prob_with_cp([0.1, 0.2], 10, 2) == []
    with pretend_rank(), pytest.raises(AssertionError):
        cp_utils.get_logits_and_tokens_offset_with_cp(10, 2)


@given(SAMPLES, st.sampled_from([1, 2, 3, 4, 8]))
@settings(max_examples=60, deadline=None)
def test_ranks_partition_the_response_tokens_and_point_at_the_logits_that_predict_them(
    samples, cp_size
):
    """Every response token belongs to one rank, and the flat index of a micro-batch agrees with
    slicing each sample by itself."""
    totals, responses = [p + r for p, r in samples], [r for _, r in samples]
    # token value = 100 * sample + position, so that a wrong pairing is readable
    tokens = [100 * i + torch.arange(total) for i, total in enumerate(totals)]
    flat_tokens = torch.cat(tokens) if tokens else torch.empty(0, dtype=torch.int64)
    flat_responses = (
        torch.cat([t[len(t) - r :] for t, r in zip(tokens, responses, strict=True)])
        if tokens
        else flat_tokens
    )
    seen = []
    for cp_rank in range(cp_size):
        with pretend_rank(cp_size=cp_size, cp_rank=cp_rank):
            layout = cp_utils.get_response_layout(totals, responses)
            sliced = [cp_utils.slice_with_cp(t, -1) for t in tokens]
            row = torch.cat(sliced) if sliced else flat_tokens
            expected = [
                cp_utils.slice_log_prob_with_cp(t[len(t) - r :], len(t), r)
                for t, r in zip(tokens, responses, strict=True)
            ]
        assert layout.local_lengths == tuple(len(e) for e in expected)
        owned = flat_tokens[layout.token_indices]
        assert owned.tolist() == [int(value) for e in expected for value in e]
        assert torch.equal(flat_responses[layout.response_indices], owned)
        # the logit that predicts token p is at p - 1
        assert torch.equal(row[layout.row_indices] + 1, owned)
        assert torch.equal(layout.sample_indices, owned // 100)
        seen += owned.tolist()
    assert sorted(seen) == sorted(flat_responses.tolist())


@given(SAMPLES, st.sampled_from([1, 2, 4]))
@settings(max_examples=30, deadline=None)
def test_contiguous_layout_partitions_too(samples, cp_size):
    """Allgather CP cuts the stream of samples anywhere, also inside a response, and still gives
    each token to one rank."""
    totals, responses = [p + r for p, r in samples], [r for _, r in samples]
    rows = -(-sum(totals) // cp_size)
    layouts = [
        plan_contiguous_layout(totals, responses, num_rows=rows, cp_rank=rank)
        for rank in range(cp_size)
    ]
    assert torch.cat([layout.response_indices for layout in layouts]).tolist() == list(
        range(sum(responses))
    )
    for rank, layout in enumerate(layouts):
        assert torch.equal(layout.row_indices + rank * rows + 1, layout.token_indices)


def test_a_response_without_a_token_before_it_is_refused():
    """A response that starts at the first token is refused: no logit predicts that token, and the
    one before it is another sample's."""
    with pytest.raises(RolloutDataError, match="sample 1 .* 4 tokens of which 4"):
        plan_response_layout([5, 4], [2, 4])
    with pytest.raises(RolloutDataError, match="2 total lengths but 1 response"):
        plan_response_layout([5, 4], [2])


def test_slice_log_prob_with_cp_keeps_the_type_and_checks_the_length():
    """A sliced signal keeps its type: at total 11, response 7 rank 1 owns logits 3..8, which are
    response tokens 0..5, and rank 0 owns token 6. A wrong length is refused."""
    values = [10.0 + i for i in range(7)]
    with pretend_rank(cp_size=2, cp_rank=1):
        assert cp_utils.slice_log_prob_with_cp(values, 11, 7) == values[:6]
        with pytest.raises(AssertionError):
            cp_utils.slice_log_prob_with_cp(values, 11, 6)
    with pretend_rank(cp_size=2, cp_rank=0):
        assert cp_utils.slice_log_prob_with_cp(torch.tensor(values), 11, 7).tolist() == [16.0]


def test_slice_with_cp_pads_with_a_number_or_a_function():
    """Five tokens on CP 2 are padded to 8: rank 0 has chunks 0 and 3, rank 1 chunks 1 and 2."""
    with pretend_rank(cp_size=2, cp_rank=0):
        assert cp_utils.slice_with_cp(torch.arange(5), 9).tolist() == [0, 1, 9, 9]
        pad = lambda t, n: torch.cat([t, 50 + torch.arange(n)])  # noqa: E731
        assert cp_utils.slice_with_cp(torch.arange(5), pad).tolist() == [0, 1, 51, 52]
    with pretend_rank(cp_size=2, cp_rank=1):
        assert cp_utils.slice_with_cp(torch.arange(10).reshape(5, 2), -1).tolist() == [
            [4, 5],
            [6, 7],
            [8, 9],
            [-1, -1],
        ]
    with pretend_rank():
        tokens = torch.arange(5)
        assert cp_utils.slice_with_cp(tokens, 0) is tokens


def test_per_sample_per_rollout_and_per_token_means():
    """The three means of samples 0 and 1, parts of one rollout with 4 trained tokens, and of sample
    2."""
    masks = [torch.tensor([1, 1, 0]), torch.tensor([1, 1]), torch.tensor([0, 1])]
    x = torch.tensor([1.0, 3.0, 100.0, 5.0, 7.0, 100.0, 8.0])
    lengths = ([9, 9, 9], [3, 2, 2], masks)
    with pretend_rank():
        assert cp_utils.get_sum_of_sample_mean(*lengths)(x) == 2 + 6 + 8
        assert (
            cp_utils.get_sum_of_sample_mean(*lengths, torch.tensor([4.0, 4.0, 1.0]))(x)
            == 16 / 4 + 8
        )
        assert cp_utils.get_sum_of_sample_mean(*lengths, [4, 4, 1])(x) == 16 / 4 + 8
        assert cp_utils.get_sum_of_sample_mean(*lengths, calculate_per_token_loss=True)(x) == 24
        assert cp_utils.get_sum_of_sample_mean([], [], [])(torch.empty(0)) == 0


def test_a_fully_masked_sample_adds_nothing_not_one():
    """A fully masked row adds 0 to the denominator: with a row of 4 tokens it is 4, not 5; all
    masked gives 0, not NaN."""
    with pretend_rank():
        reduce = cp_utils.get_sum_of_sample_mean([6, 6], [4, 4], [torch.ones(4), torch.zeros(4)])
        assert reduce(torch.full((8,), 2.0)) == 2
        assert (
            cp_utils.get_sum_of_sample_mean([6], [4], [torch.zeros(4)])(
                torch.full((4,), float("nan"))
            )
            == 0
        )


def test_reducers_refuse_wrong_lengths_and_name_the_sample():
    """A mask one entry short is refused with its sample; it would shift every later one."""
    with pretend_rank():
        with pytest.raises(
            RolloutDataError, match="loss_masks of sample 1 .* 1 entries, expected 2"
        ):
            cp_utils.get_sum_of_sample_mean([5, 5], [3, 2], [torch.ones(3), torch.ones(1)])
        with pytest.raises(
            RolloutDataError,
            match=(
                r"advantages of sample 1 must be a tensor \[2\], one number per token, got \[2, "
                r"1\]"
            ),
        ):
            cp_utils.check_lengths([torch.ones(3), torch.ones(2, 1)], [3, 2], name="advantages")
        for length in (1, 3):
            with pytest.raises(
                RolloutDataError,
                match=f"advantages of sample 1 of the micro-batch has {length} entries, expected 2",
            ):
                cp_utils.check_lengths(
                    [torch.ones(3), torch.ones(length)], [3, 2], name="advantages"
                )
        for denominators in ([1, 1, 1], [1]):
            with pytest.raises(
                RolloutDataError, match=f"{len(denominators)} loss denominators for 2 samples"
            ):
                cp_utils.get_sum_of_sample_mean(
                    [5, 5], [3, 2], [torch.ones(3), torch.ones(2)], denominators
                )
        with pytest.raises(RolloutDataError, match="got 4 entries, .* 5 response tokens"):
            cp_utils.get_sum_of_sample_mean([5, 5], [3, 2], [torch.ones(3), torch.ones(2)])(
                torch.ones(4)
            )


@given(SAMPLES, st.sampled_from([2, 4]), st.booleans(), st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_sums_over_cp_ranks_equal_one_rank(samples, cp_size, per_token, random):
    """Sums over context-parallel ranks equal those of one rank; complete values summed over CP gave
    a loss of -57.36 for -28.43."""
    totals, responses = [p + r for p, r in samples], [r for _, r in samples]
    masks = [
        torch.tensor([random.randint(0, 1) for _ in range(r)], dtype=torch.uint8) for r in responses
    ]
    x = [
        torch.tensor([random.uniform(-1, 1) for _ in range(r)], dtype=torch.float64)
        for r in responses
    ]

    def total_of(size: int, rank: int) -> float:
        with pretend_rank(cp_size=size, cp_rank=rank):
            local = [
                cp_utils.slice_log_prob_with_cp(v, t, r)
                for v, t, r in zip(x, totals, responses, strict=True)
            ]
            reduce = cp_utils.get_sum_of_sample_mean(totals, responses, masks, None, per_token)
            return float(reduce(cp_utils.concatenate(local)))

    assert sum(total_of(cp_size, rank) for rank in range(cp_size)) == pytest.approx(
        total_of(1, 0), abs=1e-12
    )


def test_routing_replay_rows_follow_the_tokens():
    """Routing row t belongs to token t; the last token and the padding get ids spread over the
    experts.
    """
    experts = [torch.full((3, 1, 2), 7), torch.full((1, 1, 2), 5)]
    tokens = [torch.arange(4), torch.arange(2)]
    options = {"num_experts": 4, "sequence_parallel": False, "allgather_cp": False}
    with pretend_rank():
        rows = cp_utils.prepare_routed_experts_for_routing_replay(
            experts, tokens, data_pad_size_multiplier=8, **options
        )
    assert rows.shape == (8, 1, 2)
    assert rows[:, 0, 0].tolist() == [7, 7, 7, 0, 5, 0, 0, 2]
    with pretend_rank(cp_size=2, cp_rank=1):
        rows = cp_utils.prepare_routed_experts_for_routing_replay(
            experts, tokens, data_pad_size_multiplier=1, **options
        )
    # token 1 and 2 of the first; token 1 and one pad of the second
    assert rows[:, 0, 0].tolist() == [7, 7, 0, 0]
    whole_stream = {**options, "allgather_cp": True}
    with pretend_rank(cp_size=2, cp_rank=1):
        rows = cp_utils.prepare_routed_experts_for_routing_replay(
            experts, tokens, data_pad_size_multiplier=1, **whole_stream
        )
    assert rows[:, 0, 0].tolist() == [0, 5, 0]  # the second half of 7 7 7 0 5 0
    with pretend_rank(tp_size=2, tp_rank=1):
        rows = cp_utils.prepare_routed_experts_for_routing_replay(
            experts, tokens, data_pad_size_multiplier=4, **{**options, "sequence_parallel": True}
        )
    # the second half of 7 7 7 0 5 0 and two rows of padding
    assert rows[:, 0, 0].tolist() == [5, 0, 0, 2]
    with (
        pretend_rank(),
        pytest.raises(AssertionError, match="sample 0: 3 routing rows for 3 tokens"),
    ):
        cp_utils.prepare_routed_experts_for_routing_replay(
            experts[:1], [torch.arange(3)], data_pad_size_multiplier=1, **options
        )


def test_padded_rows_have_two_chunks_of_padding_under_context_parallelism():
    """A row's padding is a sequence of its own with two chunks on each rank, so under context
    parallelism `pad_to` 3 becomes a unit of 6."""
    assert [RowShape(pad_to=3, cp_size=size).unit for size in (1, 2, 4)] == [3, 6, 6]
    assert plan_rows([4], [[0]], shape=RowShape(pad_to=3, cp_size=2)).row_offsets.tolist() == [0, 6]


def test_micro_batches_that_report_other_metrics_are_not_added_up():
    """Micro-batches with different metrics are refused: values are added by position, so a KL would
    be added to a loss."""
    losses = [
        {"keys": ["loss", "kl"], "values": torch.tensor([1.0, 2.0, 3.0])},
        {"keys": ["kl", "loss"], "values": torch.tensor([1.0, 3.0, 2.0])},
    ]
    options = {
        "calculate_per_token_loss": False,
        "step_global_batch_size": 4,
        "cp_size": 1,
        "dp_with_cp_group": None,
    }
    with pytest.raises(AssertionError, match="micro-batch 1 reports"):
        cp_utils.reduce_train_step_metrics(losses, **options)


def test_train_step_metrics_divide_by_what_the_step_holds(monkeypatch):
    """A mean divides by the tokens of the step: micro-batches of 1 and 9 tokens with losses 1 and 0
    give 0.1, not 0.5."""
    monkeypatch.setattr(
        cp_utils.dist, "all_reduce", lambda tensor, group: tensor.mul_(2)
    )  # two CP ranks with the same numbers
    losses = [
        {"keys": ["loss"], "values": torch.tensor([1.0, 0.5])},
        {"keys": ["loss"], "values": torch.tensor([9.0, 0.0])},
    ]
    options = {"step_global_batch_size": 4, "cp_size": 2, "dp_with_cp_group": None}
    assert cp_utils.reduce_train_step_metrics(losses, calculate_per_token_loss=True, **options) == {
        "loss": pytest.approx(0.1)
    }
    assert cp_utils.reduce_train_step_metrics(
        losses, calculate_per_token_loss=False, **options
    ) == {"loss": 0.25}
    empty = [{"keys": ["loss"], "values": torch.zeros(2)}]
    assert cp_utils.reduce_train_step_metrics(empty, calculate_per_token_loss=True, **options) == {
        "loss": 0.0
    }


def test_train_step_contributions_carry_their_own_reduction(monkeypatch):
    """A maximum over micro-batches and ranks is the largest value and a mean is over all values;
    what one rank alone reports counts. Micro-batches of 1 and 3 values, and a rank of 1 value."""
    sums = lambda: {"keys": ["loss"], "values": torch.tensor([0.0, 2.0])}  # noqa: E731
    here = [
        {**sums(), "contributions": {"m": c.maximum([1.0]), "mean": c.mean([1.0], 1)}},
        {**sums(), "contributions": {"m": c.maximum([3.0]), "mean": c.mean([3.0, 2.0, 2.0], 3)}},
    ]
    there = [{"m": c.maximum([2.0]), "only": c.quantiles([7.0], (("/p50", 0.5),))}]
    slots = []

    def all_reduce(tensor, group):
        slots.append(tensor.tolist())
        tensor.mul_(2)

    def all_gather_object(gathered, mine, group):
        gathered[:] = [mine, there]

    monkeypatch.setattr(cp_utils.dist, "all_reduce", all_reduce)
    monkeypatch.setattr(cp_utils.dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(cp_utils.dist, "all_gather_object", all_gather_object)
    options = {
        "calculate_per_token_loss": False,
        "step_global_batch_size": 4,
        "cp_size": 1,
        "dp_with_cp_group": None,
    }
    expected = {"loss": 2.0, "m": 3.0, "mean": 2.0, "only/p50": 7.0}
    assert cp_utils.reduce_train_step_metrics(here, **options) == expected
    assert slots == [[0.0, 4.0, 2.0]], "one more number says that there are contributions"
    nobody = [{**sums(), "contributions": {}}]
    monkeypatch.setattr(cp_utils.dist, "all_gather_object", None)  # not called
    assert cp_utils.reduce_train_step_metrics(nobody, **options) == {"loss": 1.0}


def test_a_metric_of_two_reductions_is_refused_by_its_name():
    """A contribution under the name of a sum, or of another reduction, is an error that names it."""
    parts = [{"loss": c.mean([1.0], 1)}, {"loss": c.maximum([1.0])}]
    with pytest.raises(ValueError, match=r"loss is reduced in several ways: \['max', 'mean'\]"):
        c.merge_all(parts)


def test_contributions_of_lost_values_are_not_numbers_and_no_errors():
    """A step with infinities of both signs reports NaN and is still logged: the optimizer skips it,
    and the log must show it. A NaN is the maximum wherever it stands."""
    nan = float("nan")
    for parts in (
        [c.mean([math.inf, -math.inf], 2)],
        [c.mean([math.inf], 1), c.mean([-math.inf], 1)],
        [c.maximum([1.0]), c.maximum([nan])],
        [c.maximum([nan]), c.maximum([1.0])],
    ):
        assert math.isnan(c.merge(parts)[""])
    assert c.merge([c.total([1e308, 1e308])]) == {"": math.inf}
    assert c.merge([c.maximum(torch.tensor([1.0, 2.0], requires_grad=True))]) == {"": 2.0}


@pytest.mark.parametrize(("num_micro_batches", "num_metrics"), [(1, 1), (16, 9)])
def test_a_step_reduces_and_reads_its_metrics_once(monkeypatch, num_micro_batches, num_metrics):
    """16 micro-batches of 9 metrics need one collective and one read of the device."""
    calls = []
    monkeypatch.setattr(
        cp_utils.dist, "all_reduce", lambda tensor, group: calls.append("all_reduce")
    )
    for name in ("item", "tolist", "__float__"):
        real = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor, name, lambda self, name=name, real=real: calls.append(name) or real(self)
        )
    keys = [f"m{i}" for i in range(num_metrics)]
    losses = [
        {"keys": keys, "values": torch.arange(1.0 + num_metrics)} for _ in range(num_micro_batches)
    ]
    found = cp_utils.reduce_train_step_metrics(
        losses,
        calculate_per_token_loss=False,
        step_global_batch_size=num_micro_batches,
        cp_size=1,
        dp_with_cp_group=None,
    )
    assert found == {f"m{i}": i + 1.0 for i in range(num_metrics)}
    assert calls == ["all_reduce", "tolist"]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
