"""The sample of the first difference: its text around the token, and how it was judged and trained
in A and in B.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from slime.harness.consistency_report import printable
from slime.harness.diff.columns import Columns
from slime.harness.diff.results import Difference
from slime.harness.diff.sides import Side
from slime.harness.diff.stages import short

AROUND = 5  # tokens on either side
_TEXT = 240
Decode = Callable[[list[int]], str]


def context_of(a: Side, b: Side, difference: Difference) -> list[str]:
    """Lines about the sample of a difference, each side's where they differ; [] for a difference of
    no sample.
    """
    if difference.row_a is None and difference.row_b is None:
        return []
    facts = [
        facts_of(side, row, difference)
        for side, row in ((a, difference.row_a), (b, difference.row_b))
    ]
    lines = []
    for name in dict.fromkeys([*facts[0], *facts[1]]):
        one, other = facts[0].get(name, "-"), facts[1].get(name, "-")
        if one == other:
            lines.append(f"{name:9} {one}")
        else:
            lines += [f"{name:9} A: {one}", f"{'':9} B: {other}"]
    return lines


def facts_of(side: Side, row: int | None, difference: Difference) -> dict[str, str]:
    """What one side says of a sample, by name; {} where it has no such row."""
    facts: dict[str, str] = {}
    if row is None:
        return facts
    sample = _row_of(side, "samples", row)
    at = _place_of(side, row)
    facts["sample"] = _identity(sample, at, row)
    if "dp_rank" in at:  # a schedule says where
        facts["trained"] = _training(at)
    reward = sample.get("reward", at.get("raw_reward"))
    if "reward" in sample or "raw_reward" in at:
        facts["reward"] = short(reward)
    if "valid" in sample or "valid" in at:
        facts["verdict"] = _verdict(sample, at)
    for name in ("prompt", "response"):
        if sample.get(name) is not None:
            facts[name] = _shortened(str(sample[name]))
    tokens = sample.get("tokens", at.get("tokens"))
    if tokens is not None:
        length = sample.get("response_length", at.get("response_lengths"))
        facts["tokens"] = _around(side, np.asarray(tokens), length, difference)
    return facts


def _identity(sample: dict[str, Any], at: dict[str, Any], row: int) -> str:
    index = sample.get("index", at.get("sample_indices", at.get("sample_index")))
    words = [f"index {index}"]
    group = sample.get("group_index", at.get("group_ids"))
    if group is not None:
        words.append(f"group {group}")
    return ", ".join([*words, f"position {row}"])


def _training(at: dict[str, Any]) -> str:
    rank = at["dp_rank"]
    if rank is None or int(rank) < 0:
        return "on no rank"
    words = [f"data-parallel rank {rank}"]
    words += [
        f"{name.replace('_', '-') if name == 'micro_batch' else name} {at[name]}"
        for name in ("step", "micro_batch")
        if name in at
    ]
    return ", ".join(words)


def _verdict(sample: dict[str, Any], at: dict[str, Any]) -> str:
    valid = sample.get("valid", at.get("valid"))
    reason = sample.get("reason", at.get("invalid_reason"))
    words = ["valid" if valid else "invalid"]
    words += [printable(str(word)) for word in (reason, sample.get("detail")) if word]
    if sample.get("dropped_by"):
        words.append(f"dropped by {printable(str(sample['dropped_by']))}")
    return ", ".join(words)


def _shortened(text: str) -> str:
    text = printable(text)
    return text if len(text) <= _TEXT else text[: _TEXT // 2] + " ... " + text[-_TEXT // 2 :]


def _row_of(side: Side, part: str, row: int) -> dict[str, Any]:
    """The entries of one row of a table, by column; {} without the table or the row."""
    if part not in side:
        return {}
    columns = side.columns(part)
    return _entries(columns, row) if row < columns.num_rows else {}


_SHOWN = (
    "index group_index reward valid reason detail dropped_by prompt response tokens response_length "
    "dp_rank step micro_batch raw_reward invalid_reason response_lengths sample_indices "
    "sample_index group_ids"
).split()


def _entries(columns: Columns, row: int) -> dict[str, Any]:
    found = {}
    for name in _SHOWN:
        if name in columns:
            value = columns.column(name).at(row)
            if value is not None:
                found[name] = value
    return found


def _place_of(side: Side, row: int) -> dict[str, Any]:
    """What columns, schedule and train part say of the first row that was made of a sample."""
    place = row
    for part in ("columns", "schedule"):
        if part in side and "samples" in side:
            sources = side.columns(part).numbers("raw_row")
            rows = np.flatnonzero(sources == row) if sources is not None else np.zeros(0, int)
            if not len(rows):
                return {}
            place = int(rows[0])
            break
    found: dict[str, Any] = {}
    for part in ("train", "columns", "schedule"):
        found.update(_row_of(side, part, place))
    return found


def _around(side: Side, tokens: np.ndarray, length: Any, difference: Difference) -> str:
    """The tokens around the differing one, the differing one in brackets, as text where the
    recording has a tokenizer.
    """
    prompt = len(tokens) - (len(tokens) if length is None else int(length))
    token = difference.token
    if token is None or difference.field in ("label", "metadata", "reward", "weight_versions"):
        token = 0
        middle = prompt
    else:
        is_response = difference.place.find("response token") >= 0 or difference.part == "replies"
        middle = token + (prompt if is_response else 0)
    middle = max(0, min(middle, max(0, len(tokens) - 1)))
    low, high = max(0, middle - AROUND), middle + AROUND + 1
    ids = [int(one) for one in tokens[low:high]]
    chosen = middle - low
    words = [f"[{one}]" if place == chosen else str(one) for place, one in enumerate(ids)]
    shown = f"ids {low} to {low + len(ids) - 1}: {' '.join(words)}"
    decode = _decoder(side)
    if decode is None or not ids:
        return shown
    parts = (ids[:chosen], ids[chosen : chosen + 1], ids[chosen + 1 :])
    before, at, after = (printable(decode(part)) if part else "" for part in parts)
    return f"{before}[{at}]{after}  ({shown})"


def _decoder(side: Side) -> Decode | None:
    """Decodes ids with the recorded tokenizer, read as data; None where it has none or it is
    damaged.
    """
    path = None if side.tokenizer is None else side.tokenizer / "tokenizer.json"
    if path is None or not path.is_file() or path.is_symlink():
        return None
    import tokenizers

    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception:  # noqa: BLE001 - tokenizers raises no narrower class
        return None

    def decode(ids: list[int]) -> str:
        try:
            return str(tokenizer.decode(ids, skip_special_tokens=False))
        except (ValueError, OverflowError, TypeError):  # an id that no vocabulary has
            return " ".join(map(str, ids))

    return decode
