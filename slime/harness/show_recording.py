"""`slime show RECORDING`: its rollouts with their parts, sizes, completeness and damage; a rollout's
samples with their verdicts; one sample token by token.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slime.data.sample import Sample
from slime.exceptions import RolloutDataError
from slime.harness.consistency_report import printable
from slime.harness.diff.runs import compare_runs
from slime.harness.diff.stages import short
from slime.recording import manifest
from slime.recording.reader import JudgedSamples, RecordedRollout, Recording, is_recording

HEAD = ["rollout", "start", "samples", "trained", "MiB", "parts", "state"]


def recorded_at(path: Path) -> Recording | RecordedRollout | None:
    """The recording in the folder `path`, or the recorded rollout; None where it is neither."""
    if is_recording(path):
        return Recording(path)
    number = manifest.rollout_of(path)
    if number is None or not is_recording(path.parent):
        return None
    rollout_id, evaluation = number
    return Recording(path.parent).rollout(rollout_id, evaluation=evaluation)


def overview(recording: Recording, *, verify: bool) -> tuple[list[list[str]], list[str]]:
    """(head and a row per rollout and evaluation, one sentence per damage). Sizes are always
    compared with the manifests; `verify` reads every part and compares its hash.
    """
    rows, damages = [HEAD], []
    superseded = recording.superseded()
    for evaluation, numbers in ((False, recording.rollouts), (True, recording.evaluations)):
        for number in numbers:
            folder = manifest.rollout_folder(recording.root, number, evaluation=evaluation)
            try:
                rollout = recording.rollout(number, evaluation=evaluation)
                found = rollout.problems(hashes=verify)
                gone = superseded.get((number, evaluation), "")
                rows.append(_row(rollout, damaged=bool(found), gone=gone))
            except RolloutDataError as error:
                found = [str(error)]
                rows.append([folder.name, *["-"] * (len(HEAD) - 2), "damaged"])
            damages += found
    return rows, damages


def starts(recording: Recording) -> list[str]:
    """What each start of the run after the first changed, by option, version and code; [] for one
    start.
    """
    lines = []
    for before, number in itertools.pairwise(recording.runs):
        changes = compare_runs(recording.run_record(before), recording.run_record(number))
        lines.append(f"start {number} of the run; changed since start {before}:")
        lines += [
            printable(f"  {one.name}: {short(one.a)} -> {short(one.b)}") for one in changes
        ] or ["  nothing that decides a number"]
    return lines


def _row(rollout: RecordedRollout, *, damaged: bool, gone: str) -> list[str]:
    samples, trained = rollout.parts.get("samples"), rollout.manifests.get(manifest.TRAIN)
    shares = None if trained is None else trained.facts.get("shares")
    size = sum(part.num_bytes for part in rollout.parts.values()) / 2**20
    states = [
        writer if one.facts.get("complete") else f"{writer} in part"
        for writer, one in rollout.manifests.items()
    ]
    return [
        rollout.folder.name,
        str(rollout.run),
        "-" if samples is None else str(samples.num_rows),
        str(sum(shares.values())) if isinstance(shares, dict) else "-",
        f"{size:.2f}",
        ", ".join(rollout.parts),
        "damaged"
        if damaged
        else gone
        if gone
        else "complete: " + ", ".join(states)
        if all(one.facts.get("complete") for one in rollout.manifests.values())
        else ", ".join(states),
    ]


def shown_samples(judged: JudgedSamples) -> list[Sample]:
    """The samples as the gate left them, those that the rollout dropped before it among them."""
    return [
        judged.judged(row) if row < judged.num_batch else sample
        for row, sample in enumerate(judged.samples)
    ]


def trained_of(rollout: RecordedRollout) -> Callable[[int], dict[str, Any] | None]:
    """What training computed of a row of the samples part; None of a row that did not train."""
    if "train" not in rollout or "columns" not in rollout:
        return lambda row: None
    train, (_, raw_rows) = rollout.train(), rollout.columns()
    place_of = {int(raw_rows[position]): i for i, position in enumerate(train.positions.tolist())}

    def fields(row: int) -> dict[str, Any] | None:
        return train.sample(place_of[row]) if row in place_of else None

    return fields


def verdict_of(judged: JudgedSamples, row: int) -> list[str]:
    """What the gate, or the rollout before it, said of a row, one fact per line."""
    if judged.dropped_by[row] is not None:
        return [f"dropped   before the gate: {printable(str(judged.dropped_by[row]))}"]
    detail = judged.details[row]
    lines = [] if not detail else [f"gate      {printable(detail)}"]
    return lines + (["dropped   by the gate"] if judged.dropped[row] else [])
