"""The run's own side of its ledger: the rollout manager enters what it hands to training, the driver
what has trained; a start checks the books that it goes on from, and the end those of the run.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.data.ledger_audit import Books, Culprit, examine
from slime.data.reasons import DropReason
from slime.data.run_ledger import (
    RolloutEntry,
    Runs,
    SavedState,
    Start,
    StreamMark,
    TrainedEntry,
    account_of,
    runs_of,
    served_runs,
    without_training,
)
from slime.data.structure import flatten_samples
from slime.exceptions import ConfigError, RolloutDataError, SaveError
from slime.files.disk_space import disk_space
from slime.files.ledger_file import (
    FILE_NAME,
    STATE_NAME,
    LedgerWriter,
    handed_state_path,
    read_books,
    read_state,
    write_state,
)
from slime.prompts.data_source import RolloutDataSource
from slime.tracking.spans import spanned
from slime.tracking.tracking import process_name

if TYPE_CHECKING:
    from slime.data.attribution import Mark
    from slime.data.ledger import Ledger
    from slime.data.split import SplitPlan
    from slime.rollout.base_types import RolloutFnTrainOutput

logger = logging.getLogger(__name__)

Lineage = tuple[tuple[str, int, int], ...]
OWN_FUNCTIONS = "slime.rollout."
SHOWN = 5  # culprits in a message


def ledger_folder(args: argparse.Namespace) -> str:
    """Where a run keeps its ledger: beside its checkpoints, else in its run folder."""
    return args.save or args.run_dir


class RolloutLedger:
    """The rollout manager's side. `source` is the data source; one without a stream that can be
    marked (a plug-in's, or none) has its samples counted and not named.
    """

    def __init__(self, args: argparse.Namespace, source: Any) -> None:
        self.args, self.source = args, source
        self.writer: LedgerWriter | None = None
        self.start: Start | None = None
        self._is_refused = False

    def begin(self, first: int) -> str:
        """Enters a start whose first rollout is `first`, and returns its name. ConfigError where the
        books of the checkpoint do not fit the data position that was loaded.
        """
        mark, waiting = self._mark(), self._waiting(first)
        lineage: Lineage = ()
        books, note = None, None
        if first > 0 and self.args.load and mark is not None:
            lineage, books, note = _history(self.args.load, first - 1, mark, waiting)
        loaded = self.args.load if lineage else None
        self.writer = LedgerWriter(ledger_folder(self.args))
        self.start = self._new_start(first, lineage, loaded, note)
        earlier: list = []
        own = Path(self.writer.path)
        if books is not None and os.path.realpath(Path(self.args.load) / FILE_NAME) != (
            os.path.realpath(own)
        ):
            earlier = _entries_of(books, lineage)
        self._append([*earlier, self.start])
        return self.start.start

    def go_on(self, start: str, first: int) -> str:
        """Enters a start that takes the place of `start`, whose process has ended, from rollout
        `first` on; returns its name. What the other entered of later rollouts is superseded.
        """
        self.writer = LedgerWriter(ledger_folder(self.args))
        before = read_books(self.writer.path).starts[start]
        own = ((start, before.first, first - 1),) if first > before.first else ()
        self.start = self._new_start(first, (*before.lineage, *own), before.loaded, None)
        self._append([self.start])
        return self.start.start

    def _new_start(
        self, first: int, lineage: Lineage, loaded: str | None, note: str | None
    ) -> Start:
        return Start(
            start=f"{int(time.time())}-{uuid.uuid4().hex[:8]}",
            time=time.time(),
            run_dir=self.args.run_dir,
            first=first,
            lineage=lineage,
            mark=self._mark(),
            waiting=self._waiting(first),
            loaded=loaded,
            note=note,
        )

    def _waiting(self, first: int) -> Runs:
        """The groups that are served again by rollout `first` and those after it."""
        return () if self._mark() is None else runs_of(self.source.waiting_groups(first - 1))

    def enter(
        self,
        rollout_id: int,
        marks: Sequence[Mark],
        dropped: Sequence[tuple[str, Any]],
        rows: Sequence[tuple[int, int, str | None]],
        *,
        counts: Ledger,
    ) -> None:
        """Enters one rollout. marks: the gate's, of every sample of the batch. dropped:
        `dropped_indices`, rows: `row_outcomes`, counts: the rollout's own ledger.
        """
        judged = [(one.index, one.reason) for one in marks]
        self._enter(
            rollout_id,
            judged,
            dropped,
            rows,
            no_training=DropReason.CRITIC_ONLY
            if DropReason.CRITIC_ONLY.value in counts.dropped
            else None,
            counts={
                "sampled": counts.sampled,
                "planned": counts.trained,
                "dropped": sum(counts.dropped.values()),
                "copies": counts.copies,
            },
        )

    def enter_untrained(
        self, rollout_id: int, samples: Sequence[Any], dropped: Sequence[tuple[str, Any]]
    ) -> None:
        """Enters a rollout of --debug-rollout-only."""
        judged = [(sample.index, None) for sample in samples]
        rows = [(position, 0, None) for position in range(len(judged))]
        self._enter(
            rollout_id, judged, dropped, rows, no_training=DropReason.ROLLOUT_ONLY, counts={}
        )

    @spanned("ledger")
    def _enter(
        self,
        rollout_id: int,
        judged: Sequence[tuple[Any, str | None]],
        dropped: Sequence[tuple[str, Any]],
        rows: Sequence[tuple[int, int, str | None]],
        *,
        no_training: DropReason | None,
        counts: Mapping[str, int],
    ) -> None:
        if self.start is None or self.writer is None:
            return
        mark = self._mark()
        used = self.source.take_used(rollout_id) if mark is not None else None
        origins = [] if used is None else used.origins
        size = self.args.n_samples_per_prompt
        is_own = self.args.rollout_function_path.startswith(OWN_FUNCTIONS)
        account = account_of(
            judged,
            rows,
            dropped,
            num_samples=0 if mark is None else mark.groups * size,
            used_samples=[]
            if is_own
            else [one.first_index + number for one in origins for number in range(size)],
        )
        if no_training is not None:
            account = without_training(account, no_training.value)
        has_prompts = mark is not None and mark.num_prompts is not None
        entry = RolloutEntry(
            start=self.start.start,
            rollout=rollout_id,
            time=time.time(),
            process=process_name(),
            mark=mark,
            served=served_runs(
                (one.epoch_id, one.offset if has_prompts else one.group_index, one.group_index)
                for one in origins
            ),
            again=() if used is None else runs_of(used.served_again),
            is_told=used is None or used.is_told,
            **dataclasses.asdict(account),
            counts=counts,
        )
        self._append([entry])

    def save(self, rollout_id: int) -> None:
        """Writes the books in which `rollout_id` is the last rollout trained. OSError where the disk
        refuses.
        """
        if self.start is None or self.writer is None or self.args.save is None:
            return
        self.writer.sync()
        mark = self._mark()
        own = (self.start.start, self.start.first, rollout_id)
        # a start in place of another one may begin after this rollout
        lineage = tuple(
            (start, first, min(last, rollout_id))
            for start, first, last in (*self.start.lineage, own)
            if first <= rollout_id
        )
        state = SavedState(
            rollout=rollout_id,
            lineage=lineage,
            mark=mark,
            waiting=runs_of(self.source.waiting_groups(rollout_id)) if mark is not None else (),
        )
        write_state(handed_state_path(self.args.save, rollout_id), state)

    def close(self) -> None:
        """Writes what a full disk has refused so far."""
        if self.writer is not None:
            self.writer.close()

    def _mark(self) -> StreamMark | None:
        """The stream's mark; None where its source has none that can be named."""
        return self.source.mark() if isinstance(self.source, RolloutDataSource) else None

    def _append(self, entries: Sequence[Any]) -> None:
        assert self.writer is not None
        error = self.writer.append(entries)
        if error is not None and not self._is_refused:
            logger.warning(
                "the ledger was not written (%s); %s. It is tried again with the next entry, and a "
                "checkpoint needs it.",
                error,
                disk_space(str(self.writer.path.parent)),
            )
        self._is_refused = error is not None


def dropped_indices(output: RolloutFnTrainOutput) -> list[tuple[str, Any]]:
    """(reason, `Sample.index`) of the samples that are gone for good before the gate."""
    return [
        (reason, sample.index)
        for reason, group in output.dropped_groups
        for sample in flatten_samples(group)
    ]


def row_outcomes(sources: Sequence[int], plan: SplitPlan) -> list[tuple[int, int, str | None]]:
    """(position of its sample, step or -1, reason) of each row of train data."""
    steps = plan.steps_N.tolist()
    return list(zip(sources, steps, plan.reasons, strict=True))


def _entries_of(books: Books, lineage: Sequence[tuple[str, int, int]]) -> list:
    """The entries of a lineage, for the ledger of a run in another folder."""
    found: list = []
    for start, first, last in lineage:
        found.append(books.starts[start])
        for rollout in range(first, last + 1):
            for known in (books.rollouts, books.trained):
                if (start, rollout) in known:
                    found.append(known[start, rollout])
    return found


def saved_state(folder: str, rollout_id: int) -> SavedState | None:
    """The books of a checkpoint: those published with its weights, else those beside its data
    position; None where an earlier version saved none. ConfigError for damaged ones.
    """
    weights = Path(folder)
    if not weights.name.startswith("iter_"):
        weights = weights / f"iter_{rollout_id:07d}"
    for path in (weights / STATE_NAME, handed_state_path(folder, rollout_id)):
        try:
            state = read_state(path)
        except FileNotFoundError:
            continue
        if state.rollout != rollout_id:
            raise ConfigError(
                f"the ledger's state {str(path)!r} is of rollout {state.rollout}, not {rollout_id}."
            )
        return state
    return None


def _history(
    load: str, rollout_id: int, mark: StreamMark, waiting: tuple[tuple[int, int], ...]
) -> tuple[tuple[tuple[str, int, int], ...], Books | None, str | None]:
    """(lineage, the books that hold it, a note) of the checkpoint that a start goes on from."""
    state, path = saved_state(load, rollout_id), Path(load) / FILE_NAME
    if state is None or not path.exists():
        missing = path if state is not None else handed_state_path(load, rollout_id)
        note = (
            f"{missing} is missing: what became of the samples before rollout {rollout_id + 1} is "
            "not on record"
        )
        logger.warning("%s (an earlier version wrote no ledger).", note)
        return (), None, note
    books = read_books(path)
    loaded = SavedState(rollout_id, state.lineage, mark, waiting)
    found = examine(books, state.lineage, loaded)
    if found.culprits:
        raise ConfigError(
            f"the ledger {str(path)!r} does not fit the data position after rollout {rollout_id}: "
            f"{told(found.culprits)}. Resume from an earlier rollout with --ckpt-step, or move the "
            f"ledger away to go on without a record of the samples before."
        )
    return state.lineage, books, None


def told(culprits: Sequence[Culprit]) -> str:
    """The first culprits as one sentence."""
    shown = "; ".join(one.message for one in culprits[:SHOWN])
    more = len(culprits) - SHOWN
    return f"{shown}; and {more} more" if more > 0 else shown


class TrainLedger:
    """The driver's side: what has trained. `start` is what `RolloutLedger.begin` returned."""

    def __init__(self, args: argparse.Namespace, start: str) -> None:
        self.starts = [(0, start)]  # (first rollout, start that has entered its samples)
        self.writer = LedgerWriter(ledger_folder(args))

    def go_on(self, start: str, first: int) -> None:
        """From rollout `first` on the samples are entered by `start`."""
        kept = [one for one in self.starts if one[0] < first]
        self.starts = [*kept, (first, start)]

    def enter(
        self, rollout_id: int, num_planned: int, not_trained: Mapping[str, Sequence[int | None]]
    ) -> None:
        """Enters a rollout whose training is over: the number of planned rows, and by reason the
        samples of those that did not train.
        """
        named = {
            reason: runs_of(index for index in indices if index is not None and index >= 0)
            for reason, indices in not_trained.items()
        }
        unnamed = sum(
            index is None or index < 0 for indices in not_trained.values() for index in indices
        )
        self.writer.append(
            [
                TrainedEntry(
                    start=next(s for first, s in reversed(self.starts) if first <= rollout_id),
                    rollout=rollout_id,
                    time=time.time(),
                    process=process_name(),
                    rows=num_planned - sum(map(len, not_trained.values())),
                    not_trained={reason: runs for reason, runs in named.items() if runs},
                    unnamed=unnamed,
                )
            ]
        )

    def sync(self) -> None:
        """Returns when every entry is on the disk. SaveError where it refuses."""
        try:
            self.writer.sync()
        except OSError as error:
            raise SaveError(
                f"The ledger {self.writer.path} was not written: {error}. "
                f"{disk_space(str(self.writer.path.parent))}."
            ) from error

    def close(self) -> None:
        """RolloutDataError where the books of the run do not add up."""
        self.sync()
        self.writer.close()
        books = read_books(self.writer.path)
        last = self.starts[-1][1]
        if last not in books.starts:
            logger.warning("the rollout manager's ledger is not at %s here", self.writer.path)
            return
        found = examine(books, books.lineage(last))
        if found.culprits:
            raise RolloutDataError(
                f"The ledger {self.writer.path} does not add up: {told(found.culprits)}. "
                f"slime ledger {self.writer.path.parent} shows all of it."
            )
