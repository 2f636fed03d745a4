"""Upstream's path of slime.observability.tracing."""

from slime.observability.tracing import (
    TRACE_CHILDREN_KEY,
    bind_trace,
    build_sglang_meta_trace_attrs,
    trace_event,
    trace_function,
    trace_span,
)

__all__ = [
    "TRACE_CHILDREN_KEY",
    "bind_trace",
    "build_sglang_meta_trace_attrs",
    "trace_event",
    "trace_function",
    "trace_span",
]
