"""report.png: six curves of a run, readable at the width of a README. No display is needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.files import atomic
from slime.harness.run_records import FAMILIES, RunRecords, eval_sets, read_ledgers

if TYPE_CHECKING:
    import matplotlib.axes

INK, GRID = "#2b2b2b", "#e3e3e3"
BLUE, ORANGE, GREEN, RED, GREY = "#2f6fb3", "#e0812b", "#3a9657", "#c2423f", "#9a9a9a"


def _panel(
    axes: matplotlib.axes.Axes,
    title: str,
    lines: Sequence[tuple[list[int], list[float], str, str]],
    *,
    unit: str = "",
    bottom: float | None = None,
    is_log: bool = False,
    bad: Sequence[int] = (),
) -> None:
    """Draws (steps, values, label, colour) lines; a short series gets markers so that one point is
    visible. `bad`: steps with a value that is not finite, which are marked at the top.
    """
    lines = [line for line in lines if line[0]]
    for steps, values, label, colour in lines:
        axes.plot(
            steps,
            values,
            label=label,
            color=colour,
            linewidth=2,
            marker="o" if len(steps) <= 15 else None,
            markersize=4,
        )
    axes.set_title(title, loc="left", fontsize=12, color=INK, fontweight="bold")
    axes.set_ylabel(unit, fontsize=10, color=INK)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=10, colors=INK)
    axes.locator_params(axis="x", integer=True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if is_log and any(value > 0 for _, values, _, _ in lines for value in values):
        axes.set_yscale("log")
    elif bottom is not None and lines:
        axes.set_ylim(bottom, 1.08 * max(max(values) for _, values, _, _ in lines) or 1)
    if bad:
        top = axes.get_xaxis_transform()
        axes.plot(
            list(bad),
            [0.97] * len(bad),
            transform=top,
            marker="v",
            linestyle="none",
            color=RED,
            markersize=6,
            label=f"not finite ({len(bad)})",
        )
    if len(lines) > 1 or bad:
        axes.legend(fontsize=9, frameon=False, loc="best")
    if not lines and not bad:
        axes.text(
            0.5,
            0.5,
            "not logged",
            transform=axes.transAxes,
            ha="center",
            va="center",
            color=GREY,
            fontsize=11,
        )
        axes.set_xticks([])
        axes.set_yticks([])


def _series(
    run: RunRecords, label: str, colour: str, *, shown: str | None = None
) -> tuple[list[int], list[float], str, str]:
    name = run.first_of(FAMILIES[label])
    steps, values = run.numbers(name) if name else ([], [])
    return steps, values, shown or label, colour


def _bad(run: RunRecords, *labels: str) -> list[int]:
    """The steps at which a metric of these labels was not finite."""
    names = [run.first_of(FAMILIES[label]) for label in labels]
    return sorted({step for name in names if name for step in run.not_finite(name)})


def _rewards(run: RunRecords) -> list[tuple[list[int], list[float], str, str]]:
    """Reward of everything sampled, that of what the gate kept, and pass rate; curves that are one
    are drawn once.
    """
    lines: list[tuple[list[int], list[float], str, str]] = []
    for label, colour in (("reward", BLUE), ("reward kept", GREEN), ("pass rate", ORANGE)):
        line = _series(run, label, colour)
        if line[:2] not in [drawn[:2] for drawn in lines]:
            lines.append(line)
    return lines


def _positive(
    line: tuple[list[int], list[float], str, str],
) -> tuple[list[int], list[float], str, str]:
    """Absolute values, without the zeros that a logarithmic axis cannot hold."""
    steps, values, label, colour = line
    points = [(step, abs(value)) for step, value in zip(steps, values, strict=True) if value]
    return [step for step, _ in points], [value for _, value in points], label, colour


def _fates(run: RunRecords) -> list[tuple[list[int], list[float], str, str]]:
    """Shares of the sampled responses that were trained and dropped, by rollout."""
    ledgers = {step: ledger for step, ledger in sorted(read_ledgers(run).items()) if ledger.sampled}
    steps = list(ledgers)
    trained = [ledger.trained / (ledger.sampled + ledger.copies) for ledger in ledgers.values()]
    dropped = [
        sum(ledger.dropped.values()) / (ledger.sampled + ledger.copies)
        for ledger in ledgers.values()
    ]
    return [(steps, trained, "trained", GREEN), (steps, dropped, "dropped, with a reason", RED)]


def draw_report(run: RunRecords, path: Path, *, title: str) -> Path:
    """Draws reward, held-out evaluation, response length, KL and log-prob gap, seconds per step and
    the samples' fate; returns `path`.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 6.4), dpi=110, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, 3)
    colours = (BLUE, ORANGE, GREEN, RED)
    evaluations = [
        (*run.numbers(f"eval/{name}"), name, colours[i % 4])
        for i, name in enumerate(eval_sets(run))
    ]
    draw: list[Callable[[Any], None]] = [
        lambda axes: _panel(axes, "reward", _rewards(run), bad=_bad(run, "reward", "reward kept", "pass rate")),
        lambda axes: _panel(
            axes, "evaluation", evaluations, bottom=0,
            bad=sorted({step for name in eval_sets(run) for step in run.not_finite(f"eval/{name}")}),
        ),
        lambda axes: _panel(axes, "response length", [_series(run, "length", BLUE)], unit="tokens", bottom=0, bad=_bad(run, "length")),
        lambda axes: _panel(
            axes, "distance of policies",
            [
                _positive(_series(run, "kl", BLUE, shown="KL, absolute")),
                _positive(_series(run, "logprob diff", ORANGE, shown="|trainer - engine log-prob|")),
            ],
            is_log=True, bad=_bad(run, "kl", "logprob diff"),
        ),
        lambda axes: _panel(axes, "time per rollout", [_series(run, "step s", BLUE)], unit="seconds", bottom=0),
        lambda axes: _panel(axes, "samples", _fates(run), unit="share", bottom=-0.02),
    ]  # fmt: skip
    for axes, draw_one in zip(panels.flat, draw, strict=True):
        draw_one(axes)
    for axes, unit in zip(panels[1], ("optimizer step", "rollout", "rollout"), strict=True):
        axes.set_xlabel(unit, fontsize=10, color=INK)
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, color=INK)
    with atomic.replacing(path) as temporary:
        figure.savefig(temporary, format="png")
    return path
