"""The result of a grader that runs in another process: a value, or the reason why there is none.
Never a made-up 0.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from slime.exceptions import RolloutDataError

GRADER_TIMEOUT = "grader_timeout"
GRADER_ERROR = "grader_error"


@dataclasses.dataclass(frozen=True)
class GraderOutcome:
    """`value` of the grader; or `error`, GRADER_TIMEOUT or GRADER_ERROR, with `detail` for a
    reader.
    """

    value: Any = None
    error: str | None = None
    detail: str = ""


class GraderFailed(RolloutDataError):
    """A grader ended without a value. Its text begins with the kind: "grader_timeout: ..." or
    "grader_error: ...".
    """


def value_of(outcome: GraderOutcome) -> Any:
    """The outcome's value. GraderFailed where there is none."""
    if outcome.error is not None:
        raise GraderFailed(f"{outcome.error}: {outcome.detail}")
    return outcome.value
