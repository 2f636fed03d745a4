"""Compares what engines and graders were asked and answered.

A reply is matched with the reply to the same request, whatever the order in which they came. Long
files are compared by hashes of their lines without what differs in any two runs; a line is parsed
only where the hashes differ.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import itertools
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from slime.exceptions import RolloutDataError
from slime.files import exact_json
from slime.harness.diff.columns import both
from slime.harness.diff.results import Difference, FieldResult, token_of_path
from slime.harness.diff.sides import Side
from slime.harness.diff.stages import NOT_COMPARED_KEYS, TIME_SUFFIXES, DiffStage, Text
from slime.harness.diff.values import ABSENT, EXACT, Extent, Found, Tolerance, json_differences
from slime.recording import manifest

# a key that is not compared, with a value that has no quoted bracket
_VOLATILE = re.compile(
    rb'"(?:'
    + b"|".join(sorted(key.encode() for key in NOT_COMPARED_KEYS))
    + rb"|[a-z0-9_]*(?:"
    + b"|".join(suffix.encode() for suffix in TIME_SUFFIXES)
    + rb'))":\s*(?:"(?:[^"\\]|\\.)*"|[-+.0-9eE]+|null|true|false|\[[^\[\]{}]*\])'
)
_REQUEST, _REPLY = b',"request":', b',"reply":'
_RID = re.compile(r"-([0-9]+)(?:-try[0-9]+)?$")
# replies that differ are parsed until so many have been found to, or so many entries of them
_ENOUGH, _ENOUGH_ENTRIES = 256, 1 << 16


@dataclasses.dataclass(frozen=True)
class _Line:
    """Where a reply stands in its file, and the hash of what is compared of it."""

    number: int
    start: int
    size: int
    digest: tuple[int, int]


def compare_replies(a: Side, b: Side, tolerance: Tolerance = EXACT) -> list[FieldResult]:
    """What requests and what replies differ. `tolerance`: of the floats of replies."""
    lines_a, lines_b = both(_lines_by_request, a, b)
    requests = FieldResult(DiffStage.REPLY, "replies", "request")
    replies = FieldResult(DiffStage.REPLY, "replies", "reply")
    differing: list[tuple[_Line, _Line]] = []
    only_a: list[_Line] = []
    only_b: list[_Line] = []
    for key in dict.fromkeys([*lines_a, *lines_b]):
        here, there = lines_a.get(key, []), lines_b.get(key, [])
        differing += [
            pair for pair in zip(here, there, strict=False) if pair[0].digest != pair[1].digest
        ]
        only_a += here[len(there) :]
        only_b += there[len(here) :]
    requests.entries = max(len(only_a), len(only_b))
    if requests.entries:
        requests.first = _first_request(a, b, only_a, only_b)
    if differing:
        _parse_differing(a, b, differing, replies, tolerance)
    return [requests, replies]


def _lines_by_request(side: Side) -> dict[tuple[int, int], list[_Line]]:
    """Every line of the file by the hash of its request, in the order of the file."""
    path = side.files["replies"]
    found: dict[tuple[int, int], list[_Line]] = collections.defaultdict(list)
    start = 0
    whole = hashlib.blake2b(digest_size=manifest.HASH_BYTES)
    with open(path, "rb") as file:
        for number, line in enumerate(file):
            whole.update(line)
            compared = _VOLATILE.sub(b"", line)
            begin, cut = compared.find(_REQUEST), compared.find(_REPLY)
            if begin < 0 or cut < begin:
                side.verify("replies")
                raise RolloutDataError(f"{path}, line {number + 1}: no reply of an engine.")
            # Python's hash of bytes is keyed by the process, and seven times as fast as blake2b
            request, reply = compared[begin:cut], compared[:begin] + compared[cut:]
            key, digest = (len(request), hash(request)), (len(reply), hash(reply))
            found[key].append(_Line(number, start, len(line), digest))
            start += len(line)
    side.check_hash("replies", whole.hexdigest())
    return found


def _record(path: Path, line: _Line) -> dict[str, Any]:
    with open(path, "rb") as file:
        file.seek(line.start)
        text = file.read(line.size)
    try:
        record = exact_json.loads(text)
    except orjson.JSONDecodeError as error:
        raise RolloutDataError(f"{path}, line {line.number + 1}: not JSON ({error}).") from None
    if not isinstance(record, dict):
        raise RolloutDataError(f"{path}, line {line.number + 1}: no reply of an engine.")
    return record


def _first_request(a: Side, b: Side, only_a: list[_Line], only_b: list[_Line]) -> Difference:
    """The earliest difference among the requests that one side alone has. Requests for one sample
    are compared with each other.
    """
    rows, prompts = _rows_by_index(a), _prompt_lengths(a)
    records_a, records_b = (
        [(line, _record(side.files["replies"], line)) for line in lines[:_ENOUGH]]
        for side, lines in ((a, only_a), (b, only_b))
    )
    others: dict[int, list[dict[str, Any]]] = collections.defaultdict(list)
    for _, record in records_b:
        others[_index_of(record, ())].append(record)
    found = []
    for _, record in records_a:
        index = _index_of(record, ())
        if not others[index]:
            continue
        one, other = ({"request": each.get("request")} for each in (record, others[index].pop(0)))
        has_ids = False
        for path, x, y in json_differences(one, other, EXACT, Extent()):
            row = rows.get(_index_of(record, _entry_of(path)))
            token = _token_of(prompts, row, path)
            difference = Difference(
                DiffStage.REPLY, "replies", "request", path[1:], x, y, row, row, None, token
            )
            if "input_ids" in path and has_ids:  # those after the first come later
                continue
            has_ids = has_ids or "input_ids" in path
            found.append(difference)
    if found:
        return min(found, key=lambda one: one.order)
    line, record = (records_a or records_b)[0]
    words = Text(f"line {line.number + 1}")
    row = rows.get(_index_of(record, ()))
    values = (words, ABSENT) if records_a else (ABSENT, words)
    return Difference(DiffStage.REPLY, "replies", "request", (), *values, row, row)


def _entry_of(path: tuple[Any, ...]) -> tuple[Any, ...]:
    """The path to the entry of a batch that a path below "request" leads to."""
    return next((("", place) for place in path[2:3] if isinstance(place, int)), ())


def _prompt_lengths(side: Side) -> np.ndarray | None:
    """Prompt tokens of every sample [N]; None where they are not recorded."""
    if "samples" not in side:
        return None
    samples = side.columns("samples")
    tokens, lengths = samples.column("tokens"), samples.numbers("response_length")
    return None if tokens.offsets is None or lengths is None else np.diff(tokens.offsets) - lengths


def _token_of(prompts: np.ndarray | None, row: int | None, path: tuple[Any, ...]) -> int | None:
    """The response token from which on a request depends on what differs: before all for what
    decides how is sampled, None where it is not known.
    """
    if "sampling_params" in path:
        return -1
    if "input_ids" not in path or row is None or prompts is None or row >= len(prompts):
        return None
    return path[-1] - int(prompts[row]) if isinstance(path[-1], int) else None


def _parse_differing(
    a: Side,
    b: Side,
    differing: list[tuple[_Line, _Line]],
    result: FieldResult,
    tolerance: Tolerance,
) -> None:
    differing = sorted(differing, key=lambda pair: pair[0].number)
    rows = _rows_by_index(a)
    found_rows: set[int] = set()
    num_different = 0
    for done, (line_a, line_b) in enumerate(differing):
        record_a = _record(a.files["replies"], line_a)
        record_b = _record(b.files["replies"], line_b)
        answers = _answer_of(record_a), _answer_of(record_b)
        found = list(json_differences(*answers, tolerance, result.extent))
        # an entry of the reply to a batch is of a sample of its own
        for _, own in itertools.groupby(found, key=lambda one: one[0][1:2]):
            path, x, y = min(own, key=_order_in_sample)
            row = rows.get(_index_of(record_a, path), None)
            if row is not None:
                found_rows.add(row)
            one = Difference(DiffStage.REPLY, "replies", "reply", path, x, y, row, row)
            if result.first is None or one.order < result.first.order:
                result.first = one
        result.entries += len(found)
        num_different += bool(found)
        if num_different >= _ENOUGH or result.entries >= _ENOUGH_ENTRIES:
            result.entries += len(differing) - done - 1
            break
    result.rows = np.array(sorted(found_rows), dtype=np.int64)


def _order_in_sample(found: Found) -> float:
    """Sorts what differs in the reply for one sample: its tokens in order, then the rest."""
    token = token_of_path(found[0])
    return math.inf if token is None else token


def _answer_of(record: dict[str, Any]) -> dict[str, Any]:
    return {"reply": record.get("reply"), "status": record.get("status")}


def _rows_by_index(side: Side) -> dict[int, int]:
    if "samples" not in side:
        return {}
    indices = side.columns("samples").numbers("index")
    return {} if indices is None else {index: row for row, index in enumerate(indices.tolist())}


def _index_of(record: dict[str, Any], path: tuple[Any, ...]) -> int:
    """`Sample.index` that ends the request's id, of the path's entry of the reply; -1 without."""
    request = record.get("request")
    rid = request.get("rid") if isinstance(request, dict) else None
    if isinstance(rid, list):
        entry = path[1] if len(path) > 1 and isinstance(path[1], int) else 0
        rid = rid[entry] if entry < len(rid) else None
    found = _RID.search(rid) if isinstance(rid, str) else None
    return int(found[1]) if found else -1
