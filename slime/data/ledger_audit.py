"""Whether the books of a run add up: every prompt of an epoch once, every sample trained, dropped for
a reason, or still waiting, nothing twice. Pure; reads no file.

Three rollouts of two groups of two samples; the start of "b" goes on after rollout 0 of "a":

    a: rollout 0 serves groups 0, 1; samples 0 1 2 trained, 3 dropped
    a: rollout 1 serves groups 2, 3      superseded: not in the lineage of b
    b: rollout 1 serves groups 2, 3; samples 4 5 6 trained   -> sample 7 is lost
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence

from slime.data.reasons import DropReason
from slime.data.run_ledger import (
    RolloutEntry,
    Runs,
    SavedState,
    Start,
    StreamMark,
    TrainedEntry,
    count_in,
    numbers_in,
)

Lineage = Sequence[tuple[str, int, int]]


@dataclasses.dataclass
class Books:
    """All entries of a ledger file, by (start, rollout)."""

    starts: dict[str, Start] = dataclasses.field(default_factory=dict)
    rollouts: dict[tuple[str, int], RolloutEntry] = dataclasses.field(default_factory=dict)
    trained: dict[tuple[str, int], TrainedEntry] = dataclasses.field(default_factory=dict)
    # entries of which there are two that differ: (what, start, rollout)
    twice: list[tuple[str, str, int]] = dataclasses.field(default_factory=list)
    unreadable: list[str] = dataclasses.field(default_factory=list)

    def lineage(self, start: str) -> list[tuple[str, int, int]]:
        """The rollouts that a start goes on from, and its own."""
        begun = self.starts[start]
        own = [rollout for name, rollout in self.rollouts if name == start]
        return [*begun.lineage, *([(start, begun.first, max(own))] if own else [])]


@dataclasses.dataclass(frozen=True)
class Culprit:
    """One thing that does not add up. samples, prompts: first ones and how many."""

    kind: str
    message: str
    rollouts: tuple[int, ...] = ()
    samples: Runs = ()
    prompts: tuple[tuple[int, int], ...] = ()  # (epoch, prompt)
    reason: str | None = None


@dataclasses.dataclass
class Findings:
    """Samples of a lineage: handed_out = sampled + waiting, of which a rollout has used up the
    sampled ones; sampled = trained + the sum of dropped + unfinished.
    """

    rollouts: int = 0
    handed_out: int = 0
    trained: int = 0
    unfinished: int = 0  # planned, and the rollout's training is not on record
    waiting: int = 0
    dropped: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    unnamed_trained: int = 0
    # epoch -> prompts, used ones, waiting ones
    epochs: dict[int, tuple[int, int, int]] = dataclasses.field(default_factory=dict)
    culprits: list[Culprit] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)

    @property
    def sampled(self) -> int:
        return self.handed_out - self.waiting


Block = tuple[int, int, int, int]  # first group, group behind the last, epoch, prompt of the first


class Stream:
    """Which prompt each group of a stream is of, from its marks in order."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.mark: StreamMark | None = None
        self.opening = 0
        self.problems: list[str] = []

    def reach(self, mark: StreamMark, where: str) -> None:
        """The next mark. One that the stream cannot have reached is a problem."""
        before = self.mark
        self.mark = mark
        if before is None:
            self.opening = mark.groups
            return
        if mark.group_size != before.group_size:
            self.problems.append(
                f"{where}: groups of {mark.group_size} samples, and of {before.group_size} before"
            )
        count, total = mark.groups - before.groups, mark.num_prompts
        epoch, offset = before.epoch, before.offset
        if total is None:
            self.blocks.append((before.groups, mark.groups, 0, before.groups))
            epoch, offset = mark.epoch, mark.offset
        else:
            group = before.groups
            while group < mark.groups and total > 0:
                if offset >= total:
                    epoch, offset = epoch + 1, 0
                size = min(total - offset, mark.groups - group)
                self.blocks.append((group, group + size, epoch, offset))
                group, offset = group + size, offset + size
        if count < 0 or (epoch, offset) != (mark.epoch, mark.offset):
            self.problems.append(
                f"{where}: the stream stands at group {mark.groups}, epoch {mark.epoch}, prompt "
                f"{mark.offset}; from group {before.groups}, epoch {before.epoch}, prompt "
                f"{before.offset} it would come to epoch {epoch}, prompt {offset}"
            )

    def prompts_of(self, first: int, end: int) -> Iterator[Block]:
        """The blocks of the groups `first` to `end` - 1, cut to them."""
        place = max(0, bisect.bisect_right(self.blocks, (first, 1 << 62, 0, 0)) - 1)
        for low, high, epoch, offset in self.blocks[place:]:
            if low >= end:
                return
            cut = max(low, first)
            if cut < min(high, end):
                yield cut, min(high, end), epoch, offset + cut - low


Span = tuple[int, int, int, str]  # first, one behind the last, rollout, what became of them


def overlaps(spans: Iterable[Span]) -> Iterator[tuple[int, int, Span, Span]]:
    """(first, end, one span, another) of numbers that stand in two spans."""
    last: Span | None = None
    for span in sorted(spans):
        if last is not None and span[0] < last[1]:
            yield span[0], min(span[1], last[1]), last, span
        if last is None or span[1] > last[1]:
            last = span


def difference(
    some: Iterable[tuple[int, int]], others: Iterable[tuple[int, int]]
) -> list[tuple[int, int]]:
    """The numbers of `some` that are not in `others`, as (first, end); both are (first, end)."""
    found = []
    taken = _merged(others)
    place = 0
    for first, end in _merged(some):
        while place < len(taken) and taken[place][1] <= first:
            place += 1
        at = place
        while first < end and at < len(taken) and taken[at][0] < end:
            if first < taken[at][0]:
                found.append((first, taken[at][0]))
            first = max(first, taken[at][1])
            at += 1
        if first < end:
            found.append((first, end))
    return found


def _merged(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for first, end in sorted(spans):
        if found and first <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        elif first < end:
            found.append((first, end))
    return found


def _ends(runs: Runs, scale: int = 1) -> Iterator[tuple[int, int]]:
    for first, count in runs:
        yield first * scale, (first + count) * scale


class Audit:
    """One pass over a lineage. `closing`: what a checkpoint says of the stream at its end."""

    def __init__(self, books: Books, lineage: Lineage, closing: SavedState | None = None) -> None:
        self.books, self.lineage, self.closing = books, lineage, closing
        self.found = Findings()
        self.stream = Stream()
        self.outcomes: list[Span] = []
        self.served: list[Span] = []  # groups
        self.prompts: dict[int, list[Span]] = collections.defaultdict(list)
        # groups that a user's function gave back after use: they may be used again
        self.again = {
            group for entry in books.rollouts.values() for group in numbers_in(entry.again)
        }
        self.opening_waiting: Runs = ()
        self.has_stream = True

    def run(self) -> Findings:
        """All that does not add up, and the totals."""
        entries = list(self._entries())
        self._check_marks(entries)
        last_trained = max(
            (one.rollout for one in entries if (one.start, one.rollout) in self.books.trained),
            default=-1,
        )
        for entry in entries:
            self._take(entry, last_trained)
        if self.has_stream and self.stream.mark is not None:
            self._check_prompts()
            self._check_samples()
            self._check_waiting()
        return self.found

    def _blame(self, kind: str, message: str, **facts: object) -> None:
        self.found.culprits.append(Culprit(kind, message, **facts))  # type: ignore[arg-type]

    def _entries(self) -> Iterator[RolloutEntry]:
        """The entries of the lineage in order; rollouts without one, with two, or out of order are
        named.
        """
        expected: int | None = None
        twice = {(start, rollout): what for what, start, rollout in self.books.twice}
        for start, first, last in self.lineage:
            if expected is not None and first != expected:
                self._blame(
                    "rollout_twice" if first < expected else "rollout_missing",
                    f"the lineage goes from rollout {expected - 1} to rollout {first}",
                    rollouts=(first,),
                )
            for rollout in range(first, last + 1):
                if (start, rollout) in twice:
                    self._blame(
                        "rollout_twice",
                        f"rollout {rollout} has two different entries ({twice[start, rollout]}) of "
                        f"start {start}",
                        rollouts=(rollout,),
                    )
                entry = self.books.rollouts.get((start, rollout))
                if entry is None:
                    self._blame(
                        "rollout_missing",
                        f"rollout {rollout} has no entry of start {start}",
                        rollouts=(rollout,),
                    )
                else:
                    yield entry
            expected = last + 1

    def _check_marks(self, entries: Sequence[RolloutEntry]) -> None:
        """The stream goes on from mark to mark, over restarts too."""
        by_start = collections.defaultdict(list)
        for entry in entries:
            by_start[entry.start].append(entry)
        for number, (start, first, _) in enumerate(self.lineage):
            begun = self.books.starts.get(start)
            if begun is None:
                self._blame("start_missing", f"the entry of start {start} is missing or damaged")
                self.has_stream = False
                return
            if begun.mark is None:
                self.has_stream = False
                return
            self.stream.reach(begun.mark, f"start {start} before rollout {first}")
            if number == 0:
                self.opening_waiting = begun.waiting
            else:
                self._compare_waiting(begun.waiting, entries, before=first)
            for entry in by_start[start]:
                if entry.mark is None:
                    self.has_stream = False
                    return
                self.stream.reach(entry.mark, f"rollout {entry.rollout}")
        if self.closing is not None and self.closing.mark is not None:
            self.stream.reach(self.closing.mark, f"the state after rollout {self.closing.rollout}")
        for problem in self.stream.problems:
            self._blame("stream_broken", problem)

    def _compare_waiting(
        self, waiting: Runs, entries: Sequence[RolloutEntry], *, before: int
    ) -> None:
        """What a start, or a checkpoint, serves again is what was handed out and not used up."""
        used = [
            (group, group + count)
            for entry in entries
            if entry.rollout < before
            for _, _, group, count in entry.served
        ]
        mark = self.stream.mark
        assert mark is not None
        handed_out = [*_ends(self.opening_waiting), (self.stream.opening, mark.groups)]
        expected = difference(handed_out, used)
        is_told = all(entry.is_told for entry in entries if entry.rollout < before)
        for kind, spans, what in (
            (
                "group_lost",
                difference(expected, _ends(waiting)),
                "was handed out, was used up by no rollout, and is not served again",
            ),
            (
                "group_twice",
                difference(_ends(waiting), expected),
                "is served again, and was used up or never handed out",
            ),
        ):
            for first, end in spans:
                groups = [group for group in range(first, end) if group not in self.again]
                if not groups:
                    continue
                text = f"at rollout {before}, group {self._name_groups(groups)} {what}"
                if kind == "group_lost" and not is_told:
                    # a rollout function that does not say what it uses keeps it for itself
                    self.found.notes.append(text)
                else:
                    size = mark.group_size
                    self._blame(
                        kind,
                        text,
                        rollouts=(before,),
                        samples=((groups[0] * size, len(groups) * size),),
                        prompts=tuple(self._prompts(groups[0], groups[-1] + 1)),
                    )

    def _name_groups(self, groups: Sequence[int]) -> str:
        more = f" and {len(groups) - 1} more" if len(groups) > 1 else ""
        places = self._prompts(groups[0], groups[0] + 1)
        place = f" (prompt {places[0][1]} of epoch {places[0][0]})" if places else ""
        return f"{groups[0]}{place}{more}"

    def _prompts(self, first: int, end: int) -> list[tuple[int, int]]:
        """(epoch, prompt) of groups, at most eight of them."""
        found: list[tuple[int, int]] = []
        for low, high, epoch, offset in self.stream.prompts_of(first, end):
            found += [(epoch, offset + number) for number in range(min(high - low, 8))]
        return found[:8]

    def _take(self, entry: RolloutEntry, last_trained: int) -> None:
        """Adds one rollout to the totals and to what is checked over all of them."""
        self.found.rollouts += 1
        trained = self.books.trained.get((entry.start, entry.rollout))
        is_gone = _not_trained(entry, trained)
        for step, runs in entry.planned.items():
            whole = list(_ends(runs))
            gone = difference(whole, [(index, index + 1) for index in is_gone])
            what = f"trained in step {step}" if trained is not None else "planned"
            self.outcomes += [(first, end, entry.rollout, what) for first, end in gone]
        for index, reason in is_gone.items():
            self.outcomes.append((index, index + 1, entry.rollout, f"not trained: {reason}"))
        for reason, runs in entry.dropped.items():
            if not reason:
                self._blame(
                    "no_reason",
                    f"rollout {entry.rollout} dropped {count_in(runs)} samples without a reason, "
                    f"the first is sample {runs[0][0]}",
                    rollouts=(entry.rollout,),
                    samples=runs,
                )
            self.outcomes += [
                (first, end, entry.rollout, f"dropped: {reason}") for first, end in _ends(runs)
            ]
        planned_rows = _planned_rows(entry)
        if entry.counts and planned_rows != entry.counts.get("planned"):
            self._blame(
                "counts_differ",
                f"rollout {entry.rollout} names {planned_rows} planned rows and counts "
                f"{entry.counts.get('planned')}",
                rollouts=(entry.rollout,),
            )
        if trained is None:
            if planned_rows and entry.rollout < last_trained:
                self._blame(
                    "not_trained",
                    f"rollout {entry.rollout} was planned and not trained, and rollout "
                    f"{last_trained} after it was",
                    rollouts=(entry.rollout,),
                )
        else:
            gone_rows = trained.unnamed + sum(map(count_in, trained.not_trained.values()))
            self.found.unnamed_trained += max(0, entry.unnamed.get("", 0) - trained.unnamed)
            if trained.rows + gone_rows != planned_rows:
                self._blame(
                    "counts_differ",
                    f"rollout {entry.rollout} planned {planned_rows} rows; {trained.rows} trained "
                    f"and {gone_rows} did not",
                    rollouts=(entry.rollout,),
                )
        for epoch, offset, group, count in entry.served:
            self.served.append((group, group + count, entry.rollout, "used up"))
            self.prompts[epoch].append((offset, offset + count, entry.rollout, f"group {group}"))

    def _is_again(self, first: int, end: int) -> bool:
        assert self.stream.mark is not None
        size = self.stream.mark.group_size
        return bool(self.again) and all(
            group in self.again for group in range(first // size, (end - 1) // size + 1)
        )

    def _check_prompts(self) -> None:
        """Each group is used up once, and is of the prompt that the stream says."""
        for first, end, one, other in overlaps(self.served):
            groups = [group for group in range(first, end) if group not in self.again]
            if groups:
                self._blame(
                    "prompt_twice",
                    f"group {self._name_groups(groups)} was used up in rollout {one[2]} and in "
                    f"rollout {other[2]}",
                    rollouts=(one[2], other[2]),
                    prompts=tuple(self._prompts(groups[0], groups[-1] + 1)),
                )
        for epoch, spans in self.prompts.items():
            for first, end, one, other in overlaps(spans):
                if one[3] != other[3]:  # the same group is named above
                    self._blame(
                        "prompt_twice",
                        f"prompt {first} of epoch {epoch} was used up in rollout {one[2]} ({one[3]}) "
                        f"and in rollout {other[2]} ({other[3]})",
                        rollouts=(one[2], other[2]),
                        prompts=tuple(
                            (epoch, prompt) for prompt in range(first, min(end, first + 8))
                        ),
                    )
        for epoch, spans in self.prompts.items():
            for first, end, rollout, name in spans:
                group = int(name.removeprefix("group "))
                for low, _, known, offset in self.stream.prompts_of(group, group + end - first):
                    if (known, offset) != (epoch, first + low - group):
                        self._blame(
                            "stream_broken",
                            f"rollout {rollout} says that group {low} is prompt {first + low - group} "
                            f"of epoch {epoch}; it is prompt {offset} of epoch {known}",
                            rollouts=(rollout,),
                            prompts=((known, offset),),
                        )
                        break

    def _check_samples(self) -> None:
        """Each sample of a used group has one outcome."""
        assert self.stream.mark is not None
        size = self.stream.mark.group_size
        for first, end, one, other in overlaps(self.outcomes):
            if self._is_again(first, end):
                continue
            kind = (
                "trained_twice"
                if one[3].startswith("trained") and other[3].startswith("trained")
                else "accounted_twice"
            )
            self._blame(
                kind,
                f"{self._name_samples(first, end)} was {one[3]} in rollout {one[2]}, and {other[3]} "
                f"in rollout {other[2]}",
                rollouts=(one[2], other[2]),
                samples=((first, end - first),),
                prompts=tuple(self._prompts(first // size, (end - 1) // size + 1)),
                reason=other[3],
            )
        used = [(first * size, end * size) for first, end, _, _ in self.served]
        known = [(first, end) for first, end, _, _ in self.outcomes]
        for first, end in difference(used, known):
            rollouts = [
                r for low, high, r, _ in self.served if low * size < end and first < high * size
            ]
            self._blame(
                "sample_lost",
                f"{self._name_samples(first, end)} was used up in rollout {rollouts[0]}, and was "
                "neither trained nor dropped for a reason",
                rollouts=tuple(rollouts),
                samples=((first, end - first),),
                prompts=tuple(self._prompts(first // size, (end - 1) // size + 1)),
            )
        for first, end in difference(known, used):
            owners = [span for span in self.outcomes if span[0] < end and first < span[1]]
            if not self._is_again(first, end):
                self._blame(
                    "sample_unknown",
                    f"{self._name_samples(first, end)} was {owners[0][3]} in rollout {owners[0][2]}, "
                    "and no rollout of this lineage was given its group",
                    rollouts=tuple(span[2] for span in owners),
                    samples=((first, end - first),),
                    reason=owners[0][3],
                )
        for first, end, _, what in self.outcomes:
            kind, _, reason = what.partition(": ")
            if kind.startswith("trained"):
                self.found.trained += end - first
            elif kind == "planned":
                self.found.unfinished += end - first
            else:
                self.found.dropped[reason] += end - first

    def _name_samples(self, first: int, end: int) -> str:
        assert self.stream.mark is not None
        group = first // self.stream.mark.group_size
        more = f" and {end - first - 1} more" if end - first > 1 else ""
        return f"sample {first} of group {self._name_groups([group])}{more}"

    def _check_waiting(self) -> None:
        """What waits at the end, the table of epochs, and the sum over all samples."""
        mark = self.stream.mark
        assert mark is not None
        handed_out = [*_ends(self.opening_waiting), (self.stream.opening, mark.groups)]
        used = [(first, end) for first, end, _, _ in self.served]
        waiting = difference(handed_out, used)
        self.found.waiting = sum(end - first for first, end in waiting) * mark.group_size
        self.found.handed_out = (
            sum(end - first for first, end in _merged(handed_out)) * mark.group_size
        )
        if self.closing is not None:
            entries = [
                self.books.rollouts[start, rollout]
                for start, first, last in self.lineage
                for rollout in range(first, last + 1)
                if (start, rollout) in self.books.rollouts
            ]
            self._compare_waiting(self.closing.waiting, entries, before=self.closing.rollout + 1)
        if mark.num_prompts is None:
            return
        sizes: collections.Counter[int] = collections.Counter()
        left: collections.Counter[int] = collections.Counter()
        for low, high, epoch, _ in self.stream.blocks:
            sizes[epoch] += high - low
        for first, end in waiting:
            for low, high, epoch, _ in self.stream.prompts_of(first, end):
                left[epoch] += high - low
        self.found.epochs = {
            epoch: (size, size - left[epoch], left[epoch]) for epoch, size in sorted(sizes.items())
        }


def _planned_rows(entry: RolloutEntry) -> int:
    """Rows of train data that the entry plans: those of its samples, and those without one."""
    samples = sum(map(count_in, entry.planned.values()))
    return samples + sum(count - 1 for count in entry.rows.values()) + entry.unnamed.get("", 0)


def _not_trained(entry: RolloutEntry, trained: TrainedEntry | None) -> dict[int, str]:
    """Sample -> reason, of the planned samples none of whose rows trained."""
    if trained is None:
        return {}
    rows: collections.Counter[int] = collections.Counter()
    reasons: dict[int, str] = {}
    for reason, runs in trained.not_trained.items():
        for index in numbers_in(runs):
            rows[index] += 1
            reasons.setdefault(index, reason)
    return {
        index: reasons[index] for index, count in rows.items() if count >= entry.rows.get(index, 1)
    }


def examine(books: Books, lineage: Lineage, closing: SavedState | None = None) -> Findings:
    """What does not add up in a lineage, and its totals."""
    found = Audit(books, lineage, closing).run()
    total = found.trained + sum(found.dropped.values()) + found.unfinished
    if found.sampled and total != found.sampled and not found.culprits:
        found.notes.append(
            f"{found.sampled} sampled, and {total} accounted for: groups were served again"
        )
    return found


def describe_totals(found: Findings) -> Mapping[str, object]:
    """The totals of `Findings` as plain values."""
    return {
        "rollouts": found.rollouts,
        "handed_out": found.handed_out,
        "sampled": found.sampled,
        "trained": found.trained,
        "dropped": dict(sorted(found.dropped.items())),
        DropReason.UNFINISHED.value: found.unfinished,
        "waiting": found.waiting,
        "without_an_index": found.unnamed_trained,
        "epochs": {
            str(epoch): {"prompts": size, "used": used, "waiting": left}
            for epoch, (size, used, left) in found.epochs.items()
        },
    }
