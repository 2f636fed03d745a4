"""What the terminal shows: one line per step in a file, a panel in a terminal, and a sign of life
at least every ten seconds."""

import argparse
import io
import time

import pytest

from slime.files.jsonl import JsonlWriter
from slime.harness import live_view as live_view_module
from slime.harness.live_view import LiveView, RunState, format_duration, live_view

NUM_GPUS = 0


def metric(step_key, step, **metrics):
    return {
        "time": 100.0 + step,
        "step_key": step_key,
        "step": step,
        "metrics": {k.replace("__", "/"): v for k, v in metrics.items()},
    }


def feed(state, *records):
    return [line for record in records for line in state.on_metrics(record)]


def test_one_line_per_rollout_with_what_all_processes_said_about_it():
    """The records of rollout manager and trainer make one line per rollout."""
    state = RunState(started=0.0, num_rollout=2)
    lines = feed(
        state,
        metric("rollout/step", 0, rollout__raw_reward=0.25, rollout__response_lengths=3.0),
        metric("train/step", 0, train__grad_norm=0.5),
        metric("rollout/step", 0, perf__step_time=1.25),
        metric("rollout/step", 0, perf__weight_version=1),
        metric("rollout/step", 1, rollout__raw_reward=0.5),
        metric("rollout/step", 1, perf__step_time=1.0),
    )
    assert lines == ["rollout 1/2  reward 0.25  length 3  grad norm 0.5  step s 1.25"]
    assert state.on_end() == ["rollout 2/2  reward 0.5  length 3  grad norm 0.5  step s 1"]
    assert state.on_end() == []


def test_rollout_is_printed_once_and_whole_while_the_next_is_generated():
    """In train-async each rollout is one complete line, although records of the next one arrive in
    between."""
    state = RunState(started=0.0)
    lines = feed(
        state,
        metric("rollout/step", 0, rollout__raw_reward=0.25),
        metric("rollout/step", 1, rollout__raw_reward=0.5),
        metric("train/step", 0, train__grad_norm=1.5),
        metric("rollout/step", 0, perf__step_time=2.0),
        metric("rollout/step", 0, perf__weight_version=2),
        metric("train/step", 1, train__grad_norm=2.5),
        metric("rollout/step", 1, perf__step_time=3.0),
        metric("rollout/step", 1, perf__weight_version=3),
    )
    assert lines == ["rollout 1  reward 0.25  grad norm 1.5  step s 2"]
    assert state.on_end() == ["rollout 2  reward 0.5  grad norm 2.5  step s 3"]


def test_the_reward_that_is_shown_is_over_everything_sampled_whatever_is_logged_later():
    """The reward in the line is the mean over everything sampled, also when the trainers' record
    comes later."""
    state = RunState(started=0.0)
    first = {"rollout/reward/mean": 0.69, "rollout/reward/mean_kept": 0.87}
    feed(
        state,
        metric("rollout/step", 0) | {"metrics": first},
        metric("rollout/step", 0, rollout__raw_reward=0.5),
    )
    assert state.on_end() == ["rollout 1  reward 0.69  reward kept 0.87"]


def test_rollout_without_timing_is_printed_too():
    """A rollout without perf/step_time, in which only the critic trains or none, gets its line."""
    state = RunState(started=0.0)
    assert feed(
        state,
        *(metric("rollout/step", step, rollout__raw_reward=0.25 * (step + 1)) for step in range(3)),
    ) == ["rollout 1  reward 0.25"]
    assert state.on_end() == ["rollout 2  reward 0.5", "rollout 3  reward 0.75"]


def test_steps_are_shown_with_their_rollout():
    """A step is shown with its own rollout: after one in which only the critic trained, the
    policy's first step, number 2, is of rollout 1."""
    state = RunState(started=0.0)
    feed(
        state,
        metric("rollout/step", 0, rollout__raw_reward=0.25, schedule__num_steps=2),
        metric("rollout/step", 1, rollout__raw_reward=0.5, schedule__num_steps=2),
        metric("train/step", 2, train__grad_norm=1.5),
    )
    assert state.on_end() == ["rollout 1  reward 0.25", "rollout 2  reward 0.5  grad norm 1.5"]


def test_evaluation_stands_below_the_rollout_it_follows():
    """An evaluation's line is below the rollout that it follows."""
    lines = feed(
        RunState(started=0.0),
        metric("rollout/step", 0, rollout__raw_reward=0.25, perf__step_time=1.0),
        metric("eval/step", 1, eval__addition=0.5),
        metric("rollout/step", 0, perf__weight_version=2),
    )
    assert lines == ["rollout 1  reward 0.25  step s 1", "evaluation 1  addition 0.5"]


def test_supervised_run_shows_no_reward():
    """A supervised run shows no reward."""
    state = RunState(started=0.0, hidden=("reward", "pass rate"))
    feed(
        state,
        metric("rollout/step", 0, rollout__raw_reward=0.0, train__loss=2.5, perf__step_time=1.0),
    )
    assert state.on_end() == ["rollout 1  loss 2.5  step s 1"]


def test_evaluation_has_its_own_line():
    """An evaluation has a line of its own."""
    assert feed(
        RunState(started=0.0),
        metric(
            "eval/step",
            5,
            eval__addition=0.31,
            **{"eval/addition-num_samples": 512, "eval/addition/failed": 0},
        ),
    ) == ["evaluation 5  addition 0.31"]


def test_remaining_time_follows_the_recent_pace():
    """The remaining time follows the recent pace: after rollouts that ended at 100, 101, 102, 7 are
    left at one second each, and half a second has passed."""
    state = RunState(started=0.0, num_rollout=10)
    assert state.remaining_s(100.0) is None
    feed(state, *(metric("rollout/step", step, perf__step_time=1.0) for step in range(3)))
    assert state.remaining_s(102.5) == pytest.approx(6.5)


def test_silent_moments_say_what_is_going_on():
    """During a long phase the line shows phase, count and seconds."""
    state = RunState(started=0.0)
    state.on_progress({"time": 10.0, "phase": "generate", "done": 20, "total": 128})
    state.on_progress({"time": 15.0, "phase": "generate", "done": 64, "total": 128})
    assert state.progress_line(18.0) == "  ... generate 64/128, 8 s"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59, "59 s"), (187, "3:07"), (3727, "1:02:07")]
)
def test_durations_are_readable(seconds, text):
    assert format_duration(seconds) == text


class Terminal(io.StringIO):
    def isatty(self):
        return True


def watch(tmp_path, stream, **options):
    """Runs a view over a short run whose records are written while it looks."""
    view = LiveView(str(tmp_path), num_rollout=2, stream=stream, poll_interval_s=0.02, **options)
    view.start()
    metrics, progress = (
        JsonlWriter(tmp_path / "metrics.jsonl"),
        JsonlWriter(tmp_path / "progress.jsonl"),
    )
    for step in range(2):
        for done in (0, 64, 128):
            progress.write({"time": time.time(), "phase": "generate", "done": done, "total": 128})
            time.sleep(0.06)
        metrics.write(
            metric("rollout/step", step, rollout__raw_reward=0.25 * (step + 1), perf__step_time=1.0)
        )
    view.stop()
    return stream.getvalue()


def test_piped_output_has_one_line_per_step_and_no_control_codes(tmp_path):
    """Output in a file has one line per step and no control codes."""
    text = watch(tmp_path, io.StringIO())
    assert "\x1b" not in text and "\r" not in text
    assert text.splitlines() == [
        "run started, 2 rollouts",
        "rollout 1/2  reward 0.25  step s 1",
        "rollout 2/2  reward 0.5  step s 1",
    ]


def test_silence_is_broken_before_ten_seconds(tmp_path, monkeypatch):
    """A line is printed before ten seconds of silence; the test runs the same loop with a shorter
    limit."""
    assert live_view_module.SILENCE_S < 10 - live_view_module.POLL_INTERVAL_S
    monkeypatch.setattr(live_view_module, "SILENCE_S", 0.05)
    assert "  ... generate 64/128, 0 s" in watch(tmp_path, io.StringIO()).splitlines()


def test_terminal_gets_a_panel_and_the_same_lines(tmp_path):
    """A terminal gets a panel with moving bars, and the lines stay above it."""
    text = watch(tmp_path, Terminal())
    assert "\x1b" in text and "generate" in text
    assert "rollout 2/2  reward 0.5  step s 1" in text


def test_broken_terminal_does_not_end_the_run(tmp_path):
    """A closed pipe, as by `| head`, does not end the run."""

    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    assert watch(tmp_path, Closed()) == ""


def test_live_view_can_be_switched_off(tmp_path):
    """--no-live-view makes nothing and leaves the terminal alone."""
    with live_view(argparse.Namespace(live_view=False, run_dir=str(tmp_path / "run"))):
        assert not (tmp_path / "run").exists()


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
