"""Copies of a model's weights under tags (actor, ref, teacher, old_actor), kept in host memory and
swapped into the one model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import cast

import torch

# Numbers compared to see whether training changed anything; a large model need not be read whole
# for that.
CHANGE_LIMIT = 16 * 1024**2


class WeightsBackup:
    """Named weight sets of one model (a list of virtual pipeline chunks) that share
    its structure.
    """

    def __init__(self, model: Sequence[torch.nn.Module]) -> None:
        self._model = model
        self._sets: dict[str, dict[str, torch.Tensor]] = {}
        self.active: str | None = None

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for index, chunk in enumerate(self._model):
            for name, tensor in (*chunk.named_parameters(), *chunk.named_buffers()):
                yield f"{index}.{name}", tensor

    def __contains__(self, tag: str | None) -> bool:
        return tag in self._sets

    @property
    def num_sets(self) -> int:
        return len(self._sets)

    @torch.no_grad()
    def backup(self, tag: str) -> None:
        """Stores the model's present weights under `tag`, reusing the memory of an earlier set of
        that tag.
        """
        stored = self._sets.setdefault(tag, {})
        for name, tensor in self._tensors():
            if name not in stored:
                stored[name] = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
            stored[name].copy_(tensor, non_blocking=tensor.is_cuda)
        if any(chunk_tensor.is_cuda for _, chunk_tensor in self._tensors()):
            torch.cuda.synchronize()
        self.active = tag

    def move(self, tag: str, *, to: str) -> None:
        """Renames the set `tag`, if there is one, to `to`, whose memory is used for the next set of
        that name.
        """
        if tag in self._sets:
            earlier = self._sets.pop(to, None)
            self._sets[to] = self._sets.pop(tag)
            if earlier is not None:
                self._sets[tag] = earlier

    @torch.no_grad()
    def largest_change(self, tag: str, *, limit: int = CHANGE_LIMIT) -> float:
        """The largest |present - stored| over the first tensors of `tag`, up to `limit` numbers: 0
        means that training did nothing.
        """
        stored, largest = self._sets[tag], 0.0
        for name, tensor in self._tensors():
            if limit <= 0:
                break
            limit -= tensor.numel()
            if tensor.numel() and tensor.is_floating_point():
                largest = max(largest, float((tensor.detach().cpu() - stored[name]).abs().max()))
        return largest

    @torch.no_grad()
    def restore(self, tag: str) -> None:
        """Puts the weights of `tag` into the model. KeyError for an unknown tag."""
        stored = self._sets[tag]
        for name, tensor in self._tensors():
            tensor.copy_(stored[name], non_blocking=tensor.is_cuda)
        self.active = tag

    @contextlib.contextmanager
    def borrowed(self, tag: str) -> Iterator[None]:
        """Inside, the model holds the weights of `tag`; afterwards those that were active, whatever
        happens.
        """
        before = self.active
        self.restore(tag)
        try:
            yield
        finally:
            self.restore(cast(str, before))
