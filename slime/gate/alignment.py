"""Tokens against text: decoding by rule, comparing, naming the cause of a difference, and
remembering what was compared.

The token ids are the truth. `Codec` is a tokenizer prepared for the gate: which ids the text hides,
what ends a turn, the cache.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import re
import weakref
from collections.abc import Iterable
from typing import Any

import numpy as np

from slime.gate.config import GateConfig, MismatchCause
from slime.gate.text import is_blank
from slime.typing import Tokenizer

_CACHE_ENTRIES = 200_000
# below it, waking the tokenizer's threads takes longer than the decoding
_SERIAL_DECODE_TOKENS = 4096
_WHITESPACE = re.compile(r"\s+")
_NOT_ASCII = re.compile(r"[^\x00-\x7f]+")
REPLACEMENT = "\ufffd"


@dataclasses.dataclass(frozen=True)
class TextFinding:
    """What comparing one response gave. `text_is_response`: the engine's text is exactly the
    stripped decoded one.
    """

    cause: MismatchCause | None
    text_is_response: bool


class Codec:
    """A tokenizer with the tables the gate needs. Build it through `codec_of`, which keeps one per
    tokenizer and rule.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, hide_special_tokens: bool = True, shown: Iterable[str] = ()
    ):
        self.tokenizer = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        special = _special_tokens(tokenizer)
        self.special_strings = tuple(
            sorted((text for text in special.values() if text), key=len, reverse=True)
        )
        self.vocab_size = _vocab_size(tokenizer, special)
        shown = set(shown)
        # The last entry stands for every id beyond the tokenizer's: models pad their vocabulary,
        # and such an id has no text.
        self.all_special = np.zeros(self.vocab_size + 1, dtype=bool)
        # says nothing to a reader, whether the text shows it or not
        self.unseen = np.zeros(self.vocab_size + 1, dtype=bool)
        self.all_special[-1] = self.unseen[-1] = True
        for token_id, text in special.items():
            self.all_special[token_id] = True
            self.unseen[token_id] = text not in shown
        nothing = np.zeros_like(self.unseen)
        nothing[-1] = True
        self.hidden = self.unseen if hide_special_tokens else nothing  # what the text leaves out
        self.has_shown_special = (
            bool((self.all_special & ~self.hidden).any()) and hide_special_tokens
        )
        self.eos_token_ids = _eos_token_ids(tokenizer)
        self._visible = np.full(self.vocab_size + 1, -1, dtype=np.int8)
        self._visible[np.flatnonzero(self.unseen)] = 0
        self.cache: collections.OrderedDict[bytes, TextFinding] = collections.OrderedDict()

    def _clip(self, ids: np.ndarray) -> np.ndarray:
        """Ids as table positions; anything outside the vocabulary becomes the last entry."""
        return np.where((ids >= 0) & (ids < self.vocab_size), ids, self.vocab_size)

    def decode(self, rows: list[np.ndarray], *, without: np.ndarray | None = None) -> list[str]:
        """One text per row of ids, in one batch, the ids of the table `without` (default: `hidden`)
        left out. Ids must not be negative.
        """
        table = self.hidden if without is None else without
        ids = [row[~table[np.minimum(row, self.vocab_size)]].tolist() for row in rows]
        if self._backend is not None:
            if sum(map(len, ids)) < _SERIAL_DECODE_TOKENS:
                return [self._backend.decode(row, skip_special_tokens=False) for row in ids]
            return self._backend.decode_batch(ids, skip_special_tokens=False)
        return [self.tokenizer.decode(row, skip_special_tokens=False) for row in ids]

    def shows_special(self, row: np.ndarray) -> bool:
        """True if the row holds a special token that the text shows on purpose."""
        if not self.has_shown_special:
            return False
        positions = np.minimum(row, self.vocab_size)
        return bool((self.all_special[positions] & ~self.hidden[positions]).any())

    def proves_visible(self, ids: np.ndarray) -> np.ndarray:
        """[any shape] bool: the id alone decodes to something a reader sees, so a response that
        holds it is not empty.
        """
        positions = self._clip(ids)
        unknown = positions[self._visible[positions] < 0]
        if len(unknown):
            unknown = np.unique(unknown)
            texts = self.decode([np.array([token_id]) for token_id in unknown])
            self._visible[unknown] = [not is_blank(text.replace(REPLACEMENT, "")) for text in texts]
        return self._visible[positions] == 1

    def remember(self, key: bytes, finding: TextFinding) -> None:
        self.cache[key] = finding
        if len(self.cache) > _CACHE_ENTRIES:
            self.cache.popitem(last=False)


_CODECS: weakref.WeakKeyDictionary[Any, dict[tuple, Codec]] = weakref.WeakKeyDictionary()


def codec_of(tokenizer: Tokenizer | Codec | None, config: GateConfig) -> Codec | None:
    """The codec of a tokenizer under the config's rule, built once. None for None; a Codec is
    returned as it is.
    """
    if tokenizer is None or isinstance(tokenizer, Codec):
        return tokenizer
    shown = set(config.keep_special_tokens)
    for spec in [config.format, *(rules.format for rules in config.tasks.values())]:
        if spec is not None:
            shown.update(spec.markers)
    key = (config.hide_special_tokens, tuple(sorted(shown)))
    per_rule = _CODECS.setdefault(tokenizer, {})
    if key not in per_rule:
        per_rule[key] = Codec(
            tokenizer, hide_special_tokens=config.hide_special_tokens, shown=shown
        )
    return per_rule[key]


def content_key(ids: np.ndarray, response: object, rule: bytes) -> bytes:
    """Identity of (ids, text, rule): 16 bytes."""
    text = response.encode("utf-8", "surrogatepass") if isinstance(response, str) else b""
    head = b"%d %b " % (len(ids), ids.dtype.str.encode())
    return hashlib.blake2b(b"".join((rule, head, ids.tobytes(), text)), digest_size=16).digest()


def classify_mismatch(
    decoded: str,
    text: str,
    *,
    special_strings: Iterable[str] = (),
    stop_strings: Iterable[str] = (),
) -> MismatchCause | None:
    """Why `text` (the engine's) is not `decoded` (from the ids); None if they agree.

    Outer whitespace never counts; a stop string that the engine trimmed is agreement. Causes are
    tried from the most to the least specific, each ignoring what the earlier ones ignore: special
    tokens, broken multi-byte characters, whitespace; what still differs has shifted ids.
    """
    decoded, text = decoded.strip(), text.strip()
    if decoded == text:
        return None
    for stop in stop_strings:
        if stop and decoded.startswith(text) and decoded[len(text) :].strip() == stop.strip():
            return None
    for special in special_strings:
        decoded, text = decoded.replace(special, ""), text.replace(special, "")
    decoded, text = decoded.strip(), text.strip()
    if decoded == text:
        return MismatchCause.SPECIAL_TOKENS
    if _agree_up_to_broken_characters(decoded, text):
        return MismatchCause.MULTIBYTE_CUT
    if _WHITESPACE.sub("", decoded) == _WHITESPACE.sub("", text):
        return MismatchCause.WHITESPACE
    return MismatchCause.SHIFTED_IDS


def _agree_up_to_broken_characters(decoded: str, text: str) -> bool:
    """True if the texts differ only where one of them has U+FFFD (or nothing) in place of a
    non-ASCII character.
    """
    shorter, longer = sorted((decoded, text), key=len)
    tail = longer[len(shorter) :]
    if longer.startswith(shorter) and len(tail) <= 4 and not tail.isascii():
        return True
    broken, whole = (decoded, text) if REPLACEMENT in decoded else (text, decoded)
    if REPLACEMENT not in broken:
        return False
    head, end = broken[: broken.index(REPLACEMENT)], broken[broken.rindex(REPLACEMENT) + 1 :]
    same_ascii = _NOT_ASCII.sub("", broken) == _NOT_ASCII.sub(
        "", whole
    )  # linear, where aligning the pieces could explode
    return same_ascii and whole.startswith(head) and whole.endswith(end)


def _special_tokens(tokenizer: Tokenizer) -> dict[int, str]:
    """{id: string} of the tokenizer's special tokens."""
    added = getattr(tokenizer, "added_tokens_decoder", None) or {}
    special = {int(i): str(token) for i, token in added.items() if getattr(token, "special", False)}
    ids = getattr(tokenizer, "all_special_ids", None) or ()
    strings = getattr(tokenizer, "all_special_tokens", None) or [""] * len(ids)
    for token_id, text in zip(ids, strings, strict=True):
        special.setdefault(int(token_id), str(text))
    return special


def _vocab_size(tokenizer: Tokenizer, special: dict[int, str]) -> int:
    try:
        size = len(tokenizer)
    except TypeError:
        size = int(tokenizer.vocab_size)
    return max([size, *(token_id + 1 for token_id in special)])


def _eos_token_ids(tokenizer: Tokenizer) -> frozenset[int]:
    eos = getattr(tokenizer, "eos_token_id", None)
    return (
        frozenset() if eos is None else frozenset(eos if isinstance(eos, list | tuple) else [eos])
    )
