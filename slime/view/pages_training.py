"""Pages of what the processes did: who trained which samples, and when each process did what."""

from __future__ import annotations

import argparse
import collections
import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from slime.data.flops import FlopsModel
from slime.exceptions import ConfigError
from slime.harness.trace import Row, summarize
from slime.harness.trace_export import chrome_trace
from slime.harness.trace_files import ProcessTrace, read_traces, windows_of
from slime.tracking.spans import FOLDER
from slime.view.catalog import Entry
from slime.view.pages_runs import options_of_entry
from slime.view.rollout_table import RolloutTable
from slime.view.site import Missing, Site, number_in

MOST_MICRO_BATCHES = 4000  # drawn of one rollout
MOST_EVENTS = 30_000
LARGEST_TRACE = 256 << 20  # bytes


@dataclasses.dataclass(frozen=True)
class MicroBatch:
    """What a rank trained at once. `left`, `width` and `pad`: of its bar, in thousandths of the
    longest of the step. cost: TFLOPs of a forward pass, None where the model's sizes are not known.
    """

    number: int
    samples: int
    tokens: int
    padding: int
    cost: float | None
    left: float
    width: float
    pad: float


@dataclasses.dataclass(frozen=True)
class RankRow:
    """One rank in one optimizer step."""

    rank: int
    batches: list[MicroBatch]
    tokens: int
    cost: float | None
    share: float  # of the busiest rank's tokens


@dataclasses.dataclass(frozen=True)
class StepBars:
    """One optimizer step. imbalance: tokens of the busiest rank over the mean."""

    step: int
    ranks: list[RankRow]
    samples: int
    tokens: int
    padding: int
    imbalance: float


def schedule_page(site: Site, request: Request) -> Response:
    """Ranks x micro-batches of a rollout."""
    entry, ref, table = site.table(request)
    before, after = site.neighbours(entry, ref)
    options = options_of_entry(site.catalog, entry)
    steps, not_shown = schedule_of(table, options)
    return site.page(
        request,
        "schedule.jinja",
        title=f"schedule of {ref.title} - {entry.name}",
        entry=entry,
        tab="rollouts",
        ref=ref,
        before=before,
        after=after,
        notes=table.problems,
        steps=steps,
        not_shown=not_shown,
        unscheduled=int(np.isnan(table.column("rank")).sum()),
        multiple=_multiple(options),
    )


def _multiple(options: Mapping[str, Any]) -> int:
    """To how many tokens a micro-batch is padded; 1 where it is not known."""
    value = options.get("data_pad_size_multiplier")
    parallel = options.get("tensor_model_parallel_size")
    if type(value) is not int or value < 1:
        return 1
    return value * (parallel if type(parallel) is int and parallel > 0 else 1)


def schedule_of(table: RolloutTable, options: Mapping[str, Any]) -> tuple[list[StepBars], int]:
    """(the optimizer steps, micro-batches beyond MOST_MICRO_BATCHES)."""
    rank, step, batch = (table.column(name) for name in ("rank", "step", "micro_batch"))
    tokens = table.total_lengths()
    known = ~(np.isnan(rank) | np.isnan(step) | np.isnan(batch))
    rows = collections.defaultdict(list)
    for row in np.flatnonzero(known).tolist():
        rows[int(step[row]), int(rank[row]), int(batch[row])].append(row)
    model, multiple = _flops(options), _multiple(options)
    chosen = sorted(rows)[:MOST_MICRO_BATCHES]
    by_step: dict[int, dict[int, list[tuple[int, np.ndarray]]]] = {}
    for key in chosen:
        one, of, number = key
        by_step.setdefault(one, {}).setdefault(of, []).append((number, tokens[rows[key]]))
    found = [_step(number, ranks, multiple, model) for number, ranks in sorted(by_step.items())]
    return found, len(rows) - len(chosen)


def _step(
    number: int,
    ranks: Mapping[int, list[tuple[int, np.ndarray]]],
    multiple: int,
    model: FlopsModel | None,
) -> StepBars:
    padded = {
        rank: sum(-(-int(own.sum()) // multiple) * multiple for _, own in batches)
        for rank, batches in ranks.items()
    }
    longest = max(padded.values()) or 1
    rows = []
    for rank, batches in sorted(ranks.items()):
        bars, left = [], 0.0
        for place, own in batches:
            total = int(own.sum())
            padding = -(-total // multiple) * multiple - total
            cost = None if model is None else float(model.of(own).sum()) / 1e12
            width, pad = 1000 * total / longest, 1000 * padding / longest
            bars.append(MicroBatch(place, len(own), total, padding, cost, left, width, pad))
            left += width + pad
        total = sum(one.tokens for one in bars)
        costs = [one.cost for one in bars if one.cost is not None]
        rows.append(RankRow(rank, bars, total, sum(costs) if costs else None, 0.0))
    busiest = max(one.tokens for one in rows) or 1
    rows = [dataclasses.replace(one, share=one.tokens / busiest) for one in rows]
    total = sum(one.tokens for one in rows)
    return StepBars(
        number,
        rows,
        sum(one.samples for row in rows for one in row.batches),
        total,
        sum(one.padding for row in rows for one in row.batches),
        busiest * len(rows) / total if total else 1.0,
    )


def _flops(options: Mapping[str, Any]) -> FlopsModel | None:
    """The cost of a sequence, where the options hold the model's sizes."""
    try:
        return FlopsModel.from_args(argparse.Namespace(**options))
    except (AttributeError, TypeError, ZeroDivisionError):
        return None


# --- the trace ------------------------------------------------------------------------------------


def timeline_page(site: Site, request: Request) -> Response:
    """What each process did when, of one rollout."""
    entry = site.entry(request)
    try:
        traces, unreadable = _traces(entry)
    except ConfigError as error:
        return site.page(
            request, "timeline.jinja", title="Timeline", entry=entry, tab="timeline", why=str(error)
        )
    rollouts = sorted({s.rollout for t in traces for s in t.spans if s.rollout is not None})
    chosen = number_in(request, "rollout", rollouts[-1] if rollouts else 0)
    windows = windows_of(traces, chosen if rollouts else None)
    if not windows:
        raise Missing(f"{entry.name} has no trace of rollout {chosen}.")
    summary = summarize(traces, windows)
    return site.page(
        request,
        "timeline.jinja",
        title=f"timeline of rollout {chosen} - {entry.name}",
        entry=entry,
        tab="timeline",
        why="",
        rollouts=rollouts,
        chosen=chosen,
        summary=summary,
        rows=_named_once([row for row in summary.rows if row.seconds >= 0.001 * summary.seconds]),
        unreadable=unreadable,
    )


def _named_once(rows: list[Row]) -> list[tuple[str, Row]]:
    """(the process where it begins, else "", the row)."""
    last, found = "", []
    for row in rows:
        found.append((row.process if row.process != last else "", row))
        last = row.process
    return found


def _traces(entry: Entry) -> tuple[list[ProcessTrace], int]:
    """ConfigError where nothing was recorded, or far too much."""
    files = list((entry.path / FOLDER).glob("*.jsonl"))
    links = [path.name for path in files if path.is_symlink()]
    if links:
        raise ConfigError(f"{links[0]} of the trace is a link; a trace holds files.")
    size = sum(path.stat().st_size for path in files)
    if size > LARGEST_TRACE:
        raise ConfigError(
            f"The traces have {size:,} bytes; slime trace {entry.path} --rollout N makes a file for "
            "ui.perfetto.dev."
        )
    return read_traces(entry.path)


def timeline_data(site: Site, request: Request) -> Response:
    """Lanes with what ran in them, in milliseconds from the start of the rollout."""
    entry = site.entry(request)
    traces, _ = _traces(entry)
    windows = windows_of(traces, number_in(request, "rollout", 0)) or windows_of(traces)
    events = chrome_trace(traces, windows)["traceEvents"]
    processes = {one["pid"]: one["args"]["name"] for one in events if one["name"] == "process_name"}
    lanes: dict[tuple[int, int], dict[str, Any]] = {}
    for one in events:
        if one["name"] == "thread_name":
            title = one["args"]["name"]
            key = one["pid"], one["tid"]
            lanes[key] = {"process": processes.get(one["pid"], ""), "title": title, "spans": []}
    slices = [one for one in events if one["ph"] == "X"]
    shown = sorted(slices, key=lambda one: -one["dur"])[:MOST_EVENTS]
    origin = min((one["ts"] for one in shown), default=0.0)
    for one in sorted(shown, key=lambda one: (one["ts"], -one["dur"])):
        start = round((one["ts"] - origin) / 1000, 3)
        span = [one["name"], start, round(one["dur"] / 1000, 3)]
        lanes[one["pid"], one["tid"]]["spans"].append(span)
    return JSONResponse(
        {
            "lanes": [lane for lane in lanes.values() if lane["spans"]],
            "left_out": len(slices) - len(shown),
            "end": max((s[1] + s[2] for lane in lanes.values() for s in lane["spans"]), default=0),
        }
    )
