"""Per-token formulas: KL estimators, clipped losses, corrections. Numbers are small enough to check
by hand.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pytest
import torch

from slime.algorithms.corrections import BandConfig, icepop_weights, truncated_importance_weights
from slime.algorithms.policy_loss import clipped_value_loss
from slime.algorithms.ratios import importance_ratio
from slime.algorithms.table import ESTIMATORS, KL_ESTIMATORS, LOSS_TYPES
from slime.backends.megatron_utils import loss
from slime.config.algorithm import AlgorithmOptions
from slime.utils import ppo_utils

NUM_GPUS = 0

LN2 = math.log(2)


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_kl_kinds_of_a_token_that_became_twice_as_likely():
    """At d = ln 2 the estimators give k1 = .693, k2 = .240, k3 = 1/2 - 1 + .693 = .193."""
    new, base = tensor(-1.0), tensor(-1.0 - LN2)
    expected = {"k1": LN2, "k2": LN2**2 / 2, "k3": 0.5 - 1 + LN2, "low_var_kl": 0.5 - 1 + LN2}
    for kind, value in expected.items():
        assert ppo_utils.compute_approx_kl(new, base, kind).item() == pytest.approx(value)
    assert ppo_utils.compute_approx_kl(new, base, "k2", torch.tensor(3.0)).item() == pytest.approx(
        3 * LN2**2 / 2
    )
    with pytest.raises(ValueError, match="unknown KL estimator 'k4'"):
        ppo_utils.compute_approx_kl(new, base, "k4")


def test_only_low_var_kl_is_clamped_and_its_gradient_survives_overflow():
    """k3 stops at e^20 and keeps a finite gradient: exp(200) is inf in fp32, and inf times a zero
    gradient would be NaN."""
    new = torch.tensor([-300.0, 0.0], requires_grad=True)
    base = torch.tensor([-100.0, -300.0])
    kl = ppo_utils.compute_approx_kl(new, base, "low_var_kl")
    assert kl.tolist() == [10.0, 10.0]
    kl.sum().backward()
    assert new.grad.tolist() == [0.0, 0.0]
    assert ppo_utils.compute_approx_kl(new.detach(), base, "k3").tolist() == pytest.approx(
        [math.exp(20) - 21, 299.0]
    )
    assert ppo_utils.compute_approx_kl(new.detach(), base, "k1").tolist() == [-200.0, 300.0]


def test_kl_is_computed_in_fp32_from_bf16():
    """KL of bf16 log-probs is computed in fp32; a difference in bf16 has three digits."""
    kl = ppo_utils.compute_approx_kl(
        torch.tensor([-1.0], dtype=torch.bfloat16),
        torch.tensor([-1.25], dtype=torch.bfloat16),
        "k1",
    )
    assert kl.dtype == torch.float32 and kl.item() == 0.25


def test_policy_loss_clips_only_where_the_ratio_left_the_band_the_profitable_way():
    """Ratios 2, 2, .5, .5 with advantages 1, -1, 1, -1 and the band [.8, 1.3]."""
    ppo_kl = tensor(-LN2, -LN2, LN2, LN2)
    losses, clipped = ppo_utils.compute_policy_loss(ppo_kl, tensor(1, -1, 1, -1), 0.2, 0.3)
    assert losses.tolist() == pytest.approx([-1.3, 2.0, -0.5, 0.8])
    assert clipped.tolist() == [1.0, 0.0, 0.0, 1.0]


def test_dual_clip_bounds_the_loss_at_negative_advantages():
    """Ratio 10, A = -1: the loss 10 becomes c = 3; positive advantages are untouched."""
    losses, _ = ppo_utils.compute_policy_loss(
        tensor(-math.log(10), -math.log(10)), tensor(-1, 1), 0.2, 0.2, 3.0
    )
    assert losses.tolist() == pytest.approx([3.0, -1.2])
    with pytest.raises(AssertionError, match="eps_clip_c > 1"):
        ppo_utils.compute_policy_loss(tensor(0), tensor(1), 0.2, 0.2, 0.9)


FAR_LOSSES = {
    "ppo": lambda d, new, a: ppo_utils.compute_policy_loss(-d, a, 0.2, 0.3)[0],
    "dual clip": lambda d, new, a: ppo_utils.compute_policy_loss(-d, a, 0.2, 0.3, 3.0)[0],
    "tis": lambda d, new, a: (
        a
        * new
        * truncated_importance_weights(d, torch.zeros_like(d), BandConfig(0, 2)).weights.detach()
    ),
    "k3": lambda d, new, a: ppo_utils.compute_approx_kl(-d, torch.zeros_like(d), "k3"),
    "low_var_kl": lambda d, new, a: ppo_utils.compute_approx_kl(
        -d, torch.zeros_like(d), "low_var_kl"
    ),
    "unbiased k2": lambda d, new, a: ppo_utils.compute_approx_kl(
        d, torch.zeros_like(d), "k2", importance_ratio(d)
    ),
    "unbiased k3": lambda d, new, a: ppo_utils.compute_approx_kl(
        d, torch.zeros_like(d), "k3", importance_ratio(d)
    ),
    "cispo": lambda d, new, a: ppo_utils.compute_cispo_loss(-d, new, a, 0.2, 0.3)[0],
}


@pytest.mark.parametrize("advantage", (1.0, -1.0, 0.0))
@pytest.mark.parametrize("name", FAR_LOSSES)
def test_a_token_e_to_the_100_away_has_no_gradient_and_the_others_train_as_without_it(
    name, advantage
):
    """One token with a log-ratio of 100 gets gradient 0, and the others train as without it;
    exp(100) is inf in fp32, and inf times 0 is NaN."""

    def gradient(log_ratio: float) -> tuple[list[float], list[float]]:
        new = torch.tensor([-1.0, 0.0, -2.0], requires_grad=True)
        old = torch.tensor([-1.1, -log_ratio, -2.2])
        values = FAR_LOSSES[name](new - old, new, torch.full((3,), advantage))
        values.sum().backward()
        return values.tolist(), new.grad.tolist()

    _, near = gradient(0.05)
    values, far = gradient(100.0)
    assert all(map(math.isfinite, values + far)), (values, far)
    assert (far[0], far[2]) == (near[0], near[2]) and max(map(abs, far)) < 100
    # these weigh a token's log-prob by the clipped ratio and keep its gradient
    if name not in ("cispo", "tis"):
        assert far[1] == 0.0
    back = gradient(-100.0)
    assert all(map(math.isfinite, back[0] + back[1]))


def test_corrections_and_their_metrics_stay_finite_for_a_far_token():
    """For a far token tis and tis_abs report e^20 at most, the weight is the band's edge, and
    IcePop's is 0."""
    train, rollout = torch.tensor([0.0, 0.0]), torch.tensor([-100.0, 0.0])
    for function, weight in ((truncated_importance_weights, 2.0), (icepop_weights, 0.0)):
        correction = function(train, rollout, BandConfig(0.0, 2.0))
        assert correction.weights.tolist() == [weight, 1.0]
        assert correction.metrics["tis"].tolist() == pytest.approx([math.exp(20), 1.0])
        assert correction.metrics["tis_abs"].tolist() == pytest.approx([math.exp(20) - 1, 0.0])


@pytest.mark.parametrize("old", ("rollout", "recomputed"))
@pytest.mark.parametrize("estimator", ("grpo", "gspo", "cispo", "dr_grpo"))
def test_the_whole_policy_loss_survives_a_far_token(estimator, old):
    """With a far token every loss, every metric (ois, tis, tis_abs, kl_loss among them) and every
    gradient is finite, and the near tokens train."""
    from support.loss_cases import make_logits, make_samples, mask_sums_of, pack
    from support.pretend_rank import pretend_rank

    samples = make_samples([(2, 4), (1, 3)], 3)
    for sample in samples:
        sample.loss_mask = [1] * sample.response_length
    samples[0].rollout_log_probs[1] = samples[0].log_probs[1] = -130.0
    # no log-prob, but a finite number: k3's exponent must stand it
    samples[1].ref_log_probs[0] = 120.0
    for advantage in (1.0, -1.0):
        logits = make_logits(samples, 4)
        batch, packed = pack(
            samples, logits, [[advantage] * 4, [advantage] * 3], mask_sums_of(samples)
        )
        args = SimpleNamespace(
            advantage_estimator=estimator, use_rollout_logprobs=old == "rollout", use_tis=old != "rollout", eps_clip_c=3.0,
            use_opsm=True, use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k3", use_unbiased_kl=True, rollout_max_response_len=8,
        )  # fmt: skip
        with pretend_rank():
            reduce = loss.get_sum_of_sample_mean(
                *(batch[k] for k in ("total_lengths", "response_lengths", "loss_masks"))
            )
            value, metrics = loss.policy_loss_function(args, batch, packed, reduce)
        value.backward()
        assert all(math.isfinite(number) for number in metrics.values()), metrics
        gradients = [rows.grad for rows in logits]
        assert all(bool(torch.isfinite(gradient).all()) for gradient in gradients)
        assert all(float(gradient.abs().max()) > 0 for gradient in gradients) or advantage < 0


def test_cispo_clips_the_weight_and_keeps_the_gradient():
    """CISPO gives a clipped token the gradient -clamp(r) A, where PPO gives none."""
    log_probs = torch.tensor([-1.0, -2.0], requires_grad=True)
    old = torch.tensor([-1.0 - LN2, -2.0])
    losses, clipped = ppo_utils.compute_cispo_loss(
        old - log_probs, log_probs, torch.tensor([1.0, 3.0]), 0.2, 0.3
    )
    assert losses.tolist() == pytest.approx([1.3, 6.0]) and clipped.tolist() == [1.0, 0.0]
    losses.sum().backward()
    assert log_probs.grad.tolist() == pytest.approx([-1.3, -3.0])


def test_gspo_kl_is_the_masked_mean_over_the_full_response():
    """Differences 1, 3 and a masked 100 give 2 at each of sample 0's two local tokens; a fully
    masked sample gives 0."""
    full = [tensor(-1, -2, -3), tensor(-1, -1)]
    old = [tensor(0, 1, 97), tensor(9, 9)]
    masks = [torch.tensor([1, 1, 0]), torch.tensor([0, 0])]
    kl = ppo_utils.compute_gspo_kl(full, old, [torch.zeros(2), torch.zeros(1)], masks)
    assert kl.tolist() == [2.0, 2.0, 0.0]
    assert ppo_utils.compute_gspo_kl([], [], [], []).shape == (0,)


def test_opsm_drops_far_responses_of_negative_advantage():
    """Of KL .5, .5 and .0 only the second response has A < 0 and is far; the dropped share is both
    of its trained tokens."""
    full = [tensor(-1, -1), tensor(-1, -1, -9), tensor(-1)]
    old = [tensor(-0.5, -0.5), tensor(-0.5, -0.5, 0), tensor(-1)]
    masks = [torch.tensor([1, 1]), torch.tensor([1, 1, 0]), torch.tensor([1])]
    advantages = [tensor(1, 1), tensor(-1, -1, -1), tensor(-1)]
    keep, fraction = ppo_utils.compute_opsm_mask(
        SimpleNamespace(opsm_delta=0.1), full, old, advantages, masks
    )
    assert keep.tolist() == [1, 1, 0, 0, 0, 1]
    assert fraction == 1.0
    local = [tensor(1), tensor(-1), tensor()]  # one context-parallel rank's part
    keep, fraction = ppo_utils.compute_opsm_mask(
        SimpleNamespace(opsm_delta=0.1), full, old, local, masks
    )
    assert keep.tolist() == [1, 0] and fraction == 0.5


def test_tis_truncates_and_icepop_zeroes_outside_the_band():
    """For ratios 4, 1, .25 and the band [.5, 2] TIS truncates and IcePop gives 0 outside."""
    train, rollout = tensor(math.log(4), 0, -math.log(4)), tensor(0, 0, 0)
    band = BandConfig(0.5, 2.0)
    tis = truncated_importance_weights(train, rollout, band)
    assert tis.weights.tolist() == pytest.approx([2, 1, 0.5])
    assert tis.metrics["tis"].tolist() == pytest.approx([4, 1, 0.25])
    assert tis.metrics["tis_clipfrac"].tolist() == [1, 0, 1]
    assert tis.metrics["tis_abs"].tolist() == pytest.approx([3, 0, 0.75])
    assert icepop_weights(train, rollout, band).weights.tolist() == pytest.approx([0, 1, 0])


def test_value_loss_is_the_larger_of_clipped_and_unclipped_error():
    """Old value 0, clip .2. New 1, target 1: clipped value .2, error .64 (clipped larger). New 1,
    target 0: error 1 (unclipped larger).
    """
    losses, clipped = clipped_value_loss(tensor(1, 1), tensor(0, 0), tensor(1, 0), value_clip=0.2)
    assert losses.tolist() == pytest.approx([0.64, 1.0]) and clipped.tolist() == [1, 0]


@pytest.mark.parametrize("seed", range(3))
def test_every_formula_agrees_with_finite_differences(seed):
    """fp64 gradcheck at points away from the kinks."""
    generator = torch.Generator().manual_seed(seed)
    new = torch.randn(6, generator=generator, dtype=torch.float64).requires_grad_()
    old = new.detach() + 0.5 * torch.randn(6, generator=generator, dtype=torch.float64)
    advantages = torch.randn(6, generator=generator, dtype=torch.float64)
    masks = [torch.tensor([1, 0, 1]), torch.tensor([1, 1, 1])]
    checks = {
        "ppo": lambda x: ppo_utils.compute_policy_loss(old - x, advantages, 0.2, 0.3)[0],
        "dual": lambda x: ppo_utils.compute_policy_loss(old - x, advantages, 0.2, 0.3, 1.5)[0],
        "gspo": lambda x: ppo_utils.compute_gspo_kl(x.split(3), old.split(3), x.split(3), masks),
        "value": lambda x: clipped_value_loss(x, old, advantages, value_clip=0.2)[0],
        **{
            kind: lambda x, kind=kind: ppo_utils.compute_approx_kl(x, old, kind)
            for kind in KL_ESTIMATORS
        },
        "unbiased": lambda x: ppo_utils.compute_approx_kl(x, old, "k3", torch.exp(x - old)),
    }
    for name, function in checks.items():
        assert torch.autograd.gradcheck(function, (new,)), name


def test_the_documentation_names_every_choice_and_its_example_runs():
    """docs/algorithms.md names every choice, and its example runs."""
    from support.loss_cases import make_logits, make_samples, mask_sums_of, pack
    from support.pretend_rank import pretend_rank

    text = (Path(__file__).resolve().parents[2] / "docs" / "algorithms.md").read_text()
    options = {field.name for field in dataclasses.fields(AlgorithmOptions)}
    for name in (
        *ESTIMATORS,
        *LOSS_TYPES,
        *(o for o in options if o.startswith("custom_")),
    ):
        assert name in text or "--" + name.replace("_", "-") in text, name
    code = text.split("```python")[1].split("```")[0]
    namespace: dict = {}
    exec(code, namespace)
    samples = make_samples([(2, 4), (1, 3)], 3)
    batch, packed = pack(
        samples, make_logits(samples, 4), [[1.0] * 4, [-1.0] * 3], mask_sums_of(samples)
    )
    with pretend_rank():
        args = SimpleNamespace(loss_type="custom_loss", custom_loss_function_path="unused")
        reduce = loss.get_sum_of_sample_mean(
            *(batch[k] for k in ("total_lengths", "response_lengths", "loss_masks"))
        )
        value, metrics = namespace["better_half"](args, batch, packed, reduce)
    assert value.item() > 0 and metrics["better"].item() == 1.0


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
