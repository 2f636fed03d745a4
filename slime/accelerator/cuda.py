"""CUDA as an accelerator: nccl and torch.cuda. Thin by intent; no machine of this project's CI has
a GPU to run it on.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from slime.accelerator.base import Accelerator
from slime.accelerator.host_memory import HostCopies

_GB = 1024**3


class CudaAccelerator(Accelerator):
    name = "cuda"
    communication_backend = "nccl"
    ray_resource = "GPU"

    def device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device())

    def set_device(self, local_rank: int) -> None:
        torch.cuda.set_device(local_rank)

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def offload(self, tensors: Iterable[torch.Tensor], *, folder: str) -> HostCopies:
        del folder
        copies = HostCopies(tensor for tensor in tensors if tensor.is_cuda)
        self.empty_cache()
        return copies

    def memory_stats(self) -> dict[str, float]:
        free, total = torch.cuda.mem_get_info()
        return {
            "allocated": torch.cuda.memory_allocated() / _GB,
            "peak": torch.cuda.max_memory_allocated() / _GB,
            "free": free / _GB,
            "total": total / _GB,
        }

    def rng_state(self) -> torch.Tensor:
        return torch.cuda.get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        torch.cuda.set_rng_state(state)

    def prepare_megatron(self) -> None:
        pass
