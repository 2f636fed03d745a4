"""Which estimator a run's advantages follow from its rewards, and where they follow none, the whole
batch, or the rewards of other samples.

A rule explains a step if every advantage is the rule's. The run's rule is the one that explains most
steps; a step that it does not explain is looked at for a fault: a few samples that break it, a
baseline by position, rewards in another order.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator

import numpy as np

from slime.harness.audit.estimators import (
    Order,
    Prediction,
    Step,
    batch_predictions,
    block_groupings,
    fitted_factor,
    fitted_line,
    fitted_weights,
    group_predictions,
    matches,
    orders,
)
from slime.harness.audit.findings import (
    KEPT,
    Evidence,
    Finding,
    Level,
    evidence_of,
    finding,
    plural,
)
from slime.harness.audit.table import UNKNOWN, SampleTable

MOSTLY = 0.75  # share of samples that follow a rule for the others to be outliers
TOKEN_LEVEL = 0.5  # share of samples whose advantages differ from token to token
MOST_REORDERED = 20_000  # samples of a step for which other orders are tried
MOST_PARTS = 8  # rewards whose weights are looked for
FEWEST = 4  # samples with an advantage that a step needs
SHOWN_OUTLIERS = 6


@dataclasses.dataclass
class _Explained:
    """One step: what explains it. rules: names of all that do. fault: kind and sentence where none
    does.
    """

    table_where: str
    rules: list[str]
    scopes: dict[str, str]
    fault: str = ""
    detail: str = ""
    best: str = ""
    outliers: int = 0
    samples: int = 0
    evidence: list[Evidence] = dataclasses.field(default_factory=list)


class AdvantageFindings:
    """Advantages of all steps."""

    def __init__(self) -> None:
        self._steps: list[_Explained] = []
        self._flat = self._by_token = self._samples = self._bad = 0
        self._has_groups = False
        self._bad_evidence: list[Evidence] = []

    def look(self, table: SampleTable) -> None:
        if table.advantage_N is None or table.is_evaluation:
            return
        self._samples += len(table)
        recorded = ~np.isnan(table.advantage_N)
        if not recorded.any():
            self._note_bad(table, ~recorded)
            return
        bad = np.isinf(table.advantage_N)
        if table.shape in ("trl", "verl", "json-lines"):  # every sample of these has an advantage
            bad |= ~recorded
        self._note_bad(table, bad)
        told = np.isfinite(table.advantage_N)
        assert table.advantage_range_N is not None
        size = np.abs(table.advantage_N[told])
        varies = table.advantage_range_N[told] > 1e-3 * size + 1e-6
        if told.sum() < FEWEST or not table.has_reward_N.any():
            return
        if varies.mean() > TOKEN_LEVEL:
            self._by_token += 1
        elif not size.max() > 1e-9:
            self._flat += 1
        else:
            explained = _explain(table, told)
            if explained is not None:
                self._steps.append(explained)
            self._has_groups |= table.has_groups

    def _note_bad(self, table: SampleTable, bad: np.ndarray) -> None:
        self._bad += int(bad.sum())
        assert table.advantage_N is not None
        for i in np.flatnonzero(bad)[:8].tolist():
            if len(self._bad_evidence) < KEPT:
                note = f"advantage {table.advantage_N[i]}"
                self._bad_evidence.append(evidence_of(table, i, note=note))

    def findings(self) -> Iterator[Finding]:
        if self._bad:
            yield finding(
                "advantage_not_finite",
                Level.ERROR,
                f"{self._bad} of {plural(self._samples, 'advantage')} are NaN or infinite.",
                self._bad_evidence,
                share=self._bad / self._samples,
            )
        if self._by_token and not self._steps:
            yield finding(
                "advantage_rule",
                Level.INFO,
                f"Advantages differ from token to token in {plural(self._by_token, 'step')} (GAE, or a "
                "KL in the reward): they are not compared with rewards.",
            )
        if self._steps:
            yield from self._of_steps()

    def _of_steps(self) -> Iterator[Finding]:
        votes = collections.Counter(rule for step in self._steps for rule in step.rules)
        # of rules that explain equally many steps, the one that is tried first
        names = list(dict.fromkeys(rule for step in self._steps for rule in step.rules))
        rule = max(names, key=lambda name: votes[name]) if names else None
        for kind in ("misattributed_baseline", "advantage_outliers", "unknown_advantages"):
            yield from self._faults(kind, len(self._steps))
        if rule is None:
            return
        by_kind: dict[str, list[tuple[_Explained, str]]] = collections.defaultdict(list)
        for step in self._steps:
            if step.rules:
                mine = rule if rule in step.rules else step.rules[0]
                by_kind[self._kind_of(mine, step.scopes[mine], rule)].append((step, mine))
        for name, steps in by_kind.items():
            yield self._of_rule(name, steps, rule)

    def _kind_of(self, rule: str, scope: str, usual: str) -> str:
        if ", times -" in rule:
            return "negated_advantages"
        if scope == "unknown":
            return "unknown_advantages"
        if scope == "batch" and self._has_groups:
            return "batch_baseline"
        return "advantage_rule" if rule == usual else "advantage_rule_changes"

    def _of_rule(self, name: str, steps: list[tuple[_Explained, str]], usual: str) -> Finding:
        total = len(self._steps)
        first, rule = steps[0]
        where = f"in {len(steps)} of {plural(total, 'step')}"
        evidence = [Evidence(step.table_where, note=mine) for step, mine in steps]
        text = f"Advantages follow {rule} {where}"
        level = Level.WARNING
        if name == "advantage_rule":
            level, evidence = Level.INFO, []
        elif name == "batch_baseline":
            text += ": the baseline is of all samples, not of the group"
        elif name == "negated_advantages":
            level = Level.ERROR
        elif name == "unknown_advantages":
            text += ": a penalty or a function after the reward changed them"
        else:
            text += f", first {first.table_where}, and {usual} in others"
        return finding(name, level, text + ".", evidence, share=len(steps) / total)

    def _faults(self, kind: str, total: int) -> Iterator[Finding]:
        steps = [step for step in self._steps if step.fault == kind]
        if not steps:
            return
        where = f"{len(steps)} of {plural(total, 'step')}, first {steps[0].table_where}"
        evidence = [one for step in steps for one in step.evidence]
        samples, outliers = (
            sum(getattr(one, name) for one in steps) for name in ("samples", "outliers")
        )
        share = len(steps) / total
        if kind == "misattributed_baseline":
            text = f"{steps[0].detail} ({where})."
        elif kind == "advantage_outliers":
            share = outliers / samples
            text = (
                f"{outliers} of {plural(samples, 'sample')} break {steps[0].best}, which the others "
                f"follow ({where})."
            )
        else:
            text = (
                f"Advantages follow no known estimator from the rewards ({where}); the nearest is "
                f"{steps[0].best}."
            )
        yield finding(kind, Level.ERROR, text, evidence, share=share)


def _explain(table: SampleTable, told: np.ndarray) -> _Explained | None:
    """What explains the advantages of a step, or what is wrong with them. None where groups or
    rewards that the file does not have may explain them.
    """
    result = _Explained(table.where, [], {}, samples=int(told.sum()))
    tables = [table, *_regrouped(table)]
    known = told & _have_their_group(table)
    for mask in (told,) if (known == told).all() else (told, known):
        if any(mask.sum() >= FEWEST and _follow(result, one, mask) for one in tables):
            return result
    if known.sum() < FEWEST or np.isfinite(table.reward_N).sum() < 2:
        return None
    how = _follow_normalized(table, told)
    if how is not None:  # what is wrong with these is wrong with the advantages
        tables = [dataclasses.replace(one, advantage_N=one.normalized_N) for one in tables]
        known &= np.isfinite(table.normalized_N)
    other = next((found for one in tables if (found := _other_order(one, known)) is not None), None)
    if how is not None and other is None:
        name = f"the trainer's normalized rewards{how}, which follow no known estimator from the rewards"
        result.rules.append(name)
        result.scopes[name] = "unknown"
        return result
    _name_fault(result, tables[0], known, other)
    return result


def _regrouped(table: SampleTable) -> Iterator[SampleTable]:
    """The table with blocks of rows as groups, where the file tells groups by their prompt alone: a
    batch may hold a prompt more than once. Not where every prompt has as many rows in a row: there
    smaller blocks are a wrong group size.
    """
    if table.groups_are_recorded or not table.has_groups:
        return
    count = len(table)
    groups = np.unique(table.group_N)
    if len(groups) > 1 and _are_blocks(table.group_N, count // len(groups)):
        return
    for size in (size for size in range(2, count) if count % size == 0):
        blocks = np.arange(count) // size
        if len(np.unique(np.stack([blocks, table.group_N]), axis=1).T) == count // size:
            yield dataclasses.replace(table, group_N=blocks)


def _are_blocks(groups: np.ndarray, size: int) -> bool:
    """Whether each `size` rows in a row are a group."""
    return len(groups) % size == 0 and bool(
        (groups.reshape(-1, size) == groups[::size, None]).all()
        and len(np.unique(groups[::size])) == len(groups) // size
    )


def _have_their_group(table: SampleTable) -> np.ndarray:
    """bool [N]: the sample's group is known, with a reward for all that count in its baseline."""
    missing = table.counts_N & ~np.isfinite(table.reward_N)
    return (table.group_N != UNKNOWN) & ~np.isin(table.group_N, table.group_N[missing])


def _follow(result: _Explained, table: SampleTable, told: np.ndarray) -> bool:
    """Notes the rules that all advantages that are `told` follow; False where there is none."""
    assert table.advantage_N is not None
    advantages = table.advantage_N[told]
    if _follow_rule(result, table, advantages, told, ""):
        return True
    found = list(_weighted(table, told))
    for which, step in _given(table):
        if not found:
            found = [
                (name + which, scope) for name, scope in _with_intercept(advantages, step, told)
            ]
    if found:
        result.rules.extend(name for name, _ in found)
        result.scopes.update(found)
        return True
    how = _follow_normalized(table, told)
    if how is None:
        return False
    told = told & np.isfinite(table.normalized_N)
    return _follow_rule(result, table, table.normalized_N[told], told, how)


def _follow_rule(
    result: _Explained, table: SampleTable, values: np.ndarray, told: np.ndarray, how: str
) -> bool:
    for which, step in _given(table):
        for prediction in [*group_predictions(step), *batch_predictions(step)]:
            share, name = _fit(values, prediction, told)
            if share == 1.0:
                result.scopes.setdefault(name + which + how, prediction.scope)
        if result.scopes:
            # a factor of 1 is nearer than another one, which the group's size may explain too
            result.rules.extend(sorted(result.scopes, key=lambda one: "times" in one))
            return True
    return False


def _follow_normalized(table: SampleTable, told: np.ndarray) -> str | None:
    """How the advantages follow the normalized rewards that the trainer was given: "" as they are,
    or the words for whitened. None where they do not.
    """
    assert table.advantage_N is not None
    told = told & np.isfinite(table.normalized_N)
    advantages, given = table.advantage_N[told], table.normalized_N[told]
    if told.sum() < 2 * FEWEST or len(np.unique(given)) < 2:
        return None
    a, b = fitted_line(advantages, given)
    if a <= 0 or not matches(advantages, a * given + b).all():
        return None
    return "" if abs(a - 1) < 1e-2 and abs(b) < 1e-2 else ", whitened over the batch's tokens"


def _given(table: SampleTable) -> Iterator[tuple[str, Step]]:
    """(what to add to a rule's name, rewards and groups) for each reward that may be meant."""
    groups = np.where(table.group_N == UNKNOWN, -2 - np.arange(len(table)), table.group_N)
    rewards = [("", table.reward_N)]
    rewards += [(f" of {name}", values) for name, values in table.reward_parts.items()]
    for which, values in rewards[:16]:
        if np.isfinite(values).sum() < 2:
            continue
        yield which, Step(values, groups, table.execution_N, table.counts_N)
        missing = table.counts_N & ~np.isfinite(values)
        if missing.any() and not which:  # some take 0 for a reward that is missing
            filled = np.where(missing, 0.0, values)
            yield which, Step(filled, groups, table.execution_N, table.counts_N)
        if not table.counts_N.all() and not which:
            yield (
                " over rejected samples too",
                Step(values, groups, table.execution_N, np.ones(len(table), dtype=bool)),
            )


def _fit(advantages: np.ndarray, prediction: Prediction, told: np.ndarray) -> tuple[float, str]:
    """(share of samples that follow a rule, its name with the factor where it is not 1)."""
    predicted = np.nan_to_num(prediction.values[told], nan=np.inf)
    exact = float(matches(advantages, predicted).mean())
    if exact == 1.0:
        return exact, prediction.name
    finite = np.isfinite(predicted)
    factor = fitted_factor(advantages[finite], predicted[finite])
    if factor == 0.0 or not np.isfinite(factor) or not finite.all():
        return exact, prediction.name
    scaled = float(matches(advantages, factor * predicted).mean())
    if scaled <= exact:
        return exact, prediction.name
    return scaled, f"{prediction.name}, times {factor:.3g}"


def _weighted(table: SampleTable, told: np.ndarray) -> Iterator[tuple[str, str]]:
    """(name, scope) of rules that a weighted sum of several rewards follows."""
    assert table.advantage_N is not None
    names = list(table.reward_parts)
    if not 2 <= len(names) <= MOST_PARTS or told.sum() < 4 * len(names) or not told.all():
        return
    parts = np.stack([table.reward_parts[name] for name in names], axis=1)
    if not np.isfinite(parts).all() or not table.has_groups:
        return
    weights = fitted_weights(table.advantage_N, parts, table.group_N)
    which, step = next(_given(table))
    for sign in (1.0, -1.0):
        moved = dataclasses.replace(step, rewards=parts @ (sign * weights))
        terms = " + ".join(
            f"{weight:.3g} x {name}" for weight, name in zip(sign * weights, names, strict=True)
        )
        for prediction in group_predictions(moved):
            share, name = _fit(table.advantage_N, prediction, told)
            if share == 1.0 and ", times -" not in name:
                # how large the sum is, its group's std takes out again
                yield f"{name.split(', times')[0]} of {terms}", prediction.scope
                return


def _with_intercept(
    advantages: np.ndarray, step: Step, told: np.ndarray
) -> Iterator[tuple[str, str]]:
    """(name, scope) of rules that are a line of a baseline: whitened with means over tokens."""
    lines = {
        "group mean, whitened over the batch's tokens (REINFORCE++ baseline)": (
            "group",
            next(p.values for p in group_predictions(step) if p.name.startswith("Dr. GRPO"))[told],
        ),
        "whitened over the batch's tokens (REINFORCE++)": ("batch", step.rewards[told]),
    }
    for name, (scope, x) in lines.items():
        if not np.isfinite(x).all() or len(np.unique(x)) < 2 or len(x) < 2 * FEWEST:
            continue
        a, b = fitted_line(advantages, x)
        if a > 0 and matches(advantages, a * x + b).all():
            yield name, scope


def _name_fault(
    result: _Explained,
    table: SampleTable,
    told: np.ndarray,
    other: tuple[str, np.ndarray] | None,
) -> None:
    """Names what breaks the nearest rule; `other` is what `_other_order` found."""
    assert table.advantage_N is not None
    advantages = table.advantage_N
    fits = [
        (*_fit(advantages[told], prediction, told), which, prediction.values)
        for which, step in _given(table)
        for prediction in [*group_predictions(step), *batch_predictions(step)]
    ]
    share, name, which, predicted = max(fits, key=lambda one: one[0])
    result.best = f"{name}{which} ({share:.0%} of the samples)"
    wrong = np.zeros(len(table), dtype=bool)
    scaled = predicted
    if ", times " in name:
        scaled = predicted * fitted_factor(advantages[told], predicted[told])
    wrong[told] = ~matches(advantages[told], scaled[told])
    result.outliers = int(wrong.sum())
    if other is not None:
        result.fault, result.detail = "misattributed_baseline", other[0]
    elif share >= MOSTLY:
        result.fault, result.best = "advantage_outliers", name + which
    else:
        result.fault = "unknown_advantages"
    for i in np.flatnonzero(wrong)[:SHOWN_OUTLIERS].tolist():
        note = (
            f"advantage {advantages[i]:.4g}, its group's rewards give {scaled[i]:.4g} "
            f"(reward {table.reward_N[i]:.4g})"
        )
        if other is not None:
            note += f"; the other assignment gives {other[1][i]:.4g}"
        result.evidence.append(evidence_of(table, i, note=note))


def _other_order(table: SampleTable, told: np.ndarray) -> tuple[str, np.ndarray] | None:
    """(sentence, advantages [N]) of an assignment of rewards to samples that is wrong and
    explains the step.
    """
    assert table.advantage_N is not None
    advantages = table.advantage_N[told]
    which, step = next(_given(table))
    if not told.all() or not np.isfinite(step.rewards).all() or len(table) > MOST_REORDERED:
        return None
    own = list(group_predictions(step))
    sizes = np.bincount(np.unique(step.groups, return_inverse=True)[1])
    usual = int(np.bincount(sizes).argmax())
    for name, grouping in block_groupings(len(table), step.groups, usual):
        moved = dataclasses.replace(step, groups=grouping)
        for prediction in group_predictions(moved, epsilons=()):
            if matches(advantages, prediction.values).all():
                return (
                    f"Advantages follow {prediction.name} over {name}, which are not the groups",
                    prediction.values,
                )
    for order in orders(len(table), usual, _keys(table)):
        found = _in_order(advantages, order, step, own)
        if found is not None:
            return found
    for prediction in own:
        if matches(np.sort(advantages), np.sort(prediction.values)).all():
            moved_count = int((~matches(advantages, prediction.values)).sum())
            return (
                f"Advantages are those of {prediction.name} in an unknown order: {moved_count} of "
                f"{len(table)} stand at other samples",
                prediction.values,
            )
    return None


def _in_order(
    advantages: np.ndarray, order: Order, step: Step, own: list[Prediction]
) -> tuple[str, np.ndarray] | None:
    for prediction in own:
        if matches(advantages, prediction.values[order.places]).all():
            return (
                f"Advantages are those of {prediction.name} of other samples: {order.name}",
                prediction.values[order.places],
            )
    moved = dataclasses.replace(step, rewards=step.rewards[order.places])
    for prediction in group_predictions(moved, epsilons=()):
        if matches(advantages, prediction.values).all():
            return (
                f"Advantages follow {prediction.name} of other samples' rewards: {order.name}",
                prediction.values,
            )
    return None


def _keys(table: SampleTable) -> dict[str, np.ndarray]:
    keys = {"index": table.index_N, "length": table.response_length_N}
    if (table.response_length_N == UNKNOWN).all():
        keys["length"] = table.text_lengths()
    if table.order_N is not None:
        rank = np.empty(len(table), dtype=np.int64)
        rank[table.order_N] = np.arange(len(table))
        keys["rank"] = rank
    return keys
