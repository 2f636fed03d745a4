"""Samples for tests of the gate: `sound_sample(7)` passes every check and says which one it is."""

from __future__ import annotations

from typing import Any

from slime.data.sample import Sample, Status


def sound_sample(
    number: int = 0, *, length: int = 12, prompt_length: int = 3, **changes: Any
) -> Sample:
    """Sample `number` of group number // 4: response ids 100 * number + 0, 1, ..., log-prob -(i +
    1) / 10, reward number.
    """
    group = number // 4
    fields: dict[str, Any] = {
        "index": number,
        "group_index": group,
        "prompt": f"prompt of group {group}",
        "tokens": [*range(1, prompt_length + 1), *(100 * number + i for i in range(length))],
        "response": f"response {number}",
        "response_length": length,
        "rollout_log_probs": [-(i + 1) / 10 for i in range(length)],
        "status": Status.COMPLETED,
        "finish_reason": "stop",
        "reward": float(number),
    }
    return Sample(**{**fields, **changes})


def reasons_of(result: Any) -> list[str | None]:
    """The reason of each input sample, None where there is none."""
    return [verdict.reason.value if verdict.reason else None for verdict in result.verdicts]
