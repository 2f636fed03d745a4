"""`slime trace RUN`: what each process of a run did when, from the spans that --trace recorded.

Prints the seconds of each phase of each process and the time in which nothing ran, and writes a
Chrome trace (default: RUN/trace.json) for ui.perfetto.dev or chrome://tracing. A run that still
goes on can be read. Exit status 2 where the run has no traces.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TextIO

import orjson

from slime.exceptions import ConfigError
from slime.files.atomic import write_bytes
from slime.harness.output_paths import require_free
from slime.harness.trace_export import chrome_trace
from slime.harness.trace_files import (
    WAITS,
    Interval,
    ProcessTrace,
    Span,
    clipped,
    phases_of,
    read_traces,
    total_seconds,
    windows_of,
    with_restarts,
)
from slime.harness.trace_names import names_table

OUT_NAME = "trace.json"
IDLE = "(idle)"
MIN_SHARE = 0.001
MOST_NUMBERS = 8
_NUMBER = re.compile(r"\b\d+\b")


@dataclasses.dataclass(frozen=True)
class Row:
    """One phase of one process in the windows: how often it ran, and how long at least one of it
    did. depth: how many phases are around it.
    """

    process: str
    depth: int
    phase: str
    count: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class TraceSummary:
    """seconds: of the windows. idle_seconds: of them, without a phase of any process but waits."""

    rows: list[Row]
    rollouts: list[int]
    seconds: float
    idle_seconds: float


def summarize(traces: Sequence[ProcessTrace], windows: Sequence[Interval]) -> TraceSummary:
    """The phases of each process inside the windows."""
    seconds = total_seconds(windows)
    rows: list[Row] = []
    busy: list[Interval] = []
    for trace in _one_per_name(traces):
        own = clipped(
            ((span.start, span.end) for span in trace.spans if span.name not in WAITS), windows
        )
        busy += own
        rows += _rows_of(trace, windows)
        if trace.head:  # no restart is a process
            rows.append(Row(trace.process, 0, IDLE, 0, seconds - total_seconds(own)))
    spans = [span for trace in traces for span in trace.spans]
    inside = {
        span.rollout for span in spans if span.rollout is not None and _runs_in(span, windows)
    }
    return TraceSummary(rows, sorted(inside), seconds, seconds - total_seconds(busy))


def _one_per_name(traces: Sequence[ProcessTrace]) -> list[ProcessTrace]:
    """The processes, as one where a later one went on in place of another: of a resumed run, or of
    ranks whose processes end between rollouts (--release-train).
    """
    found: dict[str, ProcessTrace] = {}
    for trace in traces:
        first = found.setdefault(trace.process, trace)
        if first is not trace:
            spans = sorted([*first.spans, *trace.spans], key=lambda span: (span.start, -span.end))
            found[trace.process] = dataclasses.replace(first, spans=spans)
    return list(found.values())


def _runs_in(span: Span, windows: Sequence[Interval]) -> bool:
    return span.name not in WAITS and bool(clipped([(span.start, span.end)], windows))


def _rows_of(trace: ProcessTrace, windows: Sequence[Interval]) -> list[Row]:
    """The rows of a process, each after the phase around it, in the order in which they first
    ran; then those of its tracks.
    """
    found: dict[tuple[str, ...], list[Interval]] = {}

    def note(path: Iterable[str], span: Span) -> None:
        parts = clipped([(span.start, span.end)], windows)
        if parts:
            # one row for all rollouts
            found.setdefault(tuple(_NUMBER.sub("N", title) for title in path), []).extend(parts)

    outermost = [phase for thread in phases_of(trace.spans).values() for phase in thread]
    for phase in sorted(outermost, key=lambda phase: phase.span.start):
        for path, inner in phase.walk():
            around = (title for title in path if title not in WAITS)
            note((*around, inner.span.title), inner.span)
    order = {path: place for place, path in enumerate(found)}
    for span in trace.spans:
        if span.track is not None:
            note((span.title,), span)

    def place(path: tuple[str, ...]) -> list[int]:
        return [order.get(path[: depth + 1], len(found)) for depth in range(len(path))]

    return [
        Row(trace.process, len(path) - 1, path[-1], len(found[path]), total_seconds(found[path]))
        for path in sorted(found, key=place)
    ]


def numbers_text(numbers: Sequence[int]) -> str:
    """Ascending numbers as text: "3", "0 to 4", "0, 2, 4"."""
    if len(numbers) > 1 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]} to {numbers[-1]}"
    if len(numbers) > MOST_NUMBERS:
        return f"{numbers[0]}, {numbers[1]}, ... {numbers[-1]} ({len(numbers)} of them)"
    return ", ".join(map(str, numbers))


def print_summary(
    summary: TraceSummary,
    *,
    num_unreadable: int = 0,
    min_share: float = 0.0,
    stream: TextIO | None = None,
) -> None:
    """The table, to standard output, without phases below `min_share` of the time."""
    stream = stream or sys.stdout
    shown_rows = [row for row in summary.rows if row.seconds >= min_share * summary.seconds]
    plural = "s" if len(summary.rollouts) > 1 else ""
    known = numbers_text(summary.rollouts)
    what = f"rollout{plural} {known}" if known else "no rollout"
    torn = f"; {num_unreadable} lines could not be read" if num_unreadable else ""
    print(f"{what}, {summary.seconds:.3f} s{torn}\n", file=stream)
    titles = ["process", "phase", "count", "seconds", "share"]
    cells = [
        [
            row.process,
            "  " * row.depth + row.phase,
            str(row.count or ""),
            f"{row.seconds:.3f}",
            f"{row.seconds / summary.seconds:.1%}" if summary.seconds else "",
        ]
        for row in shown_rows
    ]
    widths = [max(map(len, column)) for column in zip(titles, *cells, strict=True)]
    last = None
    for line in [titles, *cells]:
        shown = ["" if line[0] == last else line[0], *line[1:]]
        last = line[0]
        left = [cell.ljust(width) for cell, width in zip(shown[:2], widths[:2], strict=True)]
        right = [cell.rjust(width) for cell, width in zip(shown[2:], widths[2:], strict=True)]
        print("  ".join(left + right).rstrip(), file=stream)
    num_short = len(summary.rows) - len(shown_rows)
    if num_short:
        print(
            f"\n{num_short} phases below {min_share:.1%} are not shown; --all shows them",
            file=stream,
        )
    share = summary.idle_seconds / summary.seconds if summary.seconds else 0.0
    print(
        f"\nnothing ran, in any process, for {summary.idle_seconds:.3f} s ({share:.1%})",
        file=stream,
    )


def build_summary(
    run_dir: Path, *, rollout: int | None = None
) -> tuple[TraceSummary, dict[str, object], int]:
    """(the phases of the run or of one rollout, its Chrome trace, lines that could not be read).
    ConfigError where there is nothing of it.
    """
    found, num_unreadable = read_traces(run_dir)
    traces = with_restarts(found)
    windows = windows_of(traces, rollout)
    if not windows:
        known = sorted(
            {span.rollout for t in traces for span in t.spans if span.rollout is not None}
        )
        there = f"rollouts {numbers_text(known)}" if known else "no spans yet"
        wanted = f"rollout {rollout}" if rollout is not None else "a span"
        raise ConfigError(f"{run_dir} has no trace of {wanted}: it has {there}.")
    shown = None if rollout is None else windows
    return summarize(traces, windows), chrome_trace(traces, shown), num_unreadable


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table of a run and writes its Chrome trace; returns 2 where it has none."""
    parser = argparse.ArgumentParser(
        prog="slime trace",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "run", type=Path, nargs="?", default=None, help="Run folder, of a run with --trace."
    )
    parser.add_argument("--out", type=Path, default=None, help=f"Default: RUN/{OUT_NAME}.")
    parser.add_argument(
        "--rollout", type=int, default=None, help="This rollout alone. Default: all of the run."
    )
    parser.add_argument(
        "--all", action="store_true", help=f"Also phases below {100 * MIN_SHARE:g} %% of the time."
    )
    parser.add_argument(
        "--names", action="store_true", help="Print what each span is about, and nothing else."
    )
    options = parser.parse_args(argv)
    if options.names:
        print(names_table())
        return 0
    if options.run is None:
        parser.error("give the folder of a run with --trace")
    out = options.out or options.run / OUT_NAME
    try:
        require_free("--out", out)
        summary, events, num_unreadable = build_summary(options.run, rollout=options.rollout)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    min_share = 0.0 if options.all else MIN_SHARE
    print_summary(summary, num_unreadable=num_unreadable, min_share=min_share)
    try:
        write_bytes(out, orjson.dumps(events))
    except OSError as error:
        print(f"error: {out} was not written: {error}", file=sys.stderr)
        return 2
    print(f"written: {out}, for ui.perfetto.dev")
    return 0


if __name__ == "__main__":
    sys.exit(main())
