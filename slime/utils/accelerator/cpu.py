"""The CPU as an accelerator: gloo, host memory, and Megatron-core adapted by `cpu_megatron`."""

from __future__ import annotations

import torch

from slime.utils.accelerator.base import Accelerator


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

    def rng_state(self) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)

    def prepare_megatron(self) -> None:
        from slime.utils.accelerator.cpu_megatron import install_cpu_adaptations

        install_cpu_adaptations()
