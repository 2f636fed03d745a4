"""A real run that loses a process goes on where that can be replaced, and else ends by the name of
that process."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import lose_processes  # noqa: E402
import ray  # noqa: E402
from chaos import cells  # noqa: E402

from slime.exceptions import ConfigError, SlimeError  # noqa: E402
from slime.ray import run_watch  # noqa: E402
from slime.supervision.watch import Loss  # noqa: E402

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
def test_a_run_goes_on_without_a_grader_and_ends_by_the_name_of_a_stopped_rank(run, monkeypatch):
    """Every process is listed, in a folder of this user alone. A rank that stands still for a
    moment is no frozen one. A killed grader is replaced. A stopped rank is named with its phase and its stacks, the run ends with status 1, and nothing
    is left of it."""
    listed = run.processes()
    assert {*lose_processes.KINDS} <= set(listed)
    folder = run.cluster_folder / "processes"
    assert run.cluster_folder.stat().st_mode & 0o777 == folder.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(cells, "PAUSE_S", 1.5)
    cells.paused(SimpleNamespace(run=run), "actor rank 0")
    run.wait_until_trained(run.num_trained() + 1)
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


@pytest.fixture
def watch(tmp_path, monkeypatch):
    """The watch of a driver, which tells it of a loss; `watch.signals`: what it sent the driver."""
    watch = run_watch.RunWatch(str(tmp_path))
    watch.signals = []
    monkeypatch.setattr(run_watch.os, "kill", lambda pid, number: watch.signals.append(number))
    yield watch
    watch._is_over.set()


def test_the_first_loss_is_what_ends_the_run(watch):
    """Not what fails because of it, and not a later one. Where the run ends by itself, processes
    may end."""
    with pytest.raises(SlimeError) as caught, watch.needed():
        watch._end_run(Loss("engine 0", 7, "update_weights"))
        watch._end_run(Loss("actor rank 1", 8, "train"))
        raise RuntimeError("connection closed by peer")
    assert str(caught.value) == (
        "engine 0 (process 7) has died: it crashed, was killed, or memory ran out (dmesg has a line "
        "then). Its last phase: update_weights. The run ends now; it continues from its last "
        "checkpoint with --load."
    )
    assert watch.signals == [lose_processes.signal.SIGTERM]
    with watch.needed():
        pass
    watch._end_run(Loss("engine 1", 9, ""))
    assert len(watch.signals) == 1


def test_an_error_without_a_loss_is_raised_as_it_is(watch, monkeypatch):
    """A wrong option at once, another error once it is clear that no process is lost."""
    monkeypatch.setattr(run_watch, "CAUSE_S", 0.05)
    for error in (ConfigError("--lr is negative"), RuntimeError("a tensor has another shape")):
        with pytest.raises(type(error)) as caught, watch.needed():
            raise error
        assert caught.value is error
    assert watch.signals == []


def test_what_ray_knows_of_a_death_is_its_reason(watch):
    """Ray's memory monitor ends processes, and says so of this process id."""
    page = "The actor died.\n\tpid: 7\nIt was killed by the memory monitor: OUT_OF_MEMORY."
    with pytest.raises(SlimeError, match=r"\(process 7\) has died: .*Ray ended it because memory"):
        with watch.needed():
            watch._end_run(Loss("engine 0", 7, ""))
            try:
                raise ray.exceptions.RayActorError(error_msg=page)
            except ray.exceptions.RayActorError as error:
                raise SlimeError("rollout 3: the process died.") from error
    other = ray.exceptions.RayActorError(error_msg=page.replace("pid: 7", "pid: 77"))
    assert run_watch._reason_by_ray(7, other) is None


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
