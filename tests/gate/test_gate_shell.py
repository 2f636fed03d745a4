"""The gate of a run: options, records, schedule, alarms, raw snapshots, Ray tasks."""

import dataclasses
import json
import logging
import sys
import threading
import types
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import pytest
from support.gate_samples import plan_of, reasons_of, sound_sample
from support.manager import manager_of

from slime.config.gate import GateOptions
from slime.data.sample import Status
from slime.exceptions import ConfigError
from slime.files.jsonl import read_jsonl
from slime.gate import (
    FormatSpec,
    Gate,
    GateConfig,
    InvalidReason,
    Level,
    MissingLogProbs,
    Policy,
    TagPair,
    TaskRules,
    apply_verdicts,
    check_responses,
    gate_config_from_args,
)
from slime.gate import alarms as alarms_module
from slime.gate import gate as shell
from slime.gate import snapshots as snapshots_module
from slime.gate.config import ScheduleStep
from slime.gate.gate import history_path
from slime.gate.snapshots import SnapshotWriter
from slime.rollout.generate_state import SharedState
from slime.rollout.scoring import build_gate

NUM_GPUS = 0


def options(**changes):
    """A namespace as after parsing: every gate option, and what the gate reads of
    other concerns.
    """
    others = {
        "custom_generate_function_path": None, "ci_test": False, "debug_rollout_only": False, "use_rollout_logprobs": False,
        "use_tis": False, "get_mismatch_metrics": False, "rollout_max_context_len": None, "vocab_size": None,
        "rollout_skip_special_tokens": True, "rollout_stop": None, "reward_key": None, "eval_reward_key": None, "run_dir": None,
        "start_rollout_id": None, "custom_reward_post_process_path": None, "hf_checkpoint": None, "rollout_stop_token_ids": None,
        "rollout_batch_size": 8, "n_samples_per_prompt": 4,
    }  # fmt: skip
    return types.SimpleNamespace(**{**dataclasses.asdict(GateOptions()), **others, **changes})


def scored(count=8, num_truncated=0):
    cut = {"status": Status.TRUNCATED, "finish_reason": "length"}
    return [sound_sample(i, **(cut if i < num_truncated else {})) for i in range(count)]


def records(folder):
    return read_jsonl(folder / "gate.jsonl")[0]


def test_options_become_one_frozen_config():
    """Every threshold of the gate is an option, and the options become one immutable config."""
    config = gate_config_from_args(
        options(
            gate_level="lenient",
            gate_levels={"bad_format": "strict"},
            gate_policies={"too_long": "drop"},
            gate_keep_truncated=True,
            gate_min_response_tokens=3,
            gate_max_response_tokens=99,
            rollout_max_context_len=200,
            gate_context_margin=0.1,
            gate_format="think_answer",
            gate_tasks={"labels": {"min_response_tokens": 1, "format": "none"}},
        )
    )
    assert (
        config.level_of("too_short") is Level.LENIENT
        and config.level_of("bad_format") is Level.STRICT
    )
    assert (
        config.policy_of(InvalidReason.TOO_LONG) is Policy.DROP
        and config.policy_of(InvalidReason.TRUNCATED) is Policy.KEEP
    )
    assert config.policy_of(InvalidReason.EMPTY) is Policy.MARK
    assert (
        config.min_response_tokens,
        config.max_response_tokens,
        config.context_length,
        config.margin,
    ) == (
        3,
        99,
        200,
        0.1,
    )
    assert config.tasks["labels"].skip_format and config.format.answer == "<answer>"
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.margin = 0.0


def test_truncated_is_refused_unless_asked_for():
    """Without options a cut response is marked, on the command line as in `GateConfig`."""
    assert gate_config_from_args(options()).policy_of(InvalidReason.TRUNCATED) is Policy.MARK


def test_automatic_choices_follow_the_run():
    """By default every text is compared in debug and CI runs and 8 per rollout otherwise,
    log-probs are required where the loss reads them, and the engine's text is kept where a
    plug-in writes it."""
    plain = gate_config_from_args(options())
    assert (plain.compare_text, plain.missing_log_probs, plain.text_source) == (
        True,
        MissingLogProbs.ALLOW,
        "tokens",
    )
    assert plain.compare_every == 4, "8 of 32 samples"
    checked = gate_config_from_args(options(ci_test=True))
    assert checked.compare_text and checked.compare_every == 1
    assert not gate_config_from_args(options(custom_generate_function_path="m.f")).compare_text
    assert gate_config_from_args(options(use_tis=True)).missing_log_probs is MissingLogProbs.ERROR
    assert (
        gate_config_from_args(options(custom_generate_function_path="m.f")).text_source == "engine"
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gate_policies": {"emty": "mark"}}, "emty"),
        ({"gate_policies": {"empty": "keep"}}, "empty"),
        ({"gate_levels": {"bad_format": "harsh"}}, "harsh"),
        ({"gate_schedule": ["soon:lenient"]}, "soon"),
        ({"gate_tasks": {"a": {"min": 1}}}, "min_response_tokens"),
        ({"gate_format_spec": {"pairs": [{"opn": "<a>"}]}}, "pair"),
    ],
)
def test_an_option_that_cannot_be_is_named(changes, words):
    """A wrong name in a gate option is refused and does not mean "no policy"."""
    with pytest.raises(ConfigError, match=words):
        gate_config_from_args(options(**changes))


def test_strictness_is_scheduled_by_rollout_and_by_measured_rate():
    """The level changes at a given rollout, or once the share of bad formats falls below a rate."""
    config = gate_config_from_args(options(gate_schedule=["100:lenient", "rate<0.02:off"]))
    assert [config.at(i).level for i in (0, 99, 100)] == [Level.STRICT, Level.STRICT, Level.LENIENT]
    assert (
        config.at(0, bad_format_rate=0.01).level is Level.OFF
        and config.at(0, bad_format_rate=0.02).level is Level.STRICT
    )


def test_the_check_before_rewards_follows_the_schedule_and_is_part_of_the_record():
    """The check before rewards uses the level of its rollout, and its counts and time are in the
    record that is written later."""
    from support.gate_golden import load_tokenizer

    tokenizer = load_tokenizer()
    ids = tokenizer.encode("the tokens' text", add_special_tokens=False)

    def group(text):
        fields = {
            "tokens": [5, *ids],
            "response_length": len(ids),
            "rollout_log_probs": [-1.0] * len(ids),
            "response": text,
        }
        return [sound_sample(i, **fields) for i in range(4)]

    gate = Gate.from_args(options(gate_compare_text="on", gate_schedule=["1:lenient"]), tokenizer)
    for rollout_id, expected in enumerate(["misaligned", None]):
        batch = []
        for text in ("the tokens' text", "the  tokens' text"):
            samples = group(text)
            batch += apply_verdicts(
                samples,
                check_responses(samples, gate.config, tokenizer=tokenizer, tally=gate.tally),
            )
        result = gate.run(batch, rollout_id)
        assert reasons_of(result) == [None] * 4 + [expected] * 4
        assert (
            result.statistics.counts["compared"] == 8
            and result.statistics.counts["cause_whitespace"] == 4
        )
        assert (
            result.statistics.alignment_failure_rate == 0.5
            and result.statistics.seconds["before_rewards"] > 0
        )
    assert "before_rewards" not in gate.run(scored(4), 2).statistics.seconds


def test_the_gates_time_is_all_that_the_call_took_and_work_side_by_side_counts_once(monkeypatch):
    """The gate's time covers the whole call, also what belongs to no check (half to two thirds of a
    small rollout), and parallel work counts once."""
    clock = iter([100.0, 105.0])
    monkeypatch.setattr(shell, "time", types.SimpleNamespace(perf_counter=lambda: next(clock)))
    statistics = Gate(GateConfig()).run(scored(8), 0, iteration_seconds=50.0).statistics
    assert statistics.gate_seconds == pytest.approx(
        5.0
    ) and statistics.share_of_iteration == pytest.approx(0.1)
    assert 4.0 < statistics.seconds["rest"] < 5.0
    in_two_processes = dataclasses.replace(
        statistics, seconds={"bad_token": 6.0, "bad_log_prob": 2.0}
    ).with_elapsed(4.0)
    assert in_two_processes.seconds == {"bad_token": 3.0, "bad_log_prob": 1.0, "rest": 0.0}


@pytest.mark.parametrize(
    ("policy", "in_a_list", "missing_tokens"),
    [("mask", 1, 1), ("mark", 1, 1), ("allow", 0, 0), ("allow", 1, 1)],
)
def test_log_probs_that_the_check_before_rewards_masks_or_refuses_are_counted(
    policy, in_a_list, missing_tokens
):
    """The record counts missing log-probs, though the check before rewards has masked them or
    rejected their sample."""
    gate = Gate.from_args(options(gate_missing_log_probs=policy))
    samples = [sound_sample(i, rollout_log_probs=None if i < 3 else [-1.0] * 12) for i in range(8)]
    if in_a_list:
        samples[5].rollout_log_probs[7] = None
    batch = apply_verdicts(samples, check_responses(samples, gate.config, tally=gate.tally))
    counts = gate.run(batch, 0).statistics.counts
    assert (counts["missing_log_probs"], counts.get("missing_log_prob_tokens", 0)) == (
        3,
        missing_tokens,
    )
    again = gate.run(scored(8), 1)
    assert gate.metrics(again)["gate/missing_log_probs"] == 0


def test_what_one_gate_finds_is_in_no_other_gates_record(tmp_path, monkeypatch):
    """Two runs in one process: a manager hands the response gate the tally of its own gate, and a
    gate beside it counts nothing."""
    first, second = (
        manager_of(scored(8), tmp_path / name, monkeypatch) for name in ("first", "second")
    )
    assert SharedState.tally is second.gate.tally is not first.gate.tally
    gate = build_gate(second.args, None, lambda: SharedState.tally)
    gate.mark(scored(8))
    beside, own = (manager.gate.run(scored(8), 0).statistics for manager in (first, second))
    assert "before_rewards" in own.seconds and "before_rewards" not in beside.seconds


def test_every_rollout_leaves_one_record_and_one_line_whatever_its_size(tmp_path, caplog):
    """Every rollout writes one record and one log line, whether it has 8 or 512 samples."""
    gate = Gate(GateConfig(), run_dir=tmp_path)
    with caplog.at_level(logging.INFO, logger="slime"):
        for rollout_id, count in enumerate((8, 512)):
            gate.run(scored(count), rollout_id, iteration_seconds=1e9)
    gate.run(scored(8), 1, evaluation=True)
    gate.close()
    assert [(r["rollout_id"], r["evaluation"], r["total"]) for r in records(tmp_path)] == [
        (0, False, 8),
        (1, False, 512),
        (1, True, 8),
    ]
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    assert len(lines) == 2 and "512 of 512 kept" in lines[1]


def shifting(rollout_id):
    """A batch whose invalid share, reasons, lengths and bad formats change from rollout to rollout,
    by no chance.
    """
    samples = [sound_sample(i, length=20 + (i * 7) % (30 + 9 * rollout_id)) for i in range(120)]
    for i in range(5 + 4 * rollout_id + 30 * (rollout_id in (7, 8))):
        samples[i].finish_reason = "length" if i % 3 else "stop"
        samples[i].rollout_log_probs = (
            samples[i].rollout_log_probs if i % 3 else [0.5] * samples[i].response_length
        )
    for i in range(60, 60 + 10 - rollout_id):
        samples[i].response = "<answer>1"
    return samples


def without_times(record):
    return {
        name: value
        for name, value in record.items()
        if "seconds" not in name and name != "share_of_iteration"
    }


def drive(gate, first, last, checkpoints, *, ahead=0):
    """Rollouts as the loops call them: generated `ahead` of the one that is saved, an evaluation
    after every second one.
    """
    seen = []
    generated = first - 1
    for rollout_id in range(first, last):
        while generated < min(rollout_id + ahead, last - 1):
            generated += 1
            gate.run(shifting(generated), generated)
            seen.append((gate.tally.rollout_id, gate.tally.bad_format_rate))
        gate.save(checkpoints, rollout_id)
        if rollout_id % 2:
            gate.run(shifting(rollout_id)[::3], rollout_id + 1, evaluation=True)
    gate.close()
    return seen


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("resumed_after", [0, 3, 5, 6])
def test_a_resumed_run_has_the_records_of_one_that_was_not_interrupted(
    tmp_path, resumed_after, ahead
):
    """After a crash at rollout 8, a resumed run has the same drift, alarms and levels as an
    uninterrupted one. Rollouts beyond the checkpoint do not count, also with a rollout ahead of
    training. Evaluations are compared with evaluations."""
    spec = FormatSpec(pairs=(TagPair("<answer>", "</answer>"),))
    config = GateConfig(format=spec, schedule=(ScheduleStep(Level.LENIENT, below_rate=0.04),))
    whole = Gate(config, run_dir=tmp_path / "whole", window=3)
    levels = drive(whole, 0, 10, tmp_path / "c", ahead=ahead)
    drive(Gate(config, run_dir=tmp_path / "dead", window=3), 0, 9, tmp_path / "d", ahead=ahead)
    resumed = Gate(config, run_dir=tmp_path / "resumed", window=3)
    resumed.load(tmp_path / "d", resumed_after)
    assert (resumed.tally.rollout_id, resumed.tally.bad_format_rate) == levels[resumed_after]
    assert (
        drive(resumed, resumed_after + 1, 10, tmp_path / "d", ahead=ahead)
        == levels[resumed_after + 1 :]
    )
    everything = list(map(without_times, records(tmp_path / "whole")))
    expected = [
        record
        for record in everything
        if record["rollout_id"] > resumed_after + record["evaluation"]
    ]
    assert list(map(without_times, records(tmp_path / "resumed"))) == expected
    alarms = {
        (record["rollout_id"], alarm["name"]) for record in expected for alarm in record["alarms"]
    }
    assert (7, "drop_rate") in alarms and {record["level"] for record in everything} == {
        "strict",
        "lenient",
    }
    assert all(
        record["drift"]["psi_window"] is not None for record in expected if record["rollout_id"] > 2
    )


def test_a_gate_in_another_process_goes_on_as_if_it_were_the_same(tmp_path):
    """Its records, levels, alarms and warnings are those of one gate; what the other had recorded of
    the rollout that is judged again is removed."""
    spec = FormatSpec(pairs=(TagPair("<answer>", "</answer>"),))
    config = GateConfig(format=spec, schedule=(ScheduleStep(Level.LENIENT, below_rate=0.04),))
    whole = Gate(config, run_dir=tmp_path / "whole", window=3)
    drive(whole, 0, 10, tmp_path / "c", ahead=0)
    lost = Gate(config, run_dir=tmp_path / "healed", window=3)
    lost.tally.started(0)
    drive(lost, 0, 6, tmp_path / "d", ahead=0)
    kept = json.loads(json.dumps(lost.keep(tmp_path / "kept", 5)))
    lost.run(shifting(6), 6)
    lost.close()
    healed = Gate(config, run_dir=tmp_path / "healed", window=3)
    healed.go_on(tmp_path / "kept", 5, kept)
    drive(healed, 6, 10, tmp_path / "d", ahead=0)
    expected = list(map(without_times, records(tmp_path / "whole")))
    assert list(map(without_times, records(tmp_path / "healed"))) == expected
    assert healed._warned_at == whole._warned_at


def test_what_a_history_lacks_is_said_once_and_skipped(tmp_path, caplog):
    """A damaged line of the history costs its rollout, a missing, foreign or headless file is
    warned about once, and none of them stops a resume."""
    gate = Gate(GateConfig())
    for rollout_id in range(4):
        gate.run(scored(200, 20), rollout_id)
    gate.save(tmp_path, 3)
    path = history_path(tmp_path, 3)
    good = path.read_bytes().splitlines(keepends=True)
    bad = json.loads(good[1])
    cases = {
        "1 of 4 lines": [good[0], b'{"rollout_id": 0, "evalu\n', *good[2:]],
        " 1 of 4 lines": [*good[:4], good[4][:30]],
        "2 of 4 lines": [*good[:2], json.dumps({**bad, "kept_lengths": {"tokens": [1], "samples": [10**12]}}).encode() + b"\n",
                         json.dumps({**bad, "rollout_id": 9}).encode() + b"\n", good[4]],
        "0 of 4 lines": [*good, b"\xff\n"],
        "head": good[1:],
        "slime-gate-history-9": [good[0].replace(b"history-1", b"history-9"), *good[1:]],
        "there is no": None,
    }  # fmt: skip
    for words, lines in cases.items():
        caplog.clear()
        path.unlink(missing_ok=True)
        if lines is not None:
            path.write_bytes(b"".join(lines))
        resumed = Gate(GateConfig())
        resumed.load(tmp_path, 3)
        assert caplog.text.count("compare with less") == 1 and words in caplog.text, caplog.text
        alarms = [alarm.name for alarm in resumed.run(scored(200, 50), 4).alarms]
        assert alarms == (
            [] if words in ("slime-gate-history-9", "there is no") else ["drop_rate"]
        ), words
    path.write_bytes(b"".join(good))
    caplog.clear()
    resumed.load(tmp_path, 3)
    assert (
        caplog.text == "" and [s.kept for s in resumed._history.last(evaluation=False)] == [180] * 4
    )


def test_a_disk_without_room_costs_the_history_and_not_the_checkpoint(tmp_path, caplog):
    """A full disk costs the gate's history, with a warning, and not the checkpoint."""
    (tmp_path / "rollout").write_text("")
    Gate(GateConfig()).save(tmp_path, 3)
    assert "history could not be written" in caplog.text


def test_an_alarm_is_logged_recorded_and_a_metric(tmp_path, caplog):
    """A drop rate that rises from 10 % to 25 % is logged as a warning, is in the record and is a
    metric."""
    gate = Gate(GateConfig(), run_dir=tmp_path)
    for rollout_id in range(3):
        assert gate.run(scored(200, 20), rollout_id).alarms == ()
    with caplog.at_level(logging.WARNING, logger="slime"):
        result = gate.run(scored(200, 50), 3)
    assert [alarm.name for alarm in result.alarms] == ["drop_rate"] and gate.metrics(result)[
        "gate/alarm/drop_rate"
    ] == 1
    assert "25.0 %" in caplog.text and records(tmp_path)[-1]["alarms"][0]["name"] == "drop_rate"


def test_a_slow_gate_says_so(monkeypatch, caplog):
    """The summary line tells when the gate takes more than 10 % of the iteration; it is an alarm
    where the gate also takes half a second."""
    gate = Gate(GateConfig())
    with caplog.at_level(logging.INFO, logger="slime"):
        assert gate.run(scored(64), 0, iteration_seconds=1e-6).alarms == ()
        gate.run(scored(64), 1, iteration_seconds=1e6)
    assert [", above 10 %" in record.getMessage() for record in caplog.records] == [True, False]
    monkeypatch.setattr(alarms_module, "MIN_SECONDS_TO_ALARM", 0.0)
    assert [alarm.name for alarm in gate.run(scored(64), 2, iteration_seconds=1e-6).alarms] == [
        "time"
    ]


def test_evaluation_has_its_own_history_and_changes_nothing():
    """Evaluations are compared with evaluations, because their lengths differ from those in
    training."""
    gate = Gate(GateConfig())
    gate.run(scored(100), 0)
    result = gate.run(
        [sound_sample(i, length=500, finish_reason="length") for i in range(100)],
        0,
        evaluation=True,
    )
    assert (
        result.alarms == ()
        and all(sample.valid for sample in result.samples)
        and result.statistics.kept == 0
    )
    assert gate.run(scored(100), 1).alarms == ()


def test_a_full_disk_costs_a_record_and_no_training(tmp_path, caplog):
    """A record lost to a full disk is warned about, and the rollout goes on."""
    (tmp_path / "file").write_text("")
    result = Gate(GateConfig(), run_dir=tmp_path / "file").run(scored(4), 0)
    assert result.statistics.kept == 4 and "could not be written" in caplog.text


def test_snapshots_keep_the_last_rollouts_and_link_rows_to_ranks(tmp_path):
    """The last three rollouts stay, and a trained sample is found in its raw row without slime's
    code."""
    import pyarrow.parquet as parquet

    gate = Gate(
        GateConfig(policies={InvalidReason.TRUNCATED: Policy.DROP}),
        snapshots=SnapshotWriter(tmp_path, keep=3),
    )
    for rollout_id in range(5):
        result = gate.run(scored(8, 2), rollout_id)
        gate.record_placement(
            rollout_id, result.raw_rows, plan_of([[5, 0, 2], [1, 3]], len(result.raw_rows))
        )
        gate.snapshots.flush()
    gate.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"{kind}_00000{i}.parquet" for kind in ("place", "raw") for i in (2, 3, 4)
    ]
    raw = parquet.read_table(tmp_path / "raw_000004.parquet").to_pylist()
    assert [(row["raw_row"], row["index"], row["reason"], row["dropped"]) for row in raw[:3]] == [
        (0, 0, "truncated", True), (1, 1, "truncated", True), (2, 2, None, False),
    ]  # fmt: skip
    assert raw[3]["tokens"] == [1, 2, 3, *range(300, 312)] and raw[3]["rollout_log_probs"][
        0
    ] == pytest.approx(-0.1)
    place = parquet.read_table(tmp_path / "place_000004.parquet").to_pylist()
    first = next(row for row in place if (row["dp_rank"], row["dp_position"]) == (0, 0))
    assert raw[first["raw_row"]]["index"] == result.samples[5].index == 7


def test_a_snapshot_holds_what_the_rollout_dropped_behind_the_batch(tmp_path):
    """Samples that the rollout dropped stand behind the batch; rows of the batch keep their
    numbers, so that links to ranks stay right."""
    import pyarrow.parquet as parquet

    gate = Gate(GateConfig(), snapshots=SnapshotWriter(tmp_path))
    empty = sound_sample(21, valid=False, invalid_reason="empty", reward=None)
    groups = [
        ("dynamic_filter_zero_std", [sound_sample(20), empty]),
        ("sample_filter", [sound_sample(30)]),
    ]
    result = gate.run(scored(4, 1), 7, dropped_groups=groups)
    gate.record_placement(7, result.raw_rows, plan_of([[0, 2], [1, 3]], len(result.raw_rows)))
    gate.close()
    assert result.statistics.total == 4 and len(result.samples) == 4
    rows = parquet.read_table(tmp_path / "raw_000007.parquet").to_pylist()
    assert [row["raw_row"] for row in rows] == list(range(7)) and [
        row["index"] for row in rows
    ] == [0, 1, 2, 3, 20, 21, 30]
    assert [(row["dropped_by"], row["valid"], row["reason"], row["dropped"]) for row in rows] == [
        (None, False, "truncated", False), *[(None, True, None, False)] * 3, ("dynamic_filter_zero_std", True, None, True),
        ("dynamic_filter_zero_std", False, "empty", True), ("sample_filter", True, None, True),
    ]  # fmt: skip
    assert rows[4]["tokens"] == [1, 2, 3, *range(2000, 2012)] and rows[4]["reward"] == "20.0"
    place = parquet.read_table(tmp_path / "place_000007.parquet").to_pylist()
    assert [row["raw_row"] for row in place] == result.raw_rows
    assert sorted(rows[row["raw_row"]]["index"] for row in place) == [0, 1, 2, 3]


def test_dropped_groups_share_the_byte_limit_and_are_let_go_after_the_write(tmp_path, caplog):
    """Dropped groups share the snapshot's byte limit: those that do not fit are counted in a
    warning, and none stays in memory after the write."""
    import weakref

    import pyarrow.parquet as parquet

    def group(first):
        return [sound_sample(first + i, length=100, rollout_log_probs=None) for i in range(4)]

    # a group: 4 x (103 ids x 8 bytes + texts) is above 3,296 bytes, below 3,500
    writer = SnapshotWriter(tmp_path, max_bytes=4 * 3_500)
    gate = Gate(GateConfig(), snapshots=writer)
    groups = [("dynamic_filter_x", group(100 * number)) for number in range(1, 6)]
    dropped = weakref.ref(groups[4][1][0]), weakref.ref(groups[0][1][0])
    gate.run(group(0), 0, dropped_groups=groups)
    assert "2 of 5 groups" in caplog.text and "--gate-snapshots-max-gib" in caplog.text
    del groups
    writer.flush()
    table = parquet.read_table(tmp_path / "raw_000000.parquet").to_pydict()
    gate.run(group(0), 1)  # the thread's last job was the one before
    writer.flush()
    assert [ref() for ref in dropped] == [None, None]
    gate.close()
    assert [index for index in table["index"] if index % 100 == 0] == [0, 100, 200, 300]


def test_snapshots_are_bounded_by_bytes_and_plain_parquet(tmp_path):
    """The newest snapshot always stays and older ones go when they do not fit; the files are plain
    Parquet with zstd."""
    import pyarrow.parquet as parquet

    writer = SnapshotWriter(tmp_path, keep=10, max_bytes=1)
    for rollout_id in range(3):
        writer.submit(rollout_id, scored(4), Gate(GateConfig()).run(scored(4), 0).verdicts)
        writer.flush()
    writer.close()
    assert [path.name for path in tmp_path.iterdir()] == ["raw_000002.parquet"]
    file = parquet.ParquetFile(tmp_path / "raw_000002.parquet")
    assert file.metadata.row_group(0).column(0).compression == "ZSTD"
    assert file.read(columns=["response"]).to_pydict() == {
        "response": [f"response {i}" for i in range(4)]
    }


def test_snapshots_hold_malformed_samples_too(tmp_path):
    """A snapshot also holds samples that Parquet's types cannot represent, with what can be written
    of them."""
    import pyarrow.parquet as parquet

    samples = [
        sound_sample(0, tokens=["a"] * 15),
        sound_sample(1, response="\ud800"),
        sound_sample(2, reward=object(), metadata={"x": {1}}),
    ]
    writer = SnapshotWriter(tmp_path)
    writer.submit(0, samples, Gate(GateConfig()).run(samples, 0).verdicts)
    writer.close()
    rows = parquet.read_table(tmp_path / "raw_000000.parquet").to_pylist()
    assert (
        rows[0]["tokens"] is None
        and rows[0]["reason"] == "bad_token"
        and rows[1]["response"] == "?"
    )


def test_a_snapshot_gives_back_what_the_engine_sent(tmp_path):
    """Samples read from a snapshot get the verdicts they had, with rewards that are numpy scalars
    or texts and log-probs with holes."""
    from slime.commands.gate import read_snapshot

    rewards = ["a word", np.float32(0.5), {"score": np.float64(1)}, float("nan"), None, True]
    samples = [
        sound_sample(i, reward=reward, metadata={"n": np.int64(i)})
        for i, reward in enumerate(rewards)
    ]
    samples.append(sound_sample(6, rollout_log_probs=[None] + [-1.0] * 11))
    gate = Gate(GateConfig(), snapshots=SnapshotWriter(tmp_path))
    before = gate.run(samples, 0)
    gate.run([], 1)
    gate.close()
    again = read_snapshot(tmp_path / "raw_000000.parquet")
    assert [s.reward for s in again[:3]] == ["a word", 0.5, {"score": 1.0}] and again[
        5
    ].metadata == {"n": 5}
    assert reasons_of(Gate(GateConfig()).run(again, 0)) == reasons_of(before)
    assert read_snapshot(tmp_path / "raw_000001.parquet") == []


def test_a_resumed_run_keeps_its_own_snapshots(tmp_path):
    """After a crash at rollout 9 and a resume from 5, the three snapshots that stay are 5, 6 and
    7."""
    writer = SnapshotWriter(tmp_path, keep=3)
    for rollout_id in (7, 8, 9, 5, 6, 7):
        writer.submit(rollout_id, scored(4), Gate(GateConfig()).run(scored(4), 0).verdicts)
        writer.flush()
        assert (tmp_path / f"raw_{rollout_id:06d}.parquet").exists()
    writer.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"raw_00000{i}.parquet" for i in (5, 6, 7)
    ]


def test_snapshots_are_read_by_duckdb_as_the_guide_says(tmp_path):
    """duckdb reads a snapshot and joins raw rows with their places on the ranks."""
    import duckdb

    gate = Gate(GateConfig(), snapshots=SnapshotWriter(tmp_path))
    result = gate.run(scored(8, 2), 41)
    gate.record_placement(41, result.raw_rows, plan_of([[5, 2], [3]], len(result.raw_rows)))
    gate.close()
    counts = duckdb.sql(
        f"select reason, count(*) from '{tmp_path}/raw_000041.parquet' group by 1 order by 1"
    ).fetchall()
    assert counts == [("truncated", 2), (None, 6)]
    joined = duckdb.sql(
        "select dp_rank, dp_position, index, tokens[4], rollout_log_probs[1] from "
        f"'{tmp_path}/raw_000041.parquet' "
        f"join '{tmp_path}/place_000041.parquet' using (raw_row) where dp_rank >= 0 order by 1, 2"
    ).fetchall()
    assert [row[:4] for row in joined] == [(0, 0, 5, 500), (0, 1, 2, 200), (1, 0, 3, 300)]
    assert joined[0][4] == pytest.approx(-0.1)


def read_with_pandas(path):
    import pandas

    return lambda name: pandas.read_parquet(path / name).to_dict("records")


def read_with_polars(path):
    import polars

    return lambda name: polars.read_parquet(path / name).to_dicts()


@pytest.mark.parametrize("reader", [read_with_pandas, read_with_polars])
def test_snapshots_are_read_by_pandas_and_polars(reader, tmp_path):
    """pandas and polars read every kind of column: nested lists, texts, nulls and numbers."""
    read = reader(tmp_path)
    gate = Gate(GateConfig(), snapshots=SnapshotWriter(tmp_path))
    samples = [*scored(5, 2), sound_sample(5, tokens=["a"] * 15, response="caf\u00e9 \U0001f600")]
    result = gate.run(samples, 41, dropped_groups=[("dynamic_filter_easy", [sound_sample(8)])])
    gate.record_placement(41, result.raw_rows, plan_of([[4, 2], [3]], len(result.raw_rows)))
    gate.close()
    rows, places = read("raw_000041.parquet"), read("place_000041.parquet")
    assert [row["index"] for row in rows] == [0, 1, 2, 3, 4, 5, 8]
    missing = [str(row["dropped_by"]) in ("None", "nan") for row in rows]
    assert missing == [True] * 6 + [False] and rows[6]["dropped_by"] == "dynamic_filter_easy"
    assert [rows[i]["reason"] for i in (0, 1, 5)] == ["truncated", "truncated", "bad_token"]
    assert list(rows[3]["tokens"]) == [1, 2, 3, *range(300, 312)] and rows[5]["tokens"] is None
    assert (
        rows[3]["rollout_log_probs"][0] == pytest.approx(-0.1)
        and rows[5]["response"] == "caf\u00e9 \U0001f600"
    )
    assert json.loads(rows[3]["reward"]) == 3.0 and [row["valid"] for row in rows] == [
        False,
        False,
        *[True] * 3,
        False,
        True,
    ]
    where = {
        rows[place["raw_row"]]["index"]: (place["dp_rank"], place["dp_position"])
        for place in places
        if place["dp_rank"] >= 0
    }
    assert where == {4: (0, 0), 2: (0, 1), 3: (1, 0)}


def test_a_failing_or_missing_writer_is_said_and_costs_nothing(tmp_path, caplog, monkeypatch):
    """A missing pyarrow or a failing disk costs the snapshot and one warning."""
    (tmp_path / "file").write_text("")
    gate = Gate(GateConfig(), snapshots=SnapshotWriter(tmp_path / "file"))
    gate.run(scored(4), 0)
    gate.close()
    assert "could not be written" in caplog.text
    monkeypatch.setattr(snapshots_module, "_pyarrow_available", lambda: False)
    caplog.clear()
    gate = Gate(GateConfig(), snapshots=SnapshotWriter(tmp_path / "none"))
    for rollout_id in range(3):
        gate.run(scored(4), rollout_id)
    gate.close()
    assert caplog.text.count("pyarrow is missing") == 1 and not (tmp_path / "none").exists()


def test_scores_that_a_users_function_makes_later_are_not_judged_here():
    """Rewards from which --custom-reward-post-process-path makes the score later, such as a
    teacher's reply, are not judged by the gate."""
    samples = scored(4)
    for sample in samples:
        sample.reward = {"meta_info": {}}
    distilling = Gate.from_args(options(custom_reward_post_process_path="package.module.function"))
    assert reasons_of(distilling.run(samples, 0)) == [None] * 4
    assert reasons_of(Gate.from_args(options()).run(samples, 0)) == ["bad_reward"] * 4


def test_ray_tasks_give_the_serial_result(tmp_path):
    """Above a batch size the checks run in several processes, with the same verdicts and counts,
    also where samples hold objects that cannot be pickled."""
    import ray

    from slime.gate.parallel import judge_in_parallel

    samples = scored(90, 7)
    samples[40].rollout_log_probs[3] = float("nan")
    # neither can travel
    samples[41].label, samples[41].metadata = threading.Lock(), {"environment": threading.Lock()}
    samples[42].metadata = {"source_name": "short"}
    config = GateConfig(rewards_expected=True, tasks={"short": TaskRules(max_response_tokens=2)})
    serial = Gate(config).run(samples, 0)
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        parallel = Gate(config, parallel_above=50).run(samples, 0)
        split = judge_in_parallel(samples, config, None, part_samples=13)
    finally:
        ray.shutdown()
    assert parallel.verdicts == serial.verdicts and reasons_of(parallel).count("truncated") == 7
    assert reasons_of(parallel)[40:43] == ["bad_logprob", None, "too_long"]
    assert parallel.statistics.counts == serial.statistics.counts == dict(split.counts)
    assert split.codes.tolist() == serial.statistics.codes.tolist()


def test_tasks_that_do_not_end_are_given_up_and_the_verdicts_come_all_the_same(monkeypatch, caplog):
    """Where every core is reserved, Ray never starts them."""
    import ray

    from slime.gate import parallel

    def never(refs, timeout):
        raise ray.exceptions.GetTimeoutError(f"{timeout} s")

    cancelled = []
    task = types.SimpleNamespace(remote=lambda *args: f"part {args[1]}")
    for name, stand_in in {
        "is_initialized": lambda: True,
        "remote": lambda **options: lambda function: task,
        "put": lambda value: value,
        "get": never,
        "cancel": cancelled.append,
    }.items():
        monkeypatch.setattr(ray, name, stand_in)
    config = GateConfig(rewards_expected=True)
    samples = scored(20, 7)
    found = parallel.judge_in_parallel(samples, config, None, part_samples=8)
    assert found.codes.tolist() == parallel.judge(samples, config, None).codes.tolist()
    assert cancelled == ["part 0", "part 8", "part 16"]
    assert "the gate's 3 Ray tasks did not end within 300 s" in caplog.text


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
