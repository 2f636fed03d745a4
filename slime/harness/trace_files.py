"""Reads the spans that the processes of a run wrote (--trace) onto one time axis. Judges nothing.

Processes of one machine share its monotonic clock: theirs is the exact order of what they did,
whatever happened to the time of day meanwhile. Between machines the order is that of their clocks.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from slime.exceptions import ConfigError
from slime.files.jsonl import JsonlTail
from slime.tracking.spans import FOLDER, FORMAT_VERSION

REQUESTS = "requests"  # the track of requests
NESTING_TOLERANCE_NS = 1000
RESTART = "restart"
WAITS = frozenset({"wait", "train_wait", RESTART})  # during these the process does nothing itself

Interval = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Span:
    """What a process did from `start` to `end`, nanoseconds on the run's axis. track: the lanes of
    its own where spans overlap; None: a phase of `thread`.
    """

    name: str
    start: int
    end: int
    thread: int
    track: str | None
    rollout: int | None
    attrs: dict[str, Any]

    @property
    def seconds(self) -> float:
        return (self.end - self.start) / 1e9

    @property
    def title(self) -> str:
        """The name, and what a wait is for; whether its end is known."""
        what = self.attrs.get("what")
        title = f"wait: {what}" if self.name == "wait" and what else self.name
        return f"{title} (unfinished)" if self.attrs.get("unfinished") else title


@dataclasses.dataclass(frozen=True)
class ProcessTrace:
    """One process: its spans in the order of their start. `head` says what it is. `lives`: the
    first and the last nanosecond of each process that wrote into the file: another one may have had
    the same name and number.
    """

    process: str
    pid: int
    head: dict[str, Any]
    spans: list[Span]
    lives: tuple[Interval, ...] = ()


@dataclasses.dataclass
class Phase:
    """A span of a thread and those inside it."""

    span: Span
    inside: list[Phase] = dataclasses.field(default_factory=list)

    def walk(self, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Phase]]:
        """This phase and all inside it, each after the titles of those around it."""
        yield path, self
        for phase in self.inside:
            yield from phase.walk((*path, self.span.title))


def read_traces(run_dir: str | os.PathLike[str]) -> tuple[list[ProcessTrace], int]:
    """(the processes of a run, driver first, then by name; lines that could not be read, a last
    line without end among them). ConfigError where nothing was recorded.
    """
    folder = Path(run_dir) / FOLDER
    files = sorted(folder.glob("*.jsonl"))
    if not files:
        what = "has no traces" if Path(run_dir).is_dir() else "is no folder"
        raise ConfigError(f"{run_dir} {what}. Record some: slime train --trace ...")
    references: dict[str, int] = {}  # by machine start: the clock offset that all its files get
    traces, num_unreadable = [], 0
    for file in files:
        tail = JsonlTail(file)
        reading = _Reading(file, references)
        for record in tail.read():
            reading.take(record)
        num_unreadable += tail.malformed + tail.ends_torn + reading.num_unreadable
        traces.append(reading.process_trace())
    rank_order = {"driver": 0, "rollout": 1}
    traces.sort(key=lambda trace: (rank_order.get(trace.head.get("role", ""), 2), trace.process))
    return traces, num_unreadable


def with_restarts(traces: list[ProcessTrace]) -> list[ProcessTrace]:
    """The processes, and where the run was started again one more, "restarts", with a span for each
    gap: from the last that a start of the run did until the first that the next one does.
    """
    lives = [life for one in traces for life in one.lives]
    drivers = sorted(
        life for one in traces if one.head.get("role") == "driver" for life in one.lives
    )
    gaps = []
    for _, end in drivers[:-1]:  # the processes of the next start begin after it
        begun = min(first for first, _ in lives if first > end)
        last = min(begun, max(last for first, last in lives if first <= end))
        gaps.append(Span(RESTART, last, begun, 0, None, None, {}))
    return [*traces, ProcessTrace("restarts", 0, {}, gaps)] if gaps else traces


class _Reading:
    """One process's file, record by record. A process of a resumed run may have had the same
    number: its head begins anew.
    """

    def __init__(self, file: Path, references: dict[str, int]) -> None:
        self._file, self._references = file, references
        self._head: dict[str, Any] = {}
        self._shift = 0
        self._spans: list[Span] = []
        self._heads: list[int] = []  # by process, how many spans stood before its own
        self._open: list[Span] = []
        self._open_until = 0
        self.num_unreadable = 0

    def take(self, record: dict[str, Any]) -> None:
        """Takes the next record, or counts it as unreadable. ConfigError for another format."""
        try:
            kind = record.get("type")
            if kind == "head":
                self._take_head(record)
            elif kind == "open":
                self._take_open(record)
            else:
                self._spans += list(_spans_of(record, self._shift))
        except (KeyError, TypeError, ValueError):
            self.num_unreadable += 1

    def _take_head(self, record: dict[str, Any]) -> None:
        if record["version"] != FORMAT_VERSION:
            raise ConfigError(
                f"{self._file} was written by another version of slime: its format is "
                f"{record['version']!r}, this one reads {FORMAT_VERSION}."
            )
        offset = int(record["clock_offset"])
        self._shift = self._references.setdefault(str(record["boot_id"]), offset) - offset
        self._head = record
        self._heads.append(len(self._spans))
        self._open = []  # of a process that is gone

    def _take_open(self, record: dict[str, Any]) -> None:
        self._open_until = record["time"] + self._shift
        common = {"track": None, "rollout": record["rollout"], "attrs": {"unfinished": True}}
        self._open = [
            Span(one["name"], start, max(start, self._open_until), one["thread"], **common)
            for one in record["spans"]
            for start in [one["start"] + self._shift]
        ]

    def process_trace(self) -> ProcessTrace:
        """The process, with the phases that had not ended when it wrote last, until that time."""
        ended = {(span.name, span.start, span.thread) for span in self._spans}
        last = max([self._open_until, *(span.end for span in self._spans)])
        spans = self._spans + [
            dataclasses.replace(span, end=last)
            for span in self._open
            if (span.name, span.start, span.thread) not in ended
        ]
        own = [spans[first:end] for first, end in itertools.pairwise([*self._heads, len(spans)])]
        lives = tuple(
            (min(span.start for span in some), max(span.end for span in some))
            for some in own
            if some
        )
        spans.sort(key=lambda span: (span.start, -span.end))
        name, _, pid = self._file.stem.rpartition("-")
        number = int(pid) if pid.isdigit() else 0
        head = self._head
        return ProcessTrace(head.get("process", name), head.get("pid", number), head, spans, lives)


def _spans_of(record: dict[str, Any], shift: int) -> Iterator[Span]:
    """The span of a record; of a request, which samples may share, one of each sample."""
    start, attrs = int(record["start"]) + shift, dict(record.get("attrs") or {})
    rollout = record.get("rollout")
    one = Span(
        str(record["name"]),
        start,
        start + int(record["dur"]),
        int(record["thread"]),
        record.get("track"),
        None if rollout is None else int(rollout),
        attrs,
    )
    if one.track != REQUESTS or "measured" not in attrs:
        yield one
        return
    for sample, group, measured in zip(
        attrs["samples"], attrs["groups"], attrs["measured"], strict=True
    ):
        yield dataclasses.replace(one, attrs={"sample": sample, "group": group, **measured})


def phases_of(spans: Iterable[Span]) -> dict[int, list[Phase]]:
    """The outermost phases of each thread, with those inside them, in the order of their start."""
    found: dict[int, list[Phase]] = {}
    around: dict[int, list[Phase]] = {}
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        if span.track is not None:
            continue
        stack = around.setdefault(span.thread, [])
        # a phase that reaches beyond the one before it is beside it, not inside
        while stack and (
            stack[-1].span.end <= span.start or stack[-1].span.end + NESTING_TOLERANCE_NS < span.end
        ):
            stack.pop()
        phase = Phase(span)
        (stack[-1].inside if stack else found.setdefault(span.thread, [])).append(phase)
        stack.append(phase)
    return found


def windows_of(traces: Iterable[ProcessTrace], rollout: int | None = None) -> list[Interval]:
    """When the recorded rollouts ran (or that one alone): each from its first span to the first of
    the next one, or to its last. Where no span belongs to a rollout, from the first span to the
    last. [] where there is no span.
    """
    traces = list(traces)
    spans = [span for trace in traces for span in trace.spans]
    by_rollout: dict[int, Interval] = {}
    for span in spans:
        # a wait for the next rollout's shards begins before it
        if span.rollout is None or span.name in WAITS:
            continue
        first, last = by_rollout.get(span.rollout, (span.start, span.end))
        by_rollout[span.rollout] = min(first, span.start), max(last, span.end)
    if not by_rollout:
        if rollout is not None or not spans:
            return []
        return [(min(span.start for span in spans), max(span.end for span in spans))]
    windows = []
    for number, (start, last) in sorted(by_rollout.items()):
        following = by_rollout.get(number + 1)
        if rollout is None or rollout == number:
            windows.append((start, max(last, following[0]) if following else last))
    return merged(windows)


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time as intervals that do not overlap, in order."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def clipped(intervals: Iterable[Interval], windows: Sequence[Interval]) -> list[Interval]:
    """The parts of the intervals inside the windows."""
    return [
        (max(start, first), min(end, last))
        for start, end in intervals
        for first, last in windows
        if max(start, first) < min(end, last)
    ]


def total_seconds(intervals: Iterable[Interval]) -> float:
    """How long at least one of the intervals lasts."""
    return sum(end - start for start, end in merged(intervals)) / 1e9
