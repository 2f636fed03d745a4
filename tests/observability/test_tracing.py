"""Traces tell where a sample's time went, and never disturb the calls that they record."""

import asyncio
import types

import pytest

from slime.data.sample import Sample
from slime.tracking.tracing import (
    TRACE_CHILDREN_KEY,
    bind_trace,
    build_sglang_meta_trace_attrs,
    trace_event,
    trace_function,
    trace_span,
)

NUM_GPUS = 0


def events_of(sample, kind=None):
    return [event for event in sample.trace["events"] if kind in (None, event["type"])]


def test_spans_nest_and_end_with_their_duration():
    """The request's span lies inside the sample's and has the attributes of its end."""
    sample = Sample()
    with trace_span(sample, "generate", attrs={"turn": 1}):
        with trace_span(sample, "sglang_generate") as attrs:
            attrs["completion_tokens"] = 3
    outer, inner = events_of(sample, "span_start")
    ends = events_of(sample, "span_end")
    assert [event["name"] for event in ends] == ["sglang_generate", "generate"]
    assert inner["parent_id"] == outer["span_id"] and outer["parent_id"] is None
    assert ends[0]["attrs"] == {"completion_tokens": 3} and inner["attrs"] == {}
    assert 0 <= ends[0]["duration"] <= ends[1]["duration"] < 1


def test_error_of_the_body_is_noted_and_raised():
    """A span whose body raises records the error and raises it."""
    sample = Sample()
    with pytest.raises(KeyError):
        with trace_span(sample, "reward"):
            raise KeyError("label")
    assert events_of(sample, "span_end")[0]["attrs"] == {"error": "KeyError: 'label'"}


def test_one_span_of_a_group_is_in_every_members_trace():
    """A group request's span is in the trace of each of its samples, once where samples share a
    trace."""
    first, second, third = Sample(), Sample(), Sample()
    bind_trace(third, bind_trace(first))
    trace_event([first, [second, third]], "dispatched")
    assert [len(events_of(sample)) for sample in (first, second, third)] == [1, 1, 1]
    assert first.trace is third.trace


def test_decorated_functions_are_traced_under_their_samples():
    """Plain and coroutine functions are traced under their samples, given by position or by
    name."""

    @trace_function(
        "score", target="sample", attrs_getter=lambda args, sample: {"label": sample.label}
    )
    def score(args, sample):
        return 10

    @trace_function("wait", target=lambda args, sample: sample)
    async def wait(args, sample):
        return 20

    sample = Sample(label="85")
    assert score(None, sample=sample) == 10
    assert asyncio.run(wait(None, sample)) == 20
    ends = events_of(sample, "span_end")
    assert [(event["name"], event["attrs"]) for event in ends] == [
        ("score", {"label": "85"}),
        ("wait", {}),
    ]


@pytest.mark.parametrize(
    "target",
    [None, 7, types.MappingProxyType({}), object()],
    ids=["none", "int", "proxy", "object"],
)
def test_what_cannot_be_traced_runs_all_the_same(target):
    """A call without a traceable sample runs as without tracing."""
    with trace_span(target, "x") as attrs:
        attrs["a"] = 1
    trace_event(target, "y")
    assert trace_function("z", target="missing")(lambda sample: sample)(target) is target


def test_failing_attribute_getter_does_not_fail_the_call():
    """An attribute getter that raises does not fail the call."""
    sample = Sample()
    assert trace_function("z", attrs_getter=lambda sample: 1 / 0)(lambda sample: 3)(sample) == 3


def test_meta_info_keeps_counts_times_and_the_kind_of_end():
    """Of meta_info the counts, times and the kind of end are kept."""
    meta = {
        "id": "r1", "prompt_tokens": 8, "completion_tokens": 3, "cached_tokens": 0, "queue_time": 0.25, "e2e_latency": 1.5,
        "decode_throughput": 12.0, "finish_reason": {"type": "stop", "matched": 1}, "output_token_logprobs": [[-0.1, 5, None]],
    }  # fmt: skip
    assert build_sglang_meta_trace_attrs(meta) == {
        "prompt_tokens": 8, "completion_tokens": 3, "cached_tokens": 0, "queue_time": 0.25, "e2e_latency": 1.5,
        "decode_throughput": 12.0, "finish_reason": "stop",
    }  # fmt: skip
    assert build_sglang_meta_trace_attrs(None) == {}


def test_stage_durations_become_children_of_the_request():
    """Prefill and decode times of different servers become spans below the request's."""
    sample = Sample()
    meta = {"e2e_latency": 2.0, "prefill_duration": 0.5, "decode_duration": 1.25}
    with trace_span(sample, "sglang_generate") as attrs:
        attrs.update(build_sglang_meta_trace_attrs(meta))
    request, *children = events_of(sample, "span_end")
    assert TRACE_CHILDREN_KEY not in request["attrs"]
    assert [(child["name"], child["duration"]) for child in children] == [
        ("prefill_duration", 0.5),
        ("decode_duration", 1.25),
    ]
    assert all(child["parent_id"] == request["span_id"] for child in children)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
