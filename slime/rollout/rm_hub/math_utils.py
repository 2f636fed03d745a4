"""Is a mathematical answer the right one? By normalized text, then by value.

The normalization follows the public MATH benchmark (Hendrycks et al., MIT) and DeepScaleR's extension of it. Expressions
are read by `expressions.parse_expression`, which evaluates nothing that a model wrote.
"""

from __future__ import annotations

import re

BOX = "\\boxed"
FRAME = "\\fbox"
_UNITS = (
    "degree cm centimeter meter mile second minute hour day week month year foot feet inch yard liter gram kilogram "
    "dollar cent point unit unitssquare square cubic sq"
).split()
_UNIT_WORD = re.compile(rf"(?:{'|'.join(_UNITS)})(?:es|s)?\s*(?:\^\s*\{{?\d+\}}?)?")
_SCALES = {"trillion": "*10^12", "billion": "*10^9", "million": "*10^6"}


def last_boxed_only_string(string: str) -> str | None:
    """The last \\boxed{...} (or \\boxed x, or \\fbox{...}) of a text with its braces, None where there is no closed one."""
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
    """Whether the two are equal in value; element by element for tuples and intervals with the same brackets.

    Fractions must match literally (the answer is to be reduced), and where the truth is an integer the answer must be
    one. Needs sympy. May take long on hostile input: call it through the grader pool.
    """
    truth, given = _normalize(ground_truth), _normalize(given_answer)
    if truth is None or given is None or not given:
        return False
    if truth == given:
        return True
    truths, answers = split_tuple(truth), split_tuple(given)
    if len(truths) != len(answers):
        return False
    if len(truths) > 1 and (truth[0] != given[0] or truth[-1] != given[-1]):
        return False
    return all(_is_equal_element(t, g) for t, g in zip(truths, answers, strict=True))


def _is_equal_element(truth: str, given: str) -> bool:
    if _is_fraction(truth) and _is_fraction(given):
        return truth == given
    if is_integer_text(truth) != is_integer_text(given):
        return False
    if is_integer_text(truth):
        return _as_integer(truth) == _as_integer(given)
    from slime.rollout.rm_hub.expressions import are_equal_values

    return are_equal_values(truth, given)


def grade_answer_verl(solution: str, ground_truth: str | None) -> bool:
    """Whether the boxed answer of a solution is right, by text or by value. False without truth or without box."""
    if not ground_truth:
        return False
    ground_truth = str(ground_truth)
    if BOX in ground_truth:
        ground_truth = extract_answer(ground_truth)
    answer = extract_answer(solution)
    if answer is None or ground_truth is None:
        return False
    return grade_answer_mathd(answer, ground_truth) or grade_answer_sympy(answer, ground_truth)


def _normalize(expression: str | None) -> str | None:
    """An expression without units, dollar signs and text, in lower case and without spaces; None stays None."""
    if expression is None:
        return None
    enclosed = re.search(r"^\\text\{(?P<text>.+?)\}$", expression)
    if enclosed is not None:
        expression = enclosed["text"]
    for mark in ("\\%", "%", "\\$", "$", "\\!", "\\,", "\\;"):
        expression = expression.replace(mark, "")
    expression = expression.replace(" or ", " , ").replace(" and ", " , ").lower()
    for word, factor in _SCALES.items():
        expression = re.sub(rf"(?<=\d)\s*{word}s?\b", factor, expression)
    expression = re.sub(r"\\text\s*\{([^{}]*)\}", r" \1 ", expression)
    expression = re.sub(rf"(?<![a-z\\]){_UNIT_WORD.pattern}(?![a-z])", "", expression)
    expression = re.sub(r"\^\s*\{?\s*\\circ\s*\}?", "", expression)
    if len(expression) > 1 and expression.startswith("{") and expression.endswith("}"):
        expression = expression[1:-1]
    expression = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", expression) if _has_thousands(expression) else expression
    expression = re.sub(r"(\d)\s+(\d+)\s*/\s*(\d+)", r"(\1+\2/\3)", expression)
    expression = (
        re.sub(r"-\s+", "-", expression).replace(" ", "").strip("{}")
        if "{" not in expression
        else (expression.replace(" ", ""))
    )
    if is_integer_text(expression):
        return str(_as_integer(expression))
    return expression


def _has_thousands(expression: str) -> bool:
    """Whether commas are those of one long number, and not of a tuple."""
    return re.fullmatch(r"\s*-?\d{1,3}(,\d{3})+(\.\d+)?\s*", expression) is not None


def split_tuple(expression: str) -> list[str]:
    """The elements of "(a,b)" or "[a,b]", split at its outer commas; the expression itself in a list otherwise."""
    if len(expression) <= 2 or expression[0] not in "([" or expression[-1] not in ")]":
        return [expression]
    parts, depth, start = [], 0, 1
    for position, char in enumerate(expression[1:-1], start=1):
        depth += (char in "([{") - (char in ")]}")
        if depth < 0:
            return [expression]
        if char == "," and depth == 0:
            parts.append(expression[start:position])
            start = position + 1
    return [*parts, expression[start:-1]] if parts else [expression]


def _is_fraction(text: str) -> bool:
    return re.fullmatch(r"-?\d+\.?/0*[1-9]\d*\.?", text) is not None


def is_integer_text(text: str) -> bool:
    """Whether a text is an integer, also as 1,000 or 3.0."""
    return re.fullmatch(r"-?\d{1,3}(,\d{3})+(\.0*)?|-?\d+(\.0*)?", text.strip()) is not None and len(text) < 1000


def _as_integer(text: str) -> int:
    return int(text.strip().replace(",", "").split(".")[0])
