"""The verdict of a dynamic sampling filter, and the counts of what it dropped."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

from slime.data.sample import scalar
from slime.exceptions import RolloutDataError


@dataclasses.dataclass
class DynamicFilterOutput:
    """Keep the group or not, and why not. `keep_when_insufficient` keeps it where otherwise new
    groups were needed.
    """

    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False


def call_dynamic_filter(
    fn: Callable[..., Any] | None, *args: object, **kwargs: object
) -> DynamicFilterOutput:
    """The verdict of a filter; keep without one. A bare truth value is wrapped. RolloutDataError
    for anything else, None among it: a filter whose `return` is missing would drop every group.
    """
    if fn is None:
        return DynamicFilterOutput(keep=True)
    output = fn(*args, **kwargs)
    verdict = (
        output if isinstance(output, DynamicFilterOutput) else DynamicFilterOutput(keep=output)
    )
    keep = _truth(verdict.keep)
    if keep is None:
        wrong = (
            f"DynamicFilterOutput(keep={verdict.keep!r})"
            if verdict is output
            else f"{output!r} ({type(output).__name__})"
        )
        raise RolloutDataError(
            f"it returned {wrong[:120]}, where True (keep the group), False or a "
            "DynamicFilterOutput is needed."
        )
    return dataclasses.replace(verdict, keep=keep)


def _truth(value: object) -> bool | None:
    """A truth value as bool: also numpy's, a tensor's, and the numbers 0 and 1; None for anything
    else.
    """
    value = scalar(value)
    return bool(value) if isinstance(value, bool | int | float) and value in (0, 1) else None


def should_drop_dynamic_filter_output(
    output: DynamicFilterOutput, *, remaining_batch_size: int, target_data_size: int
) -> bool:
    """Whether the group goes: it is not kept, and it does not stand in because too few groups
    remain.
    """
    if output.keep:
        return False
    return not (output.keep_when_insufficient and remaining_batch_size <= target_data_size)


class MetricGatherer:
    """Counts dropped groups by reason."""

    def __init__(self) -> None:
        self._dropped: collections.Counter[str] = collections.Counter()

    def on_dynamic_filter_drop(self, reason: str | None) -> None:
        """Counts one dropped group; a drop without a reason is not counted."""
        if reason:
            self._dropped[reason] += 1

    def collect(self) -> dict[str, int]:
        """{"rollout/dynamic_filter/drop_<reason>": groups}."""
        return {
            f"rollout/dynamic_filter/drop_{reason}": count
            for reason, count in self._dropped.items()
        }
