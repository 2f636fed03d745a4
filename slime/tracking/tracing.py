"""Spans and events of one sample's life, kept in `sample.trace` as plain dictionaries that JSON can
hold.

    with trace_span(sample, "sglang_generate") as attrs:
        reply = await post(...)
        attrs.update(build_sglang_meta_trace_attrs(reply["meta_info"]))

A trace is {"trace_id", "events"}; an event {"type": "span_start" | "span_end" | "event", "name",
"time", "attrs"} and, for spans, "span_id", "parent_id" and, at the end, "duration". Times are
seconds since the epoch, durations seconds of a monotonic clock. Tracing never raises into the code
that it watches.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import inspect
import itertools
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

logger = logging.getLogger(__name__)

# an attribute under this key holds child spans as [{"name", "duration", "attrs"}], for durations
# that only the engine measured
TRACE_CHILDREN_KEY = "trace_children"

PLAIN_META = (
    "prompt_tokens",
    "completion_tokens",
    "cached_tokens",
    "queue_time",
    "e2e_latency",
    "decode_throughput",
)
# disaggregated engines report the time of each stage under <stage>_<what>
STAGES = ("prefill_", "decode_")
STAGE_SUFFIXES = ("_duration", "_latency", "_time")

_parent: contextvars.ContextVar[int | None] = contextvars.ContextVar(
    "slime_trace_parent", default=None
)


@dataclasses.dataclass(frozen=True)
class TraceHandle:
    """One trace, and the span below which this holder's spans lie (None: at the top)."""

    trace: dict[str, Any]
    parent_span_id: int | None = None

    @property
    def trace_id(self) -> str:
        return self.trace["trace_id"]


class TraceSpanContext(dict[str, Any]):
    """The attributes of a span that is under way: a dictionary, with upstream's setters beside its
    own.
    """

    def set(self, name: str, value: object) -> None:
        self[name] = value

    set_attr = set

    def update_attrs(self, attrs: Mapping[str, Any]) -> None:
        self.update(attrs)


# Ids that no other process of the run gives: a trace may go on in another one. Each process counts
# from a random number, since the system's random numbers cost as much as the rest of a span.
_new_id = itertools.count(secrets.randbits(48)).__next__


def bind_trace(
    target: Any, trace: TraceHandle | dict[str, Any] | None = None
) -> TraceHandle | None:
    """Returns the trace of `target`, made when it has none; `trace` makes several objects share
    one. None where it cannot be attached.
    """
    try:
        if isinstance(target, TraceHandle):
            return target
        if trace is not None:
            target.trace = trace.trace if isinstance(trace, TraceHandle) else trace
        found = getattr(target, "trace", None)
        if not isinstance(found, dict) or "events" not in found:
            found = {"trace_id": f"{_new_id():012x}", "events": []}
            target.trace = found
        return TraceHandle(found)
    except Exception as error:  # noqa: BLE001 - tracing must not reach into what it watches
        logger.debug("no trace on %r: %s", type(target).__name__, error)
        return None


def bind_trace_carrier(
    carrier: object,
    *,
    trace_id: str | None = None,
    sample_id: object = None,
    group_id: object = None,
    attempt: int = 0,
    parent_span_id: int | None = None,
) -> TraceHandle | None:
    """Returns a trace with these identities (None: left out), attached to `carrier`: under the key
    "trace" of a dictionary, else as attribute `trace`. None where it cannot be attached.
    """
    identities = {"sample_id": sample_id, "group_id": group_id}
    trace = {
        "trace_id": trace_id or f"{_new_id():012x}",
        **{name: value for name, value in identities.items() if value is not None},
        "attempt": attempt,
        "events": [],
    }
    return TraceHandle(trace, parent_span_id) if _attach(carrier, trace) else None


def _attach(carrier: Any, trace: dict[str, Any]) -> bool:
    try:
        if isinstance(carrier, dict):
            carrier["trace"] = trace
        else:
            carrier.trace = trace
    except Exception as error:  # noqa: BLE001 - as above
        logger.debug("no trace on %r: %s", type(carrier).__name__, error)
        return False
    return True


def export_trace(handle: TraceHandle) -> dict[str, Any]:
    """Returns the trace as plain values, for a request or a file; `import_trace` goes on with it in
    another process.
    """
    return {
        **handle.trace,
        "events": list(handle.trace["events"]),
        "parent_span_id": handle.parent_span_id,
    }


def import_trace(payload: Mapping[str, Any], carrier: object = None) -> TraceHandle | None:
    """Returns the trace that `export_trace` wrote, attached to `carrier` if one is given. None for
    what is no such payload.
    """
    if (
        not isinstance(payload, Mapping)
        or not isinstance(payload.get("events"), list)
        or "trace_id" not in payload
    ):
        logger.debug("no trace in a payload of type %s", type(payload).__name__)
        return None
    trace = {name: value for name, value in payload.items() if name != "parent_span_id"}
    trace["events"] = list(trace["events"])
    if carrier is not None and not _attach(carrier, trace):
        return None
    return TraceHandle(trace, payload.get("parent_span_id"))


def _handles(target: object) -> list[TraceHandle]:
    """Returns the distinct traces of one object or of nested lists of them."""
    if not isinstance(target, list | tuple):
        handle = bind_trace(target)
        return [] if handle is None else [handle]
    found: list[TraceHandle] = []
    for one in target:
        handles = _handles(one) if isinstance(one, list | tuple) else [bind_trace(one)]
        found += [
            handle
            for handle in handles
            if handle is not None and all(handle.trace is not other.trace for other in found)
        ]
    return found


def _append(handles: Sequence[TraceHandle], event: dict[str, Any]) -> None:
    try:
        for handle in handles:
            entry = event if len(handles) == 1 else dict(event)
            if entry.get("parent_id", "none") is None:
                entry["parent_id"] = handle.parent_span_id
            handle.trace["events"].append(entry)
    except Exception as error:  # noqa: BLE001 - as above
        logger.debug("an event is not traced: %s", error)


def trace_event(target: object, name: str, *, attrs: Mapping[str, Any] | None = None) -> None:
    """Adds one moment to the trace of `target` (a sample, a handle, or a list of them)."""
    _append(
        _handles(target),
        {"type": "event", "name": name, "time": time.time(), "attrs": dict(attrs or {})},
    )


def trace_next_attempt(target: object, *, attrs: Mapping[str, Any] | None = None) -> None:
    """Counts one more attempt in the trace of `target` (a request that is sent again), and adds it
    as the event `next_attempt`.
    """
    with contextlib.suppress(Exception):  # as above
        for handle in _handles(target):
            handle.trace["attempt"] = handle.trace.get("attempt", 0) + 1
            trace_event(
                handle, "next_attempt", attrs={**(attrs or {}), "attempt": handle.trace["attempt"]}
            )


@contextlib.contextmanager
def trace_span(
    target: object, name: str, *, attrs: Mapping[str, Any] | None = None, record_error: bool = True
) -> Iterator[TraceSpanContext]:
    """Traces the body as a span of `target`; yields its attributes, which the body may extend. An
    error of the body is raised, and noted unless `record_error` is False.
    """
    opened = _start_span(target, name, attrs)
    token = _parent.set(opened.span_id)
    try:
        yield opened.attrs
    except BaseException as error:
        if record_error:
            opened.note_error(error)
        raise
    finally:
        _parent.reset(token)
        opened.end()


@contextlib.contextmanager
def trace_spans(targets: Sequence[object], name: str) -> Iterator[list[dict[str, Any]]]:
    """Traces the body as one span of each target: a request that several samples share. Yields the
    spans' attributes, in the order of `targets`. Lean, as it is entered for every request.
    """
    now, started, parent_id = time.time(), time.perf_counter(), _parent.get()
    attrs: list[dict[str, Any]] = [{} for _ in targets]
    opened = []
    for target in targets:
        handle = bind_trace(target)
        events = None if handle is None else handle.trace["events"]
        span_id = _new_id()
        common = {"name": name, "span_id": span_id, "parent_id": parent_id}
        if events is not None:
            events.append({"type": "span_start", **common, "time": now, "attrs": {}})
        opened.append((events, common))
    try:
        yield attrs
    except BaseException as error:
        for values in attrs:
            values["error"] = f"{type(error).__name__}: {error}"
        raise
    finally:
        now, duration = time.time(), time.perf_counter() - started
        for (events, common), values in zip(opened, attrs, strict=True):
            if events is not None:
                end = {"type": "span_end", **common, "time": now, "duration": duration}
                end["attrs"] = values
                events.append(end)


@dataclasses.dataclass(slots=True)
class _StartedSpan:
    """A span that has not ended yet, in the traces that its target had when it started."""

    handles: list[TraceHandle]
    name: str
    span_id: int
    parent_id: int | None
    started: float
    attrs: TraceSpanContext

    def note_error(self, error: BaseException) -> None:
        self.attrs["error"] = f"{type(error).__name__}: {error}"

    def end(self) -> None:
        """Adds the end, and the spans below it that were measured elsewhere."""
        end: dict[str, Any] = {
            "type": "span_end",
            "name": self.name,
            "span_id": self.span_id,
            "parent_id": self.parent_id,
            "time": time.time(),
            "duration": time.perf_counter() - self.started,
        }
        children = self.attrs.pop(TRACE_CHILDREN_KEY, None)
        end["attrs"] = dict(self.attrs)
        _append(self.handles, end)
        if children and isinstance(children, Iterable):
            _append_children(self.handles, self.span_id, children)


def _start_span(target: object, name: str, attrs: Mapping[str, Any] | None) -> _StartedSpan:
    handles, values = _handles(target), TraceSpanContext(attrs or {})
    started = _StartedSpan(handles, name, _new_id(), _parent.get(), time.perf_counter(), values)
    event = {
        "type": "span_start",
        "name": name,
        "span_id": started.span_id,
        "parent_id": started.parent_id,
        "time": time.time(),
        "attrs": dict(values),
    }
    _append(handles, event)
    return started


def _append_children(
    handles: Sequence[TraceHandle], parent_id: int, children: Iterable[Mapping[str, Any]]
) -> None:
    """Adds spans that were measured elsewhere, as ended children of `parent_id`."""
    with contextlib.suppress(Exception):  # as above
        for child in children:
            event = {
                "type": "span_end",
                "name": child["name"],
                "span_id": _new_id(),
                "parent_id": parent_id,
                "time": time.time(),
                "duration": child["duration"],
                "attrs": dict(child.get("attrs", {})),
            }
            _append(handles, event)


def trace_function(
    name: str,
    target: object = None,
    attrs_getter: Callable[..., Mapping[str, Any]] | None = None,
    *,
    target_getter: Callable[..., Any] | None = None,
    record_error: bool = True,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Returns a decorator that traces every call, of a plain or a coroutine function.

    `target` is the name of the parameter that holds the sample (None: "sample"), or a function of
    the call's arguments that returns it, as `target_getter` is; `attrs_getter` gets the same
    arguments and returns the span's attributes.
    """
    getter = target_getter or (target if callable(target) else None)
    parameter = target if isinstance(target, str) else "sample"

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function)

        def open_span(args: tuple, kwargs: dict) -> contextlib.AbstractContextManager[Any]:
            try:
                found = (
                    getter(*args, **kwargs)
                    if getter
                    else signature.bind(*args, **kwargs).arguments[parameter]
                )
                attrs = attrs_getter(*args, **kwargs) if attrs_getter is not None else None
                return trace_span(found, name, attrs=attrs, record_error=record_error)
            except Exception as error:  # noqa: BLE001 - as above
                logger.debug("call of %s is not traced: %s", name, error)
                return contextlib.nullcontext()

        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def traced_coroutine(*args: object, **kwargs: object) -> Any:
                with open_span(args, kwargs):
                    return await function(*args, **kwargs)

            return traced_coroutine

        @functools.wraps(function)
        def traced(*args: object, **kwargs: object) -> Any:
            with open_span(args, kwargs):
                return function(*args, **kwargs)

        return traced

    return decorate


def build_sglang_meta_trace_attrs(meta: object) -> dict[str, Any]:
    """Returns what a trace keeps of an engine's meta_info: token counts, queue time, latency,
    throughput, finish reason's type.

    Durations that a disaggregated engine reports per stage (prefill_..., decode_...) become
    children under TRACE_CHILDREN_KEY. {} for what is no mapping.
    """
    if not isinstance(meta, dict | Mapping):  # a dictionary is known at once
        return {}
    attrs = {name: meta[name] for name in PLAIN_META if meta.get(name) is not None}
    reason = meta.get("finish_reason")
    kind = reason.get("type") if isinstance(reason, dict | Mapping) else reason
    if kind is not None:
        attrs["finish_reason"] = kind
    children = [
        {"name": name, "duration": float(value), "attrs": {}}
        for name, value in meta.items()
        if isinstance(name, str)
        and name.startswith(STAGES)
        and name.endswith(STAGE_SUFFIXES)
        and isinstance(value, int | float)
    ]
    if children:
        attrs[TRACE_CHILDREN_KEY] = children
    return attrs
