"""Multiple choice (GPQA): the letter that a response settles on, against the right one."""

from __future__ import annotations

import re
import string
from collections.abc import Iterable
from typing import Any

DEFAULT_VALID_LETTERS = list(string.ascii_uppercase[:10])

# Most explicit first; within one pattern the last match is what the response settled on.
_LETTER = r"[\(\[\*\s\{\$]*([A-Za-z])\b(?![\w'])"
_PATTERNS = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        rf"\bfinal\s+(?:answer|option|choice)\s*(?:is|:|=|-)?\s*(?:option|choice)?\s*:?{_LETTER}",
        rf"\b(?:answer|option|choice)\s*(?:is|:|=)\s*(?:option|choice)?\s*:?{_LETTER}",
        r"\\boxed\s*\{\s*(?:\\text\s*\{)?\s*\(?([A-Za-z])\)?\s*\}",
        r"(?<![A-Za-z])\(?([A-Za-z])\)?\s+is\s+(?:the\s+)?(?:correct|right|best)\b",
        rf"\b(?:answer|option|choice)\s+{_LETTER}",
    )
)
_STANDALONE = re.compile(r"(?<![A-Za-z0-9'])([A-Z])(?![A-Za-z0-9'])")


def _extract_letter_from_response(response: str | None, valid_letters: Iterable[str]) -> str | None:
    """The chosen letter in upper case, None where there is none. Only what stands after the last </think> counts."""
    if not response:
        return None
    text = response.rsplit("</think>", 1)[-1]
    valid = {letter.upper() for letter in valid_letters}
    for pattern in _PATTERNS:
        letters = [match.upper() for match in pattern.findall(text) if match.upper() in valid]
        if letters:
            return letters[-1]
    standalone = [letter for letter in _STANDALONE.findall(text) if letter in valid]
    return standalone[-1] if standalone else None


def compute_gpqa_reward(response: str | None, label: Any, metadata: dict | None = None) -> float:
    """1.0 for the right choice, else 0.0.

    metadata may hold `choices` (list, or dict by letter), `valid_letters` and `correct_letter`. A label may be a letter,
    an index into the choices, or a choice's text. Where no letter can be told on either side, the label's text must occur
    in the response.
    """
    if response is None or label is None and not (metadata or {}).get("correct_letter"):
        return 0.0
    metadata = metadata or {}
    choices = metadata.get("choices")
    texts = list(choices.values()) if isinstance(choices, dict) else list(choices or [])
    valid = _valid_letters(metadata, choices, texts)
    correct = _correct_letter(metadata, label, texts, valid)
    chosen = _extract_letter_from_response(response, valid)
    if correct is not None and chosen is not None:
        return float(chosen == correct)
    wanted = texts[valid.index(correct)] if correct in valid and valid.index(correct) < len(texts) else label
    needle = _normalized(wanted)
    return float(bool(needle) and len(needle) > 1 and needle in _normalized(response.rsplit("</think>", 1)[-1]))


def _valid_letters(metadata: dict, choices: Any, texts: list) -> list[str]:
    if metadata.get("valid_letters"):
        return [str(letter).upper() for letter in metadata["valid_letters"]]
    if isinstance(choices, dict) and all(isinstance(key, str) and len(key) == 1 and key.isalpha() for key in choices):
        return [key.upper() for key in choices]
    return list(string.ascii_uppercase[: len(texts)]) if texts else DEFAULT_VALID_LETTERS


def _correct_letter(metadata: dict, label: Any, texts: list, valid: list[str]) -> str | None:
    given = metadata.get("correct_letter")
    if isinstance(given, str) and given.strip():
        return given.strip().upper()
    if isinstance(label, int) and not isinstance(label, bool):
        return valid[label] if 0 <= label < len(valid) else None
    if not isinstance(label, str):
        return None
    if len(label.strip()) == 1 and label.strip().upper() in valid:
        return label.strip().upper()
    for letter, text in zip(valid, texts, strict=False):  # there may be more valid letters than texts
        if _normalized(text) == _normalized(label):
            return letter
    return None


def _normalized(text: Any) -> str:
    return " ".join(re.sub(r"[^\w\s]", " ", str(text).lower()).split())
