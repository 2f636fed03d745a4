"""Tensors that leave their device for a while: their memory there is given back, and their content waits in host memory.

The storage of a tensor is emptied in place and filled again, so every view of it (a parameter inside a flat gradient buffer, an
optimizer's main parameter) stays the same object and is right again afterwards. Between the two nobody may read it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch


class HostCopies:
    """The content of emptied storages. `restore` puts everything back, once."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copies the storages behind `tensors`, each once however many views it has, and empties them."""
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
        self._copies: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []
        for storage in storages.values():
            if storage.nbytes() == 0:
                continue
            host = torch.UntypedStorage(storage.nbytes(), device="cpu")
            if storage.device.type != "cpu":
                host = host.pin_memory()
            host.copy_(storage)
            self._copies.append((storage, host))
        for storage, _ in self._copies:
            storage.resize_(0)

    @property
    def num_bytes(self) -> int:
        """Bytes that the device has back."""
        return sum(host.nbytes() for _, host in self._copies)

    def restore(self) -> None:
        """Fills the storages again; the host's copies go."""
        copies, self._copies = self._copies, []
        for storage, host in copies:
            storage.resize_(host.nbytes())
            storage.copy_(host)
