"""Token ids and loss masks of whole conversations, for supervised training.

The ids are always those of the full conversation's own render, never of messages rendered one by
one. What is trained is located in the text of that render - from where the generation prompt ends
to where the assistant's turn ends - and carried to tokens by their character offsets. A
conversation whose turns cannot be located is refused; there is no fall-back to a mask of all ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from slime.exceptions import ConfigError
from slime.prompts.chat_render import ChatTemplate
from slime.typing import Tokenizer

TOKENIZER_TYPES = ("qwen", "qwen3", "qwen3_5", "distill_qwen")
TURN_START, TURN_END = "<|im_start|>", "<|im_end|>"
THINK_OPEN = "<think>\n"
DISTILL_MARK = "<｜Assistant｜>"

Span = tuple[int, int]  # [start, end) in characters


def get_response_lengths(loss_masks: Sequence[Sequence[int]]) -> list[int]:
    """Per mask, the number of entries from its first 1 to its end; 0 for a mask without a 1."""
    return [len(mask) - _first_one(mask) for mask in loss_masks]


def _first_one(mask: Sequence[int]) -> int:
    return next((position for position, value in enumerate(mask) if value), len(mask))


@dataclasses.dataclass(frozen=True)
class Rendered:
    """A conversation's text and the spans of it that are trained."""

    text: str
    spans: list[Span]


class MultiTurnLossMaskGenerator:
    """Ids and masks of conversations as the tokenizer's chat template renders them.

    Types: qwen and qwen3 train from the end of the assistant header on; qwen3_5 also leaves a
    "<think>\\n" that the generation prompt already holds out; distill_qwen trains the last message
    with its reasoning, which that template would strip. Every assistant turn is trained with the
    end of turn that the model has to produce, except turns whose message has `step_loss_mask` other
    than 1.
    """

    def __init__(self, tokenizer: Tokenizer, tokenizer_type: str = "qwen") -> None:
        if tokenizer_type not in TOKENIZER_TYPES:
            raise ConfigError(
                f"--loss-mask-type {tokenizer_type!r} is not one of {', '.join(TOKENIZER_TYPES)}."
            )
        if not getattr(tokenizer, "is_fast", False):
            raise ConfigError(
                "loss masks need a fast tokenizer (with character offsets); "
                f"{type(tokenizer).__name__} is none. "
                "Add a tokenizer.json to the --hf-checkpoint folder."
            )
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError(
                "loss masks need a chat template, and the tokenizer has none. Add one to its "
                "folder."
            )
        self.tokenizer = tokenizer
        is_distill = tokenizer_type == "qwen" and DISTILL_MARK in str(tokenizer.chat_template)
        self.tokenizer_type = "distill_qwen" if is_distill else tokenizer_type

    def get_loss_mask(
        self, messages: list[dict], tools: list | None = None
    ) -> tuple[list[int], list[int]]:
        """(token ids, mask) of one conversation, of equal length. ConfigError where its turns
        cannot be located.
        """
        return self.get_loss_masks([messages], [tools])[0]

    def get_loss_masks(
        self, conversations: Sequence[list[dict]], tools: Sequence[list | None] | None = None
    ) -> list[tuple[list[int], list[int]]]:
        """`get_loss_mask` of many conversations with one call of the tokenizer."""
        tools = [None] * len(conversations) if tools is None else tools
        rendered = [
            self.render(messages, tool) for messages, tool in zip(conversations, tools, strict=True)
        ]
        if not rendered:
            return []
        texts = [one.text for one in rendered]
        encoded = self.tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True)
        columns = zip(encoded["input_ids"], encoded["offset_mapping"], rendered, strict=True)
        return [(list(ids), mask_of_spans(offsets, one.spans)) for ids, offsets, one in columns]

    def render(self, messages: list[dict], tools: list | None = None) -> Rendered:
        """The conversation's text with the spans to train."""
        if problem := conversation_problem(messages, self.tokenizer_type):
            raise ConfigError(f"{problem}: {_shown(messages)}")
        if self.tokenizer_type == "distill_qwen":
            return self._render_distill(messages, tools)
        text = self._template(messages, tools)
        spans = [
            self._span(text, messages, position, tools)
            for position in _assistant_positions(messages)
        ]
        if any(span is None for span in spans):
            spans = self._spans_by_markers(text, messages)
        return Rendered(text, [span for span in spans if span is not None and span[0] < span[1]])

    def _span(
        self, text: str, messages: list[dict], position: int, tools: list | None
    ) -> Span | None:
        """Where message `position` stands in `text`; () for a turn that is not trained; None if it
        cannot be located.
        """
        if messages[position].get("step_loss_mask", 1) != 1:
            return (0, 0)
        if position == 0:
            return None
        before = self._template(messages[:position], tools, add_generation_prompt=True)
        is_last = position == len(messages) - 1
        upto = text if is_last else self._template(messages[: position + 1], tools)
        if not (text.startswith(upto) and upto.startswith(before)):
            return None
        if is_last or not _ends_with_content(upto[len(before) :], messages[position]):
            return len(before), len(upto)
        # Nothing marks the turn's end but the next role's tag, which the model therefore has to
        # produce.
        tag = ChatTemplate(self.tokenizer, tools).text_between(messages, position) or ""
        return len(before), len(upto) + (len(tag) if text.startswith(tag, len(upto)) else 0)

    def _spans_by_markers(self, text: str, messages: list[dict]) -> list[Span | None]:
        """The assistant turns of a ChatML text by its markers, for templates that render a turn
        differently later on.
        """
        header = f"{TURN_START}assistant\n"
        starts = _find_all(text, header)
        positions = _assistant_positions(messages)
        if len(starts) != len(positions):
            raise ConfigError(
                "cannot tell which tokens to train: the template renders earlier turns "
                "differently once later "
                f"ones follow, "
                f"and its text has {len(starts)} assistant headers for {len(positions)} assistant "
                "messages: "
                f"{_shown(messages)}"
            )
        spans: list[Span | None] = []
        for start, position in zip(starts, positions, strict=True):
            begin = start + len(header)
            if self.tokenizer_type == "qwen3_5" and text.startswith(THINK_OPEN, begin):
                begin += len(THINK_OPEN)
            stop = text.find(TURN_END, begin)
            if stop < 0:
                raise ConfigError(f"an assistant turn has no {TURN_END}: {_shown(messages)}")
            stop += len(TURN_END)
            stop += text.startswith("\n", stop)
            is_trained = messages[position].get("step_loss_mask", 1) == 1
            spans.append((begin, stop) if is_trained else (0, 0))
        return spans

    def _render_distill(self, messages: list[dict], tools: list | None) -> Rendered:
        """The last message as it is written, reasoning included, behind the render of those before
        it.
        """
        before = self._template(messages[:-1], tools, add_generation_prompt=True)
        content = messages[-1]["content"]
        if before.endswith(THINK_OPEN):
            content = content.removeprefix(THINK_OPEN)
        text = before + content + (self.tokenizer.eos_token or "")
        is_trained = messages[-1].get("step_loss_mask", 1) == 1
        return Rendered(text, [(len(before), len(text))] if is_trained else [])

    def _template(
        self, messages: list[dict], tools: list | None, *, add_generation_prompt: bool = False
    ) -> str:
        return ChatTemplate(self.tokenizer, tools).render(
            messages, add_generation_prompt=add_generation_prompt
        )

    def get_text_from_loss_mask(
        self, token_ids: Sequence[int], loss_masks: Sequence[int]
    ) -> list[str]:
        """The decoded text of each run of ones, for a look at what is trained."""
        runs: list[list[int]] = []
        previous = 0
        for token, value in zip(token_ids, loss_masks, strict=True):
            if value and not previous:
                runs.append([])
            if value:
                runs[-1].append(token)
            previous = value
        return [self.tokenizer.decode(run) for run in runs]

    def get_loss_mask_with_multimodal_alignment(
        self, messages: list[dict], input_ids: Sequence[int], tools: list | None = None
    ) -> tuple[list[int], list[int]]:
        """(`input_ids`, their mask), where media made `input_ids` longer than the text's ids: zeros
        are put in front.

        ConfigError where the trained part is not the end of both, for then the positions would not
        correspond.
        """
        token_ids, mask = self.get_loss_mask(messages, tools)
        input_ids = list(input_ids)
        length = len(mask) - _first_one(mask)
        if (
            len(mask) > len(input_ids)
            or token_ids[len(token_ids) - length :] != input_ids[len(input_ids) - length :]
        ):
            raise ConfigError(
                f"the {length} tokens from the first trained one on are not the end of the "
                f"{len(input_ids)} input ids; "
                "media behind an assistant turn cannot be aligned."
            )
        return input_ids, [0] * (len(input_ids) - len(mask)) + mask


def mask_of_spans(offsets: Sequence[Span], spans: Sequence[Span]) -> list[int]:
    """1 for each token whose characters lie inside one of the spans, or in which one of them
    begins.

    Where the header's last character and the answer's first are one token, that token is the
    answer's beginning: left out, an answer that begins with a line break would be learned without
    it. A token that goes beyond a span's end holds what others wrote and is not trained.
    """
    mask = [0] * len(offsets)
    for begin, stop in spans:
        for position, (start, end) in enumerate(offsets):
            if (start >= begin or end > begin) and end <= stop and start < stop:
                mask[position] = 1
    return mask


def conversation_problem(messages: list[dict], loss_mask_type: str) -> str | None:
    """Why nothing of a conversation can be trained, None where something can: what the messages
    alone tell, without a template.
    """
    trained = [message for message in messages if message.get("role") == "assistant"]
    if not trained:
        return "a conversation without an assistant message has nothing to train"
    if all(message.get("step_loss_mask", 1) != 1 for message in trained):
        return (
            "a conversation whose assistant messages all have a step_loss_mask other than 1 has "
            "nothing to train"
        )
    if loss_mask_type == "distill_qwen" and (
        messages[-1].get("role") != "assistant" or len(messages) < 2
    ):
        return (
            "loss mask type distill_qwen trains the last message, which must be the "
            "assistant's, behind another one"
        )
    return None


def _ends_with_content(turn: str, message: dict) -> bool:
    """Whether a rendered turn is its content and nothing else."""
    content = message.get("content")
    return isinstance(content, str) and turn.strip() == content.strip()


def _assistant_positions(messages: list[dict]) -> list[int]:
    return [
        position for position, message in enumerate(messages) if message.get("role") == "assistant"
    ]


def _find_all(text: str, needle: str) -> list[int]:
    found, position = [], text.find(needle)
    while position >= 0:
        found.append(position)
        position = text.find(needle, position + 1)
    return found


def _shown(messages: list[dict]) -> str:
    return str(messages)[:200]


def message_pairs(
    prompt: str | list[dict], label: object, *, where: Callable[[], str]
) -> list[dict]:
    """A conversation from what a dataset row holds: its messages, or a prompt with the label as the
    answer to learn.
    """
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if any(message.get("role") == "assistant" for message in prompt[-1:]) or label is None:
        return prompt
    if not isinstance(label, str):
        raise ConfigError(
            f"{where()}: the label {label!r} is a {type(label).__name__}; supervised training "
            "needs a text."
        )
    return [*prompt, {"role": "assistant", "content": label}]
