"""Which sample each row of a custom converter's data was made of, so that the gate's verdict holds for the rows as for the samples.

    samples (with verdicts)  [a: valid] [b: truncated] [c: valid]
    a converter's rows       tokens of b, c, c
    their samples            b, c, c          -> the first row does not train, for the reason "truncated"; a is left out; c makes two rows
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from slime.exceptions import RolloutDataError
from slime.utils.ragged import as_array, num_entries
from slime.utils.rollout_batch import RolloutBatch


@dataclasses.dataclass(frozen=True)
class Mark:
    """The gate's verdict on one sample and what the sample was then, kept apart from the sample, which users' functions may write to.

    index: its `Sample.index`. tokens, response: keys of its token ids, and of those of its response. keep_mask: 0 where a response token has no log-prob.
    """

    valid: bool
    reason: str | None = None
    is_model_failure: bool = False
    index: int | None = None
    tokens: bytes = b""
    response: bytes = b""
    keep_mask: Sequence[int] | None = None


def marks_of(samples: Sequence[Any], verdicts: Sequence[Any]) -> list[Mark]:
    """One mark per sample and its verdict of the gate. To be made before any of the user's functions sees the samples."""
    marks = []
    for sample, verdict in zip(samples, verdicts, strict=True):
        reason = verdict.reason
        failed = {} if verdict.valid else {"reason": reason.value if reason else "invalid", "is_model_failure": bool(reason and reason.is_model_failure)}
        ids = _ids(sample.tokens)
        response = ids[len(ids) - int(sample.response_length) :]
        keys = {"index": sample.index, "tokens": _key(ids), "response": _key(response)}
        marks.append(Mark(bool(verdict.valid), **failed, **keys, keep_mask=verdict.keep_mask))
    return marks


def restore_marks(samples: Sequence[Any], marks: Sequence[Mark]) -> None:
    """Sets `valid` and `invalid_reason` of the rejected among `samples` back to their marks. A sample that a user's function rejected
    beside them stays rejected."""
    for sample, mark in zip(samples, marks, strict=True):
        if not mark.valid and sample.valid is not False:
            sample.valid, sample.invalid_reason = False, mark.reason


def with_marks(data: Mapping[str, Any], marks: Sequence[Mark], *, batch_rows: Sequence[int]) -> tuple[Mapping[str, Any], list[int]]:
    """`(data, sources)`: the data of a custom converter in which no row of a rejected sample is valid and no token without a log-prob carries loss, and each
    row's position among `marks`.

    `marks` are of all that the gate judged, `batch_rows` the positions of those that the converter was given. See `attribute_rows`.
    """
    if not isinstance(data, Mapping):
        raise RolloutDataError(f"The custom converter returned {type(data).__name__}, not a dict of lists.")
    if num_entries(data.get("tokens")) is None:
        raise RolloutDataError(f"The train data has no list of 'tokens'; its keys are {sorted(map(str, data))}.")
    indices, given, reasons, lengths = (data.get(name) for name in ("sample_indices", "valid", "invalid_reason", "response_lengths"))
    sources = attribute_rows(
        list(data["tokens"]),
        marks,
        batch_rows=batch_rows,
        sample_indices=None if indices is None else list(indices),
        response_lengths=None if lengths is None else list(lengths),
    )
    valid = [True] * len(sources) if given is None else [bool(value) for value in given]
    reasons = [None] * len(sources) if reasons is None else list(reasons)
    for name, values in (("valid", valid), ("invalid_reason", reasons)):
        if len(values) != len(sources):
            raise RolloutDataError(f"{name!r} has {len(values)} entries for {len(sources)} samples.")
    changes: dict[str, Any] = _without_missing_log_probs(data, [marks[source].keep_mask for source in sources])
    rejected = [row for row, source in enumerate(sources) if not marks[source].valid]
    if rejected:
        for row in rejected:
            valid[row], reasons[row] = False, marks[sources[row]].reason
        failures = [marks[source].is_model_failure for source in sources]
        changes.update(valid=valid, invalid_reason=reasons, model_failure=failures)
    if not changes:
        return data, sources
    marked = data.copy() if isinstance(data, RolloutBatch) else dict(data)
    marked.update(changes)
    return marked, sources


def _without_missing_log_probs(data: Mapping[str, Any], keep_masks: Sequence[Sequence[int] | None]) -> dict[str, Any]:
    """{"loss_masks": ...} with 0 where a row's `keep_masks` entry has 0; {} where there is none. RolloutDataError where the two differ in length."""
    if all(keep is None for keep in keep_masks):
        return {}
    masks = list(data["loss_masks"]) if "loss_masks" in data else None
    if masks is None:
        lengths = data.get("response_lengths")
        masks = [np.ones(int(lengths[row]) if lengths is not None else len(data["tokens"][row]), dtype=np.uint8) for row in range(len(keep_masks))]
    for row, keep in enumerate(keep_masks):
        if keep is None:
            continue
        mask = as_array(masks[row])
        if len(mask) != len(keep):
            raise RolloutDataError(
                f"Row {row} has a loss mask of {len(mask)} entries, and the gate masks tokens without a log-prob in a response of {len(keep)} tokens. Keep the "
                "response whole in --custom-convert-samples-to-train-data-path, or use --gate-missing-log-probs mark."
            )
        masks[row] = mask * np.asarray(keep, dtype=mask.dtype)
    return {"loss_masks": masks}


def attribute_rows(
    rows: Sequence[Any],
    marks: Sequence[Mark],
    *,
    batch_rows: Sequence[int],
    sample_indices: Sequence[Any] | None = None,
    response_lengths: Sequence[Any] | None = None,
) -> list[int]:
    """The position in `marks` of the sample that each row was made of. `rows` are token ids.

    A row with a sample's tokens is of the sample that stands at its place in the batch, else of the one that `sample_indices` names (`Sample.index`), else
    of any that has them. A row whose tokens were changed is of the one that `sample_indices` names; without them, of one whose response it ends with, where
    `response_lengths` tell that; else, where there is one row per sample of the batch, of the one at its place. RolloutDataError for a row of
    none of them. Where several samples have a row's tokens and fewer rows than samples do, the valid ones come first.
    """
    ids = [_ids(row) for row in rows]
    is_one_each = len(rows) == len(batch_rows)
    places = batch_rows if is_one_each else None
    named = None if sample_indices is None else _named_places(sample_indices, marks, len(rows))
    sources: list[int | None] = [None] * len(rows)
    _attribute_by_key(sources, [_key(row) for row in ids], [mark.tokens for mark in marks], marks, places, named)
    if named is not None:
        _attribute_by_index(sources, named, sample_indices or (), len(marks))
    elif response_lengths is not None and len(response_lengths) == len(rows):
        ends = [row[len(row) - int(length) :] for row, length in zip(ids, response_lengths, strict=True)]
        _attribute_by_key(sources, [_key(end) for end in ends], [mark.response for mark in marks], marks, places, None)
    taken = {source for source in sources if source is not None}
    for row, source in enumerate(sources):
        if source is not None:
            continue
        if not is_one_each or batch_rows[row] in taken:
            raise RolloutDataError(
                f"Row {row} of the {len(rows)} that --custom-convert-samples-to-train-data-path returned has the tokens of none of the "
                f"{len(marks)} samples, so it is not known whether the gate let its sample pass. Add 'sample_indices', the Sample.index of each "
                "row's sample, to the returned data, or return one row per sample in the samples' order."
            )
        sources[row] = batch_rows[row]
    return [int(source) for source in sources if source is not None]


def _ids(tokens: Any) -> np.ndarray:
    """Token ids, int64, the same for a list, an array and a tensor of them."""
    return np.ascontiguousarray(as_array(tokens)).astype(np.int64).reshape(-1)


def _key(ids: np.ndarray) -> bytes:
    """A short key of token ids."""
    return hashlib.blake2b(ids.tobytes(), digest_size=16).digest()


def _named_places(indices: Sequence[Any], marks: Sequence[Mark], num_rows: int) -> list[list[int] | None]:
    """Per row, the positions of the samples that its `sample_indices` entry names: none where it names no sample, None where it has no entry."""
    if len(indices) != num_rows:
        raise RolloutDataError(f"'sample_indices' has {len(indices)} entries for {num_rows} samples.")
    places = collections.defaultdict(list)
    for place, mark in enumerate(marks):
        if mark.index is not None:
            places[int(mark.index)].append(place)
    try:
        return [None if index is None else places.get(int(index), []) for index in indices]
    except (TypeError, ValueError):
        raise RolloutDataError(f"'sample_indices' must hold the Sample.index of each row's sample, a whole number; it holds {list(indices)[:4]}.") from None


def _attribute_by_index(sources: list, named: Sequence[list[int] | None], indices: Sequence[Any], num_samples: int) -> None:
    """Fills in, in place, the rows whose `sample_indices` entry names one sample."""
    for row, places in enumerate(named):
        if sources[row] is not None or places is None:
            continue
        if not places:
            raise RolloutDataError(
                f"Row {row} of the custom converter's data has sample_indices {int(indices[row])}, which is no Sample.index of this rollout's "
                f"{num_samples} samples."
            )
        if len(places) == 1:
            sources[row] = places[0]


def _attribute_by_key(
    sources: list,
    row_keys: Sequence[bytes],
    keys: Sequence[bytes],
    marks: Sequence[Mark],
    batch_rows: Sequence[int] | None,
    named: Sequence[list[int] | None] | None,
) -> None:
    """Fills in, in place, the rows that have a sample's key: of the sample at the row's place, else of the one that is named, else of any."""
    taken = {source for source in sources if source is not None}
    open_rows = [row for row, source in enumerate(sources) if source is None]
    for row in open_rows:
        if batch_rows is not None and keys[batch_rows[row]] == row_keys[row] and batch_rows[row] not in taken:
            sources[row] = batch_rows[row]
            taken.add(batch_rows[row])
    for row in open_rows:
        same = [place for place in (named[row] if named is not None else None) or () if keys[place] == row_keys[row]]
        if sources[row] is None and len(same) == 1:
            sources[row] = same[0]
            taken.add(same[0])
    places, wanted = collections.defaultdict(list), collections.defaultdict(list)
    for place, key in enumerate(keys):
        places[key].append(place)
    for row in open_rows:
        if sources[row] is None and row_keys[row] in places:
            wanted[row_keys[row]].append(row)
    for key, rows in wanted.items():
        free = [place for place in places[key] if place not in taken]
        if len(rows) < len(free):
            free.sort(key=lambda place: not marks[place].valid)
        # further rows are copies; of a sample that was rejected where one of them was
        again = next((place for place in places[key] if not marks[place].valid), places[key][0])
        for number, row in enumerate(rows):
            sources[row] = free[number] if number < len(free) else again
