"""Puts tests/ and the repository root on sys.path, so that `python tests/<file>` and pytest from anywhere find support/ and slime."""

import inspect
import os
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
for folder in (TESTS, TESTS.parent):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """For `-n 2 --dist loadgroup`: a file stays on one worker, and real runs, which use both cores, stay one after the other on the first."""
    if not hasattr(config, "workerinput"):
        return
    runs = TESTS / "e2e"
    for item in items:
        item.add_marker(pytest.mark.xdist_group("runs" if runs in item.path.parents else str(item.path.relative_to(TESTS))))
    items.sort(key=lambda item: runs not in item.path.parents)


@pytest.fixture(scope="module", autouse=True)
def no_process_group_stays():
    """Process groups are the process's: a module that leaves its own, or a stand-in for Megatron's, breaks every later one, far from the cause."""
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
        pytest.fail("this module leaves the default process group of torch.distributed behind")
    mpu = sys.modules.get("megatron.core.parallel_state")
    if mpu is not None:
        foreign = [name for name, value in vars(mpu).items() if inspect.isroutine(value) and value.__name__ == "<lambda>"]
        assert not foreign, f"this module leaves stand-ins in megatron.core.parallel_state: {foreign}"


@pytest.fixture
def declared():
    """`declare_field`, undone after the test."""
    from slime.utils.rollout_fields import CONTRACT, declare_field

    names = []

    def declare(name, **kw):
        names.append(name)
        return declare_field(name, **kw)

    yield declare
    for name in names:
        CONTRACT.remove(name)
