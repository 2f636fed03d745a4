"""Timers accumulate seconds by name and refuse to be started twice or stopped without a start."""

import time

import pytest

from slime.tracking.timer import Timer, inverse_timer, timer, with_defer
from slime.utils.timer import Timer as UpstreamTimer

NUM_GPUS = 0


@pytest.fixture(autouse=True)
def fresh_timer():
    Timer().reset()
    Timer().start_time.clear()
    yield
    Timer().reset()


def test_one_timer_per_process_also_under_upstreams_path():
    """There is one timer per process, also under upstream's path."""
    assert Timer() is Timer() is UpstreamTimer()


def test_seconds_of_one_name_add_up_until_reset():
    """Two log-prob passes of a step add up to one number until the timer is reset."""
    for _ in range(2):
        with timer("log_probs"):
            time.sleep(0.01)
    Timer().add("log_probs", 10.0)
    assert 10.02 <= Timer().log_dict()["log_probs"] < 10.5
    Timer().reset("log_probs")
    assert Timer().log_dict() == {}


def test_log_dict_is_a_copy():
    """The logged dictionary does not change when the next phase is timed."""
    Timer().add("train", 1.0)
    logged = Timer().log_dict()
    Timer().add("train", 1.0)
    assert logged == {"train": 1.0}


def test_double_start_and_end_without_start_are_errors():
    """Starting a running timer and stopping one that does not run are errors."""
    Timer().start("train")
    with pytest.raises(AssertionError, match="running already"):
        Timer().start("train")
    Timer().end("train")
    with pytest.raises(AssertionError, match="not started"):
        Timer().end("train")


def test_decorator_uses_the_functions_name_and_times_a_call_that_raises():
    """The decorator times a call under the function's name, also one that raises."""

    @timer
    def train():
        raise KeyError("x")

    with pytest.raises(KeyError):
        train()
    assert list(Timer().log_dict()) == ["train"]
    assert train.__name__ == "train"


def test_inverse_timer_pauses_a_running_timer():
    """The inverse timer pauses train_wait while training runs."""
    Timer().start("train_wait")
    with inverse_timer("train_wait"):
        time.sleep(0.05)
    Timer().end("train_wait")
    assert Timer().log_dict()["train_wait"] < 0.04


def test_with_defer_runs_after_the_function_also_when_it_raises():
    """A deferred call, such as the wait timer's start, runs also when the step raises."""
    calls = []

    @with_defer(lambda: calls.append("after"))
    def step(fails):
        calls.append("step")
        if fails:
            raise KeyError("x")
        return 7

    assert step(False) == 7
    with pytest.raises(KeyError):
        step(True)
    assert calls == ["step", "after", "step", "after"]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
