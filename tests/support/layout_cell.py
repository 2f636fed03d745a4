"""One cell of the layout matrix on one rank: the real actor and the real rollout side, without Ray
between them.

`ray.get` and `ray.put` hand over the object itself; everything else - columns, split, shards,
device, log-prob passes, advantages, metrics, optimizer steps, weight export - is the production
path.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from support.layout_batch import ROLLOUT_ID, ROWS, values_of

TOKEN_FIELDS = (
    "log_probs ref_log_probs rollout_log_probs teacher_log_probs values advantages returns kl "
    "entropy opd_reverse_kl loss_masks"
).split()
SAMPLE_FIELDS = "rewards response_lengths total_lengths".split()
FULL_FIELDS = ("loss_masks",)  # not cut over context-parallel ranks

# Making the groups of a layout takes longer than a cell.
_layout_of_groups: dict[str, Any] = {}


@dataclasses.dataclass
class RankResult:
    """What one rank ended with. fields: {name: one tensor or number per sample, in the order of
    `positions`} on the last pipeline stage; gradients per step and weights under Hugging Face names
    on the main rank; held: this rank's own parameters by (name in the whole model, shard);
    rollout_side: metrics of the rollout side.
    """

    cp_rank: int
    cp_size: int
    positions: list[int]
    fields: dict[str, list]
    gradients: list[dict[str, torch.Tensor]]
    weights: dict[str, torch.Tensor]
    held: dict[tuple[str, int], torch.Tensor]
    rollout_side: dict[str, float]


def owned_places(total: int, response: int, *, cp_size: int, cp_rank: int) -> list[int]:
    """Places of the response tokens whose logits a context-parallel rank has: rank r holds chunks r
    and 2 * size - 1 - r of 2 * size equal chunks of the sequence, and the logits of row i predict
    token i + 1.
    """
    chunk = -(-total // (2 * cp_size))
    rows = [total - response - 1 + place for place in range(response)]
    return [
        place
        for place, row in enumerate(rows)
        if cp_size == 1 or row // chunk in (cp_rank, 2 * cp_size - 1 - cp_rank)
    ]


def run_cells(
    rank: int, world_size: int, cells: list[tuple[Any, str, Any]]
) -> dict[Any, RankResult]:
    """{cell: result} for each (cell, role, args), one after the other. Cells of the same parallel
    layout that follow each other share its groups.
    """
    os.environ["SLIME_ACCELERATOR"] = "cpu"
    from slime.backends.megatron_utils import initialize  # noqa: F401  before anything imports Megatron

    results = {}
    for name, role, args in cells:
        try:
            results[name] = _run_cell(rank, world_size, role, args)
        except Exception as error:
            raise RuntimeError(f"cell {name}: {error}") from error
    return results


@contextlib.contextmanager
def _without_ray_and_with_our_groups() -> Iterator[None]:
    from megatron.core import mpu

    made = mpu.initialize_model_parallel

    def initialize_model_parallel(**layout: Any) -> None:
        if _layout_of_groups == layout:
            return
        if mpu.model_parallel_is_initialized():
            mpu.destroy_model_parallel()
        made(**layout)
        _layout_of_groups.clear()
        _layout_of_groups.update(layout)

    with (
        mock.patch("ray.get", lambda reference, **_: reference),
        mock.patch("ray.put", lambda value: value),
        # `run_distributed` has made it
        mock.patch("torch.distributed.init_process_group", lambda *a, **kw: None),
        mock.patch.object(mpu, "initialize_model_parallel", initialize_model_parallel),
    ):
        yield


def _run_cell(rank: int, world_size: int, role: str, args: Any) -> RankResult:
    from slime.backends.megatron_utils.actor import MegatronTrainRayActor
    from slime.tracking.timer import Timer
    from slime.tracking.tracking import finish_tracking

    class CellActor(MegatronTrainRayActor):
        """Takes its place from the caller, not from Ray, and shows its batch."""

        def __init__(self) -> None:
            self.rank, self.world_size = rank, world_size
            self.master_addr, self.master_port = "groups-are-made", 0

        def _get_rollout_data(self, rollout_data_ref: list) -> Any:
            self.batch = super()._get_rollout_data(rollout_data_ref)
            return self.batch

    args = copy.copy(args)
    with _without_ray_and_with_our_groups():
        actor = CellActor()
        with_ref, with_teacher = (
            args.kl_coef != 0 or args.use_kl_loss,
            args.use_opd and args.opd_type == "megatron",
        )
        actor.init(args, role, role == "actor" and with_ref, with_teacher)
        boxes, rollout_side = _boxes(args, actor.train_parallel_config)
        gradients = _keep_gradients(actor)
        actor.train(ROLLOUT_ID, boxes, _critic_values(args, boxes) if role == "actor" else None)
        result = _result(actor, gradients, rollout_side)
        finish_tracking(args)
        Timer().end("train_wait")
        Timer().reset()
    return result


def _boxes(args: Any, layout: dict[str, int]) -> tuple[list, dict[str, float]]:
    """The shards that the rollout manager makes of the recorded batch, and its metrics of the
    samples.
    """
    from slime.metrics.rollout_metrics import RolloutMetricsConfig, compute_metrics_from_samples
    from slime.ray.rollout import RolloutManager

    manager = RolloutManager.__new__(RolloutManager)
    manager.args = args
    manager.custom_reward_post_process_func = manager.custom_convert_samples_to_train_data_func = (
        None
    )
    manager.set_train_parallel_config(layout)
    samples = manager._get_rollout_data(ROLLOUT_ID).samples
    metrics = compute_metrics_from_samples(RolloutMetricsConfig.from_args(args), samples)
    return manager._split_train_data_by_dp(manager._convert_samples_to_train_data(samples)), metrics


def _critic_values(args: Any, boxes: list) -> dict[str, list] | None:
    """What a critic on this rank would have sent: its values of this rank's tokens."""
    from megatron.core import mpu

    if args.advantage_estimator != "ppo":
        return None
    shard = boxes[mpu.get_data_parallel_rank()].inner
    place = {
        "cp_size": mpu.get_context_parallel_world_size(),
        "cp_rank": mpu.get_context_parallel_rank(),
    }
    values = []
    for position in (int(p) for p in shard["partition"]):
        row = ROWS[position]
        mine = owned_places(row.prompt + row.response, row.response, **place)
        values.append(torch.tensor([values_of(position)[i] for i in mine], dtype=torch.float32))
    return {"values": values}


def _keep_gradients(actor: Any) -> list[dict[str, torch.Tensor]]:
    """A list that grows by {Hugging Face name: gradient} whenever the optimizer steps, on the main
    rank.
    """
    kept: list[dict[str, torch.Tensor]] = []
    step = actor.optimizer.step

    def recording_step() -> Any:
        kept.append(_exported_gradients(actor))
        return step()

    actor.optimizer.step = recording_step
    return kept


@torch.no_grad()
def _exported_gradients(actor: Any) -> dict[str, torch.Tensor]:
    """Puts the gradients in the weights' place for a moment and exports them like weights."""
    parameters = [p for chunk in actor.model for p in chunk.parameters()]
    weights = [p.detach().clone() for p in parameters]
    buffers = [b for chunk in actor.model for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    # with a distributed optimizer every rank has the sum of its own part alone
    sums = [b.grad_data.clone() for b in buffers]
    if actor.args.use_distributed_optimizer:
        for buffer in buffers:
            for bucket in buffer.buckets:
                _gather_parts(bucket.grad_data, buffer.data_parallel_group)
    for parameter in parameters:
        parameter.copy_(parameter.main_grad)
    exported = _export(actor) | _value_head(actor)
    for parameter, weight in zip(parameters, weights, strict=True):
        parameter.copy_(weight)
    for buffer, data in zip(buffers, sums, strict=True):
        buffer.grad_data.copy_(data)
    return exported


def _gather_parts(data: torch.Tensor, group: Any) -> None:
    parts = list(data.clone().chunk(group.size()))
    torch.distributed.all_gather(parts, parts[group.rank()].clone(), group=group)
    data.copy_(torch.cat(parts))


def _export(actor: Any) -> dict[str, torch.Tensor]:
    from slime.backends.megatron_utils.update_weight import iter_hf_weight_buckets

    buckets = iter_hf_weight_buckets(actor.args, actor.model, actor.model_shape, buffer_size=16384)
    return {name: tensor.clone() for bucket in buckets for name, tensor in bucket}


def _value_head(actor: Any) -> dict[str, torch.Tensor]:
    """{"value_head.weight": tensor} on the main rank of a critic, which no Hugging
    Face model has.
    """
    from slime.backends.megatron_utils.initialize import is_megatron_main_rank
    from slime.backends.megatron_utils.local_params import local_parameters

    heads = [p.parameter.detach().clone() for p in local_parameters(actor.model) if p.is_value_head]
    return {"value_head.weight": heads[0]} if heads and is_megatron_main_rank() else {}


def _result(actor: Any, gradients: list, rollout_side: dict[str, float]) -> RankResult:
    from megatron.core import mpu

    from slime.backends.megatron_utils.local_params import local_parameters

    batch, fields = actor.batch, {}
    if mpu.is_pipeline_last_stage(ignore_virtual=True):
        for name in (*TOKEN_FIELDS, *SAMPLE_FIELDS):
            if batch.get(name) is not None:
                fields[name] = [torch.as_tensor(entry).detach().clone() for entry in batch[name]]
    return RankResult(
        cp_rank=mpu.get_context_parallel_rank(),
        cp_size=mpu.get_context_parallel_world_size(),
        positions=[int(position) for position in batch["partition"]],
        fields=fields,
        gradients=gradients,
        weights=_export(actor) | _value_head(actor),
        held={
            (p.name, p.parallel_rank): p.parameter.detach().clone()
            for p in local_parameters(actor.model)
        },
        rollout_side=rollout_side,
    )
