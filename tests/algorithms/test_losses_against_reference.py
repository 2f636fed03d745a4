"""The loss of a step, its gradient and its metrics, against a single-process reference that shares
no code: under any packing, order, padding, split into micro-batches, and on any context-parallel
rank.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.loss_cases import make_logits, make_samples, mask_sums_of, pack, reference_of
from support.pretend_rank import pretend_rank
from support.reference import (
    ReferenceOptions,
    reference_advantages,
    reference_policy_loss,
    reference_sft_loss,
    reference_value_loss,
)
from torch.overrides import TorchFunctionMode

from slime.backends.megatron_utils import loss
from slime.exceptions import ConfigError, RolloutDataError
from slime.metrics.contributions import maximum
from slime.metrics.step_metrics import reduce_train_step_metrics

NUM_GPUS = 0

SHAPES = [(3, 8), (1, 11), (5, 1), (2, 0), (2, 9), (4, 7)]
ROLLOUT_IDS = [0, 0, 1, 2, 3, 3]  # samples 0 and 1 are parts of one rollout, and so are 4 and 5

VARIANTS = {
    "grpo": {},
    "grpo dual clip": {"eps_clip_c": 1.5, "eps_clip_high": 0.4},
    "grpo kl": {"use_kl_loss": True, "kl_loss_coef": 0.2, "kl_loss_type": "low_var_kl"},
    "grpo unbiased kl": {
        "use_kl_loss": True,
        "kl_loss_coef": 0.2,
        "kl_loss_type": "k3",
        "use_unbiased_kl": True,
    },
    "grpo entropy": {"entropy_coef": 0.1, "rollout_temperature": 0.7},
    "grpo tis": {"use_tis": True, "tis_clip": 1.1, "tis_clip_low": 0.9},
    "grpo rollout log-probs": {"use_rollout_logprobs": True},
    "grpo opsm": {"use_opsm": True},
    "grpo per token": {"calculate_per_token_loss": True, "entropy_coef": 0.1, "use_tis": True},
    "gspo": {"advantage_estimator": "gspo"},
    "gspo opsm per token": {
        "advantage_estimator": "gspo",
        "use_opsm": True,
        "calculate_per_token_loss": True,
    },
    "cispo": {"advantage_estimator": "cispo"},
    "rloo": {"advantage_estimator": "rloo"},
    "dr_grpo": {"advantage_estimator": "dr_grpo", "use_tis": True},
    "ppo": {"advantage_estimator": "ppo", "gamma": 0.9, "lambd": 0.8, "kl_coef": 0.1},
    "reinforce_plus_plus": {
        "advantage_estimator": "reinforce_plus_plus",
        "normalize_advantages": True,
    },
    "reinforce_plus_plus_baseline": {
        "advantage_estimator": "reinforce_plus_plus_baseline",
        "kl_coef": 0.1,
    },
}
# CP ranks of these talk to each other in the loss: tests/distributed runs them with real groups
NEEDS_GROUP = {"gspo", "grpo opsm", "gspo opsm per token"}


def run_step(
    samples,
    logits,
    advantages,
    options,
    *,
    bins,
    dp_size=1,
    cp_size=1,
    returns=None,
    padding=3,
    **extra,
):
    """Returns (loss, metrics) of one step as Megatron's schedule and the metric reduction put it
    together, and leaves the gradient in `logits`.
    """
    args = SimpleNamespace(**dataclasses.asdict(options), **extra)
    sums = mask_sums_of(samples)
    num_rollouts = len({sample.rollout_id for sample in samples})
    num_microbatches = len(bins) // dp_size
    total, tokens, values, keys = 0.0, 0, 0.0, None
    for cp_rank in range(cp_size):
        with pretend_rank(cp_size=cp_size, cp_rank=cp_rank, dp_size=dp_size):
            for indices in bins:
                pick = lambda rows, indices=indices: [rows[i] for i in indices]  # noqa: E731
                batch, packed = pack(
                    pick(samples),
                    pick(logits),
                    pick(advantages),
                    pick(sums),
                    padding=padding,
                    returns=pick(returns or advantages),
                )
                step_loss, normaliser, reported = loss.loss_function(
                    args, batch, num_microbatches, num_rollouts, packed
                )
                if not options.calculate_per_token_loss:
                    step_loss = (
                        step_loss / max(int(normaliser), 1) / num_microbatches / (dp_size * cp_size)
                    )
                total, tokens = total + step_loss, tokens + int(normaliser)
                assert keys in (None, reported["keys"]) and normaliser.dtype == torch.int32
                values, keys = values + reported["values"], reported["keys"]
    if options.calculate_per_token_loss:
        total = total / tokens
    with pretend_rank():  # a recomputed loss asks again where it is
        total.backward()
    divisor = values[0] / cp_size if options.calculate_per_token_loss else num_rollouts
    return total.item(), {
        key: (value / divisor).item() for key, value in zip(keys, values[1:], strict=True)
    }


def reference_step(samples, logits, options):
    """Returns (advantages, loss, metrics) and leaves the gradient in `logits`."""
    advantages, returns, _ = reference_advantages(samples, options)
    log_probs, entropies = reference_of(samples, logits, options)
    value, metrics = reference_policy_loss(samples, log_probs, entropies, advantages, options)
    value.backward()
    return advantages, value.item(), metrics


def take_gradients(logits) -> list[torch.Tensor]:
    gradients = [
        torch.zeros_like(rows) if rows.grad is None else rows.grad.clone() for rows in logits
    ]
    for rows in logits:
        rows.grad = None
    return gradients


def assert_same_gradients(actual, expected, *, rtol=1e-4):
    scale = max(float(gradient.abs().max()) for gradient in expected if gradient.numel())
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=rtol, atol=rtol * scale)


def assert_metrics(metrics, expected):
    for name, value in metrics.items():
        assert value == pytest.approx(expected.get(name, 0.0), rel=1e-5, abs=2e-6), name


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_one_rank_equals_the_reference(name):
    """Loss and metrics equal the reference within 1e-5 and gradients within 1e-4, with empty
    micro-batches and masked and empty samples."""
    options = ReferenceOptions(**VARIANTS[name])
    samples, logits = make_samples(SHAPES, 5, rollout_ids=ROLLOUT_IDS), None
    samples[2].loss_mask = [0] * samples[2].response_length
    logits = make_logits(samples, 6)
    advantages, expected_loss, expected = reference_step(samples, logits, options)
    gradients = take_gradients(logits)
    step_loss, metrics = run_step(
        samples, logits, advantages, options, bins=[[0, 3, 4], [5, 1, 2], []]
    )
    assert step_loss == pytest.approx(expected_loss, rel=1e-5, abs=1e-7)
    assert_metrics(metrics, expected)
    assert {
        "loss",
        "pg_loss",
        "pg_clipfrac",
        "ppo_kl",
        "train_rollout_logprob_abs_diff",
        "entropy_loss",
    } <= set(metrics)
    assert_same_gradients(take_gradients(logits), gradients)


@pytest.mark.parametrize("cp_size", [2, 4])
@pytest.mark.parametrize("name", sorted(set(VARIANTS) - NEEDS_GROUP))
def test_context_parallel_ranks_add_up_to_the_reference(name, cp_size):
    """Losses and gradients of context-parallel ranks add up to the reference; counted once per rank
    they would be CP times too large."""
    options = ReferenceOptions(**VARIANTS[name])
    samples = make_samples(SHAPES, 5, rollout_ids=ROLLOUT_IDS)
    logits = make_logits(samples, 6)
    advantages, expected_loss, expected = reference_step(samples, logits, options)
    gradients = take_gradients(logits)
    step_loss, metrics = run_step(
        samples, logits, advantages, options, bins=[[0, 3, 4], [5, 1, 2]], cp_size=cp_size
    )
    assert step_loss == pytest.approx(expected_loss, rel=1e-5, abs=1e-7)
    assert_metrics(metrics, expected)
    assert_same_gradients(take_gradients(logits), gradients)


@given(
    st.permutations(range(6)),
    st.lists(st.integers(0, 6), max_size=3),
    st.integers(0, 5),
    st.sampled_from([1, 2]),
)
@settings(max_examples=25, deadline=None)
def test_order_split_and_padding_do_not_matter(order, cuts, padding, dp_size):
    """The same samples in any order, in any micro-batches, on any number of data-parallel ranks:
    one loss, one gradient, one set of metrics.
    """
    options = ReferenceOptions(entropy_coef=0.1, use_kl_loss=True, kl_loss_coef=0.2, use_tis=True)
    samples = make_samples(SHAPES, 8, rollout_ids=ROLLOUT_IDS)
    logits = make_logits(samples, 9)
    advantages, _, _ = reference_advantages(samples, options)
    together = run_step(samples, logits, advantages, options, bins=[list(range(6))])
    expected = take_gradients(logits)
    edges = [0, *sorted(cuts), 6]
    bins = [list(order[low:high]) for low, high in zip(edges, edges[1:], strict=False)]
    bins += [[]] * (-len(bins) % dp_size)
    split = run_step(
        samples, logits, advantages, options, bins=bins, padding=padding, dp_size=dp_size
    )
    assert split[0] == pytest.approx(together[0], rel=1e-5)
    assert split[1] == pytest.approx(together[1], rel=1e-5, abs=1e-6)
    assert_same_gradients(take_gradients(logits), expected)


@pytest.mark.parametrize("name", sorted(VARIANTS))
@pytest.mark.parametrize("junk", [float("nan"), float("inf")])
def test_junk_at_masked_positions_changes_nothing(name, junk):
    """NaN at masked positions leaves loss, metrics and gradient bit-equal; a multiplication by the
    mask would keep it, because 0 * NaN is NaN."""
    options = ReferenceOptions(**VARIANTS[name])
    samples = make_samples(SHAPES, 5, rollout_ids=ROLLOUT_IDS)
    clean_logits = make_logits(samples, 6)
    advantages, _, _ = reference_advantages(samples, options)
    bins = [[0, 1, 2, 3, 4, 5]]
    clean = run_step(samples, clean_logits, advantages, options, bins=bins)

    dirty_logits = [rows.detach().clone() for rows in clean_logits]
    for sample, rows, advantage in zip(samples, dirty_logits, advantages, strict=True):
        for t, mask in enumerate(sample.loss_mask):
            if not mask:
                rows[sample.prompt_length + t - 1] = junk
                advantage[t] = junk
                for field in (
                    sample.log_probs,
                    sample.rollout_log_probs,
                    sample.ref_log_probs,
                    sample.values,
                ):
                    field[t] = junk
        rows[: sample.prompt_length - 1] = junk
    dirty_logits = [rows.requires_grad_() for rows in dirty_logits]
    dirty = run_step(samples, dirty_logits, [list(a) for a in advantages], options, bins=bins)
    assert dirty == clean
    for sample, dirty_rows, clean_rows in zip(samples, dirty_logits, clean_logits, strict=True):
        assert torch.equal(dirty_rows.grad, clean_rows.grad)
        assert torch.count_nonzero(dirty_rows.grad[: sample.prompt_length - 1]) == 0


@pytest.mark.parametrize("name", [*sorted(VARIANTS), "value loss", "sft loss"])
def test_loss_gradients_agree_with_finite_differences(name):
    """fp64 gradcheck from the packed logits to the scaled loss that Megatron's
    schedule receives.
    """
    loss_types = {"value loss": "value_loss", "sft loss": "sft_loss"}
    options = ReferenceOptions(**VARIANTS.get(name, {}))
    samples = make_samples([(1, 2), (2, 0), (1, 3)], 4)
    advantages, _, _ = reference_advantages(samples, options)
    width = 1 if name == "value loss" else 5
    for sample in samples:
        sample.tokens = [token % 5 for token in sample.tokens]
    batch, packed = pack(
        samples, make_logits(samples, 6, width=width), advantages, mask_sums_of(samples), padding=1
    )
    args = SimpleNamespace(
        **dataclasses.asdict(options), loss_type=loss_types.get(name, "policy_loss")
    )
    with pretend_rank():
        assert torch.autograd.gradcheck(
            lambda x: loss.loss_function(args, batch, 2, 3, x)[0],
            (packed.detach().double().requires_grad_(),),
            atol=1e-6,
        )


@pytest.mark.parametrize("cp_size", [1, 2])
def test_value_loss_equals_the_reference(cp_size):
    """The critic's loss and gradient equal the reference, with NaN in the old values of masked
    tokens."""
    # not the default
    options = ReferenceOptions(advantage_estimator="ppo", gamma=0.9, lambd=0.8, value_clip=0.05)
    samples = make_samples(SHAPES, 5, rollout_ids=ROLLOUT_IDS)
    logits = make_logits(samples, 6, width=1)
    advantages, returns, _ = reference_advantages(samples, options)
    values = [
        rows[s.prompt_length - 1 : len(s.tokens) - 1, 0].double()
        for rows, s in zip(logits, samples, strict=True)
    ]
    expected = reference_value_loss(samples, values, returns, options)
    expected.backward()
    gradients = take_gradients(logits)
    for sample in samples:
        sample.values = [
            v if m else float("nan") for v, m in zip(sample.values, sample.loss_mask, strict=True)
        ]
    step = run_step(
        samples,
        logits,
        advantages,
        options,
        bins=[[0, 1, 2], [3, 4, 5]],
        cp_size=cp_size,
        returns=returns,
        loss_type="value_loss",
    )
    assert step[0] == pytest.approx(expected.item(), rel=1e-5)
    assert (
        step[1]["value_loss"] == pytest.approx(expected.item(), rel=1e-5)
        and 0 <= step[1]["value_clipfrac"] <= 1
    )
    assert_same_gradients(take_gradients(logits), gradients)


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.5, 1.0), (1.0, 0.9)])
def test_sft_loss_is_the_references_whatever_a_rollout_would_be_sampled_with(temperature, top_p):
    """The SFT loss is minus the log-probs at temperature 1, whatever the rollout options:
    conversations are written, not sampled, and have no nucleus to replay."""
    samples = make_samples(SHAPES, 5, rollout_ids=ROLLOUT_IDS)
    logits = make_logits(samples, 6)
    expected = reference_sft_loss(samples, reference_of(samples, logits, ReferenceOptions())[0])
    advantages = [[0.0] * s.response_length for s in samples]
    options = ReferenceOptions(rollout_temperature=temperature)
    step = run_step(
        samples,
        logits,
        advantages,
        options,
        bins=[[0, 1, 2], [3, 4, 5]],
        loss_type="sft_loss",
        rollout_top_p=top_p,
    )
    assert step[0] == pytest.approx(expected.item(), rel=1e-5) and step[1] == {
        "loss": pytest.approx(expected.item(), rel=1e-5)
    }


@pytest.mark.parametrize("recompute", [False, True])
def test_first_step_without_old_log_probs_has_ratio_one(recompute):
    """Without a log-prob pass the first step has ratio 1, loss -mean A and the policy gradient;
    recomputing changes nothing."""
    options = ReferenceOptions()
    samples = make_samples(SHAPES, 5)
    for sample in samples:
        sample.log_probs = sample.rollout_log_probs = None
    logits = make_logits(samples, 6)
    advantages, expected_loss, expected = reference_step(samples, logits, options)
    gradients = take_gradients(logits)
    step = run_step(
        samples,
        logits,
        advantages,
        options,
        bins=[[0, 1, 2], [3, 4, 5]],
        recompute_loss_function=recompute,
    )
    assert step[0] == pytest.approx(expected_loss, rel=1e-5) and step[1]["ppo_kl"] == 0
    assert "train_rollout_logprob_abs_diff" not in step[1]
    assert_same_gradients(take_gradients(logits), gradients)


def one_batch(**options):
    samples = make_samples([(2, 4), (1, 3)], 3)
    for sample in samples:
        sample.loss_mask = [1] * sample.response_length
    logits = make_logits(samples, 4)
    advantages, _, _ = reference_advantages(samples, ReferenceOptions())
    batch, packed = pack(samples, logits, advantages, mask_sums_of(samples))
    return SimpleNamespace(**{**dataclasses.asdict(ReferenceOptions()), **options}), batch, packed


def call_loss(args, batch, packed):
    with pretend_rank():
        value, normaliser, reported = loss.loss_function(args, batch, 1, 2, packed)
    return (
        value,
        normaliser,
        dict(zip(reported["keys"], reported["values"][1:].tolist(), strict=True)),
    )


def test_entropy_is_reported_unless_that_is_switched_off(monkeypatch):
    """train/entropy_loss is reported unless --no-report-entropy saves the pass over the vocabulary;
    the loss is the same."""
    args, batch, packed = one_batch()
    asked = []
    real = loss.compute_response_log_probs

    def spy(*positional, with_entropy):
        asked.append(with_entropy)
        return real(*positional, with_entropy=with_entropy)

    monkeypatch.setattr(loss, "compute_response_log_probs", spy)
    plain = call_loss(SimpleNamespace(**vars(args), report_entropy=False), batch, packed)
    reporting = call_loss(args, batch, packed)
    assert asked == [False, True] and "entropy_loss" not in plain[2]
    assert reporting[2]["entropy_loss"] > 0 and reporting[0].item() == plain[0].item()


class HostReads(TorchFunctionMode):
    """Counts reads of a tensor's value by Python: on a GPU each is a synchronisation."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        if name in (
            "item",
            "tolist",
            "numpy",
            "cpu",
            "__bool__",
            "__int__",
            "__float__",
            "__index__",
        ):
            self.found.append(name)
        if name in ("tensor", "as_tensor") and isinstance(args[0], list | tuple):
            self.found += [name for value in args[0] if isinstance(value, torch.Tensor)]
        return function(*args, **(kwargs or {}))


def test_more_metrics_read_no_more_values_from_the_device():
    """The metrics leave the loss as one tensor: 11 of them cause no more reads of the device than
    6."""
    reads = {}
    for options in (
        {},
        {"use_kl_loss": True, "kl_loss_coef": 0.2, "entropy_coef": 0.1, "use_tis": True},
    ):
        args, batch, packed = one_batch(**options)
        with pretend_rank(), HostReads() as mode:
            reported = loss.loss_function(args, batch, 1, 2, packed)[2]
        assert reported["values"].shape == (1 + len(reported["keys"]),)
        reads[len(reported["keys"])] = mode.found
    assert list(reads) == [6, 11] and reads[6] == reads[11] and len(reads[6]) <= 5
    with HostReads() as mode:
        torch.tensor([torch.ones(()), torch.ones(())])
    assert mode.found == ["tensor", "tensor"], "the fault itself is seen"


def test_a_correction_may_reject_tokens_from_the_loss_but_not_from_the_metrics(monkeypatch):
    """A correction that masks tokens changes the loss and not its denominators; KL and clip
    fraction are over the batch's masks."""
    args, batch, packed = one_batch(use_tis=True, custom_tis_function_path="my.function")

    def reject_the_first_token(
        args, *, pg_loss, loss_masks, total_lengths, response_lengths, **kwargs
    ):
        assert (
            len(kwargs["train_log_probs"])
            == len(kwargs["rollout_log_probs"])
            == len(loss_masks)
            == 2
        )
        masks = [mask.clone() for mask in loss_masks]
        for mask in masks:
            mask[0] = 0
        return pg_loss * 0 + 1, masks, {"mine": torch.ones_like(pg_loss)}

    monkeypatch.setattr(loss, "load_function", lambda path: reject_the_first_token)
    _, _, metrics = call_loss(args, batch, packed)
    assert metrics["pg_loss"] == pytest.approx(3 / 4 + 2 / 3)  # denominators 4 and 3 stay
    assert metrics["mine"] == pytest.approx(2.0)
    uncorrected = call_loss(one_batch(entropy_coef=0.1)[0], batch, packed)[2]
    args.entropy_coef = 0.1
    corrected = call_loss(args, batch, packed)[2]
    assert all(
        corrected[name] == uncorrected[name] for name in ("ppo_kl", "pg_clipfrac", "entropy_loss")
    )
    metrics_only = SimpleNamespace(**{**vars(args), "use_tis": False, "get_mismatch_metrics": True})
    _, _, metrics = call_loss(metrics_only, batch, packed)
    _, _, plain = call_loss(one_batch()[0], batch, packed)
    assert metrics["pg_loss"] == plain["pg_loss"] and metrics["mine"] == pytest.approx(2.0)


def test_the_distance_to_the_teacher_is_among_the_metrics_of_the_step():
    """The step's metrics include the reverse KL to the teacher, here .5 nats per token of two
    rollouts."""
    args, batch, packed = one_batch()
    assert "opd_reverse_kl" not in call_loss(args, batch, packed)[2]
    batch["opd_reverse_kl"] = [
        torch.full_like(mask, 0.5, dtype=torch.float32) for mask in batch["loss_masks"]
    ]
    assert call_loss(args, batch, packed)[2]["opd_reverse_kl"] == pytest.approx(0.5 + 0.5)


@pytest.mark.parametrize("takes_denominators", [True, False])
def test_custom_reducer_gets_the_denominators_when_it_names_them(monkeypatch, takes_denominators):
    """A custom reducer that names a fifth argument gets the denominators; upstream's four cannot
    express the per-rollout mean."""
    args, batch, packed = one_batch(custom_pg_loss_reducer_function_path="my.reducer")
    seen = {}

    def four(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
        return lambda x: x.sum() * 0 + 5

    def five(
        total_lengths, response_lengths, loss_masks, calculate_per_token_loss, sample_denoms=None
    ):
        seen["denominators"] = sample_denoms
        return four(total_lengths, response_lengths, loss_masks, calculate_per_token_loss)

    monkeypatch.setattr(loss, "load_function", lambda path: five if takes_denominators else four)
    assert call_loss(args, batch, packed)[2]["pg_loss"] == 5
    assert not takes_denominators or torch.equal(seen["denominators"], batch["rollout_mask_sums"])


WORKED_EXAMPLE = (  # per rank: masks, denominators, the tokens' losses
    ([[1, 1, 0], [1, 1]], [4.0, 4.0], [1.0, 3.0, 9.0, 2.0, 2.0]),
    ([[1, 0, 1, 1]], [3.0], [0.5, 9.0, 0.5, 2.0]),
)


@pytest.mark.parametrize(
    ("per_token", "values", "losses", "metric"),
    [
        (False, [[0.0, 2.0], [0.0, 1.0]], [2.0, 1.0], 1.5),
        (True, [[4.0, 8.0], [3.0, 3.0]], [8.0, 3.0], 11 / 7),
    ],
)
def test_the_worked_example_of_the_module_is_true(monkeypatch, per_token, values, losses, metric):
    """Three samples on two ranks hold what the head of loss.py says, and the step reports it."""
    args = SimpleNamespace(
        loss_type="custom_loss", custom_loss_function_path="f", calculate_per_token_loss=per_token
    )
    found, reports = [], []
    for masks, denominators, flat in WORKED_EXAMPLE:
        lengths = [len(mask) for mask in masks]
        batch = {
            "total_lengths": [2 + length for length in lengths],
            "response_lengths": lengths,
            "loss_masks": [torch.tensor(mask) for mask in masks],
            "rollout_mask_sums": torch.tensor(denominators),
        }

        def token_losses(args, batch, logits, sum_of_sample_mean, flat=flat):
            tokens = loss.ResponseTokens.of(batch, logits.device)
            value = sum_of_sample_mean(torch.tensor(flat))
            return value, {"loss": value, "max": maximum(tokens.trained(torch.tensor(flat)))}

        monkeypatch.setattr(loss, "load_function", lambda path, f=token_losses: f)
        with pretend_rank(dp_size=2):
            value, _, report = loss.loss_function(args, batch, 1, 2, torch.zeros(1, 4, 2))
        found.append(float(value))
        reports.append(report)
    assert found == losses and [report["values"].tolist() for report in reports] == values
    # two micro-batches of one rank reduce like one micro-batch of two
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor, group: None)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 1)
    monkeypatch.setattr(
        torch.distributed,
        "all_gather_object",
        lambda gathered, mine, group: gathered.__setitem__(0, mine),
    )
    reduced = reduce_train_step_metrics(
        reports,
        calculate_per_token_loss=per_token,
        step_global_batch_size=2,
        cp_size=1,
        dp_with_cp_group=None,
    )
    assert reduced == {"loss": metric, "max": 3.0}


def test_custom_loss_and_unknown_loss(monkeypatch):
    """A custom loss gets the reducer, while scaling and reporting stay the framework's; an unknown
    loss type is refused."""
    args, batch, packed = one_batch(loss_type="custom_loss", custom_loss_function_path="my.loss")
    monkeypatch.setattr(
        loss,
        "load_function",
        lambda path: lambda args, batch, logits, reduce: (reduce(torch.ones(7)), {"mine": 3.0}),
    )
    value, normaliser, metrics = call_loss(args, batch, packed)
    value.backward()  # a loss that does not reach the logits must not stop the backward pass
    assert value.item() == 2 / 2 and int(normaliser) == 1 and metrics == {"mine": 3.0}
    with pytest.raises(ConfigError, match="--custom-loss-function-path"):
        call_loss(one_batch(loss_type="custom_loss")[0], batch, packed)
    with pytest.raises(ValueError, match="unknown loss type 'pg'"):
        call_loss(one_batch(loss_type="pg")[0], batch, packed)


@pytest.mark.parametrize(
    ("options", "missing"),
    [
        ({"use_tis": True}, "rollout_log_probs"),
        ({"use_rollout_logprobs": True}, "rollout_log_probs"),
        ({"use_kl_loss": True}, "ref_log_probs"),
    ],
)
def test_a_missing_field_is_named_with_the_option_that_needs_it(options, missing):
    """A batch without a required field is refused with the field and the option that needs it."""
    args, batch, packed = one_batch(**options)
    batch.pop(missing)
    with pytest.raises(RolloutDataError, match=f"no {missing}, which --"):
        call_loss(args, batch, packed)
    with pytest.raises(ConfigError, match="--dr-grpo-length"):
        call_loss(
            one_batch(advantage_estimator="dr_grpo", rollout_max_response_len=None)[0],
            batch,
            packed,
        )


def test_the_cases_reach_every_branch():
    """The test cases hold tokens below, inside and beyond the clipping band for rewards of both
    signs, so that a wrong bound cannot pass."""
    samples = make_samples(SHAPES, 5, rollout_ids=ROLLOUT_IDS)
    log_probs, _ = reference_of(samples, make_logits(samples, 6), ReferenceOptions())
    seen = set()
    for sample, new in zip(samples, log_probs, strict=True):
        for t, mask in enumerate(sample.loss_mask):
            ratio = float((new[t] - sample.log_probs[t]).exp())
            side = (
                "below"
                if ratio < 0.8
                else "inside"
                if ratio <= 1.2
                else "dual"
                if ratio > 1.5
                else "above"
            )
            if mask:
                seen.add((sample.reward > 0, side))
    wanted = {(sign, side) for sign in (True, False) for side in ("below", "inside", "dual")}
    assert wanted <= seen, wanted - seen


def test_a_shifted_or_short_log_prob_fails():
    """5 ids with 4 log-probs are refused; matching log-probs give ratio 1 at every token, and
    shifted ones do not."""
    args, batch, packed = one_batch()
    with pretend_rank():
        out = loss.get_log_probs_and_entropy(
            packed,
            args=args,
            **{k: batch[k] for k in ("unconcat_tokens", "total_lengths", "response_lengths")},
        )[1]
    batch["log_probs"] = [values.detach() for values in out["log_probs"]]
    assert call_loss(args, batch, packed)[2]["ppo_kl"] == 0
    batch["log_probs"] = [values.roll(1) for values in batch["log_probs"]]
    assert call_loss(args, batch, packed)[2]["pg_clipfrac"] > 0.5
    batch["log_probs"][1] = batch["log_probs"][1][:-1]
    with pytest.raises(RolloutDataError, match="log_probs of sample 1 .* 2 entries, expected 3"):
        call_loss(args, batch, packed)


def test_captured_log_probs_are_the_first_of_each_position():
    """The first log-probs of each position are captured, so that a run without a log-prob pass can
    dump what it trained on."""
    args, batch, packed = one_batch()
    batch["partition"] = [7, 3]
    assert loss.drain_captured_log_probs() == {}
    loss.enable_log_prob_capture()
    call_loss(args, batch, packed)
    call_loss(args, batch, packed * 2)
    captured = loss.drain_captured_log_probs()
    assert set(captured) == {7, 3} and captured[7].shape == (4,) and not captured[7].requires_grad
    assert loss.drain_captured_log_probs() == {}
    with pretend_rank():
        out = loss.get_log_probs_and_entropy(
            packed,
            args=args,
            **{k: batch[k] for k in ("unconcat_tokens", "total_lengths", "response_lengths")},
        )[1]
    torch.testing.assert_close(captured[3], out["log_probs"][1].detach())


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
