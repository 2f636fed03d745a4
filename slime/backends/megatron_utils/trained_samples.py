"""Finds which samples a rank's optimizer steps train, after users' functions on the training ranks
changed the batch.

The split decided it, and the ledger, the loss denominators and the log-probs follow from that. A
function may take tokens out of training, which is counted; it may put none in: a token with the
mask 0 is one that the gate, or the user's own mask, took out.

    masks before   [1 1 0] [1 1]
    masks after    [1 0 0] [0 0] -> the second sample is counted as not trained,
                   "masked_by_function"
    masks after    [1 1 1] [1 1]    -> RolloutDataError
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core import mpu

from slime.data.reasons import DropReason
from slime.exceptions import RolloutDataError

# The fields that assign tokens to samples, and samples to steps.
FIXED = ("tokens", "total_lengths", "response_lengths", "micro_batch_indices", "num_microbatches")


@contextlib.contextmanager
def same_samples(batch: Mapping[str, Any], option: str, path: str) -> Iterator[None]:
    """RolloutDataError where the user's function at `path`, called inside, trains other tokens than
    the split planned.
    """
    fixed = {name: _copy_of(batch[name]) for name in FIXED if name in batch}
    masks = _copy_of(batch["loss_masks"])
    yield
    for name, before in fixed.items():
        if name not in batch or not _is_equal(before, batch[name]):
            raise RolloutDataError(
                f"{option} {path} changed {name!r}. Which tokens train, and in which step, is "
                "decided when the batch is split, and the log-probs are of "
                "those tokens. Change tokens in --custom-convert-samples-to-train-data-path."
            )
    after = batch.get("loss_masks")
    if after is None or list(map(len, after)) != list(map(len, masks)):
        raise RolloutDataError(
            f"{option} {path} changed the lengths of 'loss_masks'. They have one entry per "
            "response token."
        )
    for row, (old, new) in enumerate(zip(masks, after, strict=True)):
        put_in = (old == 0) & (torch.as_tensor(new).to(old.device) != 0)
        if bool(put_in.any()):
            token = int(put_in.nonzero()[0])
            raise RolloutDataError(
                f"{option} {path} set the loss mask of response token {token} of sample "
                f"{_name_of(batch, row)} to {float(new[token]):g}, and it was 0: "
                "the gate or an earlier stage took the token out, and the loss already divides by "
                "the tokens that train. Set masks "
                "before the batch is split: Sample.loss_mask, or 'loss_masks' in --custom-convert-samples-to-train-data-path."
            )


def have_trainable_tokens(batch: Mapping[str, Any]) -> list[bool]:
    """Per sample of this rank, whether it has a token that trains."""
    found = [(torch.as_tensor(mask) != 0).any() for mask in batch["loss_masks"]]
    return torch.stack(found).tolist() if found else []


def find_not_trained(
    batch: Mapping[str, Any],
    *,
    trainable_before: Sequence[bool] | None,
    skipped_steps: Sequence[int],
) -> dict[str, list[int | None]]:
    """{reason: `Sample.index` of the samples of this rank that were planned and did not train}:
    users' functions masked them, or their step changed nothing. None where the batch names none.

    A sample was planned where its rollout has a trainable token. trainable_before:
    `have_trainable_tokens` before users' functions, None where there are none. skipped_steps:
    numbers of the steps within the rollout that changed nothing.
    """
    sums = batch.get("rollout_mask_sums")
    planned = (
        [True] * len(batch["loss_masks"]) if sums is None else [float(total) > 0 for total in sums]
    )
    masked = [False] * len(planned)
    if trainable_before is not None:
        masked = [
            before and not after
            for before, after in zip(trainable_before, have_trainable_tokens(batch), strict=True)
        ]
    bounds = [0, *itertools.accumulate(int(count) for count in batch["num_microbatches"])]
    skipped = {
        row
        for step in skipped_steps
        for indices in batch["micro_batch_indices"][bounds[step] : bounds[step + 1]]
        for row in indices
    }
    found = {
        DropReason.MASKED_BY_FUNCTION.value: [row for row, is_gone in enumerate(masked) if is_gone],
        DropReason.UPDATE_SKIPPED.value: sorted(
            row for row in skipped if planned[row] and not masked[row]
        ),
    }
    indices = batch.get("sample_indices")
    return {
        reason: [None if indices is None else int(indices[row]) for row in rows]
        for reason, rows in found.items()
        if rows
    }


def counts_for_its_data_parallel_rank() -> bool:
    """Whether this rank is the one of its data-parallel rank that counts samples: the others hold
    the same ones.
    """
    is_first = mpu.get_tensor_model_parallel_rank() == 0 and mpu.get_context_parallel_rank() == 0
    return is_first and mpu.is_pipeline_last_stage(ignore_virtual=True)


def _copy_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, list | tuple):
        return [_copy_of(entry) for entry in value]
    return value.copy() if hasattr(value, "copy") else value


def _is_equal(before: Any, after: Any) -> bool:
    if isinstance(before, list):
        return len(before) == len(after) and all(map(_is_equal, before, after))
    first, second = torch.as_tensor(before), torch.as_tensor(after)
    return first.shape == second.shape and bool((first == second.to(first.device)).all())


def _name_of(batch: Mapping[str, Any], row: int) -> str:
    indices = batch.get("sample_indices")
    return str(row) if indices is None else str(int(indices[row]))
