"""Log-probs and entropies of logits: the stated order of operations, gradients, nucleus replay,
chunks, and rows that do not train.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.pretend_rank import pretend_rank
from torch.utils._python_dispatch import TorchDispatchMode

from slime.backends.megatron_utils import loss, response_rows
from slime.exceptions import RolloutDataError
from slime.utils.ppo_utils import calculate_log_probs_and_entropy

NUM_GPUS = 0


def _logits(
    rows: int, width: int, *, seed: int = 0, dtype=torch.float32, scale: float = 3.0
) -> torch.Tensor:
    return (
        torch.randn(rows, width, generator=torch.Generator().manual_seed(seed), dtype=dtype) * scale
    )


def _in_stated_order(
    x: torch.Tensor, targets: torch.Tensor, g_log_prob: torch.Tensor, g_entropy: torch.Tensor
):
    """The contract, line by line: values and gradient."""
    m = x.max(dim=-1).values
    z = x - m[:, None]
    s = z.exp().sum(dim=-1)
    softmax = z.exp() / s[:, None]
    log_prob = z.gather(1, targets[:, None]).squeeze(1) - s.log()
    entropy = m + s.log() - (softmax * x).sum(dim=-1)
    grad = -softmax
    grad[torch.arange(len(x)), targets] += 1
    grad = grad * g_log_prob[:, None]
    grad = grad + softmax * ((softmax * x).sum(dim=-1)[:, None] - x) * g_entropy[:, None]
    return log_prob, entropy, grad


@pytest.mark.parametrize("chunk_size", [-1, 1, 4, 7, 100])
def test_values_and_gradients_follow_the_stated_operation_order_to_1e_8(chunk_size):
    """Values and gradients equal the stated order of operations at rtol 0, atol 1e-8 in fp32;
    another order of the same mathematics fails."""
    x = _logits(7, 33).requires_grad_()
    targets = torch.arange(7) * 4
    g_log_prob, g_entropy = _logits(7, 1, seed=1).squeeze(1), _logits(7, 1, seed=2).squeeze(1)
    log_prob, entropy = calculate_log_probs_and_entropy(
        x, targets, None, with_entropy=True, chunk_size=chunk_size
    )
    assert log_prob.shape == (7, 1) and entropy.shape == (7,)
    (log_prob.squeeze(1) * g_log_prob + entropy * g_entropy).sum().backward()
    expected = _in_stated_order(x.detach(), targets, g_log_prob, g_entropy)
    for actual, wanted in zip(
        (log_prob.detach().squeeze(1), entropy.detach(), x.grad), expected, strict=True
    ):
        torch.testing.assert_close(actual, wanted, rtol=0, atol=1e-8)
    reference = torch.log_softmax(x.detach().double(), dim=-1)
    torch.testing.assert_close(
        log_prob.detach().squeeze(1).double(),
        reference[torch.arange(7), targets],
        rtol=0,
        atol=5e-6,
    )


def test_gradients_agree_with_finite_differences():
    """fp64 gradcheck of the written-out backward pass, with and without a nucleus."""
    targets = torch.tensor([0, 4, 2])
    keep = torch.tensor([[1, 0, 1, 1, 0], [1, 1, 0, 0, 0], [1, 1, 1, 1, 1]]).bool()
    x = _logits(3, 5, dtype=torch.float64, scale=1.0).requires_grad_()
    for mask in (None, keep):
        call = lambda y, mask=mask: calculate_log_probs_and_entropy(  # noqa: E731
            y, targets, None, with_entropy=True, log_prob_keep_mask=mask
        )
        assert torch.autograd.gradcheck(call, (x,))


def test_entropy_without_gradient_gives_none_and_costs_no_graph():
    """With entropy_coef 0 the entropy is computed without a graph."""
    x = _logits(3, 5).requires_grad_()
    _, entropy = calculate_log_probs_and_entropy(
        x, torch.zeros(3, dtype=torch.int64), None, True, -1, None, False
    )
    assert not entropy.requires_grad
    assert calculate_log_probs_and_entropy(x, torch.zeros(3, dtype=torch.int64), None)[1] is None


def test_no_rows_give_empty_results_that_still_carry_the_graph():
    """A rank without response tokens gets empty results with a graph, so that its backward pass
    joins the collectives."""
    x = torch.empty(0, 5, requires_grad=True)
    log_prob, entropy = calculate_log_probs_and_entropy(
        x, torch.empty(0, dtype=torch.int64), None, with_entropy=True
    )
    assert log_prob.shape == entropy.shape == (0,)
    (log_prob.sum() + entropy.sum()).backward()
    assert x.grad.shape == (0, 5)


@pytest.mark.parametrize("chunk_size", [-1, 1])
def test_nucleus_restricts_the_log_prob_not_the_entropy_and_keeps_the_target(chunk_size):
    """Probabilities .5 .3 .2: inside the nucleus {0} token 0 has log-prob 0, over the full
    vocabulary -.693.
    """
    x = torch.tensor([[0.5, 0.3, 0.2]] * 2).log()
    keep = torch.tensor([[True, False, False], [True, False, False]])
    log_prob, entropy = calculate_log_probs_and_entropy(
        x, torch.tensor([0, 2]), None, True, chunk_size, keep
    )
    assert log_prob.squeeze(1).tolist() == pytest.approx(
        [0.0, torch.tensor(0.2 / 0.7).log().item()], abs=1e-6
    )
    assert entropy.tolist() == pytest.approx([1.0296530] * 2, abs=1e-6)
    full, _ = calculate_log_probs_and_entropy(x, torch.tensor([0, 2]), None)
    assert full.squeeze(1).tolist() == pytest.approx([-0.6931472, -1.6094379], abs=1e-6)


def _nucleus(lengths: list[int], id_: int = 1) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    return [torch.full((n,), id_, dtype=torch.int32) for n in lengths], [
        torch.arange(n + 1, dtype=torch.int32) for n in lengths
    ]


@pytest.mark.parametrize(
    ("totals", "responses", "layout", "rows", "allgather", "restricted"),
    [
        ([5, 4], [2, 3], {}, 9, False, [2, 3, 5, 6, 7]),
        ([8], [4], {"cp_size": 2, "cp_rank": 0}, 4, False, [2]),
        ([8], [4], {"cp_size": 2, "cp_rank": 1}, 4, False, [1, 2, 3]),
        ([6], [4], {"cp_size": 2, "cp_rank": 0}, 3, True, [1, 2]),
        ([6], [4], {"cp_size": 2, "cp_rank": 1}, 3, True, [0, 1]),
    ],
)
def test_keep_mask_restricts_the_rows_that_predict_the_response(
    totals, responses, layout, rows, allgather, restricted
):
    """The nucleus applies to the rows that predict the response; on a neighbouring row it would
    renormalize another token's distribution."""
    ids, offsets = _nucleus(responses)
    with pretend_rank(**layout):
        mask = loss._build_topp_keep_mask(
            rows, 4, torch.device("cpu"), ids, offsets, totals, responses, allgather
        )
    assert torch.nonzero(~mask.all(dim=1)).squeeze(1).tolist() == restricted
    assert all(mask[row].tolist() == [False, True, False, False] for row in restricted)


@pytest.mark.parametrize(("cp_rank", "kept"), [(0, {2: [3]}), (1, {1: [0], 2: [1], 3: [2]})])
def test_each_row_keeps_the_nucleus_of_its_own_token(cp_rank, kept):
    """Under context parallelism each row has its own token's nucleus: token j was drawn from {j};
    of 8 logits rank 0 has 0, 1, 6 and 7, rank 1 has 2 to 5, and logit 3 + j predicts token j."""
    ids, offsets = [torch.arange(4, dtype=torch.int32)], [torch.arange(5, dtype=torch.int32)]
    with pretend_rank(cp_size=2, cp_rank=cp_rank):
        mask = loss._build_topp_keep_mask(4, 4, torch.device("cpu"), ids, offsets, [8], [4], False)
    assert {
        row: mask[row].nonzero().flatten().tolist() for row in range(4) if not mask[row].all()
    } == kept


def test_keep_mask_on_a_vocabulary_shard_and_for_tokens_nobody_sampled():
    """Rank 1 of two owns ids 4..7; an empty span (a tool's token) keeps the whole row, and so does
    a sample without a nucleus.
    """
    ids = [torch.tensor([1, 5, 6, 7]), None]
    offsets = [torch.tensor([0, 2, 2, 4]), None]
    with pretend_rank(tp_rank=1, tp_size=2):
        mask = loss._build_topp_keep_mask(
            7, 4, torch.device("cpu"), ids, offsets, [4, 3], [3, 1], False
        )
    assert mask[0].tolist() == [False, True, False, False]
    assert mask[1].all() and mask[3:].all()
    assert mask[2].tolist() == [False, False, True, True]
    with (
        pretend_rank(),
        pytest.raises(RolloutDataError, match="nucleus of sample 0 .* 4 offsets ending at 4 for 2"),
    ):
        loss._build_topp_keep_mask(7, 8, torch.device("cpu"), ids, offsets, [4, 3], [2, 1], False)


class CountOperations(TorchDispatchMode):
    """Counts what torch is asked to compute."""

    num = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.num += 1
        return function(*args, **(kwargs or {}))


def test_nucleus_and_softmax_are_for_trained_tokens_alone_and_filled_at_once(monkeypatch):
    """The softmax has as many rows as trained tokens, and the nucleus mask takes as many operations
    for 400 tokens as for few."""
    sizes, operations = [], []
    real = response_rows.calculate_log_probs_and_entropy

    def spy(selected, targets, *positional, log_prob_keep_mask, **options):
        sizes.append((len(selected), len(targets), len(log_prob_keep_mask)))
        return real(
            selected, targets, *positional, log_prob_keep_mask=log_prob_keep_mask, **options
        )

    monkeypatch.setattr(response_rows, "calculate_log_probs_and_entropy", spy)
    args = SimpleNamespace(
        rollout_temperature=1.0, log_probs_chunk_size=-1, allgather_cp=False, entropy_coef=0.0
    )
    for response in (4, 400):
        total, ids, offsets = 1000 + response, *_nucleus([response])
        mask = torch.ones(response)
        mask[1] = 0  # one token that nobody trains
        packed = response_rows.PackedResponses(
            [torch.ones(total, dtype=torch.int64)], [total], [response], [mask], ids, offsets
        )
        with pretend_rank(), CountOperations() as counting:
            response_rows.compute_response_log_probs(
                torch.zeros(1, total, 4),
                loss.LossConfig.from_args(args),
                packed,
                with_entropy=False,
            )
        operations.append(counting.num)
    assert sizes == [(3, 3, 3), (399, 399, 399)]
    assert operations[0] == operations[1]


def test_replay_without_its_fields_is_refused():
    """Nucleus replay without the nucleus ids is refused; full-vocabulary log-probs against the
    engine's renormalized ones are another ratio."""
    assert loss.get_rollout_top_p_logprob_kwargs(SimpleNamespace(rollout_top_p=1.0), {}) == {}
    fields = {"rollout_top_p_token_ids": [1], "rollout_top_p_token_offsets": [2]}
    kwargs = loss.get_rollout_top_p_logprob_kwargs(SimpleNamespace(rollout_top_p=0.9), fields)
    assert kwargs == {"top_p_token_ids": [1], "top_p_token_offsets": [2]}
    with pytest.raises(ValueError, match="rollout_top_p_token_offsets"):
        loss.get_rollout_top_p_logprob_kwargs(
            SimpleNamespace(rollout_top_p=0.9), {"rollout_top_p_token_ids": [1]}
        )


@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6)), min_size=1, max_size=5),
    st.sampled_from([1.0, 0.5]),
    st.integers(0, 10**6),
)
@settings(max_examples=30, deadline=None)
def test_packed_responses_have_the_log_probs_of_each_sample_alone(samples, temperature, seed):
    """Packed responses have each sample's own log-probs: token j is predicted by the logit before
    it."""
    generator = torch.Generator().manual_seed(seed)
    totals, responses = [p + r for p, r in samples], [r for _, r in samples]
    tokens = [torch.randint(0, 9, (total,), generator=generator) for total in totals]
    logits = torch.randn(1, sum(totals) + 3, 9, generator=generator)
    args = SimpleNamespace(
        rollout_temperature=temperature,
        log_probs_chunk_size=-1,
        allgather_cp=False,
        entropy_coef=0.0,
    )
    packed = {"unconcat_tokens": tokens, "total_lengths": totals, "response_lengths": responses}
    with pretend_rank():
        nothing, out = loss.get_log_probs_and_entropy(
            logits, args=args, with_entropy=True, **packed
        )
        yielded = list(loss.get_responses(logits, args=args, apply_temperature=False, **packed))
    assert nothing.numel() == 0 and len(out["log_probs"]) == len(out["entropy"]) == len(
        yielded
    ) == len(samples)
    start = 0
    for i, (total, response) in enumerate(zip(totals, responses, strict=True)):
        rows = logits[0, start + total - response - 1 : start + total - 1]
        distribution = torch.log_softmax(rows.double() / temperature, dim=-1)
        wanted = distribution.gather(1, tokens[i][total - response :, None]).squeeze(1)
        torch.testing.assert_close(out["log_probs"][i].double(), wanted, rtol=0, atol=1e-5)
        torch.testing.assert_close(
            out["entropy"][i].double(),
            -(distribution.exp() * distribution).sum(-1),
            rtol=0,
            atol=1e-5,
        )
        assert torch.equal(yielded[i][0], rows) and torch.equal(
            yielded[i][1], tokens[i][total - response :]
        )
        start += total


def test_logits_must_be_fp32_and_ids_complete():
    """Logits in bf16, whose softmax loses the digits of the importance ratio, and incomplete ids
    are refused."""
    args = SimpleNamespace(rollout_temperature=1.0)
    packed = {"unconcat_tokens": [torch.arange(3)], "total_lengths": [4], "response_lengths": [2]}
    with pretend_rank():
        with pytest.raises(AssertionError, match="bfloat16"):
            loss.get_values(torch.zeros(1, 4, 1, dtype=torch.bfloat16), args=args, **packed)
        with pytest.raises(
            RolloutDataError, match="unconcat_tokens of sample 0 .* 3 entries, expected 4"
        ):
            loss.get_log_probs_and_entropy(torch.zeros(1, 4, 5), args=args, **packed)


def test_values_are_read_without_temperature():
    """A critic's values are not divided by the temperature."""
    args = SimpleNamespace(rollout_temperature=0.5, allgather_cp=False)
    output = torch.arange(9.0).reshape(1, 9, 1)
    packed = {
        "unconcat_tokens": [torch.zeros(5), torch.zeros(4)],
        "total_lengths": [5, 4],
        "response_lengths": [2, 3],
    }
    with pretend_rank():
        _, out = loss.get_values(output, args=args, **packed)
    assert [values.tolist() for values in out["values"]] == [[2.0, 3.0], [5.0, 6.0, 7.0]]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
