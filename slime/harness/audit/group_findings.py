"""Groups and rewards: groups of unequal size, of mixed prompts, without spread; rewards that are
constant, not finite, in conflict with each other or with a grader of ours.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Iterator

import numpy as np

from slime.data.rewards import SPREAD_TOLERANCE
from slime.harness.audit.findings import (
    KEPT,
    Evidence,
    Finding,
    Level,
    evidence_of,
    finding,
    percent,
    plural,
)
from slime.harness.audit.graders import Grader, Verdict
from slime.harness.audit.table import UNKNOWN, SampleTable
from slime.rollout.rm_hub.answers import THINK_END, final_answer

MOSTLY_FLAT = 0.8  # share of groups without spread from which little is learned
ANSWER_CHARS = 4000  # of a response's end that is searched for its answer
_STATES_ANSWER = ("\\boxed", "####", "answer", "Answer", THINK_END)


class GroupFindings:
    """Group sizes, mixed groups and spread of all steps."""

    def __init__(self) -> None:
        self._sizes: collections.Counter[int] = collections.Counter()
        self._uneven: list[str] = []
        self._steps = self._groups = self._flat = self._scored = 0
        self._mixed = 0
        self._mixed_evidence: list[Evidence] = []
        self._uneven_evidence: list[Evidence] = []

    def look(self, table: SampleTable) -> None:
        if table.is_evaluation or not table.has_groups:
            return
        known = table.group_N != UNKNOWN
        groups = table.group_N[known]
        # the samples of one execution are one member
        pairs = np.unique(np.stack([groups, table.execution_N[known]]), axis=1)
        sizes = np.bincount(pairs[0])
        present = np.unique(groups)
        sizes_G = sizes[present]
        self._steps += 1
        self._groups += len(present)
        self._sizes.update(sizes_G.tolist())
        usual = collections.Counter(sorted(sizes_G.tolist())).most_common(1)[0][0]
        # where a prompt is all that tells groups, those of a prompt that came twice are one
        if table.groups_are_recorded or (sizes_G % usual).any():
            same = sizes_G == usual
        else:
            same = np.ones(len(sizes_G), dtype=bool)
        if not same.all():
            self._uneven.append(table.where)
            for group in present[~same][:4].tolist():
                i = int(np.flatnonzero(table.group_N == group)[0])
                note = f"{sizes[group]} samples, most have {usual}"
                self._uneven_evidence.append(evidence_of(table, i, table.prompts[i], note))
        self._look_at_prompts(table)
        self._look_at_spread(table, sizes)

    def _look_at_prompts(self, table: SampleTable) -> None:
        first: dict[int, int] = {}
        mixed: dict[int, int] = {}
        executions: dict[int, set[str]] = collections.defaultdict(set)
        for i, prompt in enumerate(table.prompts):
            executions[int(table.execution_N[i])].add(prompt)
        for i, (group, prompt) in enumerate(
            zip(table.group_N.tolist(), table.prompts, strict=True)
        ):
            # an execution whose samples have prompts of their own says nothing
            if group == UNKNOWN or len(executions[int(table.execution_N[i])]) > 1:
                continue
            at = first.setdefault(group, i)
            if table.prompts[at] != prompt:
                mixed.setdefault(group, i)
        self._mixed += len(mixed)
        for i in list(mixed.values())[:8]:
            text = table.prompts[i]
            self._mixed_evidence.append(evidence_of(table, i, text, "another prompt of its group"))

    def _look_at_spread(self, table: SampleTable, sizes: np.ndarray) -> None:
        counts = (table.group_N != UNKNOWN) & table.counts_N & np.isfinite(table.reward_N)
        if not counts.any():
            return
        group, reward = table.group_N[counts], table.reward_N[counts]
        low, high = np.full(len(sizes), np.inf), np.full(len(sizes), -np.inf)
        np.minimum.at(low, group, reward)
        np.maximum.at(high, group, reward)
        scored = np.unique(group)
        scored = scored[sizes[scored] > 1]
        scale = np.maximum(1.0, np.maximum(np.abs(low[scored]), np.abs(high[scored])))
        self._flat += int((high[scored] - low[scored] <= SPREAD_TOLERANCE * scale).sum())
        self._scored += len(scored)

    def findings(self) -> Iterator[Finding]:
        if self._mixed:
            yield finding(
                "mixed_groups",
                Level.ERROR,
                f"{self._mixed} of {plural(self._groups, 'group')} hold samples of different "
                "prompts.",
                self._mixed_evidence,
                share=self._mixed / self._groups,
            )
        if self._uneven:
            sizes = ", ".join(
                f"{count} of {size}" for size, count in sorted(self._sizes.items())[:8]
            )
            yield finding(
                "unequal_groups",
                Level.WARNING,
                f"Groups are of unequal size in {len(self._uneven)} of {plural(self._steps, 'step')}: "
                f"{sizes} samples.",
                self._uneven_evidence,
                share=len(self._uneven) / self._steps,
            )
        if self._flat:
            share = self._flat / self._scored
            yield finding(
                "groups_without_spread",
                Level.WARNING if share >= MOSTLY_FLAT else Level.INFO,
                f"{self._flat} of {plural(self._scored, 'group')} ({percent(self._flat, self._scored)}) "
                "have one reward for all their samples: their advantages are 0.",
                share=share,
            )


class RewardFindings:
    """Rewards of all steps."""

    def __init__(self, grader: Grader | None) -> None:
        self._grader = grader
        self._total = self._missing = self._conflicts = self._flips = 0
        self._low, self._high = math.inf, -math.inf
        self._evidence: dict[str, list[Evidence]] = collections.defaultdict(list)
        self._verdicts: collections.Counter[Verdict] = collections.Counter()

    def look(self, table: SampleTable) -> None:
        scored = table.has_reward_N
        if not scored.any():
            return
        self._total += len(table)
        finite = np.isfinite(table.reward_N)
        bad = ~finite & table.counts_N
        self._missing += int(bad.sum())
        for i in np.flatnonzero(bad)[:8].tolist():
            note = f"reward {table.reward_N[i]}" if scored[i] else "no reward"
            self._add("reward_not_finite", evidence_of(table, i, note=note))
        if finite.any():
            self._low = min(self._low, float(table.reward_N[finite].min()))
            self._high = max(self._high, float(table.reward_N[finite].max()))
        rows = np.flatnonzero(finite).tolist()
        self._look_at_equals(table, rows)
        self._look_at_answers(table, rows)
        if self._grader is not None:
            for i, verdict, note in self._grader.compare(table, rows):
                self._verdicts[verdict] += 1
                if verdict is not Verdict.SAME:
                    self._add("grader_disagrees", evidence_of(table, i, note=note))

    def _add(self, name: str, evidence: Evidence) -> None:
        if len(self._evidence[name]) < KEPT:
            self._evidence[name].append(evidence)

    def _look_at_equals(self, table: SampleTable, rows: list[int]) -> None:
        first: dict[tuple[str, str, str], int] = {}
        for i in rows:
            if not table.responses[i] or not table.prompts[i]:
                continue
            at = first.setdefault(
                (table.prompts[i], table.responses[i], str(table.labels[i])[:500]), i
            )
            if abs(table.reward_N[at] - table.reward_N[i]) > 1e-6:
                self._conflicts += 1
                note = f"rewards {table.reward_N[at]:g} and {table.reward_N[i]:g}"
                self._add("conflicting_rewards", evidence_of(table, i, note=note))

    def _look_at_answers(self, table: SampleTable, rows: list[int]) -> None:
        values = np.unique(table.reward_N[rows]) if rows else np.zeros(0)
        if (
            not 2 <= len(values) <= 3
        ):  # rewards of right and wrong; others weigh more than an answer
            return
        low, high = float(values[0]), float(values[-1])
        ends: dict[tuple[str, str], dict[float, int]] = {}
        for i in rows:
            reward = float(table.reward_N[i])
            tail = table.responses[i][-ANSWER_CHARS:]
            if reward not in (low, high) or not any(mark in tail for mark in _STATES_ANSWER):
                continue
            answer = final_answer(tail)
            if answer is None or not table.prompts[i]:
                continue
            held = ends.setdefault((table.prompts[i], answer.strip()[:200]), {})
            held.setdefault(reward, i)
        for (_, answer), held in ends.items():
            if len(held) == 2 and table.responses[held[low]] != table.responses[held[high]]:
                self._flips += 1
                note = f"answer {answer!r} has rewards {low:g} and {high:g}"
                self._add("conflicting_answers", evidence_of(table, held[low], note=note))

    def findings(self) -> Iterator[Finding]:
        if self._missing:
            yield finding(
                "reward_not_finite",
                Level.ERROR,
                f"{self._missing} of {plural(self._total, 'reward')} are missing or not finite.",
                self._evidence["reward_not_finite"],
                share=self._missing / self._total,
            )
        if self._total > 1 and self._low == self._high:
            yield finding(
                "constant_reward",
                Level.WARNING,
                f"All {self._total} rewards are {self._low:g}: nothing is learned.",
            )
        if self._conflicts:
            yield finding(
                "conflicting_rewards",
                Level.WARNING,
                f"{plural(self._conflicts, 'response')} have another reward than the same response "
                "to the same prompt in the same step.",
                self._evidence["conflicting_rewards"],
                share=self._conflicts / self._total,
            )
        if self._flips:
            yield finding(
                "conflicting_answers",
                Level.WARNING,
                f"{plural(self._flips, 'final answer')} have both the highest and the lowest reward "
                "for the same prompt.",
                self._evidence["conflicting_answers"],
                share=self._flips / self._total,
            )
        yield from self._grader_findings()

    def _grader_findings(self) -> Iterator[Finding]:
        wrong = {one: count for one, count in self._verdicts.items() if one is not Verdict.SAME}
        if not wrong or self._grader is None:
            return
        compared = self._verdicts.total()
        unable = wrong.pop(Verdict.FAILED, 0)
        count = sum(wrong.values())
        if not count:
            return
        yield finding(
            "grader_disagrees",
            Level.WARNING,
            f"{self._grader.name} disagrees on {count} of {plural(compared, 'response')} "
            f"({percent(count, compared)}): {wrong.get(Verdict.LOWER, 0)} were rewarded and it calls "
            f"them wrong, {wrong.get(Verdict.HIGHER, 0)} were not and it calls them right"
            + (f"; it failed on {unable}" if unable else "")
            + ".",
            self._evidence["grader_disagrees"],
            share=count / compared,
        )
