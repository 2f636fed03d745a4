"""Cuts golden runs from recordings, and records the outputs of one anew.

A golden run is a recording: whole groups of some rollouts, without the engines' replies, without
secrets and paths of the machine, and `golden.json` beside them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import yaml

from slime.config.derive import has_megatron_checkpoint
from slime.config.specs import all_specs
from slime.exceptions import ConfigError, RolloutDataError
from slime.files import atomic, tables
from slime.files.json_values import decode_json, encode_json
from slime.files.jsonl import encode as encode_record
from slime.harness.golden_check import (
    NOTES,
    ORDER,
    Notes,
    check_rollouts,
    read_notes,
    this_machine,
)
from slime.harness.output_paths import require_free
from slime.harness.replay.stages import STAGES
from slime.harness.replay.training import (
    REFERENCE_FOLDER,
    TIMEOUT_S,
    TRAIN_STAGE,
    first_weights,
)
from slime.recording import manifest
from slime.recording.manifest import CRITIC_WEIGHTS_FOLDER, TRAINED_PARTS, WEIGHTS_FOLDER
from slime.recording.reader import RecordedRollout, Recording
from slime.recording.writer import PartWriter

LEFT_OUT_PARTS = ("replies",)  # texts and addresses; no stage reads them
# options that name a folder or a host: a golden run has its own, or needs none
_MODEL_FOLDERS = frozenset(
    "hf_checkpoint load ref_load critic_load opd_teacher_load prompt_data save save_hf".split()
)
_HOSTS = re.compile(r"(_host|_addr|_address|_url|_urls)$|^wandb_")
_SECRET = re.compile(r"secret|password|passwd|credential|api_?key|(access|auth|bearer)_?token")
_REMOVED = "removed"
# texts that say how a sample is judged, scored and trained
_KEPT_TEXTS = frozenset(
    "rm_type source_name invalid_reason status finish_reason weight_versions weight_version_spans "
    "custom_rm_path generate_function_path".split()
)
# options under which the gate and the scorers read no text
WITHOUT_TEXTS = {"gate_compare_text": "off", "gate_text_source": "engine", "rm_type": None}
TEXTS_ARE_GONE = "it reads texts, which --strip-texts removed"


@dataclasses.dataclass(frozen=True)
class Cut:
    """What of a recording becomes a golden run. `rollouts` None: all; `samples`: at most so many of
    each rollout.
    """

    rollouts: Sequence[int] | None = None
    samples: int | None = None
    strip_texts: bool = False


def _silent(text: str) -> None:
    """Tells nobody."""


def cut(
    source: str | Path, out: Path, choice: Cut = Cut(), *, say: Callable[[str], None] = _silent
) -> Recording:
    """Writes a golden run into the new folder `out` and returns it. ConfigError where the folder
    exists, or a rollout has no group that is small enough. `say`: told what is done next.
    """
    recording = Recording(source)
    chosen = list(choice.rollouts or recording.rollouts)
    if out.exists():
        raise ConfigError(f"--out {out} exists. Give a new folder.")
    require_free("--out", out)
    if choice.samples is not None and choice.samples < 1:
        raise ConfigError(f"--samples {choice.samples} must be at least 1.")
    if not chosen:
        raise RolloutDataError(f"{recording.root} has no rollout.")
    rollouts = [recording.rollout(rollout_id) for rollout_id in chosen]
    problems = []
    for one in rollouts:
        say(f"verifying rollout {one.rollout_id}")
        problems += one.problems()
    if problems:
        raise RolloutDataError("\n".join(problems))
    with atomic.new_folder(out) as building:
        for number in sorted({one.run for one in rollouts}):
            changes = WITHOUT_TEXTS if choice.strip_texts else {}
            record = cleaned_record(
                recording.run_record(number), recording.recorded_yaml(number), changes
            )
            text = orjson.dumps(record, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
            atomic.write_bytes(manifest.run_path(building, number), text)
        _copy_tokenizer(recording, building)
        for one in rollouts:
            say(f"cutting rollout {one.rollout_id}")
            with tempfile.TemporaryDirectory(prefix="slime-golden-") as scratch:
                _write_rollout(one, building, _changed_files(one, choice, Path(scratch)), choice)
        _copy_reference(recording, rollouts, building)
        if choice.samples is not None:
            _forget_untrained(Recording(building))
            remake(Recording(building), timeout_s=TIMEOUT_S, say=say)
        elif choice.strip_texts:
            stages = _stages_of_texts(building)
            remake(Recording(building), timeout_s=TIMEOUT_S, stages=stages, say=say)
        _write_notes(building, strip_texts=choice.strip_texts, say=say)
    return Recording(out)


def _stages_of_texts(root: Path) -> list[str]:
    """The stages whose outputs hold or count texts, after those are gone: always the metrics, and
    the gate where no verdict depends on a text.
    """
    recording = Recording(root)
    with tempfile.TemporaryDirectory(prefix="slime-golden-", ignore_cleanup_errors=True) as folder:
        checks = list(
            check_rollouts(
                recording,
                rollouts=recording.rollouts,
                stages=["gate"],
                words=(),
                folder=Path(folder),
                tolerance=None,
                timeout_s=TIMEOUT_S,
            )
        )
    differing = {field.field for one in checks for field in one.result.differing}
    return ["gate", "metrics"] if differing <= {"detail", "changes"} else ["metrics"]


def _write_notes(root: Path, *, strip_texts: bool, say: Callable[[str], None] = _silent) -> None:
    """Runs every stage once, to note what a check must find again."""
    recording = Recording(root)
    parts: dict[int, dict[str, list[str]]] = {}
    left_out: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="slime-golden-", ignore_cleanup_errors=True) as folder:
        for one in check_rollouts(
            recording,
            rollouts=recording.rollouts,
            stages=STAGES,
            words=(),
            folder=Path(folder),
            tolerance=None,
            timeout_s=TIMEOUT_S,
        ):
            say(f"checked the stage {one.stage} of rollout {one.rollout_id}")
            parts.setdefault(one.rollout_id, {})[one.stage] = list(one.parts)
            if strip_texts and not one.result.identical:
                left_out[one.stage] = TEXTS_ARE_GONE
    for rollout_id in recording.rollouts:
        rollout = recording.rollout(rollout_id)
        trained = [name for name in ("columns", "schedule", *TRAINED_PARTS) if name in rollout]
        if not has_megatron_checkpoint(str(rollout.folder / WEIGHTS_FOLDER)):
            left_out[TRAIN_STAGE] = "the recording has no weights (--record-weights)"
        elif _has_reference(rollout) and first_weights(recording) is None:
            left_out[TRAIN_STAGE] = "the recording has no weights of the reference"
        else:
            parts[rollout_id][TRAIN_STAGE] = trained
    notes = Notes(parts, left_out, this_machine())
    text = orjson.dumps(notes.to_json(), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
    atomic.write_bytes(root / NOTES, text)


def _has_reference(rollout: RecordedRollout) -> bool:
    options = rollout.options()
    return bool(options.use_kl_loss or options.kl_coef)


def _copy_reference(
    recording: Recording, rollouts: Sequence[RecordedRollout], target: Path
) -> None:
    """Keeps the weights of the reference, which are those before the first rollout."""
    weights = first_weights(recording)
    is_in = weights is None or any(one.rollout_id == 0 for one in rollouts)
    if weights is not None and not is_in and any(map(_has_reference, rollouts)):
        shutil.copytree(weights, target / REFERENCE_FOLDER)


# --- one rollout ----------------------------------------------------------------------------------


def _changed_files(rollout: RecordedRollout, choice: Cut, scratch: Path) -> dict[str, Path]:
    """The files of the parts that a golden run has; those that are cut or stripped lie in
    `scratch`.
    """
    files = {name: rollout.path(name) for name in rollout.parts if name not in LEFT_OUT_PARTS}
    if choice.samples is not None:
        files = _cut_samples(rollout, files, choice.samples, scratch)
    if choice.strip_texts and "samples" in files:
        table = tables.read_table(files["samples"], what="samples part of a recording")
        path = scratch / "stripped.parquet"
        tables.write_table(path, _without_texts(table))
        files["samples"] = path
    return files


def _write_rollout(
    rollout: RecordedRollout, root: Path, files: Mapping[str, Path], choice: Cut
) -> None:
    """Writes the parts and their manifests through the recording's own writer."""
    for name, old in rollout.manifests.items():
        own = {part: path for part, path in files.items() if manifest.PARTS[part][1] == name}
        if not own:
            continue
        writer = PartWriter(root, name, run=old.run)
        writer.begin(old.rollout_id, evaluation=old.evaluation)
        for part, path in own.items():
            writer.add(part, _copier(path, rollout.parts[part].num_rows))
        writer.finish(**old.facts)
        writer.close()
        if writer.failed:
            raise RolloutDataError(f"The golden run could not be written below {root}.")
    target = manifest.rollout_folder(root, rollout.rollout_id)
    for name in (WEIGHTS_FOLDER, CRITIC_WEIGHTS_FOLDER):
        if has_megatron_checkpoint(str(rollout.folder / name)):
            shutil.copytree(rollout.folder / name, target / name)


def _copier(source: Path, num_rows: int | None) -> Callable[[Path], int | None]:
    def write(path: Path) -> int | None:
        shutil.copyfile(source, path)
        if tables.is_table(source):
            return tables.TableFile(source).num_rows
        return num_rows

    return write


def put_part(folder: Path, name: str, source: Path) -> None:
    """Replaces a part of a recorded rollout, or adds it, and lists it as it is now."""
    file, writer = manifest.PARTS[name]
    listed = manifest.read_manifest(folder, writer)
    if listed is None:
        raise RolloutDataError(f"{folder} has no manifest of the {writer} writer.")
    copy = _copier(source, _lines_of(source))
    with atomic.replacing(folder / file) as temporary:
        num_rows = copy(temporary)
        size, digest = temporary.stat().st_size, manifest.file_hash(temporary)
    listed.parts[name] = manifest.Part(name, file, size, digest, manifest.SCHEMAS[name], num_rows)
    manifest.write_manifest(folder, listed)


def _lines_of(path: Path) -> int | None:
    return path.read_bytes().count(b"\n") if path.suffix == ".jsonl" else None


def _cut_samples(
    rollout: RecordedRollout, files: Mapping[str, Path], limit: int, scratch: Path
) -> dict[str, Path]:
    """Files of the first whole groups with at most `limit` samples. What follows from all samples
    at once is made again later.
    """
    import pyarrow

    table = rollout.table("samples")
    rows = _rows_of_groups(table["group_index"].to_pylist(), limit)
    if not rows:
        raise ConfigError(
            f"--samples {limit} is less than the first group of rollout {rollout.rollout_id} has."
        )
    place_of = {row: place for place, row in enumerate(rows)}
    kept = table.take(pyarrow.array(rows))
    number = kept.column_names.index("raw_row")
    kept = kept.set_column(number, "raw_row", pyarrow.array(range(len(rows)), pyarrow.int64()))
    found = {"samples": scratch / "samples.parquet"}
    tables.write_table(found["samples"], kept)
    if "columns" in files:
        columns = rollout.table("columns")
        sources = columns["raw_row"].to_pylist()
        places = [place for place, row in enumerate(sources) if row in place_of]
        columns = columns.take(pyarrow.array(places, pyarrow.int64()))
        new = {
            "raw_row": np.array([place_of[sources[place]] for place in places], dtype=np.int64),
            "position": np.arange(len(places), dtype=np.int64),
        }
        for name, values in new.items():
            place = columns.column_names.index(name)
            columns = columns.set_column(place, columns.field(name), pyarrow.array(values))
        found["columns"] = scratch / "columns.parquet"
        tables.write_table(found["columns"], columns)
    if "gate" in files:
        state = rollout.json("gate").get("state", {})
        found["gate"] = scratch / "gate.json"
        found["gate"].write_bytes(encode_record({"state": state, "num_samples": len(rows)}))
    if "rollout" in files:
        found["rollout"] = scratch / "rollout.json"
        found["rollout"].write_bytes(encode_record(_without_values(rollout.json("rollout"))))
    for name in TRAINED_PARTS:  # so that the manifest of the ranks exists; made again later
        if name in files:
            found[name] = files[name]
    if "schedule" in files:
        found["schedule"] = files["schedule"]
    return found


def _rows_of_groups(groups: Sequence[Any], limit: int) -> list[int]:
    """The rows of the first whole groups, in order, with at most `limit` rows in all."""
    rows_of: dict[Any, list[int]] = {}
    for row, group in enumerate(groups):
        rows_of.setdefault(("row", row) if group is None else group, []).append(row)
    rows: list[int] = []
    for own in rows_of.values():
        if len(rows) + len(own) <= limit:
            rows += own
    return sorted(rows)


def _without_values(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record of a rollout whose samples are cut: metrics whose value is not known yet."""
    metrics = [
        {**one, "metrics": dict.fromkeys(one["metrics"])} for one in record.get("metrics", [])
    ]
    return {**{key: value for key, value in record.items() if key != "split"}, "metrics": metrics}


# --- outputs made again ---------------------------------------------------------------------------


@contextlib.contextmanager
def renewed(
    recording: Recording, *, timeout_s: float
) -> Iterator[tuple[list[str], Callable[[], None]]]:
    """(the stages that an update is about, a function that replaces the outputs of the golden run by
    those of this code). Inputs stay as they are: samples, their rewards where no scorer of ours
    gave them, texts, weights, options.
    """
    notes = read_notes(recording.root)
    trains = all(
        has_megatron_checkpoint(str(recording.rollout(number).folder / WEIGHTS_FOLDER))
        for number in recording.rollouts
    )
    stages = [*STAGES, TRAIN_STAGE] if trains else list(STAGES)

    def replace() -> None:
        root = recording.root
        place = Path(tempfile.mkdtemp(prefix=f".{root.name}-", dir=root.resolve().parent))
        try:
            work, old = place / "new", place / "old"
            shutil.copytree(root, work)
            remake(Recording(work), timeout_s=timeout_s)
            _write_notes(work, strip_texts=TEXTS_ARE_GONE in notes.left_out.values())
            root.rename(old)
            work.rename(root)
        finally:
            shutil.rmtree(place, ignore_errors=True)

    yield stages, replace


def remake(
    recording: Recording,
    *,
    timeout_s: float,
    stages: Sequence[str] = ORDER,
    say: Callable[[str], None] = _silent,
) -> None:
    """Runs the stages on what the stage before it made, and puts what they make into the
    recording.
    """
    left_out = read_notes(recording.root).left_out
    for stage in stages:
        if stage in left_out:
            continue
        for rollout_id in recording.rollouts:
            rollout = recording.rollout(rollout_id)
            weights = rollout.folder / WEIGHTS_FOLDER
            if stage == TRAIN_STAGE and not has_megatron_checkpoint(str(weights)):
                continue
            say(f"making the stage {stage} of rollout {rollout_id} again")
            with tempfile.TemporaryDirectory(prefix="slime-golden-") as folder:
                (one,) = check_rollouts(
                    recording,
                    rollouts=[rollout_id],
                    stages=[stage],
                    words=(),
                    folder=Path(folder),
                    tolerance=None,
                    timeout_s=timeout_s,
                )
                if one.made is None or one.made.failed:
                    raise RolloutDataError(
                        f"Rollout {rollout_id}: the stage {stage} could not be run: "
                        f"{one.result.fields[0].first and one.result.fields[0].first.b}"
                    )
                for name in one.parts:
                    if stage != TRAIN_STAGE or name in TRAINED_PARTS:
                        put_part(rollout.folder, name, one.made.folder / manifest.PARTS[name][0])
    for rollout_id in recording.rollouts:
        _drop_unknown(recording.rollout(rollout_id))


def _forget_untrained(recording: Recording) -> None:
    """Takes what training computed of all samples out of rollouts that cannot be trained again."""
    for rollout_id in recording.rollouts:
        folder = recording.rollout(rollout_id).folder
        if has_megatron_checkpoint(str(folder / WEIGHTS_FOLDER)):
            continue
        for writer in (manifest.TRAIN, manifest.CRITIC):
            listed = manifest.read_manifest(folder, writer)
            if listed is not None:
                manifest.manifest_path(folder, writer).unlink()
                for part in listed.parts.values():
                    (folder / part.file).unlink()


def _drop_unknown(rollout: RecordedRollout) -> None:
    """Leaves out metrics of cut samples that no stage makes."""
    if "rollout" not in rollout:
        return
    record = rollout.json("rollout")
    metrics = [
        {**one, "metrics": {k: v for k, v in one["metrics"].items() if v is not None}}
        for one in record.get("metrics", [])
    ]
    if metrics == record.get("metrics"):
        return
    with tempfile.TemporaryDirectory(prefix="slime-golden-") as scratch:
        path = Path(scratch) / "rollout.json"
        path.write_bytes(encode_record({**record, "metrics": metrics}))
        put_part(rollout.folder, "rollout", path)


# --- what must not leave the machine --------------------------------------------------------------


def cleaned_record(
    record: Mapping[str, Any], content: Mapping[str, Any], changes: Mapping[str, Any]
) -> dict[str, Any]:
    """A run record, whose `options_yaml` holds `content`, without secrets, hosts, paths of the
    machine, and the command line. `changes`: options that it gets.
    """
    specs = {spec.name: spec for spec in all_specs()}

    def cleaned(values: Mapping[str, Any]) -> dict[str, Any]:
        found = {}
        for name, value in values.items():
            spec = specs.get(name)
            if _SECRET.search(name) or (spec is not None and spec.is_secret):
                continue
            is_host = _HOSTS.search(name) is not None and value is not None
            found[name] = (spec and spec.default) if is_host else _cleaned(name, value)
        return found

    return {
        **record,
        "time": 0,
        "command": [],
        "options": {**cleaned(record["options"]), **changes},
        "options_yaml": yaml.safe_dump({**cleaned(content), **changes}, sort_keys=False),
    }


def _cleaned(name: str, value: Any) -> Any:
    if isinstance(value, str):
        is_path = value.startswith(("/", "~")) or name in _MODEL_FOLDERS
        return f"{_REMOVED}/{Path(value).name}" if is_path and value else value
    if isinstance(value, list):
        return [_cleaned(name, entry) for entry in value]
    if isinstance(value, dict):
        return {key: _cleaned("", entry) for key, entry in value.items()}
    return value


def _copy_tokenizer(recording: Recording, target: Path) -> None:
    folder = recording.tokenizer_folder
    if folder is None:
        return
    (target / manifest.TOKENIZER_FOLDER).mkdir()
    for path in sorted(folder.iterdir()):
        if not path.is_file() or path.is_symlink():
            continue
        content = path.read_bytes()
        if path.suffix == ".json" and b'"_name_or_path"' in content:
            fields = orjson.loads(content)
            fields.pop("_name_or_path", None)
            content = orjson.dumps(fields, option=orjson.OPT_INDENT_2)
        atomic.write_bytes(target / manifest.TOKENIZER_FOLDER / path.name, content)


def _without_texts(table: Any) -> Any:
    """The samples part with a placeholder in place of every text."""
    import pyarrow

    indices = table["index"].to_pylist()
    groups = table["group_index"].to_pylist()
    fresh: dict[str, list[str | None]] = {
        "prompt": [f"prompt {group}" for group in groups],
        "response": [
            f"response {index}" if text else text
            for index, text in zip(indices, table["response"].to_pylist(), strict=True)
        ],
    }
    for name in ("label", "metadata", "rest", "changes"):
        fresh[name] = [
            None
            if text is None
            else encode_json(_placeholders(decode_json(text.encode()))).decode()
            for text in table[name].to_pylist()
        ]
    fresh["engine_text"] = [None] * len(table)
    fresh["detail"] = [text and "text" for text in table["detail"].to_pylist()]
    for name, texts in fresh.items():
        place = table.column_names.index(name)
        column = pyarrow.array(texts, pyarrow.large_string())
        table = table.set_column(place, table.field(name), column)
    return table


def _placeholders(value: Any, key: str = "") -> Any:
    if isinstance(value, str):
        return value if key in _KEPT_TEXTS or not value else "text"
    if isinstance(value, list):
        return [_placeholders(entry, key) for entry in value]
    if isinstance(value, dict):
        own = key if key in _KEPT_TEXTS else ""
        return {name: _placeholders(entry, own or str(name)) for name, entry in value.items()}
    return value
