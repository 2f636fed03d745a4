"""The loop of one training rollout: fetch groups, generate, filter, keep a batch, end the rest.

Whether a finished group stays is decided in group_selection.py. Which of those that stay fill the
batch is decided by `BatchBuilder`, a plain value: in order of submission (the first groups that the
filter keeps, however long they took) or in order of completion.

Three groups, submitted as 0, 1, 2; a batch of one; 2 finishes first, then 0, which the filter drops,
then 1:

    finished        in order of submission      in order of completion
    2               undecided                   batch [2], used {2}
    2, 0            undecided                   batch [2], used {0, 2}
    2, 0, 1         batch [1], used {0, 1}      batch [2], used {0, 2}
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import logging
from collections.abc import Callable

from slime.data.sample import Sample
from slime.exceptions import RolloutDataError
from slime.prompts.data_source import group_id_of
from slime.rollout.base_types import GenerationCalls, RolloutFnTrainOutput
from slime.rollout.filter_hub.base_types import DynamicFilterOutput
from slime.rollout.group_selection import GroupSelection, first_index, pristine
from slime.tracking.progress import report

logger = logging.getLogger(__name__)


@dataclasses.dataclass
class BatchBuilder:
    """Collects finished groups by their number of submission (0, 1, 2, ...) until `target` of them
    are kept.

    in_order: the batch is the first `target` kept groups in order of submission, so an early
    finisher waits for its predecessors; otherwise it is the first `target` that finished.
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
        """The numbers that the rollout used up: the batch, and what the filter dropped. In order,
        nothing behind the batch's last group is used: how many of those had finished by then is
        chance, and it must not decide which prompts come next.
        """
        last = max(chosen, default=-1) if self.in_order else float("inf")
        return {*chosen, *(number for number in self.dropped if number < last)}

    def finished(self, number: int, group: list) -> list:
        """The finished group of that number; `group`, as it was fetched, while it is
        not finished.
        """
        return self.kept.get(number, self.dropped.get(number, group))


@dataclasses.dataclass
class LoopOutcome:
    """`output` for the trainer; `returned` groups for the data source; `used_group_ids` of those
    that were trained or dropped.
    """

    output: RolloutFnTrainOutput
    returned: list[list]
    all_groups: list[list]
    used_group_ids: list[int]
    selection: GroupSelection


class GroupLoop:
    """One run of the loop. `fetch(n)` returns n new groups, `calls` generates and ends them."""

    def __init__(
        self,
        args: argparse.Namespace,
        rollout_id: int,
        fetch: Callable[[int], list[list[Sample]]],
        calls: GenerationCalls,
    ) -> None:
        self.args, self.rollout_id, self.fetch, self.calls = args, rollout_id, fetch, calls
        self.state = calls.GenerateState(args)
        self.selection = GroupSelection(args, rollout_id)
        self.builder = BatchBuilder(
            args.rollout_batch_size, in_order=args.rollout_batch_order != "completion"
        )
        self.drop_verdicts: dict[int, DynamicFilterOutput] = {}  # by number of submission
        self.submitted: list[list] = []  # by number of submission, as they were fetched
        # what came of groups that were not needed any more, by number of submission
        self.ended: dict[int, list] = {}
        self.number_of: dict[asyncio.Task, int] = {}

    async def run(self) -> LoopOutcome:
        self.state.reset()
        try:
            while (chosen := self.builder.batch()) is None:
                self._top_up()
                done, self.state.pendings = await asyncio.wait(
                    self.state.pendings, return_when=asyncio.FIRST_COMPLETED
                )
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
        config = self.selection.config
        while self.state.remaining_batch_size < config.target:
            groups = self.fetch(config.fetch_size)
            if not groups:
                raise RolloutDataError(
                    f"rollout {self.rollout_id}: the data source has no more prompts; "
                    f"{len(self.builder.kept)} of {config.target} groups are kept."
                )
            for task in self.state.submit_generate_tasks(groups):
                self.number_of[task] = len(self.number_of)
            self.submitted += groups

    def _settle(self, number: int, group: list) -> None:
        """Counts a finished group and decides whether it stays."""
        if self.selection.is_unfinished(number, group):
            self._resubmit(number, group)
            return
        verdict = self.selection.verdict_against(
            group, remaining=self.state.remaining_batch_size, num_kept=len(self.builder.kept)
        )
        self.builder.add(number, group, keep=verdict is None)
        if verdict is not None:
            self.state.remaining_batch_size -= 1
            self.drop_verdicts[number] = verdict

    def _resubmit(self, number: int, group: list) -> None:
        """An engine ended a request that we did not abort (a weight update, a restart): the group
        is generated again.
        """
        again = group if self.args.partial_rollout else pristine(self.submitted[number])
        (task,) = self.state.submit_generate_tasks([again])
        self.state.remaining_batch_size -= 1  # the group is counted already
        self.number_of[task] = number
        self.submitted[number] = again

    async def _end_rest(self) -> None:
        """Ends what is still running and takes back what it has."""
        if not self.state.pendings:
            return
        await self.calls.abort(self.args, self.rollout_id)
        done, late = await asyncio.wait(self.state.pendings, timeout=self.args.abort_timeout)
        if late:
            logger.warning(
                (
                    "%d groups did not end within --abort-timeout %g s of their abort; they are "
                    "cancelled and given back"
                ),
                len(late),
                self.args.abort_timeout,
            )
        for task in late:
            task.cancel()
        self.state.pendings = set()
        for task in done:
            error = task.exception()
            if error is not None:
                logger.warning("a surplus group failed after the batch was complete: %s", error)
            else:
                self.ended[self.number_of[task]] = task.result()

    def _result(self, number: int) -> list:
        """What came of a group: as it finished, as the abort left it, or as it was fetched."""
        return self.builder.finished(number, self.ended.get(number, self.submitted[number]))

    async def _cancel_all(self) -> None:
        """Every task has ended and its error is heard: asyncio prints a stack for each that is not."""
        for task in self.number_of:
            task.cancel()
        await asyncio.gather(*self.number_of, return_exceptions=True)

    def _report(self) -> None:
        done, total = (
            len(self.builder.kept) * self.args.n_samples_per_prompt,
            self.selection.failures.total,
        )
        report_progress("generate", min(done, total), total)

    def _outcome(self, chosen: list[int]) -> LoopOutcome:
        used = self.builder.used(chosen)
        returned = []
        for number, group in enumerate(self.submitted):
            result = self._result(number)
            if number not in used:
                returned.append(self.selection.give_back(result, fetched=group))
            elif number in self.drop_verdicts:
                self.selection.drop_filtered(self.drop_verdicts[number], result)
        output = self.selection.output([self.builder.kept[number] for number in chosen])
        return LoopOutcome(
            output,
            returned=sorted(returned, key=first_index),
            all_groups=[self._result(number) for number in range(len(self.submitted))],
            used_group_ids=[
                found
                for number in sorted(used)
                if (found := group_id_of(self.submitted[number])) is not None
            ],
            selection=self.selection,
        )


def report_progress(phase: str, done: int, total: int) -> None:
    """Reports the rollout's progress to the live view."""
    report(phase=phase, done=done, total=total)


async def run_group_loop(
    args: argparse.Namespace,
    rollout_id: int,
    fetch: Callable[[int], list[list[Sample]]],
    calls: GenerationCalls,
) -> LoopOutcome:
    """One training rollout. RolloutDataError when too many samples fail or the prompts end."""
    return await GroupLoop(args, rollout_id, fetch, calls).run()
