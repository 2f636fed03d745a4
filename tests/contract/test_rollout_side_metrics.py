"""Metrics and dumps of the rollout side: nothing that was collected goes unused, and a dump gives
back what was saved.
"""

import json
import math
import pickle
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from slime.data.sample import Sample, SpecInfo
from slime.exceptions import ConfigError, RolloutDataError
from slime.files.rollout_dump import (
    dump_path,
    load_debug_rollout_data,
    read_rollout_dump,
    save_debug_rollout_data,
    subsample_groups,
)
from slime.metrics.contributions import merge_all
from slime.metrics.rollout_metrics import (
    RolloutMetricsConfig,
    _compute_top_p_kept_vocab_metrics,
    compute_metrics_from_samples,
    compute_perf_metrics_from_samples,
    eval_contributions,
    eval_metrics,
    parse_weight_version,
    request_metrics,
    sample_contributions,
    staleness_parts,
    zero_spread_parts,
)

NUM_GPUS = 0
CONFIG = RolloutMetricsConfig()


def make_sample(i, **changes):
    fields = {
        "index": i,
        "group_index": i // 2,
        "response_length": 10 + i,
        "reward": float(i % 2),
        "status": Sample.Status.COMPLETED,
        "weight_versions": ["3"],
    }
    return Sample(**{**fields, **changes})


def merged(parts_of):
    """The numbers of a function that returns contributions."""
    return lambda *args, **kwargs: merge_all([parts_of(*args, **kwargs)])


@pytest.mark.parametrize("sizes", [(40,), (2, 38), (20, 20), (10, 0, 30)])
def test_metrics_of_parts_of_the_samples_merge_exactly(sizes):
    """What several parts of a rollout contribute merges into the numbers of all samples, to the
    last bit: rewards of both signs that cancel, sources that only some parts have, an empty part."""
    generator = np.random.default_rng(0)
    rewards = (generator.standard_normal(40) * 10.0 ** generator.integers(-8, 8, 40)).tolist()
    samples = [
        make_sample(
            i,
            reward=rewards[i],
            response_length=int(generator.integers(1, 99)),
            metadata={"source_name": "math" if i < 6 else "code"},
            status=Sample.Status.TRUNCATED if i % 3 == 0 else Sample.Status.COMPLETED,
            valid=i % 5 != 0,
            weight_versions=[str(i % 4)],
        )
        for i in range(40)
    ]
    config = RolloutMetricsConfig(trainer_weight_version=5, log_passrate=True)
    ends = np.cumsum(sizes).tolist()
    parts = [samples[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    found = merge_all([sample_contributions(config, part) for part in parts])
    expected = compute_metrics_from_samples(config, samples)
    assert found == expected and len(found) > 20
    datasets = [
        {"rewards": [s.reward for s in part], "samples": part} for part in (samples, *parts)
    ]
    whole, *divided = [eval_contributions(config, d, group_size=2) for d in datasets]
    assert merge_all(divided) == merge_all([whole]) and "-pass@2" in merge_all([whole])


def test_status_sources_and_removed_samples_are_counted():
    """Statuses, sources, removed samples and samples begun in an earlier rollout are counted."""
    samples = [
        make_sample(0, metadata={"source_name": "math", "start_rollout_id": 3}),
        make_sample(1, metadata={"source_name": "code"}, status=Sample.Status.TRUNCATED),
        make_sample(2, metadata={"source_name": "math"}, status=Sample.Status.FAILED, reward=None),
        make_sample(3, status=Sample.Status.ABORTED, remove_sample=True, valid=False),
    ]
    found = compute_metrics_from_samples(CONFIG, samples)
    counts = {
        name: found[f"status/{name}"] for name in ("completed", "truncated", "failed", "aborted")
    }
    assert counts == {"completed": 1, "truncated": 1, "failed": 1, "aborted": 1}
    assert (
        found["source/math/count"] == 2
        and found["source/math/reward"] == 0.0
        and found["source/code/truncated_ratio"] == 1.0
    )
    assert found["source/unknown/count"] == 1 and found["truncated_ratio"] == 0.25
    assert (found["removed_count"], found["invalid_count"], found["reward/missing_count"]) == (
        1,
        1,
        1,
    )
    assert found["resumed_count"] == 1


def test_an_invalid_sample_moves_no_mean_and_is_still_counted():
    """An invalid sample's reward of 1000 and 4000 tokens enter no mean of what was kept, and it
    counts as sampled; in the mean over everything sampled, what the model wrote wrongly is a 0."""
    samples = [
        make_sample(
            i, response_length=12, rollout_id=i, metadata={"source_name": "ab"[i % 2]}, reward=1.0
        )
        for i in range(3)
    ]
    bad = {
        "valid": False,
        "invalid_reason": "too_long",
        "reward": 1000.0,
        "response_length": 4000,
        "rollout_id": 3,
    }
    found = compute_metrics_from_samples(
        CONFIG, [*samples, make_sample(3, metadata={"source_name": "b"}, **bad)]
    )
    assert (found["response_len/mean"], found["response_len/max"], found["reward/mean_kept"]) == (
        12,
        12,
        1,
    )
    assert (found["source/b/reward"], found["source/b/response_len"], found["source/b/count"]) == (
        1,
        12,
        2,
    )
    assert (
        found["num_sampled_rollouts"],
        found["num_sampled_samples"],
        found["invalid_count"],
    ) == (4, 4, 1)
    assert found["reward/mean"] == 0.75
    nothing = compute_metrics_from_samples(CONFIG, [make_sample(3, **bad)])
    assert not [name for name in nothing if name.startswith("response_len/")]
    assert nothing["reward/mean"] == 0 and "reward/mean_kept" not in nothing
    lost = compute_metrics_from_samples(
        CONFIG, [make_sample(3, **{**bad, "invalid_reason": "bad_logprob"})]
    )
    assert not [name for name in lost if name.startswith("reward/mean")], (
        "an answer that was lost is neither right nor wrong"
    )


def test_the_first_reward_is_over_everything_sampled_also_what_filters_dropped():
    """Two kept rollouts with reward 1, a right one that was cut, and a dropped group of two zeros
    give a mean of 2 / 5."""
    samples = [make_sample(i, reward=1.0) for i in range(3)]
    samples[2].valid, samples[2].invalid_reason, samples[2].status = (
        False,
        "truncated",
        Sample.Status.TRUNCATED,
    )
    filtered = [make_sample(8 + i, reward=0.0) for i in range(2)]
    found = compute_metrics_from_samples(CONFIG, samples, filtered=filtered)
    assert (found["reward/mean"], found["reward/mean_kept"]) == (0.4, 1.0)
    assert found["truncated_ratio"] == 0.2 and found["num_sampled_samples"] == 5


@pytest.mark.parametrize("masked", [{"loss_mask": [0] * 8}, {"remove_sample": True}])
def test_a_response_that_a_users_function_masks_keeps_its_length(masked):
    """Lengths 5 and 8, the second cut and masked or removed, are reported as 5, 8 and mean 6.5, not
    0 and 2.5."""
    samples = [
        make_sample(0, response_length=5),
        make_sample(1, response_length=8, status=Sample.Status.TRUNCATED, **masked),
    ]
    found = compute_metrics_from_samples(CONFIG, samples)
    assert [found[f"response_len/{name}"] for name in ("min", "max", "mean")] == [5, 8, 6.5]


def test_a_length_counts_what_the_model_sampled_and_not_what_a_tool_wrote():
    """Of seven response tokens, two sampled and trained, two of a tool (log-prob 0) and three
    sampled and masked, the length counts 5."""
    sample = make_sample(
        0,
        response_length=7,
        loss_mask=[1, 1, 0, 0, 0, 0, 0],
        rollout_log_probs=[-0.5, -0.1, 0.0, 0.0, -0.2, -0.3, -0.4],
    )
    assert compute_metrics_from_samples(CONFIG, [sample])["response_len/mean"] == 5
    sample.rollout_log_probs = None
    assert compute_metrics_from_samples(CONFIG, [sample])["response_len/mean"] == 2


def test_a_rate_is_the_ratio_of_two_sums():
    """1 of 2 and 90 of 100 accepted draft tokens are 91 / 102, not the mean 0.70 of two rates."""
    infos = [
        SpecInfo(
            spec_accept_token_num=1,
            spec_draft_token_num=2,
            spec_verify_ct=2,
            completion_token_num=3,
        ),
        SpecInfo(
            spec_accept_token_num=90,
            spec_draft_token_num=100,
            spec_verify_ct=20,
            completion_token_num=110,
        ),
    ]
    found = compute_metrics_from_samples(
        CONFIG, [make_sample(i, spec_info=info) for i, info in enumerate(infos)]
    )
    assert found["spec_accept_rate"] == 91 / 102 and found["spec_accept_length"] == 113 / 22


def test_a_source_whose_groups_are_all_filtered_takes_no_other_series_with_it():
    """A source whose groups are all filtered, or that a rollout lacks, does not interrupt the other
    sources' series."""
    math_ = [make_sample(i, metadata={"source_name": "math"}) for i in range(2)]
    code = [
        make_sample(4 + i, metadata={"source_name": "code"}, status=Sample.Status.TRUNCATED)
        for i in range(2)
    ]
    found = compute_metrics_from_samples(CONFIG, math_, filtered=code)
    assert (
        found["source/math/count"],
        found["source/math/reward"],
        found["source/math/response_len"],
    ) == (2, 0.5, 10.5)
    assert (found["source/code/count"], found["source/code/truncated_ratio"]) == (
        2,
        1,
    ) and "source/code/reward" not in found
    assert compute_metrics_from_samples(CONFIG, math_)["source/math/count"] == 2
    assert not [
        name
        for name in compute_metrics_from_samples(CONFIG, [make_sample(0)])
        if name.startswith("source/")
    ]


def test_a_groups_spread_is_between_executions():
    """Two executions with rewards (1, 0) and (1, 0) have equal means, so their group has no
    spread."""
    samples = [
        make_sample(i, group_index=0, rollout_id=i // 2, reward=float(i % 2 == 0)) for i in range(4)
    ]
    assert compute_metrics_from_samples(CONFIG, samples)["zero_std/count"] == 1
    samples[1].reward = 0.5
    assert compute_metrics_from_samples(CONFIG, samples)["zero_std/count"] == 0


def test_rewards_that_are_none_nan_or_keyed_do_not_crash_a_metric():
    """Missing rewards are counted, and dict rewards are read by their key."""
    samples = [
        make_sample(0, reward=None),
        make_sample(1, reward=math.nan),
        make_sample(2, reward={"score": 1.0}),
        make_sample(3, reward={"score": 0.0}),
    ]
    keyed = compute_metrics_from_samples(RolloutMetricsConfig(reward_key="score"), samples)
    assert keyed["reward/mean"] == 0.5 and keyed["reward/missing_count"] == 2
    assert compute_metrics_from_samples(CONFIG, samples)["reward/missing_count"] == 4


def test_the_mean_reward_has_one_vote_per_rollout():
    """The mean reward has one vote per rollout, not per turn: 0.667, not 0.333."""
    rows = [(1.0, 0)] * 2 + [(1.0, 1)] * 3 + [(0.0, 2)] * 10
    samples = [
        make_sample(i, reward=reward, rollout_id=rollout, group_index=0)
        for i, (reward, rollout) in enumerate(rows)
    ]
    found = compute_metrics_from_samples(CONFIG, samples)
    assert found["reward/mean"] == pytest.approx(2 / 3) and (
        found["num_sampled_samples"],
        found["num_sampled_rollouts"],
    ) == (15, 3)


def test_groups_without_spread_have_a_bounded_set_of_names():
    """Groups without spread are counted under upstream's `zero_std/count_<reward>` for the most
    frequent rewards and three names for all; groups of one do not count."""
    found = merged(zero_spread_parts)(
        {0: [1.0, 1.0], 1: [0.0, 0.0], 2: [0.1 + 0.2, 0.3], 3: [0.0, 1.0], 4: [5.0]}
    )
    assert found == {
        "zero_std/count_all_solved": 1,
        "zero_std/count_all_failed": 1,
        "zero_std/count_other": 1,
        "zero_std/count": 3,
        "zero_std/frac": 0.75,
        "zero_std/count_1.0": 1,
        "zero_std/count_0.0": 1,
        "zero_std/count_0.3": 1,
    }
    many = merged(zero_spread_parts)(
        {number: [number, number] for number in range(100)} | {100: [7, 7]}
    )
    assert many["zero_std/count_7"] == 2 and len(many) == 8 + 5
    samples = [make_sample(i, group_index=None) for i in range(4)]
    assert compute_metrics_from_samples(CONFIG, samples)["zero_std/count"] == 0, (
        "samples without a group are not one group"
    )


def test_staleness_is_versions_between_oldest_token_and_now():
    """Segments at versions 3 and 4 with the trainer at 5 have staleness 2; unknown versions are
    counted."""
    samples = [
        make_sample(0, weight_versions=["3", "4"]),
        make_sample(1, weight_versions=["v5"]),
        make_sample(2, weight_versions=[]),
    ]
    found = merged(staleness_parts)(samples, current_version=5)
    assert found == {
        "staleness/mean": 1.0,
        "staleness/max": 2.0,
        "staleness/mixed_frac": 0.5,
        "staleness/unknown_count": 1.0,
    }
    assert merged(staleness_parts)([make_sample(0, weight_versions=["default"])]) == {}
    assert parse_weight_version("v12") == 12 and parse_weight_version("main") is None


def test_staleness_counts_from_what_the_engines_serve_now():
    """A fully asynchronous batch sampled before the last publish is stale, though none of its
    samples has the newest version."""
    config = RolloutMetricsConfig(trainer_weight_version=3)
    samples = [make_sample(0, weight_versions=["1"]), make_sample(1, weight_versions=["2"])]
    assert compute_metrics_from_samples(config, samples)["staleness/mean"] == 1.5
    assert compute_metrics_from_samples(CONFIG, samples)["staleness/mean"] == 0.5


def test_requests_are_counted():
    """Requests and profiled requests are counted, and their timings summarized."""
    samples = [make_sample(0), make_sample(1)]
    samples[0].trace = {
        "events": [
            {
                "type": "span_end",
                "name": "sglang_generate",
                "attrs": {
                    "e2e_latency": 2.0,
                    "decode_throughput": 50.0,
                    "prefill_launch_delay": 0.5,
                },
            },
            {"type": "span_end", "name": "reward", "attrs": {"e2e_latency": 9.0}},
        ]
    }
    samples[1].trace = {"events": [{"type": "span_end", "name": "sglang_generate", "attrs": {}}]}
    found = request_metrics(samples)
    assert found["request/count"] == 2 and found["request/profiled_count"] == 1
    assert (
        found["request/e2e_latency/mean"] == 2.0
        and found["decode/throughput/max"] == 50.0
        and found["prefill/launch_delay/min"] == 0.5
    )


def test_kept_nucleus_ids_are_per_trainable_token():
    """2 + 5 nucleus ids on two trainable tokens are 3.5, the value that upstream pins; masked
    tokens and removed samples do not count."""
    sample = make_sample(
        0,
        response_length=3,
        loss_mask=[1, 0, 1],
        rollout_top_p_token_ids=list(range(16)),
        rollout_top_p_token_offsets=[0, 2, 11, 16],
    )
    removed = make_sample(
        1, remove_sample=True, rollout_top_p_token_ids=[1], rollout_top_p_token_offsets=[0, 1]
    )
    assert _compute_top_p_kept_vocab_metrics(None, [sample, removed]) == {
        "top_p_kept_vocab_per_token": 3.5
    }
    assert _compute_top_p_kept_vocab_metrics(None, [make_sample(0)]) == {}


def test_throughput_is_per_second_and_gpu():
    """Throughput is tokens per second and GPU over the rollout's time; the longest sample's is
    without its waiting."""
    samples = [
        make_sample(0, response_length=100),
        make_sample(
            1, response_length=300, loss_mask=[1] * 200 + [0] * 100, non_generation_time=5.0
        ),
    ]
    found = compute_perf_metrics_from_samples(
        RolloutMetricsConfig(rollout_num_gpus=2), samples, 10.0
    )
    assert (
        found["tokens_per_gpu_per_sec"] == 20.0
        and found["effective_tokens_per_gpu_per_sec"] == 15.0
    )
    assert (
        found["longest_sample_tokens_per_sec"] == 30.0
        and found["longest_sample_tokens_per_sec_without_non_generation"] == 60.0
    )
    assert (
        compute_perf_metrics_from_samples(CONFIG, [], 1.0) == {"rollout_time": 1.0}
        and compute_metrics_from_samples(CONFIG, []) == {}
    )


@pytest.mark.parametrize("depth", [1, 2])
def test_a_users_evaluation_may_nest_its_samples(depth):
    """An evaluation may return its samples as lists in lists: attempts with rows (1, 1) and (0)
    have the mean 0.5."""
    rows = [
        make_sample(0, group_index=0, rollout_id=5),
        make_sample(1, group_index=0, rollout_id=5),
        make_sample(2, group_index=0, rollout_id=6),
    ]
    nested = [rows[:2], rows[2:]] if depth == 1 else [[rows[:2], rows[2:]]]
    found = eval_metrics(CONFIG, {"rewards": [1.0, 1.0, 0.0], "samples": nested}, group_size=2)
    assert (
        found[""] == 0.5
        and found["/num_sampled_samples"] == 3
        and found["/num_sampled_rollouts"] == 2
    )


def test_evaluation_counts_every_row_once_and_groups_by_id():
    """3 items with n = 2 are 3 groups of 2 by id, in any order; a reward of None is not scored."""
    order = [0, 2, 4, 1, 3, 5]
    samples = [make_sample(i, group_index=i // 2) for i in order]
    rewards = [[1.0, 0.0, 1.0, 1.0, 0.0, 0.0][i] for i in order]
    found = eval_metrics(
        RolloutMetricsConfig(log_passrate=True),
        {"rewards": rewards, "truncated": [True] + [False] * 5, "samples": samples},
        group_size=2,
    )
    assert (
        found[""] == 0.5
        and found["-pass@1"] == 0.5
        and found["-pass@2"] == pytest.approx(2 / 3)
        and found["-truncated_ratio"] == pytest.approx(1 / 6)
    )
    assert eval_metrics(CONFIG, {"rewards": [1.0, None]}, group_size=1)[""] == 1.0


@pytest.mark.parametrize("group_index", [0, None])
def test_an_attempt_of_an_evaluation_has_one_vote_however_many_samples_it_emitted(group_index):
    """Attempt 1 with two samples of reward 1 and attempt 2 with one of 0: mean and pass@1 are 0.5,
    not 0.667; pass@2 is 1."""
    samples = [
        make_sample(i, group_index=group_index, rollout_id=rollout)
        for i, rollout in enumerate([-1, -1, None])
    ]
    found = eval_metrics(
        RolloutMetricsConfig(log_passrate=True),
        {"rewards": [1.0, 1.0, 0.0], "samples": samples},
        group_size=2,
    )
    assert (found[""], found["-pass@1"], found["-pass@2"]) == (0.5, 0.5, 1.0)


# --- dumps ----------------------------------------------------------------------------------------


def full_sample(i):
    sample = make_sample(
        i,
        prompt=[{"role": "user", "content": "2+2 = ? \u2603"}],
        tokens=[1, 2, 3 + i],
        loss_mask=[1, 0],
        rollout_log_probs=[-0.1, -float(np.float32(0.3))],
        rollout_top_p_token_ids=torch.arange(3, dtype=torch.int32),
        rollout_routed_experts=np.ones((2, 1, 2), dtype=np.uint8),
        multimodal_train_inputs={"pixels": torch.ones(1, 2, dtype=torch.bfloat16)},
        reward={"score": math.inf, "acc": math.nan},
        metadata={"k": {1: "int keys become strings"}, "nested": [[1.5, None], "x"]},
        valid=False,
        invalid_reason="empty",
        finish_reason="length",
    )
    sample.custom_attribute = {"kept": True}
    return sample


def test_a_dump_gives_back_exactly_what_was_saved(tmp_path):
    """A dump gives back ids, mask, log-probs (bit for bit), reward, group, version, order and extra
    attributes."""
    samples = [full_sample(i) for i in range(3)]
    path = save_debug_rollout_data(
        str(tmp_path / "d" / "{rollout_id}.jsonl"),
        [samples[:2], samples[2:]],
        rollout_id=7,
        evaluation=False,
    )
    assert path.name == "7.jsonl"
    for saved, read in zip(samples, read_rollout_dump(path), strict=True):
        for name in (
            "index",
            "group_index",
            "tokens",
            "loss_mask",
            "rollout_log_probs",
            "prompt",
            "weight_versions",
            "valid",
            "invalid_reason",
        ):
            assert getattr(read, name) == getattr(saved, name), name
        assert read.status is Sample.Status.COMPLETED and read.custom_attribute == {"kept": True}
        assert read.reward["score"] == math.inf and math.isnan(read.reward["acc"])
        assert torch.equal(read.rollout_top_p_token_ids, saved.rollout_top_p_token_ids)
        assert (
            read.rollout_routed_experts.dtype == np.uint8
            and read.multimodal_train_inputs["pixels"].dtype == torch.bfloat16
        )
    evaluation = save_debug_rollout_data(
        str(tmp_path / "{rollout_id}"), {"set": {"samples": samples}}, rollout_id=7, evaluation=True
    )
    assert evaluation.name == "eval_7" and len(read_rollout_dump(evaluation)) == 3


def test_to_dict_shares_its_lists_as_upstreams_does_and_what_keeps_them_copies(tmp_path):
    """`to_dict` shares the sample's lists, which its docstring states; a dump keeps the numbers of
    its time whatever happens to the sample."""
    sample = full_sample(0)
    assert "aliased" in Sample.to_dict.__doc__ and sample.to_dict()["tokens"] is sample.tokens
    path = save_debug_rollout_data(
        str(tmp_path / "{rollout_id}"), [sample], rollout_id=0, evaluation=False
    )
    sample.tokens.append(9)
    assert read_rollout_dump(path)[0].tokens == [1, 2, 3]
    as_dict = sample.to_dict()
    keys = list(as_dict)
    assert (
        Sample.from_dict(as_dict).tokens == [1, 2, 3, 9]
        and list(as_dict) == keys
        and as_dict["status"] == "completed"
    )


def test_a_dump_is_written_and_read_a_sample_at_a_time(tmp_path):
    """Writing or reading a dump of 10 MB adds 2 MB of memory at most to the samples."""
    samples = [make_sample(i, response=chr(97 + i % 26) * 100_000) for i in range(100)]
    tracemalloc.start()
    try:
        path = save_debug_rollout_data(
            str(tmp_path / "{rollout_id}"), samples, rollout_id=0, evaluation=False
        )
        assert path.stat().st_size > 10e6 and tracemalloc.get_traced_memory()[1] < 2e6
        tracemalloc.reset_peak()
        read = read_rollout_dump(path)
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert read[99].response == samples[99].response and kept > 10e6 and peak - kept < 2e6


def test_a_dump_is_json_and_executes_nothing(tmp_path):
    """A pickle in place of a dump is refused as what it is."""
    path = save_debug_rollout_data(
        str(tmp_path / "{rollout_id}"), [full_sample(0)], rollout_id=0, evaluation=False
    )
    assert json.loads(path.read_text().splitlines()[0])["num_samples"] == 1
    path.write_bytes(pickle.dumps({"samples": []}))
    with pytest.raises(RolloutDataError, match="is a pickle, which slime never loads"):
        read_rollout_dump(path)
    path.write_text('{"samples": []}\n')
    with pytest.raises(
        RolloutDataError,
        match='is not a rollout dump of this version: it begins with b\'{"samples": ',
    ):
        read_rollout_dump(path)


def test_a_damaged_or_missing_dump_is_named(tmp_path):
    """A lost line, a cut line and a missing file have a message each."""
    path = save_debug_rollout_data(
        str(tmp_path / "{rollout_id}"),
        [full_sample(i) for i in range(3)],
        rollout_id=0,
        evaluation=False,
    )
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]))
    with pytest.raises(RolloutDataError, match="holds 2 samples, its head says 3"):
        read_rollout_dump(path)
    path.write_bytes(b"".join([*lines[:-2], lines[-2][:20] + b"\n", lines[-1]]))
    with pytest.raises(RolloutDataError, match="line 4: not JSON"):
        read_rollout_dump(path)
    with pytest.raises(RolloutDataError, match="no rollout dump"):
        load_debug_rollout_data(str(tmp_path / "{rollout_id}"), rollout_id=99)
    with pytest.raises(RolloutDataError, match="cannot store"):
        save_debug_rollout_data(
            str(tmp_path / "{rollout_id}"),
            [make_sample(0, metadata={"f": object()})],
            rollout_id=1,
            evaluation=False,
        )


def test_a_path_that_would_overwrite_itself_is_refused():
    """A dump path without the rollout id is refused, because each rollout would replace the one
    before."""
    with pytest.raises(ConfigError, match="needs {rollout_id}"):
        dump_path("dump.jsonl", 3, evaluation=False)
    with pytest.raises(ConfigError, match="placeholder other than"):
        dump_path("{rollout_id}_{rank}.jsonl", 3, evaluation=False)


def test_subsampling_keeps_whole_groups_and_at_least_one():
    """Sub-sampling keeps whole groups, at least one, without a bias to the tail."""
    samples = [make_sample(i, group_index=i // 3) for i in range(15)]
    for ratio, groups in {0.01: [0], 0.4: [0, 2], 0.6: [0, 1, 3], 1.0: [0, 1, 2, 3, 4]}.items():
        kept = subsample_groups(samples, ratio)
        assert sorted({s.group_index for s in kept}) == groups and len(kept) == 3 * len(groups)
    with pytest.raises(ConfigError, match="in \\(0, 1\\]"):
        subsample_groups(samples, 0)


def test_the_config_is_made_of_the_options_that_are_there():
    """Missing options of a short namespace get defaults, a config is returned as it is, and
    evaluation may read another reward key."""
    short = SimpleNamespace(reward_key="score", log_passrate=True)
    config = RolloutMetricsConfig.from_args(short)
    assert (
        config == RolloutMetricsConfig(reward_key="score", log_passrate=True)
        and RolloutMetricsConfig.from_args(config) is config
    )
    assert RolloutMetricsConfig.from_args(short, evaluation=True).reward_key == "score"
    short.eval_reward_key = "acc"
    assert (
        RolloutMetricsConfig.from_args(short, evaluation=True).reward_key == "acc"
        and RolloutMetricsConfig.from_args(short).reward_key == "score"
    )


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
