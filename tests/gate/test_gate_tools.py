"""`slime gate`: the commands on a real dump and a real run folder."""

import argparse
import functools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pytest
from support.gate_golden import GOLDEN_CONFIG, load_corpus, load_tokenizer
from support.gate_samples import sound_sample
from support.rollout_args import rollout_args

from slime.commands.gate import main
from slime.config.specs import all_specs
from slime.config.yaml_file import read_option_file
from slime.data.sample import Status
from slime.exceptions import ConfigError
from slime.files.rollout_dump import save_debug_rollout_data
from slime.gate import Gate, GateConfig, postprocess_output_data, tools
from slime.gate.alignment import Codec
from slime.gate.config import MismatchCause
from slime.gate.snapshots import SnapshotWriter
from slime.recording.manifest import ROLLOUT
from slime.recording.rollout_side import RolloutRecorder
from slime.recording.writer import PartWriter

NUM_GPUS = 0


@functools.lru_cache(maxsize=1)
def tokenizer():
    return load_tokenizer()


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer().save_pretrained(folder)
    return str(folder)


def dump(tmp_path, samples):
    return str(
        save_debug_rollout_data(
            str(tmp_path / "dump_{rollout_id}.jsonl"), samples, rollout_id=0, evaluation=False
        )
    )


def rollout(count=40, num_cut=10):
    cut = {"status": Status.TRUNCATED, "finish_reason": "length"}
    return [sound_sample(i, length=10 + i, **(cut if i < num_cut else {})) for i in range(count)]


def test_check_prints_a_table_of_reasons_and_fails_above_a_rate(tmp_path, capsys):
    """`check` prints a table of reasons and returns 1 above --max-drop-rate."""
    path = dump(tmp_path, rollout())
    assert main(["check", path]) == 0
    out = capsys.readouterr().out
    assert "truncated" in out and "25.0 %" in out and "30 of 40 kept" in out
    assert main(["check", path, "--max-drop-rate", "0.2"]) == 1
    assert main(["check", path, "--max-drop-rate", "0.2", "--gate-keep-truncated"]) == 0
    assert "kept: truncated" in capsys.readouterr().out


def test_ends_shows_the_kept_samples_with_the_lowest_and_highest_rewards(tmp_path, capsys):
    """`ends` shows the kept samples at both ends of the reward and how to read them: checks too
    weak or too loose."""
    samples = rollout(10, 0)
    samples[9].valid = False
    assert tools.reward_ends(samples, 3) == ([0, 1, 2], [8, 7, 6])
    assert tools.reward_ends(samples[:2], 3) == ([0, 1], [1, 0])
    assert main(["ends", dump(tmp_path, samples), "--num", "2"]) == 0
    out = capsys.readouterr().out
    assert (
        f"label {samples[0].label!r}\n      prompt   {samples[0].prompt!r}\n      response "
        f"{samples[0].response!r}" in out
    )
    assert (
        "lowest rewards\n  #0 group 0 reward 0.0" in out
        and "too weak" in out
        and "too loose" in out
    )


def test_a_two_peaked_reward_with_many_zeros_asks_for_a_look(tmp_path):
    """A reward with many zeros and two peaks asks whether empty, cut or malformed samples were
    kept."""
    samples = [sound_sample(i, reward=(i % 2) * (1 + 0.01 * (i % 20))) for i in range(40)]
    lines = tools.reward_shape(samples)
    assert "zeros 50.0 %" in lines[0] and "two peaks" in lines[1] and "truncated" in lines[1]
    one_peak = [0, 1, 1, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 5, 5, 6]
    assert (
        len(
            tools.reward_shape(
                [sound_sample(i, reward=float(value)) for i, value in enumerate(one_peak)]
            )
        )
        == 1
    )
    # every value once: no peak
    assert len(tools.reward_shape([sound_sample(i, reward=float(i)) for i in range(16)])) == 1
    assert tools.reward_shape([]) == ["no valid sample has a reward"]


def test_check_says_which_flag_of_the_run_is_missing(tmp_path, tokenizer_folder, capsys):
    """`check` names the flag to give where every text differs because the run hid special
    tokens."""
    samples, expected = load_corpus()
    valid = [
        sample for sample, row in zip(samples, expected, strict=True) if row["reason"] is None
    ][:30]
    line = ["check", dump(tmp_path, valid), "--hf-checkpoint", tokenizer_folder]
    main(line)
    assert "give --rollout-skip-special-tokens if the run had it" in capsys.readouterr().out
    main([*line, "--rollout-skip-special-tokens"])
    assert "if the run had it" not in capsys.readouterr().out


def test_align_lists_every_mismatch_with_its_cause_token_by_token(
    tmp_path, tokenizer_folder, capsys
):
    """On the corpus `align` finds exactly the differences that were put there, with their four
    causes."""
    samples, expected = load_corpus()
    found = tools.find_mismatches(
        samples, Codec(tokenizer()), stop_strings=GOLDEN_CONFIG.stop_strings
    )
    put = {
        i
        for i, row in enumerate(expected)
        if row["reason"] == "misaligned" and "text and tokens" in row["detail"]
    }
    assert {mismatch.position for mismatch in found} == put and len(put) == 8
    assert {mismatch.cause for mismatch in found} == set(MismatchCause)
    sample = next(m for m in found if m.cause is MismatchCause.SHIFTED_IDS)
    lines = tools.describe_mismatch(sample)
    assert (
        "shifted_ids at character" in lines[0]
        and "tokens" in lines[3]
        and ":" in lines[3]
        and "sampler" in lines[4]
    )
    assert (
        main(
            [
                "align",
                dump(tmp_path, [samples[i] for i in sorted(put)]),
                "--hf-checkpoint",
                tokenizer_folder,
            ]
        )
        == 1
    )
    assert f"{len(put)} of {len(put)} texts differ" in capsys.readouterr().out
    valid = [
        sample for sample, row in zip(samples, expected, strict=True) if row["reason"] is None
    ][:30]
    assert main(["align", dump(tmp_path, valid), "--hf-checkpoint", tokenizer_folder]) == 0


def test_groups_finds_mixed_prompts_and_moved_members(tmp_path, capsys):
    """`groups` finds samples with different prompts in one group and samples that moved since
    sampling; training itself looks normal then."""
    samples = rollout(12, 0)
    path = dump(tmp_path, samples)
    assert main(["groups", path]) == 0
    assert "3 groups, sizes {4: 3}" in capsys.readouterr().out
    moved = rollout(12, 0)
    moved[3].group_index, moved[5].index = 1, 4
    assert tools.compare_groups(moved, samples) == [
        "sample index 3: group 0 when sampled, 1 now",
        "sample index 4 appears twice",
    ]
    (tmp_path / "m").mkdir()
    assert main(["groups", dump(tmp_path / "m", moved), "--against", path]) == 1
    assert "group 1 holds samples of different prompts" in capsys.readouterr().out


def test_suggest_takes_the_one_percent_quantile_of_responses_that_ended(tmp_path, capsys):
    """`suggest` measures responses that ended by themselves: lengths 101 to 200 give the minimum
    101, and cut ones do not count."""
    samples = [sound_sample(i, length=101 + i) for i in range(100)]
    samples += [sound_sample(200 + i, length=1, finish_reason="length") for i in range(50)]
    suggestion = tools.suggest_thresholds(samples)
    assert (
        suggestion.num_measured,
        suggestion.min_response_tokens,
        suggestion.max_response_tokens,
    ) == (100, 101, 300)
    assert tools.suggest_thresholds(samples, context_length=205).margin == 0.1
    assert main(["suggest", dump(tmp_path, samples)]) == 0
    assert "--gate-min-response-tokens 101" in capsys.readouterr().out
    with pytest.raises(ValueError, match="ended by itself"):
        tools.suggest_thresholds(samples[100:])


def test_suggest_writes_its_thresholds_into_an_options_file(tmp_path):
    """`suggest --apply` writes an options file that a run reads, beside the dump or into the run
    folder, for its newest snapshot."""
    samples = [sound_sample(i, length=101 + i) for i in range(100)]
    assert main(["suggest", dump(tmp_path, samples), "--apply"]) == 0
    specs = {spec.name: spec for spec in all_specs()}
    found = read_option_file(str(tmp_path / "gate_options.yaml"), specs)
    assert found.problems == [] and found.known == {
        "gate_min_response_tokens": 101, "gate_max_response_tokens": 300, "gate_context_margin": 0.05
    }  # fmt: skip
    run = tmp_path / "run"
    gate = Gate(GateConfig(), run_dir=run, snapshots=SnapshotWriter(run / "gate"))
    gate.run([sound_sample(i, length=40) for i in range(8)], 0)
    gate.close()
    assert (
        main(["suggest", str(run), "--apply"]) == 0
        and "gate_min_response_tokens: 40\n" in (run / "gate_options.yaml").read_text()
    )
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="has no raw snapshot"):
        main(["suggest", str(tmp_path / "empty"), "--apply"])
    with pytest.raises(ConfigError, match="--apply is an option of `slime gate suggest`"):
        main(["ends", dump(tmp_path, samples), "--apply"])


def test_doctor_runs_the_three_first_steps_when_the_loss_spikes(tmp_path, tokenizer_folder, capsys):
    """`doctor` shows drop statistics, length drift, and the alignment of a few samples, in this
    order."""
    gate = Gate(GateConfig(), run_dir=tmp_path, snapshots=SnapshotWriter(tmp_path / "gate"))
    for rollout_id in range(3):
        gate.run(rollout(200, 10), rollout_id)
    gate.run(
        [
            sound_sample(i, length=300 + i, finish_reason="length" if i < 80 else "stop")
            for i in range(200)
        ],
        3,
    )
    gate.close()
    assert main(["doctor", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    steps = [out.index(f"({step})") for step in (1, 2, 3)]
    assert (
        steps == sorted(steps)
        and "truncated" in out
        and "<-- rose" in out
        and "alarm drop_rate" in out
        and "PSI" in out
    )
    # of the three chosen samples only number 0 has ids inside this vocabulary, and its text is not
    # theirs
    assert main(["doctor", str(tmp_path), "--hf-checkpoint", tokenizer_folder, "--num", "3"]) == 1
    out = capsys.readouterr().out
    assert (
        "(3) alignment of raw_000003.parquet: 1 of 3 samples differ" in out and "shifted_ids" in out
    )


def test_a_recorded_run_writes_its_samples_once_and_the_tools_read_them(
    tmp_path, tokenizer_folder, capsys
):
    """With --record of every rollout there are no snapshots beside it, unless they are asked for;
    `doctor` and `suggest` take the newest samples of the recording."""
    args = rollout_args(run_dir=str(tmp_path), record=str(tmp_path / "rec"), record_every=1)
    gate = Gate.from_args(args)
    assert gate.snapshots is None
    for changes in ({"record": None}, {"record_every": 2}, {"gate_snapshots": 2}):
        other = argparse.Namespace(**{**vars(args), **changes})
        assert Gate.from_args(other).snapshots is not None
    assert (
        Gate.from_args(argparse.Namespace(**{**vars(args), "gate_snapshots": 0})).snapshots is None
    )
    recorder = RolloutRecorder(PartWriter(tmp_path / "rec", ROLLOUT, run=0))
    for rollout_id in (0, 1):
        (tmp_path / "rec").mkdir(exist_ok=True)
        samples = [sound_sample(i, length=300 + i) for i in range(200)]
        recorder.begin(rollout_id)
        recorder.gate(samples, gate.run(samples, rollout_id))
        recorder.close()
    gate.close()
    config = tmp_path / "config.yaml"
    config.write_text(f"hf_checkpoint: {tokenizer_folder}\nrecord: {tmp_path}/rec\n")
    assert main(["doctor", str(tmp_path), "--num", "3"]) == 1
    words = "(3) alignment of rollout_000001/samples.parquet: 1 of 3 samples differ"
    assert words in capsys.readouterr().out
    assert main(["suggest", str(tmp_path)]) == 0
    assert "measured on 200 responses" in capsys.readouterr().out


def test_doctor_takes_the_tokenizer_and_the_options_from_the_run(
    tmp_path, tokenizer_folder, capsys
):
    """`doctor` takes tokenizer and options from the run's config.yaml; given ones take
    precedence."""
    gate = Gate(GateConfig(), run_dir=tmp_path, snapshots=SnapshotWriter(tmp_path / "gate"))
    gate.run([sound_sample(i, length=300 + i) for i in range(200)], 0)
    gate.close()
    config = tmp_path / "config.yaml"
    config.write_text(f"hf_checkpoint: {tokenizer_folder}\nreward_key: score\nsome_old_option: 1\n")
    assert main(["doctor", str(tmp_path), "--num", "3"]) == 1
    out = capsys.readouterr().out
    assert (
        "(3) alignment of raw_000000.parquet: 1 of 3 samples differ" in out
        and "no valid sample has a reward" in out
    )
    assert main(["align", str(tmp_path / "gate" / "raw_000000.parquet")]) == 1
    assert main(["doctor", str(tmp_path), "--num", "3", "--reward-key", "none"]) == 1
    assert "200 rewards" not in capsys.readouterr().out
    config.write_text(f"hf_checkpoint: {tmp_path / 'gone'}\n")
    assert main(["doctor", str(tmp_path)]) == 0
    shown = capsys.readouterr()
    assert (
        f"the run's --hf-checkpoint {tmp_path / 'gone'} is not here" in shown.err
        and "give --hf-checkpoint FOLDER" in shown.out
    )


def test_rewards_of_a_few_values_have_shares_and_no_peaks():
    """Rewards of a few values, such as 0 and 1, are shown as shares and not called two peaks."""
    samples = [sound_sample(i, length=10, reward=float(i % 4 == 0)) for i in range(100)]
    assert tools.reward_shape(samples) == [
        "100 rewards, mean 0.2500, zeros 75.0 %",
        "2 values, 0: 75.0%, 1: 25.0%",
    ]
    graded = [sound_sample(i, length=10, reward=(0.0, 0.1, 1.0)[i % 3]) for i in range(99)]
    assert tools.reward_shape(graded)[1:] == ["3 values, 0: 33.3%, 0.1: 33.3%, 1: 33.3%"]
    assert len(tools.reward_shape([sound_sample(i, length=10, reward=1.0) for i in range(9)])) == 1


def test_doctor_forgets_the_rollouts_that_a_resume_generated_again(tmp_path, capsys):
    """`doctor` does not compare with rollouts of a run that died and was resumed before them."""
    for first, num_cut in ((0, 10), (2, 60), (2, 10)):
        gate = Gate(GateConfig(), run_dir=tmp_path)
        for rollout_id in range(first, 4 if num_cut == 60 else first + 2):
            gate.run(rollout(100, num_cut), rollout_id)
        gate.close()
    assert main(["doctor", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert (
        "rollout 3: 10.0 % invalid" in out
        and "truncated           10.0 %   before   10.0 %\n" in out
        and "alarm" not in out
    )


def test_a_snapshot_is_a_dump_for_every_command(tmp_path, capsys):
    """`slime gate check` judges a raw snapshot again as it judges a dump."""
    gate = Gate(GateConfig(), snapshots=SnapshotWriter(tmp_path))
    gate.run(rollout(40, 4), 7)
    gate.close()
    assert main(["check", str(tmp_path / "raw_000007.parquet"), "--max-drop-rate", "0.1"]) == 0
    assert "36 of 40 kept" in capsys.readouterr().out
    path = save_debug_rollout_data(
        str(tmp_path / "{rollout_id}.parquet"), rollout(40, 4), rollout_id=1, evaluation=False
    )
    assert main(["check", str(path)]) == 0 and "36 of 40 kept" in capsys.readouterr().out


def test_what_the_rollout_dropped_is_read_only_where_that_is_asked_for(tmp_path, capsys):
    """The commands read the batch of a snapshot, and with `--with-dropped` everything that was
    sampled; `groups --against` always looks among everything."""
    gate = Gate(GateConfig(), snapshots=SnapshotWriter(tmp_path))
    late = sound_sample(48)
    gate.run(
        rollout(40, 4),
        7,
        dropped_groups=[("dynamic_filter_x", [late, *(sound_sample(49 + i) for i in range(3))])],
    )
    gate.close()
    raw = str(tmp_path / "raw_000007.parquet")
    for words, line in (([], "36 of 40 kept"), (["--with-dropped"], "40 of 44 kept")):
        assert main(["check", raw, *words]) == 0 and line in capsys.readouterr().out
    assert main(["groups", raw]) == 0 and "10 groups" in capsys.readouterr().out
    assert main(["groups", raw, "--with-dropped"]) == 0 and "11 groups" in capsys.readouterr().out
    assert main(["groups", dump(tmp_path, [late, sound_sample(80)]), "--against", raw]) == 1
    out = capsys.readouterr().out
    assert "index 80 was never sampled" in out and "48" not in out


def test_command_lines_that_cannot_be_are_explained(tmp_path, capsys):
    """A wrong command line is a message with status 2 and no traceback."""
    from slime.cli import main as slime

    assert main(["chek", "x"]) == 2 and "Commands: check" in capsys.readouterr().err
    assert (
        slime(["gate", "check", str(tmp_path / "none.jsonl")]) == 2
        and "does not exist" in capsys.readouterr().err
    )
    assert (
        slime(["gate", "check", str(tmp_path)]) == 2
        and "is a folder. Give a dump in it" in capsys.readouterr().err
    )
    assert slime(["gate", "check", "x", "--gate-min-response-tokns", "3"]) == 2
    assert "Did you mean --gate-min-response-tokens?" in capsys.readouterr().err
    assert slime(["gate", "check", "x", "--gate-levl", "off"]) == 2
    assert (
        slime(["gate", "align", dump(tmp_path, rollout(4, 0))]) == 2
        and "--hf-checkpoint" in capsys.readouterr().err
    )
    assert (
        slime(["gate", "ends", dump(tmp_path, rollout(4, 0)), "--num", "0"]) == 2
        and "--num 0" in capsys.readouterr().err
    )
    (tmp_path / "other.parquet").write_bytes(b"PAR1 nothing")
    assert slime(["gate", "check", str(tmp_path / "other.parquet")]) == 2
    (tmp_path / "gate.jsonl").write_text('{"a": 1}\nno json\n[3]\n')
    capsys.readouterr()
    assert (
        main(["doctor", str(tmp_path)]) == 0
        and "no rollout has been recorded" in capsys.readouterr().out
    )
    assert main(["--help"]) == 0 and "slime gate doctor RUN" in capsys.readouterr().out


def test_what_cannot_be_read_in_a_dump_or_a_snapshot_is_named(tmp_path, capsys):
    """An unreadable value in a dump or snapshot is a finding or a message with status 2, and no
    traceback."""
    import pyarrow
    import pyarrow.parquet

    from slime.cli import main as slime
    from slime.gate.config import Verdict
    from slime.gate.tables import verdict_table

    odd = dump(tmp_path, [sound_sample(0, response=5), sound_sample(1, index=[1])])
    assert main(["ends", odd]) == 0 and "'5'" in capsys.readouterr().out
    assert (
        main(["groups", odd, "--against", odd]) == 1
        and "sample index [1] is no number" in capsys.readouterr().out
    )
    table = verdict_table(rollout(1, 0), [Verdict(True)])
    column = table.column_names.index("metadata")
    table = table.set_column(column, "metadata", pyarrow.array(["{"], pyarrow.string()))
    pyarrow.parquet.write_table(table, tmp_path / "raw_000001.parquet")
    assert slime(["gate", "check", str(tmp_path / "raw_000001.parquet")]) == 2
    assert "A row of the table is not a sample" in capsys.readouterr().err


@pytest.mark.parametrize(
    "damage",
    [
        {"alarms": None}, {"alarms": [1]}, {"drift": {}}, {"drift": None}, {"lengths": 5}, {"lengths": {"mean": None}}, {"dropped": []},
        {"dropped": {"empty": "x"}}, {"drop_rate": "x"}, {"total": [1]}, {"rollout_id": "7"},
    ],
)  # fmt: skip
def test_doctor_leaves_out_records_that_hold_something_else_than_the_gate_writes(damage):
    """`doctor` skips damaged records without a traceback."""
    record = {
        "rollout_id": 0,
        "alarms": [],
        **postprocess_output_data(rollout(8, 2), GateConfig()).statistics.to_record(),
    }
    assert tools.diagnose_records(
        [record, {**record, "rollout_id": 1, **damage}]
    ) == tools.diagnose_records([record])


def test_doctor_looks_at_the_snapshot_that_was_written_last(tmp_path, capsys):
    """`doctor` reads the snapshot written last, not the one with the highest number: a run resumed
    at rollout 2 never trained rollout 9."""
    for rollout_id in (9, 2):
        gate = Gate(GateConfig(), run_dir=tmp_path, snapshots=SnapshotWriter(tmp_path / "gate"))
        gate.run(rollout(8, 0), rollout_id)
        gate.close()
    assert (
        main(["doctor", str(tmp_path)]) == 0
        and "alignment of raw_000002.parquet" in capsys.readouterr().out
    )


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
