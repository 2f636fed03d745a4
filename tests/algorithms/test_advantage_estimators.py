"""Advantages and returns: the recursion, where a reward lands, what a masked token may do, and what
each context-parallel rank gets.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.pretend_rank import pretend_rank
from support.reference import ReferenceOptions, ReferenceSample, reference_advantages

from slime.accelerator.process_groups import distributed_masked_whiten
from slime.algorithms.advantages import (
    find_last_trained_tokens,
)
from slime.algorithms.table import ESTIMATORS
from slime.backends.megatron_utils import loss
from slime.data.batch import RolloutBatch, Stage
from slime.data.context_parallel import plan_response_layout
from slime.data.ragged import Ragged
from slime.exceptions import RolloutDataError
from slime.utils import ppo_utils

NUM_GPUS = 0

# what the interface promises that the function reads, and nothing else
BARE_ARGS = {
    "advantage_estimator": "grpo",
    "kl_coef": 0.0,
    "kl_loss_type": "k1",
    "use_rollout_logprobs": False,
    "custom_advantage_function_path": None,
    "use_opd": False,
    "normalize_advantages": False,
    "gamma": 1.0,
    "lambd": 1.0,
    "use_kl_loss": False,
}


def compute(rollout_data: dict, **options) -> dict:
    with pretend_rank():
        loss.compute_advantages_and_returns(
            SimpleNamespace(**{**BARE_ARGS, **options}), rollout_data
        )
    return rollout_data


def as_lists(tensors) -> list[list[float]]:
    return [tensor.tolist() for tensor in tensors]


def make_data(samples: list[ReferenceSample]) -> dict:
    fields = ("log_probs", "rollout_log_probs", "ref_log_probs", "teacher_log_probs", "values")
    data = {
        name: [torch.tensor(getattr(s, name), dtype=torch.float64) for s in samples]
        for name in fields
    }
    return {
        **data,
        "total_lengths": [len(s.tokens) for s in samples],
        "response_lengths": [s.response_length for s in samples],
        "loss_masks": [torch.tensor(s.loss_mask, dtype=torch.uint8) for s in samples],
        "rewards": [s.reward for s in samples],
    }


def make_samples(shapes, seed: int, *, mask_some: bool = True) -> list[ReferenceSample]:
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for index, (prompt, response) in enumerate(shapes):
        draw = lambda n=response: torch.randn(n, generator=generator, dtype=torch.float64).tolist()  # noqa: E731
        mask = (
            torch.randint(0, 2, (response,), generator=generator).tolist()
            if mask_some
            else [1] * response
        )
        samples.append(
            ReferenceSample(
                tokens=[0] * (prompt + response),
                response_length=response,
                loss_mask=mask,
                reward=float(index) - 1.5,
                rollout_id=index,
                log_probs=draw(),
                rollout_log_probs=draw(),
                ref_log_probs=draw(),
                teacher_log_probs=draw(),
                values=draw(),
            )
        )
    return samples


@pytest.mark.parametrize(
    "options",
    ({}, {"kl_coef": 0.1}, {"advantage_estimator": "ppo"}, {"use_opd": True, "opd_kl_coef": 0.5}),
)
def test_a_batch_keeps_each_computed_field_as_one_column_with_the_numbers_of_the_lists(options):
    """Advantages and returns are one column per field, with the numbers that a plain dict and a
    plug-in's list view hold."""
    samples = make_samples([(2, 3), (1, 0), (4, 5)], seed=0)
    lists = compute(make_data(samples), **options)
    batch = compute(RolloutBatch(make_data(samples), stage=Stage.LOCAL), **options)
    for name in ("kl", "advantages", "returns"):
        assert isinstance(batch.raw(name), Ragged) and batch.raw(name).lengths.tolist() == [3, 0, 5]
        assert as_lists(batch[name]) == as_lists(lists[name])
    other = RolloutBatch({"rewards": batch["rewards"]}, stage=Stage.LOCAL)
    other.update(batch, extra=[1, 2, 3])
    assert other.raw("kl") is batch.raw("kl") and other["extra"] == [1, 2, 3]


def compute_with(advantages, **options):
    """Two samples of three tokens, whose advantages, and returns, a custom function sets."""

    def set_both(args, rollout_data) -> None:
        rollout_data["advantages"], rollout_data["returns"] = (
            advantages,
            [torch.zeros(3), torch.zeros(3)],
        )

    with mock.patch.object(loss, "load_function", lambda path: set_both):
        data = make_data(make_samples([(1, 3), (1, 3)], seed=0))
        return compute(data, custom_advantage_function_path="some.function", **options)


@pytest.mark.parametrize(
    ("second", "said"),
    [
        (torch.zeros(2), "advantages of sample 1 .* has 2 entries, expected 3"),
        (
            torch.zeros(3, 1),
            r"advantages of sample 1 must be a tensor \[3\], one number per token, got \[3, 1\]",
        ),
        (
            [0.0, 0.0, 0.0],
            r"advantages of sample 1 must be a tensor \[3\], one number per token, got list",
        ),
    ],
)
def test_a_custom_advantage_function_whose_entries_do_not_fit_is_told_which_sample(second, said):
    """Entries of a wrong length or shape are refused with their sample: flat storage would give one
    sample's tokens to the next, and a loss would broadcast a column over all tokens."""
    with pytest.raises(RolloutDataError, match=said):
        compute_with([torch.zeros(3), second])


def test_a_custom_functions_advantages_are_float_constants(monkeypatch):
    """Advantages of a custom function become floats without a graph. `torch.full((n,), reward)` of
    a whole reward gives integers, which whitening would round to -1, 0 and 1; a graph would be run
    backward twice."""
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *args, **kwargs: None)
    monkeypatch.setattr(
        loss,
        "whiten_advantages",
        lambda layout, data, flat: distributed_masked_whiten(flat, torch.ones(6)),
    )
    whole = [torch.tensor([1, 2, 3]), torch.tensor([4, 5, 6])]
    floats = [(part.float() * torch.ones((), requires_grad=True)) for part in whole]
    results = [
        compute_with(part, normalize_advantages=True)["advantages"] for part in (whole, floats)
    ]
    assert as_lists(results[0]) == as_lists(results[1]) and results[0][0][0] == pytest.approx(
        -2.5 / 3.5**0.5
    )
    assert not any(part.requires_grad for part in results[1])


SHAPES = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 9)), min_size=1, max_size=5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-10)])
@pytest.mark.parametrize("discount", [0.0, 0.9, 1.0])
@pytest.mark.parametrize("length", [1, 127, 128, 300])
def test_discounted_returns_by_chunks_equal_the_recursion(dtype, tolerance, discount, length):
    """The chunked computation equals S_t = r_t + discount * S_{t+1}."""
    rewards = torch.randn(3, length, generator=torch.Generator().manual_seed(length), dtype=dtype)
    expected, following = torch.zeros_like(rewards), torch.zeros(3, dtype=dtype)
    for t in reversed(range(length)):
        following = rewards[:, t] + discount * following
        expected[:, t] = following
    actual = ppo_utils.chunked_discounted_returns(rewards, discount)
    assert actual.dtype == dtype
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


def test_padding_on_the_right_stays_exactly_zero():
    """Padding behind a response has returns of exactly 0; a rest of 1e-9 would enter the
    whitening."""
    rewards = torch.zeros(2, 200)
    rewards[:, :3] = 1.0
    returns = ppo_utils.chunked_discounted_returns(rewards, 0.5, chunk_size=16)
    assert returns[0, :3].tolist() == [1.75, 1.5, 1.0] and torch.count_nonzero(returns[:, 3:]) == 0
    assert ppo_utils.chunked_discounted_returns(torch.zeros(2, 0), 0.5).shape == (2, 0)


def test_a_response_has_the_same_returns_alone_and_beside_others():
    """Returns are bit-identical alone and in a padded batch, though the rounding of a matrix
    product depends on its shape."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(n, generator=generator) for n in (1, 5, 127, 128, 129, 256, 300, 77)]
    together = ppo_utils.chunked_discounted_returns(
        torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), 0.97
    )
    for row, beside in zip(rows, together, strict=True):
        alone = ppo_utils.chunked_discounted_returns(row.unsqueeze(0), 0.97)[0]
        assert torch.equal(alone, beside[: len(row)]), len(row)


@pytest.mark.parametrize("chunk_size", [1, 3, 128])
def test_chunked_gae_equals_the_definition(chunk_size):
    """Rewards 0, 0, 1, values .5, .5, .5, gamma 1, lambda .5: deltas 0, 0, .5 -> advantages .125,
    .25, .5.
    """
    rewards, values = torch.tensor([[0.0, 0.0, 1.0]]), torch.full((1, 3), 0.5)
    for gae in (
        ppo_utils.vanilla_gae,
        lambda *args: ppo_utils.chunked_gae(*args, chunk_size=chunk_size),
    ):
        advantages, returns = gae(rewards, values, 1.0, 0.5)
        assert advantages.tolist() == [[0.125, 0.25, 0.5]] and returns.tolist() == [
            [0.625, 0.75, 1.0]
        ]
    generator = torch.Generator().manual_seed(1)
    rewards, values = (
        torch.randn(4, 37, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    for chunked, plain in zip(
        ppo_utils.chunked_gae(rewards, values, 0.97, 0.9, chunk_size),
        ppo_utils.vanilla_gae(rewards, values, 0.97, 0.9),
        strict=True,
    ):
        torch.testing.assert_close(chunked, plain, rtol=0, atol=1e-10)


def test_grpo_returns_repeat_the_reward_like_the_kl():
    """One number per sample becomes one number per token, in the sample's own length."""
    returns = ppo_utils.get_grpo_returns(
        torch.tensor([10.0, 20.0]), [torch.zeros(2), torch.zeros(3)]
    )
    assert as_lists(returns) == [[10, 10], [20, 20, 20]]
    assert ppo_utils.get_grpo_returns([], []) == []


def test_reinforce_plus_plus_puts_the_reward_on_the_last_trained_token():
    """Mask 1 1 0, KL .1 .1 .1, coefficient 1, gamma .5, reward 4: token rewards -.1, 3.9, 0."""
    kl = [torch.full((3,), 0.1)]
    with pretend_rank():
        rest = ([3], [5], 1.0, 0.5)
        returns = ppo_utils.get_reinforce_plus_plus_returns(
            [4.0], kl, [torch.tensor([1, 1, 0])], *rest
        )
        assert returns[0].tolist() == pytest.approx([1.85, 3.9, 0.0])
        with pytest.raises(AssertionError, match="sample 0 has no token with loss mask 1"):
            ppo_utils.get_reinforce_plus_plus_returns([4.0], kl, [torch.zeros(3)], *rest)
    baseline = ppo_utils.get_reinforce_plus_plus_baseline_advantages(
        [4.0], kl, [torch.tensor([1, 1, 0])], 1.0
    )
    assert baseline[0].tolist() == pytest.approx([3.9, 3.9, 4.0])
    assert kl[0].tolist() == pytest.approx([0.1] * 3)


def test_last_trained_tokens_of_ragged_samples():
    """Empty and fully masked samples have no last trained token; -1 must not become the last token
    of the batch."""
    masks = torch.tensor([1, 1, 0, 0, 1])
    assert find_last_trained_tokens(masks, (3, 0, 1, 1)).tolist() == [1, -1, -1, 4]


@given(
    SHAPES,
    st.sampled_from(sorted(ESTIMATORS)),
    st.booleans(),
    st.booleans(),
    st.integers(0, 999),
)
@settings(max_examples=80, deadline=None)
def test_every_estimator_equals_the_reference(
    shapes, estimator, use_rollout_logprobs, use_opd, seed
):
    """Every estimator equals a second implementation, written from the papers, that goes token by
    token."""
    samples = make_samples(shapes, seed)
    options = {
        "advantage_estimator": estimator,
        "kl_coef": 0.3,
        "kl_loss_type": "k2",
        "gamma": 0.9,
        "lambd": 0.8,
        "use_rollout_logprobs": use_rollout_logprobs,
        "use_opd": use_opd,
        "normalize_advantages": any(any(s.loss_mask) for s in samples),
    }
    data = compute(make_data(samples), **options, opd_kl_coef=0.5)
    advantages, returns, kl = reference_advantages(
        samples, ReferenceOptions(**options, opd_kl_coef=0.5)
    )
    for name, expected in (("advantages", advantages), ("returns", returns), ("kl", kl)):
        for actual, wanted in zip(data[name], expected, strict=True):
            assert actual.tolist() == pytest.approx(wanted, abs=1e-9), name


@pytest.mark.parametrize(
    "estimator", ["ppo", "grpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]
)
def test_the_logged_kl_stays_raw(estimator):
    """The logged KL is not overwritten by the rewards made of it: KL .1 .1 .1, coefficient .5,
    reward 1 logs .1 and not .383."""
    data = {
        "total_lengths": [5],
        "response_lengths": [3],
        "loss_masks": [torch.ones(3)],
        "log_probs": [torch.full((3,), -1.0)],
        "ref_log_probs": [torch.full((3,), -1.1)],
        "values": [torch.zeros(3)],
        "rewards": [1.0],
    }
    compute(data, advantage_estimator=estimator, kl_coef=0.5)
    assert data["kl"][0].tolist() == pytest.approx([0.1] * 3)
    assert data["log_probs"][0].tolist() == [-1.0] * 3


@pytest.mark.parametrize(("total", "response"), [(5, 3), (7, 3), (13, 6), (12, 4)])
@pytest.mark.parametrize("cp_size", [2, 4])
def test_ppo_reward_lands_on_the_true_last_token_of_the_rank_that_owns_it(
    monkeypatch, total, response, cp_size
):
    """The reward is added on the rank that owns the last response token: at CP 2, total 5, response
    3 the last entry of rank 0 is token 2, not 4; at total 7 rank 0 has none."""
    seen = {}
    monkeypatch.setattr(
        loss,
        "get_advantages_and_returns_batch",
        lambda t, r, values, rewards, gamma, lambd: (rewards, values),
    )
    for cp_rank in range(cp_size):
        layout = plan_response_layout([total], [response], cp_size=cp_size, cp_rank=cp_rank)
        local = torch.zeros(layout.num_local_tokens)
        data = {
            "total_lengths": [total],
            "response_lengths": [response],
            "loss_masks": [torch.ones(response)],
            "values": [local],
            "rewards": [7.0],
        }
        with pretend_rank(cp_size=cp_size, cp_rank=cp_rank):
            loss.compute_advantages_and_returns(
                SimpleNamespace(**{**BARE_ARGS, "advantage_estimator": "ppo"}), data
            )
        seen |= dict(
            zip(layout.response_indices.tolist(), data["advantages"][0].tolist(), strict=True)
        )
    assert [seen[token] for token in range(response)] == [0.0] * (response - 1) + [7.0]


def test_gae_skips_tokens_nobody_sampled():
    """The recursion goes from one sampled token to the next; a tool's tokens hold untrained values,
    here NaN."""
    nan = float("nan")
    data = {
        "total_lengths": [6],
        "response_lengths": [5],
        "loss_masks": [torch.tensor([1, 0, 0, 1, 0])],
        "values": [torch.tensor([0.5, nan, nan, 0.5, nan])],
        "rewards": [1.0],
    }
    compute(data, advantage_estimator="ppo", lambd=0.5)
    assert data["advantages"][0].tolist() == [0.25, 0, 0, 0.5, 0]
    assert data["returns"][0].tolist() == [0.75, 0, 0, 1.0, 0]


def test_a_custom_function_replaces_the_estimator(monkeypatch):
    """A custom function replaces the estimator; one that does not set both fields is refused with
    the missing name."""

    def set_both(args, rollout_data):
        rollout_data["advantages"] = [kl + 3 for kl in rollout_data["kl"]]
        rollout_data["returns"] = [kl + 4 for kl in rollout_data["kl"]]

    data = {
        "total_lengths": [5],
        "response_lengths": [2],
        "loss_masks": [torch.ones(2)],
        "rewards": [1.0],
    }
    monkeypatch.setattr(loss, "load_function", lambda path: set_both)
    assert as_lists(compute(dict(data), custom_advantage_function_path="a.b")["advantages"]) == [
        [3, 3]
    ]
    monkeypatch.setattr(loss, "load_function", lambda path: lambda args, rollout_data: None)
    with pytest.raises(
        RolloutDataError, match="no advantages, which --custom-advantage-function-path a.b"
    ):
        compute(dict(data), custom_advantage_function_path="a.b")


def test_distillation_needs_the_teacher_and_reports_the_reverse_kl():
    """Distillation subtracts coef * (student - teacher) from the advantages, reports the reverse
    KL, and refuses a batch without the teacher's log-probs."""
    data = {
        "total_lengths": [5],
        "response_lengths": [2],
        "loss_masks": [torch.ones(2)],
        "rewards": [1.0],
        "log_probs": [torch.tensor([-1.0, -2.0])],
    }
    with pytest.raises(ValueError, match="teacher_log_probs"):
        compute(dict(data), use_opd=True)
    data["teacher_log_probs"] = [torch.tensor([-1.5, -1.0])]
    compute(data, use_opd=True, opd_kl_coef=2.0)
    assert as_lists(data["advantages"]) == [[0.0, 3.0]] and as_lists(data["opd_reverse_kl"]) == [
        [0.5, -1.0]
    ]
    assert as_lists(data["returns"]) == [[1.0, 1.0]]
    advantages = [torch.ones(2)]
    assert loss.apply_opd_kl_to_advantages(SimpleNamespace(), {}, advantages, None) is advantages


def test_empty_responses_and_ranks_without_samples_pass_through():
    """Responses of length 0 and a rank without samples get advantages of length 0."""
    data = {
        "total_lengths": [4, 7, 4, 6],
        "response_lengths": [0, 3, 0, 2],
        "loss_masks": [torch.ones(n) for n in (0, 3, 0, 2)],
        "values": [torch.zeros(n) for n in (0, 3, 0, 2)],
        "rewards": [0.0, 1.0, 0.0, 2.0],
    }
    for estimator in ESTIMATORS:
        compute(data, advantage_estimator=estimator)
        assert as_lists(data["advantages"]) == [[], [1, 1, 1], [], [2, 2]], estimator
    empty = {
        "total_lengths": [],
        "response_lengths": [],
        "loss_masks": [],
        "values": [],
        "rewards": [],
    }
    for estimator in ESTIMATORS:
        assert compute(empty, advantage_estimator=estimator)["advantages"] == []


def test_unknown_estimators_and_wrong_lengths_are_named():
    """An unknown estimator and a field one entry short are refused by name; such a field would pair
    every later token with its neighbour."""
    data = {
        "total_lengths": [5],
        "response_lengths": [2],
        "loss_masks": [torch.ones(2)],
        "rewards": [1.0],
    }
    with pytest.raises(NotImplementedError, match="'pg'.*grpo"):
        compute(data, advantage_estimator="pg")
    with pytest.raises(RolloutDataError, match="log_probs of sample 0 .* 1 entries, expected 2"):
        compute({**data, "log_probs": [torch.zeros(1)]})
    with pytest.raises(RolloutDataError, match="2 rewards for 1 samples"):
        compute({**data, "rewards": [1.0, 2.0]})
    with pytest.raises(RolloutDataError, match="no values, which --advantage-estimator ppo"):
        compute(data, advantage_estimator="ppo")


def test_whitening_is_over_data_and_context_parallel_ranks(monkeypatch):
    """Whitening uses the data- and context-parallel ranks together; over data-parallel ranks alone
    each half of a sequence would get its own mean."""
    asked = []
    # undone before pretend_rank is: it would bring its stand-in back for good
    with pretend_rank(), monkeypatch.context() as patched:
        patched.setattr(
            loss.mpu,
            "get_data_parallel_group",
            lambda **options: asked.append(options) or "all of them",
        )
        patched.setattr(
            loss,
            "distributed_masked_whiten",
            lambda values, masks, *, process_group, **kw: [process_group],
        )
        layout = loss.get_response_layout([4], [2])
        assert loss.whiten_advantages(layout, {"loss_masks": [torch.ones(2)]}, torch.ones(2)) == [
            "all of them"
        ]
    assert asked == [{"with_context_parallel": True}]


def test_whitening_nothing_is_one_clear_error():
    """With all masks 0 whitening raises on every rank: it neither divides 0 by 0 nor hangs, because
    every rank has the global count."""
    with pytest.raises(ValueError, match="no position has mask 1 on any rank"):
        distributed_masked_whiten(torch.ones(3), torch.zeros(3))
    assert distributed_masked_whiten(torch.ones(3), torch.zeros(3), allow_empty=True).tolist() == [
        1,
        1,
        1,
    ]


@pytest.mark.parametrize("estimator", sorted(ESTIMATORS))
def test_a_rollout_that_is_masked_whole_is_left_as_it_is(estimator):
    """With --normalize-advantages a rollout that is masked whole keeps its advantages and ends no
    run; no loss reads them. A rank without samples takes part."""
    samples = make_samples([(2, 5), (1, 3)], 3)
    for sample in samples:
        sample.loss_mask = [0] * sample.response_length
    plain, whitened = (
        compute(
            make_data(samples),
            advantage_estimator=estimator,
            kl_coef=0.3,
            gamma=0.9,
            normalize_advantages=on,
        )
        for on in (False, True)
    )
    assert as_lists(whitened["advantages"]) == as_lists(plain["advantages"])
    assert as_lists(whitened["returns"]) == as_lists(plain["returns"])
    empty = {
        "total_lengths": [],
        "response_lengths": [],
        "loss_masks": [],
        "values": [],
        "rewards": [],
    }
    assert (
        list(compute(empty, advantage_estimator=estimator, normalize_advantages=True)["advantages"])
        == []
    )


def test_other_pipeline_stages_have_nothing_to_do():
    """Pipeline stages without log-probs compute nothing."""
    data: dict = {}
    with pretend_rank(last_stage=False):
        loss.compute_advantages_and_returns(SimpleNamespace(**BARE_ARGS), data)
    assert data == {}


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
