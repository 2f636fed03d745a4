"""The parts of `compute_advantages_and_returns`: KL to the reference, the estimator, whitening, on
flat fields [L] of one rank.

The formulas are in `slime.algorithms.advantages`; here is which ranks' tokens they see. Knows no
logits and no loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from megatron.core import mpu

from slime.accelerator import get_accelerator
from slime.accelerator.process_groups import distributed_masked_whiten
from slime.algorithms.advantages import (
    ResponseColumns,
    kl_penalty,
    place_rewards,
)
from slime.algorithms.kl import approximate_kl
from slime.algorithms.table import estimator_named, formula_at
from slime.backends.megatron_utils.cp_utils import (
    all_gather_responses_with_cp,
    check_lengths,
    concatenate,
    required_field,
    slice_responses_with_cp,
)
from slime.backends.megatron_utils.loss_config import LossConfig
from slime.data.batch import RolloutBatch
from slime.data.context_parallel import ResponseLayout
from slime.data.ragged import Ragged
from slime.exceptions import RolloutDataError
from slime.utils.ppo_utils import cut_to_local, get_advantages_and_returns_batch


def store_fields(
    rollout_data: dict[str, Any], layout: ResponseLayout, **fields: torch.Tensor
) -> None:
    """Puts flat fields [L] into the batch, each as one column; into a plain dict as
    lists of views.
    """
    for name, flat in fields.items():
        as_column = isinstance(rollout_data, RolloutBatch)
        rollout_data[name] = (
            Ragged.of_lengths(flat, layout.local_lengths)
            if as_column
            else split_per_sample(layout, flat)
        )


def split_per_sample(layout: ResponseLayout, flat: torch.Tensor) -> list[torch.Tensor]:
    """Returns the flat field [L] as one view per sample."""
    return list(flat.split(list(layout.local_lengths))) if layout.local_lengths else []


def join_constants(
    layout: ResponseLayout, values: Sequence[torch.Tensor], name: str
) -> torch.Tensor:
    """The entries that a function or another pass made, as one field [L] of constants: floats, as
    whitening would round in integers.
    """
    check_lengths(values, layout.local_lengths, name=name)
    flat = concatenate(values).detach()
    return flat if flat.is_floating_point() else flat.float()


def _device_of(rollout_data: dict[str, Any]) -> torch.device:
    """Returns where the per-token fields live, also on a rank that has no sample."""
    for name in ("log_probs", "rollout_log_probs", "values", "loss_masks"):
        tensors = rollout_data.get(name)
        if tensors is not None and len(tensors):
            return tensors[0].device
    return get_accelerator().device()


def compute_reference_kl(
    config: LossConfig,
    layout: ResponseLayout,
    rollout_data: dict[str, Any],
    log_probs: Sequence[torch.Tensor] | None,
) -> torch.Tensor:
    """Returns the KL to the reference [L], 0 where --kl-coef asks for none."""
    lengths = layout.local_lengths
    if log_probs is not None:
        check_lengths(log_probs, lengths, name="log_probs")
    if config.kl_coef == 0 or log_probs is None or not lengths:
        return torch.zeros(layout.num_local_tokens, device=_device_of(rollout_data))
    reference = required_field(rollout_data, "ref_log_probs", "--kl-coef")
    return approximate_kl(
        concatenate(log_probs),
        join_constants(layout, reference, "ref_log_probs"),
        kind=config.kl_loss_type,
    )


def estimate_advantages(
    config: LossConfig, layout: ResponseLayout, rollout_data: dict[str, Any], local_kl: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (advantages [L], returns [L]) by the estimator of the options."""
    estimator = estimator_named(config.advantage_estimator)
    if not layout.local_lengths:
        return local_kl, local_kl
    rewards = torch.as_tensor(rollout_data["rewards"], dtype=local_kl.dtype, device=local_kl.device)
    if rewards.numel() != len(layout.local_lengths):
        raise RolloutDataError(
            f"{rewards.numel()} rewards for {len(layout.local_lengths)} samples: need one per "
            "sample of this rank."
        )
    full_masks = concatenate(rollout_data["loss_masks"]).to(local_kl.device)
    check_lengths(rollout_data["loss_masks"], layout.response_lengths, name="loss_masks")
    if estimator.advantages is None:  # it needs a critic
        return _estimate_with_critic(config, layout, rollout_data, (rewards, local_kl, full_masks))
    compute = formula_at(cast(str, estimator.advantages))  # the one with a critic has none
    if estimator.whole_response:
        full_kl = all_gather_responses_with_cp(local_kl, layout)
        columns = ResponseColumns(rewards, layout.response_lengths, full_masks, full_kl)
        advantages, returns = compute(columns, config.estimator)
        return torch.cat(cut_to_local(advantages, layout)), torch.cat(cut_to_local(returns, layout))
    local_masks = slice_responses_with_cp(rollout_data["loss_masks"], layout, name="loss_masks").to(
        local_kl.device
    )
    return compute(
        ResponseColumns(rewards, layout.local_lengths, local_masks, local_kl), config.estimator
    )


def _estimate_with_critic(
    config: LossConfig,
    layout: ResponseLayout,
    rollout_data: dict[str, Any],
    columns: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    rewards, local_kl, full_masks = columns
    values = required_field(rollout_data, "values", "--advantage-estimator ppo")
    check_lengths(values, layout.local_lengths, name="values")
    placed = torch.cat(
        cut_to_local(place_rewards(rewards, full_masks, layout.response_lengths), layout)
    )
    local_masks = torch.cat(cut_to_local(full_masks, layout))
    token_rewards = placed - kl_penalty(local_kl, local_masks, kl_coef=config.kl_coef)
    # with nothing masked the call is upstream's own, which plug-ins replace
    masks = {} if bool((full_masks != 0).all()) else {"loss_masks": rollout_data["loss_masks"]}
    lengths = (rollout_data["total_lengths"], rollout_data["response_lengths"])
    advantages, returns = get_advantages_and_returns_batch(
        *lengths,
        values,
        split_per_sample(layout, token_rewards),
        config.gamma,
        config.lambd,
        **masks,
    )
    return torch.cat(advantages), torch.cat(returns)


def whiten_advantages(
    layout: ResponseLayout, rollout_data: dict[str, Any], advantages: torch.Tensor
) -> torch.Tensor:
    """Returns the advantages [L] whitened over the trained tokens of all DP x CP ranks; as they are
    where no rank trains a token.
    """
    masks = slice_responses_with_cp(rollout_data["loss_masks"], layout, name="loss_masks").to(
        advantages.device
    )
    group = mpu.get_data_parallel_group(with_context_parallel=True)
    return distributed_masked_whiten(
        advantages, masks, process_group=group, shift_mean=True, allow_empty=True
    )
