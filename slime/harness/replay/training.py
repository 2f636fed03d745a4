"""The stage `train`: a recorded rollout is trained again, by a run of its own from the recorded
weights, which records what it does.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from slime.algorithms.table import ESTIMATORS
from slime.config.derive import has_megatron_checkpoint
from slime.exceptions import ConfigError, SlimeError
from slime.harness.replay.options import given_options, recorded_config
from slime.recording.manifest import CRITIC_WEIGHTS_FOLDER, WEIGHTS_FOLDER
from slime.recording.reader import RecordedRollout, Recording

TRAIN_STAGE = "train"
REFERENCE_FOLDER = "reference"  # in a golden run that lacks rollout 0
TIMEOUT_S = 3600.0
# the axes that hold one model; without --actor-num-gpus-per-node a replay has one copy of it
MODEL_AXES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
)


def replay_training(
    recording: Recording,
    rollout: RecordedRollout,
    words: Sequence[str],
    *,
    folder: Path,
    timeout_s: float,
) -> Recording:
    """Trains the rollout again below `folder` and returns the recording of it. `words` are options
    of `slime train` that replace the recorded ones.

    ConfigError where there are no weights to start from; SlimeError with the end of its output
    where the run fails.
    """
    config, first = training_config(recording, rollout, given_options(words), folder=folder)
    path = folder / "replay.yaml"
    path.write_bytes(orjson.dumps(config))  # JSON is YAML
    command = [sys.executable, "-m", "slime.train", "--config", str(path), *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise SlimeError(
            f"Training rollouts {first} to {rollout.rollout_id} again did not end within "
            f"{timeout_s:.0f} s (--timeout); its log is in {folder / 'run' / 'logs'}."
        ) from None
    if done.returncode:
        lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise SlimeError(
            f"Training rollouts {first} to {rollout.rollout_id} again ended with status "
            f"{done.returncode}:\n" + "\n".join(lines[-20:])
        )
    return Recording(config["record"])


def training_config(
    recording: Recording, rollout: RecordedRollout, given: Mapping[str, Any], *, folder: Path
) -> tuple[dict[str, Any], int]:
    """(the options of the run, as a --config file holds them; the first rollout that it trains).
    `given`: the options that will be on its command line.
    """
    config = recorded_config(recording, rollout)
    start, first = _start(recording, rollout, config)
    config.update(
        start,
        load_debug_rollout_data=str(recording.root.resolve()),
        start_rollout_id=first,
        num_rollout=rollout.rollout_id + 1,
        record=str(folder / "recording"),
        run_dir=str(folder / "run"),
        write_report=False,
        live_view=False,
    )
    config.update(_pinned_gate(recording, rollout, first))
    if not os.path.isdir(config.get("hf_checkpoint") or "") and recording.tokenizer_folder:
        config.update(_reference(recording, config))
        config["hf_checkpoint"] = str(recording.tokenizer_folder.resolve())
    if any(name in given for name in MODEL_AXES) and "actor_num_gpus_per_node" not in given:
        sizes = [{**config, **given}.get(name) or 1 for name in MODEL_AXES]
        config.update(actor_num_nodes=1, actor_num_gpus_per_node=math.prod(sizes))
    config["local"] = _fits_one_process({**config, **given})
    return config, first


def _pinned_gate(recording: Recording, rollout: RecordedRollout, first: int) -> dict[str, Any]:
    """The level that a schedule had reached, which depends on rollouts before."""
    if first != rollout.rollout_id or not rollout.options().gate_schedule:
        return {}
    level = rollout.json("gate").get("state", {}).get("level")
    return {"gate_level": level, "gate_schedule": None} if level else {}


def _start(
    recording: Recording, rollout: RecordedRollout, config: dict[str, Any]
) -> tuple[dict[str, Any], int]:
    """(options of the weights to start from, the first rollout to train): the weights recorded
    before the rollout, else the nearest checkpoint from which every rollout is recorded, else those
    of the run's own start.
    """
    recorded = rollout.folder / WEIGHTS_FOLDER
    if has_megatron_checkpoint(str(recorded)):
        start: dict[str, Any] = {"load": str(recorded.resolve()), "ckpt_step": None}
        critic = rollout.folder / CRITIC_WEIGHTS_FOLDER
        if has_megatron_checkpoint(str(critic)):
            start["critic_load"] = str(critic.resolve())
        return start, rollout.rollout_id
    options = rollout.options()
    if options.keep_old_actor:
        raise ConfigError(
            f"{rollout.folder} has no weights to train from. With --keep-old-actor a checkpoint is "
            "not enough: the weights that sampled a rollout are recorded with --record-weights."
        )
    known = set(recording.rollouts)
    if why := recording.superseded().get((rollout.rollout_id, False)):
        raise ConfigError(
            f"{rollout.folder} has no weights to train from, and checkpoints of the run lead "
            f"elsewhere, since it is {why}."
        )
    if options.save:
        for iteration in sorted(_iterations(Path(options.save)), reverse=True):
            needed = range(iteration + 1, rollout.rollout_id + 1)
            # those of one start of the run: another one may have had other options
            if (
                iteration < rollout.rollout_id
                and known.issuperset(needed)
                and all(recording.rollout(number).run == rollout.run for number in needed)
            ):
                start = {"load": options.save, "ckpt_step": iteration}
                if options.critic_save:
                    start["critic_load"] = options.critic_save
                return start, iteration + 1
    first = min(known)
    if first == 0 and known.issuperset(range(rollout.rollout_id + 1)) and rollout.run == 0:
        return {name: config.get(name) for name in ("load", "ckpt_step")}, 0
    raise ConfigError(
        f"{rollout.folder} has no weights to train from: the run had no --record-weights, "
        f"{options.save or 'no --save folder'} has no checkpoint from which all rollouts are "
        "recorded. Record with --record-weights, or replay another rollout."
    )


def _reference(recording: Recording, config: Mapping[str, Any]) -> dict[str, Any]:
    """Options of the reference's weights where the model's folder is gone."""
    given = config.get("ref_load")
    weights = first_weights(recording)
    if given not in (None, config.get("hf_checkpoint")) or weights is None:
        return {}
    return {"ref_load": str(weights.resolve()), "ref_ckpt_step": None}


def first_weights(recording: Recording) -> Path | None:
    """The weights that the run had before its first rollout, which are its reference's where no
    other is given; None where they are not recorded.
    """
    kept = recording.root / REFERENCE_FOLDER
    if has_megatron_checkpoint(str(kept)):
        return kept
    first = recording.rollout(recording.rollouts[0])
    weights = first.folder / WEIGHTS_FOLDER
    is_first = first.rollout_id == 0 and first.run == 0
    return weights if is_first and has_megatron_checkpoint(str(weights)) else None


def _iterations(folder: Path) -> list[int]:
    """The iterations of the checkpoints in a --save folder."""
    names = [path.name.removeprefix("iter_") for path in folder.glob("iter_*") if path.is_dir()]
    return [int(name) for name in names if name.isdigit()]


def _fits_one_process(config: dict[str, Any]) -> bool:
    """Whether the recorded run trained on one rank, which needs no Ray."""
    ranks = (config.get("actor_num_nodes") or 1) * (config.get("actor_num_gpus_per_node") or 1)
    estimator = ESTIMATORS.get(config.get("advantage_estimator") or "grpo")
    critic = estimator is not None and estimator.needs_critic
    others = ("ray_address", "use_sglang_router", "release_train")
    return ranks == 1 and not critic and not any(config.get(name) for name in others)
