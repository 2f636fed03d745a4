"""The only place that knows which device training runs on; no Ray, no HTTP.

`SLIME_ACCELERATOR=cpu` forces the CPU on a machine with CUDA; `SLIME_ACCELERATOR=cuda` refuses to
start without CUDA. Nothing here is imported by the pure cores: importing this package imports torch
only when `get_accelerator` is called.
"""

from __future__ import annotations

import functools
import os

from slime.accelerator.base import Accelerator
from slime.exceptions import ConfigError

__all__ = ["Accelerator", "get_accelerator"]


@functools.cache
def get_accelerator() -> Accelerator:
    """Returns the process's accelerator: CUDA when torch sees a device and SLIME_ACCELERATOR is not
    `cpu`, else the CPU.

    Raises `ConfigError` for an unknown SLIME_ACCELERATOR, and for `cuda` where torch sees no CUDA
    device.
    """
    wanted = os.environ.get("SLIME_ACCELERATOR", "").strip().lower()
    if wanted not in ("", "cpu", "cuda"):
        raise ConfigError(
            f"SLIME_ACCELERATOR={wanted!r} is not known. Use cpu, cuda, or leave it unset."
        )
    if wanted == "cpu":
        return _cpu()
    import torch

    if torch.cuda.is_available():
        from slime.accelerator.cuda import CudaAccelerator

        return CudaAccelerator()
    if wanted == "cuda":
        raise ConfigError(
            "CUDA was asked for (--accelerator cuda, or SLIME_ACCELERATOR=cuda), but torch sees no "
            "CUDA device. Leave it out to run on the CPU."
        )
    return _cpu()


def _cpu() -> Accelerator:
    from slime.accelerator.cpu import CpuAccelerator

    return CpuAccelerator()
