"""`slime diff` finds what differs between two dumps and where."""

import io
import json
import math
import pickle

import numpy as np
import pytest
import torch

from slime import cli
from slime.data.batch import RolloutBatch, Stage
from slime.data.sample import Sample
from slime.exceptions import RolloutDataError
from slime.files.rollout_dump import save_debug_rollout_data
from slime.files.train_dump_utils import Place, write_train_dump
from slime.harness.diff.command import main
from slime.harness.diff.inputs import Choice, compare_paths
from slime.harness.diff.stages import DiffStage
from slime.harness.diff.text import describe
from slime.harness.diff.values import Extent, Tolerance, json_differences

NUM_GPUS = 0
PARTITIONS = {1: [[0, 1, 2, 3]], 2: [[0, 3], [2, 1]]}


def write_dump(path, *, ranks=1, change=None, positions=4):
    """Four samples (or the first `positions` of them), index 100 + position, reward 10 * position, log-prob of token j -(position + j
    / 8), from that many data-parallel ranks. `change(fields)` edits the whole batch's lists first.
    """
    fields = {
        "tokens": [np.arange(5 + p, dtype=np.int32) + 1000 * p for p in range(positions)],
        "loss_masks": [np.ones(3 + p, dtype=np.uint8) for p in range(positions)],
        "log_probs": [-(p + np.arange(3 + p, dtype=np.float32) / 8) for p in range(positions)],
        "rewards": [10.0 * p for p in range(positions)],
        "sample_indices": [100 + p for p in range(positions)],
        "total_lengths": [5 + p for p in range(positions)],
        "response_lengths": [3 + p for p in range(positions)],
        "metadata": [{"level": p} for p in range(positions)],
    }
    if change is not None:
        change(fields)
    batches = []
    for rank, whole in enumerate(PARTITIONS[ranks]):
        partition = [position for position in whole if position < positions]
        local = {name: [values[p] for p in partition] for name, values in fields.items()}
        batches.append(
            RolloutBatch(
                {**local, "partition": partition},
                stage=Stage.LOCAL,
                info={"num_whole": positions, "dp_rank": rank},
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
    assert capsys.readouterr().out.splitlines() == [
        "identical: 9 fields x 4 samples, 0 differences",
        "expected: the layout differs: dp_rank",
    ]


def test_two_swapped_rewards_are_found_with_sample_field_and_rank(tmp_path, capsys):
    """Two swapped rewards are found with sample, field and rank."""

    def swap(fields):
        fields["rewards"][1], fields["rewards"][3] = fields["rewards"][3], fields["rewards"][1]

    a, b = write_dump(tmp_path / "a"), write_dump(tmp_path / "b", ranks=2, change=swap)
    assert main([str(a), str(b)]) == 1
    out = capsys.readouterr().out
    assert "different: 1 of 9 fields x 4 samples, 2 differences" in out
    assert (
        "first difference in the data: baseline: sample 101 (position 1), rewards: 10.0 in A, "
        "30.0 in B" in out
    )
    assert "sample    index 101, position 1\n" in out
    assert "A: data-parallel rank 0\n" in out and "B: data-parallel rank 1\n" in out
    assert "rewards: 2 entries in 2 samples, largest 20 (relative 0.667)" in out


def test_the_first_differing_token_is_named_and_all_are_counted(tmp_path):
    """Of the two tokens of position 2 that differ in one bit, the first is named and both are
    counted."""

    def change(fields):
        fields["log_probs"][2][[2, 4]] = np.nextafter(fields["log_probs"][2][[2, 4]], np.float32(0))

    a, b = write_dump(tmp_path / "a"), write_dump(tmp_path / "b", change=change)
    (exact,) = compare_paths(a, b).rollouts
    assert (exact.first.row_a, exact.first.field, exact.first.path) == (2, "log_probs", (2,))
    assert exact.num_differences == 2
    assert [one.num_samples for one in exact.differing] == [1]
    assert (
        "log_probs, response token 2: -2.25 in A, -2.2499998 in B"
        in describe(compare_paths(a, b))[1]
    )
    near = compare_paths(a, b, Choice(tolerance=Tolerance(rtol=1e-6)))
    assert near.identical and describe(near)[0].startswith("identical within rtol 1e-06, atol 0")
    assert "largest difference within tolerance: 2.38e-07" in describe(near)[1]


def test_causes_are_named_before_effects(tmp_path):
    """A differing mask is reported before the log-probs that follow from it, also those of samples
    before it."""

    def change(fields):
        fields["log_probs"][0][0] = 7.0
        fields["loss_masks"][3][1] = 0

    a, b = write_dump(tmp_path / "a"), write_dump(tmp_path / "b", change=change)
    (found,) = compare_paths(a, b).rollouts
    assert (found.first.stage, found.first.field) == (DiffStage.COLUMN, "loss_masks")
    assert (found.first.row_a, found.first.token) == (3, 1)


def test_another_layout_may_round_what_training_computes_and_nothing_else(tmp_path):
    """Without --rtol, the contract's tolerances are used where the numbers of ranks differ."""

    def change(fields):
        fields["log_probs"][2] = fields["log_probs"][2] * np.float32(1 + 1e-6)

    a, same = write_dump(tmp_path / "a"), write_dump(tmp_path / "c", change=change)
    other = write_dump(tmp_path / "b", ranks=2, change=change)
    assert compare_paths(a, other).identical and not compare_paths(a, same).identical
    rewards = write_dump(
        tmp_path / "d", ranks=2, change=lambda fields: fields["rewards"].__setitem__(1, 10.00001)
    )
    assert not compare_paths(a, rewards).identical


def test_tolerance_is_for_floats_alone_and_not_a_number_equals_itself():
    """A tolerance applies to floats alone, and NaN equals NaN."""

    def differ(a, b, **tolerance):
        return len(list(json_differences(a, b, Tolerance(**tolerance), Extent())))

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
    report = compare_paths(a, b)
    assert report.rollouts[0].only_a == ["field log_probs"] and not report.identical
    few = write_dump(tmp_path / "few", positions=3)
    (found,) = compare_paths(few, a).rollouts
    assert found.only_b == ["1 sample, the first at position 3"]
    assert found.first.row_b == 3 and found.num_samples == 3


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
    (same,), other = compare_paths(a, b).rollouts, compare_paths(a, c)
    assert same.identical and same.num_samples == 3
    assert describe(other)[1] == (
        "first difference in the data: sampled token or reply: sample 2 (position 2), tokens, "
        "response token 0: 2 in A, 9 in B"
    )


def test_folders_are_compared_dump_by_dump(tmp_path, capsys):
    """Two folders are compared dump by dump."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write_dump(tmp_path / name / "0.safetensors")
        rollout(tmp_path / name)
        (tmp_path / name / "notes.txt").write_text("no dump")
    assert main([str(tmp_path / "a"), str(tmp_path / "b"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found["rollouts"]) == ["0.jsonl", "0.safetensors"] and found["identical"]
    write_dump(tmp_path / "b" / "1.safetensors")
    assert main([str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    assert "only in B: 1.safetensors" in capsys.readouterr().out


def torch_archive():
    """The bytes of a file of torch.save."""
    file = io.BytesIO()
    torch.save({"rollout_id": 0, "samples": []}, file)
    return file.getvalue()


def test_files_that_are_no_dumps_are_errors_not_differences(tmp_path, capsys):
    """A file that is no dump is an error with status 2 and not a difference."""
    with pytest.raises(RolloutDataError, match="no dump at"):
        compare_paths(tmp_path / "a", tmp_path / "b")
    a = write_dump(tmp_path / "a")
    assert cli.main(["diff", str(a), str(tmp_path / "b")]) == 2
    assert f"no dump at {tmp_path / 'b'}" in capsys.readouterr().err
    with pytest.raises(RolloutDataError, match="one is a file, the other a folder"):
        compare_paths(a, tmp_path)
    for name, content in (("p.pt", torch_archive()), ("p.pkl", pickle.dumps([1], protocol=4))):
        (tmp_path / name).write_bytes(content)
        for words in (["diff", str(a), str(tmp_path / name)], ["show", str(tmp_path / name)]):
            assert cli.main(words) == 2
            error = capsys.readouterr().err
            assert f"{name} is a pickle, which slime never loads" in error and "audit" in error
    (tmp_path / "b").write_text("anything")
    with pytest.raises(RolloutDataError, match="b, line 1: not JSON"):
        compare_paths(a, tmp_path / "b")


def test_when_a_sample_was_made_is_not_compared(tmp_path):
    """Two runs with --trace record other times of the same samples."""
    for name, started in (("a", 1.0), ("b", 2.0)):
        sample = Sample(index=0, tokens=[1, 2], response_length=1)
        sample.trace = {"trace_id": name, "events": [{"time": started}]}
        save_debug_rollout_data(
            str(tmp_path / name / "{rollout_id}.parquet"), [sample], rollout_id=0, evaluation=False
        )
    assert compare_paths(tmp_path / "a", tmp_path / "b").identical


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
