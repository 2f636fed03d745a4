"""Keys and values of all running sequences in pages of 16 tokens, and the count of each page's
users.
"""

from __future__ import annotations

import numpy as np
import torch

from slime.models.shape import ModelShape

PAGE_SIZE = 16
# Padding rows write to this page; no sequence owns it, and only padding rows read it.
TRASH_PAGE = 0


def num_pages(num_tokens: int) -> int:
    """Returns the pages that `num_tokens` tokens need."""
    return -(-num_tokens // PAGE_SIZE)


def bytes_per_token(config: ModelShape, dtype: torch.dtype) -> int:
    """Returns the bytes that one token's keys and values take in all layers."""
    return 2 * config.num_layers * config.kv_size * dtype.itemsize


class PageAllocator:
    """Hands out pages and takes them back. A page may have several holders; it is free when the
    last one releases it.
    """

    def __init__(self, total_pages: int) -> None:
        self._free = np.arange(total_pages - 1, TRASH_PAGE, -1, dtype=np.int64)
        self._num_free = total_pages - 1
        self._holders = np.zeros(total_pages, dtype=np.int32)

    @property
    def num_free(self) -> int:
        """Pages without a holder."""
        return self._num_free

    def allocate(self, count: int) -> np.ndarray:
        """Returns `count` pages (int64 [count]) with one holder each. The caller has checked
        `num_free`.
        """
        assert count <= self._num_free, (
            f"{count} pages wanted, {self._num_free} free: admission must check first"
        )
        pages = self._free[self._num_free - count : self._num_free].copy()
        self._num_free -= count
        self._holders[pages] = 1
        return pages

    def share(self, pages: np.ndarray) -> None:
        """Adds one holder to each of `pages`."""
        self._holders[pages] += 1

    def release(self, pages: np.ndarray) -> None:
        """Takes one holder from each of `pages` (distinct)."""
        self._holders[pages] -= 1
        freed = pages[self._holders[pages] == 0]
        self._free[self._num_free : self._num_free + len(freed)] = freed
        self._num_free += len(freed)

    def are_free(self, pages: np.ndarray) -> np.ndarray:
        """Returns bool [N]: the page has no holder."""
        return self._holders[pages] == 0


class KvCache:
    """Keys and values by layer, each [pages, PAGE_SIZE, kv heads, head_dim]. Memory is touched only
    as pages come into use.
    """

    def __init__(
        self, config: ModelShape, total_pages: int, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.total_pages = total_pages
        self._shape = (total_pages, PAGE_SIZE, config.num_kv_heads, config.head_dim)
        self._num_layers, self._device, self._dtype = config.num_layers, device, dtype
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.allocate()

    def allocate(self) -> None:
        """Makes the pages, all zero; nothing where they are there."""
        if not self.keys:
            self.keys, self.values = (
                [
                    _zeros(self._shape, device=self._device, dtype=self._dtype)
                    for _ in range(self._num_layers)
                ]
                for _ in range(2)
            )

    def release(self) -> None:
        """Gives the memory of the pages back. Nobody may hold one."""
        self.keys, self.values = [], []

    def write(
        self, layer: int, index: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Stores `keys`, `values` [N, kv heads, head_dim] at flat token positions `index` [N] (page
        * PAGE_SIZE + offset).
        """
        self.keys[layer].view(-1, *keys.shape[1:]).index_copy_(0, index, keys)
        self.values[layer].view(-1, *values.shape[1:]).index_copy_(0, index, values)

    def gather(self, layer: int, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns keys and values [N, kv heads, pages * PAGE_SIZE, head_dim] (strided) of the
        sequences with `pages` [N, P].
        """
        rows, width = pages.shape
        flat = pages.reshape(-1)
        gathered = []
        for pool in (self.keys[layer], self.values[layer]):
            taken = pool.view(pool.shape[0], -1).index_select(0, flat)
            gathered.append(taken.view(rows, width * PAGE_SIZE, *pool.shape[2:]).transpose(1, 2))
        return gathered[0], gathered[1]

    def copy_pages(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copies pages `sources` [N] to `targets` [N] in every layer."""
        for pool in (*self.keys, *self.values):
            pool.index_copy_(0, targets, pool.index_select(0, sources))

    def clear_pages(self, pages: torch.Tensor) -> None:
        """Sets pages to zero. Needed after non-finite values: 0 * NaN would reach the next holder
        through masked positions.
        """
        for pool in (*self.keys, *self.values):
            pool.index_fill_(0, pages, 0.0)


def _zeros(shape: tuple[int, ...], *, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, device=device, dtype=dtype)
    # calloc: the system hands out zero pages when they are first touched, so an unused cache costs
    # no memory.
    raw = np.zeros(int(np.prod(shape)) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)
