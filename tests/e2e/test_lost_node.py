"""A run over a Ray cluster whose nodes go away: three raylets on this machine."""

import sys
import time
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also as `python tests/...`
from support import small_run

NUM_GPUS = 0

# The control store gives a node up after two seconds; its default is half a minute.
QUICK = {"period_ms": 500, "failure_threshold": 4, "timeout_ms": 1000, "initial_delay_ms": 500}


@pytest.fixture
def cluster(monkeypatch):
    """A head without devices."""
    for name, value in QUICK.items():
        monkeypatch.setenv(f"RAY_health_check_{name}", str(value))
    for name, value in small_run.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", f"{small_run.ROOT}:{small_run.ROOT / 'tests'}")
    head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": 100 * 1024**2}
    started = Cluster(initialize_head=True, head_node_args=head)
    yield started
    started.shutdown()


def num_trained(run_dir):
    path = run_dir / "metrics.jsonl"
    return path.read_text().count('"train/loss"') if path.exists() else 0


def wait_until(condition, process, timeout_s=90):
    deadline = time.monotonic() + timeout_s
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            process.terminate()
            raise AssertionError(process.communicate(timeout=30)[0][-6000:])
        time.sleep(0.1)


@pytest.mark.slow_layouts
@pytest.mark.timeout(240)
def test_a_run_goes_on_on_the_nodes_that_are_left_and_ends_where_they_hold_it_no_more(
    cluster, tmp_path
):
    """Ranks, engine and rollout manager are on a node that goes: all are placed on the other one and
    the run trains on; when that goes too, the error says which are gone, what the run needs and what
    is left."""
    from examples.addition.prepare import prepare

    data, run_dir = Path(prepare(tmp_path / "data")), tmp_path / "run"
    first = cluster.add_node(num_cpus=2, object_store_memory=100 * 1024**2)
    options = ["--ray-address", cluster.address, "--num-rollout", 100000]
    options += ["--recovery-interval", 1, "--use-fault-tolerance"]
    process = small_run.start(data, run_dir, *options, asynchronous=True)
    try:
        wait_until(lambda: num_trained(run_dir) >= 2, process)
        second = cluster.add_node(num_cpus=2, object_store_memory=100 * 1024**2)
        cluster.remove_node(first, allow_graceful=False)
        time.sleep(1.0)  # what was under way on it is over
        reached = num_trained(run_dir)
        wait_until(lambda: num_trained(run_dir) >= reached + 4, process)
        cluster.remove_node(second, allow_graceful=False)
        output, _ = process.communicate(timeout=90)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(30)
    assert process.returncode == 1
    assert " back after " in output
    assert "error: 2 node(s) of the Ray cluster are gone" in output
    assert "needed: 2 CPU" in output and "left: 0 CPU" in output


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
