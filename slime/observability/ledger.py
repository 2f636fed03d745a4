"""Conservation: every sampled response is trained, or dropped for a reason that is counted."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from slime.exceptions import RolloutDataError


@dataclasses.dataclass(frozen=True)
class Ledger:
    """What became of one rollout's samples. `dropped` counts samples by reason."""

    sampled: int
    trained: int
    dropped: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def check(self) -> None:
        """`RolloutDataError` with all numbers unless sampled = trained + the sum of dropped, none of them negative."""
        counts = {"sampled": self.sampled, "trained": self.trained, **self.dropped}
        negative = {name: count for name, count in counts.items() if count < 0}
        gone = sum(self.dropped.values())
        if negative or self.sampled != self.trained + gone:
            raise RolloutDataError(
                f"Samples are not conserved: {self.sampled} sampled, but {self.trained} trained + {gone} dropped = {self.trained + gone}. "
                f"Dropped by reason: {dict(self.dropped)}. A stage loses samples, or counts some twice."
            )

    def plus(self, other: Ledger) -> Ledger:
        """Both ledgers as one."""
        reasons = {**self.dropped}
        for reason, count in other.dropped.items():
            reasons[reason] = reasons.get(reason, 0) + count
        return Ledger(self.sampled + other.sampled, self.trained + other.trained, reasons)

    def metrics(self) -> dict[str, float]:
        """`rollout/ledger/...` numbers of samples."""
        return {
            "rollout/ledger/sampled": self.sampled,
            "rollout/ledger/trained": self.trained,
            "rollout/ledger/dropped": sum(self.dropped.values()),
            **{f"rollout/ledger/dropped/{reason}": count for reason, count in sorted(self.dropped.items())},
        }
