"""The forms in which data sets write a label, and what each of them accepts as an answer.

    72  "72"  72.0  "$72$"  "\\boxed{72}"  "Tom has 8 * 9 = 72.\\n#### 72"  ["72", "seventy-two"]

A list holds alternatives: any one of them is right.
"""

from __future__ import annotations

import json

from slime.rollout.rm_hub.boxes import last_box

GSM8K_MARK = "####"


def label_texts(label: object) -> list[str]:
    """The label's own text first, then the answer inside it. [] for None, "" and an empty list."""
    if label is None:
        return []
    if isinstance(label, list | tuple):
        return list(dict.fromkeys(text for one in label for text in label_texts(one)))
    if isinstance(label, bool):
        return [str(label), str(label).lower()]
    if isinstance(label, float) and label.is_integer() and abs(label) < 2**53:
        return [str(label), str(int(label))]
    if isinstance(label, dict):
        return [json.dumps(label, ensure_ascii=False)]
    text = str(label).strip()
    return [one for one in dict.fromkeys((text, answer_in_label(text))) if one]


def label_answers(label: object) -> list[str]:
    """The answers that a label accepts, without the solution around them: what graders of
    mathematics compare with.
    """
    if isinstance(label, list | tuple):
        return list(dict.fromkeys(text for one in label for text in label_answers(one)))
    return label_texts(label)[-1:]


def answer_in_label(text: str) -> str:
    """What a label's text gives as the answer: behind the last ####, in its last box, between
    dollar signs, else all of it.
    """
    if GSM8K_MARK in text:
        text = text.rsplit(GSM8K_MARK, 1)[1].strip()
    box = last_box(text)
    if box is not None:
        return box.strip()
    for mark in ("$$", "$"):
        inner = text[len(mark) : -len(mark)]
        if (
            len(text) > 2 * len(mark)
            and text.startswith(mark)
            and text.endswith(mark)
            and "$" not in inner
        ):
            return inner.strip()
    return text
