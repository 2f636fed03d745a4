"""A real run that loses a process goes on where that can be replaced, and else ends by the name of
that process."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import lose_processes  # noqa: E402

NUM_GPUS = 0

NAMED_S = 25.0  # 10 on a machine that does nothing else


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of one training rank, an engine, the router and a grader, which has trained."""
    from examples.addition.prepare import prepare

    folder = tmp_path_factory.mktemp("lost")
    run = lose_processes.WatchedRun(Path(prepare(folder / "data")), folder / "run")
    run.wait_until_trained()
    yield run
    run.close()


@pytest.mark.timeout(300)
def test_a_run_goes_on_without_a_grader_and_ends_by_the_name_of_a_stopped_rank(run):
    """Every process is listed, in a folder of this user alone. A killed grader is replaced. A
    stopped rank is named with its phase and its stacks, the run ends with status 1, and nothing
    is left of it."""
    listed = run.processes()
    assert {*lose_processes.KINDS} <= set(listed)
    folder = run.cluster_folder / "processes"
    assert run.cluster_folder.stat().st_mode & 0o777 == folder.stat().st_mode & 0o777 == 0o700
    lose_processes.os.kill(listed["grader"], lose_processes.signal.SIGKILL)
    run.wait_until_trained(run.num_trained() + 2)
    cell = lose_processes.lose(run, "actor rank 0", "STOP")
    assert cell.outcome == "ended by its name" and cell.status == 1 and cell.left == [], str(cell)
    assert cell.named_s < NAMED_S
    text = run.text()
    assert "is frozen: a signal has stopped it (SIGSTOP)" in text and "Its last phase: " in text
    assert "call (train_worker.py:" in text or "main_loop (ray/" in text, "its stacks are missing"
    log = (run.folder / "logs" / "driver.log").read_text()
    assert f"grader (process {listed['grader']}) has died" in log and "It is replaced." in log
    assert log.count(") has died") == 1, "what ended because of the rank is not named"


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
