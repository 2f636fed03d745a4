"""Tool calls: only behind the reasoning, and malformed ones are answered instead of crashing."""

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
    """Read from the whole text there would be two calls."""
    assert names(text, **options) == ["add"]


@pytest.mark.parametrize(("text", "options"), [(f"<think>{CALL}", {}), (CALL, {"starts_in_reasoning": True})])
def test_reasoning_that_never_ends_holds_no_calls(text, options):
    """A response cut while it thinks has decided nothing."""
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
    """The model gets an answer it can learn from; nothing is raised."""
    (call,) = parse_turn(f"<tool_call>\n{inside}\n</tool_call>").calls
    assert problem in call.problem and call.text == inside


def test_a_call_without_its_end_has_a_problem():
    """Cut by the length limit: running half of a call would be a guess."""
    assert parse_turn(f"so <tool_call>{A}").calls == (ToolCall(A, problem="the call has no </tool_call>"),)


def test_content_reasoning_and_calls_come_apart_in_order():
    """Parallel calls keep their order; what is said around them is the content."""
    turn = parse_turn(f"<think>\nx\n</think>\n\nfirst {CALL}{CALL.replace('add', 'sub')} last")
    assert (turn.reasoning, turn.content) == ("x", "first  last")
    assert [(call.name, call.arguments) for call in turn.calls] == [("add", {"a": 1}), ("sub", {"a": 1})]
    plain = parse_turn(" just text ")
    assert (plain.reasoning, plain.content, plain.calls) == (None, "just text", ())


def test_marks_and_their_reading_are_the_models_own():
    """A tiny model calls its calculator with [1+2]."""
    turn = parse_turn(
        "[1+2]", marks=("[", "]"), read_call=lambda text: ToolCall(text, "calculator", {"expression": text})
    )
    assert turn.calls[0].arguments == {"expression": "1+2"}


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
