"""Finds the sample that each row of a custom converter's data was made of, so that the gate's
verdict holds for the rows too.

    samples (with verdicts)  [a: valid] [b: truncated] [c: valid]
    a converter's rows       tokens of b, c, c
    their samples            b, c, c -> the first row does not train, for the reason "truncated"; a
                             is left out; c makes two rows
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from slime.data.batch import RolloutBatch
from slime.data.columns import rollout_ids_of
from slime.data.ragged import as_array, num_entries
from slime.data.reasons import DropReason
from slime.data.weight_versions import oldest_version
from slime.exceptions import RolloutDataError
from slime.typing import Numbers


@dataclasses.dataclass(frozen=True)
class Mark:
    """The gate's verdict on one sample and what the sample was then, kept apart from the sample,
    which users' functions may write to.

    index: its `Sample.index`. tokens, response: keys of its token ids, and of those of its
    response. keep_mask: 0 where a response token has no log-prob. oldest_version: of the weights
    that sampled its tokens, None where none is known. rollout_id: the same for all samples of one
    execution.
    """

    valid: bool
    reason: str | None = None
    is_model_failure: bool = False
    index: int | None = None
    tokens: bytes = b""
    response: bytes = b""
    keep_mask: Sequence[int] | None = None
    oldest_version: int | None = None
    rollout_id: int | None = None


def marks_of(samples: Sequence[Any], verdicts: Sequence[Any]) -> list[Mark]:
    """One mark per sample and its verdict of the gate. To be made before any of the user's
    functions sees the samples.
    """
    marks = []
    for sample, verdict, rollout_id in zip(samples, verdicts, rollout_ids_of(samples), strict=True):
        reason = verdict.reason
        failed: dict[str, Any] = (
            {}
            if verdict.valid
            else {
                "reason": reason.value if reason else DropReason.INVALID.value,
                "is_model_failure": bool(reason and reason.is_model_failure),
            }
        )
        ids = _ids(sample.tokens)
        response = ids[len(ids) - int(sample.response_length) :]
        keys: dict[str, Any] = {
            "index": sample.index,
            "tokens": _key(ids),
            "response": _key(response),
        }
        marks.append(
            Mark(
                bool(verdict.valid),
                **failed,
                **keys,
                keep_mask=verdict.keep_mask,
                oldest_version=oldest_version(sample),
                rollout_id=rollout_id,
            )
        )
    return marks


def restore_marks(samples: Sequence[Any], marks: Sequence[Mark]) -> None:
    """Sets `valid` and `invalid_reason` of the rejected among `samples` back to their marks. A
    sample that a user's function rejected beside them stays rejected.
    """
    for sample, mark in zip(samples, marks, strict=True):
        if not mark.valid and sample.valid is not False:
            sample.valid, sample.invalid_reason = False, mark.reason


def with_marks(
    data: Mapping[str, Any], marks: Sequence[Mark], *, batch_rows: Sequence[int]
) -> tuple[Mapping[str, Any], list[int]]:
    """`(data, sources)`: the data of a custom converter in which no row of a rejected sample is
    valid and no token without a log-prob carries loss, and each row's position among `marks`. Which
    execution a row is of, and which weights sampled it, are filled in where the converter left them
    out.

    `marks` are of all that the gate judged, `batch_rows` the positions of those that the converter
    was given. See `attribute_rows`.
    """
    if not isinstance(data, Mapping):
        raise RolloutDataError(
            f"The custom converter returned {type(data).__name__}, not a dict of lists."
        )
    if num_entries(data.get("tokens")) is None:
        raise RolloutDataError(
            f"The train data has no list of 'tokens'; its keys are {sorted(map(str, data))}."
        )
    indices, given, reasons, lengths = (
        data.get(name) for name in ("sample_indices", "valid", "invalid_reason", "response_lengths")
    )
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
            raise RolloutDataError(
                f"{name!r} has {len(values)} entries for {len(sources)} samples."
            )
    changes: dict[str, Any] = _without_missing_log_probs(
        data, [marks[source].keep_mask for source in sources]
    )
    names = [marks[source].index for source in sources]
    if indices is None and all(type(name) is int for name in names):
        changes["sample_indices"] = names
    for name, values in (
        ("rollout_ids", [marks[source].rollout_id for source in sources]),
        ("oldest_weight_version", [marks[source].oldest_version for source in sources]),
    ):
        if data.get(name) is None and any(value is not None for value in values):
            changes[name] = values
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


def _without_missing_log_probs(
    data: Mapping[str, Any], keep_masks: Sequence[Sequence[int] | None]
) -> dict[str, Any]:
    """{"loss_masks": ...} with 0 where a row's `keep_masks` entry has 0; {} where there is none.
    RolloutDataError where the two differ in length.
    """
    if all(keep is None for keep in keep_masks):
        return {}
    masks = list(data["loss_masks"]) if "loss_masks" in data else None
    if masks is None:
        lengths = data.get("response_lengths")
        masks = [
            np.ones(
                int(lengths[row]) if lengths is not None else len(data["tokens"][row]),
                dtype=np.uint8,
            )
            for row in range(len(keep_masks))
        ]
    for row, keep in enumerate(keep_masks):
        if keep is None:
            continue
        mask = as_array(masks[row])
        if len(mask) != len(keep):
            raise RolloutDataError(
                f"Row {row} has a loss mask of {len(mask)} entries, and the gate masks tokens "
                f"without a log-prob in a response of {len(keep)} tokens. Keep the "
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

    A row is of the sample that has its tokens; where they were changed, of the one that has its
    response, which `response_lengths` tell; where that was changed too, of the one that
    `sample_indices` (`Sample.index`) names. Of several samples with the same tokens, the one that
    is named, else the one at the row's place where every row fits the sample at its place, else any
    of them where the gate's verdict on all is the same. RolloutDataError for a row of which none of
    these says whether the gate let its sample pass.
    """
    ids = [_ids(row) for row in rows]
    row_keys = [_key(row) for row in ids]
    ends = None
    if response_lengths is not None and len(response_lengths) == len(rows):
        ends = [
            _key(row[len(row) - int(length) :])
            for row, length in zip(ids, response_lengths, strict=True)
        ]
    named = (
        [None] * len(rows)
        if sample_indices is None
        else _named_places(sample_indices, marks, len(rows))
    )
    fits = len(rows) == len(batch_rows) and all(
        key == marks[place].tokens or (ends is not None and ends[row] == marks[place].response)
        for row, (key, place) in enumerate(zip(row_keys, batch_rows, strict=True))
    )
    evidence = _Evidence(marks, batch_rows, named, fits)
    sources: list[int | None] = [None] * len(rows)
    _attribute_by_key(sources, row_keys, [mark.tokens for mark in marks], evidence)
    if ends is not None:
        _refuse_contradictions(sources, ends, evidence)
        _attribute_by_key(sources, ends, [mark.response for mark in marks], evidence)
    if sample_indices is not None:
        _attribute_by_index(sources, evidence, sample_indices)
    for row, source in enumerate(sources):
        if source is None:
            raise evidence.unknown(row, f"has the tokens of none of the {len(marks)} samples")
    return [int(source) for source in sources if source is not None]


@dataclasses.dataclass(frozen=True)
class _Evidence:
    """What is known beside the rows' tokens. named: per row, the positions of the samples that its
    `sample_indices` entry names. is_in_order: every row fits the sample at its place in the batch.
    """

    marks: Sequence[Mark]
    batch_rows: Sequence[int]
    named: Sequence[list[int] | None]
    is_in_order: bool

    def is_one_verdict(self, places: Sequence[int]) -> bool:
        """Whether the gate said the same of all these samples, so that it does not matter which of
        them a row is of.
        """
        marks = [self.marks[place] for place in places]
        return (
            len(
                {
                    (
                        mark.valid,
                        mark.reason,
                        None if mark.keep_mask is None else tuple(mark.keep_mask),
                    )
                    for mark in marks
                }
            )
            <= 1
        )

    def the_named(self, row: int) -> int | None:
        """The one sample that the row's `sample_indices` entry names."""
        places = self.named[row]
        return places[0] if places is not None and len(places) == 1 else None

    def unknown(self, row: int, why: str) -> RolloutDataError:
        return RolloutDataError(
            f"Row {row} of the {len(self.named)} rows of train data {why}, so it is not known "
            "whether the gate let its sample pass. Add 'sample_indices', "
            "the Sample.index of each row's sample, to what --custom-convert-samples-to-train-data-path returns."
        )


def _ids(tokens: Numbers) -> np.ndarray:
    """Token ids, int64, the same for a list, an array and a tensor of them."""
    return np.ascontiguousarray(as_array(tokens)).astype(np.int64).reshape(-1)


def _key(ids: np.ndarray) -> bytes:
    """A short key of token ids."""
    return hashlib.blake2b(ids.tobytes(), digest_size=16).digest()


def _named_places(
    indices: Sequence[Any], marks: Sequence[Mark], num_rows: int
) -> list[list[int] | None]:
    """Per row, the positions of the samples that its `sample_indices` entry names: none where it
    names no sample, None where it has no entry.
    """
    if len(indices) != num_rows:
        raise RolloutDataError(
            f"'sample_indices' has {len(indices)} entries for {num_rows} samples."
        )
    places = collections.defaultdict(list)
    for place, mark in enumerate(marks):
        if mark.index is not None:
            places[int(mark.index)].append(place)
    try:
        return [None if index is None else places.get(int(index), []) for index in indices]
    except (TypeError, ValueError):
        raise RolloutDataError(
            "'sample_indices' must hold the Sample.index of each row's sample, a whole number; it "
            f"holds {list(indices)[:4]}."
        ) from None


def _attribute_by_index(sources: list, evidence: _Evidence, indices: Sequence[Any]) -> None:
    """Fills in, in place, the rows whose `sample_indices` entry names one sample, or several with
    one verdict.
    """
    for row, places in enumerate(evidence.named):
        if sources[row] is not None or places is None:
            continue
        if not places:
            raise RolloutDataError(
                f"Row {row} of the custom converter's data has sample_indices {int(indices[row])}, "
                "which is no Sample.index of this rollout's "
                f"{len(evidence.marks)} samples."
            )
        if not evidence.is_one_verdict(places):
            raise RolloutDataError(
                f"Row {row} of the custom converter's data has sample_indices {int(indices[row])}, "
                f"and {len(places)} samples have this Sample.index: the gate "
                "let some of them pass and rejected others. Keep the tokens of their responses, or give each sample an index of its own."
            )
        sources[row] = places[0]


def _attribute_by_key(
    sources: list, row_keys: Sequence[bytes], keys: Sequence[bytes], evidence: _Evidence
) -> None:
    """Fills in, in place, the rows that have a sample's key: of the sample that is named, else of
    the one at the row's place, else of any with one verdict.
    """
    places, wanted = collections.defaultdict(list), collections.defaultdict(list)
    for place, key in enumerate(keys):
        places[key].append(place)
    for row, key in enumerate(row_keys):
        if sources[row] is not None or key not in places:
            continue
        same = [place for place in evidence.named[row] or () if keys[place] == key]
        if len(same) == 1:
            sources[row] = same[0]
        elif evidence.is_in_order and keys[evidence.batch_rows[row]] == key:
            sources[row] = evidence.batch_rows[row]
        else:
            wanted[key].append(row)
    taken = {source for source in sources if source is not None}
    given = set(evidence.batch_rows)
    for key, rows in wanted.items():
        free = [place for place in places[key] if place not in taken]
        of_batch = [place for place in free if place in given]
        if len(rows) <= len(of_batch) and evidence.is_one_verdict(
            [place for place in places[key] if place in given]
        ):
            free = of_batch
        elif not evidence.is_one_verdict(places[key]):
            raise evidence.unknown(
                rows[0],
                f"has the tokens of {len(places[key])} samples, some of which the gate rejected",
            )
        for number, row in enumerate(rows):
            if number < len(free):
                sources[row] = free[number]
            else:  # a copy, or a row of another sample that was changed until it was equal: rejected where either was
                named = evidence.the_named(row)
                either = [places[key][0]] if named is None else [places[key][0], named]
                sources[row] = next(
                    (place for place in either if not evidence.marks[place].valid), either[0]
                )


def _refuse_contradictions(
    sources: Sequence[int | None], ends: Sequence[bytes], evidence: _Evidence
) -> None:
    """RolloutDataError for a row that names one sample, has the response of others, and the gate's
    verdict on them is not the same.
    """
    places = collections.defaultdict(list)
    for place, mark in enumerate(evidence.marks):
        places[mark.response].append(place)
    for row, source in enumerate(sources):
        named = evidence.the_named(row)
        same = places.get(ends[row], [])
        if source is not None or named is None or not same or named in same:
            continue
        if not evidence.is_one_verdict([named, *same]):
            raise RolloutDataError(
                f"Row {row} of the custom converter's data has sample_indices "
                f"{evidence.marks[named].index}, and its response is that of the sample with the "
                f"index {evidence.marks[same[0]].index}: the gate let one of the two pass and "
                "rejected the other. 'sample_indices' must hold the Sample.index "
                "of each row's sample, not the row's number."
            )
