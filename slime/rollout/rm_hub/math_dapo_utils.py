"""DAPO's rule: the last "Answer: ..." of a response, or its last box, against the label, in
Minerva's normal form.

The normal form follows the public lm-evaluation-harness (Minerva MATH), as verl's DAPO recipe uses
it.
"""

from __future__ import annotations

import re
from typing import Any, cast

from slime.rollout.rm_hub.answers import without_bold
from slime.rollout.rm_hub.boxes import last_box
from slime.rollout.rm_hub.end_tokens import without_end_tokens
from slime.rollout.rm_hub.equality import is_same_answer
from slime.rollout.rm_hub.labels import label_answers

LAST_CHARS = 300
LAST_CHARS_BOXED = 100
ANSWER_PATTERN = r"(?i)Answer\s*:\s*([^\n]+)"
_SUBSTITUTIONS = (
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    ("\\$", ""),
    (r"\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (",\\text{and}", ","),
    ("\\text{and}", ","),
    ("\\text{m}", "\\text{}"),
)
_REMOVED = (
    "square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "\\ldots", "sue", "points",
    "feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students",
    "childrentickets", "multiples", "\\text{s}", "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3", "\\text{\n}",
    "\\text{}", r"\mathrm{th}", r"^\circ", r"^{\circ}", r"\;", r",\!", "{,}", '"', "\\dots",
)  # fmt: skip


def last_boxed_only_string(string: str) -> str | None:
    """The last \\boxed{...} with its braces, None where there is no closed one."""
    start = string.rfind("\\boxed{")
    depth = 0
    for position in range(start, len(string)) if start >= 0 else ():
        depth += (string[position] == "{") - (string[position] == "}")
        if string[position] == "}" and depth == 0:
            return string[start : position + 1]
    return None


def remove_boxed(string: str) -> str:
    """What stands inside \\boxed{...}. AssertionError "box error" for anything else."""
    prefix = "\\boxed{"
    assert string.startswith(prefix) and string.endswith("}"), f"box error: {string}"
    return string[len(prefix) : -1]


def normalize_final_answer(final_answer: str) -> str:
    """Minerva's normal form: right side of an equation, no units, no LaTeX dressing, integers
    without commas, no end tokens.
    """
    answer = without_end_tokens(final_answer).split("=")[-1]
    for old, new in _SUBSTITUTIONS:
        answer = answer.replace(old, new)
    for word in _REMOVED:
        answer = answer.replace(word, "")
    answer = re.sub(r"(.*?)(\$)(.*?)(\$)(.*)", r"$\3$", answer)
    answer = re.sub(r"(\\(?:text|textbf|overline)\{)(.*?)(\})", r"\2", answer)
    answer = re.sub(r"(\\boxed\{)(.*)(\})", r"\2", answer)
    answer = re.sub(r"(frac)([^{])(.)", r"frac{\2}{\3}", answer)
    answer = re.sub(r"(sqrt)([^{])", r"sqrt{\2}", answer).replace("$", "")
    plain = answer.replace(",", "")
    return (plain if plain.isdigit() else answer).strip()


def is_correct_minerva(
    solution_str: str,
    gt: Any,
    gt_need_extract: bool = False,
    answer_pattern: str = ANSWER_PATTERN,
) -> tuple[bool, str]:
    """(whether the last "Answer:" is the truth, that answer in normal form or "[INVALID]").

    The two are compared by value, integers exactly; by their normal forms where one of them cannot
    be read.
    """
    found = re.findall(answer_pattern, solution_str)
    answer = found[-1] if found else "[INVALID]"
    prediction = normalize_final_answer(answer)
    truths = (
        [remove_boxed(cast(str, last_boxed_only_string(gt)))]
        if gt_need_extract
        else label_answers(gt)
    )
    if not found:
        return False, prediction
    plain = without_bold(without_end_tokens(answer))
    given = last_box(plain) or plain
    for truth in truths:
        verdict = is_same_answer(given, truth, strict=True)
        if verdict or (verdict is None and prediction == normalize_final_answer(truth)):
            return True, prediction
    return False, prediction


def is_correct_strict_box(
    pred: str, gt: str, pause_tokens_index: list[int] | None = None
) -> tuple[int, str | None]:
    """(1 or -1, the boxed answer) of the last 100 characters; `pause_tokens_index` [4] moves their
    beginning.
    """
    if pause_tokens_index is not None:
        assert len(pause_tokens_index) == 4, (
            f"4 pause token positions are needed, got {len(pause_tokens_index)}"
        )
        pred = pred[max(0, pause_tokens_index[-1] - LAST_CHARS_BOXED) :]
    else:
        pred = pred[-LAST_CHARS_BOXED:]
    boxed = last_boxed_only_string(pred)
    answer = remove_boxed(boxed) if boxed is not None else None
    return (1 if answer == gt else -1), answer


def verify(
    solution_str: str,
    answer: object,
    strict_box_verify: bool = False,
    pause_tokens_index: list[int] | None = None,
) -> tuple[bool, str | None]:
    """(whether the solution is right, its answer), by the box alone or by "Answer:"."""
    if strict_box_verify:
        verdict, prediction = is_correct_strict_box(solution_str, str(answer), pause_tokens_index)
        return verdict == 1, prediction
    return is_correct_minerva(solution_str, answer)


def compute_score(
    solution_str: str,
    ground_truth: object,
    strict_box_verify: bool = False,
    pause_tokens_index: list[int] | None = None,
) -> dict[str, Any]:
    """{"score": 1.0 or -1.0, "acc": right or not, "pred": answer} of the last 300 characters."""
    correct, prediction = verify(
        solution_str[-LAST_CHARS:], ground_truth, strict_box_verify, pause_tokens_index
    )
    return {"score": 1.0 if correct else -1.0, "acc": correct, "pred": prediction}
