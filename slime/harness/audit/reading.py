"""From a path to tables: finds the files of known shapes, reads them a step at a time, and notes
what could not be read. No link inside a folder is followed.
"""

from __future__ import annotations

import collections
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slime.exceptions import ConfigError, RolloutDataError, SlimeError
from slime.files.jsonl import read_jsonl
from slime.files.pickles import is_pickle
from slime.harness.audit.completions import TRL
from slime.harness.audit.dumps import OUR_ROLLOUT, OUR_TRAIN, TORCH_ROLLOUT, TORCH_TRAIN, join
from slime.harness.audit.json_lines import MAPPED, NEMO, VERL
from slime.harness.audit.recorded import SAMPLES, TRAIN, damaged_files
from slime.harness.audit.shapes import (
    Part,
    ReadOptions,
    Shape,
    is_evaluation_name,
    open_regular,
    run_of,
    step_in_name,
)
from slime.harness.audit.table import Row, SampleTable, build_table
from slime.harness.run_records import RunRecords, read_run, series_of
from slime.recording.manifest import read_json
from slime.recording.reader import LARGEST_JSON

SHAPES: tuple[Shape, ...] = (
    MAPPED, OUR_ROLLOUT, SAMPLES, TRAIN, OUR_TRAIN, VERL, NEMO, TRL, TORCH_ROLLOUT, TORCH_TRAIN,
)  # fmt: skip
METRICS = "metrics.jsonl"
PLANS = ("columns.parquet", "schedule.parquet", "replies.jsonl")  # nor have these samples
RECORDED_METRICS = ("steps.jsonl", "rollout.json")  # of a recorded rollout
MAX_FILES = 200_000
_NO_STEP = 1 << 62


@dataclasses.dataclass(frozen=True)
class Source:
    """A file of a known shape, and the step in its name."""

    path: Path
    shape: Shape
    step: int | None


@dataclasses.dataclass
class Found:
    """What a path holds. `skipped`: files of no known shape; `unreadable`: damaged ones, links and
    pipes; both with the reason.
    """

    root: Path
    sources: list[Source] = dataclasses.field(default_factory=list)
    metrics: list[Path] = dataclasses.field(default_factory=list)
    skipped: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    unreadable: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)

    def name(self, path: Path) -> str:
        """The path as reports show it: below the folder that was asked for."""
        try:
            return str(path.relative_to(self.root))
        except ValueError:
            return str(path)

    def cannot_read(self, path: Path, why: str) -> None:
        """Notes a file, or a part of it, that could not be read."""
        self.unreadable.append((self.name(path), why))


def find_sources(path: Path, options: ReadOptions) -> Found:
    """The files below `path` that can be audited. ConfigError where there is no such path, or it is
    one file of no known shape: it lists the shapes and what this file lacks.
    """
    if not path.exists():
        raise ConfigError(f"there is no {path}.")
    path = path.resolve()
    if not path.is_dir():
        return _one_file(path, options)
    found = Found(path)
    for file in _files(path, found):
        if file.name == METRICS or (file.name in RECORDED_METRICS and run_of(file) != file.parent):
            found.metrics.append(file)
            continue
        shapes = [shape for shape in SHAPES if file.suffix in shape.suffixes]
        if file.name in PLANS and run_of(file) != file.parent:
            continue
        # a run's .json files are settings and states; one that is a dump is named, or mapped
        if not shapes or (file.suffix == ".json" and options.mapping is None):
            continue
        try:
            shape, why = _shape_of(file, shapes, options)
        except SlimeError as error:
            found.cannot_read(file, str(error))
            continue
        if shape is None:
            found.skipped.append((found.name(file), why))
        else:
            found.sources.append(Source(file, shape, step_in_name(file)))
    return found


def _one_file(path: Path, options: ReadOptions) -> Found:
    found = Found(path.parent)
    if path.name == METRICS:
        found.metrics.append(path)
        return found
    for file, damage in damaged_files(path.parent, path).items():
        raise ConfigError(f"{file} {damage}")
    try:
        shape, why = _shape_of(path, list(SHAPES), options)
    except ConfigError:
        raise
    except SlimeError as error:
        raise ConfigError(f"{path}: {error}.") from error
    if shape is None:
        raise ConfigError(f"{path} is of no known shape.{_about_pickles(path)}\n{why}")
    found.sources.append(Source(path, shape, step_in_name(path)))
    return found


def _about_pickles(path: Path) -> str:
    """What a pickle is not read as; "" for another file."""
    with open_regular(path) as file:
        if not is_pickle(file.read(256)):
            return ""
    return (
        " It is a pickle: .pt dumps of the shapes below are read as plain data, no other is loaded."
    )


def _files(folder: Path, found: Found) -> Iterator[Path]:
    """Regular files below a folder, sorted; links are noted and not followed. What a recording's
    manifests do not vouch for is noted too, and left out.
    """
    waiting, count = [folder], 0
    while waiting:
        current = waiting.pop()
        try:
            entries = sorted(os.scandir(current), key=lambda entry: entry.name)
        except OSError as error:
            found.cannot_read(current, f"cannot be listed: {error.strerror}")
            continue
        damaged = damaged_files(current)
        for file, why in damaged.items():
            found.cannot_read(file, why)
        for entry in entries:
            count += 1
            if count > MAX_FILES:
                raise ConfigError(f"{folder} has more than {MAX_FILES} entries. Name a part of it.")
            path = Path(entry.path)
            if path in damaged:
                continue
            if entry.is_symlink():
                found.skipped.append((found.name(path), "a link, which is not followed"))
            elif entry.is_dir(follow_symlinks=False):
                waiting.append(path)
            elif entry.is_file(follow_symlinks=False):
                yield path
            else:
                found.skipped.append((found.name(path), "no regular file"))


def _shape_of(path: Path, shapes: list[Shape], options: ReadOptions) -> tuple[Shape | None, str]:
    """The shape of a file, or None and what each known one would need. RolloutDataError where the
    file is of one by its suffix, but damaged.
    """
    with open_regular(path):
        pass
    fitting = [shape for shape in shapes if path.suffix in shape.suffixes]
    lines, reasons = [], []
    for shape in shapes:
        if shape not in fitting:
            lines.append(f"  {shape.name}: {shape.needs}; this file's suffix is {path.suffix!r}")
            continue
        damage: str | None = None
        try:
            missing = shape.missing(path, options)
        except RolloutDataError as error:
            damage = missing = str(error)
        except ConfigError:
            raise
        except Exception as error:  # noqa: BLE001 - a damaged file raises whatever its library does
            damage = missing = f"{type(error).__name__}: {str(error)[:200]}"
        if missing is None:
            return shape, ""
        if shape is not MAPPED:  # asks for its option before it looks
            reasons.append(damage)
        lines.append(f"  {shape.name}: {shape.needs}; this file: {missing}")
    if reasons and reasons[0] is not None and len(set(reasons)) == 1:
        raise RolloutDataError(reasons[0])
    return None, "Known shapes:\n" + "\n".join(lines)


def read_tables(found: Found, options: ReadOptions) -> Iterator[SampleTable]:
    """A table per step and run, rollouts first, in the order of their steps. What cannot be read is
    noted in `found`, and the rest goes on.
    """
    options = dataclasses.replace(options, report=found.cannot_read)
    rollouts = [source for source in found.sources if source.shape.role != "train"]
    train = _train_of(rollouts, [one for one in found.sources if one.shape.role == "train"])
    for source in sorted(rollouts, key=_order):
        for part in _parts(source, found, options):
            rows: list[Row] = []
            files = [source.path]
            if not part.is_evaluation and part.step == source.step:
                rows, more = _train_rows(train.pop(source.path, []), found, options)
                files += more
            yield from _table(part, rows, files, source, found)
    for sources in sorted(train.values(), key=lambda some: _order(some[0])):
        rows, files = _train_rows(sources, found, options)
        if rows:
            step = _NO_STEP if sources[0].step is None else sources[0].step
            yield from _table(Part(step, []), rows, files, sources[0], found)


def _train_of(rollouts: list[Source], train: list[Source]) -> dict[Path, list[Source]]:
    """By the file of a rollout, what was trained of it: of the same step and run; where the two
    lie in folders of their own, of the step that only one run has. By their own file those of
    which no rollout, or more than one, is there.
    """
    by_run: dict[tuple[Path, int | None], list[Source]] = collections.defaultdict(list)
    by_step: dict[int | None, list[Source]] = collections.defaultdict(list)
    for source in rollouts:
        if not is_evaluation_name(source.path):
            by_run[_home_of(source.path), source.step].append(source)
            by_step[source.step].append(source)
    trained: dict[tuple[Path, int | None], list[Source]] = collections.defaultdict(list)
    for source in train:
        trained[_home_of(source.path), source.step].append(source)
    homes = collections.Counter(step for _, step in trained)
    found: dict[Path, list[Source]] = {}
    for (home, step), sources in trained.items():
        same = by_run.get((home, step)) or (by_step[step] if homes[step] == 1 else [])
        found[same[0].path if len(same) == 1 else sources[0].path] = sources
    return found


def _home_of(path: Path) -> Path:
    """The folder that the rollouts of a run and what was trained of them lie below."""
    run = run_of(path)
    return run.parent if run.name in ("rollout_data", "train_data") else run


def _order(source: Source) -> tuple[str, int, str]:
    step = _NO_STEP if source.step is None else source.step
    return str(run_of(source.path)), step, source.path.name


def _parts(source: Source, found: Found, options: ReadOptions) -> Iterator[Part]:
    try:
        yield from source.shape.read(source.path, options)
    except ConfigError:
        raise
    except SlimeError as error:
        found.cannot_read(source.path, str(error))
    except RecursionError:
        found.cannot_read(source.path, "nested too deeply to be a record")
    except MemoryError:
        found.cannot_read(source.path, "does not fit into memory")
    except Exception as error:  # noqa: BLE001 - a foreign file may break any library that reads it
        found.cannot_read(source.path, f"damaged ({type(error).__name__}: {str(error)[:200]})")


def _train_rows(
    sources: list[Source], found: Found, options: ReadOptions
) -> tuple[list[Row], list[Path]]:
    rows: list[Row] = []
    for source in sorted(sources, key=lambda one: _order(one)):
        for part in _parts(source, found, options):
            rows += part.rows
    return rows, [source.path for source in sources]


def _table(
    part: Part, train: list[Row], files: list[Path], source: Source, found: Found
) -> Iterator[SampleTable]:
    rows, lost = join(part.rows, train)
    if lost:
        found.notes.append(
            f"step {part.step}: {lost} samples of the train dumps are not in the rollout dump."
        )
    if rows:
        yield build_table(
            part.step,
            rows,
            shape=source.shape.name,
            files=[found.name(file) for file in files],
            run=found.name(run_of(source.path)),
            is_evaluation=part.is_evaluation,
        )
    elif not train:
        found.cannot_read(source.path, "holds no sample")


def read_metrics(found: Found) -> Iterator[tuple[str, RunRecords]]:
    """(name of the run, metrics) of each metrics.jsonl, and of each recording."""
    recorded: dict[str, list[dict[str, Any]]] = collections.defaultdict(list)
    for path in found.metrics:
        try:
            with open_regular(path):
                pass
            if path.name == METRICS:
                records = read_run(path.parent)
                if records.num_unreadable:
                    found.cannot_read(path, f"{records.num_unreadable} lines are no JSON")
                yield found.name(path), _plain_series(records)
            else:
                recorded[found.name(run_of(path))] += _recorded_metrics(path, found)
        except SlimeError as error:
            found.cannot_read(path, str(error))
        except RecursionError:
            found.cannot_read(path, "nested too deeply to be a record")
        except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
            found.cannot_read(path, f"damaged ({type(error).__name__}: {str(error)[:200]})")
    for name, metrics in recorded.items():
        try:
            yield name, _plain_series(series_of(metrics))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            why = f"its metrics are damaged ({type(error).__name__}: {str(error)[:200]})"
            found.unreadable.append((name, why))


def _plain_series(run: RunRecords) -> RunRecords:
    """The series without steps and values that no run of ours writes."""

    def is_value(value: Any) -> bool:
        if isinstance(value, int):
            return value.bit_length() < 1000
        return isinstance(value, float | str)

    series = {
        str(name): {
            step: value
            for step, value in points.items()
            if type(step) is int and abs(step) < 2**62 and is_value(value)
        }
        for name, points in run.series.items()
    }
    return dataclasses.replace(run, series={name: one for name, one in series.items() if one})


def _recorded_metrics(path: Path, found: Found) -> list[dict[str, Any]]:
    if path.suffix == ".json":
        metrics = read_json(path, limit=LARGEST_JSON).get("metrics", [])
        return (
            [one for one in metrics if isinstance(one, dict)] if isinstance(metrics, list) else []
        )
    records, bad = read_jsonl(path)
    if bad:
        found.cannot_read(path, f"{bad} lines are no JSON")
    return records
