"""Loss masks, the lengths of token columns, weight versions, and records that contradict
themselves.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator

import numpy as np

from slime.gate.alignment import Codec
from slime.harness.audit.findings import (
    KEPT,
    Evidence,
    Finding,
    Level,
    evidence_of,
    finding,
    percent,
    plural,
)
from slime.harness.audit.table import UNKNOWN, SampleTable, TokenColumn

STALE = 4  # weight updates behind the newest of the step, from which it is a warning
MANY_MASKED = 0.05  # share of samples without a trained token, from which it is a warning
# Tokens that begin and end what the model did not write, where a tokenizer has them as one token.
_OTHERS = (
    ("<tool_response>", "</tool_response>"),
    ("<|im_start|>", "<|im_end|>"),
    ("<|tool|>", "<|assistant|>"),
    ("<|user|>", "<|assistant|>"),
    ("<|start_header_id|>", "<|eot_id|>"),
)


class MaskFindings:
    """Masks and columns of all steps."""

    def __init__(self, codec: Codec | None) -> None:
        self._codec = codec
        self._spans = _marker_ids(codec)
        self._total = 0
        self._counts: collections.Counter[str] = collections.Counter()
        self._over_prompt = 0
        self._tokens = 0
        self._evidence: dict[str, list[Evidence]] = collections.defaultdict(list)

    def look(self, table: SampleTable) -> None:
        self._total += len(table)
        for i, problem in enumerate(table.problems):
            if problem is not None:
                self._add("broken_record", table, i, problem)
        self._look_at_columns(table)
        if table.masks is None:
            return
        lengths, masks = table.response_length_N, table.masks
        known = (masks.lengths > 0) & (lengths != UNKNOWN)
        for i in np.flatnonzero(known & (masks.lengths != lengths)).tolist():
            total = 0 if table.tokens is None else int(table.tokens.lengths[i])
            over_prompt = int(masks.lengths[i]) == total
            self._over_prompt += over_prompt
            what = "prompt and response" if over_prompt else "neither response nor prompt with it"
            note = f"{masks.lengths[i]} entries for {lengths[i]} response tokens: {what}"
            self._add("mask_length", table, i, note)
        sums = _sums(masks.values != 0, masks)
        for i in np.flatnonzero((masks.lengths > 0) & (sums == 0)).tolist():
            self._add("all_masked", table, i, f"{masks.lengths[i]} tokens, all masked")
        if masks.values.dtype.kind == "f":
            odd = _sums((masks.values != 0) & (masks.values != 1), masks)
            for i in np.flatnonzero(odd).tolist():
                values = masks.row(i)
                value = values[(values != 0) & (values != 1)][0]
                self._add("mask_values", table, i, f"{int(odd[i])} entries, the first is {value:g}")
        if self._spans and table.tokens is not None:
            self._look_at_others(table)

    def _look_at_columns(self, table: SampleTable) -> None:
        for name in ("rollout_log_probs", "log_probs"):
            column = getattr(table, name)
            if column is None:
                continue
            wrong = (column.lengths > 0) & (table.response_length_N != UNKNOWN)
            wrong &= column.lengths != table.response_length_N
            for i in np.flatnonzero(wrong).tolist():
                note = (
                    f"{column.lengths[i]} {name} for {table.response_length_N[i]} response tokens"
                )
                self._add("column_length", table, i, note)

    def _look_at_others(self, table: SampleTable) -> None:
        """Trained tokens between the markers of a turn that is not the model's."""
        assert table.masks is not None
        for i in range(len(table)):
            ids, mask = table.response_ids(i), table.masks.row(i)
            if not len(ids) or len(mask) != len(ids):
                continue
            for begin, end in self._spans:
                opened = np.flatnonzero(ids == begin)
                if not len(opened):
                    continue
                closed = np.flatnonzero(ids == end)
                inside = np.zeros(len(ids), dtype=bool)
                for start in opened.tolist():
                    if self._is_models(ids[start + 1 : start + 2]):
                        continue
                    later = closed[closed > start]
                    inside[start + 1 : int(later[0]) if len(later) else len(ids)] = True
                trained = int((inside & (mask != 0)).sum())
                if trained:
                    self._tokens += trained
                    self._add("trained_tool_tokens", table, i, f"{trained} tokens with mask 1")
                    break

    def _is_models(self, role: np.ndarray) -> bool:
        """Whether a turn's first token says that the model writes it."""
        assert self._codec is not None
        return self._codec.tokenizer.decode(role.tolist()).strip() == "assistant"

    def _add(self, name: str, table: SampleTable, i: int, note: str) -> None:
        self._counts[name] += 1
        if len(self._evidence[name]) < KEPT:
            self._evidence[name].append(evidence_of(table, i, note=note))

    def findings(self) -> Iterator[Finding]:
        sentences = {
            "broken_record": "contradict themselves",
            "mask_length": "have a loss mask of another length than the response"
            + (f" ({self._over_prompt} cover the prompt too)" if self._over_prompt else ""),
            "mask_values": "have a loss mask with other values than 0 and 1",
            "column_length": "have log-probs of another length than the response",
            "trained_tool_tokens": f"train on {self._tokens} tokens of turns that are not the model's",
            "all_masked": "have no trained token",
        }
        for name, what in sentences.items():
            count = self._counts[name]
            if not count:
                continue
            share = count / self._total
            level = Level.ERROR
            if name == "all_masked":
                level = Level.WARNING if share >= MANY_MASKED else Level.INFO
            elif name == "trained_tool_tokens":
                level = Level.WARNING
            yield finding(
                name,
                level,
                f"{count} of {plural(self._total, 'sample')} ({percent(count, self._total)}) {what}.",
                self._evidence[name],
                share=share,
            )


def _sums(flags: np.ndarray, column: TokenColumn) -> np.ndarray:
    """int64 [N]: how many flags are set in each entry."""
    totals = np.concatenate([[0], np.cumsum(flags, dtype=np.int64)])
    return totals[column.offsets[1:]] - totals[column.offsets[:-1]]


def _marker_ids(codec: Codec | None) -> list[tuple[int, int]]:
    """(begin, end) ids of the markers that this tokenizer has as single tokens."""
    if codec is None:
        return []
    found = []
    for pair in _OTHERS:
        ids = [codec.tokenizer(marker, add_special_tokens=False)["input_ids"] for marker in pair]
        if all(len(one) == 1 for one in ids):
            found.append((int(ids[0][0]), int(ids[1][0])))
    return found


class VersionFindings:
    """Weight versions of all steps."""

    def __init__(self) -> None:
        self._newest: dict[str, tuple[int, str]] = {}
        self._stale = self._known = self._oldest = 0
        self._steps: set[str] = set()
        self._evidence: list[Evidence] = []
        self._back: list[Evidence] = []

    def look(self, table: SampleTable) -> None:
        known = table.version_high_N != UNKNOWN
        if table.is_evaluation or not known.any():
            return
        newest = int(table.version_high_N[known].max())
        self._known += int(known.sum())
        age_N = np.where(known, newest - table.version_low_N, 0)
        old = np.flatnonzero(age_N >= STALE)
        self._oldest = max(self._oldest, int(age_N.max()))
        self._stale += len(old)
        if len(old):
            self._steps.add(table.where)
        for i in old[:8].tolist():
            note = f"weights {table.version_low_N[i]}, newest of the step {newest}"
            self._evidence.append(evidence_of(table, i, note=note))
        before, where = self._newest.get(table.run, (newest, ""))
        if newest < before:
            note = f"weights {newest} after {before} at {where}"
            self._back.append(Evidence(table.where, note=note))
        self._newest[table.run] = (newest, table.where)

    def findings(self) -> Iterator[Finding]:
        if self._stale:
            yield finding(
                "stale_weights",
                Level.WARNING,
                f"{self._stale} of {plural(self._known, 'sample')} "
                f"({percent(self._stale, self._known)}) in {plural(len(self._steps), 'step')} are at "
                f"least {STALE} weight updates older than the newest of their step, up to "
                f"{self._oldest}.",
                self._evidence,
                share=self._stale / self._known,
            )
        if self._back:
            yield finding(
                "versions_go_back",
                Level.WARNING,
                f"The weight version goes back at {plural(len(self._back), 'step')}.",
                self._back,
            )
