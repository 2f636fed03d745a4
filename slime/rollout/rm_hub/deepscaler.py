"""DeepScaleR's rule: the boxed answer after the reasoning, equal to the label by text or by
mathematics.
"""

from __future__ import annotations

from slime.rollout.rm_hub.boxes import last_box
from slime.rollout.rm_hub.math_utils import is_right_answer

# Where the answer begins: behind the last of the first, else behind the first of the second.
ANSWER_MARKS = ("</think>", "###Response")


def get_deepscaler_rule_based_reward(response: str, label: object) -> int:
    """1 or 0. The answer stands after the last </think>, else after ###Response; without either
    there is none.
    """
    if ANSWER_MARKS[0] in response:
        solution = response.rsplit(ANSWER_MARKS[0], 1)[-1]
    elif ANSWER_MARKS[1] in response:
        solution = response.split(ANSWER_MARKS[1], 1)[1]
    else:
        return 0
    answer = last_box(solution)
    return int(answer is not None and is_right_answer(answer, label))
