"""Finds the answer in a response: what the graders compare with the label."""

from __future__ import annotations

import re

from slime.rollout.rm_hub.boxes import last_box
from slime.rollout.rm_hub.end_tokens import without_end_tokens
from slime.rollout.rm_hub.labels import GSM8K_MARK

THINK_END = "</think>"
# Only the end of a long response is searched for an answer without a box.
LAST_CHARS = 2000
_SAID = re.compile(
    r"(?:answer|result|solution)\s*(?:\*\*)?\s*(?:is|are|=|:)\s*(?:\*\*)?\s*:?\s*(?P<answer>[^\n]{1,500})", re.IGNORECASE
)
_FORMULA = re.compile(r"\$\$(.{1,500}?)\$\$|(?<!\\)\$(?=\S)([^$\n]{1,500}?)(?<![\\\s])\$(?!\d)|\\\[(.{1,500}?)\\\]|\\\((.{1,500}?)\\\)", re.DOTALL)
_NUMBER = re.compile(r"(?<![\w.,/])[-−]?(?:\\?\$|€|£)?\d[\d,. ]*(?:/\d+)?%?(?![\w/])")
_WORDS = re.compile(r"[A-Za-z]{2,}\s+[A-Za-z]{2,}")


def after_thinking(response: str) -> str:
    """What stands behind the last </think>; the whole response without one."""
    return response.rsplit(THINK_END, 1)[-1]


def boxed_answer(response: str) -> str | None:
    """The last box behind the reasoning; where nothing is boxed there, the last box of all."""
    box = last_box(after_thinking(response))
    return last_box(response) if box is None else box


def final_answer(response: str) -> str | None:
    """The answer that a response ends with: its box; else what stands behind the last ####, behind "the answer is" or "Answer:";
    else its last formula; else the last number of its last line. A response of one short line may be the answer itself.
    Where nothing of this stands behind the reasoning, a box within the reasoning counts."""
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
    said = [match["answer"] for match in _SAID.finditer(text)]
    if said:
        return _until_sentence_end(said[-1])
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return None
    formulas = [next(group for group in match.groups() if group is not None) for match in _FORMULA.finditer(text)]
    if formulas and (len(lines) > 1 or lines[-1].strip("$ .") != formulas[-1].strip()):
        return formulas[-1].rpartition("=")[2].strip() if "=" in formulas[-1] else formulas[-1]
    if len(lines) == 1 and len(lines[0]) <= 100 and not _WORDS.search(lines[0]):
        return lines[0]
    numbers = _NUMBER.findall(lines[-1].replace("**", ""))
    if numbers:
        return numbers[-1].strip(" ,.")
    return last_box(response) or lines[-1]


def _until_sentence_end(text: str) -> str:
    text = text.replace("**", "").strip()
    formula = _FORMULA.match(text)
    if formula is not None:
        return next(group for group in formula.groups() if group is not None)
    return re.split(r"[.!?](?:\s|$)|,\s+(?:which|because|since|so)\b", text)[0].strip()
