"""All random states of this process as plain JSON values."""

from __future__ import annotations

import base64
import random
from typing import Any, cast

import numpy as np
import torch

from slime.accelerator import get_accelerator


def collect_rng_state() -> dict[str, Any]:
    """The states of Python's, numpy's, torch's and the device's generators, and of Megatron's named
    streams.
    """
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    version, words, gauss = random.getstate()
    state = cast("tuple[str, np.ndarray, int, int, float]", np.random.get_state())
    kind, keys, position, has_gauss, cached = state
    return {
        "python": [version, list(words), gauss],
        "numpy": [kind, keys.tolist(), int(position), int(has_gauss), float(cached)],
        "torch": _encode(torch.get_rng_state()),
        "device": _encode(get_accelerator().rng_state()),
        "megatron": {
            name: _encode(state) for name, state in get_cuda_rng_tracker().get_states().items()
        },
    }


def restore_rng_state(state: dict[str, Any]) -> None:
    """Restores what `collect_rng_state` returned."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(_decode(state["torch"]))
    get_accelerator().set_rng_state(_decode(state["device"]))
    get_cuda_rng_tracker().set_states(
        {name: _decode(text) for name, text in state["megatron"].items()}
    )


def _encode(tensor: torch.Tensor) -> str:
    return base64.b64encode(tensor.cpu().numpy().tobytes()).decode()


def _decode(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
