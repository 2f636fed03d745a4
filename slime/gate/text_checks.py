"""Checks that read the text: whether it is the text of the tokens, and whether its format is right.
Each looks at the rows still alive and returns which of them fail.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import numpy as np

from slime.gate.alignment import TextFinding, classify_mismatch, content_key
from slime.gate.before_rewards import engine_text_of
from slime.gate.chunk import (
    Chunk,
    rows_in,
)
from slime.gate.config import Level, MismatchCause
from slime.gate.text import answer_of, format_problem
from slime.gate.token_columns import as_int


def needs_text(chunk: Chunk, rows: np.ndarray) -> np.ndarray:
    """[len(rows)] bool: comparing, replacing or filling the text is due for the row."""
    if chunk.codec is None:
        return np.zeros(len(rows), dtype=bool)
    if chunk.config.text_source == "tokens" or (
        chunk.config.compare_text and chunk.level("misaligned") is not Level.OFF
    ):
        return np.ones(len(rows), dtype=bool)
    return np.array([not _has_text(chunk, row) for row in rows.tolist()], dtype=bool)


def _has_text(chunk: Chunk, row: int) -> bool:
    text = chunk.samples[row].response
    return isinstance(text, str) and text != ""


def find_misaligned(chunk: Chunk, rows: np.ndarray) -> np.ndarray:
    """Engine text that differs from the ids' text. Also sets the response text where the tokens are
    its source.
    """
    due = rows[needs_text(chunk, rows)]
    failed = set()
    compared = _compared_rows(chunk, due)
    if chunk.codec is None:  # without a tokenizer there is no text to compare with
        failed = {
            row for row in rows.tolist() if not isinstance(chunk.samples[row].response, str | None)
        }
        chunk.details.update(
            {
                row: f"response is {type(chunk.samples[row].response).__name__}, no text"
                for row in failed
            }
        )
    if len(due):
        findings = _text_findings(chunk, due, compared)
        # in one batch, also where the comparison came from the cache
        if chunk.config.text_source == "tokens":
            chunk.text_of(
                np.array(
                    [row for row, finding in findings.items() if not finding.text_is_response],
                    dtype=np.int64,
                )
            )
        for row, finding in findings.items():
            has_text = _has_text(chunk, row)
            if row in compared and has_text:
                chunk.counts["compared"] += 1
                if finding.cause is not None:
                    chunk.counts[f"cause_{finding.cause.value}"] += 1
                    chunk.counts["mismatched"] += 1
                    lenient = (
                        chunk.level("misaligned") is Level.LENIENT or chunk.config.compare_unasked
                    )
                    if not chunk.config.correct_text and not (
                        lenient and finding.cause is not MismatchCause.SHIFTED_IDS
                    ):
                        failed.add(row)
                        chunk.details[row] = f"text and tokens differ: {finding.cause.value}"
                        continue
            replace = (
                chunk.config.text_source == "tokens"
                or not has_text
                or (row in compared and finding.cause is not None)
            )
            if replace and not finding.text_is_response:
                chunk.texts[row] = chunk.text_of(np.array([row]))[row].strip()
    return rows_in(rows, failed)


def _compared_rows(chunk: Chunk, rows: np.ndarray) -> Container[int]:
    """Those of `rows` whose text is compared with their tokens: all, or those whose index the
    sampled comparison takes.
    """
    config = chunk.config
    if not config.compare_text or chunk.level("misaligned") is Level.OFF:
        return frozenset()
    if config.compare_every == 1:
        return frozenset(rows.tolist())
    numbers = {row: as_int(chunk.samples[row].index) for row in rows.tolist()}
    return frozenset(
        row
        for row, number in numbers.items()
        if number is None or number % config.compare_every == 0
    )


def _engine_text(chunk: Chunk, row: int, compared: Container[int]) -> Any:
    """The text that a row's decoded ids are compared with: the engine's own, where an earlier pass
    has replaced it.
    """
    sample = chunk.samples[row]
    return engine_text_of(sample) if row in compared else sample.response


def _text_findings(
    chunk: Chunk, rows: np.ndarray, compared: Container[int]
) -> dict[int, TextFinding]:
    """Compares decoded ids with the engine's text for those of `rows` in `compared`; what was
    looked at before (same ids, text, rule) comes from the cache.
    """
    codec, stops = chunk.codec, chunk.config.stop_strings
    assert codec is not None, "needs_text is False for every row without a codec"
    rules = {looked_at: repr((stops, looked_at)).encode() for looked_at in (False, True)}
    ids_of = {row: chunk.response_ids(row) for row in rows.tolist()}
    keys = {
        row: content_key(ids, _engine_text(chunk, row, compared), rules[row in compared])
        for row, ids in ids_of.items()
    }
    # one look each: another thread's check may push an entry out in between
    findings = {
        row: found for row, key in keys.items() if (found := codec.cache.get(key)) is not None
    }
    fresh = np.array([row for row in rows.tolist() if row not in findings], dtype=np.int64)
    chunk.counts["cache_hits"] += len(findings)
    chunk.counts["cache_misses"] += len(fresh)
    for row, finding in findings.items():
        if finding.text_is_response:
            chunk.set_text_view(row, chunk.samples[row].response)
    texts = chunk.text_of(fresh)
    for row in fresh.tolist():
        text, ids = _engine_text(chunk, row, compared), ids_of[row]
        cause = None
        if row in compared and isinstance(text, str) and text:
            cause = classify_mismatch(
                texts[row], text, special_strings=codec.special_strings, stop_strings=stops
            )
            if cause is MismatchCause.SPECIAL_TOKENS and codec.shows_special(ids):
                plain = codec.decode([ids], without=codec.all_special)[0]
                cause = classify_mismatch(
                    plain, text, special_strings=codec.special_strings, stop_strings=stops
                )
        stripped = texts[row].strip()
        findings[row] = TextFinding(
            cause, isinstance(text, str) and text == stripped == chunk.samples[row].response
        )
        codec.remember(keys[row], findings[row])
        if cause is None:  # the second look, after the text was replaced, must not decode again
            codec.remember(
                content_key(ids, stripped, rules[row in compared]), TextFinding(None, True)
            )
    return findings


def find_bad_format(chunk: Chunk, rows: np.ndarray) -> np.ndarray:
    """Responses whose structure is not their task's. Tasks without a structure are
    not looked at.
    """
    result = np.zeros(len(rows), dtype=bool)
    if chunk.config.format is None and not chunk.config.tasks:
        return result
    level = chunk.level("bad_format")
    specs = {row: spec for row in rows.tolist() if (spec := chunk.format_of(row)) is not None}
    texts = chunk.text_of(np.array(list(specs), dtype=np.int64))
    for position, row in enumerate(rows.tolist()):
        spec = specs.get(row)
        if spec is not None:
            chunk.counts["format_checked"] += 1
            problem = format_problem(
                texts[row], spec, level, ends_with_end_token=_ends_with(chunk, row, spec.end_marker)
            )
            if problem is not None:
                result[position] = True
                chunk.details[row] = problem
            elif spec.answer is not None and (answer := answer_of(texts[row], spec)) is not None:
                chunk.answers[row] = answer
    return result


def _ends_with(chunk: Chunk, row: int, marker: str | None) -> bool | None:
    """Whether the last response token decodes to the end marker; None without a codec
    or a marker.
    """
    if chunk.codec is None or marker is None:
        return None
    last = int(chunk.response_ids(row)[-1])
    return chunk.codec.tokenizer.decode([last], skip_special_tokens=False).strip() == marker
