"""What a comparison found: differences by field, by rollout, and of the whole."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from slime.data.fields import CONTRACT, Rows
from slime.harness.diff.stages import DiffStage, order_of_field, short
from slime.harness.diff.values import Extent

_RESPONSE_FIELDS = ("rollout_log_probs", "loss_mask", "teacher_log_probs")


@dataclasses.dataclass(frozen=True)
class Difference:
    """One entry that differs. `row_a`, `row_b`: the sample's row in A and in B, None where the
    entry is of no sample or one side lacks it; `path`: where in the field, () for a single value.
    """

    stage: DiffStage
    part: str
    field: str
    path: tuple[Any, ...]
    a: Any
    b: Any
    row_a: int | None = None
    row_b: int | None = None
    step: int | None = None  # of a metric
    token_of_reply: int | None = None  # the response token before which a request was sent

    @property
    def order(self) -> tuple[Any, ...]:
        """Sorts differences of one rollout: stage, step, sample, token, field."""
        rows = [row for row in (self.row_a, self.row_b) if row is not None]
        token = self.token
        return (
            int(self.stage),
            math.inf if self.step is None else self.step,
            min(rows, default=math.inf),
            math.inf if token is None else token,
            order_of_field(self.field),
        )

    @property
    def token(self) -> int | None:
        """The token that the entry is of, counted from the start of its field."""
        if self.part != "replies":
            return next((one for one in self.path[:1] if isinstance(one, int)), None)
        return token_of_path(self.path) if self.token_of_reply is None else self.token_of_reply

    @property
    def place(self) -> str:
        """The field and the place in it, in words."""
        return ", ".join([self.field, *(self._words_of(part) for part in self.path)])

    def _words_of(self, part: Any) -> str:
        if not isinstance(part, int):
            return str(part)
        if self.part == "replies" or part is not self.path[0]:
            return f"entry {part}"
        spec = CONTRACT.find(self.field)
        if self.field == "tokens" and self.part == "samples":
            return f"{'prompt' if self.stage is DiffStage.PROMPT else 'response'} token {part}"
        if self.field in _RESPONSE_FIELDS or (spec is not None and spec.rows is Rows.RESPONSE):
            return f"response token {part}"
        return f"token {part}" if spec is not None and spec.rows is Rows.TOTAL else f"entry {part}"

    @property
    def values(self) -> str:
        """Both entries, on one line."""
        return f"{short(self.a)} in A, {short(self.b)} in B"


def token_of_path(path: tuple[Any, ...]) -> int | None:
    """The response token that an entry of an engine's reply is of; None for what is of no token."""
    if "output_token_logprobs" not in path:
        return None
    following = path[path.index("output_token_logprobs") + 1 :]
    return next((one for one in following if isinstance(one, int)), None)


@dataclasses.dataclass
class FieldResult:
    """One compared field of one rollout. `rows`: of A, the samples that differ, None where the
    field is of no sample; `new`: entries or samples of which nothing differed before; `expected`:
    why the difference is none that counts.
    """

    stage: DiffStage
    part: str
    field: str
    entries: int = 0
    rows: np.ndarray | None = None
    extent: Extent = dataclasses.field(default_factory=Extent)
    first: Difference | None = None
    new: int = 0
    expected: str = ""

    @property
    def counts(self) -> bool:
        """Whether it differs and nothing said that it may."""
        return bool(self.entries) and not self.expected

    @property
    def num_samples(self) -> int:
        return 0 if self.rows is None else len(self.rows)


@dataclasses.dataclass
class RolloutResult:
    """Two rollouts, evaluations or files, compared. `order`: what was made first comes first."""

    name: str
    order: tuple[int, int] = (0, 0)
    num_samples: int = 0
    fields: list[FieldResult] = dataclasses.field(default_factory=list)
    only_a: list[str] = dataclasses.field(default_factory=list)
    only_b: list[str] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    context: list[str] = dataclasses.field(default_factory=list)  # of the first difference
    # `Sample.index` of every row of A and of B; None where it is not recorded
    indices: tuple[np.ndarray | None, np.ndarray | None] = (None, None)

    @property
    def differing(self) -> list[FieldResult]:
        return [one for one in self.fields if one.counts]

    @property
    def identical(self) -> bool:
        return not (self.differing or self.only_a or self.only_b)

    @property
    def num_differences(self) -> int:
        missing = len(self.only_a) + len(self.only_b)
        return sum(one.entries for one in self.differing) + missing

    @property
    def first(self) -> Difference | None:
        """The difference that was made first."""
        found = [one.first for one in self.differing if one.first is not None]
        return min(found, key=lambda one: one.order, default=None)


@dataclasses.dataclass(frozen=True)
class RunDifference:
    """An option, a version or the code that differs between two runs. `since`: the first rollout of
    the starts of the runs between which it does; `where`: which starts, "" for the first ones.
    """

    stage: DiffStage
    name: str
    a: Any
    b: Any
    allowed: str = ""  # why it does not count
    since: int = 0
    where: str = ""

    def __str__(self) -> str:
        why = f" ({self.allowed})" if self.allowed else ""
        return f"{self.name}: {short(self.a)} in A, {short(self.b)} in B{self.where}{why}"


@dataclasses.dataclass
class Report:
    """Everything that a comparison found."""

    a: str
    b: str
    runs: list[RunDifference] = dataclasses.field(default_factory=list)
    rollouts: list[RolloutResult] = dataclasses.field(default_factory=list)
    # of `rollouts` those that differ, while `compare_paths` adds them
    differing: list[RolloutResult] = dataclasses.field(default_factory=list)
    only_a: list[str] = dataclasses.field(default_factory=list)
    only_b: list[str] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    tolerance: str = ""  # in words, "" for exact

    @property
    def options(self) -> list[RunDifference]:
        """Options, versions and code that differ and count."""
        return [one for one in self.runs if not one.allowed]

    @property
    def identical(self) -> bool:
        return not (self.options or self.only_a or self.only_b) and all(
            one.identical for one in self.rollouts
        )

    @property
    def first(self) -> tuple[RolloutResult, Difference] | None:
        """The rollout and the difference of the data that was made first."""
        found = [(one, one.first) for one in self.rollouts if one.first is not None]
        return min(found, key=lambda pair: (pair[0].order, pair[1].order), default=None)

    @property
    def first_stage(self) -> DiffStage | None:
        """The stage of the first cause: options and code come before the data that were made with
        them.
        """
        first = self.first
        early = [one for one in self.options if first is None or one.since <= first[0].order[0]]
        if early:
            return min(one.stage for one in early)
        return first[1].stage if first is not None else None


def mark_new(results: Iterable[FieldResult], groups: np.ndarray | None, *, earlier: bool) -> None:
    """Counts in every result what nothing before explains. `groups` [N]: of A's samples, -1
    without one; `earlier`: whether a rollout before this one differs.
    """
    seen: set[int] = set()
    any_seen = earlier
    by_stage: dict[DiffStage, list[FieldResult]] = {}
    for one in results:
        if one.counts:
            by_stage.setdefault(one.stage, []).append(one)
    for stage in sorted(by_stage):
        if stage >= DiffStage.BASELINE:
            seen = _with_siblings(seen, groups)
        for one in by_stage[stage]:
            if one.rows is None or earlier:
                one.new = 0 if any_seen else one.entries
            else:
                one.new = sum(row not in seen for row in one.rows.tolist())
        for one in by_stage[stage]:
            seen.update(() if one.rows is None else one.rows.tolist())
        any_seen = True


def _with_siblings(seen: set[int], groups: np.ndarray | None) -> set[int]:
    if groups is None or not seen:
        return seen
    chosen = np.unique(groups[[row for row in seen if 0 <= row < len(groups)]])
    members = np.flatnonzero(np.isin(groups, chosen[chosen >= 0]))
    return seen | set(members.tolist())
