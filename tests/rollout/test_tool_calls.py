"""Tool calls: only those behind the reasoning count, and a malformed one gets an answer."""

import pytest

from slime.rollout.tool_calls import ToolCall, parse_turn

NUM_GPUS = 0

A = '{"name": "add", "arguments": {"a": 1}}'
CALL = f"<tool_call>{A}</tool_call>"


def names(text, **options):
    return [call.name for call in parse_turn(text, **options).calls]


@pytest.mark.parametrize(
    ("text", "options"),
    [
        (f"<think>I could {CALL}</think>{CALL}", {}),
        (f"I could {CALL}</think>\n\n{CALL}", {}),
        (f"I could {CALL}</think>\n\n{CALL}", {"starts_in_reasoning": True}),
        (f"<think>a</think>{CALL}<think>or {CALL}</think>done", {}),
        (f"{CALL} <think>again {CALL}", {}),
    ],
    ids=["in tags", "prompt opened it", "said so", "second thoughts", "unclosed second thoughts"],
)
def test_a_call_drafted_in_the_reasoning_is_not_run(text, options):
    """A call drafted in the reasoning is not run."""
    assert names(text, **options) == ["add"]


@pytest.mark.parametrize(
    ("text", "options"), [(f"<think>{CALL}", {}), (CALL, {"starts_in_reasoning": True})]
)
def test_reasoning_that_never_ends_holds_no_calls(text, options):
    """A response that was cut while reasoning has no calls."""
    turn = parse_turn(text, **options)
    assert turn.calls == () and turn.content == "" and turn.reasoning == CALL


@pytest.mark.parametrize(
    ("inside", "problem"),
    [
        ("{name: add}", "not JSON"),
        ('{"name": 3}', '"name": "..."'),
        ("[1]", '"name": "..."'),
        ('{"name": "add", "arguments": "a"}', "JSON object"),
    ],
)
def test_a_malformed_call_is_one_call_with_a_problem_to_give_back(inside, problem):
    """A malformed call is one call with a problem to send back to the model; nothing raises."""
    (call,) = parse_turn(f"<tool_call>\n{inside}\n</tool_call>").calls
    assert problem in call.problem and call.text == inside


def test_a_call_without_its_end_has_a_problem():
    """A call cut by the length limit has a problem and is not run."""
    assert parse_turn(f"so <tool_call>{A}").calls == (
        ToolCall(A, problem="the call has no </tool_call>"),
    )


def test_content_reasoning_and_calls_come_apart_in_order():
    """Content, reasoning and calls are separated, and parallel calls keep their order."""
    turn = parse_turn(f"<think>\nx\n</think>\n\nfirst {CALL}{CALL.replace('add', 'sub')} last")
    assert (turn.reasoning, turn.content) == ("x", "first  last")
    assert [(call.name, call.arguments) for call in turn.calls] == [
        ("add", {"a": 1}),
        ("sub", {"a": 1}),
    ]
    plain = parse_turn(" just text ")
    assert (plain.reasoning, plain.content, plain.calls) == (None, "just text", ())


def test_marks_and_their_reading_are_the_models_own():
    """The marks of a call, and how it is read, can be set: a tiny model calls its calculator with
    [1+2]."""
    turn = parse_turn(
        "[1+2]",
        marks=("[", "]"),
        read_call=lambda text: ToolCall(text, "calculator", {"expression": text}),
    )
    assert turn.calls[0].arguments == {"expression": "1+2"}


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
