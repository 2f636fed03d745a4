"""The loop of one training rollout: fetch groups, generate, filter, keep a batch, end the rest.

Which groups fill the batch is decided by `BatchBuilder`, a plain value: in order of submission (the first groups that the
filter keeps, however long they took) or in order of completion.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import logging
from collections.abc import Callable
from typing import Any

from slime.exceptions import RolloutDataError
from slime.rollout import generation
from slime.rollout.base_types import RolloutFnTrainOutput
from slime.rollout.data_source import group_id_of, iter_samples
from slime.rollout.failures import FailureCounter, mark_failed
from slime.rollout.filter_hub.base_types import (
    DynamicFilterOutput,
    MetricGatherer,
    call_dynamic_filter,
    should_drop_dynamic_filter_output,
)
from slime.utils.misc import load_function
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

# Seconds that aborted requests may take to come back before their tasks are cancelled.
ABORT_GRACE_S = 60.0
# How often a group is generated again because the engine ended one of its requests by itself.
MAX_ENGINE_ABORTS = 3


@dataclasses.dataclass
class BatchBuilder:
    """Collects finished groups by their number of submission (0, 1, 2, ...) until `target` of them are kept.

    in_order: the batch is the first `target` kept groups in order of submission, so an early finisher waits for its
    predecessors; otherwise it is the first `target` that finished.
    """

    target: int
    in_order: bool
    kept: dict[int, list] = dataclasses.field(default_factory=dict)
    dropped: dict[int, list] = dataclasses.field(default_factory=dict)

    def add(self, number: int, group: list, keep: bool) -> None:
        """Notes a finished group."""
        (self.kept if keep else self.dropped)[number] = group

    def batch(self) -> list[int] | None:
        """The numbers of the groups in the batch, None while it is not decided."""
        if not self.in_order:
            return list(self.kept)[: self.target] if len(self.kept) >= self.target else None
        chosen: list[int] = []
        number = 0
        while len(chosen) < self.target:
            if number in self.kept:
                chosen.append(number)
            elif number not in self.dropped:
                return None
            number += 1
        return chosen

    def used(self, chosen: list[int]) -> set[int]:
        """The numbers that the rollout used up: the batch, and what the filter dropped. In order, nothing behind the batch's last group is
        used: how many of those had finished by then is chance, and it must not decide which prompts come next."""
        last = max(chosen, default=-1) if self.in_order else float("inf")
        return {*chosen, *(number for number in self.dropped if number < last)}

    def finished(self, number: int, group: list) -> list:
        """The finished group of that number; `group`, as it was fetched, while it is not finished."""
        return self.kept.get(number, self.dropped.get(number, group))


@dataclasses.dataclass
class LoopOutcome:
    """`output` for the trainer; `returned` groups for the data source; every other group was used up."""

    output: RolloutFnTrainOutput
    returned: list[list]
    all_groups: list[list]

    @property
    def used_group_ids(self) -> list[int]:
        """Identities of the groups that this rollout trained or dropped."""
        back = {group_id_of(group) for group in self.returned}
        ids = [group_id_of(group) for group in self.all_groups]
        return [group_id for group_id in ids if group_id is not None and group_id not in back]


class GroupLoop:
    """One run of the loop. `fetch(n)` returns n new groups."""

    def __init__(self, args: Any, rollout_id: int, fetch: Callable[[int], list[list[Sample]]]) -> None:
        from slime.rollout import sglang_rollout

        self.args, self.rollout_id, self.fetch = args, rollout_id, fetch
        self.rollout = sglang_rollout
        self.state = sglang_rollout.GenerateState(args)
        self.filter = load_function(args.dynamic_sampling_filter_path) if args.dynamic_sampling_filter_path else None
        self.builder = BatchBuilder(args.rollout_batch_size, args.rollout_batch_order == "submission")
        self.failures = FailureCounter(
            total=args.rollout_batch_size * args.n_samples_per_prompt, max_ratio=args.max_failed_ratio
        )
        self.filter_counts = MetricGatherer()
        self.dropped: collections.Counter[str] = collections.Counter()
        self.dropped_groups: list[tuple[str, list]] = []  # used up and not in the batch
        self.drop_verdicts: dict[int, DynamicFilterOutput] = {}  # by number of submission
        self.drops_to_say = 2 * args.rollout_batch_size  # twice as many each time
        self.submitted: list[list[Sample]] = []  # by number of submission, as they were fetched
        self.number_of: dict[asyncio.Task, int] = {}
        self.engine_aborts: collections.Counter[int] = collections.Counter()  # by number of submission

    async def run(self) -> LoopOutcome:
        self.state.reset()
        try:
            while (chosen := self.builder.batch()) is None:
                self._top_up()
                done, self.state.pendings = await asyncio.wait(self.state.pendings, return_when=asyncio.FIRST_COMPLETED)
                for task in sorted(done, key=self.number_of.__getitem__):
                    self._settle(self.number_of[task], task.result())
                self._report()
            await self._end_rest()
        except BaseException:
            await self._cancel_all()
            raise
        finally:
            self.state.reset()
        return self._outcome(chosen)

    def _top_up(self) -> None:
        """Fetches more groups while those running or kept cannot fill the batch."""
        size = self.args.over_sampling_batch_size or self.args.rollout_batch_size
        while self.state.remaining_batch_size < self.args.rollout_batch_size:
            groups = self.fetch(size)
            if not groups:
                raise RolloutDataError(
                    f"rollout {self.rollout_id}: the data source has no more prompts; "
                    f"{len(self.builder.kept)} of {self.args.rollout_batch_size} groups are kept."
                )
            for task in self.state.submit_generate_tasks(groups):
                self.number_of[task] = len(self.number_of)
            self.submitted += groups

    def _settle(self, number: int, group: list) -> None:
        """Counts a finished group and decides whether it stays."""
        samples = list(iter_samples(group))
        aborted = [sample for sample in samples if sample.status is Sample.Status.ABORTED]
        if aborted and self.engine_aborts[number] < MAX_ENGINE_ABORTS:
            self._resubmit(number, group)
            return
        for sample in aborted:
            mark_failed(sample, "generation", f"the engine aborted it {MAX_ENGINE_ABORTS + 1} times")
        self.failures.add(samples)
        verdict = call_dynamic_filter(self.filter, self.args, group)
        drop = should_drop_dynamic_filter_output(
            verdict,
            remaining_batch_size=self.state.remaining_batch_size,
            target_data_size=self.args.rollout_batch_size,
        )
        self.builder.add(number, group, keep=not drop)
        if drop:
            self.state.remaining_batch_size -= 1
            self.drop_verdicts[number] = verdict
            self._say_drops()

    def _say_drops(self) -> None:
        """Says that the filter drops most of what is generated, which from outside looks like an engine that hangs."""
        if len(self.drop_verdicts) < self.drops_to_say:
            return
        self.drops_to_say *= 2
        reasons = collections.Counter(verdict.reason or "dropped" for verdict in self.drop_verdicts.values())
        logger.warning(
            "rollout %d: %s dropped %d groups (%s) and kept %d of the %d that the batch needs. Look at the rewards: does any group have "
            "two different ones?",
            self.rollout_id,
            self.args.dynamic_sampling_filter_path,
            len(self.drop_verdicts),
            ", ".join(f"{count} {reason}" for reason, count in reasons.most_common()),
            len(self.builder.kept),
            self.args.rollout_batch_size,
        )

    def _drop(self, reason: str, group: list) -> None:
        self.dropped[reason] += len(list(iter_samples(group)))
        self.dropped_groups.append((reason, group))

    def _resubmit(self, number: int, group: list) -> None:
        """An engine ended a request that we did not abort (a weight update, a restart): the group is generated again."""
        self.engine_aborts[number] += 1
        again = group if self.args.partial_rollout else pristine(self.submitted[number])
        (task,) = self.state.submit_generate_tasks([again])
        self.state.remaining_batch_size -= 1  # the group is counted already
        self.number_of[task] = number
        self.submitted[number] = again

    async def _end_rest(self) -> None:
        """Ends what is still running and takes back what it has."""
        if not self.state.pendings:
            return
        await self.rollout.abort(self.args, self.rollout_id)
        done, late = await asyncio.wait(self.state.pendings, timeout=ABORT_GRACE_S)
        for task in late:
            logger.warning("a group did not end within %s s of its abort and is cancelled", ABORT_GRACE_S)
            task.cancel()
        self.state.pendings = set()
        for task in done:
            error = task.exception()
            if error is not None:
                logger.warning("a group that was not needed any more failed: %s", error)

    async def _cancel_all(self) -> None:
        tasks = [task for task in self.state.pendings if not task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _report(self) -> None:
        done = len(self.builder.kept) * self.args.n_samples_per_prompt
        report_progress("generate", min(done, self.failures.total), self.failures.total)

    def _outcome(self, chosen: list[int]) -> LoopOutcome:
        args = self.args
        groups = [self.builder.kept[number] for number in chosen]
        groups.sort(key=first_index)
        used = self.builder.used(chosen)
        returned = []
        for number, group in enumerate(self.submitted):
            result = self.builder.finished(number, group)
            if number in used:
                if number in self.drop_verdicts:
                    why = self.drop_verdicts[number].reason
                    self.filter_counts.on_dynamic_filter_drop(why)
                    self._drop(f"dynamic_filter_{why or 'dropped'}", result)
                continue
            given_back = self._given_back(result)
            returned.append(given_back)
            self._count_returned(result)
        if args.rollout_sample_filter_path:
            self._filter_samples(groups)
        self.dropped_groups.sort(key=lambda pair: first_index(pair[1]))
        metrics = {**self.filter_counts.collect(), **self.failures.metrics()}
        output = RolloutFnTrainOutput(groups, metrics, dict(self.dropped), self.dropped_groups)
        all_groups = [self.builder.finished(n, g) for n, g in enumerate(self.submitted)]
        return LoopOutcome(output, sorted(returned, key=first_index), all_groups)

    def _filter_samples(self, groups: list[list]) -> None:
        """Calls the user's filter, which marks samples (`remove_sample`) in place. Those that it takes out of their lists are counted."""
        before = [list(iter_samples(group)) for group in groups]
        load_function(self.args.rollout_sample_filter_path)(self.args, groups)
        left = {id(sample) for sample in iter_samples(groups)}
        gone = [[sample for sample in samples if id(sample) not in left] for samples in before]
        # a filter that put other objects in their place cannot be followed, and took nothing out
        if sum(map(len, gone)) == sum(map(len, before)) - len(left):
            for samples in filter(None, gone):
                self._drop("sample_filter", samples)

    def _given_back(self, group: list) -> list:
        """What the data source gets of a group that was not needed: as it is under partial rollout, else as it was fetched."""
        if not self.args.partial_rollout:
            return pristine(group)
        for sample in iter_samples(group):
            if sample.response_length:
                sample.metadata.setdefault("start_rollout_id", self.rollout_id)
        return group

    def _count_returned(self, group: list) -> None:
        begun = sum(1 for sample in iter_samples(group) if sample.response_length)
        reason = "returned_partial" if self.args.partial_rollout else "returned_pristine"
        if begun:
            self.dropped[reason] += begun


def first_index(group: list) -> tuple[int, int]:
    """Sort key: the group's first sample index; groups without one stand last, in their order."""
    index = next((sample.index for sample in iter_samples(group)), None)
    return (0, index) if index is not None else (1, 0)


def pristine(group: list) -> list[Sample]:
    """The group as the data source made it: one sample per member, nothing generated."""
    members = [member if isinstance(member, Sample) else next(iter_samples(member)) for member in group]
    return [generation.reset_to_prompt(member) for member in members]


def report_progress(phase: str, done: int, total: int) -> None:
    """Tells the live view how far the rollout is."""
    from slime.observability.progress import report

    report(phase=phase, done=done, total=total)


async def run_group_loop(args: Any, rollout_id: int, fetch: Callable[[int], list[list[Sample]]]) -> LoopOutcome:
    """One training rollout. RolloutDataError when too many samples fail or the prompts end."""
    return await GroupLoop(args, rollout_id, fetch).run()
