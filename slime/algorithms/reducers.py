"""Masked sums over ragged response tokens, on exact denominators. `_T` = response tokens of all
samples one after another, `_N` = samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from slime.exceptions import RolloutDataError


def repeat_per_token(values_N: torch.Tensor, lengths_N: Sequence[int]) -> torch.Tensor:
    """Returns [T]: each sample's value once per token of it. `lengths_N` are Python ints, so that
    no device is asked for the size.
    """
    lengths = torch.tensor(lengths_N, dtype=torch.int64, device=values_N.device)
    return torch.repeat_interleave(values_N, lengths, output_size=sum(lengths_N))


def sum_per_sample(
    values_T: torch.Tensor, sample_indices_T: torch.Tensor, *, num_samples: int
) -> torch.Tensor:
    """Returns [N]: the sum of each sample's entries. Differentiable; a sample without entries gives
    0.
    """
    return values_T.new_zeros(num_samples).index_add(
        0, sample_indices_T.to(values_T.device), values_T
    )


def select_masked(values_T: torch.Tensor, mask_T: torch.Tensor) -> torch.Tensor:
    """Returns `values_T` where the mask is not 0 and exactly 0 elsewhere: NaN and inf at masked
    positions neither reach the value nor the gradient, which a multiplication by 0 would let
    through.
    """
    return torch.where(mask_T != 0, values_T, values_T.new_zeros(()))


def build_reducer(
    masks_T: torch.Tensor,
    lengths_N: Sequence[int],
    *,
    local_indices: torch.Tensor | None = None,
    denominators: torch.Tensor | None = None,
    per_token: bool = False,
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns x [L] -> scalar: sum over samples of (masked sum of x) / max(denominator, 1), where
    the denominator of sample i is its own mask sum, or `denominators[i]` if given, or 1 if
    `per_token`.

    `masks_T` and `lengths_N` describe full responses; `local_indices` [L] selects the entries that
    x has (None: all of them). The returned function raises RolloutDataError when x has another
    number of entries.
    """
    weights_T = masks_T if masks_T.is_floating_point() else masks_T.float()
    if per_token:
        scale_T = torch.ones_like(weights_T)
    else:
        if denominators is None:
            samples = torch.arange(len(lengths_N), device=masks_T.device)
            denominators = sum_per_sample(
                weights_T, repeat_per_token(samples, lengths_N), num_samples=len(lengths_N)
            )
        elif denominators.numel() != len(lengths_N):
            raise RolloutDataError(
                f"{denominators.numel()} loss denominators for {len(lengths_N)} samples: need one "
                "per sample."
            )
        denominators = denominators.reshape(-1).to(device=weights_T.device, dtype=weights_T.dtype)
        scale_T = repeat_per_token(denominators.clamp(min=1), lengths_N)
    if local_indices is not None:
        local_indices = local_indices.to(weights_T.device)
        weights_T, scale_T = (
            weights_T.index_select(0, local_indices),
            scale_T.index_select(0, local_indices),
        )

    def reduce(x: torch.Tensor) -> torch.Tensor:
        if x.numel() != weights_T.numel():
            raise RolloutDataError(
                f"the reducer got {x.numel()} entries, but the samples have {weights_T.numel()} "
                "response tokens on this rank."
            )
        x = x.reshape(-1)
        weights, scale = weights_T.to(x.device), scale_T.to(x.device)
        return (select_masked(x, weights) * weights / scale).sum()

    return reduce
