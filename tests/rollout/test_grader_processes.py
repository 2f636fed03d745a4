"""What a graded text may do on this machine: no process of it outlives its grader, what it prints is
bounded, and no answer but the grader's is believed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slime.rollout.rm_hub import grader_pool
from slime.rollout.rm_hub.grader_pool import GraderPool, PoolSettings
from slime.rollout.rm_hub.outcomes import GRADER_ERROR, GRADER_TIMEOUT, GraderOutcome

NUM_GPUS = 0


TESTS = Path(__file__).resolve().parents[1]


def bad(name):
    return f"support.bad_graders.{name}"


@pytest.fixture
def pool():
    made = GraderPool(PoolSettings(num_workers=1, timeout_s=4.0))
    yield made
    made.close()


def wait_until(happens, seconds=10):
    deadline = time.monotonic() + seconds
    while not happens() and time.monotonic() < deadline:
        time.sleep(0.02)
    return happens()


def pids_in(path):
    assert wait_until(path.exists)
    return [int(line) for line in path.read_text().split()]


def living(pids):
    found = []
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            continue
        found += [pid] * (state not in ("Z", "X"))
    return found


@pytest.mark.parametrize("how", ["hang", "crash", "close"])
def test_the_processes_of_a_grader_end_with_it(pool, tmp_path, how):
    """11 processes that a grader started (plain, in sessions of their own, orphaned, forked) are
    gone when it is killed at its limit, when it crashes, and when the pool closes."""
    outcome = pool.grade(bad("family"), str(tmp_path / "pids"), how)
    pids = pids_in(tmp_path / "pids")
    assert len(pids) == 11
    if how == "close":
        assert outcome == GraderOutcome(value=1) and len(living(pids)) == 11
        pool.close()
    else:
        assert outcome.error == (GRADER_TIMEOUT if how == "hang" else GRADER_ERROR)
    assert living(pids) == []


@pytest.mark.parametrize("killed", ["driver", "guard"])
def test_the_processes_of_a_grader_end_with_the_driver(tmp_path, killed):
    """They are gone too when the driver is killed with -9 in the middle of a grading; a guard that
    is killed takes its grader with it."""
    code = f"""
import sys
sys.path[:0] = [{str(TESTS)!r}, {str(TESTS.parent)!r}]
from slime.rollout.rm_hub.grader_pool import GraderPool, PoolSettings
pool = GraderPool(PoolSettings(num_workers=1, timeout_s=60))
print(pool.grade("support.bad_graders.worker_pid", "", "").value, flush=True)
pool.grade("support.bad_graders.family", {str(tmp_path / "pids")!r}, "hang")
"""
    driver = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    worker = int(driver.stdout.readline())
    pids = pids_in(tmp_path / "pids")
    guard = int(Path(f"/proc/{worker}/stat").read_text().rsplit(")", 1)[1].split()[1])
    assert len(pids) == 11 and len(living([*pids, worker, guard])) == 13
    os.kill(driver.pid if killed == "driver" else guard, signal.SIGKILL)
    gone = [*pids, worker, guard] if killed == "driver" else [worker, guard]
    try:
        assert wait_until(lambda: not living(gone)), living(gone)
    finally:
        driver.kill()
        driver.wait()
        driver.stdout.close()
        for pid in living(pids):
            os.kill(pid, signal.SIGKILL)


def test_what_graders_print_is_cut_at_a_limit_for_the_whole_pool(tmp_path):
    """540 MB on stderr and as much on stdout become 4 MiB and one warning, also over several
    processes; the grading is not disturbed."""
    code = f"""
import sys
sys.path[:0] = [{str(TESTS)!r}, {str(TESTS.parent)!r}]
from slime.rollout.rm_hub.grader_pool import GraderPool, PoolSettings
pool = GraderPool(PoolSettings(num_workers=1, timeout_s=30))
for _ in range(3):
    assert pool.grade("support.bad_graders.flood", "180", "").value == 1
    assert pool.grade("support.bad_graders.crash", "", "").value is None
assert pool.num_restarts == 0
pool.close()
"""
    with (tmp_path / "stderr").open("wb") as stderr:
        subprocess.run([sys.executable, "-c", code], stderr=stderr, check=True, timeout=60)
    printed = (tmp_path / "stderr").read_bytes()
    limit = grader_pool.OUTPUT_LIMIT_MIB * 2**20
    assert limit <= len(printed) < limit + 300
    assert printed.count(b"WARNING: graders have printed 4 MiB") == 1


def test_an_answer_that_the_graded_code_writes_is_not_believed(pool):
    """Code that is executed in the grader, forked or started by it writes an answer of 1 to every
    descriptor it finds; the grader says 0, and 0 it is. The next request is not confused either."""
    for _ in range(3):
        assert pool.grade(bad("forger"), "x", "y") == GraderOutcome(value=0)
    assert pool.grade(bad("noisy"), "x", "y") == GraderOutcome(value=1)
    assert pool.num_restarts == 0


def test_a_child_of_a_grader_has_no_descriptor_of_the_pool(pool):
    """A forked child of a grader holds no descriptor of requests or answers."""
    assert pool.grade(bad("open_descriptors_of_a_child"), "x", "y").value == "[]"


def test_writing_to_the_descriptor_of_the_answers_without_end_is_an_outcome(pool):
    """A flood on the descriptor of the answers ends the grader with a reason; it fills no memory."""
    outcome = pool.grade(bad("stray"), "x", "y")
    assert outcome.error == GRADER_ERROR and "to the descriptor of the answers" in outcome.detail
    outcome = pool.grade(bad("big_value"), "x", "y")
    assert outcome.error == GRADER_ERROR and "3000012 bytes as JSON" in outcome.detail


def test_a_long_response_reaches_a_grader_whole(pool):
    """A response of 8 MB, more than a pipe holds, arrives whole; a grader that does not read in time
    is a timeout, not a hang."""
    assert pool.grade(bad("length"), "é" * 4_000_000, "y") == GraderOutcome(value=4_000_000)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
