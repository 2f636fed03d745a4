"""What a device must offer to the rest of slime. Two implementations: cpu.py and cuda.py."""

from __future__ import annotations

import abc
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from slime.accelerator.host_memory import OffloadedTensors


class Accelerator(abc.ABC):
    """One kind of device of this process. Stateless apart from what torch itself keeps."""

    name: str
    communication_backend: str  # of torch.distributed
    ray_resource: str  # what Ray calls one unit of it

    @abc.abstractmethod
    def device(self) -> torch.device:
        """The device that tensors of this process live on."""

    @abc.abstractmethod
    def set_device(self, local_rank: int) -> None:
        """Binds this process to one device of the machine."""

    @abc.abstractmethod
    def empty_cache(self) -> None:
        """Gives cached, unused device memory back."""

    @abc.abstractmethod
    def offload(self, tensors: Iterable[torch.Tensor], *, folder: str) -> OffloadedTensors:
        """Gives the device memory of `tensors` back; `restore` of the result fills it again.
        `folder`: where files may be written.
        """

    @abc.abstractmethod
    def memory_stats(self) -> dict[str, float]:
        """Memory in GB: `allocated`, `peak`, `free`, `total`."""

    @abc.abstractmethod
    def rng_state(self) -> torch.Tensor:
        """State of the device's default generator, uint8 `[n]`."""

    @abc.abstractmethod
    def set_rng_state(self, state: torch.Tensor) -> None:
        """Restores what `rng_state` returned."""

    @abc.abstractmethod
    def prepare_megatron(self) -> None:
        """Makes Megatron-core usable on this device. Idempotent; call it before any Megatron
        function that makes tensors.
        """
