"""Series over steps: where one jumps, collapses, or is no number.

Everything is robust: medians and median absolute deviations, so that a single odd step is not a jump
and noise sets its own threshold.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from slime.harness.audit.findings import Evidence, Finding, Level, finding, plural
from slime.harness.audit.table import SampleTable
from slime.harness.run_records import RunRecords

WINDOW = 5  # steps on either side that a jump is read from
FEWEST = 2 * WINDOW
NOISE = 8.0  # times the noise that a jump is
RELATIVE = 0.4  # of the level before, or of the series' range
TYPICAL = 4.0  # times the usual change over a window
TO_SIGMA = 1.4826  # of a median absolute deviation
FALL = 0.4  # of the best level that is lost in a collapse
# Of these a slow change is a fault too; a KL or a gradient norm may grow in a sound run.
COLLAPSING = frozenset({"reward", "truncated share", "rejected share", "log-prob gap"})


@dataclasses.dataclass(frozen=True)
class Series:
    """One number per step. label: the name without the run. bad: -1 where a fall is bad, 1 where a rise is, 0 where both are."""

    name: str
    label: str
    steps: list[int]
    values: list[float]
    bad: int


# metrics.jsonl: the part of a name that says what it is, and which direction is bad
METRICS: tuple[tuple[tuple[str, ...], str, int], ...] = (
    (("rollout/reward/mean", "rollout/raw_reward", "rollout/rewards"), "reward", -1),
    (("rollout/response_lengths", "rollout/response_len/mean"), "response length", 0),
    (("rollout/truncated", "rollout/truncated_ratio"), "truncated share", 1),
    (("gate/rate/invalid", "gate/drop_rate"), "rejected share", 1),
    (("train/entropy_loss", "rollout/entropy", "train/entropy"), "entropy", 0),
    (("train/kl_loss", "train/ppo_kl", "rollout/kl"), "KL", 1),
    (("train/grad_norm",), "grad norm", 1),
    (("rollout/logprob_abs_diff/mean", "train/train_rollout_logprob_abs_diff"), "log-prob gap", 1),
)  # fmt: skip


class SeriesFindings:
    """Series of the tables of all steps, and of metrics files."""

    def __init__(self) -> None:
        self._points: dict[tuple[str, str], dict[int, float]] = collections.defaultdict(dict)
        self._bad: list[tuple[str, list[int], int]] = []

    def look(self, table: SampleTable) -> None:
        if table.is_evaluation:
            return
        values = {
            "reward": _mean(table.reward_N[np.isfinite(table.reward_N)]),
            "response length": _length(table),
            "truncated share": _mean((table.cut_N[table.cut_N >= 0] == 1).astype(float)),
            "rejected share": _mean((~table.counts_N).astype(float)),
        }
        if table.rollout_log_probs is not None and len(table.rollout_log_probs.values):
            used = table.rollout_log_probs.values
            # of sampled tokens, - log p has the entropy as its mean
            values["surprise (-log p of sampled tokens)"] = -_mean(used[np.isfinite(used)])
        for name, value in values.items():
            if np.isfinite(value):
                self._points[table.run, name][table.step] = value

    def look_at_metrics(self, file: str, run: RunRecords) -> None:
        """Takes the metrics of a run."""
        for names, label, _ in METRICS:
            name = run.first_of(names)
            if name is not None:
                steps, values = run.numbers(name)
                for step, value in zip(steps, values, strict=True):
                    self._points[file, label][step] = value
        for name in sorted(run.series):
            if not_finite := run.not_finite(name):
                self._bad.append((name, not_finite, len(run.series[name])))

    def series(self) -> list[Series]:
        """Every series, in the order in which it was met."""
        directions = {label: bad for _, label, bad in METRICS}
        runs = {run for run, _ in self._points}
        return [
            Series(
                f"{name} ({run})" if len(runs) > 1 else name,
                name,
                sorted(points),
                [points[step] for step in sorted(points)],
                directions.get(name, 0),
            )
            for (run, name), points in self._points.items()
        ]

    def findings(self) -> Iterator[Finding]:
        if self._bad:
            name, steps, total = self._bad[0]
            more = f" and {len(self._bad) - 1} more metrics" if len(self._bad) > 1 else ""
            yield finding(
                "metric_not_finite",
                Level.ERROR,
                f"{name}{more} {'were' if more else 'was'} no number, first at step {steps[0]} "
                f"({len(steps)} of {plural(total, 'record')}).",
                [Evidence(f"step {at[0]}", note=metric) for metric, at, _ in self._bad],
            )
        for series in self.series():
            if len(series.values) >= FEWEST:
                found = _collapse(series) or _jump(series)
                if found is not None:
                    yield found


def _mean(values: np.ndarray) -> float:
    return float(values.mean(dtype=np.float64)) if len(values) else float("nan")


def _length(table: SampleTable) -> float:
    known = table.response_length_N >= 0
    return _mean(table.response_length_N[known] if known.any() else table.text_lengths())


def _windows(values: np.ndarray) -> np.ndarray:
    """[n - 2 W + 1] median of the W values from each place on minus that of the W before it."""
    medians = np.median(np.lib.stride_tricks.sliding_window_view(values, WINDOW), axis=1)
    return medians[WINDOW:] - medians[:-WINDOW]


def _noise(values: np.ndarray) -> float:
    """The standard deviation of the noise around the local level."""
    middle = np.median(np.lib.stride_tricks.sliding_window_view(values, WINDOW), axis=1)
    apart = np.abs(values[WINDOW // 2 : WINDOW // 2 + len(middle)] - middle)
    # of a series that is mostly one value the median says nothing
    return max(TO_SIGMA * float(np.median(apart)), float(apart.mean()))


def _jump(series: Series) -> Finding | None:
    values = np.array(series.values)
    changes = _windows(values)
    at = int(np.argmax(np.abs(changes)))
    change = float(changes[at])
    place = at + WINDOW
    # within the window the change of level is where neighbours differ most
    near = np.arange(max(1, place - 2), min(len(values), place + 3))
    place = int(near[np.argmax(np.sign(change) * (values[near] - values[near - 1]))])
    before = float(np.median(values[max(0, place - WINDOW) : place]))
    after = float(np.median(values[place : place + WINDOW]))
    noise, usual = _noise(values), float(np.median(np.abs(changes)))
    is_jump = (
        abs(change) > NOISE * noise
        and abs(change) > TYPICAL * usual
        and abs(change) > RELATIVE * max(abs(before), abs(after), 1e-9)
        # one step makes most of it: a slope is no jump
        and abs(values[place] - values[place - 1]) > 0.5 * abs(change)
    )
    if not is_jump:
        return None
    is_bad = series.bad == 0 or np.sign(change) == series.bad
    step = series.steps[place]
    return finding(
        "jump",
        Level.WARNING if is_bad else Level.INFO,
        f"{series.name} jumped from {before:.3g} to {after:.3g} at step {step}.",
        [_evidence(series, place)],
    )


def _collapse(series: Series) -> Finding | None:
    """A fall of what should be high, or a rise of what should be low, that did not come back."""
    if series.label not in COLLAPSING:
        return None
    values = -series.bad * np.array(series.values)  # now a fall is bad
    level = np.median(np.lib.stride_tricks.sliding_window_view(values, WINDOW), axis=1)
    best = int(np.argmax(level))
    rest = level[best:]
    lost = float(level[best] - level[-1])
    scale = abs(level[best]) if series.bad < 0 else max(abs(level[best]), abs(level[-1]))
    is_collapse = (
        len(rest) > WINDOW
        and lost > FALL * max(scale, 1e-9)
        and lost > NOISE * max(_noise(values), 1e-12)
        and level[-1] - rest.min() < 0.2 * lost  # it did not come back
        and _falls(rest)
    )
    if not is_collapse:
        return None
    # the last place at which most of the best level was still there
    held = int(np.flatnonzero(level >= level[best] - 0.15 * lost)[-1])
    place = min(held + WINDOW // 2 + 1, len(values) - 1)
    word = "fell" if series.bad < 0 else "rose"
    high, low = (-series.bad * float(one) for one in (level[best], level[-1]))
    return finding(
        "collapse",
        Level.WARNING,
        f"{series.name} {word} from {high:.3g} to {low:.3g}, from step {series.steps[place]} on.",
        [_evidence(series, place)],
    )


def _falls(level: Sequence[float] | np.ndarray) -> bool:
    """Whether most pairs of places, the earlier and the later, fall (Kendall's tau)."""
    values = np.asarray(level)[:: max(1, len(level) // 200)]
    signs = np.sign(values[None, :] - values[:, None])[np.triu_indices(len(values), 1)]
    return float(signs.mean()) < -0.4


def _evidence(series: Series, place: int) -> Evidence:
    around = range(max(0, place - 3), min(len(series.values), place + 4))
    note = ", ".join(f"{series.steps[i]}: {series.values[i]:.4g}" for i in around)
    return Evidence(f"step {series.steps[place]}", note=note)
