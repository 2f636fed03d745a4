"""From numpy bookkeeping to tensors and back: plans padded forward passes and runs the decoder on
them.

A row's attention width is a function of its own length (WIDTHS), never of its neighbours', so that
deterministic mode needs no other code path than padding the number of rows to a whole tile.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import cast

import numpy as np
import torch

from slime.algorithms.log_probs import VocabularyShard, compute_log_probs_and_entropy
from slime.backends.torch_engine.kv_cache import PAGE_SIZE, TRASH_PAGE, KvCache
from slime.backends.torch_engine.model import DecodeGroup, Decoder
from slime.backends.torch_engine.row_tiles import SMALLEST_TILE, round_up_to_tile

# Page counts that a sequence is padded to: 1, 2, 3, 4, 6, 8, 12, 16, ... waste at most a third.
WIDTHS = np.array(sorted({base << shift for shift in range(24) for base in (1, 3)}), dtype=np.int64)
# Below this many rows a separate attention call costs more than padding its rows to the next width.
MIN_GROUP_ROWS = 8
MAX_LOGIT_ELEMENTS = 2**26


def pad_to_width(pages: np.ndarray) -> np.ndarray:
    """Returns the smallest of WIDTHS that is at least `pages`, elementwise."""
    return WIDTHS[np.searchsorted(WIDTHS, pages)]


@dataclasses.dataclass(frozen=True)
class PrefillPrompt:
    """One prompt to run: token ids [T], the pages that take its keys and values, and from where its
    log-probs are wanted (or None).
    """

    tokens: np.ndarray
    pages: np.ndarray
    score_from: int | None = None


@dataclasses.dataclass(frozen=True)
class PrefillResult:
    """Float32 logits [vocab] after the last token and, if asked for, log-probs of tokens
    score_from..T-1 (NaN for token 0).
    """

    logits: torch.Tensor
    scores: np.ndarray | None


class ModelRunner:
    """A decoder with its cache. Not thread-safe: the engine thread alone calls it."""

    def __init__(self, decoder: Decoder, cache: KvCache, *, max_prefill_tokens: int) -> None:
        self.decoder = decoder
        self.cache = cache
        self._max_prefill_tokens = max_prefill_tokens
        rows = MAX_LOGIT_ELEMENTS // decoder.config.vocab_size
        self.max_decode_rows = max(SMALLEST_TILE, rows // SMALLEST_TILE * SMALLEST_TILE)

    def pad_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns `rows` [N, ...] with zero rows appended up to a whole tile in deterministic mode,
        else unchanged.
        """
        missing = self._padded(rows.shape[0]) - rows.shape[0]
        return rows if missing == 0 else torch.cat((rows, rows.new_zeros(missing, *rows.shape[1:])))

    def _padded(self, count: int) -> int:
        return round_up_to_tile(count) if self.decoder.is_deterministic else count

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.decoder.device)

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[PrefillPrompt]) -> list[PrefillResult]:
        """Returns one result per prompt, in order; keys and values are in the prompts' pages
        afterwards.
        """
        widths = (
            pad_to_width(np.array([-(-len(prompt.tokens) // PAGE_SIZE) for prompt in prompts]))
            * PAGE_SIZE
        )
        results: list[PrefillResult | None] = [None] * len(prompts)
        for width in np.unique(widths).tolist():
            members = np.flatnonzero(widths == width).tolist()
            size = max(1, self._max_prefill_tokens // width)
            for start in range(0, len(members), size):
                chosen = members[start : start + size]
                for index, result in zip(
                    chosen, self._prefill_pass([prompts[i] for i in chosen], width), strict=True
                ):
                    results[index] = result
        return cast("list[PrefillResult]", results)

    def _prefill_pass(self, prompts: list[PrefillPrompt], width: int) -> list[PrefillResult]:
        count = len(prompts)
        total = self._padded(count * width)
        tokens = np.zeros(total, dtype=np.int64)
        write_index = np.full(total, TRASH_PAGE * PAGE_SIZE, dtype=np.int64)
        offsets = np.arange(width)
        for row, prompt in enumerate(prompts):
            length = len(prompt.tokens)
            place = slice(row * width, row * width + length)
            tokens[place] = prompt.tokens
            write_index[place] = (
                prompt.pages[offsets[:length] // PAGE_SIZE] * PAGE_SIZE
                + offsets[:length] % PAGE_SIZE
            )
        hidden = self.decoder.prefill(
            self._to_device(tokens), self._to_device(write_index), self.cache, shape=(count, width)
        )
        last = np.array(
            [row * width + len(prompt.tokens) - 1 for row, prompt in enumerate(prompts)]
        )
        logits = self.decoder.logits(self.pad_rows(hidden[self._to_device(last)]))
        results = []
        for row, prompt in enumerate(prompts):
            states = hidden[row * width : row * width + len(prompt.tokens)]
            scores = None if prompt.score_from is None else self._score(states, prompt)
            results.append(PrefillResult(logits=logits[row].clone(), scores=scores))
        return results

    def _score(self, states: torch.Tensor, prompt: PrefillPrompt) -> np.ndarray:
        """Returns float32 log-probs at temperature 1 of the prompt's tokens from score_from on;
        token 0 has none (NaN).
        """
        score_from = cast(int, prompt.score_from)
        first = max(score_from, 1)
        scores = [np.full(first - score_from, np.nan, dtype=np.float32)]
        targets = self._to_device(prompt.tokens.astype(np.int64))
        for start in range(first, len(prompt.tokens), self.max_decode_rows):
            stop = min(start + self.max_decode_rows, len(prompt.tokens))
            logits = self.decoder.logits(self.pad_rows(states[start - 1 : stop - 1]))
            log_probs, _ = compute_log_probs_and_entropy(
                logits[: stop - start], targets[start:stop], VocabularyShard()
            )
            scores.append(log_probs[:, 0].cpu().numpy())
        return np.concatenate(scores)

    @torch.inference_mode()
    def decode(
        self, tokens: np.ndarray, lengths: np.ndarray, page_table: np.ndarray
    ) -> torch.Tensor:
        """Returns float32 logits [M, vocab] (M >= B, padded) after `tokens` [B], one per sequence
        of `lengths` [B] cached tokens.

        page_table: [B, W] pages of each sequence. Rows must be sorted by `decode_order`; at most
        max_decode_rows.
        """
        count = len(tokens)
        total = self._padded(count)
        write_index = (
            page_table[np.arange(count), lengths // PAGE_SIZE] * PAGE_SIZE + lengths % PAGE_SIZE
        )
        padding = np.zeros(total - count, dtype=np.int64)
        groups = self._decode_groups(lengths, page_table)
        if total > count:
            pages = np.full((total - count, 1), TRASH_PAGE, dtype=np.int64)
            groups.append(
                DecodeGroup(count, total, self._to_device(pages), self._to_device(padding + 1))
            )
        hidden = self.decoder.decode(
            self._to_device(np.concatenate((tokens, padding))),
            self._to_device(np.concatenate((lengths, padding))),
            self._to_device(np.concatenate((write_index, padding))),
            self.cache,
            groups=groups,
            max_position=int(lengths.max()),
        )
        return self.decoder.logits(hidden)

    def _decode_groups(self, lengths: np.ndarray, page_table: np.ndarray) -> list[DecodeGroup]:
        widths = pad_to_width(lengths // PAGE_SIZE + 1)
        borders = [0, *(np.flatnonzero(np.diff(widths)) + 1).tolist(), len(widths)]
        if not self.decoder.is_deterministic:
            borders = _without_small_groups(borders)
        groups = []
        for start, stop in zip(borders[:-1], borders[1:], strict=True):
            width = int(widths[stop - 1])
            pages = page_table[start:stop, :width]
            if pages.shape[1] < width:
                pages = np.pad(
                    pages, ((0, 0), (0, width - pages.shape[1])), constant_values=TRASH_PAGE
                )
            groups.append(
                DecodeGroup(
                    start,
                    stop,
                    self._to_device(np.ascontiguousarray(pages)),
                    self._to_device(lengths[start:stop] + 1),
                )
            )
        return groups


def decode_order(lengths: np.ndarray) -> np.ndarray:
    """Returns the permutation [B] that puts sequences of equal attention width side by side,
    shortest first, stable.
    """
    return np.argsort(pad_to_width(lengths // PAGE_SIZE + 1), kind="stable")


def _without_small_groups(borders: list[int]) -> list[int]:
    """Returns `borders` without those that end a group of less than MIN_GROUP_ROWS: its rows join
    the next wider group.
    """
    kept = [0]
    for border in borders[1:-1]:
        if border - kept[-1] >= MIN_GROUP_ROWS:
            kept.append(border)
    return [*kept, borders[-1]]
