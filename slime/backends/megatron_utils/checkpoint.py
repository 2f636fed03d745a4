"""Saving and resuming a training run: weights, optimizer, schedule, random states, published as one
folder.

A checkpoint folder holds the weights in Megatron-core's distributed format, optimizer state in
safetensors, everything else as JSON, and a manifest of hashes. Nothing in it is unpickled: the
distributed format's index is taken apart as data (`weights_index`).
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import mpu

from slime.backends.megatron_utils import checkpoint_files as files
from slime.backends.megatron_utils.agreement import RanksFailed, agreed, gathered
from slime.backends.megatron_utils.hf_checkpoint_saver import save_hf_model_direct_to_path
from slime.backends.megatron_utils.hf_to_megatron import load_hf_weights
from slime.backends.megatron_utils.optimizer_state import load_optimizer_state, save_optimizer_state
from slime.backends.megatron_utils.rng_state import collect_rng_state, restore_rng_state
from slime.backends.megatron_utils.weights_state import load_weights_into, save_weights
from slime.exceptions import ConfigError, SaveError, SlimeError
from slime.files.disk_space import disk_space

if TYPE_CHECKING:
    from megatron.core.optimizer import MegatronOptimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

__all__ = ["load_checkpoint", "load_weights", "save_checkpoint", "save_hf_checkpoint"]

logger = logging.getLogger(__name__)

_STATE = "state.json"


# --- loading --------------------------------------------------------------------------------------


def load_checkpoint(
    args: argparse.Namespace,
    model: Sequence[torch.nn.Module],
    optimizer: MegatronOptimizer | None = None,
    opt_param_scheduler: OptimizerParamScheduler | None = None,
    *,
    load_dir: str | None,
) -> int | None:
    """Fills model, optimizer, scheduler and random states; returns the iteration to continue after,
    None for a fresh start.

    `load_dir` is a Megatron checkpoint folder (iteration `args.ckpt_step`, or its latest) or a
    Hugging Face folder; None means `args.hf_checkpoint`. Weights and optimizer state may come from
    another layout; random states are restored only under the same. `args.finetune`, `no_load_optim`
    and `no_load_rng` leave parts out. Called by all ranks together. Raises `ConfigError` where
    there is nothing to load, and when a file is missing, cut or changed, naming it on every rank.
    """
    if load_dir is None or not files.is_megatron_checkpoint(load_dir):
        _load_hf(args, model, load_dir or args.hf_checkpoint)
        _tell_optimizer(optimizer)
        return None
    folder, iteration = files.find_checkpoint(load_dir, args.ckpt_step)
    _verify(folder)
    load_weights_into(folder, model)
    _tell_optimizer(optimizer)
    if args.finetune:
        return None
    state = _read_state(folder)
    if optimizer is not None and not args.no_load_optim:
        load_optimizer_state(folder, model, optimizer)
        _load_scheduler(folder, state, opt_param_scheduler)
    if not args.no_load_rng:
        _load_rng(folder, state)
    return iteration


def load_weights(
    args: argparse.Namespace,
    model: Sequence[torch.nn.Module],
    path: str,
    *,
    ckpt_step: int | None = None,
) -> None:
    """Fills the model alone, from a Megatron checkpoint or a Hugging Face folder. Called by all
    ranks together.
    """
    if not files.is_megatron_checkpoint(path):
        _load_hf(args, model, path)
        return
    folder, _ = files.find_checkpoint(path, ckpt_step)
    _verify(folder)
    load_weights_into(folder, model)


def _load_hf(args: argparse.Namespace, model: Sequence[torch.nn.Module], path: str | None) -> None:
    if path is None:
        raise ConfigError("There are no weights to start from. Give --hf-checkpoint or --load.")
    if not (Path(path) / "config.json").is_file():
        raise ConfigError(
            f"{path} is neither a Megatron checkpoint (no {files.TRACKER}) nor a Hugging Face "
            "folder (no config.json)."
        )
    load_hf_weights(args, model, path)


def _tell_optimizer(optimizer: MegatronOptimizer | None) -> None:
    if optimizer is not None:
        # Its fp32 main parameters were copied from the weights of before.
        optimizer.reload_model_params()


def _verify(folder: Path) -> None:
    manifest = files.read_manifest(folder)
    if manifest is None:
        logger.warning(
            "%s has no %s: it was not saved by slime, and its files cannot be checked.",
            folder,
            files.MANIFEST,
        )
        return
    shares = gathered(lambda: files.damaged_files(folder, manifest, _my_share(sorted(manifest))))
    problems = [problem for share in shares for problem in share]
    if problems:
        raise ConfigError(
            f"{' '.join(problems)} Resume from an earlier checkpoint with --ckpt-step."
        )


def _read_state(folder: Path) -> dict[str, Any]:
    path = folder / _STATE
    if not path.is_file():
        raise ConfigError(
            f"{folder} was not saved by slime ({_STATE} is missing): only its weights can be "
            "loaded. Use --finetune."
        )
    return json.loads(path.read_text())


def _load_scheduler(
    folder: Path, state: dict[str, Any], scheduler: OptimizerParamScheduler | None
) -> None:
    saved = state["scheduler"]
    if saved is None or scheduler is None:
        raise ConfigError(f"{folder} holds no scheduler state. Resume with --no-load-optim.")
    own = scheduler.state_dict()
    differing = [
        f"{key} {saved[key]!r} (now {own[key]!r})"
        for key in own
        if key != "num_steps" and saved.get(key) != own[key]
    ]
    if differing and scheduler.override_opt_param_scheduler:
        logger.info("The schedule of this run replaces the checkpoint's: %s.", ", ".join(differing))
    elif differing:
        logger.warning(
            (
                "The checkpoint's learning-rate schedule stays in force: %s. "
                "--override-opt-param-scheduler replaces it."
            ),
            ", ".join(differing),
        )
    scheduler.num_steps = 0
    scheduler.load_state_dict(saved)


def _load_rng(folder: Path, state: dict[str, Any]) -> None:
    path = folder / _rng_file(dist.get_rank())
    if state["layout"] != _layout():
        logger.warning(
            "Random states are not restored: the checkpoint's layout is %s, this run's %s.",
            state["layout"],
            _layout(),
        )
    elif not path.is_file():
        raise ConfigError(f"{folder} holds no random states. Resume with --no-load-rng.")
    else:
        restore_rng_state(json.loads(path.read_text()))


# --- saving ---------------------------------------------------------------------------------------


def save_checkpoint(
    args: argparse.Namespace,
    iteration: int,
    model: Sequence[torch.nn.Module],
    optimizer: MegatronOptimizer | None = None,
    opt_param_scheduler: OptimizerParamScheduler | None = None,
    *,
    save_dir: str,
    write_extra: Callable[[Path], None] | None = None,
    retention: files.Retention | None = None,
) -> Path:
    """Publishes the state after `iteration` as `save_dir`/iter_<iteration>; returns that folder.
    Called by all ranks together.

    write_extra: called on every rank with the folder while it is being written; what it puts there
    is published with the rest. Where it has collectives, its other steps run in `agreed`.
    retention: which checkpoints stay; None: the newest `args.keep_checkpoints`. The pointer moves
    only after every file's hash was read back. Raises `SaveError` on all ranks when anything could
    not be written on any of them: the previous checkpoints and the pointer are then as they were,
    and nothing of the new one is left.
    """
    is_first, is_published = dist.get_rank() == 0, False
    temporary, final = (
        files.temporary_folder(save_dir, iteration),
        files.iteration_folder(save_dir, iteration),
    )

    def by_first(step: Callable[[], object]) -> None:
        agreed(lambda: step() if is_first else None)

    try:
        by_first(lambda: files.begin(temporary))
        save_weights(temporary, model)
        if optimizer is not None and not args.no_save_optim:
            save_optimizer_state(temporary, model, optimizer)
        agreed(lambda: _write_own_state(args, temporary, iteration, opt_param_scheduler))
        if write_extra is not None:
            agreed(lambda: write_extra(temporary))
        manifest: dict[str, Any] = {}
        for entries in gathered(
            lambda: files.hash_files(temporary, _my_share(files.files_below(temporary)), sync=True)
        ):
            manifest.update(entries)
        by_first(lambda: files.publish(temporary, final, manifest))
        is_published = True
        agreed(lambda: _require_undamaged(final, manifest))
        by_first(lambda: files.point_to(save_dir, iteration))
    except RanksFailed as error:

        def clean_up() -> str:
            # looked at before anything is removed
            state = _state_of_disk(Path(save_dir))
            shutil.rmtree(temporary, ignore_errors=True)
            if is_published:
                files.withdraw(final)
            return state

        state = gathered(lambda: clean_up() if is_first else "")[0]
        raise SaveError(
            f"The checkpoint of iteration {iteration} was not saved: {error}. {state}"
        ) from error
    if is_first:
        files.prune(
            save_dir,
            retention or files.Retention(args.keep_checkpoints),
            current=iteration,
        )
    return final


def _write_own_state(
    args: argparse.Namespace,
    folder: Path,
    iteration: int,
    scheduler: OptimizerParamScheduler | None,
) -> None:
    """This rank's random states and, on rank 0, the iteration, the layout and the schedule."""
    if not args.no_save_rng:
        (folder / _rng_file(dist.get_rank())).write_text(json.dumps(collect_rng_state()))
    if dist.get_rank() == 0:
        saved = scheduler.state_dict() if scheduler is not None and not args.no_save_optim else None
        state = {"iteration": iteration, "layout": _layout(), "scheduler": saved}
        (folder / _STATE).write_text(json.dumps(state, indent=1))


def _require_undamaged(final: Path, manifest: dict[str, Any]) -> None:
    damaged = files.damaged_files(final, manifest, _my_share(sorted(manifest)))
    if damaged:
        raise SlimeError(f"{final} does not read back as written: {' '.join(damaged)}")


def _state_of_disk(save: Path) -> str:
    """What there is below `save` after a failed save, and what to do."""
    latest = files.latest_iteration(save)
    goes_on = "or let a run go on without a checkpoint with --save-failure continue."
    if latest is None:
        return (
            f"There is no earlier one; {disk_space(save)}. Make room or correct --save, {goes_on}"
        )
    return (
        f"The previous one, iteration {latest}, is intact; {disk_space(save)}. Make room or correct "
        f"--save, then go on with --load {save}, {goes_on}"
    )


def save_hf_checkpoint(
    args: argparse.Namespace, rollout_id: int, model: Sequence[torch.nn.Module]
) -> Path:
    """Exports Hugging Face weights to `args.save_hf` with {rollout_id} filled in; returns the
    folder. Called by all ranks together.
    """
    folder = Path(args.save_hf.format(rollout_id=rollout_id))
    save_hf_model_direct_to_path(args, folder, model)
    return folder


def _my_share(names: list[str]) -> list[str]:
    return names[dist.get_rank() :: dist.get_world_size()]


def _layout() -> dict[str, int]:
    return {
        "world": dist.get_world_size(),
        "tensor": mpu.get_tensor_model_parallel_world_size(),
        "pipeline": mpu.get_pipeline_model_parallel_world_size(),
        "virtual_pipeline": mpu.get_virtual_pipeline_model_parallel_world_size() or 1,
        "context": mpu.get_context_parallel_world_size(),
        "expert": mpu.get_expert_model_parallel_world_size(),
        "expert_tensor": mpu.get_expert_tensor_parallel_world_size(),
    }


def _rng_file(rank: int) -> str:
    return f"rng_{rank:05d}.json"
