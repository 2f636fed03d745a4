"""The samples of one rollout as a table: a column of numbers or texts per fact, texts and token
columns on demand. A recorded rollout, a snapshot of the gate and a rollout dump have the same columns.
"""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from slime.exceptions import ConfigError, RolloutDataError
from slime.files import tables
from slime.files.json_values import decode_json
from slime.files.rollout_dump import read_rollout_dump
from slime.files.sample_table import sample_table
from slime.recording import manifest
from slime.view.catalog import RolloutRef
from slime.view.foreign import foreign_table

if TYPE_CHECKING:
    import pyarrow

SMALL_PART = 32 << 20  # bytes of a part whose hash is compared before it is read
LARGEST_TEXTS = 256 << 20  # bytes of texts that are kept in memory
LARGEST_DUMP = 512 << 20
EXCERPT = 160
FEW_GROUPS = 3  # row groups that are read for some rows, rather than all texts
# column -> (unit, what it is)
NUMBERS = {
    "row": ("", "row of the samples part; the address of a sample"),
    "index": ("", "Sample.index"),
    "group": ("", "Sample.group_index: samples of one prompt"),
    "reward": ("", "reward, as scored"),
    "normalized": ("", "reward after group normalization, as it trained"),
    "length": ("tokens", "tokens of the response"),
    "rank": ("", "data-parallel rank that trained it"),
    "step": ("", "optimizer step of the rollout"),
    "micro_batch": ("", "micro-batch of the rank"),
    "gap": ("nats", "mean |trainer - engine| log-prob of its trained tokens"),
    "advantage": ("", "mean advantage of its trained tokens"),
}
TEXTS = {
    "status": "completed, truncated, aborted, failed",
    "verdict": "trained, kept, or why it was dropped",
    "detail": "what the gate's check found",
    "source": "source of the prompt",
    "versions": "weight versions that sampled it",
    "finish": "finish reason of the engine",
    "label": "the label",
}
LONG = ("prompt", "response")
TOKEN_STATISTICS = ("gap", "advantage")


class NotReady(ConfigError):
    """Of a large rollout, something that is being read; soon it is there."""


class RolloutTable:
    """One rollout. For any thread. `notes`: what is missing or damaged, a sentence each."""

    def __init__(self, ref: RolloutRef, background: ThreadPoolExecutor) -> None:
        """`RolloutDataError` where there are no samples that can be read."""
        self.ref = ref
        self.notes: list[str] = []
        self.is_wanted = True  # nobody asks for it any more: what is prepared can be left
        self.is_preparing = False
        self._lock = threading.RLock()
        self._waiting: set[str] = set()  # parts whose hashes are being compared
        self._readers: dict[str, tables.RowReader] = {}
        self._texts: dict[str, pyarrow.ChunkedArray] = {}
        self._statistics: dict[str, np.ndarray] | None = None
        self._dump: pyarrow.Table | None = None
        self._open(background)
        self.num_rows = self._num_rows()
        if "trained" not in self.parts and "schedule" not in self.parts and ref.kind == "recorded":
            self.notes.append("it has no schedule: the run ended before it was split over ranks")

    def _open(self, background: ThreadPoolExecutor) -> None:
        ref = self.ref
        if ref.kind == "foreign":
            self._dump, notes = foreign_table(ref.path)
            self.notes += notes
            return
        if ref.kind == "dump" and ref.path.suffix != ".parquet":
            if ref.path.stat().st_size > LARGEST_DUMP:
                raise RolloutDataError(f"{ref.path} has more than {LARGEST_DUMP:,} bytes.")
            self._dump = sample_table(read_rollout_dump(ref.path), describe=True)
            return
        for name, path in self._files().items():
            try:
                is_verified = self._check(name, path)
                self._readers[name] = tables.RowReader(
                    path, what=f"{name} part", is_verified=is_verified
                )
            except (RolloutDataError, OSError) as error:
                self.notes.append(str(error)[:600])
        if "samples" not in self._readers:
            raise RolloutDataError("; ".join(self.notes) or f"{ref.path} has no samples part yet.")
        if self._waiting:
            self.is_preparing = True
            background.submit(self._prepare)

    def _files(self) -> dict[str, Path]:
        path = self.ref.path
        if self.ref.kind == "recorded":
            found = {}
            for writer in manifest.WRITERS:
                try:
                    listed = manifest.read_manifest(path, writer)
                except RolloutDataError as error:
                    self.notes.append(str(error)[:600])
                    continue
                if listed is not None:
                    self._listed(listed)
                    found.update({name: path / part.file for name, part in listed.parts.items()})
            return {
                name: found[name]
                for name in ("samples", "columns", "schedule", "train")
                if name in found
            }
        if self.ref.kind == "snapshot":
            place = path.with_name(path.name.replace("raw_", "place_"))
            return {"samples": path} | ({"schedule": place} if place.is_file() else {})
        trained = path.parent.parent / "train_data" / path.name
        is_there = trained.is_file() and not trained.is_symlink()
        return {"samples": path} | ({"train": trained} if is_there else {})

    def _listed(self, listed: manifest.Manifest) -> None:
        if not hasattr(self, "_parts"):
            self._parts: dict[str, manifest.Part] = {}
        self._parts.update(listed.parts)
        if not listed.facts.get("complete"):
            self.notes.append(
                f"the {listed.writer} writer has not completed it: the run goes on, or ended early"
            )

    def _check(self, name: str, path: Path) -> bool:
        """Holds a part against its manifest: a large one later, while it is read. Returns whether
        its bytes are known to be those that were written.
        """
        if self.ref.kind != "recorded":
            if path.is_symlink():
                raise RolloutDataError(f"{path} is a link; samples are files.")
            return False
        part, folder = self._parts[name], self.ref.path
        is_small = part.num_bytes <= SMALL_PART
        problem = manifest.verify_part(folder, part, hashes=is_small)
        if problem is not None:
            raise RolloutDataError(problem)
        if not is_small:
            self._waiting.add(name)
        return is_small

    def _prepare(self) -> None:
        """Holds large parts against their hashes, and reads, beside the pages, what a reader is
        likely to ask for next.
        """
        try:
            self._compare_hash("samples")
            for name in LONG if self.is_wanted else ():
                self._keep_texts(name, self._alone("samples"))
            self._compare_hash("train")
            if self.is_wanted and "train" in self._readers:
                self._statistics = self._make_statistics(self._alone("train"))
            for name in sorted(self._waiting):
                self._compare_hash(name)
        except (RolloutDataError, OSError) as error:
            self.notes.append(str(error)[:600])
        finally:
            self.is_preparing = False

    def _compare_hash(self, name: str) -> None:
        """Of a part that was not compared when it was opened. From then on it is read without the
        checksums of its pages.
        """
        if name not in self._waiting or not self.is_wanted:
            return
        try:
            problem = manifest.verify_part(self.ref.path, self._parts[name])
            if problem is None:
                reader = self._alone(name)
                with self._lock:
                    self._readers[name] = reader
            else:
                self.notes.append(problem)
        finally:
            self._waiting.discard(name)

    def _alone(self, part: str) -> tables.RowReader:
        """A reader for one thread beside those of the pages."""
        path = self._readers[part].path
        return tables.RowReader(path, what=f"{part} part", is_verified=True)

    @property
    def problems(self) -> list[str]:
        """`notes`, and what the checks of large parts have found until now."""
        waiting = ", ".join(sorted(self._waiting))
        return [*self.notes, *([f"being compared with their hashes: {waiting}"] if waiting else [])]

    @property
    def parts(self) -> list[str]:
        """The parts that are there."""
        return list(self._readers) or ["samples"]

    @property
    def num_bytes(self) -> int:
        """Memory that its columns take, about."""
        kept = [value for name, value in self.__dict__.items() if isinstance(value, np.ndarray)]
        return sum(one.nbytes for one in kept) + sum(one.nbytes for one in self._texts.values())

    # --- reading ----------------------------------------------------------------------------------

    def _num_rows(self) -> int:
        return len(self._dump) if self._dump is not None else self._readers["samples"].num_rows

    def _names(self, part: str) -> list[str]:
        if part == "samples" and self._dump is not None:
            return list(self._dump.column_names)
        return list(self._readers[part].schema.names) if part in self._readers else []

    def _read(self, part: str, names: Sequence[str]) -> pyarrow.Table:
        known = [name for name in names if name in self._names(part)]
        if part == "samples" and self._dump is not None:
            return self._dump.select(known)
        with self._lock:
            return self._readers[part].read(known)

    def _rows(self, part: str, rows: Sequence[int], names: Sequence[str]) -> dict[str, list[Any]]:
        known = [name for name in names if name in self._names(part)]
        if part == "samples" and self._dump is not None:
            return self._dump.select(known).take(list(rows)).to_pydict()
        with self._lock:
            return self._readers[part].rows(rows, known).to_pydict()

    # --- columns ----------------------------------------------------------------------------------

    @functools.cached_property
    def _plain(self) -> dict[str, list[Any]]:
        names = (
            "index", "group_index", "response_length", "status", "finish_reason", "reward",
            "label", "weight_versions", "metadata", "valid", "reason", "detail", "dropped",
            "dropped_by",
        )  # fmt: skip
        return self._read("samples", names).to_pydict()

    @functools.cached_property
    def position_of_row(self) -> np.ndarray:
        """The place in the batch of each row of the samples, -1 of one that was not handed on."""
        places = np.full(self.num_rows, -1, dtype=np.int64)
        for part in ("columns", "schedule"):
            if "raw_row" in self._names(part):
                rows = tables.numbers_of(self._read(part, ["raw_row"])["raw_row"]).astype(np.int64)
                fitting = (rows >= 0) & (rows < self.num_rows)
                # of several rows made of one sample the first is shown
                places[rows[fitting][::-1]] = np.flatnonzero(fitting)[::-1]
                return places
        if "train" in self._readers:  # a dump: its rows are the batch
            count = min(self.num_rows, self._readers["train"].num_rows)
            places[:count] = np.arange(count)
        return places

    def _by_position(self, part: str, name: str) -> np.ndarray:
        """A number of the batch by row of the samples, NaN where it has none."""
        found = np.full(self.num_rows, np.nan)
        if name not in self._names(part):
            return found
        values = self._read(part, [name])[name].to_pylist()
        numbers = np.array([np.nan if one is None else float(one) for one in values])
        places = self.position_of_row
        known = (places >= 0) & (places < len(numbers))
        found[known] = numbers[places[known]]
        return found

    @functools.cached_property
    def _columns(self) -> dict[str, np.ndarray]:
        plain, count = self._plain, self.num_rows

        def numbers(name: str) -> np.ndarray:
            values = plain.get(name) or [None] * count
            return np.array([np.nan if one is None else float(one) for one in values])

        columns = {
            "row": np.arange(count, dtype=np.float64),
            "index": numbers("index"),
            "group": numbers("group_index"),
            "reward": np.array([_reward(one) for one in plain.get("reward") or [None] * count]),
            "normalized": self._own_numbers("normalized")
            if "normalized" in self._names("samples")
            else self._by_position("columns" if "columns" in self._readers else "train", "rewards"),
            "length": numbers("response_length"),
        }
        of = "schedule" if "schedule" in self._readers else "train"
        for name, column in (("rank", "dp_rank"), ("step", "step"), ("micro_batch", "micro_batch")):
            values = self._by_position(of, column)
            columns[name] = np.where(values < 0, np.nan, values)
        texts = {
            "status": plain.get("status"),
            "finish": plain.get("finish_reason"),
            "detail": plain.get("detail"),
            "versions": [_versions(one) for one in plain.get("weight_versions") or []],
            "source": [_source(one) for one in plain.get("metadata") or []],
            "label": [_short_json(one) for one in plain.get("label") or []],
            "verdict": self._verdicts(columns["rank"]),
        }
        for name, entries in texts.items():
            filled = ["" if one is None else str(one) for one in entries or [""] * count]
            columns[name] = np.array(filled, dtype=object)
        return columns

    def _own_numbers(self, name: str) -> np.ndarray:
        """A column of numbers of the samples themselves."""
        values = self._read("samples", [name])[name].to_pylist()
        return np.array([np.nan if one is None else float(one) for one in values])

    def _verdicts(self, rank_N: np.ndarray) -> list[str]:
        plain, found = self._plain, []
        split = "schedule" in self._readers or "train" in self._readers
        if self.ref.kind == "foreign":
            return [""] * self.num_rows
        nothing = [None] * self.num_rows
        valid, reasons, dropped, before = (
            plain.get(name) or nothing for name in ("valid", "reason", "dropped", "dropped_by")
        )
        for row in range(self.num_rows):
            if before[row] is not None:
                found.append(f"before the gate: {before[row]}")
            elif dropped[row]:
                found.append(f"gate: {reasons[row] or 'rejected'}")
            elif not split:
                found.append("kept" if valid[row] in (None, True) else f"kept: {reasons[row]}")
            elif np.isnan(rank_N[row]):
                found.append("not trained" + (f": {reasons[row]}" if reasons[row] else ""))
            else:
                found.append("trained" + (f": {reasons[row]}" if reasons[row] else ""))
        return found

    def _token_statistics(self) -> dict[str, np.ndarray]:
        if self._statistics is None:
            if self.is_preparing:
                raise NotReady("gap and advantage of each sample are being computed")
            self._statistics = self._make_statistics(self._readers.get("train"))
        return self._statistics

    def _make_statistics(self, reader: tables.RowReader | None) -> dict[str, np.ndarray]:
        """Mean gap and advantage of each sample's trained tokens; NaN where there is none."""
        found = {name: np.full(self.num_rows, np.nan) for name in TOKEN_STATISTICS}
        if reader is None or "loss_masks" not in reader:
            return found
        columns = ("loss_masks", "log_probs", "rollout_log_probs", "advantages")
        by_place = {name: np.full(reader.num_rows, np.nan) for name in found}
        for first, table in reader.groups([name for name in columns if name in reader]):
            flat = {name: tables.lists_of(table[name])[:2] for name in table.column_names}
            mask, offsets = flat.pop("loss_masks")
            fitting = {name: one[0] for name, one in flat.items() if len(one[0]) == len(mask)}
            gap = None
            if {"log_probs", "rollout_log_probs"} <= fitting.keys():
                gap = np.abs(fitting["log_probs"] - fitting["rollout_log_probs"])
            for name, values in (("gap", gap), ("advantage", fitting.get("advantages"))):
                if values is not None:
                    means = _means(values, mask != 0, offsets)
                    by_place[name][first : first + len(means)] = means
        places = self.position_of_row
        known = (places >= 0) & (places < reader.num_rows)
        for name in found:
            found[name][known] = by_place[name][places[known]]
        return found

    @property
    def column_names(self) -> list[str]:
        """The columns that this rollout has."""
        with self._lock:
            shown = [
                name
                for name, values in self._columns.items()
                if name in ("row", "index", "group", "length")
                or (
                    any(map(bool, values.tolist()))
                    if values.dtype == object
                    else bool((values == values).any())
                )
            ]
        has_train = "log_probs" in self._names("train")
        return shown + (list(TOKEN_STATISTICS) if has_train else [])

    def column(self, name: str) -> np.ndarray:
        """A column [N]: float64 with NaN, or texts. KeyError for another name, `NotReady` while it
        is being computed.
        """
        with self._lock:
            if name in TOKEN_STATISTICS:
                return self._token_statistics()[name]
            if name in LONG:
                return np.array(self.long_texts(name).to_pylist(), dtype=object)
            return self._columns[name]

    def has_token_statistics(self) -> bool:
        """Whether they are known, or take no time."""
        part = self._readers.get("train")
        return self._statistics is not None or (
            part is not None and part.path.stat().st_size <= SMALL_PART
        )

    # --- texts ------------------------------------------------------------------------------------

    def long_texts(self, name: str) -> pyarrow.ChunkedArray:
        """Prompts or responses, kept in memory where they fit."""
        import pyarrow

        with self._lock:
            if name in self._texts:
                return self._texts[name]
            if self._dump is not None:
                return self._dump[name]
            if name not in self._names("samples"):
                return pyarrow.chunked_array([pyarrow.array([""] * self.num_rows)])
            return self._keep_texts(name, self._readers["samples"])

    def _keep_texts(self, name: str, reader: tables.RowReader) -> pyarrow.ChunkedArray:
        found = reader.read([name])[name]
        if found.nbytes <= LARGEST_TEXTS:
            self._texts[name] = found
        return found

    def excerpts(self, rows: Sequence[int], name: str) -> list[str]:
        """The beginnings of some rows' texts."""
        return [(one or "")[:EXCERPT] for one in self.texts_of(rows, name)]

    def texts_of(self, rows: Sequence[int], name: str) -> list[str | None]:
        """The texts of some rows: from memory, from their row groups, or all of them are read."""
        import pyarrow
        import pyarrow.compute

        reader = self._readers.get("samples")
        if reader is not None and name in reader and name not in self._texts:
            with self._lock:
                if reader.num_groups_of(rows) <= FEW_GROUPS:
                    return reader.rows(rows, [name])[name].to_pylist()
        places = pyarrow.array(rows, pyarrow.int64())
        return pyarrow.compute.take(self.long_texts(name), places).to_pylist()

    def search(self, text: str) -> np.ndarray:
        """bool [N]: whose prompt, response, label or detail contains the text, whatever its case.
        `NotReady` while the texts are being read.
        """
        import pyarrow.compute

        with self._lock:
            found = np.zeros(self.num_rows, dtype=bool)
            if self.is_preparing and not self._texts.keys() >= set(LONG):
                raise NotReady("the texts are being read")
            for name in LONG:
                matches = pyarrow.compute.match_substring(
                    self.long_texts(name), text, ignore_case=True
                )
                found |= matches.fill_null(False).to_numpy()
            wanted = text.casefold()
            for name in ("label", "detail"):
                values = self._columns[name]
                found |= np.fromiter(
                    (wanted in one.casefold() for one in values), dtype=bool, count=self.num_rows
                )
            return found

    # --- one sample -------------------------------------------------------------------------------

    def sample(self, row: int) -> dict[str, Any]:
        """Every column of a row of the samples. IndexError where there is no such row."""
        if not 0 <= row < self.num_rows:
            raise IndexError(f"{self.ref.title} has {self.num_rows} samples; asked for {row}.")
        found = self._rows("samples", [row], self._names("samples"))
        return {name: values[0] for name, values in found.items()}

    def trained(self, row: int) -> dict[str, Any]:
        """Every field that training had of a row; {} of one that did not train."""
        if self.ref.kind == "foreign":
            values = self._rows("samples", [row], ["trainer_log_probs"]).get("trainer_log_probs")
            return {} if not values or values[0] is None else {"log_probs": values[0]}
        place = int(self.position_of_row[row])
        if place < 0 or "train" not in self._readers:
            return {}
        if place >= self._readers["train"].num_rows:
            return {}
        found = self._rows("train", [place], self._names("train"))
        fields = {name: values[0] for name, values in found.items()}
        rank = fields.get("dp_rank")
        return {} if rank is None or rank < 0 else fields

    def rows_by_reason(self) -> dict[str, list[int]]:
        """The rows of each reason of the gate, also of those that a policy kept."""
        with self._lock:
            reasons = self._plain.get("reason") or []
        found: dict[str, list[int]] = {}
        for row, reason in enumerate(reasons):
            if reason is not None:
                found.setdefault(reason, []).append(row)
        return found

    def total_lengths(self) -> np.ndarray:
        """Tokens of prompt and response [N]."""
        with self._lock:
            if "total_lengths" in self._names("columns"):
                return np.nan_to_num(self._by_position("columns", "total_lengths")).astype(np.int64)
            lengths = np.zeros(self.num_rows, dtype=np.int64)
            if self._dump is not None:
                offsets = tables.lists_of(self._dump["tokens"])[1]
                return np.diff(offsets)
            for first, table in self._readers["samples"].groups(["tokens"]):
                own = np.diff(tables.lists_of(table["tokens"])[1])
                lengths[first : first + len(own)] = own
            return lengths

    def group_rows(self, row: int) -> list[int]:
        """The rows of the sample's group, its own among them."""
        with self._lock:
            groups = self._columns["group"]
        if np.isnan(groups[row]):
            return [row]
        return np.flatnonzero(groups == groups[row]).tolist()


def _means(values: np.ndarray, mask: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """The mean of each list's masked values; NaN where none is."""
    counts = np.diff(np.concatenate(([0], np.cumsum(mask)))[offsets])
    total = np.concatenate(([0.0], np.cumsum(np.where(mask, values, 0.0), dtype=np.float64)))
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.diff(total[offsets]) / counts


def _reward(text: str | None) -> float:
    value = _value(text)
    if isinstance(value, dict):
        named = [value.get(name) for name in ("score", "reward", "total")]
        value = next((one for one in (*named, *value.values()) if _is_number(one)), None)
    return float(value) if _is_number(value) else np.nan


def _is_number(value: object) -> bool:
    return isinstance(value, bool | int | float)


def _value(text: str | None) -> Any:
    if text is None:
        return None
    try:
        return decode_json(text.encode())
    except (ValueError, TypeError, RolloutDataError):
        return text


def _versions(text: str | None) -> str:
    value = _value(text)
    return ", ".join(dict.fromkeys(map(str, value)))[:80] if isinstance(value, list) else ""


def _source(text: str | None) -> str:
    value = _value(text) if text and text != "{}" else None
    return str(value.get("source") or "")[:80] if isinstance(value, dict) else ""


def _short_json(text: str | None) -> str:
    value = _value(text)
    if value is None:
        return ""
    return (value if isinstance(value, str) else json.dumps(value, default=str))[:EXCERPT]
