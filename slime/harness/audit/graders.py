"""A grader of ours (slime/rollout/rm_hub) beside the rewards that a run recorded."""

from __future__ import annotations

import argparse
import asyncio
import enum
import math
from collections.abc import Iterator

from slime.data.rewards import is_solved
from slime.data.sample import Sample
from slime.exceptions import ConfigError, SlimeError
from slime.harness.audit.table import SampleTable
from slime.harness.audit.values import is_number, number_of
from slime.rollout.rm_hub import async_rm
from slime.rollout.rm_hub.type_names import rm_type_problem

SCORED_AT_ONCE = 256
_NOT_OFFERED = frozenset({"random", "remote_rm", "ifbench"})


class Verdict(enum.Enum):
    """How the grader's verdict stands to the recorded reward."""

    SAME = "same"
    LOWER = "lower"
    HIGHER = "higher"
    FAILED = "failed"


class Grader:
    """Scores responses with a built-in reward type. ConfigError for an unknown type."""

    def __init__(self, name: str) -> None:
        problem = rm_type_problem(name)
        if name.removeprefix("boxed_") in _NOT_OFFERED:
            problem = f"{name!r} looks at no label."
        if problem:
            raise ConfigError(f"--grader: {problem}")
        self.name = name

    def compare(self, table: SampleTable, rows: list[int]) -> Iterator[tuple[int, Verdict, str]]:
        """(sample, verdict, note) of each sample with a label. Rewards of other scales are compared
        by their half: at or above the middle of the step's extremes is "right".
        """
        chosen = [i for i in rows if table.labels[i] is not None and table.responses[i]]
        if not chosen:
            return
        low, high = min(table.reward_N[rows]), max(table.reward_N[rows])
        middle = (low + high) / 2 if high > low else 0.5
        for i, score in zip(chosen, self._scores(table, chosen), strict=True):
            if math.isnan(score):
                yield i, Verdict.FAILED, "the grader failed"
                continue
            ours = bool(is_solved(score, 0.5))
            theirs = table.reward_N[i] >= middle
            if ours == theirs:
                yield i, Verdict.SAME, ""
            else:
                note = f"reward {table.reward_N[i]:g}, {self.name} {score:g}, label " + repr(
                    str(table.labels[i])[:80]
                )
                yield i, Verdict.HIGHER if ours else Verdict.LOWER, note

    def _scores(self, table: SampleTable, chosen: list[int]) -> list[float]:
        scores: list[float] = []
        for start in range(0, len(chosen), SCORED_AT_ONCE):
            part = chosen[start : start + SCORED_AT_ONCE]
            scores += asyncio.run(self._score([self._sample(table, i) for i in part]))
        return scores

    def _sample(self, table: SampleTable, i: int) -> Sample:
        # nothing of the file but these three: metadata would choose another reward function
        return Sample(
            prompt=table.prompts[i], response=table.responses[i], label=table.labels[i], index=i
        )

    async def _score(self, samples: list[Sample]) -> list[float]:
        args = argparse.Namespace(rm_type=self.name)
        values = await asyncio.gather(
            *(async_rm(args, sample) for sample in samples), return_exceptions=True
        )
        scores = []
        for value in values:
            if isinstance(value, BaseException) and not isinstance(value, SlimeError | ValueError):
                raise value
            if isinstance(value, dict):  # dapo
                value = value.get("score")
            scores.append(number_of(value) if is_number(value) else math.nan)
        return scores
