"""`slime diff` finds what differs between two dumps and where."""

import json
import math

import numpy as np
import pytest

from slime import cli
from slime.data.batch import RolloutBatch, Stage
from slime.data.sample import Sample
from slime.exceptions import RolloutDataError
from slime.files.rollout_dump import save_debug_rollout_data
from slime.files.train_dump_utils import Place, write_train_dump
from slime.harness.diff import Records, Tolerance, compare_paths, compare_records, describe, main

NUM_GPUS = 0
PARTITIONS = {1: [[0, 1, 2, 3]], 2: [[0, 3], [2, 1]]}


def write_dump(path, *, ranks=1, change=None):
    """Four samples, index 100 + position, reward 10 * position, log-prob of token j -(position + j
    / 8), from that many data-parallel ranks. `change(fields)` edits the whole batch's lists first.
    """
    fields = {
        "tokens": [np.arange(5 + p, dtype=np.int32) + 1000 * p for p in range(4)],
        "loss_masks": [np.ones(3 + p, dtype=np.uint8) for p in range(4)],
        "log_probs": [-(p + np.arange(3 + p, dtype=np.float32) / 8) for p in range(4)],
        "rewards": [10.0 * p for p in range(4)],
        "sample_indices": [100 + p for p in range(4)],
        "total_lengths": [5 + p for p in range(4)],
        "response_lengths": [3 + p for p in range(4)],
        "metadata": [{"level": p} for p in range(4)],
    }
    if change is not None:
        change(fields)
    batches = []
    for rank, partition in enumerate(PARTITIONS[ranks]):
        local = {name: [values[p] for p in partition] for name, values in fields.items()}
        batches.append(
            RolloutBatch(
                {**local, "partition": partition},
                stage=Stage.LOCAL,
                info={"num_whole": 4, "dp_rank": rank},
            )
        )
    sent: list[list] = []

    def run(rank, gather):
        share = lambda value: [value]  # noqa: E731 - every rank has the same fields here
        header = {"rollout_id": 0, "rank": 0}
        return write_train_dump(
            path, batches[rank], header=header, place=Place(rank), gather=gather, share=share
        )

    for rank in range(1, ranks):
        values: list = []
        sent.append(values)
        run(rank, lambda value, values=values: values.append(value))
    iterators = [iter(values) for values in sent]
    assert run(0, lambda value: [value, *(next(values) for values in iterators)]) == path
    return path


def test_the_same_rollout_from_one_rank_and_from_two_is_identical(tmp_path, capsys):
    """Dumps of one rollout from one rank and from two are identical."""
    a, b = write_dump(tmp_path / "a"), write_dump(tmp_path / "b", ranks=2)
    assert main([str(a), str(b)]) == 0
    assert capsys.readouterr().out == "identical: 8 fields x 4 samples, 0 differences\n"


def test_two_swapped_rewards_are_found_with_sample_field_and_rank(tmp_path, capsys):
    """Two swapped rewards are found with sample, field and rank."""

    def swap(fields):
        fields["rewards"][1], fields["rewards"][3] = fields["rewards"][3], fields["rewards"][1]

    a, b = write_dump(tmp_path / "a"), write_dump(tmp_path / "b", ranks=2, change=swap)
    assert main([str(a), str(b)]) == 1
    out = capsys.readouterr().out
    assert "different: 1 of 8 fields over 4 samples, 2 differences" in out
    assert (
        "first: sample 101 (position 1, data-parallel rank 0 in A and 1 in B), rewards: 10.0 in A, "
        "30.0 in B" in out
    )
    assert "rewards: 2 entries in 2 samples, largest 20 (relative 0.667)" in out


def test_the_first_differing_token_is_named_and_all_are_counted(tmp_path):
    """Of the two tokens of position 2 that differ in one bit, the first is named and both are
    counted."""

    def change(fields):
        fields["log_probs"][2][[2, 4]] = np.nextafter(fields["log_probs"][2][[2, 4]], np.float32(0))

    a, b = write_dump(tmp_path / "a"), write_dump(tmp_path / "b", change=change)
    (exact,) = compare_paths(a, b).values()
    assert (exact.first.sample_index, exact.first.field, exact.first.path) == (
        102,
        "log_probs",
        (2,),
    )
    assert exact.num_differences == 2 and exact.fields["log_probs"].samples == 1
    assert "log_probs, response token 2: -2.25 in A, -2.2499998 in B" in str(exact.first)
    (near,) = compare_paths(a, b, tolerance=Tolerance(rtol=1e-6)).values()
    assert near.identical and "largest difference within tolerance: 2.38e-07" in describe(near)[1]


def test_causes_are_named_before_effects():
    """A differing mask is reported before the log-probs that follow from it."""
    right = {
        "log_probs": np.zeros(2),
        "advantages": np.zeros(2),
        "loss_masks": np.ones(2, dtype=np.uint8),
    }
    wrong = {name: values + 1 for name, values in right.items()}
    found = compare_records(
        Records("a", {5: right}, {5: 7}, {}), Records("b", {5: wrong}, {5: 7}, {})
    )
    assert (found.first.field, found.first.position, found.first.sample_index) == (
        "loss_masks",
        5,
        7,
    )


def test_tolerance_is_for_floats_alone_and_not_a_number_equals_itself():
    """A tolerance applies to floats alone, and NaN equals NaN."""

    def differ(a, b, **tolerance):
        records = [
            Records(name, {0: {"x": value}}, {0: 0}, {}) for name, value in (("a", a), ("b", b))
        ]
        return compare_records(*records, tolerance=Tolerance(**tolerance)).num_differences

    assert differ(1.0, 1.0 + 1e-6) == 1 and differ(1.0, 1.0 + 1e-6, rtol=1e-5) == 0
    assert differ(0.0, 1e-7, rtol=1e-3) == 1 and differ(0.0, 1e-7, atol=1e-6) == 0
    assert (
        differ(100, 101, rtol=0.5) == 1
        and differ("a", "b", rtol=1) == 1
        and differ([1, 2], [1, 3], rtol=1) == 1
    )
    assert differ(math.nan, math.nan) == 0 and differ(math.nan, 0.0, rtol=1.0) == 1
    assert (
        differ(math.inf, math.inf) == 0
        and differ(math.inf, 1.0, rtol=1.0) == 1
        and differ(math.inf, -math.inf, rtol=1.0) == 1
    )
    assert differ([1.0, 2.0], [1.0]) == 1 and differ([], [1.0]) == 1 and differ(None, 1.0) == 1
    assert differ({"a": [1, {"b": 2.0}]}, {"a": [1, {"b": 3.0}], "c": 0}) == 2


def test_missing_samples_and_fields_are_differences(tmp_path):
    """Missing samples and fields are differences."""
    a, b = (
        write_dump(tmp_path / "a"),
        write_dump(tmp_path / "b", change=lambda fields: fields.pop("log_probs")),
    )
    (found,) = compare_paths(a, b).values()
    assert (found.only_in_a, found.only_in_b, found.first, found.identical) == (
        ["field log_probs"],
        [],
        None,
        False,
    )
    few = Records("a", {0: {"x": 1}}, {}, {})
    more = Records("b", {0: {"x": 1}, 1: {"x": 1}}, {}, {})
    assert compare_records(few, more).only_in_b == ["1 samples, the first at position 1"]


def rollout(path, **changes):
    samples = [
        Sample(index=i, tokens=[1, 2, 3], response_length=2, reward=float(i), response=f"r{i}")
        for i in range(3)
    ]
    samples[1].non_generation_time = len(str(path)) * 1.5  # differs between any two runs
    for name, value in changes.items():
        setattr(samples[2], name, value)
    return save_debug_rollout_data(
        str(path / "{rollout_id}.jsonl"), samples, rollout_id=0, evaluation=False
    )


def test_rollout_dumps_are_compared_by_their_samples_fields(tmp_path):
    """Rollout dumps are compared by the fields of their samples."""
    a, b, c = (
        rollout(tmp_path / "a"),
        rollout(tmp_path / "bb"),
        rollout(tmp_path / "c", tokens=[1, 9, 3]),
    )
    (same,), (other,) = compare_paths(a, b).values(), compare_paths(a, c).values()
    assert same.identical and same.num_samples == 3
    assert str(other.first) == "sample 2 (position 2), tokens, token 1: 2 in A, 9 in B"


def test_folders_are_compared_dump_by_dump(tmp_path, capsys):
    """Two folders are compared dump by dump."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write_dump(tmp_path / name / "0.safetensors")
        rollout(tmp_path / name)
        (tmp_path / name / "notes.txt").write_text("no dump")
    assert main([str(tmp_path / "a"), str(tmp_path / "b"), "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)) == ["0.jsonl", "0.safetensors"]
    write_dump(tmp_path / "b" / "1.safetensors")
    assert main([str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    assert "1.safetensors:\ndifferent" in capsys.readouterr().out


def test_files_that_are_no_dumps_are_errors_not_differences(tmp_path, capsys):
    """A file that is no dump is an error with status 2 and not a difference."""
    with pytest.raises(RolloutDataError, match="no dump at"):
        compare_paths(tmp_path / "a", tmp_path / "b")
    a = write_dump(tmp_path / "a")
    assert cli.main(["diff", str(a), str(tmp_path / "b")]) == 2
    assert f"no dump at {tmp_path / 'b'}" in capsys.readouterr().err
    with pytest.raises(RolloutDataError, match="one is a folder"):
        compare_paths(a, tmp_path)
    (tmp_path / "b").write_text("anything")
    with pytest.raises(RolloutDataError, match="b, line 1: not JSON"):
        compare_paths(a, tmp_path / "b")


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
