"""Reads a recording: `Recording` for the folder, `RecordedRollout` for one rollout.

Everything is read as data. A part is read only where a manifest lists it, and only from the file
name that the format gives it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml

from slime.data.batch import RolloutBatch
from slime.data.reasons import REASON_OF_VALUE
from slime.data.sample import Sample
from slime.exceptions import RolloutDataError
from slime.files import tables
from slime.files.field_table import batch_of
from slime.files.json_values import decode_json
from slime.files.jsonl import read_jsonl
from slime.files.sample_table import samples_of, with_changes
from slime.files.train_record import TrainDump
from slime.files.train_table import read_train_table
from slime.gate.config import Verdict
from slime.recording import manifest
from slime.recording.manifest import Manifest, Part
from slime.recording.run_record import options_of

if TYPE_CHECKING:
    import pyarrow

METRIC_PARTS = ("rollout", "steps", "critic_steps")
LARGEST_JSON = 1 << 28  # bytes
LARGEST_RUN_RECORD = 1 << 24


@dataclasses.dataclass(frozen=True)
class JudgedSamples:
    """The samples part. Entry i of each list is of row i: what the gate was given, its verdict, and
    what it made of the sample. Rows from `num_batch` on were dropped by the rollout before.
    """

    samples: list[Sample]
    valid: list[bool]
    reasons: list[str | None]
    details: list[str | None]
    dropped: list[bool]
    dropped_by: list[str | None]
    keep_masks: list[list[int] | None]
    changes: list[dict[str, Any]]

    @property
    def num_batch(self) -> int:
        return sum(reason is None for reason in self.dropped_by)

    @property
    def batch(self) -> list[Sample]:
        """What the gate was given."""
        return self.samples[: self.num_batch]

    @property
    def verdicts(self) -> list[Verdict]:
        """The verdicts on the batch, without texts and answers that they replaced."""
        return [
            Verdict(
                valid=self.valid[row],
                reason=None if (reason := self.reasons[row]) is None else REASON_OF_VALUE[reason],
                detail=self.details[row] or "",
                keep_mask=self.keep_masks[row],
                dropped=self.dropped[row],
            )
            for row in range(self.num_batch)
        ]

    @property
    def kept(self) -> list[int]:
        """The rows that the gate handed on."""
        return [row for row in range(self.num_batch) if not self.dropped[row]]

    @property
    def dropped_groups(self) -> list[tuple[str, list[Sample]]]:
        """(reason, [sample]) of every row that the rollout dropped before the gate."""
        return [
            (reason, [self.samples[row]])
            for row, reason in enumerate(self.dropped_by)
            if reason is not None
        ]

    def judged(self, row: int) -> Sample:
        """What the gate made of a row of the batch."""
        return with_changes(self.samples[row], self.changes[row])


class RecordedRollout:
    """One rollout, or evaluation, of a recording."""

    def __init__(self, folder: Path, recording: Recording | None = None) -> None:
        self.folder = folder
        self.recording = recording
        self.manifests: dict[str, Manifest] = {}
        self._verified: set[str] = set()  # names of parts
        for writer in manifest.WRITERS:
            found = manifest.read_manifest(folder, writer)
            if found is not None:
                self.manifests[writer] = found
        if not self.manifests:
            raise RolloutDataError(f"{folder} has no manifest, so it is no recorded rollout.")

    @property
    def rollout_id(self) -> int:
        return next(iter(self.manifests.values())).rollout_id

    @property
    def run(self) -> int:
        """The number of the run record that holds the options."""
        return next(iter(self.manifests.values())).run

    @functools.cached_property
    def parts(self) -> dict[str, Part]:
        """Every listed part by name, in the order in which a rollout makes them."""
        found = {name: part for one in self.manifests.values() for name, part in one.parts.items()}
        return {name: found[name] for name in manifest.PARTS if name in found}

    @property
    def has_weights(self) -> bool:
        """Whether the state before the rollout was recorded, with --record-weights."""
        return (self.folder / manifest.WEIGHTS_FOLDER).is_dir()

    def problems(self, *, hashes: bool = True) -> list[str]:
        """One sentence per listed part that is not as it was written, and per manifest of another
        rollout or start of the run. Without `hashes` parts are not read.
        """
        found = [
            manifest.verify_part(self.folder, part, hashes=hashes) for part in self.parts.values()
        ]
        problems = [problem for problem in found if problem is not None]
        number = manifest.rollout_of(self.folder)
        for writer, one in self.manifests.items():
            if number is not None and (one.rollout_id, one.evaluation) != number:
                problems.append(
                    f"{manifest.manifest_path(self.folder, writer)} is of rollout {one.rollout_id}."
                )
            if one.run != self.run:
                problems.append(
                    f"{self.folder} mixes parts of start {self.run} of the run with parts of start "
                    f"{one.run}: the recording of one of them has failed."
                )
        return problems

    def __contains__(self, name: str) -> bool:
        return name in self.parts

    def path(self, name: str) -> Path:
        """The file of a part. `RolloutDataError` where it is not recorded, or is a link."""
        part = self.parts.get(name)
        if part is None:
            raise RolloutDataError(
                f"{self.folder} has no part {name!r}; it has {', '.join(self.parts) or 'none'}. "
                "The run ended before it was written, or the part does not exist in this run."
            )
        path = self.folder / part.file
        if path.is_symlink():
            raise RolloutDataError(f"{path} is a link; a recording holds files.")
        return path

    def options(self) -> argparse.Namespace:
        """The options of the run that made this rollout."""
        if self.recording is None:
            raise RolloutDataError(f"{self.folder} was opened without its recording.")
        return options_of(self.recording.run_record(self.run))

    # --- parts ------------------------------------------------------------------------------------

    def table(self, name: str) -> pyarrow.Table:
        """The table of a part. `RolloutDataError` where it is not as it was written."""
        path = self._unchanged(name)
        return tables.read_table(path, what=f"{name} part of a recording", is_verified=True)

    def json(self, name: str) -> dict[str, Any]:
        """The JSON object of a part. `RolloutDataError` where it is not as it was written."""
        return manifest.read_json(self._unchanged(name), limit=LARGEST_JSON)

    def _unchanged(self, name: str) -> Path:
        """The file of a part, held against its hash, once, before anything parses it."""
        path = self.path(name)
        if name not in self._verified:
            problem = manifest.verify_part(self.folder, self.parts[name])
            if problem is not None:
                raise RolloutDataError(problem)
            self._verified.add(name)
        return path

    def judged_samples(self) -> JudgedSamples:
        """The samples part."""
        table = self.table("samples")
        try:
            changes = [
                {} if text is None else decode_json(text.encode())
                for text in table["changes"].to_pylist()
            ]
            return JudgedSamples(
                samples_of(table),
                valid=table["valid"].to_pylist(),
                reasons=table["reason"].to_pylist(),
                details=table["detail"].to_pylist(),
                dropped=table["dropped"].to_pylist(),
                dropped_by=table["dropped_by"].to_pylist(),
                keep_masks=[
                    None if text is None else decode_json(text.encode())
                    for text in table["keep_mask"].to_pylist()
                ],
                changes=changes,
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise RolloutDataError(
                f"{self.path('samples')} is not a samples part: {error}"
            ) from error

    def columns(self) -> tuple[RolloutBatch, np.ndarray]:
        """(the whole batch as it was split, the row of the samples part that each row is of)."""
        table = self.table("columns")
        try:
            return batch_of(table), tables.numbers_of(table["raw_row"]).astype(np.int64)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise RolloutDataError(
                f"{self.path('columns')} is not a columns part: {error}"
            ) from error

    def schedule(self) -> dict[str, np.ndarray]:
        """The columns of the schedule part by name."""
        table = self.table("schedule")
        return {name: tables.numbers_of(table[name]) for name in table.column_names}

    def train(self) -> TrainDump:
        """What training computed."""
        return read_train_table(self._unchanged("train"))

    def metric_records(self, *names: str) -> list[dict[str, Any]]:
        """What was logged of the rollout: {"step_key", "step", "metrics"} each. `names`: the parts
        rollout (the manager's), steps (the policy's) and critic_steps; none: all that are recorded.
        """
        records: list[dict[str, Any]] = []
        for name in names or [one for one in METRIC_PARTS if one in self]:
            if name == "rollout":
                records += self.json(name).get("metrics", [])
            else:
                records += read_jsonl(self._unchanged(name))[0]
        return records


class Recording:
    """The folder of a recording."""

    def __init__(self, root: str | os.PathLike) -> None:
        self.root = Path(root)
        if not is_recording(self.root):
            number = manifest.rollout_of(self.root)
            if number is not None and is_recording(self.root.parent):
                raise RolloutDataError(
                    f"{self.root} is one {'evaluation' if number[1] else 'rollout'} of a recording. "
                    f"Name the recording, {self.root.parent}"
                    + ("." if number[1] else f", and --rollout {number[0]}.")
                )
            raise RolloutDataError(
                f"{self.root} is no recording: it has no run_0000.json. Record a run with --record "
                "FOLDER."
            )
        self._records: dict[int, Mapping[str, Any]] = {}

    @property
    def rollouts(self) -> list[int]:
        """The recorded rollouts, ascending."""
        return manifest.recorded_rollouts(self.root)

    @property
    def evaluations(self) -> list[int]:
        """The recorded evaluations, by the rollout before which they were made."""
        return manifest.recorded_rollouts(self.root, evaluation=True)

    def rollout(self, rollout_id: int, *, evaluation: bool = False) -> RecordedRollout:
        """One rollout. `RolloutDataError` listing what there is where it is not recorded."""
        folder = manifest.rollout_folder(self.root, rollout_id, evaluation=evaluation)
        if not folder.is_dir() or folder.is_symlink():
            known = self.evaluations if evaluation else self.rollouts
            listed = ", ".join(map(str, known[:20])) + (", ..." if len(known) > 20 else "")
            raise RolloutDataError(
                f"{self.root} has no rollout {rollout_id}; it has {listed or 'none'}."
            )
        return RecordedRollout(folder, self)

    @property
    def runs(self) -> list[int]:
        """The numbers of the starts of the run, ascending."""
        return manifest.run_numbers(self.root)

    def superseded(self) -> dict[tuple[int, bool], str]:
        """By (rollout, whether it is an evaluation) why it is no part of the run any more: a later
        start went back to a rollout before it, and has not come as far.
        """
        starts: dict[tuple[int, bool], int] = {}
        for evaluation, numbers in ((False, self.rollouts), (True, self.evaluations)):
            for number in numbers:
                with contextlib.suppress(RolloutDataError):  # damaged: named by who reads it
                    starts[number, evaluation] = self.rollout(number, evaluation=evaluation).run
        found: dict[tuple[int, bool], str] = {}
        newest, since = -1, 0
        # an evaluation is made before the rollout of its number
        for number, evaluation in sorted(starts, key=lambda one: (one[0], not one[1])):
            start = starts[number, evaluation]
            if start < newest:
                found[number, evaluation] = (
                    f"of start {start} of the run: start {newest} went back to rollout {since} and "
                    "has not come as far"
                )
            elif start > newest and not evaluation:
                newest, since = start, number
        return found

    def run_record(self, number: int) -> Mapping[str, Any]:
        """Options, versions and code of a start of the run."""
        if number not in self._records:
            path = manifest.run_path(self.root, number)
            self._records[number] = read_run_record(path)
        return self._records[number]

    def recorded_yaml(self, number: int) -> dict[str, Any]:
        """What a start's --config file would hold. `RolloutDataError` where it cannot be read."""
        path, record = manifest.run_path(self.root, number), self.run_record(number)
        try:
            content = yaml.safe_load(record["options_yaml"])
        except (KeyError, AttributeError, yaml.YAMLError) as error:
            raise RolloutDataError(f"{path} is damaged: its options_yaml: {error}") from error
        if not isinstance(content, dict):
            raise RolloutDataError(f"{path} is damaged: its options_yaml holds no mapping.")
        return content

    @property
    def tokenizer_folder(self) -> Path | None:
        """The recorded tokenizer; None where the run had none."""
        folder = self.root / manifest.TOKENIZER_FOLDER
        return folder if folder.is_dir() else None


def read_run_record(path: Path) -> Mapping[str, Any]:
    """The run record in a file. `RolloutDataError` that names the file where it is none, or lacks
    what every run record has.
    """
    record = manifest.read_json(path, limit=LARGEST_RUN_RECORD)
    if record.get("format") != manifest.FORMAT:
        raise RolloutDataError(
            f"{path} is of the format {record.get('format')!r}; this version reads "
            f"{manifest.FORMAT!r}."
        )
    for name in ("options", "versions"):
        if not isinstance(record.get(name), dict):
            raise RolloutDataError(
                f"{path} is damaged: its {name} are of the type "
                f"{type(record.get(name)).__name__}, and no JSON object."
            )
    return record


def is_recording(path: str | os.PathLike) -> bool:
    """Whether the folder holds a recording."""
    return bool(manifest.run_numbers(Path(path)))


def recorded_samples(path: str | os.PathLike, rollout_id: int) -> list[Sample]:
    """What the gate was given in a rollout of the recording at `path`, for a run that trains on it
    again.
    """
    return Recording(path).rollout(rollout_id).judged_samples().batch
