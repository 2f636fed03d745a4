"""Saves and loads a training rank's state beside model, optimizer and random states: further weight
sets that change, and counters.

    iter_0000012/weight_sets/ref/...   a weight set in the distributed format, for any layout
    iter_0000012/actor_state.json      the counters, and which sets were saved
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist

from slime.backends.megatron_utils.agreement import agreed
from slime.backends.megatron_utils.weights_backup import WeightsBackup
from slime.backends.megatron_utils.weights_state import load_weights_into, save_weights
from slime.exceptions import ConfigError

STATE = "actor_state.json"
SETS = "weight_sets"


@dataclasses.dataclass(frozen=True)
class ActorState:
    """Counters of one training role, and the tags of the weight sets that are saved with them."""

    weight_version: int  # versions that the engines were given
    last_train_step: int  # the last value of the train axis, -1 for none
    weights_fingerprint: str | None = None  # of the weights that the engines were given last
    rollouts_trained: int = 0
    # version -> rollouts trained by then
    published_at: Mapping[int, int] = dataclasses.field(default_factory=dict)
    sets: tuple[str, ...] = ()


def save_actor_state(
    folder: Path,
    state: ActorState,
    model: Sequence[torch.nn.Module],
    weights: WeightsBackup,
    *,
    kept_as: Mapping[str, str] | None = None,
) -> None:
    """Writes the state and its weight sets into a checkpoint folder. `kept_as`: the tag in
    `weights` by tag in the checkpoint, where they differ. Called by all ranks together, inside
    `agreed`: the state is written by rank 0 alone.
    """
    for tag in state.sets:
        _save_set(folder / SETS / tag, (kept_as or {}).get(tag, tag), model, weights)
    if dist.get_rank() == 0:
        (folder / STATE).write_text(json.dumps(dataclasses.asdict(state)))


def _save_set(
    place: Path, tag: str, model: Sequence[torch.nn.Module], weights: WeightsBackup
) -> None:
    agreed(lambda: place.mkdir(parents=True, exist_ok=True))
    with weights.borrowed(tag):
        save_weights(place, model)


def load_actor_state(folder: Path) -> ActorState | None:
    """The state in a checkpoint folder; None where an earlier version saved none. ConfigError for a
    damaged one.
    """
    path = folder / STATE
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_text())
        published_at = {
            int(version): count for version, count in values.get("published_at", {}).items()
        }
        state = ActorState(
            **{**values, "sets": tuple(values["sets"]), "published_at": published_at}
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} is damaged ({error}). Resume from an earlier checkpoint with --ckpt-step."
        ) from error
    numbers = (
        state.weight_version,
        state.last_train_step,
        state.rollouts_trained,
        *published_at.values(),
    )
    if not all(type(number) is int for number in numbers) or not all(
        tag.isidentifier() for tag in state.sets
    ):
        raise ConfigError(
            f"{path} is damaged: {values}. Resume from an earlier checkpoint with --ckpt-step."
        )
    return state


def restore_weight_sets(
    folder: Path, model: Sequence[torch.nn.Module], weights: WeightsBackup, tags: Iterable[str]
) -> None:
    """Fills the sets `tags` from a checkpoint folder; the model keeps its weights. Called by all
    ranks together.
    """
    active = weights.active
    for tag in tags:
        load_weights_into(folder / SETS / tag, model)
        weights.backup(tag)
        weights.restore(cast(str, active))
