"""Reward 1 for a response that equals its label, after surrounding white space is removed on both sides; else 0."""

from __future__ import annotations

from typing import Any


def compute_exact_match(response: str, label: Any) -> int:
    """1 or 0. A label that is not text is compared by its text; without a label the answer cannot be right."""
    if label is None or response is None:
        return 0
    return int(response.strip() == str(label).strip())
