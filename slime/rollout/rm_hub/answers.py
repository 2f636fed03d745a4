"""Finds the answer in a response: what the graders compare with the label."""

from __future__ import annotations

import re

from slime.rollout.rm_hub.boxes import last_box
from slime.rollout.rm_hub.end_tokens import without_end_tokens
from slime.rollout.rm_hub.labels import GSM8K_MARK
from slime.rollout.rm_hub.written_forms import BEFORE, BEHIND

THINK_END = "</think>"
# Only the end of a long response is searched for an answer without a box.
LAST_CHARS = 2000
# What says the answer, in several languages; "the result is" only where no answer is said. Of
# several on one line the last counts.
_SAID = tuple(
    re.compile(
        rf"(?:{names})\s*(?:\*\*)?\s*(?:is|are|ist|lautet|est|es|é|è|是|为|為|は|=|:|：)\s*(?:\*\*)?\s*[:：]?\s*(?=\S)",
        re.IGNORECASE,
    )
    for names in (
        r"\banswers?|\bantwort|\bréponse|\brespuesta|\brisposta|\bresposta|\bответ|答案|答え|(?<!回)答(?=\s*[:：])",
        r"\bresults?|\bsolutions?|\bergebnis|\blösung|\brésultat|\bresultado|\brisultato|结果|結果",
    )
)
_SAID_CHARS = 500
_LEAD = re.compile(
    r"(?:so|thus|hence|therefore|then)\b,?\s+(?=[A-Za-z](?:_\w+)?\s*=)", re.IGNORECASE
)
_BOLD = re.compile(r"(?<![\w)}])\*\*|\*\*(?![\w({\\]|[.-]\w)")
_FORMULA = re.compile(
    r"\$\$(.{1,500}?)\$\$|(?<!\\)\$(?=\S)([^$\n]{1,500}?)(?<![\\\s])\$(?!\d)|\\\[(.{1,500}?)\\\]|\\\((.{1,500}?)\\\)",
    re.DOTALL,
)
_NUMBER = re.compile(
    rf"(?<![\w.,/]){BEFORE}[-−]?(?:\\?\$|€|£)?\d[\d,. ]*(?:/\d+)?{BEHIND}%?(?![\w/])", re.IGNORECASE
)
# "5!" is a factorial, whatever was meant: its mark belongs to it, also at the end of a sentence.
_SENTENCE_END = re.compile(
    r"[.?](?:\s|$)|(?<![\d)}])!(?:\s|$)|(?<=[\d)}]!)\s+(?=[A-Z][a-z])|。|,\s+(?:which|because|since|so)\b"
)
_WORDS = re.compile(r"[A-Za-z]{2,}\s+[A-Za-z]{2,}")


def after_thinking(response: str) -> str:
    """What stands behind the last </think>; the whole response without one."""
    return response.rsplit(THINK_END, 1)[-1]


def boxed_answer(response: str) -> str | None:
    """The last box behind the reasoning; where nothing is boxed there, the last box of all."""
    box = last_box(after_thinking(response))
    return last_box(response) if box is None else box


def final_answer(response: str) -> str | None:
    """The answer that a response ends with: its box; else what stands behind the last ####, behind
    "the answer is" or "Answer:"; else its last formula; else the last number of its last line. A
    response of one short line may be the answer itself. Where nothing of this stands behind the
    reasoning, a box within the reasoning counts.
    """
    response = without_end_tokens(response).strip()
    text = after_thinking(response).strip() or response
    box = last_box(text)
    if box is not None:
        return box
    if re.search(r"\\(?:boxed|fbox)\s*\{", text):
        return None  # a box that was not closed: the response was cut
    text = text[-LAST_CHARS:]
    if GSM8K_MARK in text:
        return text.rsplit(GSM8K_MARK, 1)[1].strip().split("\n")[0] or None
    for pattern in _SAID:
        starts = [match.end() for match in pattern.finditer(text)]
        if starts:
            return _until_sentence_end(text[starts[-1] :].split("\n")[0][:_SAID_CHARS])
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return None
    formulas = [
        next(group for group in match.groups() if group is not None)
        for match in _FORMULA.finditer(text)
    ]
    if formulas and (len(lines) > 1 or lines[-1].strip("$ .") != formulas[-1].strip()):
        return formulas[-1].rpartition("=")[2].strip() if "=" in formulas[-1] else formulas[-1]
    if len(lines) == 1 and len(lines[0]) <= 100 and not _WORDS.search(lines[0]):
        return without_bold(_LEAD.sub("", lines[0], count=1))
    numbers = _NUMBER.findall(without_bold(lines[-1]))
    if numbers:
        return numbers[-1].strip(" ,.")
    return last_box(response) or lines[-1]


def without_bold(text: str) -> str:
    """The text without the marks of bold type; those between two values are a power: 2**3."""
    return _BOLD.sub("", text).strip()


def _until_sentence_end(text: str) -> str:
    text = without_bold(text)
    formula = _FORMULA.match(text)
    if formula is not None:
        return next(group for group in formula.groups() if group is not None)
    return _SENTENCE_END.split(text)[0].strip()
