"""The reward type math_value: the answer that a response ends with, compared with the label by
value.

Our own reader decides wherever it can read both sides. Only what it cannot read is given to
math-verify, and only the two answers: math-verify never sees the rest of a response, where it might
find another number. It is used where it is installed.
"""

from __future__ import annotations

import re

from slime.rollout.rm_hub.answers import final_answer
from slime.rollout.rm_hub.equality import is_same_answer
from slime.rollout.rm_hub.labels import label_answers

# What math-verify would compute for long: towers of powers, factorials, deep nesting.
MAX_LENGTH, MAX_NESTING = 300, 10
_HOSTILE = re.compile(
    r"\^\s*[{(]?[^{}()^]*\^\s*[{(]?[^{}()^]*\^|\^\s*[{(]?\s*\d{5,}|\d{4,}\s*!|\d{100,}"
)


def grade_math_value(response: str, label: object) -> int:
    """1 where the answer of the response has the value of one that the label accepts, else 0."""
    answer = final_answer(response)
    return int(
        answer is not None and any(_is_right(answer, truth) for truth in label_answers(label))
    )


def _is_right(answer: str, truth: str) -> bool:
    verdict = is_same_answer(answer, truth, strict=False)
    if verdict is not None or not (_is_harmless(answer) and _is_harmless(truth)):
        return bool(verdict)
    try:
        from math_verify import parse, verify
    except ImportError:  # the extra "math"; without it, what is not read is not right
        return False
    given, wanted = (
        parse(f"\\boxed{{{text.strip('$ ')}}}", parsing_timeout=None, raise_on_error=True)
        for text in (answer, truth)
    )
    return bool(verify(wanted, given, timeout_seconds=None, raise_on_error=True))


def _is_harmless(text: str) -> bool:
    depth = deepest = 0
    for character in text:
        depth += (character in "({[") - (character in ")}]")
        deepest = max(deepest, depth)
    return len(text) <= MAX_LENGTH and deepest <= MAX_NESTING and _HOSTILE.search(text) is None
