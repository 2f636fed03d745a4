"""The running sequences as arrays, one row per slot, so that a step costs no Python work per
sequence.
"""

from __future__ import annotations

from typing import cast

import numpy as np
import torch

from slime.backends.torch_engine import noise
from slime.backends.torch_engine.request import Request
from slime.backends.torch_engine.sampler import PenaltyRows, SampledTokens, SamplingBatch


class RunningBatch:
    """Slots 0..capacity-1. `rows` lists the slots in use; every other attribute is indexed by slot.

    lengths counts tokens in the KV cache, generated the response tokens so far; outputs and
    log_probs hold the response.
    """

    def __init__(
        self,
        capacity: int,
        *,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        device: torch.device,
    ) -> None:
        self.capacity = capacity
        self.rows = np.zeros(0, dtype=np.int64)
        self.requests: list[Request | None] = [None] * capacity
        self._free = list(range(capacity - 1, -1, -1))
        self._vocab_size = vocab_size
        self._device = device
        self._eos_ids = np.array(
            [token for token in eos_token_ids if token < vocab_size], dtype=np.int64
        )
        self._is_eos = np.zeros(vocab_size, dtype=bool)
        self._is_eos[self._eos_ids] = True
        self.lengths = np.zeros(capacity, dtype=np.int64)
        self.prompt_lengths = np.zeros(capacity, dtype=np.int64)
        self.generated = np.zeros(capacity, dtype=np.int64)
        self.limits = np.zeros(capacity, dtype=np.int64)
        self.last_tokens = np.zeros(capacity, dtype=np.int64)
        self.page_table = np.zeros((capacity, 8), dtype=np.int64)
        self.outputs = np.zeros((capacity, 32), dtype=np.int32)
        self.log_probs = np.zeros((capacity, 32), dtype=np.float32)
        self._seeds = np.zeros(capacity, dtype=np.uint64)
        self._temperatures = np.ones(capacity, dtype=np.float32)
        self._top_ks = np.zeros(capacity, dtype=np.int64)
        self._top_ps = np.ones(capacity, dtype=np.float64)
        self._min_ps = np.zeros(capacity, dtype=np.float64)
        self._min_new = np.zeros(capacity, dtype=np.int64)
        self._truncates = np.zeros(capacity, dtype=bool)
        self._penalizes = np.zeros(capacity, dtype=bool)
        self._keeps_nucleus = np.zeros(capacity, dtype=bool)
        self._ignores_eos = np.zeros(capacity, dtype=bool)
        self.has_stops = np.zeros(capacity, dtype=bool)
        self.streams = np.zeros(capacity, dtype=bool)
        self._counts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def num_free(self) -> int:
        """Slots that a new sequence can take."""
        return len(self._free)

    def place(self, request: Request) -> int:
        """Gives `request` (with its pages) a slot and returns it. It joins `rows` only
        with `join`.
        """
        slot = self._free.pop()
        params = request.params
        self.requests[slot] = request
        request.slot = slot
        self.lengths[slot] = self.prompt_lengths[slot] = len(request.prompt)
        self.generated[slot] = 0
        self.limits[slot] = request.limit
        pages = cast(np.ndarray, request.pages)
        width = len(pages)
        if width > self.page_table.shape[1]:
            self.page_table = _widened(self.page_table, width)
        self.page_table[slot, :width] = pages
        self.page_table[slot, width:] = 0
        self._seeds[slot] = request.seed
        self._temperatures[slot] = params.temperature
        self._top_ks[slot], self._top_ps[slot], self._min_ps[slot] = (
            params.top_k,
            params.top_p,
            params.min_p,
        )
        self._min_new[slot] = params.min_new_tokens
        self._truncates[slot], self._penalizes[slot] = params.truncates, params.penalizes
        self._keeps_nucleus[slot] = params.return_top_p_token_ids
        self._ignores_eos[slot] = params.ignore_eos
        self.has_stops[slot] = bool(params.stop or params.stop_token_ids)
        self.streams[slot] = request.stream
        if params.penalizes:
            seen = torch.zeros(self._vocab_size, dtype=torch.bool, device=self._device)
            seen[torch.from_numpy(request.prompt.astype(np.int64)).to(self._device)] = True
            self._counts[slot] = (
                torch.zeros(self._vocab_size, dtype=torch.int32, device=self._device),
                seen,
            )
        return slot

    def join(self, slots: np.ndarray) -> None:
        """Adds `slots` to the rows that the next step decodes."""
        self.rows = np.concatenate((self.rows, slots))

    def remove(self, slots: np.ndarray) -> None:
        """Frees `slots`."""
        if len(slots) == 0:
            return
        self.rows = self.rows[~np.isin(self.rows, slots)]
        for slot in slots.tolist():
            self.requests[slot] = None
            self._counts.pop(slot, None)
            self._free.append(slot)

    def sampling_batch(self, rows: np.ndarray) -> SamplingBatch:
        """Returns the parameters of the next token of `rows` [B]. Parts that no row asks for are
        None.
        """
        truncates = self._truncates[rows].any()
        keeps = np.flatnonzero(self._keeps_nucleus[rows])
        return SamplingBatch(
            # The absolute position: a response that is cut and resumed as a longer prompt draws the
            # numbers it would have drawn.
            uniforms=noise.uniform(
                self._seeds[rows], self.prompt_lengths[rows] + self.generated[rows]
            ),
            temperatures=self._temperatures[rows],
            top_ks=self._top_ks[rows] if truncates else None,
            top_ps=self._top_ps[rows] if truncates else None,
            min_ps=self._min_ps[rows] if truncates else None,
            penalties=self._penalties(rows) if self._penalizes[rows].any() else None,
            banned=self._banned(rows),
            keep_rows=keeps if len(keeps) else None,
        )

    def _penalties(self, rows: np.ndarray) -> PenaltyRows:
        places = np.flatnonzero(self._penalizes[rows])
        slots = rows[places].tolist()
        params = [self.requests[slot].params for slot in slots]

        def column(values: list[float]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.float32, device=self._device)

        return PenaltyRows(
            rows=torch.from_numpy(places).to(self._device),
            response_counts=torch.stack([self._counts[slot][0] for slot in slots]),
            seen_in_prompt=torch.stack([self._counts[slot][1] for slot in slots]),
            repetition=column([value.repetition_penalty for value in params]),
            frequency=column([value.frequency_penalty for value in params]),
            presence=column([value.presence_penalty for value in params]),
        )

    def _banned(self, rows: np.ndarray) -> tuple[torch.Tensor, torch.Tensor] | None:
        early = np.flatnonzero(self.generated[rows] < self._min_new[rows])
        if len(early) == 0:
            return None
        with_eos = early[~self._ignores_eos[rows[early]]]
        places = [np.repeat(with_eos, len(self._eos_ids))]
        tokens = [np.tile(self._eos_ids, len(with_eos))]
        for place in early[self.has_stops[rows[early]]].tolist():
            stop_ids = cast(Request, self.requests[rows[place]]).params.stop_token_ids
            places.append(np.full(len(stop_ids), place, dtype=np.int64))
            tokens.append(np.array(stop_ids, dtype=np.int64))
        banned_rows, banned_ids = (
            torch.from_numpy(np.concatenate(part)).to(self._device) for part in (places, tokens)
        )
        return banned_rows, banned_ids

    def append(self, rows: np.ndarray, sampled: SampledTokens, batch: SamplingBatch) -> None:
        """Stores one sampled token per row. `lengths` is not changed: the token's keys are written
        by the next decode.
        """
        index = self.generated[rows]
        needed = int(index.max()) + 1
        if needed > self.outputs.shape[1]:
            self.outputs = _widened(self.outputs, needed)
            self.log_probs = _widened(self.log_probs, needed)
        self.outputs[rows, index] = sampled.tokens
        self.log_probs[rows, index] = sampled.log_probs
        self.last_tokens[rows] = sampled.tokens
        self.generated[rows] = index + 1
        if batch.keep_rows is not None:
            for place, kept in zip(batch.keep_rows.tolist(), sampled.kept, strict=True):
                self.requests[rows[place]].kept_token_ids.append(kept.astype(np.int32))
        if self._counts:
            for place in np.flatnonzero(self._penalizes[rows]).tolist():
                self._counts[int(rows[place])][0][int(sampled.tokens[place])] += 1

    def ended_by_token(self, rows: np.ndarray) -> np.ndarray:
        """Returns bool [B]: the last token is an end token that counts."""
        return self._is_eos[self.last_tokens[rows]] & ~self._ignores_eos[rows]

    def ended_by_length(self, rows: np.ndarray) -> np.ndarray:
        """Returns bool [B]: as many tokens as the limit."""
        return self.generated[rows] >= self.limits[rows]


def _widened(array: np.ndarray, needed: int) -> np.ndarray:
    width = array.shape[1]
    while width < needed:
        width *= 2
    grown = np.zeros((array.shape[0], width), dtype=array.dtype)
    grown[:, : array.shape[1]] = array
    return grown
