"""A generate function with a tool: the model may call a calculator with [47*38] and answers in its
next turn.

    <|user|>47*38=<|assistant|>  [47*38]<|end|>  <|tool|>1786<|assistant|>  1786<|end|>
    prompt                       sampled, mask 1 delta, mask 0              sampled, mask 1

--custom-generate-function-path examples.calculator.rollout.generate --custom-rm-path
examples.calculator.rollout.exact_answer
"""

from __future__ import annotations

import operator
import re
from typing import Any

from slime.exceptions import ConfigError
from slime.prompts.chat_render import ChatTemplate
from slime.rollout import sglang_rollout
from slime.rollout.sglang_rollout import GenerateState
from slime.rollout.tool_calls import ToolCall, parse_turn
from slime.rollout.turns import append_turn_delta, compute_turn_delta, turn_text
from slime.utils.types import Sample

MAX_TURNS = 2
CALL_MARKS = ("[", "]")
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def read_expression(text: str) -> ToolCall:
    """Returns the call of an expression such as 47*38: two numbers of at most six digits and + - or
    *.
    """
    match = re.fullmatch(r"([0-9]{1,6})([-+*])([0-9]{1,6})", text)
    if match is None:
        return ToolCall(text, problem="error")
    return ToolCall(text, "calculator", {"a": int(match[1]), "sign": match[2], "b": int(match[3])})


def call_calculator(call: ToolCall) -> str:
    """Returns the result as text, or the problem with the call, which the model gets to see."""
    if call.problem is not None:
        return call.problem
    return str(OPERATORS[call.arguments["sign"]](call.arguments["a"], call.arguments["b"]))


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Returns the sample with up to two turns; the tool's results and all that the template writes
    have mask 0.

    An aborted sample goes on where it stopped: what the turns so far said is kept in its metadata.
    """
    state = GenerateState(args)
    memory = sample.metadata
    if sample.response_length == 0:
        if isinstance(sample.prompt, str):
            raise ConfigError(
                "turns are added to chat messages, not to rendered text: remove "
                "--apply-chat-template."
            )
        memory.update(messages=list(sample.prompt), turn_start=0, round_number=1)
    template = ChatTemplate(state.tokenizer, memory.get("tools"), sample.apply_chat_template_kwargs)
    while True:
        await sample_turn(args, state, sample, sampling_params)
        if sample.status is not Sample.Status.COMPLETED:
            return sample
        border = len(sample.tokens) - sample.response_length + memory["turn_start"]
        context, sampled = sample.tokens[:border], sample.tokens[border:]
        text = turn_text(sampled, template=template)
        turn = parse_turn(text, marks=CALL_MARKS, read_call=read_expression)
        if not turn.calls or memory["round_number"] == MAX_TURNS:
            memory["answer"] = "" if turn.calls else turn.content
            return sample
        messages = [*memory["messages"], {"role": "assistant", "content": text}]
        results = [{"role": "tool", "content": call_calculator(call)} for call in turn.calls]
        delta = compute_turn_delta(
            context, sampled, template=template, messages=messages, new_messages=results
        )
        append_turn_delta(sample, delta)
        memory.update(messages=messages + results, turn_start=sample.response_length)
        memory["round_number"] += 1


async def sample_turn(
    args: Any, state: Any, sample: Sample, sampling_params: dict[str, Any]
) -> None:
    """Samples one more turn onto the sample, unless the rollout was told to stop."""
    if state.aborted:
        sample.status = Sample.Status.ABORTED
        return
    sample.status = Sample.Status.PENDING
    # the limit in it is for the whole response, and generate() reduces it in place
    params = dict(sampling_params)
    if "sampling_seed" in params:
        params["sampling_seed"] = (
            params["sampling_seed"] + sample.metadata["round_number"]
        ) % 2**31
    await sglang_rollout.generate(args, sample, params)


async def exact_answer(args: Any, sample: Sample, **kwargs: Any) -> float:
    """Returns 1.0 when the last turn is the label and nothing else."""
    return float(sample.metadata.get("answer") == sample.label)
