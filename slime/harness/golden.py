"""`slime golden`: small recordings that are replayed in every continuous integration.

    slime golden new RECORDING --out DIR            cuts one from a recording
    slime golden check DIR                          replays it: every stage that needs no training
    slime golden check DIR --stage all              trains it again, too
    slime golden update DIR                         records what the code makes now, after asking

`check` takes options of `slime train` as well, such as --context-parallel-size 2. Exit status 0: all
equal, 1: something differs (the first cause is named), 2: it cannot be read.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from slime.exceptions import ConfigError
from slime.harness.bounds import timeout_of, tolerance_of
from slime.harness.diff.results import Report
from slime.harness.diff.text import as_json, describe
from slime.harness.golden_check import Check, check_rollouts, default_stages, report_of
from slime.harness.golden_cut import Cut, cut, renewed
from slime.harness.json_text import json_text
from slime.harness.replay.stages import STAGES
from slime.harness.replay.training import TIMEOUT_S, TRAIN_STAGE
from slime.recording.reader import Recording

INTERVAL_S = 2.0  # between two lines that tell what is done


class Progress:
    """Prints what a long command does, at most a line in `INTERVAL_S`, the first after that."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._next = stream, time.monotonic() + INTERVAL_S

    def __call__(self, text: str) -> None:
        if time.monotonic() >= self._next:
            print(f"slime golden: {text}", file=self._stream, flush=True)
            self._next = time.monotonic() + INTERVAL_S


def parser_of_golden() -> argparse.ArgumentParser:
    """The command line of `slime golden`."""
    parser = argparse.ArgumentParser(
        prog="slime golden",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    new = commands.add_parser("new", help="Cut a golden run from a recording.", allow_abbrev=False)
    new.add_argument("recording", type=Path, help="Folder that --record wrote.")
    new.add_argument("--out", type=Path, required=True, help="New folder of the golden run.")
    new.add_argument("--rollouts", help="Rollouts to keep, as 3,7; default: all.")
    new.add_argument("--samples", type=int, help="At most so many samples of each, whole groups.")
    new.add_argument(
        "--strip-texts",
        action="store_true",
        help="Replace prompts, responses, labels and texts of metadata; token ids stay.",
    )
    check = commands.add_parser("check", help="Replay and compare.", allow_abbrev=False)
    check.add_argument("folder", type=Path, help="Golden run, or any recording.")
    check.add_argument("--stage", choices=(*STAGES, TRAIN_STAGE, "all"), action="append")
    check.add_argument("--rollout", type=int, action="append", help="Only this one; repeatable.")
    check.add_argument("--rtol", type=float, help="Relative tolerance of floats.")
    check.add_argument("--atol", type=float, help="Absolute tolerance of floats.")
    check.add_argument("--timeout", type=float, default=TIMEOUT_S, help="Seconds of a training.")
    check.add_argument("--rescore", action="store_true", help="Call custom reward functions too.")
    check.add_argument("--json", action="store_true", help="Print one JSON object.")
    update = commands.add_parser("update", help="Record the outputs anew.", allow_abbrev=False)
    update.add_argument("folder", type=Path, help="Golden run.")
    update.add_argument("--yes", action="store_true", help="Do not ask.")
    update.add_argument("--timeout", type=float, default=TIMEOUT_S, help="Seconds of a training.")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """`slime golden`."""
    parser = parser_of_golden()
    own, words = parser.parse_known_args(sys.argv[1:] if argv is None else list(argv))
    if words and own.command != "check":
        raise ConfigError(f"slime golden {own.command} does not know {words[0]}.")
    return {"new": _new, "check": _check, "update": _update}[own.command](own, words)


def _new(own: argparse.Namespace, words: Sequence[str]) -> int:
    choice = Cut(rollouts=_numbers(own.rollouts), samples=own.samples, strip_texts=own.strip_texts)
    golden = cut(own.recording, own.out, choice, say=Progress(sys.stderr))
    size = sum(path.stat().st_size for path in own.out.rglob("*") if path.is_file())
    rollouts = ", ".join(map(str, golden.rollouts))
    print(f"{own.out}: rollouts {rollouts}, {size / 2**20:.2f} MiB")
    return _report(golden, _checked(golden, list(STAGES), own, ()), as_text=True)


def _numbers(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        return sorted({int(word) for word in text.split(",")})
    except ValueError:
        raise ConfigError(f"--rollouts {text} is no list of numbers, as 3,7.") from None


def _check(own: argparse.Namespace, words: Sequence[str]) -> int:
    recording = Recording(own.folder)
    checks = _checked(recording, default_stages(own.stage), own, words, quiet=own.json)
    return _report(recording, checks, as_text=not own.json)


def _checked(
    recording: Recording,
    stages: Sequence[str],
    own: argparse.Namespace,
    words: Sequence[str],
    *,
    quiet: bool = False,
) -> list[Check]:
    """Runs the stages and prints a line for each as it ends."""
    tolerance = tolerance_of(own)
    checks = []
    with tempfile.TemporaryDirectory(prefix="slime-golden-", ignore_cleanup_errors=True) as folder:
        for one in check_rollouts(
            recording,
            rollouts=getattr(own, "rollout", None) or recording.rollouts,
            stages=stages,
            words=words,
            folder=Path(folder),
            tolerance=tolerance,
            timeout_s=timeout_of(own) if "timeout" in own else TIMEOUT_S,
            rescore=getattr(own, "rescore", False),
        ):
            checks.append(one)
            if not quiet:
                print(_line(one), flush=True)
    return checks


def _line(one: Check) -> str:
    head = f"rollout {one.rollout_id} {one.stage}"
    if one.skipped is not None:
        return f"{head}: not compared: {one.skipped}"
    if one.result.identical:
        fields = {(field.part, field.field) for field in one.result.fields}
        return f"{head}: equal, {len(fields)} fields ({one.seconds:.1f} s)"
    names = list(dict.fromkeys(field.field for field in one.result.differing))
    return f"{head}: DIFFERENT in {', '.join(names[:8])} ({one.seconds:.1f} s)"


def _report(recording: Recording, checks: Sequence[Check], *, as_text: bool) -> int:
    report = report_of(recording, checks)
    if as_text:
        print(*_lines(report), sep="\n")
    else:
        print(json_text(as_json(report)))
    return 0 if report.identical else 1


def _lines(report: Report) -> list[str]:
    lines = describe(report)
    stage = report.first_stage
    return lines if stage is None else [f"first cause: {stage.label}", *lines]


def _update(own: argparse.Namespace, words: Sequence[str]) -> int:
    recording = Recording(own.folder)
    with renewed(recording, timeout_s=timeout_of(own)) as (stages, replace):
        status = _report(recording, _checked(recording, stages, own, words), as_text=True)
        if status == 0:
            print(f"{own.folder} is up to date.")
            return 0
        if not own.yes and not _is_agreed(own.folder):
            print("nothing is changed")
            return 1
        replace()
    print(f"{own.folder} is updated; look at the difference before it is committed.")
    return 0


def _is_agreed(folder: Path) -> bool:
    try:
        return input(f"Replace the outputs in {folder} by these? [y/N] ").strip().lower() == "y"
    except (EOFError, OSError):
        raise ConfigError("There is nobody to ask; give --yes to update the outputs.") from None
