"""`slime diff A B`: two train dumps, two rollout dumps, or two folders of dumps, compared field by
field.

Samples are matched by their position in the whole rollout batch, so that the layout they were
trained on does not matter. The first difference is named: sample, field, token, and the
data-parallel rank that trained the sample. Exit status 0: identical (within --rtol and --atol), 1:
not.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from slime.data.fields import CONTRACT, Rows
from slime.data.ragged import is_tensor
from slime.exceptions import ConfigError, RolloutDataError
from slime.files.rollout_dump import FORMAT as ROLLOUT_FORMAT
from slime.files.rollout_dump import read_rollout_dump
from slime.files.train_dump import is_train_dump, read_train_dump

# Say where a sample was trained, how long something took or over which connection: two equal runs
# may differ in them.
NOT_COMPARED = ("partition", "owner_ranks", "non_generation_time", "session_id")
# The contract's order: what training is given comes before what it computes from that, so that a
# cause is named before its effect.
FIELD_ORDER = {spec.name: place for place, spec in enumerate(CONTRACT)}


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """Floats a and b are equal when |a - b| <= atol + rtol * max(|a|, |b|). Everything else must be
    identical.
    """

    rtol: float = 0.0
    atol: float = 0.0


@dataclasses.dataclass(frozen=True)
class Records:
    """A dump as samples: by position in the whole batch its fields, and the rank that trained it
    (None: no rank, or not known).
    """

    name: str
    samples: dict[int, dict[str, Any]]
    indices: dict[int, Any]  # Sample.index by position
    ranks: dict[int, int]


@dataclasses.dataclass(frozen=True)
class Difference:
    """One entry of one field of one sample that differs. `path`: where in the field, () for a
    single number.
    """

    position: int
    sample_index: Any
    field: str
    path: tuple[Any, ...]
    a: Any
    b: Any
    rank_a: int | None
    rank_b: int | None

    def __str__(self) -> str:
        ranks = (self.rank_a, self.rank_b)
        where = (
            ""
            if ranks == (None, None)
            else f", data-parallel rank {ranks[0]}"
            + ("" if ranks[0] == ranks[1] else f" in A and {ranks[1]} in B")
        )
        place = "".join(f", {_path_name(self.field, part)}" for part in self.path)
        return (
            f"sample {self.sample_index} (position {self.position}{where}), "
            f"{self.field}{place}: {_short(self.a)} in A, {_short(self.b)} in B"
        )


@dataclasses.dataclass
class FieldCount:
    """What differs in one field: samples, entries, and the largest absolute and relative difference
    of its floats (also within tolerance).
    """

    samples: int = 0
    entries: int = 0
    largest: float = 0.0
    largest_relative: float = 0.0


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The outcome. `first` is the difference at the lowest position; `fields` has every compared
    field.
    """

    num_samples: int
    fields: dict[str, FieldCount]
    first: Difference | None
    only_in_a: list[str]  # fields or samples, as text
    only_in_b: list[str]

    @property
    def identical(self) -> bool:
        return self.first is None and not self.only_in_a and not self.only_in_b

    @property
    def num_differences(self) -> int:
        return (
            sum(count.entries for count in self.fields.values())
            + len(self.only_in_a)
            + len(self.only_in_b)
        )


def _path_name(field: str, part: int | str) -> str:
    spec = CONTRACT.find(field)
    if isinstance(part, int) and spec is not None and spec.rows is Rows.RESPONSE:
        return f"response token {part}"
    return (
        f"token {part}"
        if isinstance(part, int) and spec is not None and spec.rows is Rows.TOTAL
        else f"entry {part!r}"
    )


def _short(value: object) -> str:
    # str() of a numpy number has the digits of its own dtype, and no more
    text = str(value) if isinstance(value, np.generic) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


# --- comparing ------------------------------------------------------------------------------------


def _differences(
    a: object, b: object, tolerance: Tolerance, count: FieldCount
) -> Iterator[tuple[tuple[Any, ...], Any, Any]]:
    """Yields (path, entry of a, entry of b) where they differ, in order; notes in `count` how far
    floats are apart.
    """
    numeric_a, numeric_b = _numeric(a), _numeric(b)
    if numeric_a is not None and numeric_b is not None:
        yield from _numeric_differences(numeric_a, numeric_b, tolerance, count)
    elif isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in dict.fromkeys([*a, *b]):
            if key in a and key in b:
                for path, x, y in _differences(a[key], b[key], tolerance, count):
                    yield (key, *path), x, y
            else:
                yield (key,), a.get(key, "absent"), b.get(key, "absent")
    elif isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
        for index, (entry_a, entry_b) in enumerate(zip(a, b, strict=True)):
            for path, x, y in _differences(entry_a, entry_b, tolerance, count):
                yield (index, *path), x, y
    elif isinstance(a, list | tuple) and isinstance(b, list | tuple):
        yield (), f"{len(a)} entries", f"{len(b)} entries"
    elif a != b:
        yield (), a, b


def _numeric(value: Any) -> np.ndarray | None:
    """Numbers and containers of numbers as an array, None for the rest."""
    if is_tensor(value):
        tensor = value.detach().cpu()
        return (tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor).numpy()
    if isinstance(value, np.ndarray | np.generic | bool | int | float):
        return np.asarray(value)
    if (
        isinstance(value, list)
        and value
        and all(isinstance(entry, bool | int | float) for entry in value)
    ):
        return np.asarray(value)
    return None


def _numeric_differences(
    a: np.ndarray, b: np.ndarray, tolerance: Tolerance, count: FieldCount
) -> Iterator[tuple[tuple[Any, ...], Any, Any]]:
    if a.shape != b.shape:
        yield (), f"shape {list(a.shape)}", f"shape {list(b.shape)}"
        return
    if a.dtype.kind in "biu" and b.dtype.kind in "biu":
        differs = a != b
    else:
        x, y = a.astype(np.float64), b.astype(np.float64)
        with np.errstate(invalid="ignore"):
            apart = np.where((x == y) | (np.isnan(x) & np.isnan(y)), 0.0, np.abs(x - y))
        apart = np.where(np.isnan(apart), np.inf, apart)
        size = np.maximum(np.abs(x), np.abs(y))
        differs = ~(
            apart <= tolerance.atol + tolerance.rtol * np.where(np.isfinite(size), size, 0.0)
        )
        if apart.size:
            count.largest = max(count.largest, float(apart.max()))
            relative = np.divide(
                apart, size, out=np.zeros_like(apart), where=np.isfinite(size) & (size > 0)
            )
            count.largest_relative = max(count.largest_relative, float(relative.max()))
    for place in np.argwhere(differs):
        path = tuple(place.tolist())
        yield path, a[path], b[path]


def compare_records(a: Records, b: Records, *, tolerance: Tolerance = Tolerance()) -> Comparison:
    """Compares two dumps over the samples and fields that both have; what only one
    has is listed.
    """
    fields: dict[str, FieldCount] = {}
    first: Difference | None = None
    only_in_a, only_in_b = _only(a, b), _only(b, a)
    shared = sorted(set(a.samples) & set(b.samples))
    for position in shared:
        sample_a, sample_b = a.samples[position], b.samples[position]
        for name in sorted(sample_a, key=lambda name: FIELD_ORDER.get(name, len(FIELD_ORDER))):
            if name in NOT_COMPARED or name not in sample_b:
                continue
            count = fields.setdefault(name, FieldCount())
            found = list(_differences(sample_a[name], sample_b[name], tolerance, count))
            count.samples += bool(found)
            count.entries += len(found)
            if found and first is None:
                path, x, y = found[0]
                first = Difference(
                    position,
                    a.indices.get(position),
                    name,
                    path,
                    x,
                    y,
                    a.ranks.get(position),
                    b.ranks.get(position),
                )
    return Comparison(len(shared), fields, first, only_in_a, only_in_b)


def _only(a: Records, b: Records) -> list[str]:
    missing = [position for position in a.samples if position not in b.samples]
    words = [f"{len(missing)} samples, the first at position {missing[0]}"] if missing else []
    fields: dict[str, int] = {}
    for position, sample in a.samples.items():
        for name in sample:
            if (
                name not in NOT_COMPARED
                and position in b.samples
                and name not in b.samples[position]
            ):
                fields.setdefault(name, position)
    return words + [f"field {name}" for name in fields]


# --- reading --------------------------------------------------------------------------------------


def read_records(path: Path) -> Records:
    """The samples of a train dump or a rollout dump. `RolloutDataError` for any other file."""
    if is_train_dump(path):
        dump = read_train_dump(path)
        trained = {int(position): i for i, position in enumerate(dump.positions.tolist())}
        samples: dict[int, dict[str, Any]] = {}
        for position in range(dump.num_whole):
            whole = {name: values[position] for name, values in dump.whole_fields.items()}
            samples[position] = dump.sample(trained[position]) if position in trained else whole
        indices = {p: samples[p].get("sample_indices") for p in trained}
        return Records(
            str(path),
            samples,
            _plain(indices),
            dict(zip(trained, dump.owner_ranks.tolist(), strict=True)),
        )
    read = read_rollout_dump(path)
    by_position = {position: sample.to_dict() for position, sample in enumerate(read)}
    return Records(str(path), by_position, {p: sample.index for p, sample in enumerate(read)}, {})


def _plain(values: Mapping[int, Any]) -> dict[int, Any]:
    return {
        key: value.item() if isinstance(value, np.generic) else value
        for key, value in values.items()
    }


def find_dumps(folder: Path) -> list[str]:
    """Names, relative to the folder, of the dumps in it."""
    return sorted(
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and _is_dump(path)
    )


def _is_dump(path: Path) -> bool:
    with open(path, "rb") as file:
        start = file.read(64)
    return (path.suffix == ".safetensors" and start[8:9] == b"{") or start.startswith(
        f'{{"format":"{ROLLOUT_FORMAT}"'.encode()
    )


def compare_paths(a: Path, b: Path, *, tolerance: Tolerance = Tolerance()) -> dict[str, Comparison]:
    """Comparisons by name: one for two files, one per common dump for two folders. A dump that only
    one folder has is a difference.
    """
    for path in (a, b):
        if not path.exists():
            raise RolloutDataError(f"There is no dump at {path}.")
    if a.is_dir() != b.is_dir():
        raise RolloutDataError(
            f"{a} and {b}: one is a folder, the other a file. Give two files, or two folders."
        )
    if not a.is_dir():
        return {"": compare_records(read_records(a), read_records(b), tolerance=tolerance)}
    names_a, names_b = find_dumps(a), find_dumps(b)
    if not names_a and not names_b:
        raise RolloutDataError(f"Neither {a} nor {b} has a dump in it.")
    result = {}
    for name in sorted({*names_a, *names_b}):
        if name in names_a and name in names_b:
            result[name] = compare_records(
                read_records(a / name), read_records(b / name), tolerance=tolerance
            )
        else:
            only = [["this dump"], []] if name in names_a else [[], ["this dump"]]
            result[name] = Comparison(0, {}, None, *only)
    return result


# --- saying it ------------------------------------------------------------------------------------


def describe(
    comparison: Comparison, *, tolerance: Tolerance = Tolerance(), top: int = 10
) -> list[str]:
    """Lines that say whether the dumps are identical, else where they differ first and how much in
    which fields.
    """
    if comparison.identical:
        floats = [
            (count.largest, count.largest_relative, name)
            for name, count in comparison.fields.items()
            if count.largest > 0
        ]
        within = f" within rtol {tolerance.rtol:g}, atol {tolerance.atol:g}" if floats else ""
        lines = [
            (
                f"identical{within}: {len(comparison.fields)} fields x {comparison.num_samples} "
                "samples, 0 differences"
            )
        ]
        if floats:
            largest, relative, name = max(floats)
            lines.append(
                f"largest difference within tolerance: {largest:.3g} (relative {relative:.3g}) in "
                f"{name}"
            )
        return lines
    differing = {name: count for name, count in comparison.fields.items() if count.entries}
    lines = [
        f"different: {len(differing)} of {len(comparison.fields)} fields over "
        f"{comparison.num_samples} samples, "
        f"{comparison.num_differences} differences"
    ]
    if comparison.first is not None:
        lines.append(f"first: {comparison.first}")
    lines += [
        f"only in {side}: {text}"
        for side, texts in (("A", comparison.only_in_a), ("B", comparison.only_in_b))
        for text in texts
    ]
    ranked = sorted(differing.items(), key=lambda item: -item[1].entries)
    for name, count in ranked[:top]:
        size = (
            f", largest {count.largest:.3g} (relative {count.largest_relative:.3g})"
            if count.largest
            else ""
        )
        lines.append(f"  {name}: {count.entries} entries in {count.samples} samples{size}")
    if len(ranked) > top:
        lines.append(f"  and {len(ranked) - top} more fields")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Compares and prints; returns 0 for identical dumps, 1 for others."""
    parser = argparse.ArgumentParser(
        prog="slime diff", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("a", type=Path, help="Train dump, rollout dump, or folder of dumps.")
    parser.add_argument("b", type=Path, help="What A is compared with.")
    parser.add_argument(
        "--rtol",
        type=float,
        default=0.0,
        help="Relative tolerance of floats. Two layouts sum in different orders: 1e-4.",
    )
    parser.add_argument("--atol", type=float, default=0.0, help="Absolute tolerance of floats.")
    parser.add_argument("--top", type=int, default=10, help="Differing fields that are listed.")
    parser.add_argument("--json", action="store_true", help="Print one JSON object.")
    options = parser.parse_args(argv)
    if options.rtol < 0 or options.atol < 0:
        raise ConfigError(f"--rtol {options.rtol} and --atol {options.atol} must not be negative.")
    tolerance = Tolerance(options.rtol, options.atol)
    comparisons = compare_paths(options.a, options.b, tolerance=tolerance)
    if options.json:
        print(
            json.dumps(
                {name: _as_json(comparison) for name, comparison in comparisons.items()},
                default=str,
            )
        )
    else:
        for name, comparison in comparisons.items():
            print(
                *([f"{name}:"] if name else []),
                *describe(comparison, tolerance=tolerance, top=options.top),
                sep="\n",
            )
    return 0 if all(comparison.identical for comparison in comparisons.values()) else 1


def _as_json(comparison: Comparison) -> dict[str, Any]:
    first = (
        None
        if comparison.first is None
        else {**dataclasses.asdict(comparison.first), "text": str(comparison.first)}
    )
    if first is not None:
        first["a"], first["b"] = (_short(first[side]) for side in ("a", "b"))
    return {
        "identical": comparison.identical,
        "num_samples": comparison.num_samples,
        "num_differences": comparison.num_differences,
        "first": first,
        "fields": {name: dataclasses.asdict(count) for name, count in comparison.fields.items()},
        "only_in_a": comparison.only_in_a,
        "only_in_b": comparison.only_in_b,
    }


if __name__ == "__main__":
    sys.exit(main())
