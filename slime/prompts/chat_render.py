"""Text of conversations as a tokenizer's chat template writes it, and where in that text a turn
ends. Pure; no `args`.

Templates are programs: they may strip earlier reasoning, merge consecutive tool results, or write a
turn's end only once the next one follows. Therefore nothing here is located by the length of an
earlier render. A word that occurs nowhere else takes the place of one message's content, the
conversation is rendered as a whole, and the word is looked up in it.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence
from typing import Any

from slime.exceptions import RolloutDataError
from slime.prompts.template_limits import TemplateLimit, apply_template
from slime.typing import Tokenizer

# What a template may write beside a message's content, and a probe must not have: it would move or
# repeat the word.
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
PROBE_WORD = "Zq{}jX"


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """A tokenizer's chat template with what stays the same over a conversation: tools and template
    arguments.
    """

    tokenizer: Any
    tools: list | None = None
    template_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)

    def render(self, messages: list[dict], *, add_generation_prompt: bool = False) -> str:
        """The conversation's text. RolloutDataError with the template's own words where it refuses
        the messages.
        """
        from jinja2 import TemplateError

        try:
            return apply_template(
                self.tokenizer,
                renderable_messages(self.tokenizer, messages),
                tools=self.tools,
                add_generation_prompt=add_generation_prompt,
                **self.template_kwargs,
            )
        except (TemplateError, TypeError, KeyError) as error:
            roles = [message.get("role") for message in messages]
            raise RolloutDataError(
                f"the chat template cannot render the roles {roles}: {error}. Change the messages "
                "or give the tokenizer "
                "another chat template."
            ) from error

    def encode(self, text: str) -> list[int]:
        """The ids of a whole conversation's text; the template writes its own BOS,
        none is added.
        """
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def encode_continuation(self, text: str) -> list[int]:
        """The ids of a text that stands behind other tokens, without what tokenizers put in front
        of a text's first word.
        """
        if not text:
            return []
        ids = self.encode(text)
        anchor = self.tokenizer.eos_token
        if ids[0] in self.special_ids or anchor is None:
            return ids
        anchored = self.encode(anchor + text)
        return anchored[1:] if anchored[0] == self.tokenizer.eos_token_id else ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of `token_ids`, special tokens included."""
        return self.tokenizer.decode(
            list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    @functools.cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that ordinary text never encodes to: end marks, role marks, padding; not unknown text
        or `<think>` and its like.
        """
        tokenizer = self.tokenizer
        marks = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}
        added = {
            i
            for i, token in getattr(tokenizer, "added_tokens_decoder", {}).items()
            if token.special
        }
        return frozenset({*tokenizer.all_special_ids, *added} - ({tokenizer.unk_token_id} - marks))

    def text_after(
        self,
        messages: list[dict],
        position: int,
        *,
        add_generation_prompt: bool = False,
        keep_calls: bool = False,
    ) -> str | None:
        """What the render has behind the content of message `position`; None where the content does
        not show exactly once.

        The message stands as plain content, without reasoning and, unless `keep_calls`, without
        tool calls.
        """
        word = _unused_word(messages, self.tools)
        probe = list(messages)
        probe[position] = _with_content(messages[position], word, keep_calls=keep_calls)
        try:
            text = self.render(probe, add_generation_prompt=add_generation_prompt)
        except TemplateLimit:
            raise
        except RolloutDataError:  # it may demand the tool call that a tool result answers
            return None
        return text.split(word, 1)[1] if text.count(word) == 1 else None

    def text_between(self, messages: list[dict], position: int) -> str | None:
        """What the render has between the contents of messages `position` and `position + 1`: end
        of turn, separators, the next role's header. None where it cannot be located.
        """
        word = _unused_word(messages, self.tools)
        probe = list(messages)
        probe[position + 1] = _with_content(messages[position + 1], word, keep_calls=True)
        after = self.text_after(probe, position)
        return after.split(word, 1)[0] if after is not None and after.count(word) == 1 else None

    def text_after_turn(
        self, messages: list[dict], position: int, *, add_generation_prompt: bool = False
    ) -> str | None:
        """What the render has behind the whole turn `position`, its tool calls included; None where
        it cannot be located.

        The true render must end with what is returned, whatever the template does to earlier turns.
        """
        full = self.render(messages, add_generation_prompt=add_generation_prompt)
        after = self.text_after(messages, position, add_generation_prompt=add_generation_prompt)
        if after is not None and full.endswith(after):
            return after
        after = self._text_after_calls(
            messages, position, add_generation_prompt=add_generation_prompt
        )
        return after if after is not None and full.endswith(after) else None

    def _text_after_calls(
        self, messages: list[dict], position: int, *, add_generation_prompt: bool
    ) -> str | None:
        """The same for templates that write a tool result by what they find in the call, which must
        stand in the probe.
        """
        if not messages[position].get("tool_calls"):
            return None
        turn = messages[: position + 1]
        end = self.text_after(turn, position)
        calls_and_end = self.text_after(turn, position, keep_calls=True)
        after = self.text_after(
            messages, position, add_generation_prompt=add_generation_prompt, keep_calls=True
        )
        if not end or not calls_and_end or after is None or not calls_and_end.endswith(end):
            return None
        calls = calls_and_end[: len(calls_and_end) - len(end)]
        return after[len(calls) :] if after.startswith(calls + end.rstrip()) else None


def renderable_messages(tokenizer: Tokenizer, messages: list[dict]) -> list[dict]:
    """The messages as the template takes them: arguments of tool calls that are JSON text become
    values where the template would encode the text once more, as most do; a template that writes
    text as it is gets the text.
    """
    if not any(isinstance(message, dict) and message.get("tool_calls") for message in messages):
        return messages
    if not _encodes_arguments(tokenizer):
        return messages
    return [_with_argument_values(message) for message in messages]


_ENCODES: dict[str, bool] = {}  # by template


def _encodes_arguments(tokenizer: Tokenizer) -> bool:
    """Whether the template turns a tool call's arguments into JSON even where they are text, or
    cannot take text at all.
    """
    key = str(getattr(tokenizer, "chat_template", None))
    if key not in _ENCODES:
        call = {
            "id": "call_1",
            "type": "function",
            "function": {"name": "probe", "arguments": '{"probe_key": 1}'},
        }
        probe: list[dict] = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
        try:
            text = apply_template(tokenizer, probe)
            _ENCODES[key] = '\\"probe_key\\"' in text
        except TemplateLimit:
            raise
        except Exception:  # noqa: BLE001 - a template that wants values may raise anything on a text
            _ENCODES[key] = True
    return _ENCODES[key]


def _with_argument_values(message: dict) -> dict:
    calls = message.get("tool_calls")
    return (
        {**message, "tool_calls": [_with_values(call) for call in calls]}
        if isinstance(calls, list)
        else message
    )


def _with_values(call: dict) -> Any:
    """A tool call, with its arguments parsed where they are the JSON text of an object."""
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return {**call, "function": _with_values(call["function"])}
    if not isinstance(call.get("arguments"), str):
        return call
    try:
        values = json.loads(call["arguments"])
    except json.JSONDecodeError:
        return call
    return {**call, "arguments": values} if isinstance(values, dict) else call


def _unused_word(messages: list[dict], tools: list | None) -> str:
    """A word that occurs in none of the messages and tools, and that trimming and escaping leave as
    it is.
    """
    text = str(messages) + str(tools)
    number = 0
    while PROBE_WORD.format(number) in text:
        number += 1
    return PROBE_WORD.format(number)


def _with_content(message: dict, word: str, *, keep_calls: bool) -> dict:
    dropped = REASONING_KEYS if keep_calls else (*REASONING_KEYS, "tool_calls", "function_call")
    kept = {key: value for key, value in message.items() if key not in dropped}
    in_parts = isinstance(message.get("content"), list)
    return {**kept, "content": [{"type": "text", "text": word}] if in_parts else word}
