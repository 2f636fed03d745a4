"""What `slime diff` takes, what it leaves out, and how it answers broken recordings."""

import json
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also as `python tests/...`
import numpy as np
import pyarrow
from support.recordings import (
    copy_of,
    edit_column,
    edit_json,
    edit_run,
    replace_part,
    resume,
    write_table,
)

from slime import cli
from slime.exceptions import ConfigError, RolloutDataError
from slime.files import tables
from slime.harness.diff.command import main
from slime.harness.diff.inputs import Choice, compare_paths
from slime.harness.diff.stages import DiffStage
from slime.harness.diff.text import describe
from slime.harness.diff.values import Tolerance
from slime.recording import manifest

NUM_GPUS = 0


def words(report):
    return "\n".join(describe(report))


def reward_of_nine(recording, value="0.125"):
    edit_column(recording, "samples", "reward", 9, lambda text: value)


# --- what is compared -----------------------------------------------------------------------------


def test_chosen_rollouts_alone_are_compared(recorded_run, tmp_path, capsys):
    """--rollout, --from and --to choose by number; what only one recording has is named."""
    other = copy_of(recorded_run, tmp_path / "b")
    reward_of_nine(other)
    assert main([str(recorded_run), str(other), "--rollout", "0"]) == 0
    assert main([str(recorded_run), str(other), "--to", "0"]) == 0
    capsys.readouterr()
    assert main([str(recorded_run), str(other), "--from", "1"]) == 1
    assert "rollout 1, reward: sample 41 (position 9), reward: " in capsys.readouterr().out
    with pytest.raises(RolloutDataError, match="No chosen rollout is in both recordings.*0 to 1"):
        compare_paths(recorded_run, other, Choice(7, 9))
    with pytest.raises(ConfigError, match="--from 2 is behind --to 1"):
        main([str(recorded_run), str(other), "--from", "2", "--to", "1"])
    with pytest.raises(ConfigError, match="for recordings"):
        main([*(str(one / "rollout_000001") for one in (recorded_run, other)), "--rollout", "1"])


def test_two_rollout_folders_are_compared_with_their_options(recorded_run, tmp_path):
    """Rollouts of one recording too: another rollout has other prompts."""
    other = copy_of(recorded_run, tmp_path / "b")
    edit_run(other, lambda record: record["options"].update(lr=0.5))
    report = compare_paths(recorded_run / "rollout_000001", other / "rollout_000001")
    assert [one.name for one in report.options] == ["lr"] and report.first is None
    report = compare_paths(recorded_run / "rollout_000000", recorded_run / "rollout_000001")
    assert report.first[1].stage <= DiffStage.PROMPT and not report.options


@pytest.mark.parametrize("part", [*manifest.PARTS, "run"])
def test_single_parts_are_compared(part, recorded_run, tmp_path):
    """Every part of a recording is compared alone, and is identical to its copy."""
    if part == "critic_steps":
        pytest.skip("the run has no critic")
    folder = recorded_run / "rollout_000001"
    path = recorded_run / "run_0000.json" if part == "run" else folder / manifest.PARTS[part][0]
    other = tmp_path / path.name
    other.write_bytes(path.read_bytes())
    assert compare_paths(path, other).identical
    with pytest.raises(RolloutDataError, match="they cannot be compared"):
        compare_paths(path, folder / ("gate.json" if part != "gate" else "weights.json"))


def test_metrics_of_another_rollout_are_compared_in_their_order(recorded_run):
    """Two rollouts have no step in common: the first of one is held against the first of the other,
    and a note says which. Each was reported as absent on the other side."""
    steps = [recorded_run / f"rollout_00000{number}" / "steps.jsonl" for number in (0, 1)]
    report = compare_paths(*steps)
    shown = words(report)
    assert not report.identical and "absent" not in shown, shown
    lines = [map(json.loads, path.read_text().splitlines()) for path in steps]
    first = [next(one["step"] for one in some if one["step_key"] == "train/step") for some in lines]
    assert f"train/step {first[1]} of B is compared with train/step {first[0]} of A" in shown
    assert "absent" not in words(compare_paths(steps[0].parent, steps[1].parent))


def test_files_that_are_no_parts_say_what_is_compared(recorded_run, tmp_path):
    """Two manifests, two files of a tokenizer: what to compare in their place. Two config.yaml: the
    options that differ."""
    manifests = [recorded_run / f"rollout_00000{i}" / "manifest.train.json" for i in (0, 1)]
    with pytest.raises(RolloutDataError, match="is a manifest.* Compare the rollouts"):
        compare_paths(*manifests)
    with pytest.raises(
        RolloutDataError, match=r"no part.* \(replies.jsonl, samples.parquet, .*run_0"
    ):
        compare_paths(*[recorded_run / "tokenizer" / "tokenizer.json"] * 2)
    configs = [tmp_path / "a.yaml", tmp_path / "b.yaml"]
    for path, rate in zip(configs, (1, 2), strict=True):
        path.write_text(f"lr: 0.00{rate}\nrun_dir: {path}\nderived:\n  seq_length: {rate}\n")
    report = compare_paths(*configs)
    assert [one.name for one in report.options] == ["lr", "seq_length"] and not report.identical
    assert compare_paths(configs[0], configs[0]).identical
    configs[1].write_text("- 1\n")
    with pytest.raises(RolloutDataError, match="b.yaml is no config.yaml of a run"):
        compare_paths(*configs)


def test_a_part_alone_names_its_difference(recorded_run, tmp_path):
    """The rank, the step and the micro-batch of the sample are in a train part itself."""
    other = copy_of(recorded_run, tmp_path / "b")

    def change(values):
        values[2] = -1.5
        return values

    edit_column(other, "train", "log_probs", 3, change)
    paths = (one / "rollout_000001" / "train.parquet" for one in (recorded_run, other))
    report = compare_paths(*paths)
    assert report.first[1].stage is DiffStage.LOG_PROB
    assert "log-prob: sample 35 (position 3), log_probs, response token 2: " in words(report)
    assert "trained   data-parallel rank 0, step 0, micro-batch 0" in words(report)


def test_an_evaluation_is_compared_before_the_rollout_that_follows_it(recorded_run, tmp_path):
    """A difference in an evaluation does not explain one in training."""
    other = copy_of(recorded_run, tmp_path / "b")
    for name in ("eval_000000", "rollout_000001"):
        folder = other / name
        (folder / "gate.json").unlink()
        found = manifest.read_manifest(folder, manifest.ROLLOUT)
        del found.parts["gate"]
        manifest.write_manifest(folder, found)
    reward_of_nine(other)
    report = compare_paths(recorded_run, other)
    assert [one.name for one in report.rollouts][:2] == ["evaluation 0", "rollout 0"]
    assert report.rollouts[0].only_a == ["the gate part"]
    assert report.first[1].stage is DiffStage.REWARD
    assert [one.new for one in report.rollouts[2].differing] == [1]


def test_a_recording_with_a_fifo_or_a_wrong_manifest_is_refused(recorded_run, tmp_path):
    """A fifo was waited for without an end, and a manifest of another rollout, or with values of
    another kind, was believed."""

    def changed(change):
        def replace(folder):
            path = folder / "manifest.rollout.json"
            record = json.loads(path.read_text())
            change(record)
            path.write_text(json.dumps(record))

        return replace

    def manifests(**values):
        return changed(lambda record: record.update(values))

    def part(**values):
        return changed(lambda record: record["parts"]["samples"].update(values))

    def fifo(name):
        def replace(folder):
            (folder / name).unlink()
            os.mkfifo(folder / name)

        return replace

    cases = {
        "samples.parquet is listed and is no file": fifo("samples.parquet"),
        "run_0000.json is no file": fifo("../run_0000.json"),
        "is of rollout 77": manifests(rollout_id=77),
        "run is -1": manifests(run=-1),
        "evaluation is 'yes'": manifests(evaluation="yes"),
        "parts is \\[\\]": manifests(parts=[]),
        "num_rows is 'x'": part(num_rows="x"),
        "the hash of the part 'samples' is '5'": part(blake2b="5"),
    }
    for number, (words, change) in enumerate(cases.items()):
        other = copy_of(recorded_run, tmp_path / str(number))
        change(other / "rollout_000001")
        with pytest.raises(RolloutDataError, match=words):
            compare_paths(recorded_run, other)


def test_a_part_alone_is_held_against_its_manifest(recorded_run, tmp_path):
    """A changed digit of a metric was compared as if the run had logged it."""
    other = copy_of(recorded_run, tmp_path / "b")
    path = other / "rollout_000001" / "steps.jsonl"
    path.write_bytes(path.read_bytes().replace(b"1", b"2", 1))
    with pytest.raises(RolloutDataError, match="steps.jsonl is damaged"):
        compare_paths(recorded_run / "rollout_000001" / "steps.jsonl", path)


@pytest.mark.parametrize(
    ("part", "column", "row", "change", "stage"),
    [
        ("samples", "index", 8, lambda value: value + 1, DiffStage.PROMPT),
        ("samples", "loss_mask", 9, lambda mask: 1 - mask, DiffStage.COLUMN),
        ("train", "dp_rank", 9, lambda rank: rank + 1, DiffStage.ARRIVAL),
        ("train", "step", 9, lambda step: step + 1, DiffStage.ARRIVAL),
        ("train", "micro_batch", 9, lambda number: number + 1, DiffStage.ARRIVAL),
    ],
)
def test_where_a_change_is_first_seen(part, column, row, change, stage, recorded_run, tmp_path):
    """An index that stands twice was seen as another sample's tokens, a mask as a part of the
    reply, and where a rank trained a row not at all."""
    other = copy_of(recorded_run, tmp_path / "b")
    edit_column(other, part, column, row, change)
    report = compare_paths(recorded_run, other)
    assert report.first_stage is stage, words(report)
    first = report.first[1]
    assert (first.part, first.field, first.row_a) == (part, column, row)


@pytest.mark.parametrize(
    ("part", "column"), [("samples", "raw_row"), ("columns", "position"), ("train", "position")]
)
def test_rows_that_are_joined_wrongly_are_an_error(part, column, recorded_run, tmp_path):
    """A row that is numbered as another one was compared as if it were in its place."""
    other = copy_of(recorded_run, tmp_path / "b")
    edit_column(other, part, column, 3, lambda number: number + 1)
    with pytest.raises(RolloutDataError, match=rf"{part}.parquet: {column} must count its rows"):
        compare_paths(recorded_run, other)


def test_a_value_that_is_no_json_is_named_with_its_file(recorded_run, tmp_path):
    """The hash may be right and the value not."""
    other = copy_of(recorded_run, tmp_path / "b")
    edit_column(other, "samples", "reward", 3, lambda text: "{")
    where = r"rollout_000001/samples\.parquet, column reward, row 3 holds no JSON value"
    with pytest.raises(RolloutDataError, match=where):
        compare_paths(recorded_run, other)


# --- layouts --------------------------------------------------------------------------------------


def on_two_ranks(recording, rollout_id):
    """The rollout as two data-parallel ranks would have trained it: rows of odd position are the
    second's, and what training computed is rounded otherwise.
    """
    folder = manifest.rollout_folder(recording, rollout_id)
    for part in ("schedule", "train"):
        table = tables.read_table(folder / manifest.PARTS[part][0])
        ranks = np.array(table["dp_rank"].to_pylist())
        odd = (np.arange(len(ranks)) % 2).astype(np.int32)
        table = with_column(table, "dp_rank", np.where(ranks < 0, ranks, odd))
        if part == "schedule":
            table = with_column(table, "dp_position", np.arange(len(ranks)) // 2)
        else:
            values = [
                None if one is None else (np.array(one, dtype=np.float32) * (1 + 4e-7)).tolist()
                for one in table["log_probs"].to_pylist()
            ]
            table = with_column(table, "log_probs", values)
        replace_part(
            recording,
            part,
            lambda file, table=table: write_table(file, table),
            rollout_id=rollout_id,
        )

    def parallel(record):
        record["parallel"]["dp_size"] = 2
        record["split"]["num_trained_by_rank"] = [16, 16]

    edit_json(recording, "rollout", parallel, rollout_id=rollout_id)


def with_column(table, name, values):
    field = table.schema.field(name)
    return table.set_column(
        table.schema.get_field_index(name), field, pyarrow.array(list(values), field.type)
    )


def test_another_layout_is_expected_to_schedule_otherwise(recorded_run, tmp_path):
    """Ranks and micro-batches are no cause where the layout differs, digests of the ranks' weights
    are not compared, and what training computes has the contract's tolerance."""
    other = copy_of(recorded_run, tmp_path / "b")
    for rollout_id in (0, 1):
        on_two_ranks(other, rollout_id)
    edit_run(other, lambda record: record["options"].update(actor_num_gpus_per_node=2))
    report = compare_paths(recorded_run, other)
    text = words(report)
    assert report.identical, text
    assert "options differ: actor_num_gpus_per_node: 1 in A, 2 in B (expected: the layout" in text
    assert "expected: the layout differs: dp_rank, dp_position" in text
    assert text.startswith("identical within the tolerances between layouts: ")
    assert "largest difference within tolerance" in text and "in log_probs" in text
    assert not compare_paths(recorded_run, other, Choice(tolerance=Tolerance())).identical
    edit_column(other, "train", "returns", 3, lambda values: values + 1e-3)
    report = compare_paths(recorded_run, other)
    assert (report.first[1].stage, report.first[1].field) == (DiffStage.ADVANTAGE, "returns")


def test_a_re_ordered_batch_is_matched_by_identity(recorded_run, tmp_path):
    """Two samples in each other's place: their order differs, and nothing else does."""
    other = copy_of(recorded_run, tmp_path / "b")
    folder = manifest.rollout_folder(other, 1)
    order = list(range(32))
    order[3], order[20] = 20, 3
    for part in ("samples", "columns", "schedule", "train"):
        table = tables.read_table(folder / manifest.PARTS[part][0]).take(order)
        for name in ("raw_row", "position"):
            if name in table.column_names:
                table = with_column(table, name, range(32))
        replace_part(other, part, lambda file, table=table: write_table(file, table))
    report = compare_paths(recorded_run, other)
    rollout, first = report.first
    assert (first.stage, first.field, first.row_a, first.row_b) == (
        DiffStage.PROMPT,
        "position",
        3,
        20,
    )
    fields = {one.field for one in rollout.differing}
    assert fields <= {"position", "dp_position", "micro_batch", "step", "dp_rank"}, fields


# --- recordings that ended early, or are broken ---------------------------------------------------


def test_a_run_that_ended_early_is_compared_as_far_as_it_came(recorded_run, tmp_path, capsys):
    """The parts of its last rollout that it has are compared; the others are named."""
    other = copy_of(recorded_run, tmp_path / "b")
    folder = other / "rollout_000001"
    (folder / "manifest.train.json").unlink()
    found = manifest.read_manifest(folder, manifest.ROLLOUT)
    found.facts.pop("complete")
    del found.parts["rollout"]
    manifest.write_manifest(folder, found)
    assert main([str(recorded_run), str(other)]) == 1
    out = capsys.readouterr().out
    assert "do not differ, but one side has more" in out.splitlines()[0]
    assert "rollout 1: only in A: the train part" in out
    assert "note: rollout 1: B is not complete: its rollout writer ended early" in out
    assert main([str(recorded_run), str(other), "--rollout", "0"]) == 0


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 255
    path.write_bytes(bytes(data))


def link(path):
    target = path.with_name("elsewhere")
    path.rename(target)
    path.symlink_to(target)


def other_table(path):
    tables.write_table(path, pyarrow.table({"a": [1, 2]}))


def other_format(path):
    record = json.loads(path.read_text())
    record["format"] = "slime-recording-99"
    path.write_text(json.dumps(record))


def hostile_name(path):
    record = json.loads(path.read_text())
    record["parts"]["samples"]["file"] = "../../../etc/passwd"
    path.write_text(json.dumps(record))


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("samples.parquet", cut, "samples.parquet has"),
        ("samples.parquet", flip, "samples.parquet"),
        ("samples.parquet", link, "is a link"),
        ("samples.parquet", Path.unlink, "samples.parquet"),
        ("samples.parquet", other_table, "samples.parquet has"),
        ("train.parquet", other_table, "train.parquet"),
        ("schedule.parquet", other_table, "schedule.parquet has"),
        ("columns.parquet", other_table, "columns.parquet has"),
        ("steps.jsonl", cut, "steps.jsonl has"),
        ("steps.jsonl", flip, "steps.jsonl is damaged"),
        ("gate.json", cut, "gate.json has"),
        ("replies.jsonl", flip, "replies.jsonl is damaged"),
        ("weights.json", Path.unlink, "weights.json is listed and is no file"),
        ("manifest.rollout.json", cut, "manifest.rollout.json cannot be read"),
        ("manifest.rollout.json", other_format, "slime-recording-99"),
        ("manifest.rollout.json", hostile_name, "etc/passwd"),
    ],
)
def test_broken_recordings_are_errors_that_name_the_file(
    file, damage, message, recorded_run, tmp_path, capsys
):
    """Status 2 with the file and what is wrong with it; never a stack, and never "identical"."""
    other = copy_of(recorded_run, tmp_path / "b")
    damage(other / "rollout_000001" / file)
    assert cli.main(["diff", str(recorded_run), str(other)]) == 2
    assert message in capsys.readouterr().err


def test_values_of_another_kind_are_differences_or_errors(recorded_run, tmp_path, capsys):
    """A run record without options, metrics that are no list, texts in the place of numbers."""
    folder = "rollout_000001"
    other = copy_of(recorded_run, tmp_path / "b")
    edit_json(other, "rollout", lambda record: record.update(metrics=7))
    assert main([str(recorded_run), str(other)]) == 1
    other = copy_of(recorded_run, tmp_path / "c")
    table = tables.read_table(other / folder / "columns.parquet")
    texts = pyarrow.array(["x"] * len(table), pyarrow.large_string())
    place = table.schema.get_field_index("rewards")
    table = table.set_column(place, "rewards", texts)
    replace_part(other, "columns", lambda file: write_table(file, table))
    capsys.readouterr()
    assert main([str(recorded_run), str(other)]) == 1
    assert "rewards: a column of kind number in A, a column of kind text in B" in (
        capsys.readouterr().out
    )
    other = copy_of(recorded_run, tmp_path / "d")
    (other / "run_0000.json").write_text('{"format": "slime-recording-1"}')
    assert cli.main(["diff", str(recorded_run), str(other)]) == 2
    other = copy_of(recorded_run, tmp_path / "e")
    deep = "[" * 900 + "]" * 900
    edit_json(other, "gate", lambda record: record.update(alarms=json.loads(deep)))
    assert main([str(recorded_run), str(other)]) == 1


def test_kinds_that_do_not_fit_are_told(recorded_run, tmp_path):
    """A recording and a rollout of one cannot be compared."""
    with pytest.raises(RolloutDataError, match="one is a recording, the other a rollout of a"):
        compare_paths(recorded_run, recorded_run / "rollout_000001")
    with pytest.raises(RolloutDataError, match="has a dump in it"):
        (tmp_path / "x").mkdir()
        compare_paths(tmp_path / "x", tmp_path)
    (tmp_path / "link").symlink_to(recorded_run / "rollout_000001" / "gate.json")
    with pytest.raises(RolloutDataError, match="is a link"):
        compare_paths(tmp_path / "link", tmp_path / "link")


GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "run"  # three rollouts


def test_a_run_that_was_resumed_is_compared_start_by_start(tmp_path):
    """Where a start went on is no difference of its own; an option that it changed is named with the
    rollout from which on it holds, and causes nothing before."""
    once, twice = (copy_of(GOLDEN, tmp_path / name) for name in ("once", "twice"))
    resume(twice, [2], lambda record: record["options"].update(load="/ckpt", start_rollout_id=2))
    report = compare_paths(once, twice)
    assert report.identical, words(report)
    assert "load: " in words(report) and "a start of the run that resumed it" in words(report)
    assert f"B was started 2 times; slime show {twice}" in words(report)
    changed = copy_of(GOLDEN, tmp_path / "changed")
    resume(changed, [2], lambda record: record["options"].update(lr=0.5))
    report = compare_paths(once, changed)
    assert not report.identical and report.first_stage is DiffStage.OPTION
    text = "lr: 0.004 in A, 0.5 in B from rollout 2 on (start 0 of A, 1 of B)"
    assert words(report).count(text) == 1
    edit_column(changed, "samples", "reward", 3, lambda value: "0.125", rollout_id=1)
    assert compare_paths(once, changed).first_stage is DiffStage.REWARD


def test_what_a_later_start_went_back_over_is_no_part_of_the_run(tmp_path, capsys):
    """A run that was resumed before its last rollout, and killed before it came as far again: that
    rollout is of another past. It is shown as such and compared where it alone is asked for."""
    a, b = (copy_of(GOLDEN, tmp_path / name) for name in ("a", "b"))
    resume(b, [1], lambda record: record["options"].update(load="/ckpt"))
    edit_column(b, "samples", "reward", 3, lambda value: "0.125", rollout_id=2)
    report = compare_paths(a, b)
    why = "of start 0 of the run: start 1 went back to rollout 1 and has not come as far"
    assert [one.name for one in report.rollouts] == ["rollout 0", "rollout 1"]
    assert f"rollout 2 of B is not compared, since it is {why}" in words(report)
    assert report.only_a == ["rollout 2"] and not report.identical
    assert main([str(a), str(b), "--rollout", "2"]) == 1
    assert "reward" in capsys.readouterr().out
    assert cli.main(["show", str(b)]) == 0
    shown = capsys.readouterr().out
    assert why in shown and "start 1 of the run; changed since start 0:" in shown
    assert "  load: None -> '/ckpt'" in shown
    (b / "rollout_000002" / "weights" / "latest_checkpointed_iteration.txt").unlink()
    assert cli.main(["replay", str(b), "--rollout", "2", "--stage", "train"]) == 2
    assert f"checkpoints of the run lead elsewhere, since it is {why}" in capsys.readouterr().out


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
