"""Checkpoints with real Megatron ranks: resuming is the uninterrupted run bit for bit, and a
checkpoint fits every layout.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import shutil

import pytest
import torch
import torch.distributed as dist
from support.distributed import run_distributed
from support.megatron_worker import built, exported, local_batch, log_probs_of, train_steps
from support.tiny_models import make_tiny_checkpoint

from slime.exceptions import ConfigError, SlimeError

NUM_GPUS = 0

# Dropout makes the random states matter.
SAVED_UNDER = {"use_distributed_optimizer": True, "hidden_dropout": 0.1}
LOADED_UNDER = {
    "tp2-sp-plain-optimizer": {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "make_vocab_size_divisible_by": 128,
    },
    "pp2-distributed-optimizer": {
        "pipeline_model_parallel_size": 2,
        "use_distributed_optimizer": True,
    },
    "pp2-vpp2": {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1},
}


def _save_and_resume(rank, world_size, folder, save, saved_under, loaded_under):
    """Everything the tests compare; see the keys of the result."""
    from slime.backends.megatron_utils.checkpoint import save_checkpoint, save_hf_checkpoint

    result = {}
    with built(folder, **saved_under, save_hf=f"{save}/hf_{{rollout_id}}") as (args, *state):
        data, _ = local_batch(args)
        train_steps(args, state, data, rollout_id=0)
        save_checkpoint(
            args,
            0,
            *state,
            save_dir=save,
            write_extra=lambda path: (path / f"extra_{rank}.json").write_text("{}"),
        )
        save_hf_checkpoint(args, 0, state[0])
        result["saved"] = exported(args, state[0])
        train_steps(args, state, data, rollout_id=1)
        result["uninterrupted"] = (exported(args, state[0]), torch.rand(4))
    with built(folder, load_dir=save, **saved_under) as (args, *state):
        result["resumed_lr"] = state[1].param_groups[0]["lr"]
        train_steps(args, state, data, rollout_id=1)
        result["resumed"] = (exported(args, state[0]), torch.rand(4))

    # Without dropout the layouts must agree; each continues from the same checkpoint.
    result["continued"] = {}
    for name, options in {"same": {**saved_under, "hidden_dropout": 0.0}, **loaded_under}.items():
        with built(folder, load_dir=save, **options) as (args, *state):
            data, mine = local_batch(args)
            log_probs = log_probs_of(args, state[0], data, mine)
            loaded = exported(args, state[0])
            train_steps(args, state, data, rollout_id=1)
            result["continued"][name] = (log_probs, loaded, exported(args, state[0]))
    result["damaged"], result["full_disk"] = _damage(rank, folder, Path(save))
    return result


def _damage(rank, folder, save):
    """What the ranks say of a copy of the checkpoint with one flipped bit, and of a disk that is
    full while rank 0 writes.
    """
    from slime.backends.megatron_utils.checkpoint import save_checkpoint

    copy = save.with_name("damaged")
    if rank == 0:
        shutil.copytree(save, copy)
        victim = copy / "iter_0000000" / "__0_0.distcp"
        content = bytearray(victim.read_bytes())
        content[len(content) // 2] ^= 1
        victim.write_bytes(content)
    dist.barrier()
    with pytest.raises(ConfigError) as damaged, built(folder, load_dir=str(copy)):
        pass
    with pytest.raises(SlimeError) as full, built(folder) as (args, *state):
        save_checkpoint(args, 7, *state, save_dir=str(copy), write_extra=_full_disk)
    return str(damaged.value), str(full.value)


def _full_disk(path):
    raise OSError(28, "No space left on device")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(results by rank, the save folder, the initial Hugging Face folder)."""
    root = tmp_path_factory.mktemp("run")
    folder = str(make_tiny_checkpoint(root / "hf", "qwen3", num_hidden_layers=4))
    save = str(root / "save")
    return (
        run_distributed(_save_and_resume, 2, folder, save, SAVED_UNDER, LOADED_UNDER, timeout=150),
        Path(save),
        Path(folder),
    )


def _main(run, pick):
    """The value of the rank that holds the exported weights."""
    return next(value for value in map(pick, run[0]) if value)


def test_resuming_continues_bit_for_bit(run):
    """Weights, Adam's moments, the schedule and every random stream come back, so that a resumed
    run is the uninterrupted one bit for bit."""
    uninterrupted, resumed = (
        _main(run, lambda r: r["uninterrupted"][0]),
        _main(run, lambda r: r["resumed"][0]),
    )
    for name, tensor in uninterrupted.items():
        assert torch.equal(resumed[name], tensor), name
    for rank_result in run[0]:
        assert torch.equal(rank_result["uninterrupted"][1], rank_result["resumed"][1])
        assert rank_result["resumed_lr"] == pytest.approx(1e-2)


@pytest.mark.parametrize("layout", LOADED_UNDER)
def test_another_layout_continues_from_the_same_checkpoint(run, layout):
    """Another layout continues from the checkpoint: weights and Adam's moments across tensor
    shards, pipeline stages, vocabulary padding and both optimizers."""
    saved = _main(run, lambda r: r["saved"])
    same = _main(run, lambda r: r["continued"]["same"][2])
    loaded = _main(run, lambda r: r["continued"][layout][1])
    continued = _main(run, lambda r: r["continued"][layout][2])
    for name, tensor in saved.items():
        assert torch.equal(loaded[name], tensor), name
        torch.testing.assert_close(
            continued[name], same[name], rtol=0, atol=3e-6, msg=lambda text, n=name: f"{n}: {text}"
        )


def test_log_probs_after_loading_do_not_depend_on_the_layout(run):
    """Log-probs after loading are the same for every layout."""
    expected = {}
    for rank_result in run[0]:
        expected.update(rank_result["continued"]["same"][0])
    for layout in LOADED_UNDER:
        found = {}
        for rank_result in run[0]:
            found.update(rank_result["continued"][layout][0])
        assert sorted(found) == sorted(expected)
        for index, tensor in expected.items():
            torch.testing.assert_close(found[index], tensor, rtol=0, atol=1e-5)


def test_a_checkpoint_is_published_as_a_whole(run):
    """A checkpoint is one folder with manifest and pointer, holds what each rank adds, and leaves
    nothing temporary."""
    save = run[1]
    assert sorted(path.name for path in save.iterdir()) == [
        "hf_0",
        "iter_0000000",
        "latest_checkpointed_iteration.txt",
    ]
    assert (save / "latest_checkpointed_iteration.txt").read_text().strip() == "0"
    names = {path.name for path in (save / "iter_0000000").iterdir()}
    assert {
        "manifest.json",
        ".metadata",
        "extra_0.json",
        "extra_1.json",
        "state.json",
        "rng_00001.json",
        "optimizer_00001.safetensors",
    } <= names


def test_the_hugging_face_export_loads_as_a_model_with_its_tokenizer(run):
    """transformers reads the export and finds the trained weights and the tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    exported_folder = run[1] / "hf_0"
    model = AutoModelForCausalLM.from_pretrained(exported_folder)
    saved = _main(run, lambda r: r["saved"])
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, saved[name]), name
    assert (
        AutoTokenizer.from_pretrained(exported_folder)("7").input_ids
        == AutoTokenizer.from_pretrained(run[2])("7").input_ids
    )


def test_damage_is_named_on_every_rank_and_a_failed_save_changes_nothing(run):
    """Every rank names a flipped bit, and a full disk leaves the last good checkpoint."""
    save = run[1].with_name("damaged")
    for rank_result in run[0]:
        assert (
            f"{save / 'iter_0000000' / '__0_0.distcp'} has been changed" in rank_result["damaged"]
        )
        assert "--ckpt-step" in rank_result["damaged"]
        assert "No space left on device" in rank_result["full_disk"]
        assert "previous one, iteration 0, is intact" in rank_result["full_disk"]
    assert sorted(path.name for path in save.glob("*iter*")) == [
        "iter_0000000",
        "latest_checkpointed_iteration.txt",
    ]
    assert (save / "latest_checkpointed_iteration.txt").read_text().strip() == "0"


MOE_SAVED_UNDER = {"expert_model_parallel_size": 2, "use_distributed_optimizer": True}
MOE_LOADED_UNDER = {
    "tp2-sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"pipeline_model_parallel_size": 2},
    "dp2-distributed-optimizer": {"use_distributed_optimizer": True},
}


@pytest.mark.slow_layouts
def test_experts_and_their_optimizer_state_fit_every_layout(tmp_path):
    """Experts, which are cut over ranks of their own groups, load with their moments under every
    layout."""
    folder = str(make_tiny_checkpoint(tmp_path / "hf", "qwen3_moe", num_hidden_layers=4))
    results = run_distributed(
        _save_and_resume,
        2,
        folder,
        str(tmp_path / "save"),
        MOE_SAVED_UNDER,
        MOE_LOADED_UNDER,
        timeout=150,
    )
    uninterrupted = next(r["uninterrupted"][0] for r in results if r["uninterrupted"][0])
    resumed = next(r["resumed"][0] for r in results if r["resumed"][0])
    for name, tensor in uninterrupted.items():
        assert torch.equal(resumed[name], tensor), name
        for layout in MOE_LOADED_UNDER:
            continued = next(
                r["continued"][layout][2] for r in results if r["continued"][layout][2]
            )
            torch.testing.assert_close(
                continued[name],
                tensor,
                rtol=0,
                atol=3e-6,
                msg=lambda text, n=(layout, name): f"{n}: {text}",
            )


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
