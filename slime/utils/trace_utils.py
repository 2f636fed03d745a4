"""Upstream's path of slime.tracking.tracing."""

from slime.tracking.tracing import (
    TRACE_CHILDREN_KEY,
    TraceHandle,
    TraceSpanContext,
    bind_trace,
    bind_trace_carrier,
    build_sglang_meta_trace_attrs,
    export_trace,
    import_trace,
    trace_event,
    trace_function,
    trace_next_attempt,
    trace_span,
)

__all__ = [
    "TRACE_CHILDREN_KEY",
    "TraceHandle",
    "TraceSpanContext",
    "bind_trace",
    "bind_trace_carrier",
    "build_sglang_meta_trace_attrs",
    "export_trace",
    "import_trace",
    "trace_event",
    "trace_function",
    "trace_next_attempt",
    "trace_span",
]
