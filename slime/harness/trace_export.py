"""Spans of a run as a Chrome trace, which ui.perfetto.dev and chrome://tracing show: a process per
process of the run, lanes in which nothing overlaps, a counter of running requests, and an arrow
from each sample's request to the rank that trains it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from slime.harness.trace_files import (
    REQUESTS,
    Interval,
    Phase,
    ProcessTrace,
    Span,
    phases_of,
)

# the parts of a request that its engine measured, one after the other
STAGES = (
    ("queue_time", "queue"),
    ("prefill_launch_latency", "prefill"),
    ("decode_duration", "decode"),
)
TRAINS = "actor_train"
LOCAL_BATCH = "localize"

Event = dict[str, Any]


def chrome_trace(
    traces: Sequence[ProcessTrace], windows: Sequence[Interval] | None = None
) -> dict[str, Any]:
    """The JSON object of Chrome's trace format, with times in microseconds from the first span.
    windows: only spans that overlap one of them.
    """
    kept = [(trace, _inside(trace.spans, windows)) for trace in traces]
    origin = min((span.start for _, spans in kept for span in spans), default=0)

    def micro(nanoseconds: int) -> float:
        return (nanoseconds - origin) / 1000

    events: list[Event] = []
    place_of: dict[int, tuple[int, int]] = {}  # a span's identity -> process and lane
    for pid, (trace, spans) in enumerate(kept, start=1):
        events += _process_names(trace, pid)
        for tid, (title, lane) in enumerate(_lanes(spans), start=1):
            events += _lane_names(pid, tid, title)
            for span in lane:
                place_of[id(span)] = pid, tid
                events += _slices(span, pid, tid, micro)
        events += _running_requests(spans, pid, micro)
    events += _arrows(kept, place_of, micro)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"start_ns_since_epoch": str(origin)},
    }


def _inside(spans: Iterable[Span], windows: Sequence[Interval] | None) -> list[Span]:
    return [
        span
        for span in spans
        if windows is None or any(span.start < end and start < span.end for start, end in windows)
    ]


def _process_names(trace: ProcessTrace, pid: int) -> list[Event]:
    host = trace.head.get("host")
    name = f"{trace.process} (pid {trace.pid}{f' on {host}' if host else ''})"
    return [
        {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}},
        {
            "ph": "M",
            "name": "process_sort_index",
            "pid": pid,
            "tid": 0,
            "args": {"sort_index": pid},
        },
    ]


def _lane_names(pid: int, tid: int, title: str) -> list[Event]:
    return [
        {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": title}},
        {
            "ph": "M",
            "name": "thread_sort_index",
            "pid": pid,
            "tid": tid,
            "args": {"sort_index": tid},
        },
    ]


def _lanes(spans: Sequence[Span]) -> Iterator[tuple[str, list[Span]]]:
    """(title, spans) of each lane: nested phases, and below them the tracks whose spans overlap.
    Threads that are not busy at the same time share a lane.
    """
    outermost = [phase for thread in phases_of(spans).values() for phase in thread]
    phases = [
        ((phase.span.start, _last_end(phase)), [inner.span for _, inner in phase.walk()])
        for phase in outermost
    ]
    yield from _titled("phases", _packed(phases))
    for track in sorted({span.track for span in spans if span.track is not None}):
        own = [((span.start, span.end), [span]) for span in spans if span.track == track]
        yield from _titled(track, _packed(own))


def _last_end(phase: Phase) -> int:
    return max(inner.span.end for _, inner in phase.walk())


def _titled(title: str, lanes: Sequence[list[Span]]) -> Iterator[tuple[str, list[Span]]]:
    for number, lane in enumerate(lanes, start=1):
        yield title if len(lanes) == 1 else f"{title} {number}", lane


def _packed(items: Iterable[tuple[Interval, list[Span]]]) -> list[list[Span]]:
    """The spans of the items in as few lanes as hold them without overlap, each in the first that
    is free.
    """
    lanes: list[list[Span]] = []
    free: list[int] = []  # a heap, as is the next: (until when, which lane)
    taken: list[tuple[int, int]] = []
    for (start, end), spans in sorted(items, key=lambda item: item[0]):
        while taken and taken[0][0] <= start:
            heapq.heappush(free, heapq.heappop(taken)[1])
        if not free:
            heapq.heappush(free, len(lanes))
            lanes.append([])
        place = heapq.heappop(free)
        lanes[place] += spans
        heapq.heappush(taken, (end, place))
    return lanes


def _slices(span: Span, pid: int, tid: int, micro: Callable[[int], float]) -> Iterator[Event]:
    about = {} if span.rollout is None else {"rollout": span.rollout}
    category = span.track or "phase"

    def event(name: str, start: int, end: int, args: dict[str, Any]) -> Event:
        return {
            "ph": "X",
            "name": name,
            "cat": category,
            "ts": micro(start),
            "dur": (end - start) / 1000,
            "pid": pid,
            "tid": tid,
            "args": args,
        }

    yield event(span.title, span.start, span.end, {**about, **span.attrs})
    if span.track != REQUESTS:
        return
    start = span.start
    for name, title in STAGES:
        seconds = span.attrs.get(name)
        if isinstance(seconds, int | float):
            end = min(start + round(seconds * 1e9), span.end)
            yield event(title, start, end, {})
            start = end


def _running_requests(
    spans: Iterable[Span], pid: int, micro: Callable[[int], float]
) -> Iterator[Event]:
    """How many requests an engine has that this process waits for, at each change."""
    changes = []
    for span in spans:
        if span.track == REQUESTS:
            latency = span.attrs.get("e2e_latency", span.seconds)
            end = min(span.start + round(latency * 1e9), span.end)
            changes += [(span.start, 1), (end, -1)]
    running = 0
    for at, change in sorted(changes):
        running += change
        yield {
            "ph": "C",
            "name": "running requests",
            "pid": pid,
            "tid": 0,
            "ts": micro(at),
            "args": {"requests": running},
        }


def _arrows(
    kept: Sequence[tuple[ProcessTrace, list[Span]]],
    place_of: dict[int, tuple[int, int]],
    micro: Callable[[int], float],
) -> Iterator[Event]:
    """From the last request of a sample to the steps of each rank that got it."""
    requests = sorted(
        (span for _, spans in kept for span in spans if span.track == REQUESTS),
        key=lambda span: span.end,
    )
    batches = sorted(
        ((batch, target) for _, spans in kept for batch, target in _trained_batches(spans)),
        key=lambda pair: pair[0].start,
    )
    last: dict[Any, Span] = {}  # by sample, its last request before the batch
    number = done = 0
    for batch, target in batches:
        while done < len(requests) and requests[done].end <= batch.start:
            last[requests[done].attrs.get("sample")] = requests[done]
            done += 1
        for sample in batch.attrs.get("samples") or []:
            request = last.get(sample)
            if request is None:
                continue
            number += 1
            ends = (("s", request, request.start), ("f", target, target.start))
            for kind, span, at in ends:
                pid, tid = place_of[id(span)]
                yield {
                    "ph": kind,
                    "name": "sample",
                    "cat": "sample",
                    "id": number,
                    "pid": pid,
                    "tid": tid,
                    "ts": micro(at),
                    **({"bp": "e"} if kind == "f" else {}),
                }


def _trained_batches(spans: Iterable[Span]) -> Iterator[tuple[Span, Span]]:
    """(a local batch, the steps that train it): the first that begin after it, in its process."""
    batch = None
    for span in spans:
        if span.name == LOCAL_BATCH:
            batch = span
        elif span.name == TRAINS and batch is not None:
            yield batch, span
            batch = None
