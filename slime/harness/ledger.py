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
from slime.data.run_ledger import RolloutEntry, SavedState, numbers_in, runs_of
from slime.exceptions import ConfigError, SlimeError
from slime.files.jsonl import read_jsonl
from slime.files.ledger_file import FILE_NAME, STATE_NAME, read_books, read_state
from slime.files.rollout_dump import dump_path, read_rollout_dump
from slime.prompts import data_position
from slime.recording.reader import Recording, is_recording
from slime.tracking.tracking import FILE_NAME as METRICS_NAME

SHOWN = 20  # culprits and notes in the text
CONFIG = "config.yaml"
Lineage = list[tuple[str, int, int]]


@dataclasses.dataclass
class Proof:
    """What `slime ledger` says of a run. checked: how many of each kind of file were compared."""

    path: Path
    books: Books
    lineage: Lineage
    found: Findings
    checked: dict[str, int] = dataclasses.field(default_factory=dict)

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
    # the starts of a resumed run share them
    for root in dict.fromkeys(options.get("record") for _, options in runs):
        _check_recording(proof, root)
    for folder, options in runs:
        _check_dumps(proof, folder, options)
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
    """The step that the recording has for each sample is the ledger's."""
    if not root or not is_recording(root):
        return
    recording = Recording(root)
    for entry in _kept_entries(proof):
        if entry.rollout not in recording.rollouts or entry.mark is None:
            continue
        rollout = recording.rollout(entry.rollout)
        if "columns" not in rollout or "schedule" not in rollout:
            continue
        try:
            indices = rollout.table("columns")["sample_index"].to_pylist()
            steps = rollout.table("schedule")["step"].to_pylist()
        except (SlimeError, OSError, KeyError, ValueError) as error:
            proof.blame("recording_damaged", f"{rollout.folder}: {error}", entry.rollout)
            continue
        recorded = collections.defaultdict(set)
        for index, step in zip(indices, steps, strict=False):
            recorded[index].add(step)
        proof.checked["rollouts in the recording"] = (
            proof.checked.get("rollouts in the recording", 0) + 1
        )
        for step, runs in entry.planned.items():
            for index in numbers_in(runs):
                if step not in recorded.get(index, ()):
                    proof.blame(
                        "recording_differs",
                        f"sample {index} is in step {step} of rollout {entry.rollout}; the "
                        f"recording has {sorted(recorded.get(index, ())) or 'no row of it'}",
                        entry.rollout,
                        samples=((index, 1),),
                    )


def _check_dumps(proof: Proof, folder: Path, options: Mapping[str, Any]) -> None:
    """Every sample that trained is in the dump of its rollout."""
    template = options.get("save_debug_rollout_data")
    if not template or options.get("load_debug_rollout_data"):
        return
    for entry in _kept_entries(proof):
        path = dump_path(template, entry.rollout, evaluation=False)
        if not path.is_file() or entry.mark is None:
            continue
        try:
            dumped = {sample.index for sample in read_rollout_dump(path)}
        except (SlimeError, OSError, ValueError) as error:
            proof.blame("dump_damaged", f"{path}: {error}", entry.rollout)
            continue
        proof.checked["rollouts in dumps"] = proof.checked.get("rollouts in dumps", 0) + 1
        missing = [
            i for runs in entry.planned.values() for i in numbers_in(runs) if i not in dumped
        ]
        if missing:
            proof.blame(
                "dump_differs",
                f"sample {missing[0]} and {len(missing) - 1} more of rollout {entry.rollout} are not "
                f"in {path.name}",
                entry.rollout,
                samples=runs_of(missing),
            )


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
    lines = [
        f"ledger: {proof.path}, {len(proof.books.starts)} starts",
        f"rollouts: {spans or 'none'}"
        + (f"; {len(proof.superseded)} superseded" if proof.superseded else ""),
        f"samples: {found.sampled} sampled = {found.trained} trained + {dropped} dropped"
        + (f" ({reasons})" if reasons else "")
        + f" + {found.waiting} waiting"
        + (f" + {found.unfinished} whose training is not finished" if found.unfinished else ""),
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
