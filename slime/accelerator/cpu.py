"""The CPU as an accelerator: gloo, host memory, and Megatron-core adapted by `cpu_megatron`."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterable

import torch

from slime.accelerator.base import Accelerator
from slime.accelerator.host_memory import FileCopies

_GB = 1024**3


class CpuAccelerator(Accelerator):
    name = "cpu"
    communication_backend = "gloo"
    ray_resource = "CPU"

    def device(self) -> torch.device:
        return torch.device("cpu")

    def set_device(self, local_rank: int) -> None:
        del local_rank

    def empty_cache(self) -> None:
        pass

    def offload(self, tensors: Iterable[torch.Tensor], *, folder: str) -> FileCopies:
        # Host memory is the device's memory here, so the only place outside it is a disk.
        os.makedirs(folder, exist_ok=True)
        return FileCopies(tensors, folder)

    def memory_stats(self) -> dict[str, float]:
        page = os.sysconf("SC_PAGE_SIZE")
        total = os.sysconf("SC_PHYS_PAGES") * page
        # ru_maxrss is in KiB on Linux and in bytes on macOS.
        unit = 1 if sys.platform == "darwin" else 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        if sys.platform == "linux":
            with open("/proc/self/statm") as statm:
                allocated = int(statm.read().split()[1]) * page
            free = os.sysconf("SC_AVPHYS_PAGES") * page
        else:
            allocated, free = peak, total - peak
        return {
            "allocated": allocated / _GB,
            "peak": peak / _GB,
            "free": free / _GB,
            "total": total / _GB,
        }

    def rng_state(self) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)

    def prepare_megatron(self) -> None:
        from slime.accelerator.cpu_megatron import install_cpu_adaptations

        install_cpu_adaptations()
