"""The text that graders read: a response without the tokens and stop strings that end its turn.

An engine that shows special tokens ends every natural answer with one ("85<|im_end|>"). It belongs
to the tokens that are trained, and is no part of the answer.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

from slime.exceptions import ConfigError
from slime.utils import processing_utils

# End-of-turn marks of the model families in use, for graders that are called without a tokenizer.
KNOWN_END_TOKENS = (
    "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>", "<|return|>", "<|end_of_turn|>", "<end_of_turn>",
    "<|END_OF_TURN_TOKEN|>", "<|eos|>", "<eos>", "</s>", "<|user|>", "<|observation|>", "<|im_start|>", "<｜end▁of▁sentence｜>", "[EOS]", "<pad>", "<|pad|>",
    "<turn|>",
)  # fmt: skip
_CLOSING = frozenset("}])")


def without_end_tokens(text: str, ends: Iterable[str] = ()) -> str:
    """The text without the known end tokens and `ends` behind it, and without the white space
    between those.

    A closing bracket alone is no end: it may close the box of the answer.
    """
    marks = tuple(
        mark
        for mark in (*KNOWN_END_TOKENS, *ends)
        if mark and not (mark.strip() and set(mark.strip()) <= _CLOSING)
    )
    while True:
        for kept in (text, text.rstrip()):
            mark = max((mark for mark in marks if kept.endswith(mark)), key=len, default=None)
            if mark is not None:
                break
        if mark is None:
            return text
        text = kept[: -len(mark)]


@functools.lru_cache(maxsize=8)
def special_tokens_of(folder: str) -> tuple[str, ...]:
    """The special tokens of a model folder's tokenizer as text; none where there is no
    such folder.
    """
    try:
        tokenizer = processing_utils.shared_tokenizer(folder)
    except ConfigError:  # a grader that is called by hand need not have the model's folder
        return ()
    added = getattr(tokenizer, "added_tokens_decoder", None) or {}
    special = [str(token) for token in added.values() if getattr(token, "special", False)]
    return tuple(dict.fromkeys([*special, *map(str, getattr(tokenizer, "all_special_tokens", ()))]))
