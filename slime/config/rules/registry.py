"""Where a rule between options registers itself, and the arithmetic that messages share."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable

Rule = Callable[[argparse.Namespace], "str | list[str] | None"]
RULES: list[tuple[frozenset[str], Rule]] = []


def rule(*reads: str) -> Callable[[Rule], Rule]:
    """Registers a rule that reads these options."""

    def register(function: Rule) -> Rule:
        RULES.append((frozenset(reads), function))
        return function

    return register


def nearest_divisors(number: int, target: int) -> list[int]:
    """Returns the divisors of `number` next to `target`: the largest below or equal, the smallest
    above; empty for number < 1.
    """
    if number < 1:
        return []
    # beyond 10**12 some divisors are missed, and the answer does not take minutes
    small = [low for low in range(1, min(math.isqrt(number), 10**6) + 1) if number % low == 0]
    divisors = sorted({*small, *(number // low for low in small)})
    below = [divisor for divisor in divisors if divisor <= target]
    above = [divisor for divisor in divisors if divisor > target]
    return [*below[-1:], *above[:1]]


def either(values: Iterable[int]) -> str:
    return " or ".join(str(value) for value in values)
