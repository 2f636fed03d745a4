"""One value changed in any part of a recording is named as the first cause, in its stage."""

import dataclasses
import enum
import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also as `python tests/...`
from support.recordings import copy_of, edit_column, edit_json, edit_run, replace_part, write_table

from slime.files import tables
from slime.harness.diff.command import main
from slime.harness.diff.inputs import Choice, compare_paths
from slime.harness.diff.stages import DiffStage
from slime.harness.diff.text import describe, rows_of
from slime.recording import manifest
from slime.recording.reader import Recording

NUM_GPUS = 0


def at(place, value):
    """A change of one entry of an array."""

    def change(entries):
        entries[place] = value
        return entries

    return change


def metric(name, value, axis):
    def change(records):
        for record in records:
            if record["step_key"] == axis and name in record["metrics"]:
                record["metrics"][name] = value
                return

    return change


def digest(side):
    def change(record):
        name = sorted(record[side][0])[3]
        record[side][0][name] = "0" * 32

    return change


def reply_token(records):
    records[2]["reply"][1]["meta_info"]["output_token_logprobs"][3][1] += 1


def sampling_seed(records):
    records[2]["request"]["sampling_params"][1]["sampling_seed"] += 1


COLUMN_PLANTS = {
    # (part, column, row, change): (stage, field, token)
    ("samples", "prompt", 5, lambda text: text + "\x1b[31m"): (DiffStage.PROMPT, "prompt", None),
    ("samples", "index", 5, lambda index: 9999): (DiffStage.PROMPT, "index", None),
    ("samples", "tokens", 5, at(2, 77)): (DiffStage.PROMPT, "tokens", 2),
    ("samples", "tokens", 7, at(-2, 77)): (DiffStage.REPLY, "tokens", -2),
    ("samples", "rollout_log_probs", 7, at(1, -9.5)): (DiffStage.REPLY, "rollout_log_probs", 1),
    ("samples", "response", 7, lambda text: text + "!"): (DiffStage.REPLY, "response", None),
    ("samples", "reward", 9, lambda text: "0.125"): (DiffStage.REWARD, "reward", None),
    ("samples", "valid", 9, lambda valid: not valid): (DiffStage.VERDICT, "valid", None),
    ("samples", "changes", 9, lambda text: '{"remove_sample":true}'): (
        DiffStage.VERDICT,
        "changes",
        None,
    ),
    ("columns", "raw_reward", 11, lambda value: 3.5): (DiffStage.BASELINE, "raw_reward", None),
    ("columns", "rewards", 11, lambda value: 0.75): (DiffStage.BASELINE, "rewards", None),
    ("columns", "loss_masks", 11, at(1, 0)): (DiffStage.COLUMN, "loss_masks", 1),
    ("columns", "tokens", 11, at(9, 5)): (DiffStage.COLUMN, "tokens", 9),
    ("schedule", "micro_batch", 3, lambda value: value + 1): (
        DiffStage.SCHEDULE,
        "micro_batch",
        None,
    ),
    ("train", "loss_masks", 3, at(0, 0)): (DiffStage.ARRIVAL, "loss_masks", 0),
    ("train", "log_probs", 3, at(2, -1.5)): (DiffStage.LOG_PROB, "log_probs", 2),
    ("train", "advantages", 3, at(4, 1.5)): (DiffStage.ADVANTAGE, "advantages", 4),
    ("train", "kl", 3, at(1, 0.5)): (DiffStage.ADVANTAGE, "kl", 1),
}
JSON_PLANTS = {
    ("replies", "reply", reply_token): (DiffStage.REPLY, "reply"),
    ("replies", "request", sampling_seed): (DiffStage.REPLY, "request"),
    ("gate", "alarms", lambda record: record["alarms"].append("x")): (DiffStage.VERDICT, "alarms"),
    ("rollout", "split", lambda record: record["split"].update(dropped={"empty": 31})): (DiffStage.SCHEDULE, "dropped"),
    ("steps", "loss", metric("train/loss", 0.5, "train/step")): (DiffStage.STEP, "train/loss"),
    ("steps", "grad", metric("train/grad_norm", 0.5, "train/step")): (
        DiffStage.STEP,
        "train/grad_norm",
    ),
    ("weights", "before", digest("before")): (DiffStage.WEIGHTS_BEFORE, "before"),
    ("weights", "after", digest("after")): (DiffStage.WEIGHTS, "after"),
    ("steps", "metric", metric("rollout/kl", 0.5, "rollout/step")): (DiffStage.METRIC, "rollout/kl"),
}  # fmt: skip


@pytest.mark.parametrize("plant", COLUMN_PLANTS, ids=lambda plant: "-".join(map(str, plant[:2])))
def test_one_entry_of_a_table_is_named_with_stage_sample_and_token(plant, recorded_run, tmp_path):
    """The stage, the sample and the token where a value was planted, and nothing else."""
    part, column, row, change = plant
    stage, field, token = COLUMN_PLANTS[plant]
    other = copy_of(recorded_run, tmp_path / "b")
    edit_column(other, part, column, row, change)
    report = compare_paths(recorded_run, other)
    rollout, first = report.first
    if part == "samples":
        sample = row
    else:
        sample = int(Recording(other).rollout(1).columns()[1][row])
    assert (rollout.name, report.first_stage, first.field) == ("rollout 1", stage, field)
    assert first.row_a == first.row_b == sample
    if token is not None:
        length = len(
            Recording(recorded_run).rollout(1).table("samples")["loss_mask"][sample].as_py()
        )
        assert first.token == token % length if token < 0 else first.token == token
    assert sum(one.num_differences for one in report.rollouts) <= 2
    assert rollout.context[0].startswith("sample ") and f"position {sample}" in rollout.context[0]


@pytest.mark.parametrize("plant", JSON_PLANTS, ids=lambda plant: "-".join(map(str, plant[:2])))
def test_one_value_of_a_json_part_is_named_with_its_stage(plant, recorded_run, tmp_path):
    """Replies, gate, split, steps, digests and metrics, each in the stage that makes it."""
    part, _, change = plant
    stage, field = JSON_PLANTS[plant]
    other = copy_of(recorded_run, tmp_path / "b")
    edit_json(other, part, change)
    report = compare_paths(recorded_run, other)
    rollout, first = report.first
    assert (rollout.name, report.first_stage, first.field) == ("rollout 1", stage, field)
    if part == "replies":
        # the second of four samples of the third request
        assert first.row_a == 9 and "(position 9)" in "\n".join(describe(report))
    if field == "reply":
        assert first.token == 3


def test_options_and_code_are_told_apart_from_the_data(recorded_run, tmp_path, capsys):
    """What the runs were started with is listed first; the first difference of the data is named
    beside it; what is allowed does not count."""
    other = copy_of(recorded_run, tmp_path / "b")
    edit_run(other, lambda record: record["options"].update(lr=0.5))
    assert compare_paths(recorded_run, other).first_stage is DiffStage.OPTION
    assert main([str(recorded_run), str(other), "--allow-options", "seed,l*"]) == 0
    assert "options differ: lr: 0.001 in A, 0.5 in B (allowed)" in capsys.readouterr().out
    edit_column(other, "train", "log_probs", 3, at(2, -1.5))
    assert main([str(recorded_run), str(other)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "options differ: lr: 0.001 in A, 0.5 in B"
    assert lines[2].startswith("first difference in the data: rollout 1, log-prob: sample ")
    code = copy_of(recorded_run, tmp_path / "c")
    edit_run(code, lambda record: record.update(code="0" * 32))
    edit_run(code, lambda record: record["versions"].update(torch="9.9"))
    report = compare_paths(recorded_run, code)
    assert report.first_stage is DiffStage.CODE and report.first is None
    assert [one.name for one in report.options] == ["versions.torch", "code"]
    allowed = Choice(allowed=("code", "versions.*"))
    assert compare_paths(recorded_run, code, allowed).identical


def test_later_stages_and_rollouts_are_consequences(recorded_run, tmp_path):
    """A token, and what follows from it: the reward of the sample, the baselines of its group, and
    everything of the next rollout."""
    other = copy_of(recorded_run, tmp_path / "b")
    edit_column(other, "samples", "tokens", 5, at(-1, 77), rollout_id=0)
    edit_column(other, "samples", "reward", 5, lambda text: "0.125", rollout_id=0)
    for row in range(4, 8):
        edit_column(other, "columns", "rewards", row, lambda value: 0.3, rollout_id=0)
    edit_column(other, "columns", "rewards", 20, lambda value: 0.3, rollout_id=0)
    edit_column(other, "samples", "prompt", 2, lambda text: text + "!")
    report = compare_paths(recorded_run, other)
    rollout, first = report.first
    assert (rollout.name, first.stage, first.row_a) == ("rollout 0", DiffStage.REPLY, 5)
    rows = {(row.stage, row.field): row for row in rows_of(report)}
    assert rows[DiffStage.REWARD, "reward"].role == "consequence"
    assert rows[DiffStage.PROMPT, "prompt"].role == "consequence"  # a rollout later
    # the baseline of another group follows from nothing
    assert (
        rows[DiffStage.BASELINE, "rewards"].samples,
        rows[DiffStage.BASELINE, "rewards"].new,
    ) == (5, 1)


def test_a_missing_sample_does_not_make_every_other_differ(recorded_run, tmp_path):
    """Samples are matched by identity where one side lacks some; parts made of them follow."""
    other = copy_of(recorded_run, tmp_path / "b")
    folder = manifest.rollout_folder(other, 1)
    for part in ("samples", "columns", "schedule", "train"):
        table = tables.read_table(folder / manifest.PARTS[part][0])
        kept = table.filter([row != 5 for row in range(len(table))])
        for name in ("raw_row", "position"):
            if name in kept.column_names:
                places = [one - (one > 5) for one in kept[name].to_pylist()]
                field = kept.schema.field(name)
                kept = kept.set_column(
                    kept.schema.get_field_index(name), field, [tables_array(places, field)]
                )
        replace_part(other, part, lambda file, table=kept: write_table(file, table))
    report = compare_paths(recorded_run, other)
    rollout, first = report.first
    assert (first.stage, first.field, first.row_a, first.row_b) == (
        DiffStage.PROMPT,
        "position",
        5,
        None,
    )
    assert rollout.only_a == ["1 sample, the first at position 5"]
    assert {one.field for one in rollout.differing} == {"position"}
    assert rollout.num_samples == 31


def tables_array(values, field):
    import pyarrow

    return pyarrow.array(values, field.type)


def test_the_critics_steps_are_compared(recorded_run, tmp_path):
    """They are a part of their own, written by the critic's ranks."""
    sides = []
    for name, value in (("a", 0.25), ("b", 0.5)):
        side = copy_of(recorded_run, tmp_path / name)
        folder = manifest.rollout_folder(side, 1)
        manifest.write_manifest(folder, manifest.Manifest(1, manifest.CRITIC, 0))
        record = {"step_key": "train/step", "step": 2, "metrics": {"train/critic-loss": value}}
        part = manifest.Part("critic_steps", "critic_steps.jsonl", 0, "0" * 32, 1, 1)
        found = manifest.Manifest(1, manifest.CRITIC, 0, parts={"critic_steps": part})
        manifest.write_manifest(folder, found)
        text = json.dumps(record) + "\n"
        replace_part(side, "critic_steps", lambda file, text=text: file.write_text(text))
        sides.append(side)
    _, first = compare_paths(*sides).first
    assert (first.stage, first.part, first.field, first.path) == (
        DiffStage.STEP,
        "critic_steps",
        "train/critic-loss",
        ("train/step 2",),
    )


def test_a_field_of_a_plug_in_stands_in_its_stage(recorded_run, tmp_path):
    """What a plug-in computes in training is declared in the recording, and need not be here."""
    from slime.data.fields import CONTRACT, Origin, Scope

    spec = dataclasses.asdict(dataclasses.replace(CONTRACT["kl"], name="surprise", help=""))
    values = {k: v.value if isinstance(v, enum.Enum) else v for k, v in spec.items()}
    other = copy_of(recorded_run, tmp_path / "b")
    same = copy_of(recorded_run, tmp_path / "a")
    for side in (same, other):
        path = manifest.rollout_folder(side, 1) / "train.parquet"
        table = tables.read_table(path)
        field = table.schema.field("kl").with_name("surprise")
        table = table.append_column(field, table["kl"])
        known = json.loads(table.schema.metadata[b"slime_contract"])
        metadata = {b"slime_contract": json.dumps([*known, {**values, "tolerance": 1e-3}])}
        table = table.replace_schema_metadata({**table.schema.metadata, **metadata})
        replace_part(side, "train", lambda file, table=table: write_table(file, table))
    try:
        edit_column(other, "train", "surprise", 3, at(1, 0.5))
        _, first = compare_paths(same, other).first
        assert (first.stage, first.field, first.token) == (DiffStage.ADVANTAGE, "surprise", 1)
        assert CONTRACT["surprise"].layout_tolerance == 1e-3
        assert CONTRACT["surprise"].scope is Scope.TOKEN
        assert CONTRACT["surprise"].origin is Origin.TRAINING
    finally:
        CONTRACT.remove("surprise")


def test_groups_that_a_filter_replaced_are_the_verdicts_doing(recorded_run, tmp_path):
    """Where groups were dropped, a group more follows from what was sampled before it."""
    sides = []
    for name, num_rows in (("a", 32), ("b", 28)):
        side = copy_of(recorded_run, tmp_path / name)
        path = manifest.rollout_folder(side, 1) / "samples.parquet"
        table = tables.read_table(path).slice(0, num_rows)
        reasons = [None] * (num_rows - 4) + ["zero_std"] * 4
        place = table.schema.get_field_index("dropped_by")
        field = table.schema.field(place)
        table = table.set_column(place, field, tables_array(reasons, field))
        replace_part(side, "samples", lambda file, table=table: write_table(file, table))
        sides.append(side)
    report = compare_paths(*sides, Choice(1, 1))
    assert report.rollouts[0].only_a == ["4 samples, the first at position 28"]
    assert report.first_stage is DiffStage.VERDICT
    edit_column(sides[1], "samples", "reward", 2, lambda text: "0.125")
    assert compare_paths(*sides, Choice(1, 1)).first_stage is DiffStage.REWARD


def test_the_same_recording_is_identical_to_its_copy(recorded_run, tmp_path, capsys):
    """Status 0 and one line."""
    other = copy_of(recorded_run, tmp_path / "b")
    assert main([str(recorded_run), str(other), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["identical"] and found["first_cause"] is None
    assert (
        list(found["rollouts"])
        == ["evaluation 0", "rollout 0", "rollout 1", "evaluation 2"][: len(found["rollouts"])]
    )


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
