"""DeepScaleR's rule: the boxed answer after the reasoning, equal to the label by text or by mathematics."""

from __future__ import annotations

from typing import Any

from slime.rollout.rm_hub.math_utils import extract_answer, grade_answer_mathd, grade_answer_sympy


def get_deepscaler_rule_based_reward(response: str, label: Any) -> int:
    """1 or 0. The answer stands after the last </think>, else after ###Response; without either there is none."""
    if "</think>" in response:
        solution = response.rsplit("</think>", 1)[-1]
    elif "###Response" in response:
        solution = response.split("###Response", 1)[1]
    else:
        return 0
    answer = extract_answer(solution)
    if answer is None or label in (None, ""):
        return 0
    truth = str(label)
    if "\\boxed" in truth:
        truth = extract_answer(truth)
        if truth is None:
            return 0
    return int(grade_answer_mathd(answer, truth) or grade_answer_sympy(answer, truth))
