"""Dumps of slime, upstream's, miles' and ours: rollout dumps and train dumps.

A rollout dump holds `Sample.to_dict()` of every sample; a train dump what a rank, or all of them,
computed. `join` puts the second beside the first, sample by sample.
"""

from __future__ import annotations

import collections
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from slime.data.weight_versions import parse_weight_version
from slime.exceptions import RolloutDataError
from slime.files.json_values import decode_values
from slime.files.rollout_dump import FORMAT
from slime.files.train_dump import FORMAT as TRAIN_FORMAT
from slime.files.train_dump import read_train_dump
from slime.harness.audit.json_lines import read_objects
from slime.harness.audit.shapes import (
    Part,
    ReadOptions,
    Shape,
    is_evaluation_name,
    open_regular,
    step_in_name,
)
from slime.harness.audit.table import Row, mask_of, reward_of
from slime.harness.audit.torch_file import data_beginning, read_torch_file
from slime.harness.audit.values import (
    array_of,
    floats_of,
    ids_of,
    int_of,
    key_of,
    label_of,
    last_message_of,
    number_of,
    text_of,
)

# Names of a train dump's fields; where a file has another one, the first that it has counts.
_TOKENS = ("tokens",)
_LENGTH = ("response_lengths", "response_length")
_MASK = ("loss_masks", "loss_mask")
_INDEX = ("sample_indices", "sample_index", "index")
_EXECUTION = ("rollout_ids", "rollout_id")


def row_of_sample(sample: dict[str, Any], options: ReadOptions) -> Row:
    """A row of `Sample.to_dict()`."""
    metadata = sample.get("metadata")
    raw = metadata.get("raw_reward") if isinstance(metadata, dict) else None
    reward, has_reward, parts = reward_of(
        sample.get("reward") if raw is None else raw, options.reward_key
    )
    status = sample.get("status")
    if status == "pending":  # nothing was generated, so nothing was scored: supervised training
        reward, has_reward, parts = float("nan"), False, {}
    length = int_of(sample.get("response_length"))
    versions = [*_versions(sample.get("weight_versions"))]
    for span in sample.get("weight_version_spans") or ():
        if isinstance(span, list | tuple) and span:
            versions += _versions([span[0]])
    row = Row(
        prompt=text_of(sample.get("prompt")),
        asked=last_message_of(sample.get("prompt")),
        response=text_of(sample.get("response")),
        label=label_of(sample.get("label")),
        group=key_of(sample.get("group_index")),
        index=int_of(sample.get("index")),
        execution=key_of(sample.get("rollout_id")),
        reward=reward,
        has_reward=has_reward,
        reward_parts=parts,
        is_cut=(status == "truncated" or sample.get("finish_reason") == "length")
        if isinstance(status, str)
        else None,
        counts=sample.get("valid") is not False,
        tokens=ids_of(sample.get("tokens")),
        response_length=length,
        versions=tuple(versions),
    )
    for name in ("rollout_log_probs", "loss_mask"):
        value = sample.get(name)
        if value is None:
            continue
        found = mask_of(value) if name == "loss_mask" else floats_of(value)
        if found is None:
            row.problem = f"{name} holds something else than numbers"
        setattr(row, "mask" if name == "loss_mask" else name, found)
    if sample.get("remove_sample") is True and row.mask is not None:
        row.mask = None  # it is left out on purpose
    if row.tokens is None and sample.get("tokens") is not None:
        row.problem = "tokens holds something else than whole numbers"
    elif length is not None and row.tokens is not None and length > len(row.tokens):
        row.problem = f"response_length is {length}, but there are {len(row.tokens)} tokens"
    return row


def _versions(values: Any) -> Iterator[int]:
    for value in values if isinstance(values, list | tuple) else ():
        number = None if value is None else parse_weight_version(str(value)[:30])
        if number is not None and number < 2**62:
            yield number


# --- rollout dumps --------------------------------------------------------------------------------


def _missing_in_torch(path: Path, options: ReadOptions, *, train: bool) -> str | None:
    with open_regular(path) as file:
        beginning = data_beginning(file)
    has_samples = _has_key(beginning, "samples")
    is_train = _has_key(beginning, "rollout_data") or (
        has_samples and _has_key(beginning, "format_version")
    )
    if train:
        return None if is_train else "no rollout_data, rank (train dump)"
    return None if has_samples and not is_train else "no samples (rollout dump)"


def _has_key(beginning: bytes, name: str) -> bool:
    """Whether a pickle begins with this text, as its own and not as a part of another."""
    text, size = name.encode(), len(name)
    return (
        b"X" + size.to_bytes(4, "little") + text in beginning
        or b"\x8c" + size.to_bytes(1, "little") + text in beginning
    )


def _load(path: Path) -> dict[str, Any]:
    with open_regular(path) as file:
        content = read_torch_file(file)
    if not isinstance(content, dict):
        raise RolloutDataError(f"holds a {type(content).__name__}, not the dictionary of a dump")
    return content


def _step(content: dict[str, Any], path: Path) -> int:
    step = int_of(content.get("rollout_id"))
    return step if step is not None else step_in_name(path) or 0


def _within(path: Path, rows: Iterator[Row]) -> Iterator[Row]:
    """The rows, as long as they hold no more numbers than the file has bytes: samples may share an
    array, or a tensor may claim memory that no byte of the file fills.
    """
    limit = path.stat().st_size
    for row in rows:
        columns = (row.tokens, row.mask, row.rollout_log_probs, row.log_probs, row.advantage)
        limit -= sum(len(one) for one in columns if one is not None)
        if limit < 0:
            raise RolloutDataError("its samples hold more numbers than the file has bytes")
        yield row


def _read_torch_rollout(path: Path, options: ReadOptions) -> Iterator[Part]:
    content = _load(path)
    samples = content.get("samples")
    if not isinstance(samples, list) or not all(isinstance(one, dict) for one in samples):
        raise RolloutDataError("its `samples` are no list of dictionaries")
    rows = list(_within(path, (row_of_sample(sample, options) for sample in samples)))
    yield Part(_step(content, path), rows, is_evaluation=is_evaluation_name(path))


TORCH_ROLLOUT = Shape(
    "slime-pt",
    "a rollout dump of slime or miles: torch.save of {rollout_id, samples: [Sample.to_dict()]}",
    (".pt", ".pth"),
    lambda path, options: _missing_in_torch(path, options, train=False),
    _read_torch_rollout,
)


def _missing_ours(path: Path, options: ReadOptions) -> str | None:
    with open_regular(path) as file:
        beginning = file.read(64)
    return None if FORMAT.encode() in beginning else f"no head with format {FORMAT}"


def _read_ours(path: Path, options: ReadOptions) -> Iterator[Part]:
    records = read_objects(path, options)
    _, head = next(records)
    rows = [
        row_of_sample(_decoded(record), options)
        for _, record in records
        if not (head.get("sealed") and record.keys() == {"blake2b"})
    ]
    if head.get("num_samples") != len(rows):
        options.report(
            path, f"{len(rows)} samples were read, its head says {head.get('num_samples')}"
        )
    step = int_of(head.get("rollout_id"))
    yield Part(
        step if step is not None else step_in_name(path) or 0,
        rows,
        is_evaluation=head.get("evaluation") is True,
    )


def _decoded(record: dict[str, Any]) -> dict[str, Any]:
    """The values of a line as they were saved; long lists of numbers become arrays at once."""
    result: dict[str, Any] = {}
    for name, value in record.items():
        array = array_of(value) if isinstance(value, list) and len(value) > 8 else None
        result[name] = decode_values(value) if array is None else array
    return result


OUR_ROLLOUT = Shape(
    "slime-rollout",
    "our rollout dump: a head line with format slime-rollout-1, then a sample per line",
    (".jsonl",),
    _missing_ours,
    _read_ours,
)

# --- train dumps ----------------------------------------------------------------------------------


class _Fields:
    """The fields of a train dump by name, an entry per sample."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self.fields = fields

    def get(self, names: Sequence[str], i: int) -> Any:
        for name in names:
            values = self.fields.get(name)
            if values is not None and hasattr(values, "__getitem__"):
                return values[i] if i < len(values) else None
        return None


def _train_row(fields: _Fields, i: int, rank: int | None) -> Row:
    tokens = ids_of(fields.get(_TOKENS, i))
    length = int_of(number_of(fields.get(_LENGTH, i)))
    mask = mask_of(fields.get(_MASK, i))
    row = Row(
        index=int_of(fields.get(_INDEX, i)),
        execution=int_of(fields.get(_EXECUTION, i)),
        tokens=tokens,
        response_length=length,
        mask=mask,
        rank=rank,
    )
    if tokens is not None and length is not None and 0 <= length <= len(tokens):
        row.prompt_key = hashlib.blake2b(
            tokens[: len(tokens) - length].astype(np.int64).tobytes(), digest_size=12
        ).hexdigest()
    truncated = fields.get(("truncated",), i)
    row.is_cut = None if truncated is None else bool(number_of(truncated))
    row.reward = number_of(fields.get(("local_raw_reward",), i))
    row.has_reward = "local_raw_reward" in fields.fields
    row.normalized = number_of(fields.get(("rewards",), i))
    for name, key in (
        ("rollout_log_probs", "rollout_log_probs"),
        ("log_probs", "log_probs"),
        ("advantage", "advantages"),
    ):
        values = floats_of(fields.get((key,), i))
        # a rank of several context-parallel ones holds a part of the response
        if values is not None and (length is None or len(values) == length):
            setattr(row, name, values)
    return row


def _read_torch_train(path: Path, options: ReadOptions) -> Iterator[Part]:
    content = _load(path)
    rank = int_of(content.get("rank"))
    data = content.get("rollout_data")
    if isinstance(data, dict):
        fields = _Fields(data)
        count = _count(data)
        rows = list(_within(path, (_train_row(fields, i, rank) for i in range(count))))
        _set_raw_rewards(rows, data.get("raw_reward"), data.get("partition"))
    elif isinstance(content.get("samples"), list):
        samples = [one for one in content["samples"] if isinstance(one, dict)]
        views = (_Fields({name: [value] for name, value in one.items()}) for one in samples)
        rows = list(_within(path, (_train_row(view, 0, None) for view in views)))
        places = [one.get("partition", one.get("rollout_position")) for one in samples]
        _set_raw_rewards(rows, content.get("raw_reward"), places)
    else:
        raise RolloutDataError("has neither rollout_data nor samples")
    yield Part(_step(content, path), rows, role="train")


def _count(data: dict[str, Any]) -> int:
    for name in (*_LENGTH, *_MASK, *_TOKENS):
        if hasattr(data.get(name), "__len__"):
            return len(data[name])
    raise RolloutDataError("its rollout_data has no response_lengths, loss_masks or tokens")


def _set_raw_rewards(rows: list[Row], whole: Any, partition: Any) -> None:
    """Raw rewards are of the whole batch on every rank; `partition` says which are this rank's.
    Without it they wait for `join`, which sees all ranks and the rollout.
    """
    rewards = None if whole is None else array_of(whole)
    if rewards is None or any(row.has_reward for row in rows):
        return
    places = array_of(partition)
    for i, row in enumerate(rows):
        if places is None or len(places) != len(rows) or not np.isfinite(places).all():
            row.batch_rewards = rewards
        elif 0 <= places[i] < len(rewards):
            row.reward, row.has_reward = float(rewards[int(places[i])]), True


TORCH_TRAIN = Shape(
    "slime-pt-train",
    "a train dump of slime or miles: torch.save of {rollout_id, rank, rollout_data: {field: list}}",
    (".pt", ".pth"),
    lambda path, options: _missing_in_torch(path, options, train=True),
    _read_torch_train,
    role="train",
)


def _missing_our_train(path: Path, options: ReadOptions) -> str | None:
    with open_regular(path) as file:
        beginning = file.read(4096)
    return None if TRAIN_FORMAT.encode() in beginning else f"no metadata {TRAIN_FORMAT}"


def rows_of_fields(fields: dict[str, Any], ranks: Sequence[int]) -> list[Row]:
    """A row per trained sample, of the fields of a train dump by name and each sample's rank."""
    view = _Fields(fields)
    return [_train_row(view, i, int(rank)) for i, rank in enumerate(ranks)]


def _read_our_train(path: Path, options: ReadOptions) -> Iterator[Part]:
    dump = read_train_dump(path)
    fields = {**dump.sample_fields, **dump.token_fields}
    for name, values in dump.whole_fields.items():
        fields.setdefault(name, [values[int(position)] for position in dump.positions])
    if "raw_reward" in fields:
        fields.setdefault("local_raw_reward", fields["raw_reward"])
    rows = rows_of_fields(fields, dump.owner_ranks.tolist())
    yield Part(int(dump.rollout_id), rows, role="train")


OUR_TRAIN = Shape(
    "slime-train",
    "our train dump: a safetensors file with the metadata slime-train-2",
    (".safetensors",),
    _missing_our_train,
    _read_our_train,
    role="train",
)

# --- both together --------------------------------------------------------------------------------


def join(rollout: list[Row], train: list[Row]) -> tuple[list[Row], int]:
    """(the rollout's rows with what the trainer computed of them, how many of the trainer's rows
    have no sample). Without a rollout the trainer's rows stand for themselves, each sample once:
    tensor-parallel ranks dump the same ones.
    """
    _place_rewards(rollout, train)
    once: dict[Any, Row] = {}
    for number, row in enumerate(train):
        key = ("row", number) if row.index is None else row.index
        held = once.get(key)
        if held is None or _richness(row) > _richness(held):
            once[key] = row
    if not rollout:
        if all(row.advantage is None for row in once.values()):
            for row in once.values():  # supervised training, whose rewards nothing scored
                row.has_reward, row.reward = False, float("nan")
        return list(once.values()), 0
    counts = collections.Counter(row.index for row in rollout)
    by_index = {row.index: row for row in rollout if row.index is not None}
    lost = 0
    for key, row in once.items():
        mine = by_index.get(key)
        if mine is None or counts[key] != 1:
            lost += mine is None
            continue
        _take(mine, row)
    return rollout, lost


def _place_rewards(rollout: list[Row], train: list[Row]) -> None:
    """Gives the trainer's rows their raw rewards out of the batch's: these are in the order of the
    rollout's samples; where there is no rollout, of the sample indices that follow each other. Where
    neither is as long as the batch, a reward's sample is unknown, and none has one.
    """
    waiting = [row for row in train if row.batch_rewards is not None]
    indices = [row.index for row in rollout] or sorted(
        {row.index for row in waiting if row.index is not None}
    )
    order = [index for index in indices if index is not None]
    places = {index: place for place, index in enumerate(order)}
    if len(places) != len(indices):
        return
    if not rollout and order and order[-1] - order[0] != len(order) - 1:
        return
    for row in waiting:
        assert row.batch_rewards is not None
        if len(row.batch_rewards) == len(order) and row.index in places:
            row.reward, row.has_reward = float(row.batch_rewards[places[row.index]]), True


def _richness(row: Row) -> int:
    return sum(one is not None for one in (row.log_probs, row.advantage, row.rollout_log_probs))


def _take(mine: Row, row: Row) -> None:
    for name in ("log_probs", "advantage", "mask", "rank"):
        if getattr(row, name) is not None:
            setattr(mine, name, getattr(row, name))
    mine.normalized = row.normalized
    if mine.rollout_log_probs is None:
        mine.rollout_log_probs = row.rollout_log_probs
    if row.tokens is not None and mine.tokens is not None:
        if not np.array_equal(row.tokens, mine.tokens):
            mine.problem = "the trainer has other tokens under this sample's index"
        elif row.has_reward and mine.has_reward and abs(row.reward - mine.reward) > 1e-5:
            mine.problem = (
                f"the trainer has reward {row.reward:g} under this sample's index, the rollout "
                f"{mine.reward:g}"
            )
        elif row.is_cut is not None and mine.is_cut is not None and row.is_cut != mine.is_cut:
            mine.problem = (
                f"the trainer has truncated {int(row.is_cut)} under this sample's index, the rollout "
                f"{int(mine.is_cut)}"
            )
