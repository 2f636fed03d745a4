"""`slime ledger RUN`: proves from files alone that no sample of a run was lost or trained twice, over
all its restarts.

    slime ledger runs/latest        a run folder, or the folder of --save
    slime ledger runs/latest --json

The books are those of the last start and of what it went on from; what earlier starts did after
their last checkpoint is superseded. They are compared with the metrics, the published checkpoints
and their data positions, and with the recording and the rollout dumps where there are any.

Exit status 0: everything adds up, 1: it does not, and the culprits are named, 2: there are no books
that can be read.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from slime.config.specs import slime_specs
from slime.config.yaml_file import read_option_file
from slime.data.ledger import NOT_TRAINED, PREFIX
from slime.data.ledger_audit import Books, Culprit, Findings, describe_totals, examine
from slime.data.reasons import REASON_OF_VALUE, DropReason
from slime.data.run_ledger import RolloutEntry, SavedState, numbers_in, runs_of
from slime.exceptions import ConfigError, SlimeError
from slime.files.jsonl import read_jsonl
from slime.files.ledger_file import FILE_NAME, STATE_NAME, read_books, read_state
from slime.files.rollout_dump import dump_path, read_rollout_dump
from slime.prompts import data_position
from slime.recording.reader import RecordedRollout, Recording, is_recording
from slime.tracking.tracking import FILE_NAME as METRICS_NAME

SHOWN = 20  # culprits and notes in the text
CONFIG = "config.yaml"
Lineage = list[tuple[str, int, int]]
# reasons that keep a whole rollout from training the policy, whatever its samples are
_WHOLE_ROLLOUT = {DropReason.CRITIC_ONLY.value, DropReason.ROLLOUT_ONLY.value}


@dataclasses.dataclass
class Proof:
    """What `slime ledger` says of a run. checked: how many of each kind of file were compared.
    has_converter: whether a custom converter, which may reject samples too, made the train data.
    """

    path: Path
    books: Books
    lineage: Lineage
    found: Findings
    checked: dict[str, int] = dataclasses.field(default_factory=dict)
    has_converter: bool = False

    @property
    def superseded(self) -> list[tuple[str, int]]:
        """(start, rollout) of the entries that stand in no surviving lineage."""
        kept = {
            (start, rollout)
            for start, first, last in self.lineage
            for rollout in range(first, last + 1)
        }
        return sorted(set(self.books.rollouts) - kept)

    def blame(self, kind: str, message: str, *rollouts: int, **facts: Any) -> None:
        self.found.culprits.append(Culprit(kind, message, rollouts=rollouts, **facts))


def find_ledger(run: Path) -> Path:
    """The ledger of a run folder or of a folder of checkpoints. ConfigError where there is none."""
    save = options_of(run).get("save")
    folders = [run, *([Path(save)] if save else []), run.parent]
    for folder in folders[: None if run.name.startswith("iter_") else -1]:
        if (folder / FILE_NAME).is_file():
            return folder / FILE_NAME
    looked = " and ".join(str(folder / FILE_NAME) for folder in folders[:-1])
    raise ConfigError(
        f"{run} is no folder of a run with a ledger: there is no {looked}. Give the folder of "
        "--run-dir or of --save."
    )


def options_of(run: Path) -> Mapping[str, Any]:
    """The options that a run folder's config.yaml records; {} without one."""
    path = run / CONFIG
    if not path.is_file():
        return {}
    specs = {spec.name: spec for spec in slime_specs()}
    return read_option_file(str(path), specs, strict=False).known


def prove(run: Path) -> Proof:
    """Everything that the files of a run say. ConfigError where they cannot be read."""
    path = find_ledger(run)
    try:
        books = read_books(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not books.starts:
        what = books.unreadable[0] if books.unreadable else "it is empty"
        raise ConfigError(f"{path} holds no entry of a start: {what}.")
    lineage = books.lineage(next(reversed(books.starts)))
    proof = Proof(path, books, lineage, examine(books, lineage))
    _check_entries(proof)
    _check_metrics(proof, run)
    _check_checkpoints(proof)
    runs = _run_folders(proof, run)
    proof.has_converter = any(
        options.get("custom_convert_samples_to_train_data_path") for _, options in runs
    )
    # the starts of a resumed run share them
    for root in dict.fromkeys(options.get("record") for _, options in runs):
        _check_recording(proof, root)
    templates = [
        options.get("save_debug_rollout_data")
        for _, options in runs
        if not options.get("load_debug_rollout_data")
    ]
    for template in dict.fromkeys(templates):
        _check_dumps(proof, template)
    return proof


def _kept_entries(proof: Proof) -> Iterator[RolloutEntry]:
    for start, first, last in proof.lineage:
        for rollout in range(first, last + 1):
            if (start, rollout) in proof.books.rollouts:
                yield proof.books.rollouts[start, rollout]


def _check_entries(proof: Proof) -> None:
    """Lines that nobody can read, and entries of starts that nobody knows."""
    proof.found.notes += [
        f"{proof.path.name}: {sentence}; it is no entry of the surviving lineage, or that entry is "
        "named as missing"
        for sentence in proof.books.unreadable
    ]
    unknown = {
        start for start, _ in [*proof.books.rollouts, *proof.books.trained]
    } - proof.books.starts.keys()
    for start in sorted(unknown):
        rollouts = sorted(rollout for name, rollout in proof.books.rollouts if name == start)
        proof.blame(
            "start_missing",
            f"the entry of start {start} is missing or damaged, and there are entries of its "
            f"rollouts {rollouts[:8]}",
            *rollouts,
        )


# --- other files ----------------------------------------------------------------------------------


def _run_folders(proof: Proof, run: Path) -> list[tuple[Path, Mapping[str, Any]]]:
    """(folder, options) of each run folder of the lineage's starts that is there."""
    found = [(folder, options_of(folder)) for folder in _start_folders(proof, run)]
    return [(folder, options) for folder, options in found if options]


def _start_folders(proof: Proof, run: Path) -> list[Path]:
    """The folder that was given, and those of the lineage's starts."""
    starts = [proof.books.starts.get(start) for start, _, _ in proof.lineage]
    folders = [run, *(Path(one.run_dir) for one in starts if one is not None)]
    # `runs/latest` is a link to one of them
    return list({folder.resolve(): folder for folder in reversed(folders)}.values())[::-1]


def _check_metrics(proof: Proof, run: Path) -> None:
    """The counts of each rollout are those that its processes have logged."""
    wanted = {(entry.process, entry.rollout): entry for entry in _kept_entries(proof)}
    trained = {
        (entry.process, entry.rollout): entry
        for key, entry in proof.books.trained.items()
        if any(key[0] == s and first <= key[1] <= last for s, first, last in proof.lineage)
    }
    seen = set()
    for folder in _start_folders(proof, run):
        if not (folder / METRICS_NAME).is_file():
            continue
        for record in read_jsonl(folder / METRICS_NAME)[0]:
            if record.get("step_key") != "rollout/step" or not isinstance(
                record.get("metrics"), dict
            ):
                continue
            key, logged = (record.get("process"), record.get("step")), record["metrics"]
            if key in wanted and PREFIX + "sampled" in logged:
                seen.add(key)
                counts = wanted[key].counts
                differ = [name for name in counts if logged.get(PREFIX + name, 0) != counts[name]]
                for name in differ:
                    proof.blame(
                        "metrics_differ",
                        f"rollout {key[1]}: the ledger has {name} {counts[name]}, {folder.name}/"
                        f"{METRICS_NAME} {logged.get(PREFIX + name, 0)}",
                        key[1],
                    )
            if key in trained and PREFIX + "trained" in logged:
                _compare_trained(proof, trained[key], logged)
    proof.checked["rollouts in metrics"] = len(seen)


def _compare_trained(proof: Proof, entry: Any, logged: Mapping[str, Any]) -> None:
    gone = sum(count for name, count in logged.items() if name.startswith(NOT_TRAINED))
    known = entry.unnamed + sum(len(list(numbers_in(runs))) for runs in entry.not_trained.values())
    if (entry.rows, known) != (logged[PREFIX + "trained"], gone):
        proof.blame(
            "metrics_differ",
            f"rollout {entry.rollout}: the ledger has {entry.rows} rows trained and {known} not, "
            f"the metrics {logged[PREFIX + 'trained']} and {gone}",
            entry.rollout,
        )


def _check_checkpoints(proof: Proof) -> None:
    """Each published checkpoint of the surviving lineage: its state, and its data position."""
    save, checked = proof.path.parent, 0
    for folder in sorted(save.glob("iter_[0-9]*")):
        if not (folder / STATE_NAME).is_file():
            proof.found.notes.append(f"{folder.name} has no {STATE_NAME}: an earlier version's")
            continue
        try:
            state = read_state(folder / STATE_NAME)
        except (ConfigError, OSError) as error:
            proof.blame("checkpoint_damaged", str(error))
            continue
        if not _is_part(state.lineage, proof.lineage):
            proof.found.notes.append(
                f"{folder.name} is of a lineage that the last start did not go on from"
            )
            continue
        checked += 1
        found = examine(proof.books, state.lineage, state)
        known = {one.message for one in proof.found.culprits}
        proof.found.culprits += [
            dataclasses.replace(one, message=f"{folder.name}: {one.message}")
            for one in found.culprits
            if one.message not in known
        ]
        _check_position(proof, save, state)
    proof.checked["checkpoints"] = checked


def _is_part(some: Sequence[tuple[str, int, int]], whole: Lineage) -> bool:
    """Whether one lineage is a beginning of another."""
    if len(some) > len(whole):
        return False
    *before, (start, first, last) = some
    name, begin, end = whole[len(some) - 1]
    return list(before) == whole[: len(before)] and (start, first) == (name, begin) and last <= end


def _check_position(proof: Proof, save: Path, state: SavedState) -> None:
    """The data position of a checkpoint serves again what its books say."""
    path = data_position.state_path(str(save), state.rollout)
    if state.mark is None:
        return
    if not path.is_file():
        proof.blame(
            "position_missing",
            f"the checkpoint after rollout {state.rollout} has no data position {path.name}",
            state.rollout,
        )
        return
    try:
        position = data_position.read_state(path)
        waiting = runs_of(int(one["group_index"]) for one in position["untrained"])
        place = tuple(
            position[name] for name in ("sample_group_index", "epoch_id", "sample_offset")
        )
    except (ConfigError, OSError, KeyError, TypeError, ValueError) as error:
        proof.blame("position_damaged", f"{path.name}: {error}", state.rollout)
        return
    mark = state.mark
    if place != (mark.groups, mark.epoch, mark.offset) or waiting != state.waiting:
        differ = set(numbers_in(waiting)) ^ set(numbers_in(state.waiting))
        proof.blame(
            "position_differs",
            f"{path.name} stands at group, epoch, prompt {place}, the ledger at "
            f"{(mark.groups, mark.epoch, mark.offset)}"
            + (f"; groups {sorted(differ)[:8]} are served again in one of them" if differ else ""),
            state.rollout,
        )


def _check_recording(proof: Proof, root: str | None) -> None:
    """What the recording has of each sample, its verdict, its step and that it trained, is the
    ledger's.
    """
    if not root or not is_recording(root):
        return
    recording = Recording(root)
    known = set(recording.rollouts)
    for entry in _kept_entries(proof):
        if entry.rollout not in known or entry.mark is None:
            continue
        try:
            rollout = recording.rollout(entry.rollout)
            if not {"samples", "columns", "schedule"} <= set(rollout.parts):
                continue
            if not _is_of_start(proof, entry, recording.run_record(rollout.run).get("time")):
                proof.found.notes.append(
                    f"rollout {entry.rollout} of {root} is of another start of the run"
                )
                continue
            found = _recorded(rollout)
        except (SlimeError, OSError, KeyError, ValueError) as error:
            proof.blame("recording_damaged", f"rollout {entry.rollout}: {error}", entry.rollout)
            continue
        _count(proof, "rollouts in the recording")
        _compare_verdicts(proof, entry, found.verdicts, "recording")
        if not _WHOLE_ROLLOUT & entry.dropped.keys():
            _compare_steps(proof, entry, found)


def _is_of_start(proof: Proof, entry: RolloutEntry, began: Any) -> bool:
    """Whether what began to be written at that time is of the entry's start: the first that is not
    before it. A rollout that a later start has made again, unrecorded, is not what was recorded.
    """
    if not isinstance(began, int | float):
        return False
    later = [one for one in proof.books.starts.values() if one.time >= began]
    return bool(later) and min(later, key=lambda one: one.time).start == entry.start


@dataclasses.dataclass(frozen=True)
class _Recorded:
    """What a recording has of a rollout: (index, reason or None) of each sample, the steps of the
    rows of each sample by index, and the samples that a rank trained; None without that part.
    """

    verdicts: list[tuple[Any, str | None]]
    steps: Mapping[Any, set[int]]
    trained: set[Any] | None


def _recorded(rollout: RecordedRollout) -> _Recorded:
    samples, columns = rollout.table("samples"), rollout.table("columns")
    indices = columns["sample_index"].to_pylist()
    steps: dict[Any, set[int]] = collections.defaultdict(set)
    for index, step in zip(indices, rollout.table("schedule")["step"].to_pylist(), strict=True):
        if step >= 0:
            steps[index].add(step)
    trained = None
    if "train" in rollout:
        ranks = rollout.table("train")["dp_rank"].to_pylist()
        pairs = zip(indices, ranks, strict=True)
        trained = {index for index, rank in pairs if rank is not None and rank >= 0}
    names = ("index", "valid", "reason", "dropped_by")
    verdicts = [
        (index, why or (None if valid else reason or DropReason.INVALID.value))
        for index, valid, reason, why in zip(
            *(samples[name].to_pylist() for name in names), strict=True
        )
    ]
    return _Recorded(verdicts, steps, trained)


def _compare_verdicts(
    proof: Proof, entry: RolloutEntry, verdicts: Sequence[tuple[Any, str | None]], where: str
) -> None:
    """Each sample of another file has an outcome in the ledger, and one that was rejected or
    dropped there for that reason.
    """
    assert entry.mark is not None
    num_samples = entry.mark.groups * entry.mark.group_size
    planned = {i for runs in entry.planned.values() for i in numbers_in(runs)}
    dropped = {i: why for why, runs in entry.dropped.items() for i in numbers_in(runs)}
    reasons: dict[int, set[str | None]] = collections.defaultdict(set)
    for index, reason in verdicts:
        if type(index) is int and 0 <= index < num_samples:
            reasons[index].add(reason)
    for index, found in reasons.items():
        why = dropped.get(index)
        if index not in planned and why is None:
            ours = "has no outcome"
        elif why in found | _WHOLE_ROLLOUT if why is not None else None in found:
            continue
        elif None in found and (proof.has_converter or why not in REASON_OF_VALUE):
            continue  # it passed the gate, and was left out behind it
        else:
            ours = "is planned" if why is None else f"was dropped ({why})"
        theirs = " and ".join(sorted(str(one or "no reason against it") for one in found))
        proof.blame(
            f"{where}_differs",
            f"sample {index} {ours} in the ledger of rollout {entry.rollout}; the {where} has "
            f"{theirs}",
            entry.rollout,
            samples=((index, 1),),
        )


def _compare_steps(proof: Proof, entry: RolloutEntry, found: _Recorded) -> None:
    """The samples that the ledger plans are those of the recorded schedule, each in its step, and
    those that the ranks trained.
    """
    planned = {i: step for step, runs in entry.planned.items() for i in numbers_in(runs)}
    assert entry.mark is not None
    num_samples = entry.mark.groups * entry.mark.group_size
    for index in sorted({*planned, *(i for i in found.steps if type(i) is int)}):
        if index >= num_samples or planned.get(index) == min(
            found.steps.get(index, ()), default=None
        ):
            if index not in planned or found.trained is None or index in found.trained:
                continue
            theirs = "no rank that trained it"
        else:
            theirs = f"step {sorted(found.steps[index])}" if index in found.steps else "no step"
        ours = f"is in step {planned[index]}" if index in planned else "is not planned"
        proof.blame(
            "recording_differs",
            f"sample {index} {ours} of rollout {entry.rollout} in the ledger; the recording has "
            f"{theirs}",
            entry.rollout,
            samples=((index, 1),),
        )


def _check_dumps(proof: Proof, template: str | None) -> None:
    """Every sample that trained is in the dump of its rollout, and what the dump has of the others
    is the ledger's.
    """
    if not template:
        return
    for entry in _kept_entries(proof):
        path = dump_path(template, entry.rollout, evaluation=False)
        if not path.is_file() or entry.mark is None:
            continue
        begun = proof.books.starts.get(entry.start)
        if begun is not None and path.stat().st_mtime < begun.time:
            proof.found.notes.append(f"{path.name} is of an earlier start of the run")
            continue
        try:
            samples = read_rollout_dump(path)
        except (SlimeError, OSError, ValueError) as error:
            proof.blame("dump_damaged", f"{path}: {error}", entry.rollout)
            continue
        _count(proof, "rollouts in dumps")
        verdicts = [(one.index, None if one.valid else str(one.invalid_reason)) for one in samples]
        _compare_verdicts(proof, entry, verdicts, "dump")
        dumped = {sample.index for sample in samples}
        missing = [
            i for runs in entry.planned.values() for i in numbers_in(runs) if i not in dumped
        ]
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            proof.blame(
                "dump_differs",
                f"sample {missing[0]}{more} of rollout {entry.rollout} "
                f"{'are' if more else 'is'} not in {path.name}",
                entry.rollout,
                samples=runs_of(missing),
            )


def _count(proof: Proof, what: str) -> None:
    proof.checked[what] = proof.checked.get(what, 0) + 1


# --- the answer -----------------------------------------------------------------------------------


def as_json(proof: Proof) -> dict[str, Any]:
    """The proof as plain values."""
    return {
        "ledger": str(proof.path),
        "ok": not proof.found.culprits,
        "starts": len(proof.books.starts),
        "lineage": [
            {"start": start, "first": first, "last": last} for start, first, last in proof.lineage
        ],
        "superseded": [{"start": s, "rollout": rollout} for s, rollout in proof.superseded],
        **describe_totals(proof.found),
        "checked": proof.checked,
        "culprits": [dataclasses.asdict(one) for one in proof.found.culprits],
        "notes": proof.found.notes,
    }


def lines_of(proof: Proof) -> list[str]:
    """The proof as text."""
    found = proof.found
    spans = ", ".join(f"{first} to {last} of {start}" for start, first, last in proof.lineage)
    dropped = sum(found.dropped.values())
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(found.dropped.items()))
    num_starts = len(proof.books.starts)
    lines = [
        f"ledger: {proof.path}, {num_starts} start{'' if num_starts == 1 else 's'}",
        f"rollouts: {spans or 'none'}"
        + (f"; {len(proof.superseded)} superseded" if proof.superseded else ""),
        f"samples: {found.sampled} sampled = {found.trained} trained + {dropped} dropped"
        + (f" ({reasons})" if reasons else "")
        + (f" + {found.unfinished} whose training is not finished" if found.unfinished else "")
        + (f"; {found.waiting} more wait" if found.waiting else ""),
    ]
    if found.unnamed_trained:
        lines.append(f"without an index: {found.unnamed_trained} rows trained, counted only")
    lines += [
        f"epoch {epoch}: {size} prompts handed out, {used} used up, {left} waiting"
        for epoch, (size, used, left) in list(found.epochs.items())[-SHOWN:]
    ]
    compared = [f"{count} {what}" for what, count in proof.checked.items() if count]
    lines.append(f"compared with: {', '.join(compared) or 'no other file'}")
    lines += [f"note: {note}" for note in found.notes[:SHOWN]]
    lines += [f"PROBLEM {one.kind}: {one.message}" for one in found.culprits[:SHOWN]]
    if len(found.culprits) > SHOWN:
        lines.append(f"PROBLEM: and {len(found.culprits) - SHOWN} more; --json has all of them")
    return [*lines, "OK" if not found.culprits else f"{len(found.culprits)} problems"]


def main(argv: Sequence[str] | None = None) -> int:
    """`slime ledger`."""
    parser = argparse.ArgumentParser(
        prog="slime ledger",
        description=__doc__.partition("\n\n")[0],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, help="Folder of --run-dir, or of --save.")
    parser.add_argument("--json", action="store_true", help="Print one JSON object.")
    options = parser.parse_args(argv)
    try:
        proof = prove(options.run)
    except (SlimeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(as_json(proof), default=_plain))
    else:
        print(*lines_of(proof), sep="\n")
    return int(bool(proof.found.culprits))


def _plain(value: object) -> object:
    return value.item() if isinstance(value, np.generic) else str(value)
