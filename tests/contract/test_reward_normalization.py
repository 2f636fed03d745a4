"""Rewards by group: the half of the advantage that needs every sibling."""

import dataclasses
import logging
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import pytest
from support.rollout_args import rollout_args

from slime.config.cli import parse_command_line
from slime.data import columns
from slime.data.columns import ColumnsConfig, compute_rewards
from slime.data.rewards import normalize_rewards, reward_number
from slime.data.sample import Sample
from slime.exceptions import RolloutDataError

NUM_GPUS = 0


def normalize(rewards, groups, valid=None, *, std=False, **kw):
    values, statistics = normalize_rewards(
        rewards, groups, [True] * len(rewards) if valid is None else valid, divide_by_std=std, **kw
    )
    return values.tolist(), statistics


def test_uneven_groups_are_normalized_by_id_and_not_as_one_batch():
    """Groups of 4, 3 and 4 with means .5, 5, .5 are normalized each by itself; as one batch a
    sample would get +3.27."""
    rewards = [1, 0, 1, 0, 5, 5, 5, 0, 0, 1, 1]
    groups = [0] * 4 + [1] * 3 + [2] * 4
    values, statistics = normalize(rewards, groups)
    assert values == [0.5, -0.5, 0.5, -0.5, 0, 0, 0, -0.5, -0.5, 0.5, 0.5]
    assert (statistics.num_groups, statistics.num_no_spread_groups) == (3, 1)


def test_all_samples_of_an_execution_have_its_one_advantage():
    """Execution A with rewards (1, 0) and B with 0: A's mean 0.5 against B's 0, whatever the
    estimator divides by, and A's samples share it."""
    fan = {"rollout_ids": [0, 0, 1]}
    assert normalize([1, 0, 0], [0] * 3, **fan)[0] == [0.25, 0.25, -0.25]
    assert normalize([1, 0, 0], [0] * 3, leave_one_out=True, **fan)[0] == [0.5, 0.5, -0.5]
    assert normalize([1, 0, 0], [0] * 3, std=True, **fan)[0] == pytest.approx(
        [math.sqrt(0.5)] * 2 + [-math.sqrt(0.5)], abs=1e-5
    )


@pytest.mark.parametrize(
    ("rewards", "largest"),
    [
        ([1, 0, 1, 0, 1, 0.02], 1.16),
        ([1, 0, 1, 0, 1, 0], 0.0),
        ([1, 0, 0, 1, 0.5, 0.5], 0.0),
        ([3, 3, 3, 3, 3, 3], 0.0),
    ],
)
def test_executions_of_nearly_equal_means_give_advantages_of_ordinary_size(rewards, largest):
    """Executions (1, 0), (1, 0), (1, 0.02) give advantages of ordinary size under grpo and not
    +-86; equal means give 0."""
    values, statistics = normalize(rewards, [0] * 6, std=True, rollout_ids=[0, 0, 1, 1, 2, 2])
    assert (
        max(map(abs, values)) == pytest.approx(largest, abs=0.01)
        and values[0] == values[1]
        and values[4] == values[5]
    )
    assert statistics.num_no_spread_groups == (largest == 0.0)


@pytest.mark.parametrize("divide_by_std", [True, False])
@pytest.mark.parametrize("leave_one_out", [True, False])
def test_advantages_of_any_fan_out_are_finite_and_balance_over_executions(
    divide_by_std, leave_one_out
):
    """For up to 4 executions of up to 4 samples, some invalid, advantages are finite, one per
    execution, with sum 0 in each group."""
    rng = np.random.default_rng(5)
    for _ in range(300):
        rollouts = np.repeat(np.arange(rng.integers(1, 5)), rng.integers(1, 5))
        rewards = rng.choice([0, 1, 0.02, 1e-9, 1e6, 1 / 3], size=len(rollouts)) * rng.choice(
            [1, -1]
        )
        valid = rng.random(len(rollouts)) < 0.8
        values, _ = normalize(
            rewards,
            [7] * len(rollouts),
            valid.tolist(),
            std=divide_by_std,
            leave_one_out=leave_one_out,
            rollout_ids=rollouts,
        )
        by_execution = {
            r: {v for v, rr, ok in zip(values, rollouts, valid, strict=True) if rr == r and ok}
            for r in set(rollouts[valid])
        }
        assert all(len(found) == 1 for found in by_execution.values()), (
            "one advantage per execution"
        )
        assert np.isfinite(values).all() and abs(
            sum(max(f) for f in by_execution.values())
        ) < 1e-3 * max(1, np.abs(rewards).max() * 1e-3)
        if divide_by_std and not leave_one_out:
            assert np.abs(values).max(initial=0) <= 2.0, (
                "(k - 1) / sqrt(k) is the largest for k <= 4 members"
            )


def test_every_sample_may_be_a_member_of_its_own():
    """With --fan-out-baseline row the mean of executions (1, 0) and (0,) is over three samples."""
    samples = [
        Sample(group_index=0, rollout_id=r, index=i, reward=reward)
        for i, (r, reward) in enumerate([(0, 1.0), (0, 0.0), (1, 0.0)])
    ]
    config = ColumnsConfig(divide_by_std=False)
    assert compute_rewards(samples, config)[1] == [0.25, 0.25, -0.25]
    by_row = dataclasses.replace(config, baseline_by_row=True)
    assert compute_rewards(samples, by_row)[1] == pytest.approx([2 / 3, -1 / 3, -1 / 3])
    parsed = ColumnsConfig.from_args(rollout_args(fan_out_baseline="row"))
    assert parsed.baseline_by_row and not ColumnsConfig.from_args(rollout_args()).baseline_by_row


def test_order_does_not_matter():
    """Shuffled rows get the same values, bit for bit: groups are ids and not places."""
    rng = np.random.default_rng(0)
    rewards, groups = rng.normal(size=60), np.repeat(np.arange(12), 5)
    straight, _ = normalize(rewards, groups, std=True)
    order = rng.permutation(60)
    shuffled, _ = normalize(rewards[order], groups[order], std=True)
    # within a group the order of summation changes, and nothing else
    assert np.allclose(np.asarray(straight)[order], shuffled, rtol=0, atol=1e-14)


def test_a_single_member_gives_zero_and_is_counted():
    """A group of one gets 0 and is counted: [1, 2 | 3] gives the singleton 0, never 300000."""
    values, statistics = normalize([1, 2, 3], [0, 0, 1], std=True)
    assert (
        values[2] == 0.0
        and statistics.num_singleton_groups == 1
        and statistics.num_no_spread_groups == 0
    )
    assert values[1] == pytest.approx(0.5 / (math.sqrt(0.5) + 1e-6))


def test_rejected_members_change_nothing():
    """The reward x of a rejected row moves no other row: rewards [1, 0, 0, x] give [2/3, -1/3,
    -1/3, 0] for any x."""
    expected = [2 / 3, -1 / 3, -1 / 3, 0]
    for x in (1.0, -1e9, math.nan, math.inf):
        values, statistics = normalize([1, 0, 0, x], [0] * 4, [True, True, True, False])
        assert values == pytest.approx(expected, abs=1e-15) and statistics.num_excluded_samples == 1
    bits = {
        tuple(normalize([1, 0, 0, x], [0] * 4, [True, True, True, False], std=True)[0])
        for x in (0.0, 7.5, -3e5, math.nan)
    }
    assert len(bits) == 1


def test_one_usable_member_gives_zero():
    """A group with one usable member gets 0: there is nothing to compare it with."""
    assert normalize([1, 0, 0], [0] * 3, [True, False, False], std=True)[0] == [0.0, 0.0, 0.0]


def test_nan_reward_is_left_out_of_mean_and_std():
    """A NaN reward is outside mean and std: [1, NaN, 0, 1] trains three samples."""
    values, statistics = normalize([1, math.nan, 0, 1], [0] * 4)
    assert (
        values == pytest.approx([1 / 3, 0, -2 / 3, 1 / 3]) and statistics.num_excluded_samples == 1
    )
    assert normalize([math.nan, math.nan], [0, 0])[0] == [0.0, 0.0]


def test_equal_float_rewards_have_no_spread():
    """Rewards [0.1 + 0.2, 0.3, 0.3, 0.3], which differ by rounding alone, have no spread and train
    nothing."""
    values, statistics = normalize([0.1 + 0.2, 0.3, 0.3, 0.3], [0] * 4, std=True)
    assert values == [0.0] * 4 and statistics.num_no_spread_groups == 1
    # rounding grows with the rewards: a million and a ten-thousandth more are the same, one and a
    # ten-thousandth more are not
    assert normalize([1e6, 1e6 + 1e-4], [0, 0])[0] == [0.0, 0.0]
    assert normalize([0.1, 0.4], [0, 0])[0] == pytest.approx([-0.15, 0.15], rel=0, abs=1e-16)
    assert normalize([1.0, 1.0001], [0, 0])[0] == pytest.approx([-0.00005, 0.00005])


def test_samples_of_one_execution_are_one_member():
    """Executions with rewards 1 (three samples) and 0 (one sample) have the mean .5, not .75."""
    values, _ = normalize([1, 1, 1, 0], [0] * 4, rollout_ids=[5, 5, 5, 6])
    assert values == [0.5, 0.5, 0.5, -0.5]


def test_rewards_for_more_or_fewer_samples_are_refused():
    """A post-processing function that returns another number of rewards is refused; each later
    sample would get its neighbour's."""
    samples = [Sample(index=i, group_index=0, tokens=[1, 2], response_length=1) for i in range(3)]
    for raw, rewards, said in (
        ([1.0] * 2, [1.0] * 3, "2 raw_rewards for 3 samples"),
        ([1.0] * 3, [1.0] * 4, "4 rewards for 3 samples"),
    ):
        with pytest.raises(RolloutDataError, match=said):
            columns.build_train_columns(samples, (raw, rewards), ColumnsConfig())


@pytest.mark.parametrize(
    ("estimator", "options", "expected"),
    [
        ("grpo", [], [2 / (3**0.5 + 1e-6), -1 / (3**0.5 + 1e-6), -1 / (3**0.5 + 1e-6)]),
        ("gspo", [], [2 / (3**0.5 + 1e-6), -1 / (3**0.5 + 1e-6), -1 / (3**0.5 + 1e-6)]),
        ("cispo", [], [2 / (3**0.5 + 1e-6), -1 / (3**0.5 + 1e-6), -1 / (3**0.5 + 1e-6)]),
        ("grpo", ["--disable-grpo-std-normalization"], [2, -1, -1]),
        ("dr_grpo", [], [2, -1, -1]),
        ("reinforce_plus_plus_baseline", [], [2, -1, -1]),
        ("rloo", [], [3, -1.5, -1.5]),
        ("ppo", [], [3, 0, 0]),
        ("reinforce_plus_plus", [], [3, 0, 0]),
        ("grpo", ["--disable-rewards-normalization"], [3, 0, 0]),
    ],
)
def test_each_estimator_has_the_baseline_of_its_paper(estimator, options, expected):
    """Rewards (3, 0, 0) have mean 1 and deviation sqrt(3); Dr. GRPO is GRPO without the division,
    RLOO subtracts the mean of the others."""
    config = ColumnsConfig.from_args(
        parse_command_line(["--advantage-estimator", estimator, *options]).args
    )
    samples = [
        Sample(index=i, group_index=0, tokens=[1, 2], response_length=1, reward=r)
        for i, r in enumerate((3.0, 0.0, 0.0))
    ]
    assert list(compute_rewards(samples, config)[1]) == pytest.approx(expected)


def test_leave_one_out_subtracts_the_others():
    """RLOO: [3, 0, 0] -> 3 - 0, 0 - 1.5, 0 - 1.5; a group of one has no others."""
    assert normalize([3, 0, 0], [0] * 3, leave_one_out=True)[0] == pytest.approx([3, -1.5, -1.5])
    assert normalize([3], [0], leave_one_out=True)[0] == [0.0]


def test_a_large_common_offset_costs_no_digits():
    """Centring first keeps differences of 1 exact beside an offset of 1e9."""
    values, _ = normalize([1e9, 1e9 + 1, 1e9 + 2], [0] * 3)
    assert values == [-1.0, 0.0, 1.0]


def test_equal_text_prompts_keep_their_own_groups():
    """Groups come from ids: equal prompt texts with two ids are two groups."""
    samples = [
        Sample(
            index=i,
            group_index=i // 2,
            prompt="same",
            reward=float(i),
            status=Sample.Status.COMPLETED,
        )
        for i in range(4)
    ]
    _, rewards, _ = compute_rewards(samples, ColumnsConfig(divide_by_std=False))
    assert rewards == [-0.5, 0.5, -0.5, 0.5]


def test_aborted_and_removed_samples_do_not_move_the_baseline():
    """Aborted and removed samples are outside the mean; an option puts removed ones back, as
    upstream does."""

    def samples():
        made = [
            Sample(index=i, group_index=0, reward=r, status=Sample.Status.COMPLETED)
            for i, r in enumerate([1.0, 0.0, 9.0, 9.0])
        ]
        made[2].remove_sample = True
        made[3].status = Sample.Status.ABORTED
        return made

    _, rewards, _ = compute_rewards(samples(), ColumnsConfig(divide_by_std=False))
    assert rewards == [0.5, -0.5, 0.0, 0.0]
    _, rewards, _ = compute_rewards(
        samples(), ColumnsConfig(divide_by_std=False, removed_samples_in_baseline=True)
    )
    assert rewards == pytest.approx([1 - 10 / 3, -10 / 3, 9 - 10 / 3, 0.0])


def test_an_aborted_sample_that_the_gate_keeps_counts_in_its_group():
    """A kept aborted sample counts in its group's mean, because it trains."""
    kept = [
        Sample(index=i, group_index=0, reward=float(i), status=Sample.Status.ABORTED)
        for i in range(2)
    ]
    for sample in kept:
        sample.invalid_reason = "aborted"
    _, rewards, _ = compute_rewards(kept, ColumnsConfig(divide_by_std=False))
    assert rewards == [-0.5, 0.5]


def test_one_response_per_prompt_is_said_once(caplog, monkeypatch):
    """With one response per prompt every advantage is 0, and one warning tells it, not one per
    rollout."""
    samples = [
        Sample(index=i, group_index=i, reward=1.0, status=Sample.Status.COMPLETED) for i in range(3)
    ]
    monkeypatch.setattr(columns, "_said_singletons", False)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            _, rewards, statistics = compute_rewards(samples, ColumnsConfig())
            assert rewards == [0.0] * 3 and statistics.num_singleton_groups == 3
    assert caplog.text.count("--n-samples-per-prompt") == 1


def test_a_dict_reward_without_a_key_names_its_keys():
    """A dict reward without --reward-key is an error that names its keys and the option."""
    with pytest.raises(
        RolloutDataError, match=r"sample 3 is a dict with keys \['acc', 'score'\].*--reward-key"
    ):
        reward_number({"score": 1, "acc": 0}, None, index=3)
    assert reward_number({"score": 1, "acc": 0}, "score") == 1.0
    assert math.isnan(reward_number({"score": None}, "score")) and math.isnan(
        reward_number(None, None)
    )
    with pytest.raises(RolloutDataError, match="not a number"):
        reward_number("good", None, index=1)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
