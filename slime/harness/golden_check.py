"""Replays a golden run and compares every number: what the code makes of the recorded inputs today,
and what was recorded.

Each stage starts from its recorded input, so a stage that differs is where the cause lies.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from slime.exceptions import ConfigError, RolloutDataError
from slime.harness.diff.results import Difference, FieldResult, Report, RolloutResult
from slime.harness.diff.stages import DiffStage, Text
from slime.harness.diff.values import Tolerance
from slime.harness.replay.command import Replayed, compared, replay
from slime.harness.replay.stages import STAGES
from slime.harness.replay.training import TRAIN_STAGE
from slime.recording import manifest
from slime.recording.reader import RecordedRollout, Recording

FORMAT = "slime-golden-1"
NOTES = "golden.json"
# what another processor or another version of a library may differ by
ELSEWHERE = Tolerance(1e-4, 1e-5)
# in which a rollout computes: the metrics' stage reads what training made
ORDER = ("gate", "rewards", "columns", "schedule", TRAIN_STAGE, "metrics")
# where the cause lies when a stage cannot be run at all
STAGE_OF_FAILURE = {
    "gate": DiffStage.VERDICT,
    "rewards": DiffStage.BASELINE,
    "columns": DiffStage.COLUMN,
    "schedule": DiffStage.SCHEDULE,
    "metrics": DiffStage.METRIC,
    TRAIN_STAGE: DiffStage.ARRIVAL,
}


@dataclasses.dataclass(frozen=True)
class Notes:
    """`golden.json`. `parts`: by rollout and stage what a replay makes, None where it is not known;
    `left_out`: stages that cannot be compared, with the reason; `machine`: where it was recorded.
    """

    parts: Mapping[int, Mapping[str, Sequence[str]]] | None = None
    left_out: Mapping[str, str] = dataclasses.field(default_factory=dict)
    machine: Mapping[str, str] | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "parts": {
                str(rollout_id): {stage: list(names) for stage, names in stages.items()}
                for rollout_id, stages in (self.parts or {}).items()
            },
            "left_out": dict(self.left_out),
            "machine": dict(self.machine or {}),
        }


def read_notes(root: Path) -> Notes:
    """What `slime golden new` noted; nothing for a plain recording. `RolloutDataError` for another
    format.
    """
    path = root / NOTES
    if not path.is_file():
        return Notes()
    content = manifest.read_json(path)
    if content.get("format") != FORMAT:
        raise RolloutDataError(
            f"{path} is of the format {content.get('format')!r}; this version reads {FORMAT!r}. "
            "Make the golden run again with slime golden new."
        )
    try:
        parts = {int(number): stages for number, stages in content["parts"].items()}
        return Notes(parts, dict(content["left_out"]), dict(content["machine"]))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RolloutDataError(f"{path} is damaged: {type(error).__name__}: {error}") from error


def this_machine() -> dict[str, str]:
    """What decides the last bits of a float: processor and libraries."""
    processor = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next(line.split(":")[1].strip() for line in lines if "model name" in line)
    except (OSError, StopIteration, IndexError):
        pass
    found = {"processor": processor}
    for package in ("torch", "numpy", "megatron-core"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


@dataclasses.dataclass
class Check:
    """One stage of one rollout. `result`: how what was made again compares; `skipped`: why it was
    not made, `lacks` why a part of it was not.
    """

    rollout_id: int
    stage: str
    seconds: float
    result: RolloutResult
    parts: tuple[str, ...] = ()
    skipped: str | None = None
    made: Replayed | None = None

    @property
    def lacks(self) -> str | None:
        return None if self.made is None or self.skipped is not None else self.made.lacks


def check_rollouts(
    recording: Recording,
    *,
    rollouts: Sequence[int],
    stages: Sequence[str],
    words: Sequence[str],
    folder: Path,
    tolerance: Tolerance | None,
    timeout_s: float,
    rescore: bool = False,
) -> Iterator[Check]:
    """Runs the stages again, below `folder`, and compares each. `words` are options of `slime
    train`; `tolerance` None: exact where this machine is the one that recorded; `rescore`: call
    reward functions of the user too. `ConfigError` for words that are no options,
    `RolloutDataError` where the recording is not as it was written: no difference of the code.
    """
    own = argparse.Namespace(rescore=rescore, timeout=timeout_s)
    notes = read_notes(recording.root)
    rollouts = list(dict.fromkeys(rollouts))
    _refuse_damage([recording.rollout(rollout_id) for rollout_id in rollouts])
    if tolerance is None and notes.machine and dict(notes.machine) != this_machine():
        tolerance = ELSEWHERE
    for stage in stages:
        for rollout_id in rollouts:
            if stage in notes.left_out:
                yield _empty(rollout_id, stage, notes.left_out[stage])
                continue
            expected = None if notes.parts is None else notes.parts.get(rollout_id, {}).get(stage)
            yield _check(
                recording.rollout(rollout_id),
                stage,
                words,
                folder=folder,
                tolerance=tolerance,
                expected=expected,
                own=own,
            )


def _refuse_damage(rollouts: Sequence[RecordedRollout]) -> None:
    problems = []
    for one in rollouts:
        problems += one.problems()
        one.options()  # raises where the run record holds none
    if problems:
        raise RolloutDataError("\n".join(problems))


def _empty(rollout_id: int, stage: str, reason: str) -> Check:
    result = RolloutResult(f"rollout {rollout_id} {stage}")
    return Check(rollout_id, stage, 0.0, result, skipped=reason)


def _check(
    rollout: RecordedRollout,
    stage: str,
    words: Sequence[str],
    *,
    folder: Path,
    tolerance: Tolerance | None,
    expected: Sequence[str] | None,
    own: argparse.Namespace,
) -> Check:
    """One stage of one rollout. What the code under test raises is a difference, not an error."""
    started = time.monotonic()
    own = argparse.Namespace(rollout=[rollout.rollout_id], stage=[stage], **vars(own))
    assert rollout.recording is not None
    name = f"rollout {rollout.rollout_id} {stage}"
    result = RolloutResult(name)
    made: Replayed | None = None
    reason: str | None = None
    try:
        (made,) = replay(rollout.recording, own, words, folder)
        reason = made.failed or made.lacks
    except Exception as error:  # noqa: BLE001 - the stage is what is tested, and may raise anything
        if words and isinstance(error, ConfigError):
            raise  # of the options that were given
        reason = f"{type(error).__name__}: {error}"
        result.fields.append(_failure(stage, reason))
        result.context = str(error).splitlines()[-20:]
    parts = () if made is None else made.parts
    if made is not None and made.parts:
        result = compared(made, tolerance).rollouts[0]
        result.name = name
        if tolerance is not None:
            allow_digests(result)
    if made is not None and made.failed:
        result.fields.append(_failure(stage, made.failed))
        result.context = made.failed.splitlines()[-20:]
    missing = [name for name in expected or () if name not in parts]
    if made is not None and missing and not made.failed:
        words_of = f"the stage makes no {' and no '.join(missing)}: {reason or 'no reason given'}"
        result.fields.append(_failure(stage, words_of))
    seconds = time.monotonic() - started
    skipped = reason if not parts and not result.fields else None
    return Check(rollout.rollout_id, stage, seconds, result, parts, skipped, made)


def allow_digests(result: RolloutResult) -> None:
    """Digests of weights whose last bits may differ say nothing."""
    for one in result.fields:
        if one.stage is DiffStage.WEIGHTS:
            one.expected = "floats have a tolerance, and a digest has none"


def _failure(stage: str, reason: str) -> FieldResult:
    place = STAGE_OF_FAILURE[stage]
    first = Difference(place, stage, "outcome", (), Text("made"), Text(reason))
    return FieldResult(place, stage, "outcome", 1, first=first, new=1)


def report_of(recording: Recording, checks: Sequence[Check]) -> Report:
    """All checks as one report; A is what was recorded, B what the code makes now. The first cause
    is that of the earliest stage of the replay, since each starts from what was recorded.
    """
    report = Report(str(recording.root), "this code")
    for one in checks:
        report.rollouts += _in_order(one)
    about: dict[str, list[int]] = {}  # by sentence, the rollouts that it is about
    for one in checks:
        if one.skipped is not None:
            about.setdefault(f"{one.stage} is not compared: {one.skipped}", []).append(
                one.rollout_id
            )
    for one in checks:
        if one.lacks:
            about.setdefault(f"{one.stage}: {one.lacks}", []).append(one.rollout_id)
    for sentence, rollouts in about.items():
        more = f" (and {len(rollouts) - 1} more)" if len(rollouts) > 1 else ""
        report.notes.append(f"rollout {rollouts[0]}{more} {sentence}")
    return report


def _in_order(check: Check) -> list[RolloutResult]:
    """The result with its place among the stages. A sample is judged before it is scored, so a
    verdict that differs in the stage of the rewards is a result of its own, before the rest.
    """
    result, place = check.result, ORDER.index(check.stage)
    result.order = place, 1
    if check.stage != "rewards":
        return [result]
    verdicts = [one for one in result.fields if one.stage is DiffStage.VERDICT]
    rest = [one for one in result.fields if one.stage is not DiffStage.VERDICT]
    if not any(one.counts for one in verdicts):
        return [result]
    judged = dataclasses.replace(
        result,
        name=f"{result.name} (verdicts)",
        order=(place, 0),
        fields=verdicts,
        only_a=[],
        only_b=[],
        notes=[],
    )
    return [judged, dataclasses.replace(result, fields=rest, context=[])]


def default_stages(words: Sequence[str] | None) -> list[str]:
    """The stages to run: all that need no training, or those named ("all": with training)."""
    if not words:
        return list(STAGES)
    return [*STAGES, TRAIN_STAGE] if "all" in words else list(dict.fromkeys(words))
