"""The books of a whole run: for each sample that the data source handed out, what became of it.

A sample is named by `Sample.index`, its group by `Sample.group_index`, and sample i is of group
i // group size. Each rollout makes one entry; sets of numbers are runs of [first, count]. Two
prompts of an epoch of three, four samples each, of which one is truncated and the last two are
trained in the second step:

    mark      groups 2, epoch 0, offset 2       the stream after the rollout
    served    [[0, 0, 0, 2]]                    from prompt 0 of epoch 0 on: group 0 on, two of them
    planned   {0: [[0, 4]], 1: [[6, 2]]}        samples 0 to 3 in step 0, 6 and 7 in step 1
    dropped   {"truncated": [[4, 1]], "dynamic_filter_zero_std": [[5, 1]]}

The driver's entry says, once the rollout's training is over, which planned samples did not train.
A start of the run goes on from a lineage: which rollouts of which earlier starts its checkpoint has
behind it. What stands in no lineage is superseded.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from slime.data.reasons import DropReason

Runs = tuple[tuple[int, int], ...]  # (first, count) each, ascending


def runs_of(numbers: Iterable[int]) -> Runs:
    """The numbers as runs. One that occurs twice begins a run of its own."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][0] + found[-1][1]:
            found[-1][1] += 1
        else:
            found.append([number, 1])
    return tuple((first, count) for first, count in found)


def numbers_in(runs: Runs) -> Iterator[int]:
    """The numbers of runs, in their order."""
    for first, count in runs:
        yield from range(first, first + count)


def count_in(runs: Runs) -> int:
    """How many numbers runs hold."""
    return sum(count for _, count in runs)


@dataclasses.dataclass(frozen=True)
class StreamMark:
    """How far a stream of prompts has been handed out: groups since its beginning, and the epoch
    and the prompt of the next one. num_prompts: None without a dataset.
    """

    groups: int
    epoch: int
    offset: int
    num_prompts: int | None
    group_size: int


@dataclasses.dataclass(frozen=True)
class Start:
    """One start of the run. first: its first rollout. lineage: (start, first, last rollout) of what
    it goes on from. mark, waiting: the stream then, and the groups to be served again. mark is None
    where the data source has no stream, as in a replay.
    """

    start: str
    time: float
    run_dir: str
    first: int
    lineage: tuple[tuple[str, int, int], ...]
    mark: StreamMark | None
    waiting: Runs
    loaded: str | None = None
    note: str | None = None


@dataclasses.dataclass(frozen=True)
class RolloutEntry:
    """What became of the samples of one rollout before training.

    process: names the metric records of its writer. served: (epoch, prompt, group, count) of
    consecutive groups that it used up. again: groups that were given back after they had been used
    up. planned: samples by the step that trains them. rows: of samples with several rows of train
    data, how many train. unnamed: rows that belong to no sample of the stream, planned ones under
    "". counts: the rollout's metrics of its ledger.
    """

    start: str
    rollout: int
    time: float
    process: str
    mark: StreamMark | None
    served: tuple[tuple[int, int, int, int], ...]
    again: Runs
    is_told: bool
    planned: Mapping[int, Runs]
    dropped: Mapping[str, Runs]
    rows: Mapping[int, int]
    unnamed: Mapping[str, int]
    counts: Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class TrainedEntry:
    """A rollout whose training is over: its planned rows that did train, and by reason the samples
    of those that did not; `unnamed` counts such rows without one.
    """

    start: str
    rollout: int
    time: float
    process: str
    rows: int
    not_trained: Mapping[str, Runs]
    unnamed: int = 0


@dataclasses.dataclass(frozen=True)
class SavedState:
    """The books at a checkpoint: the lineage up to its rollout, and the stream as the data position
    has it.
    """

    rollout: int
    lineage: tuple[tuple[str, int, int], ...]
    mark: StreamMark | None
    waiting: Runs


@dataclasses.dataclass(frozen=True)
class Account:
    """The samples of one rollout by what became of them: the parts of a `RolloutEntry`."""

    planned: dict[int, Runs]
    dropped: dict[str, Runs]
    rows: dict[int, int]
    unnamed: dict[str, int]


def account_of(
    judged: Sequence[tuple[Any, str | None]],
    rows: Sequence[tuple[int, int, str | None]],
    dropped: Iterable[tuple[str, Any]],
    *,
    num_samples: int,
    used_samples: Iterable[int] = (),
) -> Account:
    """What became of one rollout's samples.

    judged: (`Sample.index`, the gate's reason) of each sample that the gate saw. rows: (position
    among them, step or -1, reason) of each row of train data. dropped: (reason, index) of samples
    that never came to the gate. num_samples: the stream's so far; other indices name no sample.
    used_samples: all that the rollout had; those without an outcome are left out by its function.
    A sample trains with its first row that does.
    """
    steps: dict[int, list[int]] = collections.defaultdict(list)
    reasons: dict[int, str] = {}
    unnamed: collections.Counter[str] = collections.Counter()

    def note(index: Any, step: int, reason: str | None) -> None:
        if type(index) is not int or not 0 <= index < num_samples:
            unnamed[reason or ""] += 1
        elif reason is None:
            steps[index].append(step)
        else:
            reasons.setdefault(index, reason)

    seen = set()
    for position, step, reason in rows:
        seen.add(position)
        note(judged[position][0], step, reason)
    for position, (index, reason) in enumerate(judged):
        if position not in seen:
            note(index, -1, reason or DropReason.LEFT_OUT.value)
    for why, index in dropped:
        note(index, -1, why)
    for index in used_samples:
        if index not in steps:
            reasons.setdefault(index, DropReason.LEFT_OUT_OF_ROLLOUT.value)
    planned, gone = collections.defaultdict(list), collections.defaultdict(list)
    for index, all_steps in steps.items():
        planned[min(all_steps)].append(index)
    for index, reason in reasons.items():
        if index not in steps:
            gone[reason].append(index)
    return Account(
        {step: runs_of(indices) for step, indices in sorted(planned.items())},
        {reason: runs_of(indices) for reason, indices in sorted(gone.items())},
        {index: len(found) for index, found in sorted(steps.items()) if len(found) > 1},
        dict(unnamed),
    )


def without_training(account: Account, reason: str) -> Account:
    """The same where no planned sample trains, for this reason."""
    indices = [index for runs in account.planned.values() for index in numbers_in(runs)]
    unnamed = dict(account.unnamed)
    if "" in unnamed:
        unnamed[reason] = unnamed.pop("")
    gone = {reason: runs_of(indices)} if indices else {}
    return Account({}, {**account.dropped, **gone}, {}, unnamed)


def served_runs(origins: Iterable[tuple[int, int, int]]) -> tuple[tuple[int, int, int, int], ...]:
    """(epoch, prompt, group, count) of consecutive groups, of (epoch, prompt, group) each, in order
    of the groups.
    """
    found: list[list[int]] = []
    for epoch, offset, group in origins:
        if found:
            last = found[-1]
            if (epoch, offset, group) == (last[0], last[1] + last[3], last[2] + last[3]):
                last[3] += 1
                continue
        found.append([epoch, offset, group, 1])
    return tuple((epoch, offset, group, count) for epoch, offset, group, count in found)
