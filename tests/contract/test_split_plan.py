"""The plan of a split: what the options make of it, and which samples each of its
numbers is about.
"""

import types

import numpy as np
import pytest

from slime.data.batch import localize
from slime.data.schedule import ScheduleConfig, plan_schedule
from slime.data.split import SplitConfig, _owners, make_shards, plan_gaps, plan_split
from slime.exceptions import ConfigError, RolloutDataError

NUM_GPUS = 0

OPTIONS = {
    "rollout_batch_size": 8,
    "n_samples_per_prompt": 4,
    "global_batch_size": None,
    "num_steps_per_rollout": 2,
    "keep_trailing_rollouts": False,
    "data_pad_size_multiplier": 16,
    "micro_batch_size": 1,
    "use_dynamic_batch_size": False,
    "max_tokens_per_gpu": None,
}


def config_of(parallel=None, **options):
    return SplitConfig.from_args(
        types.SimpleNamespace(**{**OPTIONS, **options}), {"dp_size": 2, **(parallel or {})}
    )


def lists(totals, **fields):
    """A converter's dict: samples of these many tokens, all but the first of each in
    the response.
    """
    return {
        "tokens": [list(range(total)) for total in totals],
        "loss_masks": [[1] * (total - 1) for total in totals],
        "response_lengths": [total - 1 for total in totals],
        "rewards": [0.0] * len(totals),
        **fields,
    }


def plan_of(data, *, size=None, cap=None, dp_size=1):
    count = len(data["tokens"])
    return plan_split(
        data,
        SplitConfig(size or count, size or count, ScheduleConfig(dp_size, dp_size, token_cap=cap)),
    )


def test_options_become_the_split_that_they_ask_for():
    """8 prompts of 4 samples in 2 steps are steps of 16; a row's padding is for one tensor-parallel
    group, and under CP the trainer lays it out."""
    config = config_of({"tp_size": 2})
    assert (
        config.global_batch_size,
        config.expected_rollouts,
        config.keep_trailing,
        config.pad_to,
    ) == (16, 32, False, 32)
    assert config_of(keep_trailing_rollouts=True).keep_trailing
    assert config_of({"cp_size": 2, "tp_size": 2}).pad_to == 0
    assert config_of(global_batch_size=5).global_batch_size == 5
    assert config_of(num_steps_per_rollout=99).global_batch_size == 1
    with pytest.raises(ConfigError, match="Give --global-batch-size, or --num-steps-per-rollout"):
        config_of(num_steps_per_rollout=None)


def test_denominators_follow_the_rollout_and_not_the_position():
    """Rollouts 6, 5, 6, 5 of 1, 2, 3 and 4 trained tokens have denominators 1 + 3 and 2 + 4."""
    _, plan = plan_of(lists([2, 3, 4, 5], rollout_ids=[6, 5, 6, 5]))
    assert plan.rollout_mask_sums_N.tolist() == [4, 6, 4, 6]
    assert plan.rollout_sample_counts_N.tolist() == [2, 2, 2, 2]


def test_the_schedule_knows_the_lengths_of_the_samples_that_train():
    """Lengths of rejected samples do not count: with the first of 100 tokens rejected, 10 and 90
    share a micro-batch of 100."""
    _, plan = plan_of(lists([100, 10, 90], valid=[False, True, True]), cap=100)
    assert plan.schedule.num_microbatches == [1]
    assert plan.schedule.partitions == [[1, 2]]


def test_trailing_samples_are_named_by_their_place_in_the_whole_batch():
    """Of samples 1, 2 and 3 (0 is rejected) a step takes two, and the one left over is named 3."""
    _, plan = plan_of(lists([5, 5, 5, 5], valid=[False, True, True, True]), size=2)
    assert (plan.schedule.partitions, plan.schedule.dropped) == ([[1, 2]], [3])
    assert plan.owner_ranks_N.tolist() == [-1, 0, 0, -1]


@pytest.mark.parametrize(
    "partitions", [[[0, 0]], [[0], [0]]], ids=["twice on a rank", "on two ranks"]
)
def test_a_sample_belongs_to_one_rank_once(partitions):
    """A sample that is owned twice, by one rank or by two, is refused; it would count twice in the
    gradient."""
    with pytest.raises(RolloutDataError, match="twice, or to two ranks"):
        _owners(partitions, 2)


def test_each_rollout_has_one_vote_in_the_mean_of_raw_rewards():
    """Two samples of a rollout share its vote; a rejected or unscored sample has none, and its
    sibling has the whole."""
    data = lists(
        [2] * 5,
        rollout_ids=[0, 0, 1, 1, 2],
        raw_reward=[1.0, 0.0, 1.0, float("nan"), 7.0],
        valid=[True, True, True, True, False],
    )
    config = SplitConfig(3, 3, ScheduleConfig(1, 1))
    batch, plan = plan_split(data, config)
    (shard,) = make_shards(batch, plan, config)
    assert shard["raw_reward_weights"] == [0.5, 0.5, 1.0, 0.0, 0.0]


def test_every_sample_that_trains_must_fit_its_lengths():
    """Every trained sample is checked, not the first alone: the third has four log-probs for three
    response tokens."""
    data = lists([4, 4, 4], rollout_log_probs=[[0.0] * 3, [0.0] * 3, [0.0] * 4])
    with pytest.raises(RolloutDataError, match=r"rollout_log_probs\[2\] has 4 rows, expected 3"):
        plan_of(data)
    with pytest.raises(RolloutDataError, match="position 1 has response_length -1"):
        plan_of(lists([4, 4], response_lengths=[3, -1], loss_masks=[[1] * 3, []]))


def test_masks_stand_where_their_tokens_are_predicted():
    """With prompts 2 and 3 and responses 3 and 1 each mask begins one place before its response, in
    a row of 16 and an empty one of 8."""
    gaps = plan_gaps(np.array([5, 4]), np.array([3, 1]), [[0, 1], []], 8)
    padding, lead = gaps["tokens"]
    assert (padding.tolist(), lead) == ([0, 7 + 8], 0)
    padding, lead = gaps["loss_masks"]
    # sample 0 is at 0: its response is predicted at 1, 2, 3; sample 1 is at 5: its response token 8
    # is predicted at 7
    assert lead == 1 and lead + 3 + padding[0] == 7 and 7 + 1 + padding[1] == 24


def test_an_invalid_sample_neither_trains_nor_blocks_the_batch():
    """An invalid sample's lists need not fit, and the shard of the others arrives."""
    data = lists([4, 4], valid=[True, False], rollout_log_probs=[[0.0] * 3, []])
    config = SplitConfig(1, 1, ScheduleConfig(1, 1))
    batch, plan = plan_split(data, config)
    (shard,) = make_shards(batch, plan, config)
    assert localize(shard, 0)["partition"] == [0] and plan.dropped == {"invalid": 1}


def test_the_worked_examples_of_schedule_and_split_are_true():
    """Three samples on two ranks hold what the heads of schedule.py and split.py say."""
    schedule = ScheduleConfig(dp_size=2, align=2, token_cap=9)
    planned = plan_schedule([5, 4, 6], [0, 0, 1], step_sizes=[2], config=schedule)
    assert planned.partitions == [[0, 1], [2]] and planned.dropped == []
    assert planned.micro_batch_indices == [[[0, 1]], [[0]]] and planned.num_microbatches == [1]
    assert planned.steps[0].fill == 15 / 18 and planned.steps[0].work_max_over_mean == 9 / 7.5

    config = SplitConfig(global_batch_size=2, expected_rollouts=2, schedule=schedule)
    batch, plan = plan_split(lists([5, 4, 6], rollout_ids=[0, 0, 1]), config)
    shards = list(make_shards(batch, plan, config))
    assert [list(shard["partition"]) for shard in shards] == [[0, 1], [2]]
    assert [list(shard["total_lengths"]) for shard in shards] == [[5, 4, 6], [5, 4, 6]]
    local = [localize(shard, rank) for rank, shard in enumerate(shards)]
    assert [list(shard["total_lengths"]) for shard in local] == [[5, 4], [6]]
    assert [list(shard["response_lengths"]) for shard in local] == [[4, 3], [5]]
    assert [list(shard["rollout_mask_sums"]) for shard in local] == [[7, 7], [5]]


def test_the_worked_example_of_the_batch_is_true():
    """Each rank answers whole() and local() as the head of batch.py says."""
    schedule = ScheduleConfig(dp_size=2, align=2, token_cap=9)
    config = SplitConfig(global_batch_size=2, expected_rollouts=2, schedule=schedule)
    columns = {**lists([5, 4, 6], rollout_ids=[0, 0, 1]), "raw_reward": [1, 0, 2]}
    batch, plan = plan_split(columns, config)
    ranks = [localize(shard, rank) for rank, shard in enumerate(make_shards(batch, plan, config))]
    assert [list(rank.local("partition")) for rank in ranks] == [[0, 1], [2]]
    assert [list(rank.local("total_lengths")) for rank in ranks] == [[5, 4], [6]]
    assert [list(rank.whole("raw_reward")) for rank in ranks] == [[1, 0, 2]] * 2
    assert [list(rank.local("local_raw_reward")) for rank in ranks] == [[1, 0], [2]]
    for rank in ranks:
        with pytest.raises(RolloutDataError, match="covers only this rank's"):
            rank.whole("total_lengths")
        with pytest.raises(RolloutDataError, match=r"Use local\('local_raw_reward'\)"):
            rank.local("raw_reward")


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
