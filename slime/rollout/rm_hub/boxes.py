"""Finds boxed answers: \\boxed{...}, \\fbox{...} and \\boxed x, with the braces inside them
counted.
"""

from __future__ import annotations

import re

_BOX = re.compile(r"\\(?:boxed|fbox|framebox)(?![A-Za-z])\s*")
# \{ and \} are characters of a set, no braces of LaTeX.
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


def last_box(text: str) -> str | None:
    """What the last closed box holds, without an inner box's own mark. None without one.

    A last box that is never closed is no answer, also where an earlier one is: the response was
    cut, or goes on.
    """
    starts = [match.end() for match in _BOX.finditer(text)]
    if not starts:
        return None
    start = starts[-1]
    if not text.startswith("{", start):
        return _bare_argument(text, start)
    end = closing_brace(text, start)
    return None if end is None else text[start + 1 : end]


def closing_brace(text: str, start: int) -> int | None:
    """The position of the brace that closes the one at `start`, None where there is none."""
    depth = 0
    for match in _BRACE.finditer(text, start):
        depth += (match[0] == "{") - (match[0] == "}")
        if depth == 0:
            return match.start()
    return None


def _bare_argument(text: str, start: int) -> str | None:
    """The argument of "\\boxed 42$": up to the end of the formula, the line or the sentence."""
    found = re.match(r"[^\n$]+", text[start:])
    return found[0].strip().rstrip(".") or None if found else None
