"""What a rollout function returns, and how it is called."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from slime.data.sample import Sample


@dataclasses.dataclass
class RolloutFnTrainOutput:
    """The groups of one rollout, in order of sample index.

    `metrics` are logged beside the rollout's own; `dropped` counts the samples that were generated
    or begun for this rollout and are not in `samples`, by reason. `dropped_groups` are (reason,
    group) of those among them that are gone for good, for the raw snapshot; what was given back to
    the data source is counted and not among them.
    """

    samples: list[list[Sample]] | list[Sample]
    metrics: dict[str, Any] | None = None
    dropped: dict[str, int] = dataclasses.field(default_factory=dict)
    dropped_groups: list[tuple[str, list]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class RolloutFnEvalOutput:
    """Per dataset: {"rewards": [...], "truncated": [...], "samples": [...]}, lists of
    equal length.
    """

    data: dict[str, dict[str, Any]]
    metrics: dict[str, Any] | None = None


class GenerationCalls(Protocol):
    """What the loops of training and evaluation ask of the module that generates: the names of
    `slime.rollout.sglang_rollout`, looked up at each call so that replacing one acts.
    """

    GenerateState: Callable[[Any], Any]
    generate_and_rm_group: Callable[..., Awaitable[list[Any]]]
    abort: Callable[[Any, int], Awaitable[None]]
    sends_group_requests: Callable[[Any, list[Any]], bool]


def call_rollout_fn(
    fn: Callable[..., Any], *args: object, evaluation: bool, **kwargs: object
) -> Any:
    """The output of a rollout function, wrapped where it returns a bare list (training) or dict
    (evaluation).
    """
    output = fn(*args, evaluation=evaluation, **kwargs)
    if isinstance(output, RolloutFnTrainOutput | RolloutFnEvalOutput):
        return output
    return RolloutFnEvalOutput(data=output) if evaluation else RolloutFnTrainOutput(samples=output)


def require_generated(path: str, result: object) -> None:
    """TypeError unless a generate function returned a sample, or a list that holds samples (of
    lists too).
    """
    members = [result]
    while members:
        member = members.pop()
        if isinstance(member, list | tuple) and member:
            members += member
        elif not isinstance(member, Sample):
            shown = (
                "an empty list"
                if isinstance(member, list | tuple)
                else f"{type(member).__name__} ({str(member)[:40]!r})"
            )
            raise TypeError(
                f"the generate function {path} returned {shown} where a Sample is needed. Return "
                "the sample or a non-empty list of samples; "
                "one that must not train has remove_sample set."
            )
