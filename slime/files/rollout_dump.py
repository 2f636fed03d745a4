"""Writes and reads rollout dumps: a Parquet table with a row per sample where the path ends in
.parquet, see `sample_table`; else a head line, one JSON line per sample, and a hash of them all.
Nothing in them is executed when read.

{"format": "slime-rollout-1", "rollout_id": 7, "evaluation": false, "num_samples": 512, "sealed": true}
{"group_index": 0, "tokens": [...], ...}
{"blake2b":"6f1c..."}
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from slime.data.sample import Sample
from slime.exceptions import ConfigError, RolloutDataError
from slime.files import atomic, exact_json, tables
from slime.files.json_values import decode_values, encode_json
from slime.files.pickles import pickle_problem
from slime.files.sample_table import sample_table, samples_of
from slime.files.sealed_lines import SealHash, sealed

logger = logging.getLogger(__name__)

FORMAT = "slime-rollout-1"
TABLE_SUFFIX = ".parquet"


def dump_path(path_template: str, rollout_id: int, *, evaluation: bool) -> Path:
    """The file of one rollout: `{rollout_id}` in the template becomes "7", or "eval_7".

    `ConfigError` for a template without it: every rollout would overwrite the one before.
    """
    name = f"eval_{rollout_id}" if evaluation else str(rollout_id)
    try:
        path = path_template.format(rollout_id=name)
    except (KeyError, IndexError, ValueError) as error:
        raise ConfigError(
            f"The dump path {path_template!r} has a placeholder other than {{rollout_id}}: {error}"
        ) from None
    if path == path_template:
        raise ConfigError(
            f"The dump path {path_template!r} needs {{rollout_id}}, or each rollout overwrites the "
            "one before."
        )
    return Path(path)


def save_debug_rollout_data(
    path_template: str, data: Sequence[Any], *, rollout_id: int, evaluation: bool
) -> Path:
    """Writes the samples (nested lists are flattened) and returns the file's path. A file is
    complete or absent, never half.
    """
    samples = list(_flatten(data))
    path = dump_path(path_template, rollout_id, evaluation=evaluation)
    if path.suffix == TABLE_SUFFIX:
        tables.write_table(path, sample_table(samples))
        return path
    head = {
        "format": FORMAT,
        "rollout_id": rollout_id,
        "evaluation": evaluation,
        "num_samples": len(samples),
        "sealed": True,
    }
    atomic.write_bytes(path, sealed(_lines(head, samples)))
    return path


class RolloutDumper:
    """Saves the rollouts of a run below `path_template` (None: nothing is saved). A disk that takes
    no more costs dumps, never the run.
    """

    def __init__(self, path_template: str | None) -> None:
        self.path_template = path_template
        self.lost = 0

    def save(self, data: Sequence[Any], *, rollout_id: int, evaluation: bool) -> dict[str, int]:
        """Saves as `save_debug_rollout_data` and returns metrics: how many dumps this run has lost,
        {} while none. The first loss is logged.
        """
        if not self.path_template:
            return {}
        try:
            save_debug_rollout_data(
                self.path_template, data, rollout_id=rollout_id, evaluation=evaluation
            )
        except OSError as error:
            if not self.lost:
                logger.warning(
                    "rollout %s was not dumped to %s: %s. Training goes on; further losses are "
                    "only counted, as rollout/dumps_lost. "
                    "Free the disk, or point --save-debug-rollout-data elsewhere.",
                    rollout_id,
                    self.path_template,
                    error,
                )
            self.lost += 1
        return {"rollout/dumps_lost": self.lost} if self.lost else {}


def _lines(head: dict[str, Any], samples: list[Sample]) -> Iterator[bytes]:
    yield orjson.dumps(head) + b"\n"
    for sample in samples:
        # no name holds a line: its buffer, of up to ten times its length, goes before the next
        yield _encode_sample(sample) + b"\n"


def _encode_sample(sample: Sample) -> bytes:
    try:
        return encode_json(sample.to_dict())
    except RolloutDataError as error:
        raise RolloutDataError(f"Sample {sample.index} cannot be dumped: {error}") from error


def _flatten(data: Sample | dict[str, Any] | Iterable[Any]) -> Iterator[Sample]:
    if isinstance(data, Sample):
        yield data
    elif isinstance(data, dict):  # an evaluation's datasets by name
        for dataset in data.values():
            yield from _flatten(
                dataset.get("samples") or () if isinstance(dataset, dict) else dataset
            )
    else:
        for entry in data:
            yield from _flatten(entry)


def read_rollout_dump(path: str | os.PathLike) -> list[Sample]:
    """The samples of a dump, in order, equal to what was saved. `RolloutDataError` naming the file
    and line where it is damaged or cut short.
    """
    path = Path(path)
    try:
        if tables.is_table(path):
            return _read_table(path)
        if problem := pickle_problem(path):
            raise RolloutDataError(problem)
        with open(path, "rb") as file:
            return _read_lines(path, file)
    except FileNotFoundError:
        raise RolloutDataError(f"There is no rollout dump at {path}.") from None


def is_rollout_dump(path: Path) -> bool:
    """Whether a file of JSON lines begins as a dump does; False for one that cannot be read."""
    try:
        if not path.is_file():  # a pipe would be waited for
            return False
        with open(path, "rb") as file:
            return file.read(64).startswith(f'{{"format":"{FORMAT}"'.encode())
    except OSError:
        return False


def _read_table(path: Path) -> list[Sample]:
    try:
        return samples_of(tables.read_table(path, what="rollout dump"))
    except RolloutDataError as error:
        raise RolloutDataError(f"{path}: {error}") from error


def _read_lines(path: Path, file: BinaryIO) -> list[Sample]:
    """The samples, a line at a time: the file's text is never in memory beside them. The dump of an
    earlier version has no seal.
    """
    first = file.readline()
    head = _parse(path, 1, first) if first else {}
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        raise RolloutDataError(
            f"{path} is not a rollout dump of this version: it begins with {first[:60].rstrip()!r}."
        )
    is_sealed = head.get("sealed") is True
    count, is_changed = _look_through(file, first, is_sealed=is_sealed)
    # raised first: the line at which a file was cut is rarely whole
    if count != head.get("num_samples"):
        raise RolloutDataError(
            f"{path} holds {count} samples, its head says {head.get('num_samples')}. It was cut "
            "short or edited."
        )
    file.seek(len(first))
    samples = [
        _read_sample(path, number, line)
        for number, line in enumerate(itertools.islice(file, count), start=2)
    ]
    if is_changed:  # raised last: a line that is no sample is the better message
        raise RolloutDataError(
            f"{path} is damaged or was edited: its last line is not the hash of those before it. "
            'Remove that line and "sealed" from the first one to read an edited dump.'
        )
    return samples


def _look_through(file: BinaryIO, first: bytes, *, is_sealed: bool) -> tuple[int, bool]:
    """(lines of samples behind the head, whether they differ from the seal)."""
    if not is_sealed:
        return sum(1 for _ in file), False
    found, last, count = SealHash(), first, 0
    for line in file:
        found.add(last)
        last, count = line, count + 1
    return count - 1, last != found.seal()


def _read_sample(path: Path, number: int, line: bytes) -> Sample:
    entry = _parse(path, number, line)
    try:
        return Sample.from_dict(decode_values(entry))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RolloutDataError(
            f"{path}, line {number}: not a sample ({type(error).__name__}: {error})."
        ) from error


def _parse(path: Path, number: int, line: bytes) -> Any:
    try:
        return exact_json.loads(line)
    except orjson.JSONDecodeError as error:
        raise RolloutDataError(f"{path}, line {number}: not JSON ({error}).") from None


def load_debug_rollout_data(
    path_template: str, *, rollout_id: int, subsample_ratio: float | None = None
) -> list[Sample]:
    """The samples of one rollout's dump; with `subsample_ratio` in (0, 1] about that share of its
    groups, whole ones, at least one, evenly spaced.
    """
    samples = read_rollout_dump(dump_path(path_template, rollout_id, evaluation=False))
    return samples if subsample_ratio is None else subsample_groups(samples, subsample_ratio)


def subsample_groups(samples: list[Sample], ratio: float) -> list[Sample]:
    """`round(ratio * groups)` whole groups (at least one), evenly spaced, in their order. A sample
    without group_index is its own group.
    """
    if not 0 < ratio <= 1:
        raise ConfigError(f"--load-debug-rollout-data-subsample must be in (0, 1], got {ratio}.")
    groups: dict[Any, list[Sample]] = {}
    for position, sample in enumerate(samples):
        key = ("own", position) if sample.group_index is None else sample.group_index
        groups.setdefault(key, []).append(sample)
    count = max(1, round(ratio * len(groups))) if groups else 0
    chosen = {i * len(groups) // count for i in range(count)}
    keep = {
        id(sample) for i, group in enumerate(groups.values()) if i in chosen for sample in group
    }
    return [sample for sample in samples if id(sample) in keep]
