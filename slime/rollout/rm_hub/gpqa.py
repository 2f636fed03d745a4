"""Multiple choice (GPQA): the letter that a response settles on, against the right one."""

from __future__ import annotations

import re
import string
from collections.abc import Iterable

DEFAULT_VALID_LETTERS = list(string.ascii_uppercase[:10])

# Most explicit first; within one pattern the last match is what the response settled on.
# "a mystery" and "I think" are words: such a letter counts where no word follows, or one that gives
# a reason.
_NO_WORD = (
    r"(?-i:(?<![aAiI])|(?![ \t]+[a-z])|(?=[ \t]+(?:because|since|as|and|for|with|is|which)\b))"
)
_LETTER = rf"[\(\[\*\s\{{\$]*([A-Za-z])\b(?![\w']){_NO_WORD}"
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
# "It is not A" settles on nothing.
_STANDALONE = re.compile(
    rf"(?<![A-Za-z0-9'])(?<![Nn]ot )(?<!NOT )(?<!n't )([A-Z])(?![A-Za-z0-9']){_NO_WORD}"
)
_ALONE = re.compile(r"[*_\s$(\[]*([A-Za-z])[)\]*_\s$.:]*")
_LISTED = re.compile(r"(?<![A-Za-z0-9'])[A-Z](?![A-Za-z0-9'])")
_BETWEEN = r"[)\]*]*(?:[ \t]*(?:[,;/&|+][ \t]*)?(?:(?:and|or)[ \t]+)?)[(\[*]*"
_LETTER_LINE = r"^[ \t(\[*]*[A-Z][)\]*.: \t]*"
_ENUMERATION = re.compile(
    rf"(?<![A-Za-z0-9'])[A-Z](?:{_BETWEEN}(?<![A-Za-z0-9'])[A-Z](?![A-Za-z0-9']))+|{_LETTER_LINE}(?:\n+{_LETTER_LINE})+$",
    re.MULTILINE,
)
_OR_ANOTHER = re.compile(
    r"[)\]*}$]*[ \t]*(?:,|/|,?[ \t]*\b(?:or|and)\b)[ \t]*[(\[*]*([B-HJ-Zb-hj-z])(?![\w'])"
)
_WORD = re.compile(r"(?:(?<![\w.])-)?\d+(?:[.,]\d+)*|\w+")


def _extract_letter_from_response(response: str | None, valid_letters: Iterable[str]) -> str | None:
    """The chosen letter in upper case, None where there is none. Only what stands after the last
    </think> counts. Letters in a row ("A B C D", "A or B") are an enumeration and choose none of
    them; a last line that is a letter alone chooses it, also in lower case.
    """
    if not response:
        return None
    text = response.rsplit("</think>", 1)[-1]
    valid = {letter.upper() for letter in valid_letters}
    listed = _enumerated(text, valid)
    for pattern in _PATTERNS:
        found = [match for match in pattern.finditer(text) if match[1].upper() in valid]
        if found:
            chosen = found[-1]
            other = _OR_ANOTHER.match(text, chosen.end(1))
            is_undecided = other is not None and other[1].upper() in valid - {chosen[1].upper()}
            return None if chosen.start(1) in listed or is_undecided else chosen[1].upper()
    last_line = text.rstrip().rpartition("\n")[2]
    alone = _ALONE.fullmatch(last_line)
    if (
        alone is not None
        and alone[1].upper() in valid
        and len(text.rstrip()) - len(last_line) + alone.start(1) not in listed
    ):
        return alone[1].upper()
    standalone = [
        match[1]
        for match in _STANDALONE.finditer(text)
        if match[1] in valid and match.start(1) not in listed
    ]
    return standalone[-1] if standalone else None


def _enumerated(text: str, valid: set[str]) -> set[int]:
    """Where the letters stand that follow each other with nothing but a comma, "and" or "or"
    between, and are not all the same.
    """
    places: set[int] = set()
    for match in _ENUMERATION.finditer(text):
        letters = [
            (place.start(), place[0])
            for place in _LISTED.finditer(text, match.start(), match.end())
        ]
        if len({letter for _, letter in letters if letter in valid}) > 1:
            said = {letter for _, letter in letters[:-1]}
            # "between A and B, B": what is named again is chosen
            places |= {place for place, _ in (letters[:-1] if letters[-1][1] in said else letters)}
    return places


def compute_gpqa_reward(response: str | None, label: object, metadata: dict | None = None) -> float:
    """1.0 for the right choice, else 0.0.

    metadata may hold `choices` (list, or dict by letter), `valid_letters` and `correct_letter`. A
    label may be a letter, an index into the choices, or a choice's text; a list of labels accepts
    any of them. Where no letter can be told on either side, the label's words must occur in the
    response.
    """
    metadata = metadata or {}
    if isinstance(label, list | tuple) and not metadata.get("correct_letter"):
        return max((compute_gpqa_reward(response, one, metadata) for one in label), default=0.0)
    if response is None or label is None and not metadata.get("correct_letter"):
        return 0.0
    choices = metadata.get("choices")
    texts = list(choices.values()) if isinstance(choices, dict) else list(choices or [])
    valid = _valid_letters(metadata, choices, texts)
    correct = _correct_letter(metadata, label, texts, valid)
    chosen = _extract_letter_from_response(response, valid)
    if correct is not None and chosen is not None:
        return float(chosen == correct)
    wanted = (
        texts[valid.index(correct)]
        if correct in valid and valid.index(correct) < len(texts)
        else label
    )
    needle = _words(wanted)
    if not needle or (len(needle) == 1 and len(needle[0]) == 1 and not needle[0].isdigit()):
        return 0.0
    return float(
        f" {' '.join(needle)} " in f" {' '.join(_words(response.rsplit('</think>', 1)[-1]))} "
    )


def _valid_letters(metadata: dict, choices: object, texts: list) -> list[str]:
    if metadata.get("valid_letters"):
        return [str(letter).upper() for letter in metadata["valid_letters"]]
    if isinstance(choices, dict) and all(
        isinstance(key, str) and len(key) == 1 and key.isalpha() for key in choices
    ):
        return [key.upper() for key in choices]
    return list(string.ascii_uppercase[: len(texts)]) if texts else DEFAULT_VALID_LETTERS


def _correct_letter(metadata: dict, label: object, texts: list, valid: list[str]) -> str | None:
    given = metadata.get("correct_letter")
    if isinstance(given, str) and given.strip():
        return given.strip().upper()
    if isinstance(label, int) and not isinstance(label, bool):
        return valid[label] if 0 <= label < len(valid) else None
    if not isinstance(label, str):
        return None
    if len(label.strip()) == 1 and label.strip().upper() in valid:
        return label.strip().upper()
    # there may be more valid letters than texts
    for letter, text in zip(valid, texts, strict=False):
        if _words(text) == _words(label):
            return letter
    return None


def _words(text: object) -> list[str]:
    """The words and numbers of a text in lower case; 10.5, 1,000 and -10 are one number each."""
    return _WORD.findall(str(text).lower())
