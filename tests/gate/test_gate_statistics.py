"""The numbers of a rollout, their drift and the alarms."""

import dataclasses
import json
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import pytest
from scipy import stats
from support.gate_samples import sound_sample

from slime.data.sample import Status
from slime.gate import GateConfig, InvalidReason, Policy, postprocess_output_data
from slime.gate.alarms import find_alarms, rate_jumped
from slime.gate.drift import expected_psi_noise, kolmogorov_smirnov, population_stability_index
from slime.gate.statistics import GateStatistics

NUM_GPUS = 0


def batch(total, num_truncated=0, *, length=lambda i: 10 + i % 7):
    """`total` samples of which the first `num_truncated` are cut at the length limit."""
    samples = []
    for i in range(total):
        cut = {"status": Status.TRUNCATED, "finish_reason": "length"} if i < num_truncated else {}
        samples.append(sound_sample(i, length=length(i), **cut))
    return samples


def statistics_of(samples, **kwargs):
    return postprocess_output_data(samples, GateConfig(), **kwargs).statistics


def test_total_is_kept_plus_the_sum_of_all_reasons():
    """The total is the kept samples plus the counts of all reasons, and every reason has a count,
    also 0."""
    statistics = statistics_of(batch(40, 4))
    assert statistics.total == 40 == statistics.kept + sum(statistics.dropped.values())
    assert (
        set(statistics.dropped) == set(InvalidReason)
        and statistics.dropped[InvalidReason.TRUNCATED] == 4
    )
    metrics = statistics.to_metrics()
    assert (
        metrics["gate/count/truncated"] == 4
        and metrics["gate/ratio/truncated"] == 0.1
        and metrics["gate/count/empty"] == 0
    )
    assert metrics["gate/drop_rate"] == pytest.approx(0.1) and metrics["gate/kept"] == 36


def test_an_empty_batch_has_statistics_too():
    """A rollout without samples has a record and a summary."""
    statistics = statistics_of([])
    assert (statistics.total, statistics.kept, statistics.drop_rate) == (0, 0, 0.0)
    assert (
        json.loads(json.dumps(statistics.to_record()))["total"] == 0
        and "nothing kept" in statistics.summary()
    )


def test_lengths_of_kept_samples_have_mean_and_quantiles():
    """The length summary is over kept samples: lengths 1 to 99 have mean and median 50, and the cut
    response of 5000 does not count."""
    samples = [sound_sample(i, length=i) for i in range(1, 100)] + [
        sound_sample(100, length=5000, finish_reason="length")
    ]
    lengths = statistics_of(samples).length_summary()
    assert (lengths["mean"], lengths["p50"], lengths["min"], lengths["max"]) == (50.0, 50.0, 1, 99)
    assert lengths["p01"] == pytest.approx(1.98) and lengths["p99"] == pytest.approx(98.02)


def test_parts_add_up_to_the_whole():
    """Statistics of three parts merge exactly into those of the whole batch."""
    samples = batch(50, 5)
    whole = statistics_of(samples)
    merged = GateStatistics.merge(
        [statistics_of(samples[:13]), statistics_of(samples[13:30]), statistics_of(samples[30:])]
    )
    for name in ("codes", "findings", "lengths", "group_ids", "prompt_digests"):
        assert np.array_equal(getattr(whole, name), getattr(merged, name))
    assert (
        whole.counts == merged.counts
        and whole.groups() == merged.groups()
        and whole.length_summary() == merged.length_summary()
    )


def test_the_record_is_one_json_dictionary_with_versions_times_and_failures_by_prompt():
    """The record is one JSON dictionary with failures by prompt group, engine and tokenizer
    versions, and the time of each check."""
    config = GateConfig(engine_version="engine 7", tokenizer_version="tok 3")
    record = json.loads(
        json.dumps(postprocess_output_data(batch(12, 5), config).statistics.to_record())
    )
    assert record["failures_by_group"] == {"0": {"truncated": 4}, "1": {"truncated": 1}}
    assert record["versions"] == {"engine": "engine 7", "tokenizer": "tok 3"}
    assert (
        record["seconds"]["bad_token"] >= 0
        and record["gate_seconds"] >= sum(record["seconds"].values()) * 0.99
    )


def test_share_of_the_iteration_is_reported():
    """The gate's share of the iteration is reported when the iteration's time is known."""
    statistics = statistics_of(batch(8)).with_iteration(100.0)
    assert statistics.share_of_iteration == pytest.approx(statistics.gate_seconds / 100)
    assert "gate/time/share_of_iteration" in statistics.to_metrics()
    assert "gate/time/share_of_iteration" not in statistics_of(batch(8)).to_metrics()


def test_the_share_removed_by_cheap_checks_is_reported():
    """Three of four defects found before any token is read are a cheap share of 0.75."""
    samples = batch(20, 3)
    samples[10].rollout_log_probs[0] = math.nan
    assert statistics_of(samples).cheap_share == 0.75


def test_fan_out_samples_with_prompts_of_their_own_are_no_mixed_group():
    """Samples of one execution may have prompts of their own; executions without a common prompt
    are a mixed group."""
    rows = [
        (0, 1, "a"),
        (0, 1, "b"),
        (0, 2, "a"),
        (0, 2, "c"),
        (1, 3, "d"),
        (1, 3, "d"),
        (1, 4, "e"),
        (2, None, "f"),
        (2, None, "f"),
    ]
    samples = [
        sound_sample(i, group_index=g, rollout_id=r, prompt=prompt)
        for i, (g, r, prompt) in enumerate(rows)
    ]
    assert postprocess_output_data(samples, GateConfig()).statistics.groups()["mixed"] == [1]
    halves = [
        postprocess_output_data(part, GateConfig()).statistics
        for part in (samples[:5], samples[5:])
    ]
    assert GateStatistics.merge(halves).groups()["mixed"] == [1]


def test_groups_are_counted_with_their_valid_members_and_mixed_prompts_are_reported():
    """Groups are counted by size and valid members, and an alarm names those with different
    prompts. Equal prompts in two groups are two groups."""
    samples = batch(12, 7)
    samples[9].prompt = "another prompt"
    samples[2].prompt = samples[5].prompt
    groups = statistics_of(samples).groups()
    assert (
        groups["count"] == 3
        and groups["sizes"] == {4: 3}
        and groups["without_valid"] == 1
        and groups["with_one_valid"] == 1
    )
    assert groups["mixed"] == [0, 2]
    alarms = {alarm.name: alarm.message for alarm in find_alarms(statistics_of(samples), [])}
    assert "2 groups" in alarms["mixed_groups"]


def test_kolmogorov_smirnov_equals_scipy():
    """The two-sample distance and its p-value, written with numpy, equal scipy's."""
    rng = np.random.default_rng(1)
    for n, m, shift in ((50, 80, 0), (500, 300, 0.2), (1000, 1000, 0.05), (30, 30, 3)):
        first, second = rng.normal(size=n).round(1), rng.normal(shift, size=m).round(1)
        expected = stats.ks_2samp(first, second, method="asymp")
        distance, p = kolmogorov_smirnov(first, second)
        assert distance == pytest.approx(expected.statistic)
        assert p == pytest.approx(
            stats.kstwobign.sf(math.sqrt(n * m / (n + m)) * distance), abs=1e-9
        )


def test_population_stability_index_of_a_hand_made_case():
    """Shares 1/2, 1/2 against 1/4, 3/4 give 0.25 ln 3, computed by hand."""
    expected, actual = np.array([1, 1, 2, 2]), np.array([1, 2, 2, 2])
    psi = population_stability_index(expected, actual, num_bins=2)
    assert psi == pytest.approx((0.25 - 0.5) * math.log(0.5) + (0.75 - 0.5) * math.log(1.5))
    assert population_stability_index(expected, expected) == 0.0
    assert math.isnan(population_stability_index(expected, np.array([])))


def test_the_noise_of_the_index_is_what_chance_gives():
    """The expected noise of the index equals its mean over random batches, so that a small batch
    raises no alarm by chance."""
    rng = np.random.default_rng(2)
    values = [
        population_stability_index(rng.integers(0, 10**6, 400), rng.integers(0, 10**6, 300))
        for _ in range(200)
    ]
    assert np.mean(values) == pytest.approx(expected_psi_noise(400, 300), rel=0.2)


def test_drift_compares_with_the_previous_rollout_and_with_the_window():
    """Drift compares with the last rollout of the history and with all of the window."""
    short, long = batch(200, length=lambda i: 10 + i % 5), batch(200, length=lambda i: 40 + i % 5)
    history = [statistics_of(long), statistics_of(short)]
    drift = statistics_of(short, previous=history).drift
    assert drift.psi_previous == 0.0 and drift.ks_previous == 0.0
    assert drift.ks_window == pytest.approx(0.5) and drift.psi_window > 0.25
    assert math.isnan(statistics_of(short).drift.psi_previous)


def test_a_drop_rate_from_10_to_25_percent_fires_and_names_the_reason():
    """A drop rate that rises from 10 % to 25 % raises one alarm, which names both rates and the
    reason that rose."""
    history = [statistics_of(batch(128, 13)) for _ in range(5)]
    assert find_alarms(statistics_of(batch(128, 14), previous=history), history) == []
    alarms = find_alarms(statistics_of(batch(128, 32), previous=history), history)
    assert [alarm.name for alarm in alarms] == ["drop_rate"]
    assert (
        "25.0 %" in alarms[0].message
        and "10.2 %" in alarms[0].message
        and "truncated" in alarms[0].message
    )


@pytest.mark.parametrize(
    ("now", "before", "fires"),
    [((16, 64), (32, 320), True), ((2, 8), (4, 40), False), ((110, 1000), (100, 1000), False)],
)
def test_a_jump_is_more_than_chance(now, before, fires):
    """2 of 8 against 10 % is chance; 11 % against 10 % is no jump."""
    assert rate_jumped(*now, *before) is fires


def test_drifting_lengths_and_a_slow_gate_are_said_in_plain_words():
    """The alarms for drifting lengths and for a slow gate name the numbers, the slowest check and
    the order in which to optimise."""
    history = [statistics_of(batch(300, length=lambda i: 10 + i % 9))]
    moved = statistics_of(batch(300, length=lambda i: 30 + i % 9), previous=history)
    slow = dataclasses.replace(moved, seconds={"bad_token": 1.5, "blank": 0.5}).with_iteration(10.0)
    alarms = {alarm.name: alarm.message for alarm in find_alarms(slow, history)}
    assert set(alarms) == {"length_drift", "time"} and "20.0 %" in alarms["time"]
    assert "2.0 s, most of it in 'bad_token'" in alarms["time"]
    positions = [
        alarms["time"].index(word) for word in ("short circuit", "vectorise", "parallel", "cache")
    ]
    assert positions == sorted(positions)


def test_an_alignment_jump_names_the_versions_that_changed_with_it():
    """An alarm for alignment failures names the engine or tokenizer version that changed with
    them."""

    def with_alignment(mismatched, version):
        base = statistics_of(batch(100))
        base.counts.update(compared=100, mismatched=mismatched, cause_shifted_ids=mismatched)
        base.versions.update(engine=version, tokenizer="t")
        return base

    alarms = {
        a.name: a.message for a in find_alarms(with_alignment(30, "e2"), [with_alignment(1, "e1")])
    }
    assert "30.0 %" in alarms["alignment"] and "shifted_ids" in alarms["alignment"]
    assert "e1" in alarms["version"] and "e2" in alarms["version"]


def test_a_history_of_an_earlier_version_counts_what_a_policy_kept():
    """A run that resumes from an earlier version's checkpoint compares with the cuts it kept,
    whose count had another name there."""
    config = GateConfig(policies={InvalidReason.TRUNCATED: Policy.KEEP})
    record = postprocess_output_data(batch(8, 3), config).statistics.to_history()
    assert record["kept_by_policy"] == {"truncated": 3}
    record["kept_in_spite"] = record.pop("kept_by_policy")
    assert GateStatistics.from_history(record).kept_by_policy[InvalidReason.TRUNCATED] == 3


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
