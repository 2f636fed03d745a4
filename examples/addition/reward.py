"""The example's reward: 1 for the exact sum, else 0. Change it and run `make train` again."""

from __future__ import annotations

from typing import Any


async def exact_sum(args: Any, sample: Any, **kwargs: Any) -> float:
    """Returns 1.0 when the response, without its end token, is the label."""
    return float(sample.response.removesuffix("<|end|>").strip() == sample.label)
