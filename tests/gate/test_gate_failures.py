"""Failures of the model may train with a low reward, and a run in which they become more frequent
raises an alarm."""

import dataclasses
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pytest
from support.gate_samples import sound_sample
from support.manager import dirty_rollout, manager_of
from support.rollout_args import rollout_args

from slime.data.sample import Status
from slime.exceptions import ConfigError
from slime.files.jsonl import JsonlWriter
from slime.gate import (
    GateConfig,
    InvalidReason,
    Level,
    Policy,
    apply_verdicts,
    check_responses,
    postprocess_output_data,
)
from slime.gate.alarms import level_rose
from slime.gate.config import FORMAT_PRESETS, TaskRules
from slime.gate.gate import Gate, gate_config_from_args
from slime.harness.report import Checks, find_gate_problems, summarize_run
from slime.harness.run_records import read_run

NUM_GPUS = 0
PENALIZED = {
    reason: Policy.PENALIZE
    for reason in InvalidReason
    if reason.is_model_failure and reason is not InvalidReason.EMPTY
}
CONFIG = GateConfig(policies=PENALIZED, rewards_expected=True)
CUT = {"status": Status.TRUNCATED, "finish_reason": "length"}


def one(config=CONFIG, **changes):
    return postprocess_output_data(
        [sound_sample(1, **{"reward": None, **changes})], config
    ).samples[0]


@pytest.mark.parametrize(
    ("changes", "config", "reason"),
    [
        (CUT, {}, "truncated"),
        ({"length": 2}, {"min_response_tokens": 5}, "too_short"),
        ({"length": 9}, {"max_response_tokens": 8}, "too_long"),
        ({"length": 300, "tokens": [1, 2, 3, *[7] * 300]}, {}, "repetitive"),
        (
            {"response": "no tags"},
            {"format": FORMAT_PRESETS["answer"], "text_source": "engine"},
            "bad_format",
        ),
    ],
)
def test_a_penalized_failure_is_valid_shows_its_reason_and_has_the_failures_reward(
    changes, config, reason
):
    """A penalized failure is valid, keeps its reason, and has reward 0, that of
    --gate-failure-reward, or a dict of it under the reward key."""
    sample = one(dataclasses.replace(CONFIG, **config), **changes)
    assert (sample.valid, sample.invalid_reason, sample.reward) == (True, reason, 0.0)
    assert one(dataclasses.replace(CONFIG, failure_reward=-0.5, **config), **changes).reward == -0.5
    assert one(
        dataclasses.replace(CONFIG, failure_reward=-0.5, reward_key="score", **config), **changes
    ).reward == {"score": -0.5}
    assert (
        one(
            dataclasses.replace(CONFIG, failure_reward=-0.5, **config), reward=0.25, **changes
        ).reward
        == 0.25
    ), "its own where it has one"


def test_the_check_before_rewards_gives_the_reward_so_that_no_scorer_sees_the_failure():
    """The check before rewards sets a penalized failure's reward, so that no reward function finds
    an answer in a response that never ended."""
    samples = [sound_sample(0, reward=None), sound_sample(1, reward=None, **CUT)]
    config = dataclasses.replace(CONFIG, failure_reward=-1.0)
    marked = apply_verdicts(samples, check_responses(samples, config))
    assert [sample.reward for sample in marked] == [None, -1.0] and [
        sample.valid for sample in marked
    ] == [True, True]
    marked[0].reward = 1.0
    again = postprocess_output_data(marked, config)
    assert [sample.reward for sample in again.samples] == [1.0, -1.0] and again.statistics.failures[
        InvalidReason.TRUNCATED
    ] == 1


def test_the_first_failure_is_the_reason_and_damage_still_rejects():
    """A cut response with a bad format stays a penalized cut, and one with NaN log-probs or without
    visible text is rejected."""
    strict = GateConfig(
        policies={InvalidReason.TRUNCATED: Policy.PENALIZE},
        format=FORMAT_PRESETS["answer"],
        text_source="engine",
        rewards_expected=True,
    )
    cut = one(strict, response="<answer>4", **CUT)
    assert (cut.valid, cut.invalid_reason) == (True, "truncated")
    whole = one(strict, response="<answer>4")
    assert (whole.valid, whole.invalid_reason) == (False, "bad_format"), (
        "another reason keeps its own policy"
    )
    damaged = one(rollout_log_probs=[float("nan")] * 12, **CUT)
    assert (damaged.valid, damaged.invalid_reason) == (False, "bad_logprob")
    blank = one(GateConfig(policies=PENALIZED, text_source="engine"), response=" \n", **CUT)
    assert (blank.valid, blank.invalid_reason) == (False, "empty")


def test_a_tasks_rule_for_cuts_and_level_off_come_before_the_policy():
    """A task's rule for cuts precedes the policy: kept ones are scored, others rejected."""
    tasks = {"prefix": TaskRules(keep_truncated=True), "whole": TaskRules(keep_truncated=False)}
    config = dataclasses.replace(CONFIG, tasks=tasks)
    rows = [
        sound_sample(i, reward=1.0, metadata={"source_name": name}, **CUT)
        for i, name in enumerate(("prefix", "whole", "other"))
    ]
    found = postprocess_output_data(rows, config)
    assert [sample.valid for sample in found.samples] == [True, False, True]
    off = one(dataclasses.replace(CONFIG, levels={"truncated": Level.OFF}), reward=1.0, **CUT)
    assert off.valid and off.reward == 1.0


def test_a_penalized_failure_counts_in_its_groups_baseline(tmp_path, monkeypatch):
    """In a group with rewards 1, 1, 1 and a cut, penalizing gives -0.75 and +0.25 for the others;
    excluding gives 0 for all."""
    samples = [sound_sample(i, reward=1.0) for i in range(4)]
    samples[3] = sound_sample(3, reward=None, **CUT)
    options = {"grpo_std_normalization": False}
    advantages = {}
    for policies in ({"truncated": "penalize"}, {"truncated": "mark"}):
        manager = manager_of(
            list(samples), tmp_path, monkeypatch, gate_policies=policies, **options
        )
        shards = [box.inner for box in manager.generate(0)]
        manager.gate.close()
        pairs = [
            pair
            for shard in shards
            for pair in zip(shard["sample_indices"], shard["rewards"], strict=True)
        ]
        advantages[policies["truncated"]] = {int(index): float(value) for index, value in pairs}
        assert manager.logged["rollout/reward/mean"] == 0.75
    assert advantages == {
        "penalize": {0: 0.25, 1: 0.25, 2: 0.25, 3: -0.75},
        "mark": {0: 0.0, 1: 0.0, 2: 0.0},
    }


def test_what_cannot_be_penalized_is_refused_by_name():
    """Reasons without anything to train, such as empty or lost responses, cannot be penalized."""
    for reason in ("empty", "bad_token", "failed", "misaligned"):
        with pytest.raises(ConfigError, match=f"cannot penalize '{reason}'.*bad_format.*truncated"):
            gate_config_from_args(rollout_args(gate_policies={reason: "penalize"}))
        with pytest.raises(ConfigError, match=f"'penalize' for '{reason}' is refused"):
            GateConfig(policies={InvalidReason(reason): Policy.PENALIZE})
    with pytest.raises(ConfigError, match="gate-failure-reward"):
        gate_config_from_args(rollout_args(gate_failure_reward=float("nan")))
    config = gate_config_from_args(
        rollout_args(
            gate_policy="penalize", gate_policies={"too_long": "drop"}, gate_failure_reward=-0.5
        )
    )
    assert config.failure_reward == -0.5 and config.policy_of(InvalidReason.TOO_LONG) is Policy.DROP
    assert (
        config.policy_of(InvalidReason.TRUNCATED) is Policy.PENALIZE
        and config.policy_of(InvalidReason.EMPTY) is Policy.MARK
    )


# --- the level since the start --------------------------------------------------------------------


def rollout(num_cut, total=200):
    return [sound_sample(i, **(CUT if i < num_cut else {})) for i in range(total)]


@pytest.mark.parametrize(
    ("now", "start", "rose"),
    [
        ((210, 1000), (40, 1000), True),
        ((170, 1000), (70, 1000), True),
        ((70, 1000), (40, 1000), False),
        ((8, 40), (4, 40), False),
        ((5, 1000), (0, 1000), False),
    ],
)
def test_a_level_rose_when_it_doubled_by_five_points_and_more_than_chance(now, start, rose):
    """4 % to 21 % and 7 % to 17 % have risen; 4 % to 7 % has not doubled, 4 of 40 to 8 of 40 may be
    chance, 0.5 % is too little."""
    assert level_rose(*now, *start) is rose


def levels(records):
    return {
        record["rollout_id"]: [
            a["message"] for a in record["alarms"] if a["name"] == "failure_level"
        ]
        for record in records
    }


def test_a_slow_rise_that_no_window_sees_is_an_alarm_with_the_policy_to_try(tmp_path, caplog):
    """Cuts that grow by half a point per rollout from 4 % raise an alarm once per window, though
    they never jump against the last five."""
    gate = Gate(GateConfig(policies={InvalidReason.TOO_LONG: Policy.KEEP}), window=5)
    found = {}
    for rollout_id in range(20):
        result = gate.run(rollout(8 + rollout_id), rollout_id)
        found[rollout_id] = {alarm.name: alarm.message for alarm in result.alarms}
    assert not any("drop_rate" in names for names in found.values())
    first = min(number for number, names in found.items() if "failure_level" in names)
    assert 13 <= first <= 17 and all(
        "failure_level" in found[number] for number in range(first, 20)
    )
    message = found[19]["failure_level"]
    assert message.startswith(
        "'truncated' rose from 5.0 % of the samples in the first 5 rollouts to 12.5 % in the last "
        "5, +0.50 points a rollout. "
    )
    assert (
        "They are rejected" in message
        and '--gate-policies \'{"truncated": "penalize"}\'' in message
    )
    assert caplog.text.count("gate alarm [failure_level]") == (19 - first) // 5 + 1


def test_a_level_that_rose_with_the_first_updates_is_an_alarm_and_a_problem_too(tmp_path):
    """A rise from 1 % before any update to 34 % afterwards is an alarm and a problem, though the
    first five rollouts together equal the last five."""
    gate = Gate(GateConfig(), window=5)
    for rollout_id, cut in enumerate([2, *[68] * 11]):
        result = gate.run(rollout(cut), rollout_id)
    (alarm,) = [alarm for alarm in result.alarms if alarm.name == "failure_level"]
    assert alarm.message.startswith(
        "'truncated' rose from 1.0 % of the samples in the first rollout to 34.0 % in the last 5, "
        "+3.67 points a rollout. "
    )
    (problem,) = find_gate_problems(write_run(tmp_path, [2 / 128, *[44 / 128] * 11]))
    assert problem.startswith(
        "the model fails more: 'truncated' rose from 1.6 % of the samples in the first rollout to "
        "34.4 %"
    )


def test_failures_that_train_are_counted_as_well_and_survive_a_resume(tmp_path):
    """Kept failures count too, and a resumed run compares with its first rollouts, which the
    checkpoint holds."""
    config = GateConfig(policies={InvalidReason.TRUNCATED: Policy.PENALIZE})
    gate = Gate(config, window=3)
    for rollout_id in range(3):
        gate.run(rollout(4), rollout_id)
    gate.save(tmp_path, 2)
    resumed = Gate(config, window=3)
    resumed.load(tmp_path, 2)
    for rollout_id in range(3, 6):
        result = resumed.run(rollout(40), rollout_id)
    (alarm,) = [alarm for alarm in result.alarms if alarm.name == "failure_level"]
    assert (
        "rose from 2.0 %" in alarm.message
        and "to 20.0 %" in alarm.message
        and "They train, and it rises all the same" in alarm.message
    )
    assert (
        resumed.metrics(result)["gate/failures/truncated"] == 0.2 and result.statistics.kept == 200
    )


def write_run(folder, shares, **extra):
    writer = JsonlWriter(folder / "metrics.jsonl")
    for step, share in enumerate(shares):
        metrics = {
            "gate/total": 128,
            "gate/failures/truncated": share,
            "gate/failures/empty": 0.0,
            "rollout/reward/mean": 0.1 * step,
            **extra,
        }
        writer.write(
            {"time": float(step), "step_key": "rollout/step", "step": step, "metrics": metrics}
        )
    writer.close()
    return read_run(folder)


def test_the_report_says_at_the_end_that_the_model_fails_more(tmp_path):
    """Cuts that rise from 4 % to 21 % over forty rollouts are a problem with what to try, although
    the reward rises; levels that fall or stay are none."""
    (tmp_path / "up").mkdir()
    run = write_run(tmp_path / "up", [0.04 + 0.17 * step / 39 for step in range(40)])
    problems = summarize_run(run, Checks(ledger=False, weights=False)).problems
    assert len(problems) == 1 and problems[0].startswith(
        "the model fails more: 'truncated' rose from 4.8 %"
    )
    assert "to 20.2 %" in problems[0] and "penalize" in problems[0]
    (tmp_path / "down").mkdir()
    assert (
        find_gate_problems(
            write_run(tmp_path / "down", [0.21 - 0.17 * step / 39 for step in range(40)])
        )
        == []
    )
    (tmp_path / "one").mkdir()
    assert find_gate_problems(write_run(tmp_path / "one", [0.5])) == []


def test_the_record_of_a_rollout_has_rejected_and_penalized_failures_apart(tmp_path, monkeypatch):
    """A rejected cut is in gate/ratio and a penalized one is not; gate/failures counts both."""
    for policy, ratio in (("mark", 1 / 16), ("penalize", 0)):
        manager = manager_of(
            dirty_rollout(), tmp_path / policy, monkeypatch, gate_policies={"truncated": policy}
        )
        manager.generate(0)
        manager.gate.close()
        assert (
            manager.logged["gate/failures/truncated"],
            manager.logged["gate/ratio/truncated"],
        ) == (1 / 16, ratio)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
