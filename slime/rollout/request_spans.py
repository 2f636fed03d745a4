"""What --trace keeps of a generation request: the span `sglang_generate` in the trace of each of
its samples, from which the rollout's request/, prefill/ and decode/ metrics are made, and a span of
the process.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from slime.data.sample import Sample
from slime.tracking.spans import add_span, is_tracing
from slime.tracking.tracing import (
    TRACE_CHILDREN_KEY,
    build_sglang_meta_trace_attrs,
    trace_spans,
)

Note = Callable[[Sequence[Any]], None]
TRACK = "requests"
PREFILL = "prefill_launch_latency"


@contextlib.contextmanager
def traced_request(samples: Sequence[Sample]) -> Iterator[Note]:
    """Inside, a request for one response of each sample is under way. Yields a function that takes
    the engine's replies, in the samples' order. Without --trace the samples stay as they are.
    """
    if not is_tracing():
        yield _ignore
        return
    started = time.perf_counter()
    with trace_spans(samples, "sglang_generate") as attrs:

        def note(replies: Sequence[Any]) -> None:
            for values, reply in zip(attrs, replies, strict=True):
                values.update(_measured(reply))

        try:
            yield note
        finally:
            about = {
                "samples": [sample.index for sample in samples],
                "groups": [sample.group_index for sample in samples],
                "measured": attrs,
            }
            add_span("request", started, time.perf_counter(), track=TRACK, attrs=about)


def _measured(reply: object) -> dict[str, Any]:
    """What the engine measured, the durations of its stages as entries like the others. Engines
    tell the time of the prompt's pass, and of that and the decoding together.
    """
    meta = reply.get("meta_info") if isinstance(reply, dict) else None
    found = build_sglang_meta_trace_attrs(meta)
    for stage in found.pop(TRACE_CHILDREN_KEY, ()):
        found[stage["name"]] = stage["duration"]
    prefill, both = found.get(PREFILL), meta.get("inference_time") if found and meta else None
    if isinstance(prefill, float) and isinstance(both, float):
        found["decode_duration"] = both - prefill
    return found


def _ignore(replies: Sequence[Any]) -> None:
    del replies
