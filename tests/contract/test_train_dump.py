"""Train dumps: one file per rollout with what training computed, the same for every layout, and
refused when damaged."""

import argparse
import copy
import errno
import json
import sys
import tracemalloc
import types
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also as `python tests/...`
from support.distributed import run_distributed
from support.full_disk import full_disk

from slime.backends.megatron_utils.data import to_train_device
from slime.config.derive import derive
from slime.config.rules import broken_rules
from slime.data.batch import localize
from slime.data.columns import ColumnsConfig, build_train_columns, compute_rewards
from slime.data.context_parallel import plan_response_layout
from slime.data.sample import Sample
from slime.data.schedule import ScheduleConfig
from slime.data.split import SplitConfig, split_by_dp
from slime.exceptions import ConfigError, RolloutDataError
from slime.files import train_dump
from slime.files.train_dump import (
    TensorOutline,
    TrainDumpWriter,
    is_train_dump,
    read_train_dump,
    train_dump_path,
)
from slime.files.train_dump_utils import Place, save_debug_train_data, write_train_dump

NUM_GPUS = 0
LENGTHS = [
    (3, 5),
    (1, 0),
    (2, 7),
    (4, 1),
    (9, 4),
    (1, 2),
    (6, 12),
    (3, 3),
]  # prompt and response tokens; sample 3 is invalid


def make_samples():
    """Sample i: token t is 1000 i + t, engine log-prob of response token j is -(i + j / 16); every
    second token is trained.
    """
    return [
        Sample(
            index=100 + i,
            group_index=i // 2,
            rollout_id=i,
            tokens=[1000 * i + t for t in range(prompt + response)],
            response_length=response,
            loss_mask=[j % 2 for j in range(response)],
            rollout_log_probs=[-(i + j / 16) for j in range(response)],
            reward=float(i),
            valid=i != 3,
            invalid_reason="empty" if i == 3 else None,
            status=Sample.Status.COMPLETED,
            train_metadata={"difficulty": i / 3} if i % 2 else None,
            metadata={"source_name": f"set-{i % 2}"},
        )
        for i, (prompt, response) in enumerate(LENGTHS)
    ]


def trained_batch(*, dp_rank=0, dp_size=1, cp_rank=0, cp_size=1):
    """The batch of one rank as it is after training: log-prob of token j of sample i is -(i + j /
    10) in float32, one advantage per token.
    """
    settings = ColumnsConfig(group_baseline=False)
    samples = make_samples()
    columns = build_train_columns(samples, compute_rewards(samples, settings)[:2], settings)
    config = SplitConfig(
        4,
        8,
        ScheduleConfig(dp_size, dp_size, 24, 2, "balanced"),
        keep_trailing=True,
        pad_to=4 if cp_size == 1 else 0,
    )
    shard = list(split_by_dp(columns, config).shards)[dp_rank]
    batch = to_train_device(localize(shard, dp_rank), "cpu", cp_rank=cp_rank, cp_size=cp_size)
    for name, scale in (("log_probs", 10), ("advantages", 7)):
        full = [
            -(p + torch.arange(LENGTHS[p][1], dtype=torch.float32) / scale)
            for p in batch["partition"]
        ]
        layout = plan_response_layout(
            batch["total_lengths"], batch["response_lengths"], cp_size=cp_size, cp_rank=cp_rank
        )
        batch[name] = (
            list(torch.cat(full)[layout.response_indices].split(list(layout.local_lengths)))
            if full
            else []
        )
    batch["plugin"] = [{"position": int(p), "nan": float("nan")} for p in batch["partition"]]
    return batch


def dump_alone(path, batch=None, **changes):
    """The dump of one process."""
    batch = trained_batch() if batch is None else batch
    batch.update(changes)
    everyone = {"gather": lambda value: [value], "share": lambda value: [value]}
    return write_train_dump(
        path, batch, header={"rollout_id": 7, "rank": 0, "cp_size": 1}, place=Place(), **everyone
    )


def assert_same_dump(found, expected):
    assert list(found.token_fields) == list(expected.token_fields)
    for name, entries in expected.token_fields.items():
        for a, b in zip(found.token_fields[name], entries, strict=True):
            assert a.dtype == b.dtype and a.tobytes() == b.tobytes(), name
    for kind in ("sample_fields", "whole_fields"):
        for name, values in getattr(expected, kind).items():
            if name != "owner_ranks":
                assert repr(np.asarray(getattr(found, kind)[name])) == repr(np.asarray(values)), (
                    name
                )


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    path = dump_alone(tmp_path_factory.mktemp("alone") / "7.safetensors")
    return read_train_dump(path)


def test_every_trained_sample_is_there_in_whole_batch_order_with_its_own_data(alone):
    """The dump has every trained sample in the batch's order with its own data, without the
    rejected position 3."""
    assert (alone.rollout_id, alone.num_whole, alone.num_samples) == (7, 8, 7)
    assert alone.positions.tolist() == [0, 1, 2, 4, 5, 6, 7]
    for i, p in enumerate(alone.positions.tolist()):
        sample = alone.sample(i)
        prompt, response = LENGTHS[p]
        assert sample["sample_indices"] == 100 + p
        assert sample["tokens"].tolist() == [1000 * p + t for t in range(prompt + response)]
        assert sample["loss_masks"].tolist() == [j % 2 for j in range(response)]
        assert sample["rollout_log_probs"].tolist() == [-(p + j / 16) for j in range(response)]
        assert (
            sample["log_probs"].tobytes()
            == (-(p + np.arange(response, dtype=np.float32) / np.float32(10))).tobytes()
        )
        assert (sample["raw_reward"], sample["group_ids"], sample["source_names"]) == (
            p,
            p // 2,
            f"set-{p % 2}",
        )
        assert sample["metadata"] == ({"difficulty": p / 3} if p % 2 else None)
        assert sample["plugin"]["position"] == p and np.isnan(sample["plugin"]["nan"])
    assert alone.whole_fields["raw_reward"].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert alone.whole_fields["valid"].tolist() == [p != 3 for p in range(8)]


def test_integers_take_their_size_on_the_wire_and_floats_keep_their_bits(tmp_path):
    """int32 ids and uint8 masks take 5 bytes a token instead of 12; floats keep their bits, NaN and
    -0.0 included."""
    batch = trained_batch()
    odd = [torch.full((len(entry),), -0.0) for entry in batch["advantages"]]
    odd[0][:1] = float("nan")
    dump = read_train_dump(dump_alone(tmp_path / "d", batch, advantages=odd))
    assert (dump.token_fields["tokens"][0].dtype, dump.token_fields["loss_masks"][0].dtype) == (
        np.int32,
        np.uint8,
    )
    saved = {p: entry.numpy().tobytes() for p, entry in zip(batch["partition"], odd, strict=True)}
    assert {
        p: dump.token_fields["advantages"][i].tobytes()
        for i, p in enumerate(dump.positions.tolist())
    } == saved


def test_any_safetensors_reader_opens_the_file(alone):
    """The safetensors library opens the file."""
    safetensors = pytest.importorskip("safetensors.numpy")
    tensors = safetensors.load_file(alone.path)
    assert (
        tensors["log_probs"].tobytes() == np.concatenate(alone.token_fields["log_probs"]).tobytes()
    )
    assert tensors["log_probs.offsets"].tolist() == [0, 5, 5, 12, 16, 18, 30, 33]


def test_the_layout_says_which_rank_trained_what_in_which_micro_batch(alone):
    """The dump tells rank and micro-batch of each sample, to find the rank behind a wrong
    number."""
    (shard,) = alone.dp_shards
    assert sorted(shard["partition"]) == alone.positions.tolist()
    assert sorted(i for indices in shard["micro_batch_indices"] for i in indices) == list(range(7))
    assert len(shard["micro_batch_indices"]) == sum(shard["num_microbatches"])
    assert alone.owner_ranks.tolist() == [0] * 7


def _dump_on_two_ranks(rank, world_size, folder):
    from megatron.core import mpu

    written = []
    for name, dp_size, cp_size in (("dp", 2, 1), ("cp", 1, 2)):
        mpu.initialize_model_parallel(
            context_parallel_size=cp_size, create_gloo_process_groups=True
        )
        batch = trained_batch(
            dp_rank=rank % dp_size, dp_size=dp_size, cp_rank=rank % cp_size, cp_size=cp_size
        )
        args = types.SimpleNamespace(
            save_debug_train_data=f"{folder}/{name}_{{rollout_id}}_{{rank}}.safetensors"
        )
        written.append(save_debug_train_data(args, rollout_id=7, rollout_data=batch))
        mpu.destroy_model_parallel()
    return written


@pytest.mark.timeout(300)
def test_two_ranks_write_the_file_that_one_would(tmp_path, alone):
    """At DP 2 and CP 2 over a gloo group rank 0 writes the file of a single process: every field
    once, bit for bit."""
    written, nothing = run_distributed(_dump_on_two_ranks, 2, str(tmp_path), timeout=240)
    assert [path.name for path in written] == ["dp_7_0.safetensors", "cp_7_0.safetensors"]
    assert nothing == [None, None]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "cp_7_0.safetensors",
        "dp_7_0.safetensors",
    ]
    by_dp, by_cp = map(read_train_dump, written)
    assert_same_dump(by_dp, alone)
    assert_same_dump(by_cp, alone)
    assert set(by_dp.owner_ranks.tolist()) == {0, 1}
    assert np.array_equal(by_dp.owner_ranks, by_dp.whole_fields["owner_ranks"][by_dp.positions])


def test_the_writer_holds_one_field_at_a_time(tmp_path):
    """The writer holds one field of all ranks at a time, so that ten fields take the memory of
    one."""
    names = (
        "log_probs",
        "ref_log_probs",
        "teacher_log_probs",
        "rollout_log_probs",
        "values",
        "advantages",
        "returns",
        "kl",
        "entropy",
        "opd_reverse_kl",
    )
    count, peaks = 50_000, {}
    # a rank's values come as memory of their own
    arrive = {"gather": lambda value: [copy.deepcopy(value)], "share": lambda value: [value]}
    for num_fields in (1, 10):
        batch = {
            "partition": [0],
            "total_lengths": [count + 1],
            "response_lengths": [count],
            "tokens": [torch.zeros(count + 1, dtype=torch.int64)],
        }
        batch |= {
            "loss_masks": [torch.ones(count, dtype=torch.int32)],
            **{name: [torch.full((count,), 0.5)] for name in names[:num_fields]},
        }
        batch, path = localize(batch, 0), tmp_path / str(num_fields)
        tracemalloc.start()
        try:
            write_train_dump(
                path,
                batch,
                header={"rollout_id": 7, "rank": 0, "cp_size": 1},
                place=Place(),
                **arrive,
            )
            peaks[num_fields] = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert path.stat().st_size > num_fields * 4 * count and set(names[:num_fields]) < set(
            read_train_dump(path).token_fields
        )
    assert peaks[10] - peaks[1] < 2 * 4 * count, f"{peaks} bytes"


@pytest.mark.parametrize(
    ("share", "said"),
    [
        (0.0, "is not a train dump"),
        (0.01, "is not a train dump .* or its head is damaged"),
        (0.3, "is not a train dump .* or its head is damaged"),
        (0.999, r"has \d+ bytes, its head says \d+\. It was cut short"),
    ],
)
def test_a_file_that_was_cut_is_named(tmp_path, alone, share, said):
    """A cut file is refused, and never reads as a rollout with fewer samples."""
    data = alone.path.read_bytes()
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(RolloutDataError, match=f"cut.safetensors {said}"):
        read_train_dump(cut)


def test_one_flipped_bit_is_found_and_its_field_named(tmp_path, alone):
    """A flipped bit is found by the checksum, and its field is named."""
    data = bytearray(alone.path.read_bytes())
    entries = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    start = len(data) - entries["crc32"]["data_offsets"][1]
    data[start + entries["log_probs"]["data_offsets"][0] + 5] ^= 1
    flipped = tmp_path / "flipped"
    flipped.write_bytes(data)
    with pytest.raises(RolloutDataError, match="checksums of log_probs do not fit"):
        read_train_dump(flipped)
    data[start + entries["log_probs"]["data_offsets"][0] + 5] ^= 1
    place = data.index(b'\\"rollout_id\\": 7') + len(b'\\"rollout_id\\": ')
    data[place : place + 1] = b"8"
    flipped.write_bytes(data)
    with pytest.raises(RolloutDataError, match="checksums of the head do not fit"):
        read_train_dump(flipped)


def test_a_full_disk_costs_the_dump_and_not_the_training(tmp_path, monkeypatch, caplog):
    """A full disk costs the dump and leaves no half file; training goes on."""

    def full(self, name, values):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(TrainDumpWriter, "write", full)
    assert dump_alone(tmp_path / "7") is None
    assert "No space left on device" in caplog.text and "training goes on" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_ranks_that_do_not_fit_together_are_an_error_with_the_field(tmp_path):
    """A token too few on a rank is an error with the field; samples would be paired with another's
    data."""
    batch = trained_batch()
    entries = list(batch["log_probs"])
    with pytest.raises(RolloutDataError, match="log_probs"):
        dump_alone(
            tmp_path / "7", batch, log_probs=[torch.cat([entries[0], torch.zeros(1)]), *entries[1:]]
        )
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_stored_is_said_and_the_rest_is_there(tmp_path, caplog):
    """A field that cannot be stored is left out with a warning and its reason, and the other fields
    are there."""
    batch = trained_batch()
    dump = read_train_dump(
        dump_alone(
            tmp_path / "7",
            batch,
            odd=[object() for _ in batch["partition"]],
            number=5,
            beta=torch.tensor(3.0),
        )
    )
    assert "object" in dump.left_out["odd"]
    assert (
        dump.left_out["number"] == dump.left_out["beta"] == "it does not have one entry per sample"
    )
    assert "left out" in caplog.text and "log_probs" in dump.token_fields


def test_indices_with_a_none_among_them_survive(tmp_path):
    """Sample indices with a None among them come back as they were."""
    batch = trained_batch()
    indices = [None if p == 5 else 100 + p for p in batch["partition"]]
    dump = read_train_dump(dump_alone(tmp_path / "7", batch, sample_indices=indices))
    assert dump.sample_fields["sample_indices"] == [100, 101, 102, 104, None, 106, 107]


def test_tensors_come_as_announced_or_not_at_all(tmp_path):
    """A tensor of another shape than the head announces is refused; it would shift every field
    behind it."""
    writer = TrainDumpWriter(tmp_path / "d", {}, [TensorOutline("a", "float32", (2,))])
    with pytest.raises(ValueError, match="announced"):
        writer.write("a", np.zeros(3, dtype=np.float32))
    with pytest.raises(ValueError, match="0 of 1"):
        writer.commit()
    writer.abandon()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("num_bytes", [100, 40_000, 90_000])
def test_a_disk_that_fills_in_the_middle_leaves_no_temporary_dump(tmp_path, num_bytes):
    """Wherever the disk fills up (in the head, in a tensor, in buffered bytes), no temporary file
    stays."""
    outlines = [TensorOutline("a", "float32", (10_000,))]
    header = {
        "left_out": {f"field_{i}": "it does not have one entry per sample" for i in range(900)}
    }
    writer = None
    with full_disk(after=num_bytes):
        with pytest.raises(OSError, match="too large|No space"):
            writer = TrainDumpWriter(tmp_path / "d", header, outlines)
            writer.write("a", np.zeros(10_000, dtype=np.float32))
            writer.commit()
        if writer is not None:
            writer.abandon()
    assert list(tmp_path.iterdir()) == []


def test_the_kind_of_a_dump_is_told_from_its_first_bytes(tmp_path, alone):
    """`slime diff` tells the two kinds of dumps apart by their first bytes."""
    (tmp_path / "rollout.jsonl").write_text('{"format": "slime-rollout-1"}\n')
    assert is_train_dump(alone.path) and not is_train_dump(tmp_path / "rollout.jsonl")
    with pytest.raises(RolloutDataError, match="is not a train dump"):
        read_train_dump(tmp_path / "rollout.jsonl")
    with pytest.raises(RolloutDataError, match="no train dump at"):
        read_train_dump(tmp_path / "absent")


def test_templates_without_the_rollout_are_refused_at_start():
    """A path without the rollout id is refused at the start, because each rollout would replace the
    one before."""
    assert str(train_dump_path("/d/{rollout_id}_{rank}.x", 12, rank=3)) == "/d/12_3.x"
    with pytest.raises(ConfigError, match="needs {rollout_id}"):
        train_dump_path("/d/{rank}", 12, rank=3)
    with pytest.raises(ConfigError, match="placeholder other than"):
        train_dump_path("/d/{rollout_id}_{step}", 12, rank=3)

    def problems(**paths):
        base = {"save_debug_rollout_data": None, "save_debug_train_data": None}
        return broken_rules(argparse.Namespace(**{**base, **paths}))

    assert (
        problems(
            save_debug_rollout_data="/r/{rollout_id}",
            save_debug_train_data="/t/{rollout_id}_{rank}",
        )
        == []
    )
    assert (
        "--save-debug-train-data /t/{rank} needs {rollout_id}"
        in problems(save_debug_train_data="/t/{rank}")[0]
    )
    assert (
        "--save-debug-rollout-data /r needs {rollout_id}"
        in problems(save_debug_rollout_data="/r")[0]
    )
    assert (
        "placeholder other than {rollout_id} "
        in problems(save_debug_rollout_data="/r/{rollout_id}_{rank}")[0]
    )


def test_dump_details_sets_both_paths_to_templates_that_pass():
    """--dump-details sets both dump paths to templates with the rollout id."""
    args = argparse.Namespace(
        dump_details="/d", save_debug_rollout_data=None, save_debug_train_data=None
    )
    paths = derive(args)
    assert paths == {
        "save_debug_rollout_data": "/d/rollout_data/{rollout_id}.parquet",
        "save_debug_train_data": "/d/train_data/{rollout_id}.parquet",
    }
    assert broken_rules(argparse.Namespace(**{**vars(args), **paths})) == []


def test_the_checksum_is_the_common_one(alone):
    """The checksum is zlib's crc32 of head and tensors, so that another program can check a
    file."""
    data = alone.path.read_bytes()
    assert (
        zlib.crc32(data[: 8 + int.from_bytes(data[:8], "little")])
        in np.frombuffer(data[-400:], dtype=np.uint32).tolist()[-100:]
    )
    assert train_dump.FORMAT == "slime-train-2"


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
