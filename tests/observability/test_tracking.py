"""One metrics file that many processes write, trackers that never end a run, step axes that never
go back."""

import argparse
import errno
import json
import logging
import multiprocessing
import os
import sys
import threading
import time
import types
from pathlib import Path

import pytest

from slime.config.observability import ObservabilityOptions, resolve_run_dir, resolve_wandb_run_id
from slime.exceptions import ConfigError, RolloutDataError
from slime.files.jsonl import JsonlTail, JsonlWriter, plain_value, read_jsonl
from slime.harness.report import finish_run  # noqa: E402
from slime.tracking import progress
from slime.tracking import tracking as logging_utils
from slime.tracking.wandb_sink import WandbSink, build_init_arguments

NUM_GPUS = 0


def make_args(run_dir, **changes):
    values = {
        name: field.default for name, field in ObservabilityOptions.__dataclass_fields__.items()
    }
    values |= {
        "run_dir": str(run_dir),
        "write_report": False,
        "load": None,
        "finetune": False,
        "num_rollout": 3,
    }
    return argparse.Namespace(**{**values, **changes})


class StrictTracker:
    """A tracker that takes no value of a series whose last step was later."""

    name = "strict"

    def __init__(self):
        self.accepted = []
        self.rejected = []

    def write(self, metrics, step_key):
        step, values = metrics[step_key], {k: v for k, v in metrics.items() if k != step_key}
        known = [(at, name) for key, at, sent in self.accepted if key == step_key for name in sent]
        is_past = any(step < at for at, name in known if name in values)
        (self.rejected if is_past else self.accepted).append((step_key, step, values))

    def close(self):
        pass


class DeadTracker(StrictTracker):
    name = "dead"

    def write(self, metrics, step_key):
        raise ConnectionError("no route to host")


@pytest.fixture(autouse=True)
def fresh_process():
    """Each test starts like a new process."""
    yield
    if logging_utils._tracking is not None:
        logging_utils._tracking.close()
    logging_utils._tracking = None
    logging_utils._folders.clear()
    progress.configure(None)


def start(monkeypatch, args, *sinks):
    monkeypatch.setattr(logging_utils, "build_sinks", lambda args, run_dir: list(sinks))
    logging_utils._folders.clear()
    logging_utils.init_tracking(args, primary=True)


def records(run_dir):
    return read_jsonl(Path(run_dir) / "metrics.jsonl")[0]


def test_a_record_is_one_line_with_its_step_and_its_values(tmp_path):
    """A record is one line of plain JSON, with tensors as numbers and the step beside the
    metrics."""
    import numpy as np
    import torch

    args = make_args(tmp_path)
    logging_utils.init_tracking(args)
    metrics = {
        "train/step": 7,
        "train/loss": torch.tensor(0.5),
        "train/n": np.int64(3),
        "train/x": float("nan"),
        "note": "a\nb",
    }
    logging_utils.log(args, metrics, "train/step")
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    record = json.loads(line)
    assert (record["step_key"], record["step"]) == ("train/step", 7)
    assert record["metrics"] == {"train/loss": 0.5, "train/n": 3, "train/x": "nan", "note": "a\nb"}


def test_a_record_without_its_step_is_refused(tmp_path):
    """A record without its step is refused."""
    args = make_args(tmp_path)
    logging_utils.init_tracking(args)
    with pytest.raises(RolloutDataError, match="rollout/step"):
        logging_utils.log(args, {"rollout/reward": 1.0}, "rollout/step")


def append_many(path, writer, count):
    file = JsonlWriter(path)
    for index in range(count):
        file.write({"writer": writer, "index": index, "filler": "x" * 3000})


def test_records_of_processes_that_write_at_once_never_mix(tmp_path):
    """4 processes x 200 records of 3 kB: every line is whole and every record is there."""
    path = tmp_path / "metrics.jsonl"
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=append_many, args=(path, writer, 200)) for writer in range(4)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    found, malformed = read_jsonl(path)
    assert malformed == 0
    assert sorted((r["writer"], r["index"]) for r in found) == [
        (w, i) for w in range(4) for i in range(200)
    ]


def test_tail_returns_each_record_once_and_waits_for_whole_lines(tmp_path):
    """The reader returns each record once and waits for whole lines."""
    path = tmp_path / "metrics.jsonl"
    tail = JsonlTail(path)
    assert tail.read() == []
    path.write_bytes(b'{"a": 1}\n{"a": ')
    assert tail.read() == [{"a": 1}]
    with path.open("ab") as file:
        file.write(b'2}\nbroken\n[3]\n{"a": 4}\n')
    assert tail.read() == [{"a": 2}, {"a": 4}]
    assert tail.malformed == 2
    path.write_bytes(b'{"a": 5}\n')
    assert tail.read() == [{"a": 5}], "a file that is shorter than before was begun anew"


def test_full_disk_loses_records_and_says_so_once_and_the_next_record_is_whole(
    tmp_path, monkeypatch, caplog
):
    """Records lost to a full disk are counted and warned about once, and the next record after a
    cut one is whole."""
    args = make_args(tmp_path)
    logging_utils.init_tracking(args, primary=False)
    write = os.write
    answers = iter(["whole", "half", "none", "whole"])

    def limited_write(descriptor, data):
        answer = next(answers)
        if answer == "none":
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data[: len(data) // 2] if answer == "half" else data)

    monkeypatch.setattr(os, "write", limited_write)
    with caplog.at_level(logging.WARNING):
        for step in range(4):
            logging_utils.log(args, {"train/step": step, "train/loss": 10.0 * step}, "train/step")
    monkeypatch.undo()
    found, malformed = read_jsonl(tmp_path / "metrics.jsonl")
    assert [record["step"] for record in found] == [0, 3]
    assert malformed == 1
    assert found[-1]["lost_before"] == 2
    assert sum("failed to take a record" in message for message in caplog.messages) == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs the always-full device")
def test_a_really_full_device_does_not_raise(tmp_path):
    """Writing to /dev/full, which answers ENOSPC, does not raise."""
    args = make_args(tmp_path)
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    logging_utils.init_tracking(args, primary=False)
    for step in range(3):
        logging_utils.log(args, {"train/step": step}, "train/step")
    assert logging_utils._tracking.lost == {"metrics.jsonl": 3}


def test_dead_tracker_is_counted_and_said_once_and_the_others_go_on(tmp_path, monkeypatch, caplog):
    """Records lost to a failing tracker are counted and warned about once, and the other trackers
    go on."""
    healthy, dead = StrictTracker(), DeadTracker()
    args = make_args(tmp_path)
    start(monkeypatch, args, dead, healthy)
    with caplog.at_level(logging.WARNING):
        for step in range(5):
            logging_utils.log(args, {"train/step": step, "train/loss": 1.0}, "train/step")
        tracking = logging_utils._tracking
        logging_utils.finish_tracking(args)
    assert tracking.lost == {"dead": 5}
    assert len(healthy.accepted) == 5 and len(records(tmp_path)) == 5
    assert sum("no route to host" in message for message in caplog.messages) == 1
    assert any("5 by dead" in message for message in caplog.messages)


def test_every_evaluation_reaches_a_strict_tracker_although_training_is_ahead(
    tmp_path, monkeypatch
):
    """Evaluations of the weights of 0, 2, 4 that finish after steps 1..4 all reach a tracker that
    refuses earlier steps."""
    tracker, args = StrictTracker(), make_args(tmp_path)
    start(monkeypatch, args, tracker)
    order = [
        ("train", 1),
        ("train", 2),
        ("eval", 0),
        ("train", 3),
        ("train", 4),
        ("eval", 2),
        ("eval", 4),
    ]
    for family, step in order:
        logging_utils.log(
            args, {f"{family}/step": step, f"{family}/value": 10.0 * step}, f"{family}/step"
        )
    assert tracker.rejected == []
    assert [step for key, step, _ in tracker.accepted if key == "eval/step"] == [0, 2, 4]


def test_resumed_run_sends_nothing_twice_and_nothing_backwards(tmp_path, monkeypatch):
    """A run that sent step 4 and resumes from 2 sends no value again and none backwards, but a
    metric that step 4 had not sent."""
    tracker = StrictTracker()
    start(monkeypatch, make_args(tmp_path), tracker)
    for step in (1, 2, 3, 4):
        logging_utils.log(
            make_args(tmp_path), {"eval/step": step, "eval/accuracy": step / 10}, "eval/step"
        )
    logging_utils.finish_tracking(make_args(tmp_path))
    start(monkeypatch, make_args(tmp_path, load="checkpoints"), tracker)
    for step in (3, 4, 5):
        metrics = {
            "eval/step": step,
            "eval/accuracy": step / 10,
            **({"eval/length": 9.0} if step == 4 else {}),
        }
        logging_utils.log(make_args(tmp_path), metrics, "eval/step")
    assert tracker.rejected == []
    sent = [(step, values) for _, step, values in tracker.accepted]
    assert sent[4:] == [(4, {"eval/length": 9.0}), (5, {"eval/accuracy": 0.5})]
    assert [record["step"] for record in records(tmp_path)] == [1, 2, 3, 4, 3, 4, 5]


def test_series_of_one_axis_that_advance_apart_lose_nothing(tmp_path, monkeypatch, caplog):
    """Series of one axis may advance apart, as in train-async and with a PPO critic that counts its
    steps before the policy's, and lose no value."""
    tracker, args = StrictTracker(), make_args(tmp_path)
    start(monkeypatch, args, tracker)
    order = [("rollout/step", 0, "rollout/reward"), ("rollout/step", 1, "rollout/reward"), ("rollout/step", 0, "perf/train_time"),
             ("rollout/step", 2, "rollout/reward"), ("rollout/step", 1, "perf/train_time"), ("train/step", 0, "train/critic-loss"),
             ("train/step", 1, "train/critic-loss"), ("train/step", 0, "train/loss"), ("train/step", 1, "train/loss")]  # fmt: skip
    for key, step, name in order:
        logging_utils.log(args, {key: step, name: 10.0 * step}, key)
    with caplog.at_level(logging.WARNING):
        logging_utils.finish_tracking(args)
    assert tracker.rejected == [] and caplog.messages == []
    assert [(key, step, *values) for key, step, values in tracker.accepted] == order


def test_a_value_of_a_past_step_is_counted_and_named_at_the_end(tmp_path, monkeypatch, caplog):
    """A value of a past step stays in the file, and at the end a message counts and names what
    trackers did not draw."""
    tracker, args = StrictTracker(), make_args(tmp_path)
    start(monkeypatch, args, tracker)
    for step in (1, 3, 2, 4, 4):
        logging_utils.log(
            args, {"train/step": step, "train/loss": 1.0, "train/lr": 0.1}, "train/step"
        )
    with caplog.at_level(logging.WARNING):
        logging_utils.finish_tracking(args)
    assert [step for _, step, _ in tracker.accepted] == [1, 3, 4, 4], (
        "the same step again is not in the past"
    )
    assert caplog.messages == [
        (
            "2 values were not sent to strict: their series had reached a later step. "
            "metrics.jsonl "
            "has them."
        )
    ]


def test_fresh_run_in_an_old_folder_moves_the_old_records_aside(tmp_path, monkeypatch):
    """A fresh run in an old folder moves the old records to another file."""
    for loss in (1.0, 2.0):
        args, tracker = make_args(tmp_path), StrictTracker()
        start(monkeypatch, args, tracker)
        logging_utils.log(args, {"train/step": 0, "train/loss": loss}, "train/step")
        assert len(tracker.accepted) == 1
        logging_utils.finish_tracking(args)
    assert [record["metrics"]["train/loss"] for record in records(tmp_path)] == [2.0]
    assert len(list(tmp_path.glob("metrics.*.jsonl"))) == 1


def log_as_another_process(run_dir, done):
    args = make_args(run_dir)
    logging_utils._tracking = None
    logging_utils.init_tracking(args, primary=False)
    logging_utils.log(args, {"rollout/step": 0, "rollout/reward": 0.25}, "rollout/step")
    logging_utils.finish_tracking(args)
    done.set()


def test_records_of_other_processes_reach_the_primarys_tracker(tmp_path, monkeypatch):
    """Actors append records, and the driver alone sends them to trackers."""
    tracker, args = StrictTracker(), make_args(tmp_path)
    start(monkeypatch, args, tracker)
    context = multiprocessing.get_context("spawn")
    done = context.Event()
    process = context.Process(target=log_as_another_process, args=(str(tmp_path), done))
    process.start()
    process.join()
    assert done.is_set()
    logging_utils.log(args, {"train/step": 0, "train/loss": 1.0}, "train/step")
    logging_utils.finish_tracking(args)
    assert sorted(tracker.accepted) == [
        ("rollout/step", 0, {"rollout/reward": 0.25}),
        ("train/step", 0, {"train/loss": 1.0}),
    ]


def test_tensorboard_holds_scalars_at_their_steps(tmp_path):
    """With --use-tensorboard its own reader finds scalars at their steps, and the step key is no
    curve."""
    event_accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    args = make_args(tmp_path, use_tensorboard=True, tb_project_name="p", tb_experiment_name="e")
    logging_utils.init_tracking(args)
    for step in (3, 4):
        logging_utils.log(
            args,
            {"train/step": step, "train/loss": 10.0 * step, "train/note": "text"},
            "train/step",
        )
    logging_utils.finish_tracking(args)
    events = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard" / "p" / "e")).Reload()
    assert events.Tags()["scalars"] == ["train/loss"]
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [
        (3, 30.0),
        (4, 40.0),
    ]


def test_wandb_offline_run_holds_records_with_their_own_axes(tmp_path, monkeypatch):
    """With --use-wandb --wandb-mode offline the files for `wandb sync` hold the records with their
    axes, without account or network."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    args = make_args(tmp_path, use_wandb=True, wandb_mode="offline", wandb_key="secret-of-nobody")
    logging_utils.init_tracking(args)
    assert logging_utils._tracking._sinks[0].name == "wandb"
    for step in (0, 1):
        logging_utils.log(args, {"rollout/step": step, "rollout/reward": 0.5}, "rollout/step")
    logging_utils.log(args, {"eval/step": 0, "eval/accuracy": 0.31}, "eval/step")
    tracking = logging_utils._tracking
    logging_utils.finish_tracking(args)
    assert tracking.lost == {}
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    deadline = time.monotonic() + 20
    # wandb's own process answers before it has closed the file
    while b"eval/accuracy" not in (content := file.read_bytes()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert b"eval/accuracy" in content and b"rollout/reward" in content
    assert b"secret-of-nobody" not in content


def test_wandb_draws_each_family_over_its_own_step(tmp_path, monkeypatch):
    """In W&B each family of metrics has its own step, so that evaluations and training steps do not
    share an axis."""
    axes = {}
    run = types.SimpleNamespace(
        define_metric=lambda name, step_metric=None: axes.update({name: step_metric})
    )
    monkeypatch.setitem(
        sys.modules, "wandb", types.SimpleNamespace(init=lambda **_: run, Settings=dict)
    )
    WandbSink(make_args(tmp_path, use_wandb=True, wandb_mode="offline"), str(tmp_path))
    assert {name: axes[name] for name in ("train/*", "rollout/*", "eval/*")} == {
        "train/*": "train/step",
        "rollout/*": "rollout/step",
        "eval/*": "eval/step",
    }


def test_wandb_options_keep_upstreams_meaning_and_hide_secrets(tmp_path):
    """W&B options mean what upstream's mean, secrets are hidden, and the id follows from the
    folder, so that a resumed run continues its own."""
    args = make_args(
        tmp_path / "run7",
        use_wandb=True,
        wandb_project="p",
        wandb_group="g",
        wandb_team="t",
        wandb_key="abc",
    )
    arguments = build_init_arguments(args, args.run_dir)
    assert (arguments["project"], arguments["entity"], arguments["name"]) == ("p", "t", "run7")
    assert arguments["group"] == f"g_{arguments['id']}"
    assert (
        arguments["id"]
        == resolve_wandb_run_id(None, args.run_dir)
        != resolve_wandb_run_id(None, "/elsewhere")
    )
    assert resolve_wandb_run_id("given", args.run_dir) == "given"
    assert "wandb_key" not in arguments["config"] and arguments["config"]["wandb_project"] == "p"


def test_missing_tracker_package_is_a_config_error_that_says_what_to_install(tmp_path, monkeypatch):
    """A tracker whose package is missing is an error before training with what to install."""
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"slime-rl\[wandb\]"):
        logging_utils.init_tracking(make_args(tmp_path, use_wandb=True))


def test_progress_is_throttled_but_never_misses_the_ends_of_a_phase(tmp_path):
    """101 progress calls within one interval are three records, and the next phase is shown at
    once."""
    now = [100.0]
    reporter = progress.ProgressReporter(tmp_path, interval_s=0.5, clock=lambda: now[0])
    for done in range(101):
        now[0] += 0.0001
        reporter.report(phase="generate", done=done, total=100)
    reporter.report(phase="train", done=1, total=8)
    now[0] += 1
    reporter.report(phase="train", done=2, total=8)
    found = [(r["phase"], r["done"]) for r in read_jsonl(tmp_path / "progress.jsonl")[0]]
    assert found == [("generate", 0), ("generate", 100), ("train", 1), ("train", 2)]


def test_progress_without_a_run_folder_does_nothing():
    """Without a run folder progress calls do nothing."""
    assert progress.report(phase="generate", done=0, total=1) is False


def test_threads_of_one_process_write_whole_records(tmp_path):
    """Threads of one process write whole records."""
    args = make_args(tmp_path)
    logging_utils.init_tracking(args, primary=False)

    def work(offset):
        for step in range(100):
            logging_utils.log(args, {"rollout/step": offset + step}, "rollout/step")

    threads = [threading.Thread(target=work, args=(1000 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(record["step"] for record in records(tmp_path)) == [
        1000 * n + s for n in range(4) for s in range(100)
    ]


def test_run_folder_follows_from_its_name_or_the_start_time(monkeypatch, tmp_path):
    """The run folder follows from the given folder, the run's name, or the start time, and is
    absolute."""
    monkeypatch.chdir(tmp_path)
    assert resolve_run_dir(None, "mine") == str(tmp_path / "runs" / "mine")
    assert resolve_run_dir("here", "mine") == str(tmp_path / "here")
    assert Path(resolve_run_dir(None, None, started=0.0)).name.startswith(
        ("19700101-", "19691231-")
    )


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (True, True),
        (2, 2),
        (0.5, 0.5),
        (float("inf"), "inf"),
        (None, None),
        ("text", "text"),
        ([1, 2], "[1, 2]"),
    ],
)
def test_values_become_what_json_has(value, plain):
    """NaN and infinity, which JSON lacks, are written as text."""
    assert plain_value(value) == plain


def test_trackers_get_the_points_that_are_no_numbers(tmp_path):
    """Trackers get NaN values, so that the curve of a failed loss ends in NaN."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    args = make_args(tmp_path, use_tensorboard=True)
    logging_utils.init_tracking(args, primary=True)
    for step, loss in enumerate([0.5, float("nan"), float("-inf")]):
        logging_utils.log(
            args, {"train/step": step, "train/loss": loss, "train/note": "text"}, "train/step"
        )
    assert finish_run(args) == []
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["train/loss"]
    assert [(event.step, str(event.value)) for event in events.Scalars("train/loss")] == [
        (0, "0.5"),
        (1, "nan"),
        (2, "-inf"),
    ]


def test_the_end_of_a_run_hands_out_the_problems_of_its_report(tmp_path, capsys):
    """The end of a run returns its report's problems, which decide the exit status."""
    run_options = {
        "debug_rollout_only": False,
        "debug_train_only": False,
        "loss_type": "policy_loss",
        "custom_reward_post_process_path": None,
    }
    args = make_args(tmp_path, write_report=True, **run_options)
    logging_utils.init_tracking(args, primary=True)
    logging_utils.log(
        args,
        {"rollout/step": 0, "rollout/ledger/sampled": 8, "rollout/ledger/trained": 7},
        "rollout/step",
    )
    problems = finish_run(args)
    assert any("ledger of rollout 0 does not balance" in problem for problem in problems)
    assert capsys.readouterr().out.count("PROBLEM") == len(problems) > 0
    assert finish_run(args) == [], "a second call has nothing to report"


def test_what_an_earlier_process_has_logged_is_not_logged_again(tmp_path):
    """A process that does a step again logs what the file lacks of it; who collects sees all; and
    what was logged before the place from which it repeats, of an abandoned branch, is no excuse."""
    before = logging_utils.Tracking(str(tmp_path))
    before.log({"train/step": 4, "train/loss": 7.0}, "train/step")
    offset = os.path.getsize(tmp_path / "metrics.jsonl")
    before.log({"train/step": 3, "train/loss": 1.0, "train/lr": 0.1}, "train/step")
    again = logging_utils.Tracking(str(tmp_path))
    again.skip_logged(offset)
    again.collectors.append([])
    again.log({"train/step": 3, "train/loss": 1.0, "train/lr": 0.1}, "train/step")
    again.log({"train/step": 3, "train/loss": 1.0, "train/new": 5}, "train/step")
    again.log({"train/step": 4, "train/loss": 2.0}, "train/step")
    again.log({"rollout/step": 3, "train/loss": 3.0}, "rollout/step")
    records = read_jsonl(tmp_path / "metrics.jsonl")[0]
    assert [(one["step_key"], one["step"], one["metrics"]) for one in records[2:]] == [
        ("train/step", 3, {"train/new": 5}),
        ("train/step", 4, {"train/loss": 2.0}),
        ("rollout/step", 3, {"train/loss": 3.0}),
    ]
    assert [len(one["metrics"]) for one in again.collectors[0]] == [2, 2, 1, 1]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
