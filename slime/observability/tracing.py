"""Spans and events of one sample's life, kept in `sample.trace` as plain dictionaries that JSON can hold.

    with trace_span(sample, "sglang_generate") as attrs:
        reply = await post(...)
        attrs.update(build_sglang_meta_trace_attrs(reply["meta_info"]))

A trace is {"trace_id", "events"}; an event {"type": "span_start" | "span_end" | "event", "name", "time", "attrs"} and, for spans,
"span_id", "parent_id" and, at the end, "duration". Times are seconds since the epoch, durations seconds of a monotonic clock. Tracing never raises
into the code that it watches.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

logger = logging.getLogger(__name__)

# an attribute under this key holds child spans as [{"name", "duration", "attrs"}], for durations that only the engine measured
TRACE_CHILDREN_KEY = "trace_children"

PLAIN_META = ("prompt_tokens", "completion_tokens", "cached_tokens", "queue_time", "e2e_latency", "decode_throughput")
# disaggregated engines report the time of each stage under <stage>_<what>
STAGES = ("prefill", "decode")
STAGE_SUFFIXES = ("_duration", "_latency", "_time")

_ids = itertools.count(1)
_parent: contextvars.ContextVar[int | None] = contextvars.ContextVar("slime_trace_parent", default=None)


def bind_trace(target: Any, trace: dict[str, Any] | None = None) -> dict[str, Any] | None:
    """Returns the trace of `target`, made when it has none; `trace` makes several objects share one. None where it cannot be attached."""
    try:
        if trace is not None:
            target.trace = trace
        found = getattr(target, "trace", None)
        if not isinstance(found, dict) or "events" not in found:
            found = {"trace_id": next(_ids), "events": []}
            target.trace = found
        return found
    except Exception as error:  # noqa: BLE001 - tracing must not reach into what it watches
        logger.debug("no trace on %r: %s", type(target).__name__, error)
        return None


def _traces(target: Any) -> list[dict[str, Any]]:
    """Returns the distinct traces of one object or of nested lists of them."""
    objects = target if isinstance(target, list | tuple) else [target]
    found: list[dict[str, Any]] = []
    for one in objects:
        traces = _traces(one) if isinstance(one, list | tuple) else [bind_trace(one)]
        found += [trace for trace in traces if trace is not None and all(trace is not other for other in found)]
    return found


def _append(target: Any, event: dict[str, Any]) -> None:
    with contextlib.suppress(Exception):  # as above
        for trace in _traces(target):
            trace["events"].append(dict(event))


def trace_event(target: Any, name: str, *, attrs: Mapping[str, Any] | None = None) -> None:
    """Adds one moment to the trace of `target` (a sample or a list of samples)."""
    _append(target, {"type": "event", "name": name, "time": time.time(), "attrs": dict(attrs or {})})


@contextlib.contextmanager
def trace_span(target: Any, name: str, *, attrs: Mapping[str, Any] | None = None) -> Iterator[dict[str, Any]]:
    """Traces the body as a span of `target`; yields its attributes, which the body may extend. An error of the body is noted and raised."""
    span_id, parent_id = next(_ids), _parent.get()
    started, values = time.perf_counter(), dict(attrs or {})
    common = {"name": name, "span_id": span_id, "parent_id": parent_id}
    _append(target, {"type": "span_start", **common, "time": time.time(), "attrs": dict(values)})
    token = _parent.set(span_id)
    try:
        yield values
    except BaseException as error:
        values["error"] = f"{type(error).__name__}: {error}"
        raise
    finally:
        _parent.reset(token)
        duration = time.perf_counter() - started
        end = {"type": "span_end", **common, "time": time.time(), "duration": duration}
        children = values.pop(TRACE_CHILDREN_KEY, None)
        _append(target, {**end, "attrs": dict(values)})
        if isinstance(children, Iterable):
            _append_children(target, span_id, children)


def _append_children(target: Any, parent_id: int, children: Iterable[Mapping[str, Any]]) -> None:
    """Adds spans that somebody else measured, as ended children of `parent_id`."""
    with contextlib.suppress(Exception):  # as above
        for child in children:
            event = {"type": "span_end", "name": child["name"], "span_id": next(_ids), "parent_id": parent_id}
            event |= {"time": time.time(), "duration": child["duration"], "attrs": dict(child.get("attrs", {}))}
            _append(target, event)


def trace_function(
    name: str, target: str | Callable[..., Any] = "sample", attrs_getter: Callable[..., Mapping[str, Any]] | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Returns a decorator that traces every call, of a plain or a coroutine function.

    `target` is the name of the parameter that holds the sample, or a function of the call's arguments that returns it; `attrs_getter`
    gets the same arguments and returns the span's attributes.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function)

        def open_span(args: tuple, kwargs: dict) -> contextlib.AbstractContextManager[Any]:
            try:
                found = (
                    target(*args, **kwargs) if callable(target) else signature.bind(*args, **kwargs).arguments[target]
                )
                attrs = attrs_getter(*args, **kwargs) if attrs_getter is not None else None
                return trace_span(found, name, attrs=attrs)
            except Exception as error:  # noqa: BLE001 - as above
                logger.debug("call of %s is not traced: %s", name, error)
                return contextlib.nullcontext()

        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def traced_coroutine(*args: Any, **kwargs: Any) -> Any:
                with open_span(args, kwargs):
                    return await function(*args, **kwargs)

            return traced_coroutine

        @functools.wraps(function)
        def traced(*args: Any, **kwargs: Any) -> Any:
            with open_span(args, kwargs):
                return function(*args, **kwargs)

        return traced

    return decorate


def build_sglang_meta_trace_attrs(meta: Any) -> dict[str, Any]:
    """Returns what a trace keeps of an engine's meta_info: token counts, queue time, latency, throughput, finish reason's type.

    Durations that a disaggregated engine reports per stage (prefill_..., decode_...) become children under TRACE_CHILDREN_KEY.
    {} for what is no mapping.
    """
    if not isinstance(meta, Mapping):
        return {}
    attrs = {name: meta[name] for name in PLAIN_META if meta.get(name) is not None}
    reason = meta.get("finish_reason")
    kind = reason.get("type") if isinstance(reason, Mapping) else reason
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
