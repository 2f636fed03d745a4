"""An algorithm's facts are one entry of the table: what reads them follows an entry that is added."""

import ast
import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.loss_cases import make_logits, make_samples, mask_sums_of, pack
from support.options import write_run_inputs
from support.pretend_rank import pretend_rank

import slime
from slime.algorithms.table import (
    ESTIMATORS,
    KL_ESTIMATORS,
    LOSSES,
    Baseline,
    Estimator,
    formula_at,
)
from slime.backends.megatron_utils import loss
from slime.backends.megatron_utils.log_prob_plan import LogProbPlan, reasons_to_recompute_log_probs
from slime.config.rules import broken_rules
from slime.data.columns import ColumnsConfig, compute_rewards
from slime.data.sample import Sample
from slime.exceptions import ConfigError
from slime.utils.arguments import parse_args

NUM_GPUS = 0

SLIME = Path(slime.__file__).parent


def twice_the_reward(columns, config):
    """Advantages 2 * reward at every token of a response, and 1 as returns."""
    rewards = torch.repeat_interleave(columns.rewards_N, torch.tensor(columns.lengths_N))
    return 2 * rewards, torch.ones_like(rewards)


def half_the_ratio(ppo_kl, log_probs, advantages, clip):
    """-r A / 2 per token, never clipped."""
    return -0.5 * torch.exp(-ppo_kl) * advantages, torch.zeros_like(ppo_kl)


@pytest.fixture
def mine(monkeypatch):
    """The name of an estimator that is nowhere but in the table."""
    entry = Estimator(
        f"{__name__}.twice_the_reward",
        Baseline(leave_one_out=True),
        policy_loss=f"{__name__}.half_the_ratio",
        sequence_ratio=True,
    )
    monkeypatch.setitem(ESTIMATORS, "mine", entry)
    return "mine"


def parsed(tmp_path, *words):
    return parse_args([*write_run_inputs(tmp_path), *words])


def test_an_added_estimator_can_be_chosen_and_its_baseline_is_that_of_the_entry(tmp_path, mine):
    """Rewards 1, 2 and 6 of a group become 1 - 4, 2 - 3.5 and 6 - 1.5: the mean of the others."""
    args = parsed(tmp_path, "--advantage-estimator", mine)
    assert not args.use_critic
    samples = [Sample(index=i, group_index=0, reward=r) for i, r in enumerate((1.0, 2.0, 6.0))]
    _, rewards, _ = compute_rewards(samples, ColumnsConfig.from_args(args))
    assert list(rewards) == pytest.approx([-3.0, -1.5, 4.5])


def test_the_choices_are_those_of_the_table(tmp_path, mine):
    """A name that is not in the table is refused, with all that are."""
    with pytest.raises(ConfigError) as error:
        parsed(tmp_path, "--advantage-estimator", "mime")
    assert ", ".join(ESTIMATORS) in str(error.value) and "mine" in ESTIMATORS


def test_the_trainer_computes_the_advantages_and_the_loss_of_the_entry(mine):
    """Advantages are the entry's formula; the loss is -r A / 2 with one ratio per response."""
    rollout_data = {
        "total_lengths": [5, 4],
        "response_lengths": [3, 2],
        "loss_masks": [torch.ones(3), torch.ones(2)],
        "log_probs": [torch.zeros(3), torch.zeros(2)],
        "rewards": [1.0, -2.0],
    }
    args = SimpleNamespace(advantage_estimator=mine)
    with pretend_rank():
        loss.compute_advantages_and_returns(args, rollout_data)
    assert [tensor.tolist() for tensor in rollout_data["advantages"]] == [[2.0] * 3, [-4.0] * 2]

    samples = make_samples([(2, 3), (2, 2)], 3)
    for sample in samples:
        sample.loss_mask = [1] * sample.response_length
    batch, packed = pack(
        samples, make_logits(samples, 4), [[2.0] * 3, [-4.0] * 2], mask_sums_of(samples)
    )
    with pretend_rank():
        reduce = loss.get_sum_of_sample_mean(
            *(batch[name] for name in ("total_lengths", "response_lengths", "loss_masks"))
        )
        value, metrics = loss.policy_loss_function(args, batch, packed, reduce)
        _, expected = loss.policy_loss_function(
            SimpleNamespace(advantage_estimator="gspo", eps_clip=9.0, eps_clip_high=1e9),
            batch,
            packed,
            reduce,
        )
    # gspo far from its bounds is -r A, and the reducers are linear
    assert value.item() == pytest.approx(expected["pg_loss"].item() / 2, rel=1e-6)
    assert metrics["pg_clipfrac"] == 0


def test_an_estimator_with_a_critic_has_one_everywhere(tmp_path, monkeypatch):
    """The critic, its folders, the pass before training and the checks of options follow the
    entry, under its own name."""
    monkeypatch.setitem(ESTIMATORS, "judged", Estimator(None, needs_critic=True))
    args = parsed(tmp_path, "--advantage-estimator", "judged", "--save", str(tmp_path / "save"))
    assert args.use_critic and args.critic_save == f"{tmp_path}/save/critic"
    (reason,) = [r for r in reasons_to_recompute_log_probs(plan_of("judged")) if "critic" in r]
    assert "before the step" in reason
    with pytest.raises(ConfigError, match="--advantage-estimator judged trains a critic too"):
        parsed(tmp_path, "--advantage-estimator", "judged", "--local")


def plan_of(estimator):
    return LogProbPlan(
        num_steps=1,
        loss_type="policy_loss",
        kl_coef=0.0,
        use_rollout_logprobs=False,
        get_mismatch_metrics=False,
        estimator=estimator,
        keep_old_actor=False,
        use_opd=False,
        use_rollout_entropy=False,
    )


def test_an_estimator_that_is_whitened_asks_for_it(tmp_path, monkeypatch):
    """Without --normalize-advantages an estimator whose baseline is the batch mean has none."""
    entry = Estimator(f"{__name__}.twice_the_reward", needs_whitening=True)
    monkeypatch.setitem(ESTIMATORS, "whitened", entry)
    with pytest.raises(ConfigError, match="whitened needs --normalize-advantages"):
        parsed(tmp_path, "--advantage-estimator", "whitened")
    args = parsed(tmp_path, "--advantage-estimator", "whitened", "--normalize-advantages")
    assert not any("normalize" in problem for problem in broken_rules(args))


def test_a_response_with_one_ratio_needs_its_log_probs_before_training():
    """Which estimators need the pass is a field of the entry: one ratio per response, or a
    critic."""
    for name, entry in ESTIMATORS.items():
        needed = bool(reasons_to_recompute_log_probs(plan_of(name)))
        assert needed is (entry.sequence_ratio or entry.needs_critic), name


def test_every_formula_that_an_entry_names_is_there():
    """A path is loaded when a run is under way; a wrong one must fail here."""
    for entry in (*ESTIMATORS.values(), *LOSSES.values(), *KL_ESTIMATORS.values()):
        for field in ("advantages", "policy_loss", "function", "formula"):
            path = getattr(entry, field, None)
            assert path is None or callable(formula_at(path)), path


def test_a_formula_of_its_own_and_a_critic_exclude_each_other():
    """Nothing would call the formula of an estimator whose advantages are the critic's."""
    with pytest.raises(AssertionError, match="formula of its own"):
        Estimator(f"{__name__}.twice_the_reward", needs_critic=True)
    with pytest.raises(AssertionError, match="formula of its own"):
        dataclasses.replace(ESTIMATORS["ppo"], needs_critic=False)


def test_no_code_asks_for_an_algorithm_by_name():
    """A comparison with a name is a fact outside the entry, which an added algorithm would miss."""
    names = {*ESTIMATORS, *LOSSES, *KL_ESTIMATORS}
    found = []
    for path in SLIME.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Compare):
                asked = {
                    constant.value
                    for side in (node.left, *node.comparators)
                    for constant in ast.walk(side)
                    if isinstance(constant, ast.Constant) and isinstance(constant.value, str)
                }
                if asked & names:
                    found.append(f"{path.relative_to(SLIME)}:{node.lineno}: {asked & names}")
    assert found == []


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
