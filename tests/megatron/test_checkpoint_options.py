"""Which parts of a checkpoint are written and read by option, and when a save counts. One process,
one tiny model, two iterations."""

import json
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pytest
import torch
import torch.distributed as dist
from support.megatron_worker import built, exported, local_batch, train_steps
from support.tiny_models import make_tiny_checkpoint

from slime.exceptions import ConfigError, SlimeError

NUM_GPUS = 0


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The Hugging Face folder, the save folder with iterations 0 and 1, and per iteration: weights,
    the scheduler's clock, the next random number.
    """
    root = tmp_path_factory.mktemp("run")
    dist.init_process_group("gloo", init_method=f"file://{root / 'store'}", rank=0, world_size=1)
    from slime.backends.megatron_utils.checkpoint import save_checkpoint

    hf, save, after = make_tiny_checkpoint(root / "hf", "qwen3"), root / "save", []
    with built(hf) as (args, *state):
        data, _ = local_batch(args)
        for iteration in (0, 1):
            train_steps(args, state, data, rollout_id=iteration)
            save_checkpoint(args, iteration, *state, save_dir=str(save))
            weights = {name: tensor.clone() for name, tensor in exported(args, state[0]).items()}
            after.append((weights, state[2].num_steps, torch.rand(1)))
    yield hf, save, after
    dist.destroy_process_group()


def load(hf, save, **options):
    """(iteration, weights, the scheduler's clock, whether there are moments, the next random
    number) after a load with these options.
    """
    from slime.backends.megatron_utils.checkpoint import load_checkpoint

    with built(hf, **options) as (args, model, optimizer, scheduler):
        # the second load replaces the first: the schedule's clock does not add up
        for _ in range(2):
            iteration = load_checkpoint(args, model, optimizer, scheduler, load_dir=str(save))
        drawn = torch.rand(1)
        moments = [
            inner_state["exp_avg"]
            for part in optimizer.chained_optimizers
            for inner_state in part.optimizer.state.values()
        ]
        has_moments = bool(moments) and any(bool(moment.any()) for moment in moments)
        return iteration, exported(args, model), scheduler.num_steps, has_moments, drawn


def are_equal(first, second):
    return all(torch.equal(first[name], second[name]) for name in second)


@pytest.mark.parametrize(
    ("options", "iteration", "from_iteration", "clock", "has_moments", "resumes_random"),
    [
        ({}, 1, 1, 16, True, True),
        ({"ckpt_step": 0}, 0, 0, 8, True, True),
        ({"finetune": True}, None, 1, 0, False, False),
        ({"no_load_optim": True}, 1, 1, 0, False, True),
        ({"no_load_rng": True}, 1, 1, 16, True, False),
    ],
    ids=lambda value: ",".join(value) or "nothing" if isinstance(value, dict) else "",
)
def test_each_part_is_read_or_left_as_the_options_say(
    saved, options, iteration, from_iteration, clock, has_moments, resumes_random
):
    """Each part is read or left by its option; after two rollouts of two steps of four samples the
    schedule's clock is at 8 and 16."""
    hf, save, after = saved
    assert [clock for _, clock, _ in after] == [8, 16] and not are_equal(after[0][0], after[1][0])
    found = load(hf, save, **options)
    assert (found[0], found[2], found[3]) == (iteration, clock, has_moments)
    assert are_equal(found[1], after[from_iteration][0])
    assert torch.equal(found[4], after[from_iteration][2]) is resumes_random


def test_weights_alone_come_from_the_iteration_that_was_asked_for(saved):
    """--ref-ckpt-step takes the reference's weights from another iteration than the latest."""
    from slime.backends.megatron_utils.checkpoint import load_weights

    hf, save, after = saved
    with built(hf) as (args, model, *_):
        for step, expected in ((0, 0), (None, 1)):
            load_weights(args, model, str(save), ckpt_step=step)
            assert are_equal(exported(args, model), after[expected][0])


def test_random_states_of_another_layout_are_not_restored(saved, monkeypatch):
    """Random states of another layout are not restored: rank 0 of two and rank 0 of one hold
    different parts of the model."""
    from slime.backends.megatron_utils import checkpoint

    hf, save, after = saved
    own = checkpoint._layout
    monkeypatch.setattr(checkpoint, "_layout", lambda: {**own(), "tensor": 2})
    found = load(hf, save)
    assert found[0] == 1 and not torch.equal(found[4], after[1][2])


def test_a_changed_file_is_named_before_anything_is_loaded(saved, tmp_path):
    """A flipped bit of the optimizer's state is named before anything is loaded."""
    hf, save, _ = saved
    copy = tmp_path / "copy"
    shutil.copytree(save, copy)
    victim = copy / "iter_0000001" / "optimizer_00000.safetensors"
    content = bytearray(victim.read_bytes())
    content[-1] ^= 1
    victim.write_bytes(content)
    with pytest.raises(ConfigError, match="optimizer_00000.safetensors has been changed"):
        load(hf, copy)


def test_what_is_not_to_be_saved_is_not_there(saved, tmp_path):
    """With --no-save-optim and --no-save-rng these parts are not written, and a load that needs
    them is an error."""
    from slime.backends.megatron_utils.checkpoint import save_checkpoint

    hf, _, _ = saved
    for name, options in (("optim", {"no_save_optim": True}), ("rng", {"no_save_rng": True})):
        with built(hf, **options) as (args, *state):
            folder = save_checkpoint(args, 0, *state, save_dir=str(tmp_path / name))
        files = {path.name for path in folder.iterdir()}
        assert ("optimizer_index.json" in files, "rng_00000.json" in files) == (
            name != "optim",
            name != "rng",
        )
        assert (json.loads((folder / "state.json").read_text())["scheduler"] is None) is (
            name == "optim"
        )
    with pytest.raises(ConfigError, match="--no-load-optim"):
        load(hf, tmp_path / "optim")
    with pytest.raises(ConfigError, match="--no-load-rng"):
        load(hf, tmp_path / "rng")


def _full_disk(path):
    raise OSError(28, "No space left on device")


def test_a_save_counts_only_when_it_was_written_and_read_back(saved, tmp_path, monkeypatch):
    """A save on a full disk, or one that reads back otherwise, is an error, and the last good
    checkpoint stays the latest."""
    from slime.backends.megatron_utils import checkpoint
    from slime.backends.megatron_utils import checkpoint_files as files

    hf, _, _ = saved
    with built(hf) as (args, *state):
        checkpoint.save_checkpoint(args, 3, *state, save_dir=str(tmp_path))
        with pytest.raises(
            SlimeError, match="was not saved: rank 0: .*No space left.*iteration 3, is intact"
        ):
            checkpoint.save_checkpoint(
                args, 4, *state, save_dir=str(tmp_path), write_extra=_full_disk
            )
        assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000003", files.TRACKER]
        with monkeypatch.context() as patch:
            patch.setattr(
                files,
                "damaged_files",
                lambda folder, manifest, names: [f"{folder} reads otherwise."],
            )
            with pytest.raises(SlimeError, match="does not read back as written"):
                checkpoint.save_checkpoint(args, 5, *state, save_dir=str(tmp_path))
            with pytest.raises(SlimeError, match="iteration 3, is intact"):
                checkpoint.save_checkpoint(args, 3, *state, save_dir=str(tmp_path))
        assert files.published_iterations(tmp_path) == [3] and not list(tmp_path.glob(".*"))
        assert files.find_checkpoint(tmp_path, None)[1] == 3
        args.keep_checkpoints = 1
        checkpoint.save_checkpoint(args, 6, *state, save_dir=str(tmp_path))
    assert files.find_checkpoint(tmp_path, None)[1] == 6 and files.published_iterations(
        tmp_path
    ) == [6]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
