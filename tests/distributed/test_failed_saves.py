"""A checkpoint on a full or failing disk, with real ranks: every rank raises the same error, nothing
hangs, and the checkpoint before loads.
"""

import argparse
import errno
import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pytest
import torch
import torch.distributed as dist
from support.distributed import run_distributed
from support.megatron_worker import built, exported
from support.tiny_models import make_tiny_checkpoint

NUM_GPUS = 0

# what each kind of file is called; each is opened by the rank that writes it
KINDS = (
    "common.pt",
    "metadata.json",
    ".distcp",
    ".metadata.tmp",
    "optimizer_index.json",
    "rng_0000",
    "state.json",
    "actor_state.json",
    ".manifest.json.",
    ".latest_checkpointed_iteration.txt.",
)
# (options, kinds of files): all ranks write alike in the other layouts
LAYOUTS = {
    "dp2": ({"use_distributed_optimizer": True}, KINDS),
    "tp2": ({"tensor_model_parallel_size": 2}, KINDS[:1] + KINDS[2:3] + KINDS[5:6]),
    "pp2": ({"pipeline_model_parallel_size": 2}, KINDS[:1] + KINDS[2:3] + KINDS[5:6]),
}
DISK_BYTES = 8 * 2**20
_fault: dict = {}


def _hook(event, values):
    """Lets the system refuse to open one kind of file for writing, in this process."""
    if event != "open" or not _fault or not isinstance(values[0], str | os.PathLike):
        return
    path, flags = os.fspath(values[0]), values[2]
    writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR)
    if writes and isinstance(path, str) and _fault["kind"] in os.path.basename(path):
        _fault["hit"] = True
        if _fault.get("vanish"):
            shutil.rmtree(_fault["vanish"], ignore_errors=True)
        else:
            raise OSError(_fault["errno"], os.strerror(_fault["errno"]), path)


def _save(args, state, iteration, save, *, weight_sets=()):
    """The message of a save as the actor does it, None where it was published."""
    from slime.backends.megatron_utils.actor_state import ActorState, save_actor_state
    from slime.backends.megatron_utils.checkpoint import save_checkpoint
    from slime.backends.megatron_utils.weights_backup import WeightsBackup
    from slime.exceptions import SaveError

    weights = WeightsBackup(state[0])
    weights.backup("actor")
    for tag in weight_sets:
        weights.backup(tag)
    weights.active = "actor"
    counters = ActorState(weight_version=1, last_train_step=0, sets=tuple(weight_sets))
    try:
        save_checkpoint(
            args,
            iteration,
            *state,
            save_dir=str(save),
            write_extra=lambda path: save_actor_state(path, counters, state[0], weights),
        )
    except SaveError as error:
        return str(error)
    return None


def _faults(rank, world_size, folder, root):
    """{(layout, kind, rank): (whether the fault was met, messages by rank, what is left)}"""
    found = {}
    for layout, (options, kinds) in LAYOUTS.items():
        save = Path(root) / layout
        with built(folder, **options) as (args, *state):
            assert _save(args, state, 0, save) is None
            iteration = 0
            for kind in kinds:
                for victim in range(world_size):
                    iteration += 1
                    number = errno.ENOSPC if victim == 0 else errno.EIO
                    if rank == victim:
                        _fault.update(kind=kind, errno=number, hit=False)
                    said = _save(args, state, iteration, save, weight_sets=("ref",))
                    met = _fault.pop("hit", False)
                    _fault.clear()
                    everyone = [None] * world_size
                    dist.all_gather_object(everyone, (met, said))
                    found[layout, kind, victim] = (
                        any(met for met, _ in everyone),
                        [said for _, said in everyone],
                        sorted(path.name for path in save.iterdir()),
                    )
                    dist.barrier()
                    if rank == 0 and said is None:
                        (save / "latest_checkpointed_iteration.txt").write_text("0\n")
                        shutil.rmtree(save / f"iter_{iteration:07d}")
                    dist.barrier()
            weights = exported(args, state[0])
        with built(folder, load_dir=str(save), **options) as (args, *state):
            for name, tensor in exported(args, state[0]).items():
                assert torch.equal(tensor, weights[name])
    return found


def _vanishing(rank, world_size, folder, root):
    """Messages of saves whose folder goes, or allows no writing, in the middle."""
    said = []
    with built(folder) as (args, *state):
        for number, kind in enumerate(("common.pt", "state.json")):
            save = Path(root) / f"gone{number}"
            if rank == 0:
                _fault.update(kind=kind, vanish=str(save))
            said.append(_save(args, state, 0, save))
            _fault.clear()
        save = Path(root) / "read_only"
        _fault.update(kind="rng_0000", errno=errno.EROFS)
        said.append(_save(args, state, 0, save))
        _fault.clear()
    return said


def _sizes(rank, world_size, folder, root):
    """Messages of saves whose files may grow to so many bytes, on one rank."""
    from slime.backends.megatron_utils.checkpoint import save_hf_checkpoint
    from slime.exceptions import SaveError

    said = {}
    save = Path(root) / "save"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with built(folder, save_hf=f"{root}/hf_{{rollout_id}}") as (args, *state):
        assert _save(args, state, 0, save) is None
        files = (save / "iter_0000000").iterdir()
        sizes = sorted({path.stat().st_size - 1 for path in files if path.is_file()})
        for limit in sizes[:: max(1, len(sizes) // 6)]:
            for victim in range(world_size):
                if rank == victim:
                    resource.setrlimit(resource.RLIMIT_FSIZE, (max(limit, 1), hard))
                try:
                    failed = _save(args, state, 1, save)
                    try:
                        save_hf_checkpoint(args, 0, state[0])
                        exported_text = None
                    except SaveError as error:
                        exported_text = str(error)
                finally:
                    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
                said[limit, victim] = failed, exported_text
                dist.barrier()
    return said


def _fill(rank, world_size, folder, disk):
    """Messages of saves with so many bytes free on the disk."""
    said = {}
    ballast = Path(disk) / "ballast"
    save = Path(disk) / "save"
    with built(folder) as (args, *state):
        assert _save(args, state, 0, save) is None
        dist.barrier()
        for number in range(3, 14, 2):
            free = 4096 * 2**number
            if rank == 0:
                ballast.unlink(missing_ok=True)
                usable = shutil.disk_usage(disk).free
                ballast.write_bytes(bytes(max(0, usable - free)))
            dist.barrier()
            said[free] = _save(args, state, number + 1, save)
            dist.barrier()
            if said[free] is None:
                break
        names = sorted(path.name for path in save.iterdir())
    return said, names


def _all(rank, world_size, folder, root, disk):
    """One process a rank for all tests: importing Megatron costs more than they do."""
    sys.addaudithook(_hook)
    return {
        "faults": _faults(rank, world_size, folder, root),
        "vanishing": _vanishing(rank, world_size, folder, root),
        "sizes": _sizes(rank, world_size, folder, root),
        "disk": _fill(rank, world_size, folder, disk) if disk else None,
    }


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(folder, a real file system of 8 MiB in it or None, results by rank)."""
    root = tmp_path_factory.mktemp("run")
    disk = root / "disk"
    disk.mkdir()
    # needs root
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", str(disk)]
    is_mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    folder = str(make_tiny_checkpoint(root / "hf", "qwen3", num_hidden_layers=2))
    try:
        place = str(disk) if is_mounted else None
        results = run_distributed(_all, 2, folder, str(root), place, timeout=150)
        yield root, place, results
    finally:
        if is_mounted:
            subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_write_that_fails_on_one_rank_is_the_same_error_on_every_rank(run):
    """Each kind of file, refused to rank 0 (disk full) or to rank 1 (disk failing), in three
    layouts: both ranks name it, the folder is as it was, and the checkpoint before loads."""
    root, _, results = run
    found, others = (result["faults"] for result in results)
    assert found == others
    met = {key for key, (was_met, _, _) in found.items() if was_met}
    assert {kind for _, kind, _ in met} == set(KINDS)
    assert {(layout, ".distcp", rank) for layout in LAYOUTS for rank in (0, 1)} <= met
    before = ["iter_0000000", "latest_checkpointed_iteration.txt"]
    for (layout, kind, victim), (was_met, said, left) in found.items():
        if not was_met:
            assert said == [None, None], (layout, kind, victim)
            continue
        cause = "No space left on device" if victim == 0 else "Input/output error"
        for text in said:
            assert f"rank {victim}: " in text and cause in text and kind in text, text
            assert "The previous one, iteration 0, is intact" in text
            assert f"{root / layout} is on a disk with" in text
        assert left == before, (layout, kind, victim)


def test_a_folder_that_vanishes_or_turns_read_only_is_named(run):
    """A save folder that is removed while ranks write, and a disk that the system has made
    read-only, end the save on every rank."""
    first, second = (result["vanishing"] for result in run[2])
    assert first == second and all(first)
    assert all("No such file or directory" in text for text in first[:-1])
    assert "rank 0: [Errno 30] Read-only file system" in first[-1]
    assert "rank 1: [Errno 30] Read-only file system" in first[-1]
    assert all("There is no earlier one" in text for text in first)


def test_a_write_that_stops_in_the_middle_of_any_file_ends_the_save_on_every_rank(run):
    """A file that takes no more bytes, at the size of each file of a checkpoint: cut weights,
    moments and indexes are errors of every rank, also in the Hugging Face export."""
    root, _, results = run
    first, second = (result["sizes"] for result in results)
    assert first == second and len(first) >= 12
    texts = [text for pair in first.values() for text in pair if text]
    assert len(texts) >= 12
    for text in texts:
        assert "File too large" in text and f"{root}" in text, text
    assert json.loads((root / "save" / "latest_checkpointed_iteration.txt").read_text()) in (
        0,
        1,
    )
    assert not list(root.glob(".*writing*")) and not list(root.glob("save/.*"))


def test_a_disk_that_fills_up_names_itself_and_the_next_save_works(run):
    """A real disk with 32 KiB, 128 KiB, ... free: the error names the full disk, the partial folder is
    gone, and with enough room the next save is published."""
    _, disk, results = run
    if disk is None:
        pytest.skip("mounting a file system needs root")
    (first, names), (second, _) = (result["disk"] for result in results)
    assert first == second
    *failed, last = first.values()
    assert last is None and len(failed) >= 2
    for text in failed:
        assert "No space left on device" in text and f"{disk}" in text, text
        assert "iteration 0, is intact" in text
    assert len(names) == 3 and names[0] == "iter_0000000"


class _Saves:
    """Stands for the rollout manager and for a group of trainers: saving ends as told."""

    def __init__(self, error=None):
        self.error, self.num_published = error, 0

    def save(self, rollout_id):
        return None

    def save_model(self, rollout_id):
        if self.error is not None:
            raise self.error


def _run(error, *, save_failure, run_dir):
    from slime.ray.actors import LocalActor
    from slime.train import Run

    args = argparse.Namespace(
        save_failure=save_failure,
        step_timeout=5.0,
        wandb_always_use_train_step=False,
        run_dir=run_dir,
    )
    return Run(args, LocalActor(_Saves), _Saves(error), None, 0, 3, None)


def test_a_failed_save_ends_the_run_or_is_tried_again_as_asked(tmp_path, monkeypatch, caplog):
    """--save-failure end (the default) and continue; the last save of a run and any other error end
    it either way. The report has the failed ones as a problem."""
    from slime import train
    from slime.exceptions import EngineError, SaveError
    from slime.harness.report import find_save_problems
    from slime.harness.run_records import RunRecords

    logged = []
    monkeypatch.setattr(train.tracking, "log", lambda args, metrics, **_: logged.append(metrics))
    full = SaveError("rank 0: No space left on device")
    with pytest.raises(SaveError):
        train.save(_run(full, save_failure="end", run_dir=tmp_path), 0)
    train.save(_run(full, save_failure="continue", run_dir=tmp_path), 0)
    assert "rollout 0: the run continues without it: rank 0: No space left" in caplog.text
    train.save(_run(None, save_failure="continue", run_dir=tmp_path), 1)
    assert [metrics["rollout/save_failed"] for metrics in logged] == [1, 0]
    for error, rollout_id in ((full, 2), (EngineError("gone"), 0)):
        with pytest.raises(type(error)):
            train.save(_run(error, save_failure="continue", run_dir=tmp_path), rollout_id)
    series = {"rollout/save_failed": {0: 1.0, 1: 0.0}}
    assert "1 of 2 checkpoints were not saved, the first after rollout 0" in str(
        find_save_problems(RunRecords(series, 0))
    )


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
