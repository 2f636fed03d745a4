"""Prompt datasets: from files to samples, with the length filter on the token ids that will be
sent.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
import random
import re
from collections.abc import Callable, Iterator
from typing import Any, cast

import orjson

from slime.data.sample import MultimodalTypes, Sample
from slime.exceptions import ConfigError
from slime.files import exact_json
from slime.prompts.chat_render import renderable_messages
from slime.prompts.masks import conversation_problem, message_pairs
from slime.prompts.prompt_files import Row, parse_generalized_path, read_rows
from slime.prompts.template_limits import apply_template
from slime.typing import Processor, Tokenizer

logger = logging.getLogger(__name__)

# Rows per tokenizer call of the length filter: large enough for the batch to pay, small enough to
# bound memory.
FILTER_CHUNK = 1024
CHECKSUM_PARTS = 64
_ROW_OPTIONS = orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_SORT_KEYS
_parse_generalized_path = parse_generalized_path


def read_file(path: str) -> Iterator[dict[str, Any]]:
    """The rows of a prompt file as dicts, one at a time; see `read_rows` for paths, slices and
    errors.
    """
    for row in read_rows(path):
        yield row.data


@dataclasses.dataclass(frozen=True)
class RowFormat:
    """Which keys of a row hold what, and how its prompt is rendered."""

    prompt_key: str = "text"
    label_key: str | None = None
    tool_key: str | None = None
    metadata_key: str = "metadata"
    multimodal_keys: dict[str, str] | None = None
    apply_chat_template: bool = False
    apply_chat_template_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    supervised: str | None = None  # the loss mask type where rows are conversations to be trained


def _build_messages(
    data: dict,
    prompt_key: str,
    as_conversation: bool,
    multimodal_keys: dict[str, str] | None = None,
) -> str | list[dict]:
    """The prompt of a row: its text, or its chat messages with media in place of their
    placeholders.

    A text becomes one user message where a conversation is wanted or media are present. ValueError
    where the number of placeholders of a kind differs from the number of media.
    """
    prompt = data[prompt_key]
    if isinstance(prompt, str):
        if not as_conversation and not multimodal_keys:
            return prompt
        prompt = [{"role": "user", "content": prompt}]
    if not multimodal_keys:
        return prompt
    media = {kind: _as_list(data.get(key)) for kind, key in multimodal_keys.items()}
    messages = [
        {**message, "content": _place_media(message.get("content"), media)} for message in prompt
    ]
    unused = {kind: len(left) for kind, left in media.items() if left}
    if unused:
        raise ValueError(f"more media than placeholders in the prompt; unused: {unused}")
    return messages


def _as_list(value: object) -> list:
    """The media under a key: a list as it is, one path, image or dictionary as a list of one."""
    if value is None or (isinstance(value, str) and not value):
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _place_media(content: object, media: dict[str, list]) -> Any:
    if not isinstance(content, str):
        return content
    kinds = {
        kind.placeholder: name for name in media if (kind := MultimodalTypes.get(name)) is not None
    }
    if not kinds:
        raise ValueError(
            f"unknown kinds of media {sorted(media)}; known: "
            f"{[kind.name for kind in MultimodalTypes.all()]}"
        )
    parts = []
    for piece in re.split("(" + "|".join(map(re.escape, kinds)) + ")", content):
        if piece in kinds:
            name = kinds[piece]
            if not media[name]:
                raise ValueError(
                    f"the prompt has more {piece} placeholders than the row has media of that kind"
                )
            parts.append({"type": name, name: media[name].pop(0)})
        elif piece:
            parts.append({"type": "text", "text": piece})
    return parts


def render_prompt(
    tokenizer: Tokenizer, messages: list[dict], tools: list | None, template_kwargs: dict | None
) -> str:
    """The text of chat messages with the generation prompt, as the tokenizer's
    template writes it.
    """
    if not getattr(tokenizer, "chat_template", True):
        raise ConfigError(
            "the prompts are chat messages, but the tokenizer has no chat template. Add one to its "
            "folder."
        )
    return apply_template(
        tokenizer,
        renderable_messages(tokenizer, messages),
        tools=tools,
        add_generation_prompt=True,
        **(template_kwargs or {}),
    )


def prompt_text(sample: Sample, tokenizer: Tokenizer) -> str:
    """The text that is sent for a sample: its prompt, rendered where it is still a list of
    messages.
    """
    if isinstance(sample.prompt, str):
        return sample.prompt
    return render_prompt(
        tokenizer, sample.prompt, sample.metadata.get("tools"), sample.apply_chat_template_kwargs
    )


def compute_prompt_lengths(
    samples: list[Sample], tokenizer: Tokenizer, processor: Processor | None = None
) -> list[int]:
    """The number of token ids of each prompt as it will be sent [N]: template, generation prompt
    and media included.
    """
    lengths: list[int | None] = [None] * len(samples)
    text_only = []
    for position, sample in enumerate(samples):
        if processor is not None and sample.multimodal_inputs:
            lengths[position] = _multimodal_length(sample, tokenizer, processor)
        else:
            text_only.append(position)
    if text_only:
        texts = [prompt_text(samples[position], tokenizer) for position in text_only]
        for position, ids in zip(
            text_only, tokenizer(texts, add_special_tokens=False)["input_ids"], strict=True
        ):
            lengths[position] = len(ids)
    return cast("list[int]", lengths)


def _multimodal_length(sample: Sample, tokenizer: Tokenizer, processor: Processor) -> int:
    from slime.utils import processing_utils

    media = sample.multimodal_inputs or {}
    if not isinstance(sample.prompt, str):
        media = processing_utils.process_vision_info(sample.prompt, processor)
    given = {kind: values for kind, values in media.items() if values is not None}
    return len(processor(text=prompt_text(sample, tokenizer), **given)["input_ids"][0])


def filter_long_prompt(
    samples: list[Sample],
    tokenizer: Tokenizer | None,
    processor: Processor | None,
    max_length: int | None,
) -> list[Sample]:
    """The samples whose prompt has at most `max_length` tokens, in order; all of them for None.

    Message lists are measured through the chat template; where the tokenizer has none they stay,
    with a warning.
    """
    if max_length is None or not samples:
        return samples
    if not isinstance(samples[0].prompt, str) and not hasattr(tokenizer, "apply_chat_template"):
        logger.warning(
            "prompts are message lists and the tokenizer has no chat template: lengths are not "
            "checked"
        )
        return samples
    lengths = compute_prompt_lengths(samples, cast(Tokenizer, tokenizer), processor)
    return [sample for sample, length in zip(samples, lengths, strict=True) if length <= max_length]


def get_source(sample: Sample) -> str:
    """The data source of a sample: its `source` attribute, else metadata["source_name"], else
    "unknown".
    """
    source = getattr(sample, "source", None)
    return source if source is not None else (sample.metadata or {}).get("source_name", "unknown")


class Dataset:
    """Samples of one prompt file, read once at construction; `samples` is their current order.

    Only what is kept stays in memory: rows are read, sliced and filtered in chunks. `num_read` and
    `num_too_long` count rows. Raises ConfigError naming file, row and remedy for a row that cannot
    be used, and where nothing is left.
    """

    def __init__(
        self,
        path: str,
        tokenizer: Tokenizer | None,
        processor: Processor | None,
        max_length: int | None,
        *,
        prompt_key: str = "text",
        multimodal_keys: dict[str, str] | None = None,
        label_key: str | None = None,
        tool_key: str | None = None,
        metadata_key: str = "metadata",
        seed: int = 42,
        apply_chat_template: bool = False,
        apply_chat_template_kwargs: dict[str, Any] | None = None,
        supervised: str | None = None,
    ) -> None:
        self.path, self.seed, self.epoch_id = path, seed, -1
        form = RowFormat(
            prompt_key=prompt_key,
            label_key=label_key,
            tool_key=tool_key,
            metadata_key=metadata_key,
            multimodal_keys=multimodal_keys,
            apply_chat_template=apply_chat_template,
            apply_chat_template_kwargs=apply_chat_template_kwargs or {},
            supervised=supervised,
        )
        self.num_read = 0
        self.origin_samples: list[Sample] = []
        for chunk in _chunks(read_rows(path)):
            samples = [build_sample(row, form, tokenizer, processor) for row in chunk]
            self.num_read += len(samples)
            self.origin_samples += filter_long_prompt(samples, tokenizer, processor, max_length)
        self.num_too_long = self.num_read - len(self.origin_samples)
        self.samples = self.origin_samples
        if not self.samples:
            raise ConfigError(
                f"{path}: none of its {self.num_read} rows is left; {self.num_too_long} prompts "
                "are longer than "
                f"{max_length} tokens. Raise --rollout-max-prompt-len, or change the slice."
            )
        logger.info(
            "%s: %d prompts, %d longer than %s left out",
            path,
            len(self),
            self.num_too_long,
            max_length,
        )

    @property
    def rows_checksum(self) -> str:
        """Hex digest of prompt, label and metadata of every row in the file's order: another row,
        or another order, is another digest.
        """
        return self._checksums[0]

    @property
    def part_checksums(self) -> list[str]:
        """The same, short, of each of up to CHECKSUM_PARTS equal parts of the rows, to tell where
        two files part.
        """
        return self._checksums[1]

    @functools.cached_property
    def _checksums(self) -> tuple[str, list[str]]:
        whole, parts = hashlib.blake2b(digest_size=16), []
        for rows in parts_of(len(self.origin_samples)):
            part = hashlib.blake2b(digest_size=4)
            for position in rows:
                sample = self.origin_samples[position]
                # Media are objects without a stable text; their kind and place count, their
                # content does not.
                line = exact_json.dumps(
                    (sample.prompt, sample.label, sample.metadata),
                    default=lambda value: type(value).__name__,
                    option=_ROW_OPTIONS,
                )
                whole.update(line + b"\n")
                part.update(line + b"\n")
            parts.append(part.hexdigest())
        return whole.hexdigest(), parts

    def shuffle(self, new_epoch_id: int) -> None:
        """Puts `samples` into the order of an epoch: a function of seed and epoch alone, not of any
        global state.
        """
        if new_epoch_id != self.epoch_id:
            order = list(range(len(self.origin_samples)))
            random.Random(self.seed + new_epoch_id).shuffle(order)
            self.samples = [self.origin_samples[position] for position in order]
            self.epoch_id = new_epoch_id

    def __getitem__(self, position: int) -> Sample:
        return self.samples[position]

    def __len__(self) -> int:
        return len(self.samples)


def parts_of(count: int) -> list[range]:
    """The positions 0 to `count` in up to CHECKSUM_PARTS consecutive parts of nearly equal size."""
    parts = min(CHECKSUM_PARTS, count)
    return [range(part * count // parts, (part + 1) * count // parts) for part in range(parts)]


def _chunks(rows: Iterator[Row]) -> Iterator[list[Row]]:
    chunk: list[Row] = []
    for row in rows:
        chunk.append(row)
        if len(chunk) == FILTER_CHUNK:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def build_sample(
    row: Row,
    form: RowFormat,
    tokenizer: Tokenizer | None = None,
    processor: Processor | None = None,
) -> Sample:
    """The sample of one row, without identity. ConfigError names the row, what is wrong with it,
    and the remedy.
    """
    data = row.data
    prompt = _required(row, form.prompt_key, "prompt", "--input-key")
    _check_prompt(row, form.prompt_key, prompt)
    label = _required(row, form.label_key, "label", "--label-key") if form.label_key else None
    metadata = dict(_parsed(row, form.metadata_key, dict) or {})
    tools = _parsed(row, form.tool_key, list) if form.tool_key else None
    if tools:
        metadata["tools"] = tools
    try:
        messages = _build_messages(
            data, form.prompt_key, form.apply_chat_template, form.multimodal_keys
        )
    except ValueError as error:
        raise ConfigError(f"{row.place}: {error}") from error
    if form.supervised is not None:
        _check_conversation(row, messages, label, form.supervised)
    media = None
    if processor is not None and form.multimodal_keys:
        from slime.utils import processing_utils

        media = processing_utils.process_vision_info(cast("list[dict]", messages), processor)
    if form.apply_chat_template:
        messages = _rendered(
            row,
            lambda: render_prompt(
                cast(Tokenizer, tokenizer),
                cast("list[dict]", messages),
                tools,
                form.apply_chat_template_kwargs,
            ),
        )
    return Sample(
        prompt=messages,
        label=label,
        metadata=metadata,
        multimodal_inputs=media,
        apply_chat_template_kwargs=form.apply_chat_template_kwargs,
    )


def _required(row: Row, key: str, what: str, flag: str) -> Any:
    if row.data.get(key) is None:
        state = "is null" if key in row.data else "is missing"
        raise ConfigError(
            f"{row.place}: the {what} {key!r} {state}; the row has the keys {sorted(row.data)}. "
            f"Name the right key with {flag}, or repair the row."
        )
    return row.data[key]


def _check_prompt(row: Row, key: str, prompt: object) -> None:
    problem = None
    if isinstance(prompt, str):
        problem = "is empty" if not prompt.strip() else None
    elif not isinstance(prompt, list):
        problem = f"is a {type(prompt).__name__}, not a text or a list of messages"
    elif not prompt:
        problem = "is an empty list"
    elif not all(
        isinstance(message, dict) and isinstance(message.get("role"), str) for message in prompt
    ):
        problem = "has a message that is not an object with a role"
    elif not any(message.get("content") or message.get("tool_calls") for message in prompt):
        problem = "has only messages without content"
    if problem:
        raise ConfigError(
            f"{row.place}: the prompt {key!r} {problem} (value: {str(prompt)[:80]!r}). Repair or "
            "remove the row."
        )


def _check_conversation(
    row: Row, prompt: str | list[dict], label: object, loss_mask_type: str
) -> None:
    problem = conversation_problem(
        message_pairs(prompt, label, where=lambda: row.place), loss_mask_type
    )
    if problem:
        raise ConfigError(
            f"{row.place}: {problem}: {str(prompt)[:80]!r}. Add the answer as an assistant "
            "message, name a label with --label-key, or remove "
            "the row."
        )


def _parsed(row: Row, key: str, kind: type) -> Any:
    """The value under an optional key, parsed where it is JSON text (parquet files often hold
    nested values so).
    """
    value = row.data.get(key)
    if isinstance(value, str) and value.strip():
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError as error:
            raise ConfigError(
                f"{row.place}: {key!r} is text that is not JSON ({error})."
            ) from error
    if value in (None, ""):
        return None
    if not isinstance(value, kind):
        raise ConfigError(
            f"{row.place}: {key!r} is a {type(value).__name__}; a {kind.__name__} is needed."
        )
    return value


def _rendered(row: Row, render: Callable[[], str]) -> str:
    try:
        return render()
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001 - a template may raise anything; the row that broke it must be named
        raise ConfigError(
            f"{row.place}: the chat template refused the prompt: {type(error).__name__}: {error}"
        ) from error
