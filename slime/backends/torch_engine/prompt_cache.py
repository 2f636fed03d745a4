"""Prompts whose keys, values and last logits are in memory: a second request with the same prompt
computes nothing.

`Admission` gives waiting requests their pages. Full pages of a prompt are shared by all its
requests; the last, partly filled page is copied for each, because each goes on writing in it.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import cast

import numpy as np
import torch

from slime.backends.torch_engine.kv_cache import PAGE_SIZE, PageAllocator, num_pages
from slime.backends.torch_engine.request import Request

MAX_LOGIT_BYTES = 256 * 2**20


@dataclasses.dataclass(eq=False)
class PromptState:
    """A prompt's tokens [T], its pages and, once it has been run, float32 logits [vocab] after its
    last token.
    """

    tokens: np.ndarray
    pages: np.ndarray
    score_from: int | None = None
    logits: torch.Tensor | None = None
    scores: np.ndarray | None = None


class PromptCache:
    """Least-recently-used, keyed by the exact token ids. It holds its pages in the allocator like a
    sequence does.
    """

    def __init__(self, allocator: PageAllocator, *, vocab_size: int) -> None:
        self._allocator = allocator
        self._entries: collections.OrderedDict[bytes, PromptState] = collections.OrderedDict()
        self._capacity = max(16, MAX_LOGIT_BYTES // (4 * vocab_size))

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: bytes) -> PromptState | None:
        """Returns the entry and marks it as used, None if there is none."""
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
        return entry

    def put(self, key: bytes, entry: PromptState) -> None:
        """Adds an entry whose pages the cache now holds."""
        self._entries[key] = entry

    def trim(self) -> None:
        """Forgets the oldest entries beyond the capacity."""
        while len(self._entries) > self._capacity:
            self._forget(next(iter(self._entries)))

    def free_pages(self, wanted: int, *, protected: set[bytes]) -> bool:
        """Forgets old entries, none of `protected`, until the allocator has `wanted` free pages;
        False if that is not reached.
        """
        if self._allocator.num_free < wanted:
            for key in [key for key in self._entries if key not in protected]:
                self._forget(key)
                if self._allocator.num_free >= wanted:
                    break
        return self._allocator.num_free >= wanted

    def held_pages(self) -> np.ndarray:
        """Returns the pages of all entries (int64); a page may be there more than once."""
        return np.concatenate(
            [np.zeros(0, dtype=np.int64), *(entry.pages for entry in self._entries.values())]
        )

    def clear(self) -> int:
        """Forgets everything and returns the number of entries there were."""
        count = len(self._entries)
        for key in list(self._entries):
            self._forget(key)
        return count

    def _forget(self, key: bytes) -> None:
        self._allocator.release(self._entries.pop(key).pages)


class Admission:
    """Decides which waiting requests start, and gives them all the pages they can ever need, so
    that none is thrown out later.
    """

    def __init__(self, allocator: PageAllocator, cache: PromptCache) -> None:
        self._allocator = allocator
        self._cache = cache

    def choose(
        self, waiting: collections.deque[Request], *, num_slots: int
    ) -> list[tuple[Request, PromptState]]:
        """Takes requests from the front of `waiting` while slots and pages last. States without
        logits must be run next.
        """
        chosen: list[tuple[Request, PromptState]] = []
        protected: set[bytes] = set()
        while waiting and len(chosen) < num_slots:
            request = waiting[0]
            state = (
                self._start(request)
                if request.score_from is not None
                else self._share(request, protected)
            )
            if state is None:
                break
            waiting.popleft()
            chosen.append((request, state))
        return chosen

    def _start(self, request: Request) -> PromptState | None:
        """A request that wants log-probs of its prompt runs it for itself."""
        total = num_pages(len(request.prompt) + request.limit)
        if not self._cache.free_pages(total, protected=set()):
            return None
        request.pages = self._allocator.allocate(total)
        return PromptState(request.prompt, request.pages, score_from=request.score_from)

    def _share(self, request: Request, protected: set[bytes]) -> PromptState | None:
        length = len(request.prompt)
        key = request.prompt.tobytes()
        full = length // PAGE_SIZE
        own = num_pages(length + request.limit) - full
        state = self._cache.get(key)
        protected.add(key)
        if not self._cache.free_pages(
            own + (num_pages(length) if state is None else 0), protected=protected
        ):
            return None
        request.cached_tokens = 0 if state is None else length
        if state is None:
            state = PromptState(request.prompt, self._allocator.allocate(num_pages(length)))
            self._cache.put(key, state)
        self._allocator.share(state.pages[:full])
        request.pages = np.concatenate((state.pages[:full], self._allocator.allocate(own)))
        return state


def pages_to_copy(chosen: list[tuple[Request, PromptState]]) -> tuple[np.ndarray, np.ndarray]:
    """Returns (sources, targets): the partly filled last prompt page of every chosen request that
    shares its prompt.
    """
    pairs = [
        (state.pages[-1], cast(np.ndarray, request.pages)[len(state.pages) - 1])
        for request, state in chosen
        if state.score_from is None and len(request.prompt) % PAGE_SIZE
    ]
    sources, targets = zip(*pairs, strict=True) if pairs else ((), ())
    return np.array(sources, dtype=np.int64), np.array(targets, dtype=np.int64)
