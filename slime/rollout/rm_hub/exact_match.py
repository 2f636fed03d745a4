"""Reward 1 for a response that equals its label, after surrounding white space is removed on both
sides; else 0.
"""

from __future__ import annotations

from slime.rollout.rm_hub.labels import label_texts


def compute_exact_match(response: str, label: object) -> int:
    """1 or 0. The label's text counts, and the answer inside it ("... #### 72"); of a list any one;
    without a label nothing is right.
    """
    return int(response is not None and response.strip() in label_texts(label))
