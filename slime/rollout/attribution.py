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
    """The gate's verdict on one sample, kept apart from the sample, which users' functions may write to."""

    valid: bool
    reason: str | None = None
    is_model_failure: bool = False


def marks_of(verdicts: Sequence[Any]) -> list[Mark]:
    """One mark per verdict of the gate."""
    return [
        Mark(True) if v.valid else Mark(False, v.reason.value if v.reason else "invalid", bool(v.reason and v.reason.is_model_failure))
        for v in verdicts
    ]


def restore_marks(samples: Sequence[Any], marks: Sequence[Mark]) -> None:
    """Sets `valid` and `invalid_reason` of the rejected among `samples` back to their marks. A sample that a user's function rejected
    beside them stays rejected."""
    for sample, mark in zip(samples, marks, strict=True):
        if not mark.valid and sample.valid is not False:
            sample.valid, sample.invalid_reason = False, mark.reason


def with_marks(
    data: Mapping[str, Any], samples: Sequence[Any], marks: Sequence[Mark], *, batch_rows: Sequence[int]
) -> tuple[Mapping[str, Any], list[int]]:
    """`(data, sources)`: the data of a custom converter in which no row of a rejected sample is valid, and each row's position in `samples`.

    `samples` are all that the gate judged, `batch_rows` the positions of those that the converter was given. See `attribute_rows`.
    """
    if not isinstance(data, Mapping):
        raise RolloutDataError(f"The custom converter returned {type(data).__name__}, not a dict of lists.")
    if num_entries(data.get("tokens")) is None:
        raise RolloutDataError(f"The train data has no list of 'tokens'; its keys are {sorted(map(str, data))}.")
    indices, given, reasons = (data.get(name) for name in ("sample_indices", "valid", "invalid_reason"))
    sources = attribute_rows(
        list(data["tokens"]),
        samples,
        [mark.valid for mark in marks],
        batch_rows=batch_rows,
        sample_indices=None if indices is None else list(indices),
    )
    valid = [True] * len(sources) if given is None else [bool(value) for value in given]
    reasons = [None] * len(sources) if reasons is None else list(reasons)
    for name, values in (("valid", valid), ("invalid_reason", reasons)):
        if len(values) != len(sources):
            raise RolloutDataError(f"{name!r} has {len(values)} entries for {len(sources)} samples.")
    rejected = [row for row, source in enumerate(sources) if not marks[source].valid]
    if not rejected:
        return data, sources
    for row in rejected:
        valid[row], reasons[row] = False, marks[sources[row]].reason
    failures = [marks[source].is_model_failure for source in sources]
    marked = data.copy() if isinstance(data, RolloutBatch) else dict(data)
    marked.update(valid=valid, invalid_reason=reasons, model_failure=failures)
    return marked, sources


def attribute_rows(
    rows: Sequence[Any],
    samples: Sequence[Any],
    valid: Sequence[bool],
    *,
    batch_rows: Sequence[int],
    sample_indices: Sequence[Any] | None = None,
) -> list[int]:
    """The position in `samples` of the sample that each row was made of. `rows` are token ids.

    A row is of the sample that stands at its place in the batch and has its tokens; else of the one that `sample_indices` names
    (`Sample.index`); else of the one with its tokens; else, where there is one row per sample of the batch, of the one at its place. RolloutDataError for a
    row of none of them. Where several samples have a row's tokens and fewer rows than samples do, the valid ones come first.
    """
    keys = [_key(sample.tokens) for sample in samples]
    row_keys = [_key(row) for row in rows]
    is_one_each = len(rows) == len(batch_rows)
    sources: list[int | None] = [None] * len(rows)
    if is_one_each:
        sources = [place if keys[place] == key else None for place, key in zip(batch_rows, row_keys, strict=True)]
    if sample_indices is not None:
        _attribute_by_index(sources, row_keys, samples, keys, sample_indices)
    _attribute_by_tokens(sources, row_keys, keys, valid)
    taken = {source for source in sources if source is not None}
    for row, source in enumerate(sources):
        if source is not None:
            continue
        if not is_one_each or batch_rows[row] in taken:
            raise RolloutDataError(
                f"Row {row} of the {len(rows)} that --custom-convert-samples-to-train-data-path returned has the tokens of none of the "
                f"{len(samples)} samples, so it is not known whether the gate let its sample pass. Add 'sample_indices', the Sample.index of each "
                "row's sample, to the returned data, or return one row per sample in the samples' order."
            )
        sources[row] = batch_rows[row]
    return [int(source) for source in sources if source is not None]


def _key(tokens: Any) -> bytes:
    """A short key of token ids, the same for a list, an array and a tensor of them."""
    ids = np.ascontiguousarray(as_array(tokens)).astype(np.int64).reshape(-1)
    return hashlib.blake2b(ids.tobytes(), digest_size=16).digest()


def _attribute_by_index(sources: list, row_keys: list[bytes], samples: Sequence[Any], keys: list[bytes], indices: Sequence[Any]) -> None:
    """Fills in, in place, the rows whose `sample_indices` entry names a sample; of several with one index, the one with the row's tokens."""
    if len(indices) != len(sources):
        raise RolloutDataError(f"'sample_indices' has {len(indices)} entries for {len(sources)} samples.")
    places = collections.defaultdict(list)
    for place, sample in enumerate(samples):
        if sample.index is not None:
            places[int(sample.index)].append(place)
    for row, index in enumerate(indices):
        if sources[row] is not None or index is None:
            continue
        named = places.get(int(index))
        if named is None:
            raise RolloutDataError(
                f"Row {row} of the custom converter's data has sample_indices {int(index)}, which is no Sample.index of this rollout's "
                f"{len(samples)} samples."
            )
        same = [place for place in named if keys[place] == row_keys[row]]
        if len(named) == 1 or len(same) == 1:
            sources[row] = (same or named)[0]


def _attribute_by_tokens(sources: list, row_keys: list[bytes], keys: list[bytes], valid: Sequence[bool]) -> None:
    """Fills in, in place, the rows that have a sample's tokens."""
    places, wanted = collections.defaultdict(list), collections.defaultdict(list)
    taken = {source for source in sources if source is not None}
    for place, key in enumerate(keys):
        places[key].append(place)
    for row, key in enumerate(row_keys):
        if sources[row] is None and key in places:
            wanted[key].append(row)
    for key, rows in wanted.items():
        free = [place for place in places[key] if place not in taken]
        if len(rows) < len(free):
            free.sort(key=lambda place: not valid[place])
        # further rows are copies; of a sample that was rejected where one of them was
        again = next((place for place in places[key] if not valid[place]), places[key][0])
        for number, row in enumerate(rows):
            sources[row] = free[number] if number < len(free) else again
