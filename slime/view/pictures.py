"""A chart as a picture (SVG) that needs no script: for a report in one file."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from slime.view.charts import number_text

WIDTH, HEIGHT = 420, 170
LEFT, RIGHT, TOP, BOTTOM = 54, 8, 8, 24
COLOURS = 8


@dataclasses.dataclass(frozen=True)
class Line:
    """One curve. path: of the SVG; area: what it fills, "" for none."""

    label: str
    colour: int
    path: str
    area: str
    last: str


@dataclasses.dataclass(frozen=True)
class Picture:
    """A chart. ticks: (place, text); bad: (x, what) of values that are not finite; marks: (x, kind,
    text).
    """

    title: str
    unit: str
    axis: str
    lines: list[Line]
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    bad: list[tuple[float, str]]
    marks: list[tuple[float, str, str]]


def picture(chart: Mapping[str, Any]) -> Picture:
    """The picture of one of `chart_data`."""
    series = chart["series"]
    steps = [x for one in series for x in (*one["x"], *(step for step, _ in one["bad"]))]
    steps += [one["step"] for one in chart["marks"]]
    low, high = min(steps, default=0), max(steps, default=1)
    across = (WIDTH - LEFT - RIGHT) / max(1, high - low)

    def x_of(step: float) -> float:
        return round(LEFT + (step - low) * across, 1)

    stacked = _stacked(series) if chart["stacked"] else None
    values = [[*one["y"]] for one in series] if stacked is None else [top for _, _, top in stacked]
    scale = _Scale([v for one in values for v in one], chart["log"], from_zero=chart["stacked"])
    lines = []
    for number, one in enumerate(series):
        if stacked is None:
            points = [(x_of(x), scale.place(y)) for x, y in zip(one["x"], one["y"], strict=True)]
            area = ""
        else:
            xs, bottom, top = stacked[number]
            points = [(x_of(x), scale.place(y)) for x, y in zip(xs, top, strict=True)]
            below = [(x_of(x), scale.place(y)) for x, y in zip(xs, bottom, strict=True)]
            area = _path([*points, *reversed(below)]) + "Z" if points else ""
        bad = one["bad"]
        ends_bad = bool(bad) and (not one["x"] or bad[-1][0] >= one["x"][-1])
        last = bad[-1][1] if ends_bad else number_text(one["y"][-1] if one["y"] else None)
        lines.append(Line(one["label"], number % COLOURS, _path(points), area, str(last)))
    return Picture(
        chart["title"],
        chart["unit"],
        "optimizer step" if chart["axis"] == "train" else "rollout",
        lines,
        [(x_of(step), number_text(step)) for step in _round_numbers(low, high, whole=True)],
        scale.ticks(),
        [(x_of(step), f"{one['label']} is {what}, {step}") for one in series for step, what in one["bad"]],
        [(x_of(one["step"]), one["kind"], f"{one['step']}: {one['text']}") for one in chart["marks"]],
    )  # fmt: skip


def _path(points: Sequence[tuple[float, float | None]]) -> str:
    shown = [f"{x},{y:.1f}" for x, y in points if y is not None]
    if len(shown) == 1:  # one point is a dot
        shown.append(shown[0])
    return "M" + " L".join(shown) if shown else ""


def _stacked(
    series: Sequence[Mapping[str, Any]],
) -> list[tuple[list[int], list[float], list[float]]]:
    """(steps, lower edge, upper edge) of each curve on top of those before."""
    steps = sorted({x for one in series for x in one["x"]})
    below = dict.fromkeys(steps, 0.0)
    found = []
    for one in series:
        own = dict(zip(one["x"], one["y"], strict=True))
        top = {step: below[step] + own.get(step, 0.0) for step in steps}
        found.append((steps, [below[s] for s in steps], [top[s] for s in steps]))
        below = top
    return found


class _Scale:
    """From values to places on the vertical axis."""

    def __init__(self, values: Sequence[float], is_log: bool, *, from_zero: bool) -> None:
        self.is_log = is_log and any(value > 0 for value in values)
        known = [math.log10(v) for v in values if v > 0] if self.is_log else list(values)
        self.low, self.high = min(known, default=0.0), max(known, default=1.0)
        if from_zero:
            self.low = min(0.0, self.low)
        if self.high - self.low < 1e-12:
            self.low, self.high = self.low - 0.5, self.high + 0.5

    def place(self, value: float) -> float | None:
        """None: a logarithmic axis does not have it."""
        if self.is_log:
            if value <= 0:
                return None
            value = math.log10(value)
        share = (value - self.low) / (self.high - self.low)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    def ticks(self) -> list[tuple[float, str]]:
        found = []
        for value in _round_numbers(self.low, self.high, whole=self.is_log):
            shown = 10.0**value if self.is_log else value
            place = self.place(shown)
            if place is not None:
                found.append((round(place, 1), number_text(shown)))
        return found


def _round_numbers(low: float, high: float, *, whole: bool) -> list[float]:
    """Some round numbers between two."""
    rough = max((high - low) / 4, 1.0 if whole else 1e-12)
    power = 10 ** math.floor(math.log10(rough))
    step = next(n * power for n in (1, 2, 5, 10) if n * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [float(f"{n * step:.10g}") for n in range(first, last + 1)][:9]
