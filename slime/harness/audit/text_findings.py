"""Responses that should not have been scored as they are: empty, cut, looping, repeated, or with
text that is not the model's; and how much they move their groups' baselines.

Whether a response is blank, repeats itself or is not the text of its tokens is for the gate's own
checks to say.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterator

import numpy as np

from slime.data.sample import Sample, Status
from slime.gate.alignment import REPLACEMENT, Codec
from slime.gate.chunk import Chunk
from slime.gate.config import GateConfig, MismatchCause
from slime.gate.quality_checks import find_repetitive
from slime.gate.text import is_blank
from slime.gate.tools import ADVICE_OF_CAUSE, find_mismatches
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
from slime.harness.audit.table import UNKNOWN, SampleTable

LOOP_CHARS = 256
LOOP_PERIOD = 64
SAME_LENGTH_SHARE = 0.05  # of the samples, at exactly the longest length: a limit
LONG_TEXT = 40  # characters that two samples do not share by chance
UNLIKELY = -9.0  # nats of a response that two samples do not share by chance
FEW = 0.02  # share below which a quality finding is for information
SPECIAL = re.compile(
    r"<\|[a-zA-Z_]{2,40}\|>|</?s>|<(?:pad|eos|bos|unk)>|\[(?:PAD|EOS|BOS|SEP|CLS)\]"
    r"|<(?:start|end)_of_turn>|<｜[^｜<>]{2,40}｜>"
)
_TOOL_TURN = re.compile(r"<\|[a-zA-Z_]{2,40}\|>\s*tool\b|<\|tool\|>|<tool_response>")
_NOT_RESPONSE_END = re.compile(r"\S")


@dataclasses.dataclass
class _Tally:
    """What one kind of defect did over all steps."""

    count: int = 0
    trained: int = 0
    groups: int = 0
    mean_with: float = 0.0
    mean_without: float = 0.0
    steps: set = dataclasses.field(default_factory=set)
    causes: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    evidence: list[Evidence] = dataclasses.field(default_factory=list)

    def add(self, table: SampleTable, bad_N: np.ndarray, notes: dict[int, str] | None = None):
        """Counts the samples of a step, and the baselines of their groups with and without them."""
        if not bad_N.any():
            return
        self.count += int(bad_N.sum())
        self.trained += int((bad_N & table.counts_N).sum())
        self.steps.add(table.where)
        for i in np.flatnonzero(bad_N)[: max(4, KEPT // 8)].tolist():
            if len(self.evidence) < KEPT:
                self.evidence.append(evidence_of(table, i, note=(notes or {}).get(i, "")))
        counts = table.counts_N & np.isfinite(table.reward_N) & (table.group_N != UNKNOWN)
        touched = np.unique(table.group_N[bad_N & counts])
        inside = counts & np.isin(table.group_N, touched)
        if not inside.any():
            return
        size = int(table.group_N.max()) + 1
        with_, without = (
            np.bincount(table.group_N[rows], weights=table.reward_N[rows], minlength=size)
            / np.maximum(np.bincount(table.group_N[rows], minlength=size), 1)
            for rows in (inside, inside & ~bad_N)
        )
        has_others = np.bincount(table.group_N[inside & ~bad_N], minlength=size)[touched] > 0
        chosen = touched[has_others]
        self.groups += len(chosen)
        self.mean_with += float(with_[chosen].sum())
        self.mean_without += float(without[chosen].sum())

    def sentence(self, what: str, total: int, steps: int) -> str:
        """How many, where, and what they do to baselines."""
        where = f" in {len(self.steps)} of {plural(steps, 'step')}" if steps > 1 else ""
        text = f"{self.count} of {total} responses ({percent(self.count, total)}) {what}{where}"
        if self.groups:
            text += (
                f"; the mean reward of their {plural(self.groups, 'group')} is "
                f"{self.mean_with / self.groups:.3g} with and "
                f"{self.mean_without / self.groups:.3g} without them"
            )
        if self.trained < self.count:
            text += f"; {self.count - self.trained} of them were rejected and do not train"
        return text + "."


def ends_in_loop(text: str) -> bool:
    """Whether the last LOOP_CHARS characters are one phrase of at most LOOP_PERIOD characters,
    repeated without a difference; a shorter text, all of it, at least four times.
    """
    tail = text.rstrip()[-LOOP_CHARS:]
    if len(tail) < 48:
        return False
    last = tail[-8:]
    for period in range(1, min(LOOP_PERIOD, len(tail) // 4) + 1):
        # the phrase's end stands a period before the end: few periods pass that
        if tail[-8 - period : -period] == last and tail[period:] == tail[:-period]:
            return not is_blank(tail)
    return False


class TextFindings:
    """Empty, cut, looping, repeated and mis-decoded responses of all steps."""

    def __init__(self, codec: Codec | None) -> None:
        self._codec = codec
        self._tallies: dict[str, _Tally] = collections.defaultdict(_Tally)
        self._total = 0
        self._compared = 0
        self._steps: set[str] = set()

    def look(self, table: SampleTable) -> None:
        self._total += len(table)
        self._steps.add(table.where)
        has_text = any(table.responses)
        if has_text or (table.response_length_N == 0).any():
            self._tallies["empty_response"].add(table, _empty(table))
        self._tallies["cut_response"].add(table, _cut(table))
        self._tallies["looping_response"].add(table, _looping(table))
        if not has_text:
            return
        self._look_at_markers(table)
        for name, bad_N in _duplicates(table).items():
            self._tallies[name].add(table, bad_N)
        broken = [REPLACEMENT in text for text in table.responses]
        self._tallies["broken_characters"].add(table, np.array(broken))
        echo = [
            any(len(one) >= 16 and text.lstrip().startswith(one.strip()) for one in asked)
            for *asked, text in zip(table.prompts, table.asked, table.responses, strict=True)
        ]
        self._tallies["prompt_in_response"].add(table, np.array(echo))
        if self._codec is not None and table.tokens is not None:
            self._compare(table, self._codec)

    def _look_at_markers(self, table: SampleTable) -> None:
        inside, at_end = np.zeros((2, len(table)), dtype=bool)
        notes = {}
        for i, text in enumerate(table.responses):
            if ("<" not in text and "[" not in text) or _has_turns(table, i):
                continue
            for match in SPECIAL.finditer(text):
                if _NOT_RESPONSE_END.search(text, match.end()):
                    inside[i] = True
                    notes[i] = f"{match.group()} at character {match.start()}"
                    break
                at_end[i] = True
        self._tallies["special_tokens_in_text"].add(table, inside, notes)
        self._tallies["end_token_in_text"].add(table, at_end & ~inside)

    def _compare(self, table: SampleTable, codec: Codec) -> None:
        samples = _samples(table)
        found = find_mismatches(samples, codec)
        # outer whitespace and hidden special tokens are rules of decoding, not other text
        serious = [one for one in found if one.cause is not MismatchCause.WHITESPACE]
        bad_N = np.zeros(len(table), dtype=bool)
        bad_N[[one.position for one in serious]] = True
        notes = {
            one.position: f"{one.cause.value}: its ids decode to {one.decoded[:80]!r}"
            for one in serious
        }
        tally = self._tallies["text_not_of_tokens"]
        tally.causes.update(one.cause for one in serious)
        tally.add(table, bad_N, notes)
        self._compared += len(table)

    def findings(self) -> Iterator[Finding]:
        total, steps = self._total, len(self._steps)
        for name, what in _SENTENCES.items():
            tally = self._tallies.get(name)
            if tally is None or not tally.count:
                continue
            share = tally.count / total
            sentence = tally.sentence(what, total, steps)
            if name == "text_not_of_tokens":
                cause = tally.causes.most_common(1)[0][0]
                sentence = f"{sentence[:-1]}; mostly {cause.value}: {ADVICE_OF_CAUSE[cause]}."
            yield finding(name, _level(name, tally, share), sentence, tally.evidence, share=share)


_SENTENCES = {
    "empty_response": "are empty",
    "cut_response": "were cut at the length limit",
    "looping_response": "end in one phrase repeated",
    "duplicate_in_group": "are the same long text as another one of their group",
    "duplicate_across_groups": "are the same long text as one of another prompt",
    "prompt_in_response": "begin with their prompt",
    "special_tokens_in_text": "have a special token or role marker inside",
    "end_token_in_text": "end with their end token as text",
    "broken_characters": "have undecodable characters (U+FFFD)",
    "text_not_of_tokens": "are not the text of their tokens",
}
# Some of these are in every run; they are warnings where there are more than FEW.
_COMMON = frozenset({"cut_response", "duplicate_in_group", "broken_characters"})


def _level(name: str, tally: _Tally, share: float) -> Level:
    if name == "end_token_in_text" or not tally.trained:
        return Level.INFO
    if name == "text_not_of_tokens":
        return Level.ERROR
    return Level.INFO if name in _COMMON and share < FEW else Level.WARNING


def _has_turns(table: SampleTable, i: int) -> bool:
    """Whether the response holds turns that the model did not write, whose markers belong there."""
    if "tool" in table.responses[i] and _TOOL_TURN.search(table.responses[i]):
        return True
    mask = np.zeros(0) if table.masks is None else table.masks.row(i)
    return bool(len(mask) and (mask == 0).any() and (mask != 0).any())


def _empty(table: SampleTable) -> np.ndarray:
    blank = np.array([is_blank(text) for text in table.responses], dtype=bool)
    if not any(table.responses):  # a dump without texts
        return table.response_length_N == 0
    return blank | (table.response_length_N == 0)


def _cut(table: SampleTable) -> np.ndarray:
    if (table.cut_N != UNKNOWN).any():
        return table.cut_N == 1
    lengths = table.response_length_N
    if (lengths <= 0).all():
        return np.zeros(len(table), dtype=bool)
    longest = lengths == lengths.max()
    # nothing says why a response ended: many of exactly the longest length were cut there
    at_limit = longest.sum() >= max(3, SAME_LENGTH_SHARE * len(table)) and lengths.max() >= 32
    return longest if at_limit and longest.sum() < len(table) else np.zeros(len(table), dtype=bool)


def _looping(table: SampleTable) -> np.ndarray:
    loops = np.array([ends_in_loop(text) for text in table.responses], dtype=bool)
    if table.tokens is None:
        return loops
    chunk = Chunk(_samples(table), GateConfig(), None)
    rows = np.flatnonzero(chunk.response_lengths <= chunk.total_lengths)
    found = find_repetitive(chunk, rows)
    loops[rows[found]] = True
    return loops


def _samples(table: SampleTable) -> list[Sample]:
    """The step's samples as the gate's checks take them; token columns are views."""
    assert table.tokens is not None
    return [
        Sample(
            index=i,
            tokens=table.tokens.row(i),  # type: ignore[arg-type]
            response=text,
            response_length=max(0, int(table.response_length_N[i])),
            status=Status.COMPLETED,
        )
        for i, text in enumerate(table.responses)
    ]


def _duplicates(table: SampleTable) -> dict[str, np.ndarray]:
    """bool [N] by kind: the second and later of equal long responses."""
    in_group, across = np.zeros((2, len(table)), dtype=bool)
    likelihood = _log_likelihood(table)
    seen: dict[str, tuple[int, set]] = {}
    for i, text in enumerate(table.responses):
        unlikely = likelihood is not None and likelihood[i] < UNLIKELY
        if likelihood is not None and not unlikely and not np.isnan(likelihood[i]):
            continue
        if len(text) < LONG_TEXT and not (unlikely and text):
            continue
        group = int(table.group_N[i])
        held = seen.get(text)
        if held is None:
            seen[text] = (i, {group})
            continue
        if group in held[1]:
            in_group[i] = table.has_groups
        elif table.prompts[held[0]] != table.prompts[i] or not table.prompts[i]:
            across[i] = table.has_groups
        held[1].add(group)
    return {"duplicate_in_group": in_group, "duplicate_across_groups": across}


def _log_likelihood(table: SampleTable) -> np.ndarray | None:
    """float64 [N]: the log-probability of each whole response; NaN where it is not recorded."""
    column = table.rollout_log_probs
    if column is None:
        return None
    values = np.where(np.isfinite(column.values), column.values, 0.0)
    sums = np.add.reduceat(np.append(values, 0.0), column.offsets[:-1])
    return np.where(column.lengths > 0, sums, np.nan)
