"""Penalties on the length of a response, computed by hand, in groups by id."""

import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pytest
from support.gate_samples import sound_sample
from support.manager import manager_of
from support.rollout_args import rollout_args

from slime.config.rules.reward import a_length_penalty_has_a_budget_and_is_applied
from slime.data.columns import ColumnsConfig, compute_rewards
from slime.data.length_penalty import LengthPenalty, compute_length_penalties

NUM_GPUS = 0


def penalties(name, lengths, rewards=None, groups=None, counts=None, **numbers):
    count = len(lengths)
    penalty = LengthPenalty(**{"name": name, "budget": 100, "buffer": 20, **numbers})
    return compute_length_penalties(
        lengths,
        rewards or [1.0] * count,
        groups or [0] * count,
        counts or [True] * count,
        penalty=penalty,
    ).tolist()


def test_the_soft_overlong_penalty_grows_over_the_last_part_of_the_budget():
    """With budget 100 and buffer 20 the penalty is 0 up to 80, half at 90, full at 100; a weight
    scales it."""
    assert penalties("soft_overlong", [1, 80, 85, 90, 100, 120]) == [0, 0, -0.25, -0.5, -1, -1]
    assert penalties("soft_overlong", [80, 90, 100], weight=0.5) == [0, -0.25, -0.5]
    assert penalties("linear", [0, 25, 100, 150]) == [0, -0.25, -1, -1] and penalties(
        "none", [100]
    ) == [0]


def test_the_group_relative_penalty_compares_within_a_group_by_id():
    """Lengths 10, 20, 30 of group 7 give 0.5, 0, -0.5, and a short wrong answer gains nothing; the
    equal lengths of group 3 give 0."""
    lengths, groups = [10, 5, 30, 20, 5], [7, 3, 7, 7, 3]
    assert penalties("group_relative", lengths, groups=groups) == [0.5, 0, -0.5, 0, 0]
    assert penalties(
        "group_relative", lengths, rewards=[0.0, 1.0, 0.0, 1.0, 1.0], groups=groups
    ) == [0, 0, -0.5, 0, 0]
    assert penalties("group_relative", [10, 30], rewards=[0.8, 0.8], solved_from=0.8) == [0.5, -0.5]


@pytest.mark.parametrize("name", ["soft_overlong", "linear", "group_relative"])
@pytest.mark.parametrize(
    "left_out", [{"counts": [True, True, False]}, {"rewards": [1.0, 1.0, math.nan]}]
)
def test_what_does_not_count_has_no_penalty_and_changes_nobodys(name, left_out):
    """A rejected sample of 10,000 tokens has no penalty and does not stretch its group's range."""
    assert penalties(name, [90, 95, 10_000], **left_out) == [*penalties(name, [90, 95]), 0]


def test_the_penalty_enters_the_baseline_and_leaves_the_raw_reward(tmp_path, monkeypatch):
    """Two right answers of 80 and 100 tokens have raw rewards 1 and 1, shaped 1 and 0, advantages
    +-0.5, and metrics give the penalty."""
    options = {
        "length_penalty": "soft_overlong",
        "rollout_max_response_len": 100,
        "grpo_std_normalization": False,
    }
    samples = [sound_sample(i, length=80 + 20 * (i % 2), reward=1.0) for i in range(4)]
    raw, rewards, _ = compute_rewards(samples, ColumnsConfig.from_args(rollout_args(**options)))
    assert raw == [1.0] * 4 and rewards == [0.5, -0.5, 0.5, -0.5]
    ppo = rollout_args(**options, advantage_estimator="ppo")
    assert compute_rewards(samples, ColumnsConfig.from_args(ppo))[1] == [1.0, 0.0, 1.0, 0.0]
    manager = manager_of(samples, tmp_path, monkeypatch, gate_repetition_window=0, **options)
    manager.generate(0)
    manager.gate.close()
    found = [
        manager.logged[f"rollout/length_penalty/{name}"]
        for name in ("mean", "share", "shaped_reward")
    ]
    assert found == [-0.5, 0.5, 0.5] and manager.logged["rollout/reward/mean"] == 1.0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"length_penalty": "linear", "rollout_max_response_len": None},
            "--rollout-max-response-len, which is missing",
        ),
        (
            {"length_penalty": "soft_overlong", "length_penalty_buffer": 9},
            "--length-penalty-buffer is 9: soft_overlong alone reads it, from 1 to",
        ),
        (
            {"length_penalty_buffer": 4},
            "--length-penalty-buffer is 4: soft_overlong alone reads it",
        ),
        (
            {"length_penalty": "linear", "custom_reward_post_process_path": "a.b"},
            "linear is not applied beside a custom reward post-process",
        ),
        ({"length_penalty": "group_relative", "rollout_max_response_len": None}, None),
    ],
)
def test_a_penalty_without_a_budget_or_that_nobody_applies_is_refused(options, words):
    """A penalty without a budget, or with a custom reward processing that ignores it, is refused;
    the default buffer is a fifth of the budget, rounded up (2 of 8)."""
    found = a_length_penalty_has_a_budget_and_is_applied(rollout_args(**options))
    assert (found is None) if words is None else (words in found)
    assert LengthPenalty.from_args(rollout_args(length_penalty="soft_overlong")).buffer == 2


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
