"""Metrics of a rollout batch: the same number at every split, over the mask that trains, and sent
to the trackers."""

import logging
import math
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core import mpu

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also as `python tests/...`
from support.distributed import run_distributed

from slime.data.batch import localize
from slime.data.columns import ColumnsConfig, build_train_columns, compute_rewards
from slime.data.context_parallel import plan_response_layout
from slime.data.ledger import Ledger
from slime.data.sample import Sample
from slime.data.schedule import ScheduleConfig
from slime.data.split import SplitConfig, split_by_dp
from slime.exceptions import RolloutDataError
from slime.metrics import contributions as c
from slime.metrics import perf, train_metrics
from slime.metrics.perf import perf_metrics
from slime.metrics.reduction import reduce_log_dicts, rollout_log_metric_contribution
from slime.metrics.statistics import (
    compression_ratio,
    compute_pass_rate,
    compute_ragged_pass_rate,
    compute_rollout_step,
    compute_statistics,
    compute_train_step,
    dict_add_prefix,
    has_repetition,
)
from slime.metrics.train_metrics import (
    TrainMetricsConfig,
    check_ci,
    correct_sample_contributions,
    log_rollout_data,
    multi_turn_contributions,
    pass_rates,
    phase_contributions,
)
from slime.tracking import tracking

NUM_GPUS = 0


def arrive(shard, rank=0):
    return localize(shard, rank)


def plain_batch(**fields):
    """A local batch of plain lists. Responses of 1, 2, ... tokens unless given."""
    count = len(next(iter(fields.values())))
    lengths = fields.get("response_lengths", list(range(1, count + 1)))
    base = {
        "partition": list(range(count)),
        "total_lengths": [10 + n for n in lengths],
        "response_lengths": lengths,
        "loss_masks": [torch.ones(n, dtype=torch.int32) for n in lengths],
    }
    return localize({**base, **fields}, 0)


def metrics_of(*batches, cp_size=1):
    return c.merge_all([phase_contributions(batch, cp_size=cp_size) for batch in batches])


# --- what is a metric -----------------------------------------------------------------------------


def test_identities_strings_and_layout_are_not_metrics_and_do_not_crash():
    """Strings, None and ints in the batch raise nothing and are not metrics, and neither are
    `partition`, `local_raw_reward` and undeclared keys."""
    batch = plain_batch(
        rewards=[1.0, -1.0],
        raw_reward=[1.0, 0.0],
        source_names=["a", "b"],
        sample_indices=[None, 3],
        metadata=[{"x": 1}, None],
        micro_batch_indices=[[0], [1]],
        num_microbatches=[2],
        global_batch_sizes=[2],
        undeclared=[5, 6],
    )
    names = set(metrics_of(batch))
    assert names == {
        "response_lengths",
        "total_lengths",
        "rewards",
        "raw_reward",
        "num_samples",
        "num_rollouts",
    }


def test_empty_and_fully_masked_batches_give_no_nan():
    """Where nothing is to be averaged there is no metric, and neither NaN nor an exception."""
    empty = plain_batch(rewards=[], rollout_log_probs=[])
    masked = plain_batch(
        rewards=[1.0],
        rollout_log_probs=[torch.tensor([-1.0])],
        loss_masks=[torch.zeros(1, dtype=torch.int32)],
    )
    assert metrics_of(empty) == {}
    found = metrics_of(empty, masked)
    assert "rollout_log_probs" not in found and found["rewards"] == 1.0
    assert (found["num_samples"], found["num_rollouts"]) == (0, 0), (
        "nothing of it trains, and the ledger says so too"
    )
    zero_length = plain_batch(
        rewards=[1.0, 2.0],
        response_lengths=[0, 2],
        rollout_log_probs=[torch.zeros(0), torch.tensor([-1.0, -3.0])],
    )
    assert metrics_of(zero_length)["rollout_log_probs"] == -2.0


def test_values_at_masked_positions_are_never_read():
    """NaN and -30 at the masked tokens of a tool leave the mean as it is."""
    batch = plain_batch(
        response_lengths=[6],
        loss_masks=[torch.tensor([1, 1, 0, 0, 0, 1])],
        log_probs=[torch.tensor([-1.0, -1.02, float("nan"), -30.0, float("-inf"), -1.0])],
    )
    assert metrics_of(batch)["log_probs"] == pytest.approx(-3.02 / 3, rel=1e-6)


# of the second, rank 0 owns no response token
@pytest.mark.parametrize(("total", "response", "mean"), [(9, 6, 4.0), (10, 2, 1.5)])
def test_every_per_token_field_is_a_rollout_mean_under_context_parallelism(total, response, mean):
    """Two CP ranks report what one does, for any per-token field; upstream multiplied `rollout/kl`
    and `rollout/entropy` by cp_size."""
    full = torch.arange(1.0, response + 1)
    mask = torch.ones(response, dtype=torch.int32)
    mask[0] = response < 6  # the longer one's first token, value 1, does not train
    shape = {"response_lengths": [response], "total_lengths": [total], "loss_masks": [mask]}
    whole = plain_batch(**shape, kl=[full], entropy=[full], values=[full])
    parts = []
    for cp_rank in range(2):
        owned = plan_response_layout(
            [total], [response], cp_size=2, cp_rank=cp_rank
        ).response_indices
        assert (len(owned) == 0) == (total == 10 and cp_rank == 0)
        batch = plain_batch(
            **shape, **{name: [full[owned]] for name in ("kl", "entropy", "values")}
        )
        parts.append(phase_contributions(batch, cp_size=2, cp_rank=cp_rank))
    assert c.merge_all(parts) == pytest.approx(metrics_of(whole))
    assert c.merge_all(parts)["kl"] == c.merge_all(parts)["entropy"] == mean


def test_rewards_lengths_and_truncation_give_each_rollout_one_vote():
    """Each rollout has one vote however many samples it emitted: rewards 1, 1 and 0 of 2, 3 and 10
    samples give 0.667, not 0.333."""
    rewards = [1.0] * 5 + [0.0] * 10
    counts = [2] * 2 + [3] * 3 + [10] * 10
    truncated, lengths = (
        [1 - int(reward) for reward in rewards],
        [3 + 6 * int(reward) for reward in rewards],
    )
    batch = plain_batch(
        rewards=rewards, truncated=truncated, response_lengths=lengths, rollout_sample_counts=counts
    )
    found = metrics_of(batch)
    assert found["rewards"] == pytest.approx(2 / 3)
    assert "truncated" not in found, "cuts are of what was sampled, which the trainers do not have"
    assert (found["response_lengths"], found["total_lengths"]) == (
        pytest.approx(7),
        pytest.approx(17),
    )
    assert (found["num_samples"], found["num_rollouts"]) == (15, pytest.approx(3))


def test_a_denominator_comes_from_the_mask_of_its_numerator():
    """Four trained tokens beside a fully masked row have the mean over four, and over one
    rollout."""
    batch = plain_batch(
        response_lengths=[4, 8],
        loss_masks=[torch.ones(4), torch.zeros(8)],
        log_probs=[torch.full((4,), -1.0), torch.full((8,), -100.0)],
    )
    assert metrics_of(batch)["log_probs"] == -1.0


def test_the_mean_of_a_whole_batch_field_is_the_batchs_however_uneven_the_ranks():
    """The mean of a whole field is the batch's, though ranks with 4 and 1 samples both hold all
    rewards."""
    whole = {"total_lengths": [11] * 5, "raw_reward": [1.0, 0.0, 0.0, 1.0, 1.0]}
    shards = [
        {**whole, "partition": p, "response_lengths": [1] * len(p), "rewards": [0.5] * len(p)}
        for p in ([0, 1, 2, 3], [4])
    ]
    found = metrics_of(*[arrive(shard, rank) for rank, shard in enumerate(shards)])
    assert found["raw_reward"] == 0.6 and found["num_samples"] == 5


def test_the_raw_reward_takes_what_the_model_failed_at_as_zero():
    """Failures of the model count as 0: rewards 1, 1, a rejected cut sample with 7, and a rejected
    rollout outside the batch give (1 + 1 + 0 + 0) / 4."""
    rows = {
        "tokens": [[1, 2]] * 3,
        "response_lengths": [1] * 3,
        "raw_reward": [1.0, 1.0, 7.0],
        "rewards": [1.0] * 3,
    }
    data = {
        **rows,
        "valid": [True, True, False],
        "invalid_reason": [None, None, "truncated"],
        "model_failure": [False, False, True],
    }
    for expected, dropped in ((2 / 3, []), (0.5, [None]), (0.5, [9, 9]), (0.5, [9])):
        split = split_by_dp(
            data,
            SplitConfig(3, 3, ScheduleConfig(2, 2, token_cap=8), pad_to=8),
            dropped_failures=dropped,
        )
        assert metrics_of(*[localize(shard, rank) for rank, shard in enumerate(split.shards)])[
            "raw_reward"
        ] == pytest.approx(expected)
    # a failed sample shares the vote of its rollout, in the batch or not
    fan_out = {**data, "rollout_ids": [0, 1, 1]}
    split = split_by_dp(
        fan_out,
        SplitConfig(3, 3, ScheduleConfig(1, 1, token_cap=8), pad_to=8),
        dropped_failures=[0, 0],
    )
    assert metrics_of(localize(next(iter(split.shards)), 0))["raw_reward"] == pytest.approx(
        (1 / 3 + 1 / 2) / 2
    )


def test_lengths_are_the_partitions_lengths():
    """The mean length of correct samples is over their own lengths: [10, 20, 30, 40], ranks [3, 0]
    and [1, 2], rewards [1, 0, 1, 1] give 26.67."""
    shards = [
        {
            "partition": part,
            "total_lengths": [100, 101, 102, 103],
            "response_lengths": [10 * (i + 1) for i in part],
            "raw_reward": [1.0, 0.0, 1.0, 1.0],
        }
        for part in ([3, 0], [1, 2], [2, 0, 3, 1])
    ]
    config = TrainMetricsConfig()
    parts = [correct_sample_contributions(arrive(shard), config=config) for shard in shards[:2]]
    assert c.merge_all(parts)["correct_response_lengths"] == pytest.approx(80 / 3)
    permuted = correct_sample_contributions(arrive(shards[2]), config=config)
    assert c.merge_all([permuted])["correct_response_lengths"] == pytest.approx(80 / 3)
    # whoever compares with figures of an earlier version, on one rank too, reads why they changed
    root = Path(__file__).resolve().parents[2]
    assert (
        "with one rank, figures of earlier versions change too"
        in (root / "CHANGELOG.md").read_text()
    )
    assert "also on one rank, so figures differ" in " ".join(
        (root / "docs" / "data_contract.md").read_text().split()
    )


# --- panels ---------------------------------------------------------------------------------------


def correct_batch(**fields):
    base = {
        "raw_reward": [1.0, 0.0, 1.0, 1.0],
        "response_lengths": [1, 2, 3, 9],
        "loss_masks": [torch.ones(1), torch.ones(2), torch.tensor([1, 0, 1]), torch.ones(9)],
    }
    return plain_batch(**{**base, **fields})


def test_correct_length_shares_are_of_quarters_and_keep_the_longest():
    """`correct_length/p*` are shares in quarters of the maximum length, longer ones included: of
    maximum 8, length 1 is in p25, 3 in p50, 9 in p100."""
    found = c.merge_all(
        [
            correct_sample_contributions(
                correct_batch(), config=TrainMetricsConfig(rollout_max_response_len=8)
            )
        ]
    )
    shares = [found[f"correct_length/{q}"] for q in ("p25", "p50", "p75", "p100")]
    assert shares == [pytest.approx(1 / 3), pytest.approx(1 / 3), 0.0, pytest.approx(1 / 3)]
    assert (
        found["correct_response_length/quantile_50"] == 3.0
        and found["correct_response_length/quantile_100"] == 9.0
    )


def test_correct_entropy_takes_the_best_source_there_is(caplog):
    """`correct_entropy` is a mean of the entropy, else of -log p of the trainer, else of the
    engine; without any of them one warning tells that it is left out."""
    ones = [torch.full((n,), 1.0) for n in (1, 2, 3, 9)]
    entropy = [
        torch.tensor([0.5]),
        torch.zeros(2),
        torch.tensor([1.0, 99.0, 2.0]),
        torch.full((9,), 0.25),
    ]
    config = TrainMetricsConfig()

    def value(**fields):
        return c.merge_all(
            [correct_sample_contributions(correct_batch(**fields), config=config)]
        ).get("correct_entropy")

    engine = [-2 * x for x in ones]
    trainer = [-3 * x for x in ones]
    assert value(entropy=entropy, log_probs=trainer, rollout_log_probs=engine) == pytest.approx(
        (0.5 + 1.5 + 0.25) / 3
    )
    assert value(log_probs=trainer, rollout_log_probs=engine) == 3.0
    assert value(rollout_log_probs=engine) == 2.0
    train_metrics._said.clear()
    with caplog.at_level(logging.WARNING):
        assert value() is None and value() is None
    assert caplog.text.count("correct_entropy is left out") == 1


def test_a_rank_without_correct_samples_contributes_count_zero():
    """A rank without correct samples adds a count of 0: the mean over ranks stays, and nothing is
    NaN."""
    none = plain_batch(raw_reward=[0.0, 0.0], rollout_log_probs=[torch.zeros(1), torch.zeros(2)])
    config = TrainMetricsConfig(rollout_max_response_len=8)
    parts = [
        correct_sample_contributions(batch, config=config) for batch in (none, correct_batch())
    ]
    assert c.merge_all(parts)["correct_response_lengths"] == pytest.approx(13 / 3)
    assert c.merge_all(parts[:1]) == {}


def test_multi_turn_max_is_the_phases_max():
    """The maximum over ranks of 3 and 1 samples is that of the phase, and means are over all
    samples."""
    first = plain_batch(response_lengths=[2, 4, 6], round_number=[1, 2, 3])
    second = plain_batch(
        response_lengths=[20], round_number=[9], loss_masks=[torch.tensor([1] * 5 + [0] * 15)]
    )
    config = TrainMetricsConfig(rollout_max_response_len=20)
    found = c.merge_all(
        [multi_turn_contributions(batch, config=config) for batch in (first, second)]
    )
    assert (
        found["raw_response_length/response_length_max"] == 20
        and found["raw_response_length/response_length_mean"] == 8
    )
    assert (
        found["wo_obs_response_length/response_length_max"] == 6
        and found["raw_response_length/response_length_clip_ratio"] == 0.25
    )
    assert (
        found["multi_turn_metric/round_number_max"] == 9
        and found["multi_turn_metric/round_number_min"] == 1
    )


def test_pass_at_k_is_unbiased_for_groups_of_any_size():
    """Groups (n=4, c=1) and (n=2, c=2) give pass@1 = (1/4 + 1) / 2, pass@2 = (1 - C(3,2)/C(4,2) +
    1) / 2, pass@4 = 1."""
    rewards, groups = [1, 0, 0, 0, 1, 1], [0, 0, 0, 0, 1, 1]
    assert compute_ragged_pass_rate(rewards, groups) == {
        "pass@1": 0.625,
        "pass@2": 0.75,
        "pass@4": 1.0,
    }
    assert compute_pass_rate([1, 0, 0, 0], 4) == {"pass@1": 0.25, "pass@2": 0.5, "pass@4": 1.0}
    assert compute_pass_rate([1, 0], 1) == {}
    assert compute_ragged_pass_rate([0.5, 0.9], [0, 0], threshold=0.8)["pass@1"] == 0.5
    with pytest.raises(AssertionError, match="5 rewards are not 2 groups of 2"):
        compute_pass_rate([1] * 5, 2, 2)


def test_pass_at_k_counts_what_the_model_spoiled_as_wrong_and_leaves_out_what_was_lost():
    """A cut answer is a wrong answer, and one that a crashed request lost does not count: pass@1 =
    ((1 + 0) / 2 + 1) / 2."""
    verdicts = [(0, 1.0, None), (0, None, "truncated"), (1, None, "failed"), (1, 1.0, None)]
    samples = [
        Sample(
            index=i,
            group_index=group,
            tokens=[1, 2, 3],
            response_length=2,
            reward=reward,
            valid=reason is None,
            invalid_reason=reason,
        )
        for i, (group, reward, reason) in enumerate(verdicts)
    ]
    config = ColumnsConfig(model_failures=frozenset({"truncated"}))
    batch = build_train_columns(samples, compute_rewards(samples, config)[:2], config)
    assert pass_rates(batch, config=TrainMetricsConfig())["pass@1"] == 0.75


def test_pass_rate_reshapes_the_whole_rewards_of_a_plain_batch():
    """pass@k reshapes the whole rewards to [rollout_batch_size, n_samples_per_prompt], and a count
    that does not fit is refused."""
    batch = plain_batch(raw_reward=[1.0, 0.0, 0.0, 0.0])
    assert pass_rates(
        batch, config=TrainMetricsConfig(n_samples_per_prompt=2, rollout_batch_size=2)
    ) == {
        "pass@1": 0.25,
        "pass@2": 0.5,
    }
    with pytest.raises(AssertionError):
        pass_rates(batch, config=TrainMetricsConfig(n_samples_per_prompt=3, rollout_batch_size=2))


# --- reduction ------------------------------------------------------------------------------------


def test_keys_are_the_union_over_ranks():
    """A metric that only some ranks have is reported, also where the source rank lacks it."""
    found = reduce_log_dicts([{"a": (1.0, 2), "b": 5.0}, {"a": (9.0, 3), "c": (0.0, 0)}])
    # the mean of the ranks' means would be (0.5 + 3) / 2
    assert found == {"a": 10 / 5, "b": 5.0, "c": 0.0}
    assert rollout_log_metric_contribution(
        3.0, cp_size=2, num_rollouts_in_rollout=8, dp_size=4
    ) == (6.0, 2.0)


def test_quantiles_of_ranks_are_quantiles_of_the_union():
    """Quantiles are over the samples of all ranks; a mean of medians is no median."""
    values = np.arange(101.0)
    for ranks in (1, 2, 4):
        parts = [
            c.quantiles(piece, [("/p50", 0.5), ("/p90", 0.9)])
            for piece in np.array_split(values[::-1], ranks)
        ]
        assert c.merge_all([{"x": part} for part in parts]) == {"x/p50": 50.0, "x/p90": 90.0}


def test_ranks_that_disagree_about_a_reduction_are_told():
    """Two ranks that reduce one name differently, as a sum and a mean, are an error."""
    with pytest.raises(ValueError, match="reduced in several ways"):
        c.merge([c.total([1.0]), c.maximum([1.0])])


def _log_on_rank(rank, world_size):
    """Logs on one of the ranks of data x context parallel: Megatron's parallel state is a stand-in,
    the gathering is real."""
    import unittest.mock as mock

    sent = []
    answers = {
        "get_tensor_model_parallel_rank": lambda: 0,
        "is_pipeline_last_stage": lambda: True,
        "get_context_parallel_world_size": lambda: 1,
        "get_data_parallel_world_size": lambda with_context_parallel=False: world_size,
        "get_data_parallel_src_rank": lambda with_context_parallel=False: 0,
        "get_data_parallel_group_gloo": lambda with_context_parallel=False: dist.group.WORLD,
    }
    args = types.SimpleNamespace(
        log_correct_samples=True,
        log_multi_turn=True,
        log_passrate=True,
        ci_test=False,
        rollout_max_response_len=8,
        n_samples_per_prompt=2,
        rollout_batch_size=2,
        passrate_threshold=None,
        wandb_always_use_train_step=False,
    )
    part = [[3, 0], [1, 2]][rank]
    log_probs = {i: torch.full((i + 1,), -float(i + 1)) for i in range(4)}
    batch = localize(
        {
            "partition": part,
            "total_lengths": [10 + i for i in range(4)],
            "response_lengths": [i + 1 for i in part],
            "loss_masks": [torch.ones(i + 1, dtype=torch.int32) for i in part],
            "raw_reward": [1.0, 0.0, 1.0, 1.0],
            "rewards": [float(i) for i in part],
            "log_probs": [log_probs[i] for i in part],
            **({"kl": [log_probs[i] * 0 for i in part]} if rank == 1 else {}),
        },
        rank,
    )
    with (
        mock.patch.multiple(mpu, **answers),
        mock.patch.object(tracking, "log", lambda a, m, step_key: sent.append(m)),
    ):
        result = log_rollout_data(7, args, batch)
    return result, sent


def test_log_rollout_data_sends_the_batchs_numbers_from_two_processes():
    """All numbers that two processes compute, those of correct samples included, are gathered and
    sent once, with `rollout/step`."""
    (two, sent_two), (other, sent_other) = run_distributed(_log_on_rank, 2)
    assert other is None and sent_other == []
    assert len(sent_two) == 3 and all(m["rollout/step"] == 7 for m in sent_two)
    assert two["rollout/raw_reward"] == 0.75 and two[
        "rollout/correct_response_lengths"
    ] == pytest.approx(8 / 3)
    assert two["rollout/log_probs"] == -2.5 and two["rollout/correct_entropy"] == pytest.approx(
        8 / 3
    )
    assert two["rollout/kl"] == 0.0, "a key that the source rank lacks is not lost"
    assert {"rollout/correct_length/p25", "rollout/correct_length/p100"} <= set(two)
    assert (
        sent_two[2]["passrate/pass@2"] == 1.0
        and sent_two[1]["multi_turn/raw_response_length/response_length_max"] == 4
    )


# --- checks, ledger, helpers ----------------------------------------------------------------------


def test_ci_checks_name_the_numbers():
    """The CI checks fail with the numbers, for example where policy and reference differ before the
    first step."""
    check_ci(
        {"rollout/log_probs": -0.5, "rollout/ref_log_probs": -0.5, "rollout/entropy": 0.5},
        0,
        check_kl=True,
    )
    with pytest.raises(AssertionError, match="differ before the first step"):
        check_ci({"rollout/log_probs": -0.5, "rollout/ref_log_probs": -0.6}, 0, check_kl=True)
    with pytest.raises(AssertionError, match="rollout/entropy is 2"):
        check_ci({"rollout/entropy": 2}, 3, check_kl=False)


def test_samples_are_conserved_or_the_ledger_says_all_numbers():
    """A lost sample is an error that contains all counts of the ledger."""
    ledger = Ledger(sampled=10, trained=7, dropped={"empty": 2, "trailing": 1})
    ledger.check()
    assert (
        ledger.plan_metrics()["rollout/ledger/dropped/empty"] == 2
        and ledger.plan_metrics()["rollout/ledger/dropped"] == 3
    )
    with pytest.raises(RolloutDataError, match=r"11 sampled, but 7 trained \+ 3 dropped = 10"):
        Ledger(11, 7, {"empty": 3}).check()
    with pytest.raises(RolloutDataError, match="not conserved"):
        Ledger(5, 6, {"empty": -1}).check()


def test_throughput_is_of_what_was_trained():
    """Tokens per second and TFLOPs per GPU are of the trained samples, without dropped ones."""
    found = perf_metrics(
        {"actor_train": 2.0, "train": 3.0, "train_wait": 1.0},
        forward_flops=4e12,
        num_tokens=100,
        world_size=2,
    )
    assert found["perf/actor_train_tflops"] == 3.0 and found["perf/actor_train_tok_per_s"] == 50
    assert found["perf/step_time"] == 4.0 and found["perf/wait_time_ratio"] == 0.25
    from slime.utils.data import _trained_lengths

    assert _trained_lengths({"owner_ranks": [0, -1, 1]}, [5, 6, 7]) == [5, 7]


def test_throughput_is_of_the_lengths_that_are_handed_in(monkeypatch):
    """The batch's trained lengths count, not those that the timer keeps for upstream's callers,
    which stand in where none are handed in."""
    logged = []
    monkeypatch.setattr(
        "slime.tracking.tracking.log", lambda args, metrics, **kw: logged.append(metrics)
    )
    args = types.SimpleNamespace(wandb_always_use_train_step=False)
    for given_lengths, tokens in (([5, 7], 12), (None, 18)):
        monkeypatch.setattr(perf.Timer, "log_dict", lambda self: {"actor_train": 1.0})
        monkeypatch.setattr(perf.Timer(), "seq_lens", [5, 6, 7])
        found = perf.log_perf_data_raw(0, args, True, sum, seq_lens=given_lengths)
        assert found["perf/actor_train_tok_per_s"] == tokens
        assert found["perf/actor_train_tflops"] == pytest.approx(3 * tokens / 1e12)
    assert len(logged) == 2


def test_small_helpers():
    """Upstream's small helpers, checked by hand."""
    assert dict_add_prefix({"a": 1}, "x/") == {"x/a": 1}
    assert compute_statistics([1, 2, 6]) == {"mean": 3.0, "median": 2.0, "max": 6.0, "min": 1.0}
    with pytest.raises(ValueError, match="no values"):
        compute_statistics([])
    assert compression_ratio("") == (math.inf, 0.0)
    assert has_repetition("ab" * 6000) and not has_repetition("ab" * 100)
    args = types.SimpleNamespace(
        wandb_always_use_train_step=True,
        rollout_batch_size=8,
        n_samples_per_prompt=4,
        global_batch_size=16,
    )
    assert compute_rollout_step(args, 3) == 6


def test_the_train_axis_never_repeats_or_goes_back_when_rollouts_have_different_numbers_of_steps():
    """`train/step` only grows: with 2 planned steps, a rollout may have 2, 1 (cut by rejections) or
    3 (a source that gave more). A resumed run goes on at the plan's place."""
    args = types.SimpleNamespace(rollout_batch_size=8, n_samples_per_prompt=4, global_batch_size=16)
    axis, last = [], -1
    for rollout_id, steps in enumerate([2, 1, 3, 2]):
        for step_id in range(steps):
            last = compute_train_step(args, rollout_id, step_id, last=last)
            axis.append(last)
    assert axis == [0, 1, 2, 4, 5, 6, 7, 8]
    assert compute_train_step(args, 3, 0, last=-1) == 6  # a resumed run goes on where the plan says
    args.global_batch_size = 12  # with --keep-trailing-rollouts: 12 + 12 + 8
    assert compute_train_step(args, 1, 0, last=2) == 3


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
