"""The columns of a rollout batch as torch tensors: upstream's conversion, for converters and tests
that still work on plain lists.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

_ONE_TENSOR_PER_SAMPLE = {
    "tokens": torch.int64,
    "loss_masks": torch.int32,
    "rollout_log_probs": torch.float32,
    "teacher_log_probs": torch.float32,
    "rollout_top_p_token_ids": torch.int32,
    "rollout_top_p_token_offsets": torch.int32,
    "rollout_routed_experts": None,  # keeps its dtype
}


def tensorize_rollout_data_for_training(rollout_data: dict[str, Any]) -> dict[str, Any]:
    """Returns `rollout_data` itself, its per-token lists replaced by CPU tensors that are detached,
    contiguous and writable.

    tokens int64 [T]; loss_masks int32, log-probs float32 and nucleus fields int32 over the
    response; routed experts keep their dtype; `rollout_mask_sums` becomes one float32 tensor [N];
    of `multimodal_train_inputs` only arrays and tensors are converted. Absent fields stay absent.
    """
    for name, dtype in _ONE_TENSOR_PER_SAMPLE.items():
        if rollout_data.get(name) is not None:
            rollout_data[name] = [_as_tensor(entry, dtype) for entry in rollout_data[name]]
    if rollout_data.get("rollout_mask_sums") is not None:
        rollout_data["rollout_mask_sums"] = _as_tensor(
            rollout_data["rollout_mask_sums"], torch.float32
        )
    if rollout_data.get("multimodal_train_inputs") is not None:
        rollout_data["multimodal_train_inputs"] = [
            None
            if entry is None
            else {key: _if_array(value, _as_tensor) for key, value in entry.items()}
            for entry in rollout_data["multimodal_train_inputs"]
        ]
    return rollout_data


def _if_array(value: object, convert: Callable[[Any], Any]) -> Any:
    return convert(value) if isinstance(value, np.ndarray | torch.Tensor) else value


def _as_tensor(value: object, dtype: torch.dtype | None = None) -> torch.Tensor:
    if isinstance(value, np.ndarray) and not value.flags.writeable:
        # torch would share the memory of the object store, which must not be written
        value = value.copy()
    return torch.as_tensor(value, dtype=dtype).detach().cpu().contiguous()
