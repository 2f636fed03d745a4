"""What a new turn adds to a multi-turn response: sampled ids as they are, and the ids that template
and environment add.

    turn 1: sampled ids [mask 1] -> delta: end of turn, tool results, next header [mask 0] -> turn
    2: sampled ids [mask 1] ...

Sampled ids are never encoded again. The delta is what the template writes behind the turn, found
with a probe in the render of the whole conversation (prompts/chat_render.py), less the end of turn
that the model has emitted itself. Whether the whole render still equals what was sampled is checked
every time: a template that strips earlier reasoning makes it differ, and then the sampled ids are
kept, or the conversation goes on in a second sample of the same rollout. Pure: no `args`, no
engine. Shapes: C = context ids before the turn, S = sampled ids, D = ids of the delta.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from slime.data.sample import Sample
from slime.exceptions import ConfigError, RolloutDataError
from slime.prompts.chat_render import ChatTemplate
from slime.rollout.generation import reset_to_prompt

# What follows when the whole render differs from what was sampled.
KEEP, FORK, REFUSE = RERENDER_POLICIES = ("keep", "fork", "refuse")
EXCERPT = 40


@dataclasses.dataclass(frozen=True)
class Rerender:
    """A whole render that is no continuation of what was sampled.

    `token_ids` are the ids of that render with the generation prompt; `kept` and `rendered` the two
    texts from the first character in which they differ, `position`, on.
    """

    token_ids: list[int]
    position: int
    kept: str
    rendered: str

    def __str__(self) -> str:
        kept, rendered = self.kept[:EXCERPT], self.rendered[:EXCERPT]
        return (
            f"from character {self.position} on, {kept!r} was sampled or given, and the chat "
            f"template now writes {rendered!r}"
        )


@dataclasses.dataclass(frozen=True)
class TurnDelta:
    """What template and environment add behind a sampled turn: ids [D] without log-probs, their
    text, and how the whole render differs from what was sampled, None where it does not.
    """

    token_ids: list[int]
    text: str
    rerender: Rerender | None = None


def compute_turn_delta(
    context_ids: Sequence[int],
    sampled_ids: Sequence[int],
    *,
    template: ChatTemplate,
    messages: list[dict],
    new_messages: list[dict],
    end_token_ids: Collection[int] = (),
) -> TurnDelta:
    """The ids that stand between a sampled turn and the next one: the turn's end and separators
    that the model did not emit, the new messages, and the next generation prompt.

    context_ids: everything before the turn [C], as it was sent. sampled_ids: the turn as sampled
    [S]. messages: the conversation up to and including the assistant's message for `sampled_ids`.
    new_messages: what follows. end_token_ids: ids that end a turn in place of the template's own
    end mark, when they were sampled last. RolloutDataError where the template refuses the
    conversation or does not show where the turn ends.
    """
    if not messages or messages[-1].get("role") != "assistant" or not new_messages:
        raise RolloutDataError(
            "a turn delta lies between an assistant message and new ones; the conversation ends "
            "with "
            f"{messages[-1].get('role') if messages else None!r} and {len(new_messages)} messages are new."
        )
    position, conversation = len(messages) - 1, [*messages, *new_messages]
    behind = template.text_after_turn(conversation, position, add_generation_prompt=True)
    if behind is None:
        raise RolloutDataError(
            f"the chat template does not show where turn {position} ends: its content appears not "
            "exactly once, or what is "
            "written behind it depends on it. Roles: "
            f"{[message.get('role') for message in conversation]}. Give the "
            "tokenizer a template that writes messages in order, or build the ids of new turns in your generate function."
        )
    token_ids = template.encode_continuation(behind)
    if token_ids and token_ids[0] in template.special_ids:
        token_ids = _without_emitted_ids(token_ids, sampled_ids, end_token_ids)
    else:
        mark = template.text_between(conversation, position)
        token_ids = template.encode_continuation(
            _without_emitted_text(behind, template.decode(sampled_ids), mark)
        )
    ids_so_far = [*context_ids, *sampled_ids, *token_ids]
    full_ids = template.encode(template.render(conversation, add_generation_prompt=True))
    rerender = None if ids_so_far == full_ids else _difference(ids_so_far, full_ids, template)
    return TurnDelta(token_ids, _text_behind(sampled_ids, token_ids, template), rerender)


def _text_behind(sampled_ids: Sequence[int], token_ids: list[int], template: ChatTemplate) -> str:
    """The text of a delta as it stands behind the turn: alone, many tokenizers would leave out its
    first space.
    """
    turn, both = template.decode(sampled_ids), template.decode([*sampled_ids, *token_ids])
    return both.removeprefix(turn) if both.startswith(turn) else template.decode(token_ids)


def _without_emitted_ids(
    behind_ids: list[int], sampled_ids: Sequence[int], end_token_ids: Collection[int]
) -> list[int]:
    """The ids behind a turn that ends with a special token, less those that were sampled.

    Content holds no special tokens, so equal ids at the border are the end of turn, and what
    follows it.
    """
    sampled = list(sampled_ids)
    for count in range(min(len(behind_ids), len(sampled)), 0, -1):
        if sampled[-count:] == behind_ids[:count]:
            return behind_ids[count:]
    return behind_ids[1:] if sampled and sampled[-1] in end_token_ids else behind_ids


def _without_emitted_text(behind: str, sampled_text: str, mark: str | None) -> str:
    """The text behind a turn that ends with text, the next role's tag `mark`, less the tag where it
    was sampled.

    It counts as sampled where it was sampled whole, in whatever tokens, its trailing white space
    excepted.
    """
    if not mark or not mark.strip() or not behind.startswith(mark):
        return behind
    for length in range(len(mark), len(mark.rstrip()) - 1, -1):
        if sampled_text.endswith(mark[:length]):
            return behind[length:]
    return behind


def _difference(
    ids_so_far: list[int], full_ids: list[int], template: ChatTemplate
) -> Rerender | None:
    """How two sequences differ as text; None where only the split into tokens does."""
    kept, rendered = template.decode(ids_so_far), template.decode(full_ids)
    if kept == rendered:
        return None
    same = next(
        (i for i, (a, b) in enumerate(zip(kept, rendered, strict=False)) if a != b),
        min(len(kept), len(rendered)),
    )
    return Rerender(full_ids, same, kept[same:], rendered[same:])


def append_turn_delta(sample: Sample, delta: TurnDelta, *, on_rerender: str = KEEP) -> Sample:
    """The sample that the next turn is generated on. `sample` gets the delta's ids in any case,
    with mask 0.

    on_rerender: what happens where the whole render differs from what was sampled. "keep": the
    sampled ids stay the context, `sample` is returned. "fork": a new sample of the same rollout is
    returned, whose prompt is that render; both belong into the list that the generate function
    returns. "refuse": RolloutDataError, nothing is changed.
    """
    if on_rerender not in RERENDER_POLICIES:
        raise ConfigError(
            f"on_rerender is {on_rerender!r}; it is one of {', '.join(RERENDER_POLICIES)}."
        )
    if delta.rerender is not None and on_rerender == REFUSE:
        raise RolloutDataError(
            f"sample {sample.index}: the conversation is not what was sampled: {delta.rerender}. "
            "Use a template that keeps "
            "earlier turns as they are, or on_rerender='keep' or 'fork'."
        )
    sample.append_response_tokens(tokens=delta.token_ids, trainable=False, text=delta.text)
    if delta.rerender is None or on_rerender == KEEP:
        return sample
    return fork_sample(sample, delta.rerender.token_ids)


def fork_sample(sample: Sample, prompt_ids: Sequence[int]) -> Sample:
    """A second sample of the same rollout with `prompt_ids` as its whole prompt and nothing
    generated.

    `sample.rollout_id`, where it is None, becomes the sample's index, so that both share one loss
    denominator. RolloutDataError for a sample that has neither.
    """
    if sample.rollout_id is None:
        if sample.index is None:
            raise RolloutDataError(
                "a sample without index and rollout_id cannot be forked: set Sample.rollout_id."
            )
        sample.rollout_id = sample.index
    fork = reset_to_prompt(sample)
    fork.tokens = list(prompt_ids)
    fork.metadata = dict(sample.metadata)
    return fork


def turn_text(
    sampled_ids: Sequence[int], *, template: ChatTemplate, stops: Sequence[str] = ()
) -> str:
    """The content of a sampled turn: its text with special tokens inside it (thinking tags may be
    such), without end marks and padding behind it, and without the stop string that ended it.
    """
    ids = list(sampled_ids)
    while ids and ids[-1] in template.special_ids:
        ids.pop()
    text = template.decode(ids)
    ending = max((stop for stop in stops if stop and text.endswith(stop)), key=len, default="")
    return text.removesuffix(ending)
