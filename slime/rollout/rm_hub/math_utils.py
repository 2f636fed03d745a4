"""Is a mathematical answer the right one? By normalized text, then by value.

The text form is that of the public MATH benchmark (Hendrycks et al., MIT); values are compared by
`equality.is_same_answer`, which evaluates nothing that a model wrote.
"""

from __future__ import annotations

import re

from slime.rollout.rm_hub.answers import boxed_answer
from slime.rollout.rm_hub.equality import is_same_answer
from slime.rollout.rm_hub.labels import label_answers

BOX = "\\boxed"
FRAME = "\\fbox"


def last_boxed_only_string(string: str) -> str | None:
    """The last \\boxed{...} (or \\boxed x, or \\fbox{...}) of a text with its braces, None where
    there is no closed one.
    """
    start = string.rfind(BOX)
    if start >= 0 and string.startswith(BOX + " ", start):
        return BOX + " " + string[start + len(BOX) + 1 :].split("$")[0]
    if start < 0:
        start = string.rfind(FRAME)
    if start < 0:
        return None
    depth = 0
    for position in range(start, len(string)):
        if string[position] == "{":
            depth += 1
        elif string[position] == "}":
            depth -= 1
            if depth == 0:
                return string[start : position + 1]
    return None


def remove_boxed(string: str | None) -> str | None:
    """What stands inside \\boxed{...}, None for anything else."""
    prefix = BOX + "{"
    if not isinstance(string, str) or not string.startswith(prefix) or not string.endswith("}"):
        return None
    return string[len(prefix) : -1]


def extract_boxed_answer(solution: str) -> str | None:
    """The content of the last box, None without one."""
    return remove_boxed(last_boxed_only_string(solution))


def extract_answer(passage: str) -> str | None:
    """The content of the last box of a text that has \\boxed, else None."""
    return extract_boxed_answer(passage) if passage and BOX in passage else None


def mathd_normalize_answer(answer: str | None) -> str | None:
    """The answer in the MATH benchmark's normal form; None stays None."""
    if answer is None:
        return None
    answer = answer.strip()
    enclosed = re.search(r"^\\text\{(?P<text>.+?)\}$", answer)
    if enclosed is not None:
        answer = enclosed["text"].strip()
    return _strip_string(answer)


def grade_answer_mathd(given_answer: str | None, ground_truth: str | None) -> bool:
    """Whether both have the same normal form."""
    return mathd_normalize_answer(ground_truth) == mathd_normalize_answer(given_answer)


def _strip_string(string: str) -> str:
    string = string.replace("\n", "").replace("\\!", "").replace("\\\\", "\\")
    string = string.replace("tfrac", "frac").replace("dfrac", "frac")
    string = string.replace("\\left", "").replace("\\right", "")
    string = string.replace("^{\\circ}", "").replace("^\\circ", "").replace("\\$", "")
    if string.count("\\text{ ") == 1:
        string = string.split("\\text{ ")[0]  # units stand behind the value
    string = string.replace("\\%", "").replace("%", "")
    string = string.replace(" .", " 0.").replace("{.", "{0.")
    if not string:
        return string
    if string.startswith("."):
        string = "0" + string
    sides = string.split("=")
    if len(sides) == 2 and len(sides[0]) <= 2:
        string = sides[1]  # "k = 3"
    string = re.sub(r"\\sqrt\s*([^{\s\\])", r"\\sqrt{\1}", string)
    string = _brace_fractions(string.replace(" ", ""))
    if string == "0.5":
        return "\\frac{1}{2}"
    plain = re.fullmatch(r"(-?\d+)/(-?\d+)", string)
    return f"\\frac{{{int(plain[1])}}}{{{int(plain[2])}}}" if plain else string


def _brace_fractions(string: str) -> str:
    """\\frac12, \\frac1{72} and \\frac{1}2 with both arguments in braces."""
    string = re.sub(r"\\frac([^{\\])([^{\\])", r"\\frac{\1}{\2}", string)
    string = re.sub(r"\\frac([^{\\])\{", r"\\frac{\1}{", string)
    return re.sub(r"\\frac\{([^{}]*)\}([^{\\])", r"\\frac{\1}{\2}", string)


def grade_answer_sympy(given_answer: str | None, ground_truth: str | None) -> bool:
    """Whether the two are equal in value: a fraction reduced, an integer written as one, tuples
    with the same brackets.

    Needs sympy. May take long on hostile input: call it through the grader pool.
    """
    if given_answer is None or ground_truth is None:
        return False
    return is_same_answer(given_answer, ground_truth, strict=True) is True


def grade_answer_verl(solution: str, ground_truth: object) -> bool:
    """Whether the boxed answer of a solution is right, by text or by value. False without truth or
    without box.
    """
    answer = boxed_answer(solution)
    return answer is not None and is_right_answer(answer, ground_truth)


def is_right_answer(answer: str, label: object) -> bool:
    """Whether an answer is one that the label accepts, by the strict measure; by the benchmark's
    text form where it cannot be read.
    """
    for truth in label_answers(label):
        verdict = is_same_answer(answer, truth, strict=True)
        if verdict or (verdict is None and grade_answer_mathd(answer, truth)):
            return True
    return False
