"""Rollout log-probs beside the trainer's: what is no log-prob, and which known pattern a gap between
the two has.

Shifts, and what counts as unsampled, are those of slime.metrics.consistency, as in training. d = trainer - rollout, in
nats, over trained tokens.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator

import numpy as np

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
from slime.harness.audit.table import SampleTable
from slime.metrics.consistency import (
    CLEARLY_UNLIKELY,
    SHIFT_TOKENS,
    shift_contributions,
    shifted_by,
)
from slime.metrics.consistency_alarms import UNSAMPLED_ALARM, ConsistencyLimits
from slime.metrics.contributions import merge_all

TOLERANCE = 1e-4  # above 0 that rounding explains
SMALL_GAP = 0.02  # nats a token: below it a pattern is not looked for
STEEPER, ALIKE = 1.06, 0.9  # slope and correlation that another temperature has at least
EVERYWHERE = 0.5  # share of tokens with a gap of their own, for other weights
ONE_SIDED = 0.95
MANY = 200_000  # tokens of a step that patterns are looked for in


@dataclasses.dataclass(frozen=True)
class Gap:
    """The gap of one step. mean, masked_mean: of |d| over trained and over masked tokens. slope: of
    rollout over trainer log-probs. everywhere: share of tokens with |d| > SMALL_GAP / 2.
    """

    where: str
    pattern: str
    mean: float
    slope: float = 1.0
    shift: int = 0
    everywhere: float = 0.0
    one_sided: float = 0.0


class LogProbFindings:
    """Log-probs of all steps."""

    def __init__(self) -> None:
        self._values: collections.Counter[str] = collections.Counter()
        self._samples: collections.Counter[str] = collections.Counter()
        self._trained: collections.Counter[str] = collections.Counter()
        self._total = 0
        self._evidence: dict[str, list[Evidence]] = collections.defaultdict(list)
        self._gaps: list[Gap] = []
        self._unsampled: list[tuple[str, float]] = []

    def look(self, table: SampleTable) -> None:
        self._total += len(table)
        for name in ("rollout_log_probs", "log_probs"):
            self._look_at_values(table, name)
        if table.rollout_log_probs is not None and table.log_probs is not None:
            rows = _comparable(table)
            if len(rows):
                self._compare(table, rows)

    def _look_at_values(self, table: SampleTable, name: str) -> None:
        column = getattr(table, name)
        if column is None or not len(column.values):
            return
        for kind, wrong in (
            ("log_prob_not_finite", ~np.isfinite(column.values)),
            ("positive_log_prob", column.values > TOLERANCE),
        ):
            if not wrong.any():
                continue
            self._values[kind] += int(wrong.sum())
            places = np.flatnonzero(wrong)
            samples = np.searchsorted(column.offsets, places, side="right") - 1
            self._trained[kind] += int(table.counts_N[samples].sum())
            rows, first = np.unique(samples, return_index=True)
            self._samples[kind] += len(rows)
            for i, at in zip(rows[:20].tolist(), places[first[:20]].tolist(), strict=True):
                note = f"{name} of response token {at - int(column.offsets[i])} is "
                self._add(kind, evidence_of(table, i, note=f"{note}{float(column.values[at]):g}"))

    def _add(self, kind: str, evidence: Evidence) -> None:
        if len(self._evidence[kind]) < KEPT:
            self._evidence[kind].append(evidence)

    def _compare(self, table: SampleTable, rows: np.ndarray) -> None:
        batch = _batch(table, rows)
        trainer, rollout, mask = (
            np.concatenate(batch[name]) for name in ("log_probs", "rollout_log_probs", "loss_masks")
        )
        finite = np.isfinite(trainer) & np.isfinite(rollout)
        # what nobody sampled has no log-prob to compare
        wrote = ~((rollout == 0) & (trainer < CLEARLY_UNLIKELY))
        unsampled = float((~wrote & (mask != 0)).sum() / max(1, int((mask != 0).sum())))
        if unsampled > UNSAMPLED_ALARM:
            self._unsampled.append((table.where, unsampled))
            self._show_unsampled(table, rows)
        trained, masked = finite & wrote & (mask != 0), finite & wrote & (mask == 0)
        if not trained.any():
            return
        d = np.abs(trainer - rollout)
        mean = float(d[trained].mean(dtype=np.float64))
        masked_mean = float(d[masked].mean(dtype=np.float64)) if masked.any() else 0.0
        limit = ConsistencyLimits().logprob_diff
        if mean < SMALL_GAP:
            at_masked = masked_mean > limit and masked.sum() >= 8
            pattern = "gap_at_masked_tokens" if at_masked else ""
            self._note(table, rows, Gap(table.where, pattern, masked_mean if pattern else mean))
            return
        shift = _shift_of(batch)
        where = np.flatnonzero(trained)[:MANY]
        gap = _pattern(trainer[where].astype(np.float64), rollout[where], table.where, limit)
        if shift is not None:
            gap = dataclasses.replace(gap, pattern="shifted_log_probs", shift=shift)
        self._note(table, rows, gap)

    def _note(self, table: SampleTable, rows: np.ndarray, gap: Gap) -> None:
        self._gaps.append(gap)
        if not gap.pattern or len(self._evidence[gap.pattern]) >= KEPT:
            return
        assert table.log_probs is not None and table.rollout_log_probs is not None
        with np.errstate(invalid="ignore"):
            means = [
                float(np.nanmean(np.abs(table.log_probs.row(i) - table.rollout_log_probs.row(i))))
                for i in rows[:512].tolist()
            ]
        for at in np.argsort(np.nan_to_num(-np.array(means)), kind="stable")[:3].tolist():
            note = f"mean |gap| {means[at]:.3g} nats a token"
            self._add(gap.pattern, evidence_of(table, int(rows[at]), note=note))

    def _show_unsampled(self, table: SampleTable, rows: np.ndarray) -> None:
        assert table.log_probs is not None and table.rollout_log_probs is not None
        for i in rows.tolist():
            trainer, rollout = table.log_probs.row(i), table.rollout_log_probs.row(i)
            bad = (rollout == 0) & (trainer < CLEARLY_UNLIKELY) & (_mask(table, i) != 0)
            if bad.any():
                at = int(np.argmax(bad))
                note = f"{int(bad.sum())} tokens, the first is response token {at}"
                self._add("trained_unsampled_tokens", evidence_of(table, i, note=note))

    def findings(self) -> Iterator[Finding]:
        words = {
            "log_prob_not_finite": "log-probs are NaN or infinite",
            "positive_log_prob": "log-probs are above 0",
        }
        for name, what in words.items():
            if not self._values[name]:
                continue
            text = (
                f"{self._values[name]} {what}, in {self._samples[name]} of "
                f"{plural(self._total, 'sample')}"
            )
            text += "" if self._trained[name] else "; all of these were rejected and do not train"
            yield finding(
                name,
                Level.ERROR if self._trained[name] else Level.INFO,
                text + ".",
                self._evidence[name],
                share=self._samples[name] / self._total,
            )
        if self._unsampled:
            share = max(share for _, share in self._unsampled)
            yield finding(
                "trained_unsampled_tokens",
                Level.ERROR,
                f"Up to {share:.2g} of a step's trained tokens have rollout log-prob exactly 0: nobody "
                f"sampled them ({plural(len(self._unsampled), 'step')}, first {self._unsampled[0][0]}).",
                self._evidence["trained_unsampled_tokens"],
                share=share,
            )
        for name, sentence in _PATTERNS.items():
            gaps = [gap for gap in self._gaps if gap.pattern == name]
            if gaps:
                level = Level.ERROR if name == "shifted_log_probs" else Level.WARNING
                share = len(gaps) / len(self._gaps)
                mean = float(np.mean([gap.mean for gap in gaps]))
                text = (
                    f"{sentence(gaps)}: mean |trainer - rollout| {mean:.3g} nats a token in "
                    f"{len(gaps)} of {plural(len(self._gaps), 'step')}, first {gaps[0].where}"
                )
                text += _trend(self._gaps) if name == "other_weights" else ""
                yield finding(name, level, text + ".", self._evidence[name], share=share)


def _shifted(gaps: list[Gap]) -> str:
    shift = gaps[0].shift
    return (
        f"The rollout's log-prob of token i{shift:+d} is the trainer's of token i: shifted by "
        f"{plural(abs(shift), 'token')}"
    )


def _temperature(gaps: list[Gap]) -> str:
    slope = float(np.median([gap.slope for gap in gaps]))
    which = ("steeper", "lower") if slope > 1 else ("flatter", "higher")
    return (
        f"Rollout log-probs are {which[0]} than the trainer's (slope {slope:.3g}): another "
        f"temperature, {which[1]} than the trainer's"
    )


def _weights(gaps: list[Gap]) -> str:
    share = float(np.mean([gap.everywhere for gap in gaps]))
    side = float(np.mean([gap.one_sided for gap in gaps]))
    text = f"Trainer and rollout disagree on {percent(share, 1)} of the tokens"
    if side >= ONE_SIDED:
        return text + ", always to the same side: renormalized over top-p or top-k, perhaps"
    return text + ", to both sides, as other weights do"


def _plain(gaps: list[Gap]) -> str:
    share = float(np.mean([gap.everywhere for gap in gaps]))
    return f"Trainer and rollout disagree on {percent(share, 1)} of the tokens"


def _masked(gaps: list[Gap]) -> str:
    return "Trainer and rollout disagree at masked tokens, and at these only"


_PATTERNS = {
    "shifted_log_probs": _shifted,
    "other_temperature": _temperature,
    "other_weights": _weights,
    "log_prob_gap": _plain,
    "gap_at_masked_tokens": _masked,
}


def _trend(gaps: list[Gap]) -> str:
    """What the gap does over the steps."""
    means = np.array([gap.mean for gap in gaps])
    if len(means) < 6:
        return ""
    third = len(means) // 3
    first, last = float(np.median(means[:third])), float(np.median(means[-third:]))
    if last > 1.5 * first:
        return f"; it grows from {first:.2g} to {last:.2g}"
    return ""


def _comparable(table: SampleTable) -> np.ndarray:
    """Positions of the samples with both log-probs, and a mask, of their response's length."""
    assert table.rollout_log_probs is not None and table.log_probs is not None
    rollout, trainer = table.rollout_log_probs.lengths, table.log_probs.lengths
    fits = (rollout == trainer) & (rollout > 0)
    if table.masks is not None:
        fits &= (table.masks.lengths == rollout) | (table.masks.lengths == 0)
    return np.flatnonzero(fits)


def _mask(table: SampleTable, i: int) -> np.ndarray:
    assert table.log_probs is not None
    length = int(table.log_probs.lengths[i])
    if table.masks is None or not table.masks.lengths[i]:
        return np.ones(length, dtype=np.uint8)
    return table.masks.row(i)


def _batch(table: SampleTable, rows: np.ndarray) -> dict:
    """What slime.metrics.consistency reads, of these samples."""
    assert table.rollout_log_probs is not None and table.log_probs is not None
    chosen = rows.tolist()
    return {
        "log_probs": [table.log_probs.row(i) for i in chosen],
        "rollout_log_probs": [table.rollout_log_probs.row(i) for i in chosen],
        "loss_masks": [_mask(table, i) for i in chosen],
        "response_lengths": table.log_probs.lengths[rows],
        "total_lengths": table.log_probs.lengths[rows] + 1,
    }


def _shift_of(batch: dict) -> int | None:
    """By how many tokens one column is moved against the other, of the step's first tokens."""
    lengths = np.asarray(batch["response_lengths"])
    few = int(np.searchsorted(np.cumsum(lengths), 4 * SHIFT_TOKENS)) + 1
    part = {name: values[:few] for name, values in batch.items()}
    return shifted_by(merge_all([shift_contributions(part)]))


def _pattern(trainer: np.ndarray, rollout: np.ndarray, where: str, limit: float) -> Gap:
    """The gap of one step, not shifted, with the pattern that explains it best."""
    d = trainer - rollout
    size = np.abs(d)
    mean = float(size.mean())
    everywhere = float((size > SMALL_GAP / 2).mean())
    told = d[size > 1e-6]
    one_sided = float(max((told > 0).mean(), (told < 0).mean())) if len(told) else 0.0
    slope = _slope(trainer, rollout)
    pattern = ""
    if slope != 1.0:
        pattern = "other_temperature"
    elif mean > limit:
        pattern = "other_weights" if everywhere > EVERYWHERE else "log_prob_gap"
    return Gap(where, pattern, mean, slope, 0, everywhere, one_sided)


def _slope(trainer: np.ndarray, rollout: np.ndarray) -> float:
    """How steep rollout log-probs are over the trainer's; 1.0 where noise may be all there is.

    Noise in one of two columns flattens the line that is fitted to it, and leaves the other at 1: of
    the lines of each column over the other, one that is steeper than 1 is no noise's doing. At
    temperature T below the trainer's the rollout's are the steeper ones, above it the trainer's.
    """
    a, b = trainer - trainer.mean(), rollout - rollout.mean()
    spread_a, spread_b, common = float((a * a).sum()), float((b * b).sum()), float((a * b).sum())
    if spread_a <= 1e-12 or spread_b <= 1e-12 or common <= ALIKE * np.sqrt(spread_a * spread_b):
        return 1.0
    rollout_over, trainer_over = common / spread_a, common / spread_b
    if max(rollout_over, trainer_over) < STEEPER:
        return 1.0
    return rollout_over if rollout_over > trainer_over else 1.0 / trainer_over
