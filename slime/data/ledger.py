"""Conservation: every sampled response is trained, or dropped for a reason that is counted."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence

from slime.data.reasons import DropReason
from slime.exceptions import RolloutDataError

PREFIX = "rollout/ledger/"
NOT_TRAINED = PREFIX + "not_trained/"
COPIES = PREFIX + "copies"


@dataclasses.dataclass(frozen=True)
class Ledger:
    """What became of one rollout's samples. `dropped` counts samples by reason. `copies`: rows that
    a custom converter made of samples beyond one each; `trained` and `dropped` count rows, so that
    sampled + copies = trained + the sum of dropped.
    """

    sampled: int
    trained: int
    dropped: Mapping[str, int] = dataclasses.field(default_factory=dict)
    copies: int = 0

    def check(self) -> None:
        """`RolloutDataError` with all numbers unless sampled + copies = trained + the sum of
        dropped, none of them negative.
        """
        counts = {
            "sampled": self.sampled,
            "trained": self.trained,
            "copies": self.copies,
            **self.dropped,
        }
        negative = {name: count for name, count in counts.items() if count < 0}
        gone = sum(self.dropped.values())
        if negative or self.sampled + self.copies != self.trained + gone:
            copies = f" + {self.copies} copies of a converter" if self.copies else ""
            raise RolloutDataError(
                f"Samples are not conserved: {self.sampled} sampled{copies}, but {self.trained} "
                f"trained + {gone} dropped = {self.trained + gone}. "
                f"Dropped by reason: {dict(self.dropped)}. A stage loses samples, or counts some twice."
            )

    def plan_metrics(self) -> dict[str, float]:
        """`rollout/ledger/...` numbers of samples, before training: what will train is `planned`.
        See `finished_metrics`.
        """
        return {
            f"{PREFIX}sampled": self.sampled,
            f"{PREFIX}planned": self.trained,
            f"{PREFIX}dropped": sum(self.dropped.values()),
            **({COPIES: self.copies} if self.copies else {}),
            **{
                f"{PREFIX}dropped/{reason}": count for reason, count in sorted(self.dropped.items())
            },
        }


def finished_metrics(num_planned: int, not_trained: Mapping[str, int]) -> dict[str, float]:
    """`rollout/ledger/trained`, logged once a rollout's training is done: a run that ends before it
    has no such number for the rollout. Planned samples that no step trained after all are counted
    beside it, by reason: sampled = trained + not_trained + dropped.

    RolloutDataError where more did not train than were planned.
    """
    gone = sum(not_trained.values())
    if gone > num_planned or min(not_trained.values(), default=0) < 0:
        raise RolloutDataError(
            f"{gone} samples did not train ({dict(not_trained)}), and only {num_planned} were "
            "planned. A rank counts samples twice."
        )
    return {
        f"{PREFIX}trained": num_planned - gone,
        **{f"{NOT_TRAINED}{reason}": count for reason, count in sorted(not_trained.items())},
    }


def ledger_of_rollout(
    rejected: Sequence[str | None],
    sources: Sequence[int],
    *,
    trains: Sequence[bool],
    num_trained: int,
    dropped_by_split: Mapping[str, int],
    dropped_before: Mapping[str, int],
) -> Ledger:
    """The balanced ledger of one rollout. RolloutDataError where a rejected sample would train, or
    samples are lost.

    rejected: the gate's reason against each judged sample, None for those that passed. sources: per
    row of the train data, the position of its sample. trains: whether a training step owns the row.
    num_trained: rows with a trainable token. dropped_by_split, dropped_before: counts by reason of
    the other rows, and of samples that never came to the gate.
    """
    wrong = [
        source
        for source, owned in zip(sources, trains, strict=True)
        if owned and rejected[source] is not None
    ]
    if wrong:
        raise RolloutDataError(
            f"The gate and the ledger disagree: {len(wrong)} rows of samples that the gate "
            "rejected would train, first the sample at position "
            f"{wrong[0]} of the rollout, rejected as {rejected[wrong[0]]!r}."
        )
    dropped = collections.Counter(dropped_before)
    covered = set(sources)
    dropped.update(
        reason or DropReason.LEFT_OUT.value
        for position, reason in enumerate(rejected)
        if position not in covered
    )
    dropped.update(dropped_by_split)
    copies = len(sources) - len(covered)  # a custom converter may make several rows of one sample
    ledger = Ledger(
        sampled=len(rejected) + sum(dropped_before.values()),
        trained=num_trained,
        dropped=dict(dropped),
        copies=copies,
    )
    ledger.check()
    return ledger
