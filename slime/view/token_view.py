"""One sample, token by token: pieces of text, log-probs of both sides, advantage, entropy, mask."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

MOST_TOKENS = 4000  # on one page
LONGEST_PIECE = 8  # tokens that one character is of
LARGEST_TOKENIZER = 64 << 20
REPLACEMENT = "\ufffd"
# what is shown of each token -> where it stands in the train part
TRAINED = {
    "trainer": "log_probs",
    "reference": "ref_log_probs",
    "advantage": "advantages",
    "return": "returns",
    "value": "values",
    "kl": "kl",
    "entropy": "entropy",
}
UNITS = {"engine": "nats", "trainer": "nats", "reference": "nats", "gap": "nats", "kl": "nats",
         "entropy": "nats", "advantage": "", "return": "", "value": ""}  # fmt: skip

Decode = Callable[[list[int]], str]


@dataclasses.dataclass(frozen=True)
class Tokens:
    """A window of a sample's response. columns: by name a list per token, None where there is no
    number. turns: (tokens, whether they are trained) of each stretch of the response with one loss
    mask. notes: what does not fit together.
    """

    first: int
    total: int
    num_prompt: int
    ids: list[int]
    pieces: list[str | None]
    mask: list[int]
    columns: dict[str, list[float | str | None]]
    decoded: str | None
    prompt_decoded: str | None
    turns: list[tuple[int, bool]]
    notes: list[str]


def tokens_of(
    sample: Mapping[str, Any],
    trained: Mapping[str, Any],
    decode: Decode | None,
    *,
    first: int = 0,
) -> Tokens:
    """The window of at most MOST_TOKENS response tokens from `first` on."""
    notes: list[str] = []
    ids = _ids(sample.get("tokens"))
    length = sample.get("response_length") or 0
    if not 0 <= length <= len(ids):
        notes.append(f"response_length is {length}, and there are {len(ids)} tokens")
        length = min(max(length, 0), len(ids))
    num_prompt = len(ids) - length
    response = ids[num_prompt:]
    first = max(0, min(first, max(0, length - 1)))
    window = slice(first, first + MOST_TOKENS)

    def column(name: str, values: Any) -> list[Any] | None:
        if values is None:
            return None
        if len(values) != length:
            notes.append(f"{len(values)} entries of {name} for {length} response tokens")
            return None
        return list(values)[window]

    mask = column("the loss mask", trained.get("loss_masks")) or column(
        "loss_mask", sample.get("loss_mask")
    )
    shown = response[window]
    engine = column("rollout_log_probs", sample.get("rollout_log_probs")) or column(
        "rollout_log_probs", trained.get("rollout_log_probs")
    )
    columns: dict[str, list[Any] | None] = {"engine": engine}
    for name, field in TRAINED.items():
        entry = trained.get(field)
        columns[name] = column(field, entry) if isinstance(entry, list) else None
    trainer = columns["trainer"]
    sampled = [1] * len(shown) if mask is None else [int(one) for one in mask]
    if engine is not None and trainer is not None:
        columns["gap"] = [
            _minus(a, b) if is_sampled else None
            for a, b, is_sampled in zip(trainer, engine, sampled, strict=True)
        ]
    return Tokens(
        first=first,
        total=length,
        num_prompt=num_prompt,
        ids=shown,
        pieces=[None] * len(shown) if decode is None else pieces(shown, decode),
        mask=sampled,
        columns={n: [_plain(one) for one in v] for n, v in columns.items() if v is not None},
        decoded=None if decode is None else decode(response),
        prompt_decoded=None if decode is None else decode(ids[:num_prompt]),
        turns=_turns(trained.get("loss_masks") or sample.get("loss_mask") or []),
        notes=notes,
    )


def _turns(mask: Sequence[Any]) -> list[tuple[int, bool]]:
    runs = ((bool(is_trained), len(list(own))) for is_trained, own in itertools.groupby(mask, bool))
    return [(count, is_trained) for is_trained, count in runs]


def _ids(values: Any) -> list[int]:
    return [int(one) for one in values] if isinstance(values, list) else []


def _minus(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a - b


def _plain(value: float | None) -> float | str | None:
    """A number that JSON has; NaN and infinities as texts."""
    if value is None:
        return None
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    return float(f"{value:.6g}")


def pieces(ids: Sequence[int], decode: Decode) -> list[str | None]:
    """The text of each token. A character that several tokens make is the first one's text, and the
    others have "".
    """
    found: list[str | None] = []
    text_of = {one: decode([one]) for one in set(ids)}
    place = 0
    while place < len(ids):
        end = place + 1
        text = text_of[ids[place]]
        while REPLACEMENT in text and end < min(len(ids), place + LONGEST_PIECE):
            longer = decode(list(ids[place : end + 1]))
            end += 1
            if REPLACEMENT not in longer:
                text = longer
                break
        else:
            end = place + 1
        found += [text, *[""] * (end - place - 1)]
        place = end
    return found


def differing_part(a: str, b: str) -> tuple[str, str, str, str] | None:
    """(what both begin with, the middle of a, the middle of b, what both end with); None where the
    texts are equal.
    """
    if a == b:
        return None
    start = len(os.path.commonprefix((a, b)))
    rest_a, rest_b = a[start:], b[start:]
    end = len(os.path.commonprefix((rest_a[::-1], rest_b[::-1])))
    cut_a, cut_b = len(rest_a) - end, len(rest_b) - end
    return a[:start], rest_a[:cut_a], rest_b[:cut_b], rest_a[cut_a:]


class Decoders:
    """Tokenizers by folder. One that has a tokenizer.json is read without transformers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def of(self, folders: Sequence[Path]) -> tuple[Decode | None, str | None]:
        """(the decoder of the first folder that has one, why there is none)."""
        for folder in folders:
            path = folder / "tokenizer.json"
            try:
                found = path.stat()
            except OSError:
                continue
            if found.st_size > LARGEST_TOKENIZER:
                return None, f"no text of single tokens: {path} has {found.st_size:,} bytes"
            try:
                with self._lock:
                    return _decoder(path, found.st_mtime_ns), None
            except Exception as error:  # noqa: BLE001 - tokenizers raises Exception itself
                return None, f"no text of single tokens: {path} cannot be read: {error}"[:300]
        return None, "no text of single tokens: no tokenizer.json was recorded"


@functools.lru_cache(maxsize=4)
def _decoder(path: Path, changed_at: int) -> Decode:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))

    def decode(ids: list[int]) -> str:
        known = [one for one in ids if 0 <= one < 1 << 31]
        return tokenizer.decode(known, skip_special_tokens=False)

    return decode
