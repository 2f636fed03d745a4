"""Curves as plain values for the page's charts, and small pictures (SVG) that need no script."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from slime.data.ledger import NOT_TRAINED
from slime.data.ledger import PREFIX as LEDGER
from slime.harness.run_records import RunRecords, eval_sets, is_not_finite
from slime.view.run_data import Snapshot

MOST_POINTS = 4000  # of one curve
MOST_STACKED = 12


@dataclasses.dataclass(frozen=True)
class Chart:
    """One chart: metric names by label. `prefix`: every metric below it, one curve each."""

    title: str
    unit: str
    curves: Mapping[str, str] = dataclasses.field(default_factory=dict)
    prefix: str = ""
    is_log: bool = False
    is_stacked: bool = False
    axis: str = "rollout"


CHARTS = (
    Chart("reward", "", {
        "all sampled": "rollout/reward/mean", "kept": "rollout/reward/mean_kept",
        "raw, in the batch": "rollout/raw_reward",
    }),
    Chart("evaluation", "", prefix="eval/"),
    Chart("pass@k", "share", prefix="passrate/"),
    Chart("response length", "tokens", {
        "mean": "gate/length/mean", "p50": "gate/length/p50", "p90": "gate/length/p90",
        "p99": "gate/length/p99", "max": "gate/length/max",
    }),
    Chart("gate: reasons", "share", prefix="gate/ratio/", is_stacked=True),
    Chart("samples: where they went", "share", prefix=LEDGER, is_stacked=True),
    Chart("trainer - engine log-prob", "nats", {
        "mean |gap|": "rollout/logprob_abs_diff/mean", "p99": "rollout/logprob_abs_diff/p99",
        "max": "rollout/logprob_abs_diff/max",
    }, is_log=True),
    Chart("truncated, repeating", "share", {
        "truncated": "rollout/truncated_ratio", "repeating": "rollout/repetition_frac",
        "groups without spread": "rollout/zero_std/frac",
    }),
    Chart("texts that are not their tokens", "share", {
        "alignment failures": "gate/alignment/failure_rate",
    }),
    Chart("staleness of samples", "weight updates", {
        "mean": "rollout/staleness/mean", "max": "rollout/staleness/max",
    }),
    Chart("schedule", "ratio", {
        "fill of micro-batches": "schedule/fill",
        "largest / mean work of a rank": "schedule/work_max_over_mean",
    }),
    Chart("time of a rollout", "seconds", {
        "generate": "perf/rollout_time", "log-probs": "perf/log_probs_time",
        "train": "perf/actor_train_time", "publish weights": "perf/update_weights_time",
    }, is_stacked=True),
    Chart("speed", "tokens/s", {
        "training": "perf/actor_train_tok_per_s", "rollout, per device": "perf/tokens_per_gpu_per_sec",
    }),
    Chart("loss", "", {"loss": "train/loss", "policy": "train/pg_loss"}, axis="train"),
    Chart("KL", "nats", {
        "to the reference": "train/kl_loss", "to the sampling policy": "train/ppo_kl",
    }, is_log=True, axis="train"),
    Chart("entropy", "nats", {"entropy": "train/entropy_loss"}, axis="train"),
    Chart("gradient norm", "", {"gradient norm": "train/grad_norm"}, is_log=True, axis="train"),
    Chart("clipped", "share", {"clip fraction": "train/pg_clipfrac"}, axis="train"),
    Chart("learning rate", "", prefix="train/lr-", axis="train"),
)  # fmt: skip


def chart_data(
    runs: Sequence[tuple[str, Snapshot]], *, only: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """The charts that some run has a point for. `runs`: (name, run)."""
    found = []
    for chart in CHARTS:
        if only and chart.title not in only:
            continue
        # stacked shares of several runs cannot be laid over each other: the first is shown
        shown = runs[:1] if chart.is_stacked else runs
        series = [
            {"run": number, "label": label, **points}
            for number, (_, run) in enumerate(shown)
            for label, points in _curves(chart, run).items()
        ]
        if not series:
            continue
        marks = [
            {"run": number, "step": one.step, "kind": one.kind, "text": one.text}
            for number, (_, run) in enumerate(shown)
            for one in run.marks
            if one.axis == chart.axis and one.kind != "not finite"  # its curve has those
        ]
        found.append(
            {
                "title": chart.title,
                "unit": chart.unit,
                "axis": chart.axis,
                "log": chart.is_log,
                "stacked": chart.is_stacked,
                "series": series,
                "marks": marks[:2000],
            }
        )
    return found


def _curves(chart: Chart, run: Snapshot) -> dict[str, dict[str, Any]]:
    records = run.records
    names = dict(chart.curves)
    if chart.prefix == "eval/":
        names = {name: f"eval/{name}" for name in eval_sets(records)}
    elif chart.prefix == LEDGER:
        return _ledger(records)
    elif chart.prefix:
        names = {
            name.removeprefix(chart.prefix): name
            for name in sorted(records.series)
            if name.startswith(chart.prefix)
        }
    found = {}
    for label, name in names.items():
        points = _points(records.series.get(name, {}))
        if points["x"] or points["bad"]:
            found[label] = points
    if chart.is_stacked:
        found = {label: one for label, one in found.items() if any(one["y"])}
        largest = sorted(found, key=lambda label: -sum(y or 0 for y in found[label]["y"]))
        found = {label: found[label] for label in largest[:MOST_STACKED]}
    return found


def _ledger(records: RunRecords) -> dict[str, dict[str, Any]]:
    """Shares of the sampled ones: trained, and every reason for not being."""
    sampled = dict(zip(*records.numbers(LEDGER + "sampled"), strict=True))
    names = {"trained": LEDGER + "trained"}
    for name in sorted(records.series):
        for prefix in (LEDGER + "dropped/", NOT_TRAINED):
            if name.startswith(prefix):
                names[name.removeprefix(prefix)] = name
    found = {}
    for label, name in names.items():
        steps, values = records.numbers(name)
        pairs = [(s, v / sampled[s]) for s, v in zip(steps, values, strict=True) if sampled.get(s)]
        if any(value for _, value in pairs):
            found[label] = _points(dict(pairs))
    return dict(list(found.items())[:MOST_STACKED])


def _points(points: Mapping[int, Any]) -> dict[str, Any]:
    """{"x": steps, "y": values, "bad": [step, what it is] of numbers that are not finite}."""
    steps, values, bad = [], [], []
    for step, value in sorted(points.items()):
        if is_not_finite(value):
            bad.append([step, {"nan": "NaN"}.get(value, value)])
        elif isinstance(value, bool | int | float):
            steps.append(step)
            values.append(float(f"{float(value):.6g}"))
    return {**_thinned(steps, values), "bad": bad}


def _thinned(steps: list[int], values: list[float]) -> dict[str, list[Any]]:
    """At most MOST_POINTS: of each stretch the smallest and the largest value."""
    if len(steps) <= MOST_POINTS:
        return {"x": steps, "y": values}
    kept: list[int] = []
    for part in np.array_split(np.arange(len(steps)), MOST_POINTS // 2):
        own = [values[i] for i in part]
        ends = {int(part[int(np.argmin(own))]), int(part[int(np.argmax(own))])}
        kept += sorted(ends)
    return {"x": [steps[i] for i in kept], "y": [values[i] for i in kept]}


@dataclasses.dataclass(frozen=True)
class Spark:
    """A small curve. path: of an SVG of WIDTH x HEIGHT; dots: (x, y) of numbers that were not
    finite.
    """

    WIDTH = 120
    HEIGHT = 24
    path: str
    bad: list[float]
    first: str
    last: str


def spark(records: RunRecords, name: str | None) -> Spark | None:
    """The curve of a metric, None where it has no point."""
    if name is None:
        return None
    thin = _points(records.series.get(name, {}))
    steps, values = thin["x"], thin["y"]
    bad = [step for step, _ in thin["bad"]]
    if not steps and not bad:
        return None
    every = [*steps, *bad]
    low, high = min(every), max(every)
    across = (Spark.WIDTH - 4) / max(1, high - low)
    path = ""
    if steps:
        bottom, top = min(values), max(values)
        up = (Spark.HEIGHT - 6) / ((top - bottom) or 1)
        stride = max(1, len(steps) // 240)
        points = list(zip(steps, values, strict=True))
        shown = points[::stride]
        if shown[-1] != points[-1]:
            shown.append(points[-1])
        path = "M" + " L".join(
            f"{2 + (x - low) * across:.1f},{Spark.HEIGHT - 3 - (y - bottom) * up:.1f}"
            for x, y in shown
        )
    ends = records.ends(name)
    first, last = (number_text(records.series[name][step]) for step in ends)
    return Spark(path, [2 + (x - low) * across for x in bad][:60], first, last)


def number_text(value: object) -> str:
    """A number as tables show it: four digits, NaN and infinities as what they are."""
    if value is None:
        return ""
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return str(value)
    if math.isnan(number):
        return "NaN"
    if math.isinf(number):
        return "inf" if number > 0 else "-inf"
    if number == int(number) and abs(number) < 1e15:
        return f"{int(number):,}"
    return f"{number:.4g}"


@dataclasses.dataclass(frozen=True)
class Histogram:
    """Counts of a column. bars: (low, high, count, count of the chosen rows)."""

    name: str
    unit: str
    bars: list[tuple[str, str, int, int]]
    most: int
    missing: int
    not_finite: int


def histogram(
    name: str, unit: str, values: np.ndarray, chosen: np.ndarray, *, num_bars: int = 24
) -> Histogram | None:
    """The histogram of a column [N], with the rows that a filter chose; None where all is missing."""
    known = np.isfinite(values)
    if not known.any():
        return None
    own = values[known]
    distinct = np.unique(own)
    if len(distinct) <= 12:
        bars = [
            (
                number_text(v),
                number_text(v),
                int((values == v).sum()),
                int((values[chosen] == v).sum()),
            )
            for v in distinct
        ]
    else:
        count, edges = np.histogram(own, bins=num_bars)
        inside, _ = np.histogram(values[chosen & known], bins=edges)
        bars = [
            (number_text(edges[i]), number_text(edges[i + 1]), int(count[i]), int(inside[i]))
            for i in range(num_bars)
        ]
    return Histogram(
        name,
        unit,
        bars,
        max(one[2] for one in bars),
        int(np.isnan(values).sum()),
        int(np.isinf(values).sum()),
    )
