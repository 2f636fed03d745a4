"""What A and B are, and which rollouts or files of them are compared with each other."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

from slime.exceptions import ConfigError, RolloutDataError
from slime.files.rollout_dump import FORMAT as ROLLOUT_FORMAT
from slime.harness.diff.context import context_of
from slime.harness.diff.results import Report, RolloutResult
from slime.harness.diff.rollouts import Settings, compare_sides
from slime.harness.diff.runs import (
    RESUME_OPTIONS,
    RESUMED,
    compare_options,
    compare_runs,
    layout_differs,
    read_config,
)
from slime.harness.diff.sides import CONFIG, RUN, Side, part_of_file, side_of_file
from slime.harness.diff.values import Tolerance
from slime.recording import manifest
from slime.recording.reader import RecordedRollout, Recording, is_recording, read_run_record


@dataclasses.dataclass(frozen=True)
class Choice:
    """What of A and B is compared, and how. `first`, `last`: rollouts of recordings, inclusive;
    None: no bound.
    """

    first: int | None = None
    last: int | None = None
    tolerance: Tolerance | None = None
    allowed: Sequence[str] = ()

    def has(self, rollout_id: int) -> bool:
        """Whether a rollout is chosen."""
        return (self.first is None or rollout_id >= self.first) and (
            self.last is None or rollout_id <= self.last
        )


def compare_paths(a: Path, b: Path, choice: Choice = Choice()) -> Report:
    """Compares two recordings, two of their rollouts, two files, or two folders of dumps.
    `RolloutDataError` for what cannot be read, or not be compared.
    """
    for path in (a, b):
        if not path.exists():
            raise RolloutDataError(f"There is no dump at {path}.")
    report = Report(str(a), str(b))
    kinds = _kind_of(a), _kind_of(b)
    if kinds[0] != kinds[1]:
        raise RolloutDataError(
            f"{a} and {b}: one is a {kinds[0]}, the other a {kinds[1]}. Give two recordings, two "
            "rollouts of recordings, two files, or two folders of dumps."
        )
    if choice.tolerance is not None:
        report.tolerance = f"rtol {choice.tolerance.rtol:g}, atol {choice.tolerance.atol:g}"
    compare = {
        "recording": _compare_recordings,
        "rollout of a recording": _compare_folders_of_rollouts,
        "file": _compare_files,
        "folder": _compare_dumps,
    }[kinds[0]]
    try:
        compare(report, a, b, choice)
    except OSError as error:
        raise RolloutDataError(f"{a} and {b} cannot be compared: {error}") from error
    except RecursionError as error:
        raise RolloutDataError(f"{a} or {b} holds a value that is nested too deeply.") from error
    return report


def _kind_of(path: Path) -> str:
    if not path.is_dir():
        return "file"
    if is_recording(path):
        return "recording"
    if any(manifest.manifest_path(path, writer).is_file() for writer in manifest.WRITERS):
        return "rollout of a recording"
    return "folder"


def _refuse_numbers(choice: Choice, what: str) -> None:
    if choice.first is not None or choice.last is not None:
        raise ConfigError(f"--rollout, --from and --to are for recordings; given are two {what}.")


# --- recordings -----------------------------------------------------------------------------------


def _compare_recordings(report: Report, a: Path, b: Path, choice: Choice) -> None:
    sides = Recording(a), Recording(b)
    chosen = _numbers(report, sides, choice)
    report.notes += _starts_of(sides)
    runs: dict[tuple[int, int], bool] = {}
    for rollout_id, evaluation in chosen:
        rollouts = [side.rollout(rollout_id, evaluation=evaluation) for side in sides]
        numbers = rollouts[0].run, rollouts[1].run
        if numbers not in runs:
            runs[numbers] = _compare_records(report, sides, numbers, choice, since=rollout_id)
        _add_rollout(report, rollouts, choice, layouts=runs[numbers], evaluation=evaluation)
    if not chosen:
        first, other = (manifest.run_numbers(side.root)[0] for side in sides)
        _compare_records(report, sides, (first, other), choice)
        report.notes.append("no rollout is in both")


def _numbers(
    report: Report, sides: tuple[Recording, Recording], choice: Choice
) -> list[tuple[int, bool]]:
    """The rollouts and evaluations of both, in the order in which they are made; names the rest.
    What a later start of a run has superseded is compared where it alone is asked for.
    """
    left_out: list[dict[tuple[int, bool], str]] = [{}, {}]
    if choice.first is None or choice.first != choice.last:
        left_out = [side.superseded() for side in sides]
    found: list[tuple[int, bool]] = []
    for evaluation, word in ((True, "evaluation"), (False, "rollout")):
        known = [
            [
                one
                for one in (side.evaluations if evaluation else side.rollouts)
                if choice.has(one) and (one, evaluation) not in gone
            ]
            for side, gone in zip(sides, left_out, strict=True)
        ]
        found += [(one, evaluation) for one in known[0] if one in set(known[1])]
        for own, other, words in (
            (known[0], known[1], report.only_a),
            (known[1], known[0], report.only_b),
        ):
            lacking = sorted(set(own) - set(other))
            if lacking:
                words.append(f"{word} {_ranges(lacking)}")
    if not found and (choice.first is not None or choice.last is not None):
        names = [f"{side.root}: {_ranges(side.rollouts) or 'none'}" for side in sides]
        raise RolloutDataError(f"No chosen rollout is in both recordings. {'; '.join(names)}.")
    for gone, word in zip(left_out, "AB", strict=True):
        report.notes += [
            f"{'evaluation' if evaluation else 'rollout'} {number} of {word} is not compared, since "
            f"it is {why}"
            for (number, evaluation), why in gone.items()
            if choice.has(number)
        ]
    # an evaluation is made before the rollout of its number
    return sorted(found, key=lambda one: (one[0], not one[1]))


def _ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers, with runs of them as "3 to 7"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    words = [str(p[0]) if len(p) == 1 else f"{p[0]} to {p[-1]}" for p in parts]
    return ", ".join(words[:20]) + (f" and {len(words) - 20} more" if len(words) > 20 else "")


def _starts_of(sides: tuple[Recording, Recording]) -> list[str]:
    return [
        f"{word} was started {len(side.runs)} times; slime show {side.root} says what changed"
        for side, word in zip(sides, "AB", strict=True)
        if len(side.runs) > 1
    ]


def _compare_records(
    report: Report,
    sides: tuple[Recording, Recording],
    numbers: tuple[int, int],
    choice: Choice,
    *,
    since: int = 0,
) -> bool:
    """Adds what differs between two starts of runs, and returns whether the layout does. `since`:
    the first rollout that is compared of these starts.
    """
    records = [side.run_record(number) for side, number in zip(sides, numbers, strict=True)]
    found = compare_runs(*records, allowed=choice.allowed)
    first = tuple(side.runs[0] for side in sides)
    if numbers != first:
        where = f" from rollout {since} on (start {numbers[0]} of A, {numbers[1]} of B)"
        found = [
            dataclasses.replace(
                one,
                since=since,
                where=where,
                allowed=one.allowed or (RESUMED if one.name in RESUME_OPTIONS else ""),
            )
            for one in found
        ]
    known = {(one.name, repr(one.a), repr(one.b)) for one in report.runs}
    report.runs += [one for one in found if (one.name, repr(one.a), repr(one.b)) not in known]
    return layout_differs(found)


def _add_rollout(
    report: Report,
    rollouts: Sequence[RecordedRollout],
    choice: Choice,
    *,
    layouts: bool,
    evaluation: bool,
) -> None:
    rollout_id = rollouts[0].rollout_id
    name = f"{'evaluation' if evaluation else 'rollout'} {rollout_id}"
    sides = [Side.of_rollout(one) for one in rollouts]
    order = rollout_id, 0 if evaluation else 1
    settings = Settings(choice.tolerance, layouts)
    if layouts and not report.tolerance:
        report.tolerance = "the tolerances between layouts"
    result = _compared(report, sides[0], sides[1], settings, RolloutResult(name, order))
    for side, word in zip(sides, "AB", strict=True):
        if side.facts["unfinished"]:
            result.notes.append(
                f"{word} is not complete: its {' and '.join(side.facts['unfinished'])} writer "
                "ended early; compared is what both have"
            )


def _compared(
    report: Report, a: Side, b: Side, settings: Settings, result: RolloutResult
) -> RolloutResult:
    # an evaluation trains nothing, so it explains nothing of a later rollout
    earlier = any(one.order[1] == 1 and one.order[0] < result.order[0] for one in report.differing)
    compare_sides(a, b, settings, result, earlier=earlier)
    first = result.first
    if first is not None and not any(
        one.order < result.order and one.first is not None for one in report.differing
    ):
        result.context = context_of(a, b, first)
    report.rollouts.append(result)
    if not result.identical:
        report.differing.append(result)
    return result


def _compare_folders_of_rollouts(report: Report, a: Path, b: Path, choice: Choice) -> None:
    _refuse_numbers(choice, "rollouts")
    layouts, rollouts = False, []
    recordings = [Recording(path.parent) if is_recording(path.parent) else None for path in (a, b)]
    for path, recording in zip((a, b), recordings, strict=True):
        if path.is_symlink():
            raise RolloutDataError(f"{path} is a link; name the folder that it leads to.")
        rollouts.append(RecordedRollout(path, recording))
    if recordings[0] is not None and recordings[1] is not None:
        both = recordings[0], recordings[1]
        layouts = _compare_records(report, both, (rollouts[0].run, rollouts[1].run), choice)
    evaluation = any(one.evaluation for one in rollouts[0].manifests.values())
    _add_rollout(report, rollouts, choice, layouts=layouts, evaluation=evaluation)


# --- files ----------------------------------------------------------------------------------------


def _compare_files(report: Report, a: Path, b: Path, choice: Choice) -> None:
    _refuse_numbers(choice, "files")
    _compare_two_files(report, a, b, choice, name="")


def _compare_two_files(report: Report, a: Path, b: Path, choice: Choice, *, name: str) -> None:
    parts = part_of_file(a), part_of_file(b)
    if parts[0] != parts[1]:
        raise RolloutDataError(
            f"{a} is a {parts[0]} part and {b} a {parts[1]} part: they cannot be compared."
        )
    if parts[0] == CONFIG:
        report.runs += compare_options(read_config(a), read_config(b), allowed=choice.allowed)
        return
    if parts[0] == RUN:
        report.runs += compare_runs(read_run_record(a), read_run_record(b), allowed=choice.allowed)
        return
    sides = side_of_file(a), side_of_file(b)
    result = RolloutResult(name, _order_of(name))
    _compared(report, *sides, Settings(choice.tolerance), result)


def _order_of(name: str) -> tuple[int, int]:
    """A dump's rollout, from the last number of its name."""
    numbers = re.findall(r"[0-9]+", Path(name).stem)
    is_evaluation = Path(name).stem.startswith("eval")
    return (int(numbers[-1]) if numbers else 0), 0 if is_evaluation else 1


def _compare_dumps(report: Report, a: Path, b: Path, choice: Choice) -> None:
    _refuse_numbers(choice, "folders of dumps")
    names_a, names_b = find_dumps(a), find_dumps(b)
    if not names_a and not names_b:
        raise RolloutDataError(f"Neither {a} nor {b} has a dump in it.")
    for name in sorted({*names_a, *names_b}, key=lambda one: (_order_of(one), one)):
        if name in names_a and name in names_b:
            _compare_two_files(report, a / name, b / name, choice, name=name)
        else:
            only = report.only_a if name in names_a else report.only_b
            only.append(name)


def find_dumps(folder: Path) -> list[str]:
    """Names, relative to the folder, of the dumps in it."""
    return sorted(
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and not path.is_symlink() and _is_dump(path)
    )


def _is_dump(path: Path) -> bool:
    with open(path, "rb") as file:
        start = file.read(64)
    if path.suffix == ".parquet" and start.startswith(b"PAR1"):
        with contextlib.suppress(RolloutDataError):
            return part_of_file(path) in ("samples", "train")
    return (path.suffix == ".safetensors" and start[8:9] == b"{") or start.startswith(
        f'{{"format":"{ROLLOUT_FORMAT}"'.encode()
    )
