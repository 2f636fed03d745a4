"""Parses tool calls from the text of a turn. Only calls after the reasoning count; a malformed one
is returned with its problem and is not an error.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
CALL_MARKS = ("<tool_call>", "</tool_call>")


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """One call: the function's name and arguments, or `problem`, a message that can be given back
    to the model.
    """

    text: str
    name: str | None = None
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    problem: str | None = None


@dataclasses.dataclass(frozen=True)
class ParsedTurn:
    """A turn's reasoning (None without any), the content behind it without its calls, and the calls
    in their order.
    """

    reasoning: str | None
    content: str
    calls: tuple[ToolCall, ...]


def read_json_call(text: str) -> ToolCall:
    """A call written as {"name": "...", "arguments": {...}}; with `problem` set where it is not."""
    try:
        value = json.loads(text)
    except ValueError as error:
        return ToolCall(text, problem=f"the tool call is not JSON: {error}")
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return ToolCall(text, problem='a tool call is {"name": "...", "arguments": {...}}')
    arguments = value.get("arguments", {})
    if not isinstance(arguments, dict):
        return ToolCall(
            text, value["name"], problem="the arguments of a tool call are a JSON object"
        )
    return ToolCall(text, value["name"], arguments)


def parse_turn(
    text: str,
    *,
    marks: tuple[str, str] = CALL_MARKS,
    read_call: Callable[[str], ToolCall] = read_json_call,
    starts_in_reasoning: bool = False,
) -> ParsedTurn:
    """The parts of a turn's text, read from left to right. Reasoning that is not closed reaches to
    the end; a call that is not closed is a call with a problem.

    starts_in_reasoning: the generation prompt has opened the reasoning. A closing tag before any
    opening one means the same.
    """
    opened, closed = text.find(THINK_OPEN), text.find(THINK_CLOSE)
    if starts_in_reasoning or 0 <= closed < (opened if opened >= 0 else len(text)):
        text = text if opened == 0 else THINK_OPEN + text
    reasoning: list[str] = []
    content: list[str] = []
    calls: list[ToolCall] = []
    while True:
        places = [(text.find(mark), mark) for mark in (THINK_OPEN, marks[0]) if mark in text]
        if not places:
            break
        place, mark = min(places)
        content.append(text[:place])
        inside, end, text = text[place + len(mark) :].partition(
            THINK_CLOSE if mark == THINK_OPEN else marks[1]
        )
        if mark == THINK_OPEN:
            reasoning.append(inside.strip("\n"))
        else:
            unclosed = ToolCall(inside.strip(), problem=f"the call has no {marks[1]}")
            calls.append(read_call(inside.strip()) if end else unclosed)
    content.append(text)
    return ParsedTurn(
        "\n".join(reasoning) if reasoning else None, "".join(content).strip(), tuple(calls)
    )
