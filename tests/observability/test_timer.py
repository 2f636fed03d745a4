"""Timers accumulate seconds by name and refuse to be started twice or ended unstarted."""

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
    """The trainer starts what the data path ends."""
    assert Timer() is Timer() is UpstreamTimer()


def test_seconds_of_one_name_add_up_until_reset():
    """faults, timers without a CPU test: two log-prob passes of a step are one number."""
    for _ in range(2):
        with timer("log_probs"):
            time.sleep(0.01)
    Timer().add("log_probs", 10.0)
    assert 10.02 <= Timer().log_dict()["log_probs"] < 10.5
    Timer().reset("log_probs")
    assert Timer().log_dict() == {}


def test_log_dict_is_a_copy():
    """What was logged must not change when the next phase is timed."""
    Timer().add("train", 1.0)
    logged = Timer().log_dict()
    Timer().add("train", 1.0)
    assert logged == {"train": 1.0}


def test_double_start_and_end_without_start_are_errors():
    """A silent restart would lose the first half of a phase."""
    Timer().start("train")
    with pytest.raises(AssertionError, match="running already"):
        Timer().start("train")
    Timer().end("train")
    with pytest.raises(AssertionError, match="not started"):
        Timer().end("train")


def test_decorator_uses_the_functions_name_and_times_a_call_that_raises():
    """The time before an error is still spent."""

    @timer
    def train():
        raise KeyError("x")

    with pytest.raises(KeyError):
        train()
    assert list(Timer().log_dict()) == ["train"]
    assert train.__name__ == "train"


def test_inverse_timer_pauses_a_running_timer():
    """train_wait runs except while training does."""
    Timer().start("train_wait")
    with inverse_timer("train_wait"):
        time.sleep(0.05)
    Timer().end("train_wait")
    assert Timer().log_dict()["train_wait"] < 0.04


def test_with_defer_runs_after_the_function_also_when_it_raises():
    """The wait timer starts again whatever happened in the step."""
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
