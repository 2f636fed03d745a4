"""Context-parallel slicing, gathering and the reducers, for this process's Megatron rank. The
arithmetic of the layout is in `slime.data.context_parallel`; this module asks `mpu` for the rank at
call time and owns the collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn  # noqa: F401  (all_gather_with_cp needs the differentiable all-reduce)
import torch.nn.functional as F
from megatron.core import mpu

from slime.algorithms.reducers import build_reducer
from slime.data.context_parallel import (
    ResponseLayout,
    compute_chunk_size,
    compute_zigzag_ranges,
    plan_contiguous_layout,
    plan_response_layout,
)
from slime.exceptions import RolloutDataError
from slime.metrics.reduction import (  # noqa: F401  (upstream has them in this module)
    gather_and_reduce_log_dict,
    rollout_log_metric_contribution,
)
from slime.metrics.step_metrics import reduce_train_step_metrics  # noqa: F401


def get_cp_size() -> int:
    """Returns the context-parallel world size; 1 where Megatron has no process groups (its own
    answer is then 0).
    """
    return max(1, mpu.get_context_parallel_world_size())


def get_response_layout(
    total_lengths: Sequence[int], response_lengths: Sequence[int]
) -> ResponseLayout:
    """Returns which response tokens of the packed samples this context-parallel rank
    owns (zigzag).
    """
    cp_size = get_cp_size()
    cp_rank = mpu.get_context_parallel_rank() if cp_size > 1 else 0
    return plan_response_layout(total_lengths, response_lengths, cp_size=cp_size, cp_rank=cp_rank)


def get_logits_layout(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    *,
    num_rows: int,
    allgather_cp: bool,
) -> ResponseLayout:
    """Returns the layout of the rows the model computed: zigzag, or contiguous in allgather-CP mode
    (`num_rows` = local rows).
    """
    if allgather_cp and get_cp_size() > 1:
        cp_rank = mpu.get_context_parallel_rank()
        return plan_contiguous_layout(
            total_lengths, response_lengths, num_rows=num_rows, cp_rank=cp_rank
        )
    return get_response_layout(total_lengths, response_lengths)


def get_logits_and_tokens_offset_with_cp(total_length: int, response_length: int):
    """Returns (chunk size, chunks, logits, tokens) of this rank in tokens, as
    `compute_zigzag_ranges` does. Needs cp size > 1.
    """
    cp_size = get_cp_size()
    assert cp_size > 1, (
        "without context parallelism every rank owns the whole sequence; there are no offsets"
    )
    return compute_zigzag_ranges(
        total_length, response_length, cp_size=cp_size, cp_rank=mpu.get_context_parallel_rank()
    )


def slice_with_cp(
    tokens: torch.Tensor, pad_value: float | Callable[[torch.Tensor, int], torch.Tensor]
) -> torch.Tensor:
    """Returns this rank's two chunks of `tokens` [T, ...], padded at the end to whole chunks;
    `tokens` itself without CP.

    `pad_value` is a number, or a function (tensor, missing entries) -> padded tensor.
    """
    cp_size = get_cp_size()
    if cp_size == 1:
        return tokens
    cp_rank = mpu.get_context_parallel_rank()
    chunk = compute_chunk_size(len(tokens), cp_size)
    missing = 2 * cp_size * chunk - len(tokens)
    if callable(pad_value):
        tokens = pad_value(tokens, missing)
    else:
        tokens = F.pad(tokens, (0, 0) * (tokens.dim() - 1) + (0, missing), value=pad_value)
    mirrored = 2 * cp_size - 1 - cp_rank
    return torch.cat(
        [
            tokens[chunk * cp_rank : chunk * (cp_rank + 1)],
            tokens[chunk * mirrored : chunk * (mirrored + 1)],
        ]
    )


def slice_log_prob_with_cp(
    log_prob: list[float] | torch.Tensor, total_length: int, response_length: int
):
    """Returns the entries of `log_prob` [response_length] that this rank owns; a list stays a list.
    AssertionError on another length.
    """
    assert len(log_prob) == response_length, (
        f"{len(log_prob)} entries for a response of {response_length} tokens"
    )
    if get_cp_size() == 1:
        return log_prob
    prompt_length = total_length - response_length
    _, _, _, tokens = get_logits_and_tokens_offset_with_cp(total_length, response_length)
    (low0, high0), (low1, high1) = [
        tuple(max(edge - prompt_length, 0) for edge in pair) for pair in tokens
    ]
    if isinstance(log_prob, list):
        return log_prob[low0:high0] + log_prob[low1:high1]
    return torch.cat([log_prob[low0:high0], log_prob[low1:high1]])


def slice_responses_with_cp(
    responses: Sequence[torch.Tensor], layout: ResponseLayout, *, name: str
) -> torch.Tensor:
    """Returns the concatenation [L] of this rank's entries of full per-response tensors. `name` is
    for the error.

    Raises RolloutDataError naming the sample whose tensor does not have one entry per response
    token.
    """
    check_lengths(responses, layout.response_lengths, name=name)
    flat = concatenate(responses)
    return flat if layout.whole else flat.index_select(0, layout.response_indices.to(flat.device))


def check_lengths(tensors: Sequence[torch.Tensor], lengths: Sequence[int], *, name: str) -> None:
    """Raises RolloutDataError naming the first sample whose entry is no tensor of one dimension
    with the length that `lengths` says.

    [R, 1] beside [R] would be broadcast to [R, R] in a loss.
    """
    if len(tensors) != len(lengths):
        raise RolloutDataError(
            f"{name} has {len(tensors)} entries for {len(lengths)} samples of the micro-batch."
        )
    for index, (tensor, length) in enumerate(zip(tensors, lengths, strict=True)):
        if not isinstance(tensor, torch.Tensor) or tensor.dim() != 1:
            found = (
                list(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            )
            raise RolloutDataError(
                f"{name} of sample {index} must be a tensor [{length}], one number per token, got "
                f"{found}."
            )
        size = tensor.shape[0]  # len() of a tensor is ten times slower
        if size != length:
            raise RolloutDataError(
                f"{name} of sample {index} of the micro-batch has {size} entries, expected "
                f"{length} "
                "(response tokens that this rank owns, or all of them for a full field)."
            )


def required_field(batch: Mapping[str, Any], name: str, reason: str) -> Any:
    """Returns `batch[name]`; RolloutDataError that names `reason` where the batch lacks it."""
    value = batch.get(name)
    if value is None:
        raise RolloutDataError(f"the batch has no {name}, which {reason} needs.")
    return value


def concatenate(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns `torch.cat`, and an empty float tensor for no tensors at all."""
    return torch.cat(list(tensors)) if len(tensors) else torch.empty(0)


def all_gather_with_cp(
    tensor: torch.Tensor, total_length: int, response_length: int
) -> torch.Tensor:
    """Returns the full response tensor [response_length, ...] of which `tensor` is this rank's
    part. Differentiable.
    """
    group = mpu.get_context_parallel_group()
    if get_cp_size() == 1:
        return tensor
    layout = get_response_layout([total_length], [response_length])
    return _scatter_and_sum(tensor, layout, group)


def all_gather_responses_with_cp(local: torch.Tensor, layout: ResponseLayout) -> torch.Tensor:
    """Returns the concatenation [sum of responses, ...] of all full responses from this rank's part
    [L, ...]: one all-reduce for the whole micro-batch. Differentiable; every context-parallel rank
    must call it, also with nothing to give.
    """
    if get_cp_size() == 1:
        return local
    return _scatter_and_sum(local, layout, mpu.get_context_parallel_group())


def _scatter_and_sum(
    local: torch.Tensor, layout: ResponseLayout, group: dist.ProcessGroup
) -> torch.Tensor:
    if len(local) != layout.num_local_tokens:
        raise RolloutDataError(
            f"{len(local)} entries, but this rank owns {layout.num_local_tokens} response tokens."
        )
    full = local.new_zeros((layout.num_response_tokens, *local.shape[1:]))
    full = full.index_copy(0, layout.response_indices.to(local.device), local)
    return dist.nn.all_reduce(full, group=group)


def sum_over_cp(values: torch.Tensor) -> torch.Tensor:
    """Returns the sum of `values` over the context-parallel ranks, differentiable; `values` itself
    without CP.
    """
    if get_cp_size() == 1:
        return values
    return dist.nn.all_reduce(values, group=mpu.get_context_parallel_group())


def get_sum_of_sample_mean(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    loss_masks: Sequence[torch.Tensor],
    sample_denoms: torch.Tensor | Sequence[float] | None = None,
    calculate_per_token_loss: bool = False,
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns a function from the concatenation [L] of this rank's response entries to the scalar
    contribution of the samples.

    Per-sample mean by default; with `sample_denoms` [N] (masked tokens of each sample's whole
    rollout) the per-rollout mean; with `calculate_per_token_loss` the plain masked sum.
    Denominators are of the full response, so that summing over CP ranks gives the number of one
    rank. Entries at masked positions are never read. Raises RolloutDataError naming a sample with a
    wrong length.
    """
    layout = get_response_layout(total_lengths, response_lengths)
    check_lengths(loss_masks, layout.response_lengths, name="loss_masks")
    return build_reducer(
        concatenate(loss_masks),
        layout.response_lengths,
        local_indices=None if layout.whole else layout.response_indices,
        denominators=None if sample_denoms is None else torch.as_tensor(sample_denoms),
        per_token=calculate_per_token_loss,
    )


def prepare_routed_experts_for_routing_replay(
    rollout_routed_experts: Sequence[torch.Tensor],
    tokens: Sequence[torch.Tensor],
    *,
    num_experts: int,
    data_pad_size_multiplier: int,
    sequence_parallel: bool,
    allgather_cp: bool,
) -> torch.Tensor:
    """Returns the expert ids [local rows, layers, top-k] laid out like this rank's packed tokens.

    The engine reports no routing for the last token, and padding has none: both get ids spread
    evenly (arange % num_experts). AssertionError unless each entry has one row less than its
    sequence has tokens.
    """
    for index, (experts, ids) in enumerate(zip(rollout_routed_experts, tokens, strict=True)):
        assert experts.shape[0] == len(ids) - 1, (
            f"sample {index}: {experts.shape[0]} routing rows for {len(ids)} tokens"
        )

    def pad(experts: torch.Tensor, missing: int) -> torch.Tensor:
        count = missing * experts.shape[1] * experts.shape[2]
        filler = torch.arange(count, device=experts.device, dtype=torch.int64) % num_experts
        return torch.cat([experts, filler.to(experts.dtype).reshape(missing, *experts.shape[1:])])

    cp_size, tp_size = get_cp_size(), mpu.get_tensor_model_parallel_world_size()
    per_sample = [pad(experts, 1) for experts in rollout_routed_experts]
    multiple = tp_size * data_pad_size_multiplier
    if allgather_cp and cp_size > 1:
        stream = torch.cat(per_sample)
        stream = pad(stream, -len(stream) % (cp_size * multiple))
        rows = stream.chunk(cp_size, dim=0)[mpu.get_context_parallel_rank()]
    else:
        rows = torch.cat([slice_with_cp(experts, pad) for experts in per_sample])
        rows = pad(rows, -len(rows) % multiple)
    if sequence_parallel and tp_size > 1:
        rows = rows.chunk(tp_size, dim=0)[mpu.get_tensor_model_parallel_rank()]
    return rows
