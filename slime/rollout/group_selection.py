"""Which finished groups a rollout keeps, and how it ends when none stays: one implementation for
every rollout function.

A finished group is unfinished (the engine ended a request: it is generated again, a bounded number
of times), dropped by the dynamic filter (it is replaced, a bounded number of times), or kept. What
was kept passes the sample filter at the end.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import logging
from typing import TYPE_CHECKING, Any

from slime.data.reasons import DropReason
from slime.data.sample import Sample
from slime.data.structure import iter_samples
from slime.exceptions import RolloutDataError
from slime.plugins.failures import FailureCounter, mark_failed
from slime.plugins.filter_calls import call_filter, require_nothing, require_samples
from slime.prompts.data_source import group_id_of
from slime.rollout import generation
from slime.rollout.base_types import RolloutFnTrainOutput
from slime.rollout.filter_hub.base_types import (
    DynamicFilterOutput,
    MetricGatherer,
    call_dynamic_filter,
    should_drop_dynamic_filter_output,
)
from slime.utils.misc import load_function

if TYPE_CHECKING:
    from slime.prompts.data_source import DataSource

logger = logging.getLogger(__name__)

# Without --max-dropped-groups, the filter may drop this many times the batch in one rollout.
DROPPED_BATCHES = 20
# Dropped groups that the error shows, one for each reason.
NUM_EXAMPLES = 3
EXCERPT = 60


@dataclasses.dataclass(frozen=True)
class SelectionConfig:
    """The options that decide which groups stay. `target`: groups of the batch; `fetch_size`:
    groups fetched at a time.
    """

    target: int
    fetch_size: int
    group_size: int
    max_failed_ratio: float
    max_dropped_groups: int
    max_engine_aborts: int
    partial_rollout: bool
    dynamic_filter: str | None
    sample_filter: str | None
    process_all: str | None

    @staticmethod
    def from_args(args: argparse.Namespace) -> SelectionConfig:
        """The configuration of a run, also of upstream's short namespaces."""
        target = args.rollout_batch_size
        most = getattr(args, "max_dropped_groups", None)
        return SelectionConfig(
            target=target,
            fetch_size=getattr(args, "over_sampling_batch_size", None) or target,
            group_size=getattr(args, "n_samples_per_prompt", 1),
            max_failed_ratio=getattr(args, "max_failed_ratio", 1.0),
            max_dropped_groups=DROPPED_BATCHES * target if most is None else most,
            max_engine_aborts=getattr(args, "max_engine_aborts", 3),
            partial_rollout=getattr(args, "partial_rollout", False),
            dynamic_filter=getattr(args, "dynamic_sampling_filter_path", None),
            sample_filter=getattr(args, "rollout_sample_filter_path", None),
            process_all=getattr(args, "rollout_all_samples_process_path", None),
        )


class EngineAborts:
    """How often in a row an engine ended a group's requests without a new token, by the group's
    key.
    """

    def __init__(self) -> None:
        self._seen: dict[Any, tuple[int, int]] = {}  # aborts, tokens at the last one

    def note(self, key: object, num_tokens: int) -> int:
        """Notes one more abort and returns how many there were since the group last grew."""
        count, before = self._seen.get(key, (0, 0))
        count = 1 if num_tokens > before else count + 1
        self._seen[key] = count, num_tokens
        return count

    def forget(self, key: object) -> None:
        """The group is finished."""
        self._seen.pop(key, None)


class GroupSelection:
    """The decisions of one rollout and the counts of what they left out. `aborts` may outlive the
    rollout.
    """

    def __init__(
        self, args: argparse.Namespace, rollout_id: int, aborts: EngineAborts | None = None
    ) -> None:
        self.args, self.rollout_id = args, rollout_id
        self.config = SelectionConfig.from_args(args)
        self.filter = (
            load_function(self.config.dynamic_filter) if self.config.dynamic_filter else None
        )
        self.failures = FailureCounter(
            total=self.config.target * self.config.group_size,
            max_ratio=self.config.max_failed_ratio,
        )
        self.aborts = EngineAborts() if aborts is None else aborts
        self.dropped: collections.Counter[str] = collections.Counter()
        self.dropped_groups: list[tuple[str, list]] = []  # used up and not in the batch
        self._filter_counts = MetricGatherer()
        # every verdict against a group, by reason
        self._drops: collections.Counter[str] = collections.Counter()
        self._examples: dict[str, str] = {}
        self._drops_to_say = 2 * self.config.target  # twice as many each time

    def is_unfinished(self, key: object, group: list) -> bool:
        """Whether the group is to be generated again because an engine ended one of its requests.

        After --max-engine-aborts of them without a new token its aborted samples are FAILED
        instead.
        """
        samples = list(iter_samples(group))
        aborted = [sample for sample in samples if sample.status is Sample.Status.ABORTED]
        if not aborted:
            self.aborts.forget(key)
            return False
        tokens = (
            sum(sample.response_length for sample in samples) if self.config.partial_rollout else 0
        )
        count = self.aborts.note(key, tokens)
        if count <= self.config.max_engine_aborts:
            return True
        self.aborts.forget(key)
        for sample in aborted:
            mark_failed(
                sample,
                "generation",
                (
                    f"the engine aborted it {count} times without a new token, more than "
                    f"--max-engine-aborts {self.config.max_engine_aborts} allows"
                ),
            )
        return False

    def verdict_against(
        self, group: list, *, remaining: int, num_kept: int
    ) -> DynamicFilterOutput | None:
        """The dynamic filter's verdict where the group is dropped, None where it stays. Failures
        are counted here.

        remaining: groups of this rollout that are running or kept; num_kept: those kept.
        RolloutDataError with reasons and examples where the filter has dropped more than
        --max-dropped-groups.
        """
        self.failures.add([list(iter_samples([member])) for member in group])
        verdict = self._filter_verdict(group)
        if not should_drop_dynamic_filter_output(
            verdict, remaining_batch_size=remaining, target_data_size=self.config.target
        ):
            return None
        reason = verdict.reason or "dropped"
        self._drops[reason] += 1
        if reason not in self._examples and len(self._examples) < NUM_EXAMPLES:
            self._examples[reason] = describe_group(group)
        self._watch_drops(num_kept)
        return verdict

    def _filter_verdict(self, group: list) -> DynamicFilterOutput:
        if self.filter is None:
            return DynamicFilterOutput(keep=True)
        call = functools.partial(call_dynamic_filter, self.filter)
        return call_filter(
            "--dynamic-sampling-filter-path",
            str(self.config.dynamic_filter),
            call,
            lambda: describe_group(group),
            self.args,
            group,
        )

    def _watch_drops(self, num_kept: int) -> None:
        """Says that the filter drops most of what is generated, which from outside looks like an
        engine that hangs; ends it at the limit.
        """
        total, config = sum(self._drops.values()), self.config
        counts = ", ".join(f"{count} {reason}" for reason, count in self._drops.most_common())
        so_far = (
            f"rollout {self.rollout_id}: {config.dynamic_filter} dropped {total} groups ({counts}) "
            f"and kept {num_kept} of the "
            f"{config.target} that the batch needs"
        )
        if total > config.max_dropped_groups and num_kept < config.target:
            examples = "; ".join(
                f"{reason}: {example}" for reason, example in self._examples.items()
            )
            raise RolloutDataError(
                f"{so_far}, more than --max-dropped-groups {config.max_dropped_groups} allows. "
                f"Examples: {examples}. Where the rewards of "
                "a group are all equal the prompts are too easy or too hard, or the reward "
                "function cannot tell responses apart; choose other "
                "prompts, another filter, or a larger --max-dropped-groups."
            )
        if total >= self._drops_to_say:
            self._drops_to_say *= 2
            logger.warning(
                "%s. Look at the rewards: does any group have two different ones?", so_far
            )

    def drop_filtered(self, verdict: DynamicFilterOutput, group: list) -> None:
        """Counts a group that the dynamic filter dropped and the rollout used up."""
        self._filter_counts.on_dynamic_filter_drop(verdict.reason)
        self.drop(f"{DropReason.DYNAMIC_FILTER.value}_{verdict.reason or 'dropped'}", group)

    def drop(self, reason: str, group: list) -> None:
        """Counts samples that are used up and not in the batch."""
        self.dropped[reason] += len(list(iter_samples(group)))
        self.dropped_groups.append((reason, group))

    def give_back(self, group: list, *, fetched: list) -> list:
        """What the data source gets of a group that the rollout did not use up: with its tokens
        under partial rollout, else as it was `fetched`. Samples that were begun are counted.
        """
        begun = sum(1 for sample in iter_samples(group) if sample.response_length)
        if begun:
            reason = (
                DropReason.RETURNED_PARTIAL
                if self.config.partial_rollout
                else DropReason.RETURNED_PRISTINE
            )
            self.dropped[reason.value] += begun
        if not self.config.partial_rollout:
            return pristine(fetched)
        for sample in iter_samples(group):
            if sample.response_length:
                sample.metadata.setdefault("start_rollout_id", self.rollout_id)
        return group

    def output(self, groups: list[list]) -> RolloutFnTrainOutput:
        """The batch in order of sample index, after the user's sample filter, with what
        is counted.
        """
        groups = sorted(groups, key=first_index)
        if self.config.sample_filter:
            self._filter_samples(groups)
        self.dropped_groups.sort(key=lambda pair: first_index(pair[1]))
        metrics = {**self._filter_counts.collect(), **self.failures.metrics()}
        return RolloutFnTrainOutput(groups, metrics, dict(self.dropped), self.dropped_groups)

    def _filter_samples(self, groups: list[list]) -> None:
        """Calls the user's filter, which marks samples (`remove_sample`) in place. Those that it
        takes out of their lists are counted.
        """
        before = [list(iter_samples(group)) for group in groups]
        option, path = "--rollout-sample-filter-path", str(self.config.sample_filter)
        returned = call_filter(
            option,
            path,
            load_function(path),
            lambda: f"the {len(groups)} groups of rollout {self.rollout_id}",
            self.args,
            groups,
        )
        require_nothing(
            option,
            path,
            returned,
            groups,
            "set sample.remove_sample in place, or take samples out of the lists that it is given.",
        )
        require_samples(option, path, groups)
        left = {id(sample) for sample in iter_samples(groups)}
        gone = [[sample for sample in samples if id(sample) not in left] for samples in before]
        # a filter that put other objects in their place cannot be followed, and took nothing out
        if sum(map(len, gone)) == sum(map(len, before)) - len(left):
            for samples in filter(None, gone):
                self.drop(DropReason.SAMPLE_FILTER.value, samples)

    def process_all(self, groups: list[list], data_source: DataSource) -> None:
        """Shows the user's function every group of the rollout, dropped and returned ones too."""
        option, path = "--rollout-all-samples-process-path", self.config.process_all
        if path:
            about = f"the {len(groups)} groups of rollout {self.rollout_id}"
            returned = call_filter(
                option, path, load_function(path), lambda: about, self.args, groups, data_source
            )
            require_nothing(
                option, path, returned, groups, "it sees the groups of a finished rollout."
            )


def describe_group(group: list) -> str:
    """A group's number, the beginning of its prompt, its label and its rewards."""
    samples = list(iter_samples(group))
    rewards = ", ".join(str(sample.reward)[:EXCERPT] for sample in samples[:8])
    more = ", ..." if len(samples) > 8 else ""
    first = samples[0]
    return (
        f"group {group_id_of(group)} (prompt {_excerpt(first.prompt)}, label "
        f"{_excerpt(first.label)}) has the rewards [{rewards}{more}]"
    )


def _excerpt(value: object) -> str:
    text = repr(value)
    return text if len(text) <= EXCERPT else f"{text[:EXCERPT]}..."


def first_index(group: list) -> tuple[int, int]:
    """Sort key: the group's first sample index; groups without one stand last, in their order."""
    index = next((sample.index for sample in iter_samples(group)), None)
    return (0, index) if index is not None else (1, 0)


def pristine(group: list) -> list[Sample]:
    """The group as the data source made it: one sample per member, nothing generated."""
    members = [
        member if isinstance(member, Sample) else next(iter_samples(member)) for member in group
    ]
    return [generation.reset_to_prompt(member) for member in members]
