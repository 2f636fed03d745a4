"""Graders that hang, crash or use too much memory are killed; each call returns a typed outcome,
and a failed one is never a reward of 0."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from support.rollout_args import rollout_args

from slime.data.sample import Sample
from slime.plugins.failures import FailureCounter
from slime.rollout.rm_hub import async_rm, grader_pool
from slime.rollout.rm_hub.grader_pool import GraderPool, PoolSettings
from slime.rollout.rm_hub.outcomes import GRADER_ERROR, GRADER_TIMEOUT, GraderFailed, GraderOutcome
from slime.rollout.scoring import score_group
from slime.utils.async_utils import run

NUM_GPUS = 0


TESTS = Path(__file__).resolve().parents[1]


def bad(name):
    return f"support.bad_graders.{name}"


@pytest.fixture
def pool():
    made = GraderPool(PoolSettings(num_workers=1, timeout_s=1.5))
    yield made
    made.close()


@pytest.mark.parametrize("grader", ["huge_power", "endless"])
def test_a_grader_that_hangs_is_killed_at_its_limit_and_replaced_once(pool, grader):
    """A grader that hangs, also inside C code, is killed at its limit, and the next call gets a
    fresh process."""
    start = time.monotonic()
    outcome = pool.grade(bad(grader), "x", "y")
    assert outcome.error == GRADER_TIMEOUT and outcome.value is None and "1.5 s" in outcome.detail
    assert time.monotonic() - start < 8
    assert pool.grade(bad("noisy"), "x", "y") == GraderOutcome(value=1) and pool.num_restarts == 1


def test_a_grader_that_does_not_come_free_is_an_outcome(pool, monkeypatch):
    """The only place of the pool is taken for longer than a task may last."""
    for name in ("START_TIMEOUT_S", "KILL_TIMEOUT_S"):
        monkeypatch.setattr(grader_pool, name, 0.05)
    monkeypatch.setattr(pool, "settings", PoolSettings(num_workers=1, timeout_s=0.1))
    place = pool._idle.get()
    outcome = pool.grade(bad("noisy"), "x", "y")
    assert outcome == GraderOutcome(
        error=GRADER_ERROR, detail="none of 1 graders came free within 0 s"
    )
    pool._idle.put(place)
    monkeypatch.undo()
    assert pool.grade(bad("noisy"), "x", "y") == GraderOutcome(value=1)


def test_crashes_errors_memory_and_prints_are_outcomes_of_their_own(pool):
    """A crash, an error and too much memory are outcomes with a reason each, and what a grader
    prints is not read as its answer."""
    assert pool.grade(bad("noisy"), "x", "y") == GraderOutcome(value=1)
    first = pool.grade(bad("worker_pid"), "x", "y").value
    assert pool.grade(bad("broken"), "x", "y") == GraderOutcome(
        error=GRADER_ERROR, detail="ValueError: no such form"
    )
    assert "memory" in pool.grade(bad("greedy"), "x", "y").detail
    assert pool.grade(bad("worker_pid"), "x", "y").value == first  # an exception costs no process
    outcome = pool.grade(bad("crash"), "x", "y")
    assert outcome.error == GRADER_ERROR and "status 3" in outcome.detail
    assert pool.grade(bad("worker_pid"), "x", "y").value != first


def test_hostile_mathematics_never_reaches_this_process_and_ends_in_time(pool):
    """5^(5^(5^(5^5))), on which math-verify hangs even with its own limit, ends in time in another
    process."""
    pytest.importorskip("math_verify")
    for grader in ("math", "math_verify"):
        outcome = pool.grade(grader, r"\boxed{5^(5^(5^(5^5)))}", "5")
        assert outcome.value == 0 or outcome.error == GRADER_TIMEOUT
        assert pool.grade(grader, r"\boxed{\frac{1}{2}}", "0.5") == GraderOutcome(value=1)
        assert pool.grade(grader, r"\boxed{3}", "0.5") == GraderOutcome(value=0)


def test_an_expression_over_the_length_limit_is_not_graded(pool):
    """An expression above the length limit is not graded."""
    outcome = pool.grade("math", r"\boxed{" + "1+" * 2000 + "1}", "5")
    assert outcome.error == GRADER_ERROR and "4001 characters" in outcome.detail


@pytest.mark.parametrize("where", ["thread", "event loop", "both at once"])
def test_the_result_is_the_same_from_a_thread_and_from_an_event_loop(pool, where):
    """The pool uses no signals and gives the same result from a thread and from an event loop."""
    results = []
    if where != "event loop":
        threads = [
            threading.Thread(target=lambda: results.append(pool.grade("math", r"\boxed{4}", "4")))
            for _ in range(3)
        ]
        for thread in threads:
            thread.start()
    if where != "thread":
        results.append(run(pool.grade_async("math", r"\boxed{4}", "4")))
    if where != "event loop":
        for thread in threads:
            thread.join()
    assert results and set(results) == {GraderOutcome(value=1)}


def test_the_result_is_the_same_inside_a_ray_actor():
    """It gives the same result inside a Ray actor, whose methods do not run in the main thread."""
    ray = pytest.importorskip("ray")

    class Scorer:
        def score(self, response, label):
            return run(
                async_rm(rollout_args(rm_type="math"), Sample(response=response, label=label))
            )

    paths = os.pathsep.join((str(TESTS), str(TESTS.parent)))
    ray.init(
        num_cpus=1, include_dashboard=False, log_to_driver=False, configure_logging=False,
        runtime_env={"env_vars": {"PYTHONPATH": paths}},
    )  # fmt: skip
    try:
        actor = ray.remote(Scorer).remote()
        answers = [
            (r"\boxed{\frac{1}{2}}", "0.5"),
            (r"\boxed{3}", "0.5"),
            (r"\boxed{x^2+x}", "x(x+1)"),
        ]
        there = ray.get([actor.score.remote(*answer) for answer in answers], timeout=60)
        assert there == [Scorer().score(*answer) for answer in answers] == [1, 0, 1]
    finally:
        ray.shutdown()


def test_workers_end_with_their_parent_even_when_it_is_killed(tmp_path):
    """Worker processes end when their parent is killed."""
    code = f"""
import sys, threading, time
sys.path[:0] = [{str(TESTS)!r}, {str(TESTS.parent)!r}]
from slime.rollout.rm_hub.grader_pool import GraderPool, PoolSettings
pool = GraderPool(PoolSettings(num_workers=1, timeout_s=60))
print(pool.grade("support.bad_graders.worker_pid", "", "").value, flush=True)
threading.Thread(target=lambda: pool.grade("support.bad_graders.huge_power", "", ""), daemon=True).start()
time.sleep(60)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    pid = int(parent.stdout.readline())
    time.sleep(0.3)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 5
    while _is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _is_alive(pid)


def _is_alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in ("Z", "X")


def test_a_short_lived_thread_does_not_take_its_workers_with_it(pool):
    """Workers survive the thread that started them, though Linux sends the parent-death signal when
    that thread ends."""
    pids = []
    thread = threading.Thread(
        target=lambda: pids.append(pool.grade(bad("worker_pid"), "x", "y").value)
    )
    thread.start()
    thread.join()
    time.sleep(0.2)
    assert pool.grade(bad("worker_pid"), "x", "y").value == pids[0] and pool.num_restarts == 0


def test_an_outcome_without_value_marks_the_sample_and_is_never_a_reward(monkeypatch, pool):
    """An outcome without a value gives reward None and status FAILED with its kind in the reason,
    and counts against --max-failed-ratio."""
    monkeypatch.setattr(grader_pool, "shared_pool", lambda settings: pool)
    monkeypatch.setattr(
        pool,
        "grade",
        lambda grader, response, label: GraderOutcome(
            error=GRADER_TIMEOUT, detail="math took long"
        ),
    )
    args = rollout_args(rm_type="math")
    sample = Sample(index=0, response=r"\boxed{1}", label="1", status=Sample.Status.COMPLETED)
    with pytest.raises(GraderFailed, match="grader_timeout: math took long"):
        run(async_rm(args, sample))
    run(score_group(args, [sample], None))
    assert sample.reward is None and sample.status is Sample.Status.FAILED and not sample.valid
    assert sample.metadata["reward_error"] == "grader_timeout: math took long"
    failures = FailureCounter(total=10, max_ratio=0.1)
    failures.add([[sample]])
    assert failures.reasons == {"reward: grader_timeout: math took long": 1}


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
