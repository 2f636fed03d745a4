"""The ledger of a run: after any kills and resumes each sample is trained once, dropped for a reason or
waiting, and `slime ledger` names whoever breaks that.
"""

import os
import random
import re
import shutil
import sys
import threading
import types
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also as `python tests/...`
from support.ledger_runs import SimulatedRun, edit_entries, proof_of
from support.manager import dirty_rollout, manager_of
from support.recordings import edit_column, edit_run
from support.rollout_args import rollout_args, write_prompts

from slime.data import run_ledger as entries
from slime.data.ledger_audit import difference, overlaps
from slime.exceptions import ConfigError, RolloutDataError
from slime.files.ledger_file import FILE_NAME, decode_entry, encode_entry
from slime.files.rollout_dump import read_rollout_dump, save_debug_rollout_data
from slime.harness.ledger import main as ledger_main
from slime.prompts import data_source as data_source_module
from slime.prompts.data_source import RolloutDataSourceWithBuffer
from slime.recording.reader import Recording

NUM_GPUS = 0


# --- what survives --------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [False, True], ids=["synchronous", "one rollout ahead"])
def test_after_kills_at_any_moment_every_sample_is_accounted_for_once(tmp_path, capsys, ahead):
    """Twelve runs of eight rollouts, each killed four times at random moments: between handing out
    and commit, between data position and ledger, before and after the pointer moves."""
    for seed in range(12):
        folder = tmp_path / str(seed)
        folder.mkdir()
        run, rng = SimulatedRun(folder, seed, ahead=ahead), random.Random(seed)
        for _ in range(4):
            run.until_killed(8, rng.randrange(1, 45))
        assert run.until_killed(8)
        status, proof = proof_of(folder / "save", capsys)
        assert (status, proof["culprits"]) == (0, []), seed
        gone = sum(proof["dropped"].values())
        assert proof["rollouts"] == 8 and proof["trained"] > 0
        assert proof["sampled"] == proof["trained"] + gone
        assert proof["handed_out"] == proof["sampled"] + proof["waiting"]
        first_epoch = proof["epochs"]["0"]
        assert first_epoch == {"prompts": 7, "used": 7, "waiting": 0}


@pytest.mark.parametrize("ahead", [False, True], ids=["synchronous", "one rollout ahead"])
def test_after_lost_managers_every_sample_is_accounted_for_once(tmp_path, capsys, ahead):
    """Ten runs of eight rollouts whose manager is lost at random moments, also after a rollout was
    handed out and before it has trained; then a resume from the checkpoint of the last."""
    for seed in range(10):
        folder = tmp_path / str(seed)
        folder.mkdir()
        run = SimulatedRun(folder, seed, ahead=ahead)
        run.with_lost_managers(8, random.Random(seed))
        status, proof = proof_of(folder / "save", capsys)
        assert (status, proof["culprits"]) == (0, []), seed
        assert proof["rollouts"] == 8 and proof["epochs"]["0"] == {"prompts": 7, "used": 7, "waiting": 0}  # fmt: skip
        assert len(proof["lineage"]) > 1
        assert run.until_killed(10)
        status, proof = proof_of(folder / "save", capsys)
        assert (status, proof["culprits"], proof["rollouts"]) == (0, [], 10), seed


def test_what_came_after_the_checkpoint_is_superseded(tmp_path, capsys):
    """Rollouts 2 and 3 of a start that was killed in rollout 3 count once, as the next one ran
    them."""
    run = SimulatedRun(tmp_path, 1)
    assert not run.until_killed(6, 30)  # in rollout 3: rollout 1 is saved, 2 has trained
    assert run.until_killed(6)
    _, proof = proof_of(tmp_path / "save", capsys)
    assert [(one["first"], one["last"]) for one in proof["lineage"]] == [(0, 1), (2, 5)]
    assert {one["rollout"] for one in proof["superseded"]} >= {2}


def test_a_run_in_another_folder_takes_the_books_along(tmp_path, capsys):
    """--load A --save B: B's ledger proves the samples of A's rollouts too, without A."""
    run = SimulatedRun(tmp_path, 2)
    assert run.until_killed(4)
    run.args.load, run.args.save = str(run.save_folder), str(tmp_path / "other")
    source = RolloutDataSourceWithBuffer(run.args)
    source.load(3)
    run.source, run.ledger = source, run.ledger.__class__(run.args, source)
    run.train = run.train.__class__(run.args, run.ledger.begin(4))
    run.steps_left, run.save_folder = None, tmp_path / "other"
    run.train.enter(4, run.generate(4), {})
    run.save(4)
    status, proof = proof_of(tmp_path / "other", capsys)
    assert (status, proof["rollouts"], proof["culprits"]) == (0, 5, [])


def test_a_checkpoint_without_a_ledger_is_resumed_with_a_warning(tmp_path, capsys, caplog):
    """Checkpoints of earlier versions go on; their samples are not on record, and the proof says
    so."""
    run = SimulatedRun(tmp_path, 3)
    assert run.until_killed(4)
    (tmp_path / "save" / FILE_NAME).unlink()
    assert run.until_killed(6)
    assert "is missing" in caplog.text
    status, proof = proof_of(tmp_path / "save", capsys)
    assert status == 0 and proof["rollouts"] == 2


# --- who is named ---------------------------------------------------------------------------------


@pytest.fixture
def finished(tmp_path):
    """The folder of a run of six rollouts in two starts."""
    run = SimulatedRun(tmp_path, 5)
    run.until_killed(6, 30)
    assert run.until_killed(6)
    return tmp_path / "save"


def of_rollout(number, change):
    """Changes the entries of one rollout."""

    def edit(entry):
        if entry["kind"] == "rollout" and entry["rollout"] == number:
            change(entry)
        return entry

    return edit


def first_planned(entry):
    return next(runs[0] for runs in entry["planned"].values() if runs)


def train_again(entry):
    entry["planned"]["0"] = [[0, 1], *entry["planned"].get("0", [])]
    entry["counts"]["planned"] += 1


def lose(entry):
    for runs in entry["planned"].values():
        if runs:
            runs[0][0] += 1
            runs[0][1] -= 1
            runs[:] = [run for run in runs if run[1]]
            entry["counts"]["planned"] -= 1
            return


def drop_without_reason(entry):
    index = first_planned(entry)[0]
    lose(entry)
    entry["dropped"][""] = [[index, 1]]


def serve_again(entry):
    entry["served"] = [[0, 0, 0, 1], *entry["served"]]


PLANTED = {
    "a sample that trained in two rollouts": (of_rollout(4, train_again), "sample 0 "),
    "a sample that vanished": (of_rollout(2, lose), "neither trained nor dropped"),
    "a sample dropped without a reason": (of_rollout(3, drop_without_reason), "without a reason"),
    "a prompt that was used twice": (of_rollout(5, serve_again), "used up in rollout"),
    "a rollout without an entry": (
        lambda entry: None if (entry["kind"], entry.get("rollout")) == ("rollout", 1) else entry,
        "rollout 1 has no entry",
    ),
    "a rollout that never trained": (
        lambda entry: None if (entry["kind"], entry.get("rollout")) == ("trained", 4) else entry,
        "rollout 4 was planned and not trained",
    ),
    "a start without an entry": (
        lambda entry: None if entry["kind"] == "start" and entry["first"] == 0 else entry,
        "is missing or damaged",
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_what_was_planted_is_named(finished, capsys, name):
    """Sealed anew, so that only the books can tell: status 1, and the culprit with its rollout."""
    change, words = PLANTED[name]
    edit_entries(finished, change)
    status, proof = proof_of(finished, capsys)
    assert status == 1 and any(words in one["message"] for one in proof["culprits"])
    assert ledger_main([str(finished)]) == 1 and "PROBLEM" in capsys.readouterr().out


@pytest.fixture
def recorded(recorded_run, tmp_path):
    """A copy of a run that was recorded and dumped: its folder, with recording/ and dumps/ in it."""
    shutil.copytree(recorded_run.parent / "run", tmp_path / "run")
    config = (tmp_path / "run" / "config.yaml").read_text()
    for name in ("recording", "dumps", "save"):
        shutil.copytree(recorded_run.parent / name, tmp_path / name)
        config = config.replace(str(recorded_run.parent / name), str(tmp_path / name))
    (tmp_path / "run" / "config.yaml").write_text(config)
    edit_entries(tmp_path / "save", lambda entry: moved(entry, str(tmp_path / "run")))
    return tmp_path


def moved(entry, run_dir):
    return {**entry, "run_dir": run_dir} if entry["kind"] == "start" else entry


def first_row(folder, column, wanted):
    values = Recording(folder / "recording").rollout(1).table("samples")[column].to_pylist()
    return values.index(wanted)


def reject_one(folder):
    row = first_row(folder, "valid", True)
    for column, value in (("valid", False), ("reason", "bad_token")):
        edit_column(folder / "recording", "samples", column, row, lambda _, value=value: value)


def accept_one(folder):
    row = first_row(folder, "valid", False)
    for column, value in (("valid", True), ("reason", None)):
        edit_column(folder / "recording", "samples", column, row, lambda _, value=value: value)


def forget_a_sample(folder):
    edit_column(folder / "recording", "columns", "sample_index", 3, lambda _: 0)


def train_in_another_step(folder):
    edit_column(folder / "recording", "schedule", "step", 3, lambda step: 1 - step)


def train_on_no_rank(folder):
    edit_column(folder / "recording", "train", "dp_rank", 3, lambda _: -1)


def dump_without_a_sample(folder):
    edit_dump(folder, lambda samples: samples[1:])


def dump_of_a_rejected_sample(folder):
    def reject(samples):
        one = next(sample for sample in samples if sample.valid)
        one.valid, one.invalid_reason = False, "bad_token"
        return samples

    edit_dump(folder, reject)


def edit_dump(folder, change):
    samples = read_rollout_dump(folder / "dumps" / "1.parquet")
    template = str(folder / "dumps" / "{rollout_id}.parquet")
    save_debug_rollout_data(template, change(samples), rollout_id=1, evaluation=False)


@pytest.mark.parametrize("plant, words", [
    (None, None),
    (reject_one, r"recording_differs: sample \d+ is planned in the ledger of rollout 1; the recording has bad_token"),
    (accept_one, r"recording_differs: sample \d+ was dropped \(\w+\) in .* has no reason against it"),
    (forget_a_sample, r"recording_differs: sample \d+ is in step \d of rollout 1 in the ledger; .* has no step"),
    (train_in_another_step, r"recording_differs: sample \d+ is in step \d of .* has step \[\d\]"),
    (train_on_no_rank, r"recording_differs: sample \d+ is in step \d .* has no rank that trained it"),
    (dump_without_a_sample, r"dump_differs: sample \d+ of rollout 1 is not in 1.parquet"),
    (dump_of_a_rejected_sample, r"dump_differs: sample \d+ is planned in .*; the dump has bad_token"),
])  # fmt: skip
def test_the_books_are_those_of_the_recording_and_the_dumps(plant, words, recorded, capsys):
    """Verdicts, steps and trained samples of a real run agree in all three; one value that was
    changed in the recording or in a dump is named with its sample."""
    if plant is not None:
        plant(recorded)
    status = ledger_main([str(recorded / "run")])
    shown = capsys.readouterr().out
    assert "2 rollouts in the recording, 2 rollouts in dumps" in shown, shown
    assert status == int(plant is not None), shown
    assert plant is None or re.search(f"PROBLEM {words}", shown), shown


def test_what_an_earlier_start_recorded_is_not_held_against_a_later_one(recorded, capsys):
    """A run that was resumed without --record, and went over the same rollouts again: what the
    earlier start recorded and dumped of them is superseded, and a note says so."""
    accept_one(recorded)
    dump_without_a_sample(recorded)
    os.utime(recorded / "dumps" / "1.parquet", (1, 1))
    edit_run(recorded / "recording", lambda record: record.update(time=4e9))
    assert ledger_main([str(recorded / "run")]) == 0
    shown = capsys.readouterr().out
    assert f"note: rollout 1 of {recorded / 'recording'} is of another start" in shown, shown
    assert "note: 1.parquet is of an earlier start" in shown and "1 rollouts in dumps" in shown


def test_a_resume_with_books_that_do_not_fit_is_refused(finished, tmp_path):
    """A group that the data position serves again, and the books have as used up, is named."""
    path = finished / "rollout" / "global_dataset_state_dict_5.json"
    state = data_source_module.read_state(path)
    state["untrained"].append({"group_index": 1, "first_index": 2, "epoch_id": 0, "offset": 1})
    data_source_module.write_json(path, state)
    with pytest.raises(ConfigError, match=r"group 1 \(prompt 1 of epoch 0\) is served again"):
        SimulatedRun(tmp_path, 5).until_killed(8)


def test_a_run_whose_books_do_not_add_up_ends_with_the_culprit(tmp_path):
    """The end of a run is not a success where a sample is lost."""
    run = SimulatedRun(tmp_path, 6)
    real = run.generate

    def generate(rollout):
        num = real(rollout)
        if rollout == 1:
            edit_entries(tmp_path / "save", of_rollout(1, lose))
            num -= 1
        return num

    run.generate = generate
    with pytest.raises(RolloutDataError, match="neither trained nor dropped"):
        run.until_killed(2)


def test_every_flipped_bit_of_a_surviving_entry_is_noticed(finished, capsys):
    """One bit in each of 60 places of the file: named, or in a line that was superseded."""
    path, rng = finished / FILE_NAME, random.Random(0)
    content = path.read_bytes()
    for _ in range(60):
        at = rng.randrange(len(content))
        changed = bytearray(content)
        changed[at] ^= 1 << rng.randrange(8)
        path.write_bytes(changed)
        status, proof = proof_of(finished, capsys)
        assert status != 0 or proof["notes"], at


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "it is empty"),
        (b"\xff\xfe\x00" * 50, "holds no entry of a start"),
        (b"[" * 100000, "holds no entry of a start"),
        (b'{"blake2b":"00","state":{"kind":"start"}}\n', "its hash differs"),
    ],
)
def test_a_file_that_is_no_ledger_is_an_error_of_one_line(tmp_path, capsys, content, words):
    """Status 2, and what is wrong with the file."""
    (tmp_path / FILE_NAME).write_bytes(content)
    assert ledger_main([str(tmp_path)]) == 2
    assert words in capsys.readouterr().err
    assert ledger_main([str(tmp_path / "nothing")]) == 2


@pytest.mark.parametrize(
    "field, value",
    [("rollout", -1), ("planned", {"0": [[0, 1 << 60]]}), ("served", [[1]]), ("mark", {"groups": "x"})],
)  # fmt: skip
def test_an_entry_with_values_of_another_kind_is_unreadable(finished, capsys, field, value):
    """Sealed nonsense is no entry: its rollout is missing then."""
    edit_entries(finished, of_rollout(2, lambda entry: entry.update({field: value})))
    status, proof = proof_of(finished, capsys)
    assert status == 1 and any("cannot be read" in note for note in proof["notes"])


# --- what a rollout enters ------------------------------------------------------------------------


def test_the_manager_enters_each_sample_with_its_reason(tmp_path, monkeypatch):
    """Sixteen samples, five of which the gate rejects: who trains in which step, and why the others
    do not."""
    samples = dirty_rollout()
    manager = manager_of(
        samples, tmp_path, monkeypatch, rollout_function_path="support.manager.dirty_rollout"
    )
    manager.data_source.get_samples(4)
    manager.begin_ledger(0)
    manager.generate(0)
    manager.ledger.close()
    lines = (tmp_path / FILE_NAME).read_bytes().splitlines()
    entry = next(one for one in map(decode_entry, lines) if isinstance(one, entries.RolloutEntry))
    trained = sorted(i for runs in entry.planned.values() for i in entries.numbers_in(runs))
    gone = {i: why for why, runs in entry.dropped.items() for i in entries.numbers_in(runs)}
    assert sorted([*trained, *gone]) == list(range(16)) and len(gone) == 5
    assert gone[11] == "empty" and gone[14] == "truncated" and gone[6] == "bad_reward"
    assert entry.counts == {"sampled": 16, "planned": 11, "dropped": 5, "copies": 0}
    manager.gate.close()


def test_a_sample_with_several_rows_trains_once(tmp_path):
    """Rows of one sample are one sample; a reason against one of its rows does not drop it; an index
    beyond the stream names no sample."""
    account = entries.account_of(
        [(0, None), (1, "empty"), (9, None)],
        [(0, 1, None), (0, 0, None), (0, -1, "trailing"), (2, 0, None)],
        [("dynamic_filter", 2), ("dynamic_filter", None)],
        num_samples=4,
        used_samples=range(4),
    )
    assert account.planned == {0: ((0, 1),)} and account.rows == {0: 2}
    assert account.dropped == {
        "dynamic_filter": ((2, 1),),
        "empty": ((1, 1),),
        "left_out_by_rollout_function": ((3, 1),),
    }
    assert account.unnamed == {"": 1, "dynamic_filter": 1}


def test_groups_that_are_handed_out_during_a_save_are_not_forgotten(tmp_path, monkeypatch):
    """The fully asynchronous worker asks for groups while the state is written: they are in the
    next state."""
    args = rollout_args(
        prompt_data=write_prompts(tmp_path / "p.jsonl", 12), save=str(tmp_path / "s"), load=None
    )
    source = RolloutDataSourceWithBuffer(args)
    source.commit(0, [group[0].group_index for group in source.get_samples(2)])
    real, taken, workers = source._untrained, [], []

    def interrupted(rollout_id):
        found = real(rollout_id)
        workers.append(threading.Thread(target=lambda: taken.extend(source.get_samples(1))))
        workers[-1].start()
        workers[-1].join(0.3)
        return found

    monkeypatch.setattr(source, "_untrained", interrupted)
    source.save(0)
    monkeypatch.setattr(source, "_untrained", real)
    for worker in workers:
        worker.join()
    assert taken and {group[0].group_index for group in taken} <= {
        origin.group_index for origin in source._untrained(1)
    }


def test_entries_read_back_as_they_were_written():
    """Every kind of entry, with each of its fields."""
    mark = entries.StreamMark(9, 1, 2, 7, 4)
    for entry in (
        entries.Start("a", 1.5, "/run", 3, (("b", 0, 2),), mark, ((1, 2),), "/load", "a note"),
        entries.RolloutEntry("a", 3, 2.5, "p", mark, ((0, 1, 2, 3),), ((4, 1),), False, {1: ((0, 4),)},
                             {"empty": ((5, 1),)}, {0: 2}, {"": 1}, {"planned": 6}),
        entries.TrainedEntry("a", 3, 3.5, "p", 5, {"update_skipped": ((0, 1),)}, 2),
    ):  # fmt: skip
        assert decode_entry(encode_entry(entry).rstrip(b"\n")) == entry


def test_runs_hold_what_was_put_in():
    """Sets of numbers as runs, what two of them share, and what one has alone."""
    assert entries.runs_of([5, 1, 2, 3, 2]) == ((1, 2), (2, 1), (3, 1), (5, 1)) or entries.runs_of(
        [5, 1, 2, 3]
    ) == ((1, 3), (5, 1))
    rng = random.Random(1)
    for _ in range(200):
        one, other = ({rng.randrange(30) for _ in range(12)} for _ in range(2))
        spans = [[(f, f + n) for f, n in entries.runs_of(part)] for part in (one, other)]
        left = {i for first, end in difference(*spans) for i in range(first, end)}
        assert left == one - other
        both = [(f, e, side, "x") for side, part in enumerate(spans) for f, e in part]
        shared = {i for first, end, _, _ in overlaps(both) for i in range(first, end)}
        assert shared == one & other


def test_a_full_disk_keeps_entries_for_the_next_write(tmp_path, monkeypatch):
    """What the disk refused is written with the next entry, and no line twice or torn."""
    from slime.files import ledger_file

    writer = ledger_file.LedgerWriter(tmp_path)
    entry = entries.TrainedEntry("a", 0, 1.0, "p", 1, {})
    real, calls = ledger_file.os.write, []

    def half(descriptor, content):
        calls.append(len(content))
        return real(descriptor, content[: len(content) // 2] if len(calls) == 1 else content)

    fake = types.SimpleNamespace(
        **{name: getattr(ledger_file.os, name) for name in dir(ledger_file.os)}
    )
    fake.write = half
    monkeypatch.setattr(ledger_file, "os", fake)
    assert isinstance(writer.append([entry]), OSError)
    assert writer.append([entries.TrainedEntry("a", 1, 1.0, "p", 1, {})]) is None
    writer.close()
    books = ledger_file.read_books(tmp_path / FILE_NAME)
    assert sorted(books.trained) == [("a", 0), ("a", 1)] and len(books.unreadable) == 1


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
