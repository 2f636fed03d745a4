"""`slime replay DIR`: runs the stages of a recorded rollout again and compares with the recording.

    slime replay DIR                              every stage but train, of every rollout
    slime replay DIR --rollout 7 --stage gate     one stage of one rollout
    slime replay DIR --rollout 7 --stage train    trains rollout 7 again and compares every number
    slime replay DIR --rollout 7 --stage train --advantage-estimator rloo --context-parallel-size 2

Further options are those of `slime train` and replace the recorded ones. Exit status 0: all equal,
1: something differs, 2: nothing differs, but a stage could not be replayed. A stage that a rollout
lacks (nobody trained it, say) counts where --stage names it, or where nothing else was replayed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from slime.exceptions import ConfigError, RolloutDataError, SlimeError
from slime.harness.bounds import timeout_of, tolerance_of
from slime.harness.diff.context import context_of
from slime.harness.diff.results import Report, RolloutResult
from slime.harness.diff.rollouts import Settings, compare_sides
from slime.harness.diff.sides import Side
from slime.harness.diff.text import describe
from slime.harness.diff.values import Tolerance
from slime.harness.output_paths import require_free
from slime.harness.replay.options import given_options, replayed_options, tokenizer_folder
from slime.harness.replay.stages import RUN, STAGES, Skipped, StageInput
from slime.harness.replay.training import TIMEOUT_S, TRAIN_STAGE, replay_training
from slime.recording import manifest
from slime.recording.manifest import TRAINED_PARTS
from slime.recording.reader import RecordedRollout, Recording
from slime.recording.writer import PartWriter

EQUAL, DIFFERS, NOT_REPLAYED = 0, 1, 2
# metrics of the age of weights, which only a run that publishes weights to engines knows
OF_PUBLISHING = ("rollout/staleness/", "rollout/logprob_abs_diff/weights/")


@dataclasses.dataclass(frozen=True)
class Replayed:
    """One stage of one rollout: `parts` were made again below `folder`. `lacks`: why others, or all,
    are not there to make again; `failed`: why the stage could not be run.
    """

    rollout: RecordedRollout
    stage: str
    folder: Path
    parts: tuple[str, ...] = ()
    lacks: str | None = None
    failed: str | None = None


def main(argv: Sequence[str] | None = None) -> int:
    """`slime replay`."""
    parser = argparse.ArgumentParser(
        prog="slime replay",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("recording", type=Path, help="Folder that --record wrote.")
    parser.add_argument("--rollout", type=int, action="append", help="Only this one; repeatable.")
    parser.add_argument("--stage", choices=(*STAGES, TRAIN_STAGE), action="append")
    parser.add_argument("--rescore", action="store_true", help="Call custom reward functions too.")
    parser.add_argument("--out", type=Path, help="Keep what was made again in this new folder.")
    parser.add_argument("--rtol", type=float, default=None, help="Relative tolerance of floats.")
    parser.add_argument("--atol", type=float, default=None, help="Absolute tolerance of floats.")
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, help="Seconds of a training.")
    own, words = parser.parse_known_args(sys.argv[1:] if argv is None else list(argv))
    tolerance, own.timeout = tolerance_of(own), timeout_of(own)
    recording = Recording(own.recording)
    with output_folder(own.out) as folder:
        found = [report(done, tolerance) for done in replay(recording, own, words, folder)]
    return exit_status(found, named=bool(own.stage))


def exit_status(found: Sequence[int | None], *, named: bool) -> int:
    """The status of a replay, from those of its stages, where None is of a stage that the rollout
    lacks. `named`: whether --stage asked for the stages. A difference is certain whatever else
    could not be replayed.
    """
    if DIFFERS in found:
        return DIFFERS
    lacks = None in found and (named or EQUAL not in found)
    return NOT_REPLAYED if lacks or NOT_REPLAYED in found else EQUAL


@contextlib.contextmanager
def output_folder(out: Path | None) -> Iterator[Path]:
    """`out`, made now, or a temporary folder. ConfigError where it exists, or lies in a recording."""
    if out is None:
        folder = Path(tempfile.mkdtemp(prefix="slime-replay-"))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return
    require_free("--out", out)
    if out.exists():
        raise ConfigError(f"--out {out} exists. Give a new folder.")
    out.mkdir(parents=True)
    yield out


def replay(
    recording: Recording, own: argparse.Namespace, words: Sequence[str], folder: Path
) -> Iterator[Replayed]:
    """Runs what was asked for, one stage of one rollout after the other."""
    rollouts = list(dict.fromkeys(own.rollout or recording.rollouts))
    if not rollouts:
        raise RolloutDataError(f"{recording.root} has no rollout.")
    stages = list(dict.fromkeys(own.stage or STAGES))
    given_options(words)  # what is wrong in them is wrong for every rollout
    for rollout_id in rollouts:
        rollout = recording.rollout(rollout_id)
        options = functools.cache(functools.partial(replayed_options, rollout, words))
        for stage in stages:
            if stage == TRAIN_STAGE:
                place = folder / stage / f"rollout_{rollout_id:06d}"
                place.mkdir(parents=True)
                yield replay_train_stage(
                    recording, rollout, words, folder=place, timeout_s=own.timeout
                )
            else:
                # each stage reads its own samples and options: a user's function may write to them
                given = input_of(recording, rollout, options(), rescore=own.rescore)
                yield replay_stage(given, stage, folder / stage)


@dataclasses.dataclass
class Reasons:
    """Why parts of a stage were not made again."""

    lacks: list[str] = dataclasses.field(default_factory=list)
    failed: list[str] = dataclasses.field(default_factory=list)

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Keeps what is raised inside: the code under test may raise anything."""
        try:
            yield
        except Skipped as reason:
            self.lacks.append(str(reason))
        except Exception as error:  # noqa: BLE001 - printed, and the exit status is of it
            self.failed.append(_words_of(error))

    def as_fields(self) -> dict[str, str | None]:
        return {name: "; ".join(getattr(self, name)) or None for name in ("lacks", "failed")}


def _words_of(error: Exception) -> str:
    if isinstance(error, SlimeError):
        return str(error)
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({last.filename}, line {last.lineno})"


def replay_train_stage(
    recording: Recording,
    rollout: RecordedRollout,
    words: Sequence[str],
    *,
    folder: Path,
    timeout_s: float,
) -> Replayed:
    """Trains the rollout again. Every part that its training recorded must be made again."""
    reasons = Reasons()
    made: RecordedRollout | None = None
    parts: list[str] = []
    with reasons.kept():
        if not any(name in rollout for name in TRAINED_PARTS):
            raise Skipped("the recording holds no training of it")
        again = replay_training(recording, rollout, words, folder=folder, timeout_s=timeout_s)
        made = again.rollout(rollout.rollout_id)
        parts = [name for name in ("columns", "schedule", *TRAINED_PARTS) if name in rollout]
        if missing := [name for name in parts if name not in made]:
            parts = [name for name in parts if name in made]
            raise SlimeError(f"the training made no {' and no '.join(missing)}")
    place = folder if made is None else made.folder
    return Replayed(rollout, TRAIN_STAGE, place, tuple(parts), **reasons.as_fields())


def input_of(
    recording: Recording, rollout: RecordedRollout, args: argparse.Namespace, *, rescore: bool
) -> StageInput:
    """The recorded rollout for one stage, under these options."""
    tokenizer = tokenizer_folder(recording, vars(args))
    own = argparse.Namespace(**vars(args))
    if tokenizer is not None and not os.path.isdir(args.hf_checkpoint or ""):
        own.hf_checkpoint = str(tokenizer)
    return StageInput(rollout, own, tokenizer_folder=tokenizer, rescore=rescore)


def replay_stage(stage: StageInput, name: str, folder: Path) -> Replayed:
    """Runs one stage in this process and writes its parts below `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    writers = {
        name: PartWriter(folder, name, run=stage.rollout.run)
        for name in (manifest.ROLLOUT, manifest.TRAIN)
    }
    target = manifest.rollout_folder(folder, stage.rollout.rollout_id)
    reasons = Reasons()
    for one in writers.values():
        one.begin(stage.rollout.rollout_id)
    for writer, run in RUN[name]:
        with reasons.kept():
            run(stage, writers[writer])
    for one in writers.values():
        one.close()
        if one.failed:
            reasons.failed.append(f"what was made again could not be written below {folder}")
    parts = tuple(RecordedRollout(target).parts) if any(target.glob("*.json")) else ()
    return Replayed(stage.rollout, name, target, parts, **reasons.as_fields())


def compared(done: Replayed, tolerance: Tolerance | None = None) -> Report:
    """The recorded parts (A) with those that were made again (B)."""
    made = RecordedRollout(done.folder)
    layouts = layout_of(done.rollout), layout_of(made)
    # a stage of this process has no layout of its own
    layouts_differ = None not in layouts and layouts[0] != layouts[1]
    report = Report(str(done.rollout.folder), f"replay of {done.stage}")
    tokenizer = done.rollout.recording.tokenizer_folder if done.rollout.recording else None
    files = {name: done.rollout.path(name) for name in done.parts}
    again = {name: made.path(name) for name in done.parts}
    for side in (files, again):  # both show the text of a sample, whatever the stage
        side.setdefault("samples", done.rollout.path("samples"))
    result = RolloutResult(f"rollout {done.rollout.rollout_id}")
    sides = [Side(report.a, files, tokenizer=tokenizer), Side(report.b, again, tokenizer=tokenizer)]
    compare_sides(sides[0], sides[1], Settings(tolerance, layouts_differ), result)
    for field in result.fields:
        if field.field.startswith(OF_PUBLISHING) and not done.rollout.has_weights:
            field.expected = (
                "a training from another checkpoint does not know which weights sampled"
            )
    if result.first is not None:
        result.context = context_of(sides[0], sides[1], result.first)
    report.rollouts.append(result)
    return report


def layout_of(rollout: RecordedRollout) -> Any:
    """How the trainers of a rollout were laid out; None where that is not recorded."""
    return rollout.json("rollout").get("parallel") if "rollout" in rollout else None


def report(done: Replayed, tolerance: Tolerance | None) -> int | None:
    """Prints what came out and returns the stage's exit status; None where the rollout lacks it."""
    head = f"rollout {done.rollout.rollout_id} {done.stage}:"
    found = None
    failed = done.failed
    if done.parts:
        try:
            found = compared(done, tolerance)
        except RolloutDataError as error:  # a recorded part that is damaged
            failed = failed or str(error)
    if found is not None:
        first, *rest = describe(found)
        rest += [f"note: {done.lacks}"] if done.lacks else []
        print(f"{head} {first}", *rest, sep="\n  ")
    if failed is not None:
        print(f"{head} could not be replayed: {failed}")
    if found is not None and not found.identical:
        return DIFFERS
    if failed is not None:
        return NOT_REPLAYED
    if found is None:
        print(f"{head} there is nothing to replay: {done.lacks}")
        return None
    return EQUAL
