"""Moves tensors out of the device's memory and back: the memory is freed, and the content is kept
in host memory or in a file.

The storage of a tensor is emptied in place and filled again, so every view of it (a parameter
inside a flat gradient buffer, an optimizer's main parameter) stays the same object and is right
again afterwards. Between the two it must not be read.
"""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Iterable
from typing import Generic, TypeVar

import torch

from slime.exceptions import ConfigError

Copy = TypeVar("Copy")


class OffloadedTensors(Generic[Copy]):
    """The content of emptied storages. `restore` puts everything back, once."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copies the storages behind `tensors`, each once however many views it has, and empties
        them.
        """
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
        self._sizes = [
            (storage, storage.nbytes()) for storage in storages.values() if storage.nbytes()
        ]
        # nothing is emptied before everything is copied: a full disk leaves the tensors as they
        # were
        self._copies = [self._copy(storage) for storage, _ in self._sizes]
        for storage, _ in self._sizes:
            storage.resize_(0)

    def _copy(self, storage: torch.UntypedStorage) -> Copy:
        """The content of a storage, outside its device."""
        raise NotImplementedError

    def _fill(self, storage: torch.UntypedStorage, copied: Copy) -> None:
        """Puts what `_copy` returned back into the storage."""
        raise NotImplementedError

    @property
    def num_bytes(self) -> int:
        """Bytes that the device has back."""
        return sum(size for _, size in self._sizes)

    def restore(self) -> None:
        """Fills the storages again; the copies go."""
        for (storage, size), copied in zip(self._sizes, self._copies, strict=True):
            storage.resize_(size)
            self._fill(storage, copied)
        self._sizes, self._copies = [], []


class HostCopies(OffloadedTensors[torch.UntypedStorage]):
    """Storages of a device whose content waits in host memory."""

    def _copy(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        host = torch.UntypedStorage(storage.nbytes(), device="cpu")
        if storage.device.type != "cpu":
            host = host.pin_memory()
        return host.copy_(storage)

    def _fill(self, storage: torch.UntypedStorage, copied: torch.UntypedStorage) -> None:
        storage.copy_(copied)


class FileCopies(OffloadedTensors[int]):
    """Storages in host memory whose content waits in an unnamed file, which ends with this process
    whatever ends it.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], folder: str) -> None:
        """As the base class, with the file on the disk of `folder`. ConfigError, and nothing is
        emptied, where it does not fit.
        """
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)
        try:
            super().__init__(tensors)
        except OSError as error:
            self._file.close()
            raise ConfigError(
                f"--offload-train cannot write the training state below {folder}: "
                f"{error.strerror}. Free some space, or use --no-offload-train."
            ) from error

    def _copy(self, storage: torch.UntypedStorage) -> int:
        start = self._file.tell()
        rest = _bytes_of(storage)
        while rest:
            rest = rest[self._file.write(rest) :]
        return start

    def _fill(self, storage: torch.UntypedStorage, copied: int) -> None:
        self._file.seek(copied)
        rest = _bytes_of(storage)
        while rest:
            num_read = self._file.readinto(rest)
            if not num_read:
                raise OSError(
                    "the file with the training state of --offload-train has become shorter"
                )
            rest = rest[num_read:]

    def restore(self) -> None:
        super().restore()
        self._file.close()


def _bytes_of(storage: torch.UntypedStorage) -> memoryview:
    """The memory of a CPU storage, uint8 `[bytes]`."""
    # Tensor.numpy() would forbid every later resize of the storage.
    return memoryview((ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())).cast("B")
