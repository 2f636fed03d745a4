"""What a verdict does to training: baselines, loss denominators, mark against drop, and the path to
the trainer."""

import ast
import dataclasses
import inspect
import math
import resource
import sys
import textwrap
import types
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import pytest
from support.gate_samples import sound_sample
from support.manager import dirty_rollout, evaluated, manager_of

from slime.data.batch import localize
from slime.data.columns import ColumnsConfig, build_train_columns, compute_rewards
from slime.data.reasons import MODEL_FAILURES, REASONS
from slime.data.rewards import normalize_rewards
from slime.data.schedule import ScheduleConfig
from slime.data.split import SplitConfig, plan_split
from slime.files.rollout_dump import save_debug_rollout_data
from slime.gate import GateConfig, InvalidReason, Policy, postprocess_output_data
from slime.metrics.contributions import merge_all
from slime.metrics.train_metrics import phase_contributions
from slime.ray import rollout as manager_module
from slime.rollout import scoring
from slime.rollout.base_types import RolloutFnTrainOutput
from slime.rollout.filter_hub.dynamic_sampling_filters import usable_rewards
from slime.train import log_trained

NUM_GPUS = 0
SCORED = GateConfig(rewards_expected=True)
COLUMNS = ColumnsConfig()


def group_with_an_invalid_member(reward):
    """Rewards 1, 0, 1, 0 and an empty fifth member that somebody scored with `reward`."""
    samples = [
        sound_sample(i, group_index=0, prompt="p", reward=float(i % 2 == 0)) for i in range(4)
    ]
    samples.append(
        sound_sample(
            4, group_index=0, prompt="p", length=0, rollout_log_probs=[], response="", reward=reward
        )
    )
    return samples


def rewards_after_gate(samples, config=SCORED):
    out = postprocess_output_data(samples, config).samples
    return compute_rewards(out, COLUMNS)[1], out


@pytest.mark.parametrize("reward", [0.0, 1.0, -7.5, 1e30, 0.1 + 0.2])
def test_no_reward_of_an_invalid_sample_moves_its_siblings_by_one_bit(reward):
    """The rewards of valid siblings are bit-identical whatever reward an invalid member has."""
    expected, _ = rewards_after_gate(group_with_an_invalid_member(0.0)[:4])
    actual, _ = rewards_after_gate(group_with_an_invalid_member(reward))
    assert np.array(actual[:4]).tobytes() == np.array(expected).tobytes()
    assert actual[4] == 0.0


def test_an_empty_answer_scored_zero_does_not_lower_the_group_mean():
    """Four right answers and an empty one scored 0 all get advantage 0; with the empty one in the
    mean the four would train upwards by 0.2."""
    samples = group_with_an_invalid_member(0.0)
    for sample in samples[:4]:
        sample.reward = 1.0
    rewards, _ = rewards_after_gate(samples)
    assert rewards == [0.0] * 5


def test_a_rejected_member_leaves_mean_and_std():
    """Rewards 1, 0, 0, 1 with the last rejected have the mean 1/3 and give 2/3, -1/3, -1/3 and
    0."""
    normalized, statistics = normalize_rewards(
        [1, 0, 0, 1], [5] * 4, [True, True, True, False], divide_by_std=False
    )
    assert (
        normalized == pytest.approx([2 / 3, -1 / 3, -1 / 3, 0])
        and statistics.num_excluded_samples == 1
    )


def test_groups_with_no_or_one_valid_member_have_a_defined_result_and_a_count():
    """Groups with no or one valid member get 0, neither NaN nor a number divided by epsilon, and
    are counted."""
    samples = [sound_sample(i, reward=float(i)) for i in range(8)]
    for i in (0, 1, 2, 3, 5, 6, 7):
        samples[i].finish_reason = "length"
    rewards, out = rewards_after_gate(samples)
    assert rewards == [0.0] * 8
    groups = postprocess_output_data(samples, SCORED).statistics.groups()
    assert (groups["without_valid"], groups["with_one_valid"]) == (1, 1)


def trained_batch(samples, config):
    """(plan, columns of the trained samples by index) after gate, rewards, columns and split plan
    over two ranks.
    """
    out = postprocess_output_data(samples, config).samples
    batch = build_train_columns(out, compute_rewards(out, COLUMNS)[:2], COLUMNS)
    schedule = ScheduleConfig(dp_size=2, align=1)
    batch, plan = plan_split(
        batch,
        SplitConfig(
            global_batch_size=14, expected_rollouts=16, schedule=schedule, keep_trailing=True
        ),
    )
    rows = {}
    for rank, part in enumerate(plan.schedule.partitions):
        for position in part:
            index = out[position].index
            rows[index] = (
                rank,
                batch.array("rewards")[position].tobytes(),
                np.asarray(batch["tokens"][position]).tobytes(),
                np.asarray(batch["loss_masks"][position]).tobytes(),
                float(plan.rollout_mask_sums_N[position]),
            )
    return plan, rows


def test_mark_and_drop_train_identically_and_invalid_samples_contribute_nothing():
    """Under `mark` and `drop` the same samples train on the same ranks with the same rewards, masks
    and denominators; invalid ones are in no step."""
    samples = [sound_sample(i, length=6 + i, reward=float(i % 3)) for i in range(16)]
    samples[5] = sound_sample(5, length=0, response="", rollout_log_probs=[], reward=100.0)
    samples[9].rollout_log_probs[0] = math.nan
    marked_plan, marked = trained_batch(samples, SCORED)
    drop = dataclasses.replace(SCORED, policies=dict.fromkeys(REASONS, Policy.DROP))
    dropped_plan, dropped = trained_batch(samples, drop)
    assert marked == dropped and set(marked) == set(range(16)) - {5, 9}
    assert marked_plan.global_batch_sizes == dropped_plan.global_batch_sizes
    assert marked_plan.schedule.micro_batch_indices == dropped_plan.schedule.micro_batch_indices
    assert marked_plan.dropped == {"empty": 1, "bad_logprob": 1}


def test_rewards_after_filtering_and_sorting_are_those_by_group_id_on_the_unsorted_data():
    """Rewards are normalized by group id, so that neither dropping nor sorting rows changes
    them."""
    rng = np.random.default_rng(3)
    samples = [sound_sample(i, length=3 + i % 5, reward=float(rng.integers(3))) for i in range(24)]
    for i in (2, 13, 14):
        samples[i].finish_reason = "length"
    rewards, out = rewards_after_gate(samples)
    by_index = {
        sample.index: reward for sample, reward in zip(out, rewards, strict=True) if sample.valid
    }
    drop = dataclasses.replace(SCORED, policies=dict.fromkeys(REASONS, Policy.DROP))
    shuffled = sorted(samples, key=lambda sample: (sample.response_length, -sample.index))
    again, out = rewards_after_gate(shuffled, drop)
    assert {sample.index: reward for sample, reward in zip(out, again, strict=True)} == by_index


def test_dynamic_filters_see_verdicts():
    """A dynamic filter does not count an invalid member: a group whose only spread comes from one
    has none."""
    samples = group_with_an_invalid_member(0.0)
    for sample in samples[:4]:
        sample.reward = 1.0
    out = postprocess_output_data(samples, SCORED).samples

    class Args:
        reward_key = None

    assert usable_rewards(Args, out) == [1.0] * 4


def test_model_failures_and_infrastructure_failures_are_told_apart_for_pass_at_k():
    """In pass@k a response that the model got wrong counts as wrong, and one that the engine lost
    does not count."""
    assert {reason.value for reason in MODEL_FAILURES} == {
        "empty",
        "too_short",
        "too_long",
        "truncated",
        "repetitive",
        "bad_format",
    }
    assert not InvalidReason.ABORTED.is_model_failure and not InvalidReason.FAILED.is_model_failure


def test_a_rollout_function_that_scores_by_itself_still_goes_through_the_gate(
    tmp_path, monkeypatch
):
    """`RolloutManager.generate` sends no rejected sample to the ranks, whichever rollout function
    generated it."""
    manager = manager_of(dirty_rollout(), tmp_path, monkeypatch)
    shards = [box.inner for box in manager.generate(0)]
    trained = sorted(int(index) for shard in shards for index in shard["sample_indices"])
    assert trained == [i for i in range(16) if i not in (1, 4, 6, 11, 14)]
    assert (
        manager.logged["rollout/ledger/sampled"] == 16
        and manager.logged["rollout/ledger/planned"] == 11
    )
    dropped = {
        name.split("/")[-1]: v
        for name, v in manager.logged.items()
        if name.startswith("rollout/ledger/dropped/")
    }
    assert dropped == {
        "bad_logprob": 1,
        "bad_token": 1,
        "bad_reward": 1,
        "empty": 1,
        "truncated": 1,
    }
    assert manager.logged["gate/drop_rate"] == 5 / 16 and (tmp_path / "gate.jsonl").exists()
    manager.gate.close()


def test_what_the_rollout_function_dropped_is_in_the_ledger_and_in_the_raw_snapshot(
    tmp_path, monkeypatch
):
    """Groups that a dynamic filter dropped are in the ledger and in the raw snapshot; a rollout
    function that only counts its drops works as before."""
    from slime.commands.gate import read_snapshot
    from slime.rollout.base_types import RolloutFnTrainOutput

    manager = manager_of(dirty_rollout(), tmp_path, monkeypatch)
    gone = [[sound_sample(first + i) for i in range(4)] for first in (40, 60)]
    outputs = [
        RolloutFnTrainOutput(
            samples=dirty_rollout(),
            dropped={"dynamic_filter_easy": 8},
            dropped_groups=[("dynamic_filter_easy", g) for g in gone],
        ),
        RolloutFnTrainOutput(
            samples=dirty_rollout(), metrics=None, dropped={"dynamic_filter_easy": 8}
        ),
    ]
    manager.generate_rollout = lambda args, rollout_id, source, evaluation: outputs[rollout_id]
    for rollout_id in (0, 1):
        shards = [box.inner for box in manager.generate(rollout_id)]
        assert sum(len(shard["sample_indices"]) for shard in shards) == 11
        assert (
            manager.logged["rollout/ledger/sampled"] == 24
            and manager.logged["rollout/ledger/dropped/dynamic_filter_easy"] == 8
        )
    manager.gate.close()
    path = tmp_path / "gate" / "raw_000000.parquet"
    assert [s.index for s in read_snapshot(path)] == list(range(16))
    assert [s.index for s in read_snapshot(path, with_dropped=True)][16:] == [
        40,
        41,
        42,
        43,
        60,
        61,
        62,
        63,
    ]
    assert len(read_snapshot(tmp_path / "gate" / "raw_000001.parquet", with_dropped=True)) == 16


@pytest.mark.parametrize("policy", ["mark", "drop"])
def test_the_mean_raw_reward_is_of_the_batch_and_the_mean_reward_of_filtered_groups_too(
    policy, tmp_path, monkeypatch
):
    """raw_reward is the mean over the batch and reward/mean also over filtered groups: 7/16 both,
    and with two dropped groups of zeros 7/16 and 7/24."""
    gone = [[sound_sample(first + i, reward=0.0) for i in range(4)] for first in (40, 60)]
    for dropped, expected in (
        ([], 7 / 16),
        ([("dynamic_filter_zero_std", group) for group in gone], 7 / 24),
    ):
        samples = [sound_sample(i, reward=float(i % 2)) for i in range(16)]
        samples[15].finish_reason = "length"
        manager = manager_of(samples, tmp_path / str(len(dropped)), monkeypatch, gate_policy=policy)
        counts = {reason: 4 * len(dropped) for reason, _ in dropped}
        output = RolloutFnTrainOutput(samples=samples, dropped=counts, dropped_groups=dropped)
        manager.generate_rollout = lambda args, rollout_id, source, evaluation, output=output: (
            output
        )
        shards = [box.inner for box in manager.generate(0)]
        manager.gate.close()
        ranks = merge_all(
            [phase_contributions(localize(shard, rank)) for rank, shard in enumerate(shards)]
        )
        assert (ranks["raw_reward"], manager.logged["rollout/reward/mean"]) == pytest.approx(
            (7 / 16, expected)
        )


def test_samples_count_as_trained_when_the_policy_has_trained_on_them(tmp_path, monkeypatch):
    """Samples are planned before training and counted as trained after it; where only the critic
    trains, the policy trains on none."""
    manager = manager_of(dirty_rollout(), tmp_path, monkeypatch, num_critic_only_steps=1)
    manager.args.use_critic = True
    manager.args.wandb_always_use_train_step = False
    ledgers = []
    for rollout_id in (0, 1):
        manager.logged.clear()
        boxes = manager.generate(rollout_id)
        ledger = {
            name.split("/")[-1]: count
            for name, count in manager.logged.items()
            if name.startswith("rollout/ledger/")
        }
        assert "trained" not in ledger
        log_trained(manager.args, rollout_id, boxes)
        ledgers.append(
            (
                ledger["planned"],
                ledger.get("critic_only", 0),
                ledger["dropped"],
                manager.logged["rollout/ledger/trained"],
            )
        )
    assert ledgers == [(0, 11, 16, 0), (11, 0, 5, 11)]
    results = [
        {"not_trained": {"update_skipped": [0, 2, 3, 5]}},
        None,
        {"not_trained": {"update_skipped": [7, 8, 9], "masked_by_function": [10]}},
        {"not_trained": {}},
    ]
    log_trained(manager.args, 1, boxes, results)
    names = ("trained", "not_trained/update_skipped", "not_trained/masked_by_function")
    assert [manager.logged[f"rollout/ledger/{name}"] for name in names] == [3, 7, 1], (
        "3 + 7 + 1 = 11 planned"
    )
    manager.gate.close()


def test_a_disk_that_takes_no_more_costs_the_dump_and_not_the_rollout(
    tmp_path, monkeypatch, caplog
):
    """On a full disk the samples train, lost dumps are counted and warned about once, and no half
    file stays."""
    folder = tmp_path / "dumps"
    manager = manager_of(
        dirty_rollout(),
        tmp_path / "run",
        monkeypatch,
        save_debug_rollout_data=f"{folder}/{{rollout_id}}.jsonl",
    )
    write = manager.dumper.save

    def write_on_full_disk(*args, **kwargs):
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
        try:
            return write(*args, **kwargs)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    monkeypatch.setattr(manager.dumper, "save", write_on_full_disk)
    for lost in (1, 2):
        shards = [box.inner for box in manager.generate(lost)]
        assert sum(len(shard["sample_indices"]) for shard in shards) == 11
        assert manager.logged["rollout/dumps_lost"] == lost
    assert list(folder.iterdir()) == []
    assert caplog.text.count("was not dumped") == 1
    assert "rollout 1 was not dumped" in caplog.text and "File too large" in caplog.text
    monkeypatch.setattr(manager.dumper, "save", write)
    manager.generate(3)
    assert [path.name for path in folder.iterdir()] == ["3.jsonl"] and manager.logged[
        "rollout/dumps_lost"
    ] == 2
    manager.gate.close()


def test_a_recorded_rollout_and_an_evaluation_go_through_the_gate_too(tmp_path, monkeypatch):
    """A replayed dump passes the gate; an evaluation is reported under eval/gate/ and has no sample
    marked."""
    template = str(tmp_path / "dump_{rollout_id}.jsonl")
    save_debug_rollout_data(template, dirty_rollout(), rollout_id=0, evaluation=False)
    manager = manager_of(dirty_rollout(), tmp_path, monkeypatch, load_debug_rollout_data=template)
    shards = [box.inner for box in manager.generate(0)]
    assert len([index for shard in shards for index in shard["sample_indices"]]) == 11
    assert manager.logged["gate/total"] == 16 and manager.logged["gate/count/bad_token"] == 1
    manager.eval(0)
    assert (
        manager.logged["eval/gate/total"] == 16 and manager.logged["eval/gate/count/bad_token"] == 1
    )
    manager.gate.close()


def test_a_users_evaluation_may_return_no_samples_or_nested_ones(tmp_path, monkeypatch):
    """A user's evaluation may return rewards without samples (1 and 0: 0.5) or nested samples, of
    which the gate sees all three."""
    rows = [sound_sample(i, rollout_id=-1 if i < 2 else -2, reward=float(i < 2)) for i in range(3)]
    sets = {
        "bare": {"rewards": [1.0, 0.0]},
        "nested": {"rewards": [1.0, 1.0, 0.0], "samples": [rows[:2], rows[2:]]},
    }
    manager = manager_of(
        dirty_rollout(),
        tmp_path,
        monkeypatch,
        save_debug_rollout_data=f"{tmp_path}/{{rollout_id}}.jsonl",
    )
    manager.eval_generate_rollout = lambda args, rollout_id, source, evaluation: sets
    manager.eval(0)
    assert (
        manager.logged["eval/bare"],
        manager.logged["eval/nested"],
        manager.logged["eval/gate/total"],
    ) == (0.5, 0.5, 3)
    manager.gate.close()


def test_the_groups_of_two_evaluation_sets_are_not_one_group(tmp_path, monkeypatch):
    """Groups of two evaluation sets, each numbered from 0, are not mixed groups."""
    manager = manager_of(dirty_rollout(), tmp_path, monkeypatch)
    sets = {
        name: evaluated([sound_sample(i, prompt=f"{name} {i // 4}") for i in range(8)])
        for name in ("one", "two")
    }
    manager.eval_generate_rollout = lambda args, rollout_id, source, evaluation: sets
    manager.eval(0)
    assert (
        manager.logged["eval/gate/groups/mixed"] == 0
        and manager.logged["eval/gate/groups/count"] == 4
    )
    assert [s.group_index for s in sets["two"]["samples"]] == [0] * 4 + [1] * 4, (
        "the samples themselves stay as they are"
    )
    manager.gate.close()


def test_cuts_and_rewards_are_of_everything_sampled_and_the_same_under_mark_and_drop(
    tmp_path, monkeypatch
):
    """Cuts and rewards are over everything sampled, alike under `mark` and `drop` and in a replay:
    1 of 16 is cut; the cut and the empty response count as 0: (0 + 2 + 0 + 2 + 1 + 2 + 0 + 1 + 0 +
    1 + 0) / 13."""
    found = []
    for policy in ("mark", "drop"):
        manager = manager_of(dirty_rollout(), tmp_path / policy, monkeypatch, gate_policy=policy)
        manager.generate(0)
        manager.gate.close()
        names = (
            "truncated",
            "truncated_ratio",
            "reward/mean",
            "reward/mean_kept",
            "num_sampled_samples",
            "invalid_count",
        )
        found.append([manager.logged[f"rollout/{name}"] for name in names])
    kept = [float(i % 3) for i in range(16) if i not in (1, 4, 6, 11, 14)]
    assert (
        found[0]
        == found[1]
        == [1 / 16, 1 / 16, pytest.approx(sum(kept) / 13), pytest.approx(sum(kept) / 11), 16, 5]
    )


def test_tokens_of_dropped_groups_count_in_the_throughput(tmp_path, monkeypatch):
    """8 tokens kept and 32 dropped by a filter in one second are 40 tokens per second."""
    from slime.metrics import rollout_metrics

    kept, gone = (
        [sound_sample(i, length=2) for i in range(4)],
        [sound_sample(4 + i, length=8) for i in range(4)],
    )
    manager = manager_of(kept, tmp_path, monkeypatch, rollout_num_gpus=1)
    output = RolloutFnTrainOutput(kept, dropped={"easy": 4}, dropped_groups=[("easy", gone)])
    manager.generate_rollout = lambda *args, **kwargs: output
    perf = rollout_metrics.compute_perf_metrics_from_samples
    monkeypatch.setattr(
        rollout_metrics,
        "compute_perf_metrics_from_samples",
        lambda config, samples, seconds: perf(config, samples, 1.0),
    )
    manager.generate(0)
    assert manager.logged["perf/tokens_per_gpu_per_sec"] == 40
    manager.gate.close()


def test_a_log_function_of_the_users_own_does_not_take_the_gates_numbers_away(
    tmp_path, monkeypatch
):
    """A log function that returns True replaces the rollout's log, but the gate's counts still
    reach every tracker, also for an evaluation."""
    monkeypatch.setitem(sys.modules, "my_log", types.SimpleNamespace(log=lambda *args: True))
    paths = {f"custom_{kind}rollout_log_function_path": "my_log.log" for kind in ("", "eval_")}
    manager = manager_of(dirty_rollout(), tmp_path, monkeypatch, **paths)
    manager.generate(0)
    manager.eval(0)
    reasons = {
        name: n
        for name, n in manager.logged.items()
        if name.startswith(("gate/count/", "eval/gate/count/")) and n
    }
    counts = {"bad_logprob": 1, "bad_token": 1, "bad_reward": 1, "empty": 1, "truncated": 1}
    assert reasons == {
        f"{kind}gate/count/{name}": n for kind in ("", "eval/") for name, n in counts.items()
    }
    assert "rollout/response_len/mean" not in manager.logged and manager.logged["eval/step"] == 0
    manager.gate.close()


def calls_in_order(function) -> list[str]:
    """Names of the calls in a function's source, in order of appearance."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    calls.sort(key=lambda node: (node.lineno, node.col_offset))
    return [ast.unparse(node.func) for node in calls]


def test_every_path_from_engine_to_trainer_goes_through_the_gate():
    """In the source, the gate is called before columns are built in the manager and before rewards
    in the scoring of every rollout function."""
    manager = manager_module.RolloutManager
    generate = calls_in_order(manager._generate)
    assert (
        generate.index("self._get_rollout_data")
        < generate.index("self.gate.run")
        < generate.index("self.train_data")
    )
    assert "self.gate.run" in calls_in_order(manager._eval)
    score = calls_in_order(scoring.score_group)
    assert score.index("gate.mark_batched") < score.index("_request_rewards")


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
