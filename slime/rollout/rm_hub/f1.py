"""Word-overlap F1 of question answering (SQuAD's normalization, HotpotQA's rule for yes / no /
noanswer).
"""

from __future__ import annotations

import collections
import re
import string

from slime.rollout.rm_hub.labels import label_texts

CLOSED_ANSWERS = ("yes", "no", "noanswer")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
    """Lower case, without punctuation, without the words a / an / the, single spaces; in this
    order.
    """
    text = text.lower().translate(_PUNCTUATION)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def f1_score(prediction: str | None, ground_truth: object) -> tuple[float, float, float]:
    """(F1, precision, recall) over words, the best over the texts that a label accepts.

    (0, 0, 0) for None, without overlap, and for differing closed answers.
    """
    if prediction is None:
        return 0.0, 0.0, 0.0
    return max(
        (_f1_of(prediction, text) for text in label_texts(ground_truth)), default=(0.0, 0.0, 0.0)
    )


def _f1_of(prediction: str, text: str) -> tuple[float, float, float]:
    predicted, truth = normalize_answer(prediction), normalize_answer(text)
    if predicted != truth and (predicted in CLOSED_ANSWERS or truth in CLOSED_ANSWERS):
        return 0.0, 0.0, 0.0
    words, truth_words = predicted.split(), truth.split()
    num_same = sum((collections.Counter(words) & collections.Counter(truth_words)).values())
    if num_same == 0:
        return 0.0, 0.0, 0.0
    precision, recall = num_same / len(words), num_same / len(truth_words)
    return 2 * precision * recall / (precision + recall), precision, recall
