"""`process_rollout_data`: whatever the partition, a rank's fields are all about the same samples.

Values name their sample: total length 100 + i, response length 200 + i, raw reward 1 for every
third. A wrong pairing can be read in the failure.
"""

import argparse
import os
import pickle
import types
import weakref
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import ray

from slime.data.batch import RolloutBatch, localize
from slime.data.columns import ColumnsConfig, build_train_columns, compute_rewards
from slime.data.ledger import ledger_of_rollout
from slime.data.sample import Sample
from slime.data.schedule import ScheduleConfig
from slime.data.split import SplitConfig, split_by_dp
from slime.exceptions import RolloutDataError, SlimeError
from slime.ray import rollout
from slime.utils.data import process_rollout_data
from slime.utils.timer import Timer

NUM_GPUS = 0

PARTITIONS = {
    "dp2-interleaved": [[0, 2, 4, 6], [1, 3, 5, 7]],
    "dp2-contiguous": [[0, 1, 2, 3], [4, 5, 6, 7]],
    "dp4-balanced": [[7, 0], [6, 1], [5, 2], [4, 3]],
    "dp1-permuted": [[3, 0, 7, 2, 5, 1, 6, 4]],
}
TOTALS = [100 + i for i in range(8)]
REWARDS = [1.0 if i % 3 == 0 else 0.0 for i in range(8)]


class FakeBox:
    def __init__(self, inner):
        self.inner = inner


def plain_shards(partitions, *, with_rewards=True):
    """Shards as upstream writes them: dicts of lists, `total_lengths` and `raw_reward` whole."""
    shards = []
    for part in partitions:
        shard = {
            "partition": list(part),
            "total_lengths": list(TOTALS),
            "response_lengths": [200 + i for i in part],
            "loss_masks": [f"mask of {i}" for i in part],
            "log_probs": [f"log-probs of {i}" for i in part],
        }
        if with_rewards:
            shard["raw_reward"] = list(REWARDS)
        shards.append(shard)
    return shards


@pytest.fixture
def identity_get(monkeypatch):
    monkeypatch.setattr(ray, "get", lambda value: value)


@pytest.fixture(params=list(PARTITIONS), ids=list(PARTITIONS))
def partitions(request):
    return PARTITIONS[request.param]


def receive(shards, rank):
    return process_rollout_data(None, [FakeBox(shard) for shard in shards], rank, len(shards))


def test_a_shard_that_does_not_arrive_is_named_after_the_step_timeout(monkeypatch):
    """A rank does not wait for ever for what was lost with its node."""

    def never(reference, timeout):
        raise ray.exceptions.GetTimeoutError(f"{reference} {timeout}")

    monkeypatch.setattr(ray, "get", never)
    args = argparse.Namespace(step_timeout=0.5)
    with pytest.raises(
        SlimeError, match=r"the shard of data-parallel rank 1 did not arrive within 0.5 s\."
    ):
        process_rollout_data(args, [FakeBox(None), FakeBox(None)], 1, 2)


def test_every_local_field_is_about_the_partitions_samples(identity_get, partitions):
    """Rewards, lengths and masks of a rank stand at the same index, for every partition."""
    for rank, part in enumerate(partitions):
        batch = receive(plain_shards(partitions), rank)
        assert batch["local_raw_reward"] == [REWARDS[i] for i in part]
        assert batch["total_lengths"] == [100 + i for i in part]
        assert batch["response_lengths"] == [200 + i for i in part]
        assert batch["loss_masks"] == [f"mask of {i}" for i in part]


def test_selecting_by_reward_selects_the_owned_correct_samples(identity_get, partitions):
    """Selecting `reward == 1` on a rank picks exactly its own correct samples and never indexes
    past the end."""
    picked = []
    for rank in range(len(partitions)):
        batch = receive(plain_shards(partitions), rank)
        correct = [i for i, reward in enumerate(batch["local_raw_reward"]) if reward == 1]
        picked += [batch["response_lengths"][i] - 200 for i in correct]
        assert [batch["log_probs"][i] for i in correct] == [
            f"log-probs of {batch['partition'][i]}" for i in correct
        ]
    assert sorted(picked) == [0, 3, 6]


def test_raw_reward_and_the_timers_lengths_stay_whole(identity_get, partitions):
    """Every rank holds the rewards and the timer the lengths of the whole batch, because pass@k
    needs all siblings."""
    for rank in range(len(partitions)):
        batch = receive(plain_shards(partitions), rank)
        assert batch["raw_reward"] == REWARDS
        assert np.reshape(batch["raw_reward"], (4, 2)).shape == (4, 2)
        assert Timer().seq_lens == TOTALS
        assert batch.whole("raw_reward") == REWARDS
        assert batch.info["trained_lengths"] == TOTALS
        with pytest.raises(RolloutDataError, match="local_raw_reward"):
            batch.local("raw_reward")


def test_a_batch_without_raw_reward_is_tolerated(identity_get, partitions):
    """A batch of a converter that does not score arrives without `raw_reward` and without an
    error."""
    batch = receive(plain_shards(partitions, with_rewards=False), 0)
    assert "local_raw_reward" not in batch and "raw_reward" not in batch
    assert batch["total_lengths"] == [100 + i for i in partitions[0]]


def test_one_box_per_rank_is_asserted(identity_get, partitions):
    """Fewer boxes than ranks are an assertion error; two ranks would get the same samples."""
    boxes = [FakeBox(shard) for shard in plain_shards(partitions)]
    with pytest.raises(AssertionError, match=f"{len(boxes)} shards for {len(boxes) + 1}"):
        process_rollout_data(None, boxes, 0, len(boxes) + 1)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("partition", [0, 0], "repeats positions \\[0\\]"),
        ("partition", [0, 8], "positions \\[8\\] are outside a batch of 8"),
        (
            "response_lengths",
            [200],
            "'response_lengths' has 1 entries, but this rank has 2 samples",
        ),
        ("raw_reward", [1.0], "'raw_reward' has 1 entries, but the whole batch has 8 samples"),
        ("raw_reward", [1.0] * 9, "'raw_reward' has 9 entries, but the whole batch has 8 samples"),
    ],
)
def test_a_shard_that_does_not_fit_its_partition_is_refused(identity_get, field, value, said):
    """A partition that repeats or exceeds positions, and a field of another length than the
    partition, are refused."""
    shards = plain_shards([[0, 1], [2, 3, 4, 5, 6, 7]])
    shards[0][field] = value
    with pytest.raises(RolloutDataError, match=said):
        receive(shards, 0)


@pytest.mark.parametrize(
    "tokens", [[[0] * 102, [0] * 100], [np.zeros(102), np.zeros(100)]], ids=["lists", "arrays"]
)
def test_a_foreign_shard_in_another_order_than_its_partition_is_refused(identity_get, tokens):
    """Entries of the right number in another order than the partition are refused, found by their
    lengths or rollout ids; else each sample would train with another's rewards and masks."""
    (shard, other) = plain_shards([[0, 2], [1, 3, 4, 5, 6, 7]])
    with pytest.raises(
        RolloutDataError,
        match="rank 0: 'tokens' is not in the order of the partition: entry 0 .*102 .* says 100",
    ):
        receive([{**shard, "tokens": tokens}, other], 0)
    assert len(receive([{**shard, "tokens": tokens[::-1]}, other], 0)["tokens"][0]) == 100
    same_lengths = {
        "total_lengths": [100] * 8,
        "tokens": [[0] * 100] * 2,
        "all_rollout_ids": list(range(8)),
    }
    with pytest.raises(
        RolloutDataError,
        match="'rollout_ids' is not in the order of the partition: entry 0 .*2 .* says 0",
    ):
        receive([{**shard, **same_lengths, "rollout_ids": [2, 0]}, other], 0)
    assert receive([{**shard, **same_lengths, "rollout_ids": [0, 2]}, other], 0)["rollout_ids"] == [
        0,
        2,
    ]


# --- the same through our own split ---------------------------------------------------------------


def make_samples(count=8):
    """Sample i has 100 + i tokens, the last 20 + i of them response, whose ids and log-probs hold
    i.
    """
    return [
        Sample(
            index=i,
            group_index=i // 2,
            tokens=[i] * (100 + i),
            response_length=20 + i,
            reward=1.0 if i % 3 == 0 else 0.0,
            rollout_log_probs=[-float(i)] * (20 + i),
            metadata={"source_name": f"source {i}"},
            status=Sample.Status.COMPLETED,
        )
        for i in range(count)
    ]


def make_split(samples, dp_size):
    rewards = compute_rewards(samples, ColumnsConfig(divide_by_std=False))
    columns = build_train_columns(samples, rewards[:2], ColumnsConfig())
    config = SplitConfig(
        global_batch_size=len(samples),
        expected_rollouts=len(samples),
        schedule=ScheduleConfig(dp_size=dp_size, align=dp_size, token_cap=256, packing="balanced"),
        pad_to=64,
    )
    return split_by_dp(columns, config)


def describe(batch):
    """What a rank holds, as plain values."""
    return {
        "partition": list(batch["partition"]),
        "total_lengths": list(batch["total_lengths"]),
        "tokens": [sorted(set(np.asarray(entry).tolist())) for entry in batch["tokens"]],
        "log_probs": [
            sorted(set(np.asarray(entry).tolist())) for entry in batch["rollout_log_probs"]
        ],
        "sources": list(batch["source_names"]),
        "raw_reward": list(batch["raw_reward"]),
        "local_raw_reward": list(batch["local_raw_reward"]),
    }


def check_rank(found, dp_rank_parts):
    part = found["partition"]
    dp_rank_parts.append(part)
    assert found["total_lengths"] == [100 + i for i in part]
    assert found["tokens"] == [[i] for i in part]
    assert found["log_probs"] == [[-float(i)] for i in part]
    assert found["sources"] == [f"source {i}" for i in part]
    assert found["raw_reward"] == REWARDS
    assert found["local_raw_reward"] == [REWARDS[i] for i in part]


@pytest.mark.parametrize("dp_size", [1, 2, 4])
def test_our_shards_arrive_aligned_and_cover_every_sample_once(identity_get, dp_size):
    """Tokens, log-probs, source names and rewards travel with their sample, and the ranks together
    hold every sample once."""
    shards = [
        pickle.loads(pickle.dumps(shard, protocol=5))
        for shard in make_split(make_samples(), dp_size).shards
    ]  # noqa: S301  our own bytes
    parts = []
    for rank in range(dp_size):
        check_rank(describe(receive(shards, rank)), parts)
    assert sorted(i for part in parts for i in part) == list(range(8))


def test_a_shard_that_reaches_the_wrong_rank_is_refused(identity_get):
    """A shard that reaches another rank than its own is refused; some samples would train twice and
    others never."""
    shards = list(make_split(make_samples(), 2).shards)
    with pytest.raises(RolloutDataError, match="rank 0 of 2 received the shard of rank 1"):
        receive(shards[::-1], 0)


@pytest.mark.parametrize(
    ("position", "said"),
    [
        (6, r"not what was scheduled; positions \[6, 7\] differ"),
        (8, r"positions \[8\] are outside a batch of 8 samples"),
    ],
)
def test_a_partition_that_is_not_what_was_scheduled_is_refused(identity_get, position, said):
    """Each shard carries the owners of the whole batch, and a partition that contradicts them is
    refused on arrival."""
    shard = next(iter(make_split(make_samples(), 2).shards))
    assert sorted(shard["partition"]) == [0, 2, 5, 7]
    shard["partition"] = [position if owned == 7 else owned for owned in shard["partition"]]
    with pytest.raises(RolloutDataError, match=said):
        receive([shard, shard], 0)


def test_arrays_on_arrival_are_views_of_the_wire(identity_get):
    """Arrays on arrival are read-only views of the received memory, and the pickled rest of a shard
    is small."""
    shard = next(iter(make_split(make_samples(), 1).shards))
    buffers = []
    blob = pickle.dumps(shard, protocol=5, buffer_callback=buffers.append)
    assert len(blob) < 3000 < sum(len(buffer.raw()) for buffer in buffers)
    batch = localize(
        pickle.loads(blob, buffers=[buffer.raw().toreadonly() for buffer in buffers]), 0
    )  # noqa: S301  our own bytes
    assert not batch["tokens"][0].flags.owndata
    with pytest.raises(ValueError, match="read-only"):
        batch["tokens"][0][0] = 7


def test_no_shard_is_in_memory_while_the_next_one_is_made(monkeypatch):
    """Each shard is released before the next one is made, so that beside the object store's copies
    there is one shard in memory and not two."""
    alive, made = [], []
    plan = types.SimpleNamespace(num_trained_by_rank=[2, 2, 1, 2])

    def shards():
        for rank in range(4):
            alive.append(sum(reference() is not None for reference in made))
            shard = RolloutBatch({"partition": [rank]})
            made.append(weakref.ref(shard))
            yield shard
            del shard

    monkeypatch.setattr(rollout.ray, "put", lambda shard: shard["partition"])
    monkeypatch.setattr(
        rollout,
        "split_by_dp",
        lambda data, config, dropped_failures: types.SimpleNamespace(shards=shards(), plan=plan),
    )
    monkeypatch.setattr(rollout.SplitConfig, "from_args", lambda *args: None)
    manager = types.SimpleNamespace(args=None, train_parallel_config={})
    boxes, _ = rollout.RolloutManager._split(manager, None)
    assert [(box.inner, box.num_trained) for box in boxes] == [
        ([0], 2),
        ([1], 2),
        ([2], 1),
        ([3], 2),
    ]
    assert alive == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("sources", "dropped", "copies"),
    [
        ([0, 1, 2, 3, 4, 5], {"left_out_by_converter": 2}, 0),
        ([0, 1, 2, 3, 4, 5, 6, 7], {}, 0),
        ([0, 0, 1, 2, 3, 4, 5, 6, 7, 7, 7], {}, 3),
        ([0, 0, 0, 3, 4, 5, 6, 7], {"left_out_by_converter": 2}, 2),
    ],
)
def test_what_a_custom_converter_leaves_out_or_adds_is_in_the_ledger(sources, dropped, copies):
    """A converter that leaves out samples, makes several rows of one, or both, ends no run: the
    ledger counts 8 sampled, what was left out, and the copies."""
    plan = make_split(make_samples(len(sources)), 2).plan
    owned = (plan.owner_ranks_N >= 0).tolist()
    ledger = ledger_of_rollout(
        [None] * 8,
        sources,
        trains=owned,
        num_trained=plan.num_trained_samples,
        dropped_by_split=plan.dropped,
        dropped_before={},
    )
    assert (ledger.sampled, ledger.copies, ledger.trained, ledger.dropped) == (
        8,
        copies,
        len(sources),
        dropped,
    )
    assert ledger.plan_metrics().get("rollout/ledger/copies", 0) == copies
    with pytest.raises(
        RolloutDataError, match="The gate and the ledger disagree: .* at position 3 .* 'empty'"
    ):
        ledger_of_rollout(
            [None, None, None, "empty", None, None, None, None],
            sources,
            trains=owned,
            num_trained=8,
            dropped_by_split={},
            dropped_before={},
        )


# --- through a real object store ------------------------------------------------------------------


class Trainer:
    """A training rank in another process."""

    def receive(self, boxes, rank, dp_size):
        batch = process_rollout_data(None, boxes, rank, dp_size)
        return describe(batch) | {
            "owns_tokens": bool(batch["tokens"][0].flags.owndata),
            "seq_lens": list(Timer().seq_lens),
        }

    def receive_plain(self, boxes, rank, dp_size):
        batch = process_rollout_data(None, boxes, rank, dp_size)
        return (
            batch["partition"],
            batch["total_lengths"],
            batch["raw_reward"],
            batch["local_raw_reward"],
        )


@pytest.fixture(scope="module")
def trainers():
    here = Path(__file__).parent
    path = os.pathsep.join(
        [str(here), str(here.parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    )
    # workers import this file and slime as this process does
    with mock.patch.dict(os.environ, {"PYTHONPATH": path}):
        start_ray()
    actor = ray.remote(num_cpus=0)(Trainer)
    yield [actor.remote(), actor.remote()]
    ray.shutdown()


def start_ray():
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        logging_level="ERROR",
        log_to_driver=False,
        object_store_memory=100 * 2**20,
    )


def test_shards_cross_a_real_object_store_without_being_copied(trainers):
    """Two ranks in other processes dereference the boxes, and their tokens are the object store's
    memory."""
    from slime.utils.misc import Box

    for dp_size in (1, 2, 4):
        boxes = [Box(ray.put(shard)) for shard in make_split(make_samples(), dp_size).shards]
        found = ray.get(
            [trainers[rank % 2].receive.remote(boxes, rank, dp_size) for rank in range(dp_size)]
        )
        parts = []
        for rank_found in found:
            check_rank(rank_found, parts)
            assert rank_found["owns_tokens"] is False
            assert rank_found["seq_lens"] == TOTALS
        assert sorted(i for part in parts for i in part) == list(range(8))


def test_plain_dicts_cross_a_real_object_store(trainers, partitions):
    """Shards that are dicts of lists arrive for every partition, as custom converters ship them."""
    boxes = [types.SimpleNamespace(inner=ray.put(shard)) for shard in plain_shards(partitions)]
    results = ray.get(
        [
            trainers[rank % 2].receive_plain.remote(boxes, rank, len(partitions))
            for rank in range(len(partitions))
        ]
    )
    for part, (got, totals, raw, local) in zip(partitions, results, strict=True):
        assert (got, totals, raw, local) == (
            part,
            [100 + i for i in part],
            REWARDS,
            [REWARDS[i] for i in part],
        )


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
