"""Puts tests/ and the repository root on sys.path, so that `python tests/<file>` and pytest from
anywhere find support/ and slime.
"""

import fcntl
import inspect
import os
import shutil
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
RUNS = "tests/e2e/"  # the longest tests: with two workers they begin first
for folder in (TESTS, TESTS.parent):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """With `-n 2`, a file stays on one worker, and real runs, which use both cores, stay one after
    the other on the worker that begins with them.
    """
    from xdist.scheduler import LoadScopeScheduling

    class FileScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file = nodeid.split("::", 1)[0]
            return RUNS if file.startswith(RUNS) else file

    # in the order of the collection, not the largest file first
    config.option.loadscopereorder = False
    return FileScheduling(config, log)


def pytest_collection_modifyitems(config, items):
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: not item.nodeid.startswith(RUNS))


@pytest.fixture(scope="module", autouse=True)
def no_process_group_stays():
    """Fails the module that leaves a process group or stand-ins for Megatron's behind; both are
    global and break later modules."""
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
        pytest.fail("this module leaves the default process group of torch.distributed behind")
    mpu = sys.modules.get("megatron.core.parallel_state")
    if mpu is not None:
        foreign = [
            name
            for name, value in vars(mpu).items()
            if inspect.isroutine(value) and value.__name__ == "<lambda>"
        ]
        assert not foreign, (
            f"this module leaves stand-ins in megatron.core.parallel_state: {foreign}"
        )


@pytest.fixture(scope="session")
def recorded_run(tmp_path_factory):
    """The recording of `record_small_run`, made once for all workers: a real run takes seconds.
    Copy what is changed."""
    from support.recordings import record_small_run

    base = tmp_path_factory.getbasetemp()
    root = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "recorded"
    with open(f"{root}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (root / "complete").exists():
            shutil.rmtree(root, ignore_errors=True)
            root.mkdir()
            record_small_run(root)
            (root / "complete").touch()
    return root / "recording"


@pytest.fixture
def declared():
    """`declare_field`, undone after the test."""
    from slime.data.fields import CONTRACT, declare_field

    names = []

    def declare(name, **kw):
        names.append(name)
        return declare_field(name, **kw)

    yield declare
    for name in names:
        CONTRACT.remove(name)
