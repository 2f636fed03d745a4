"""JSON lines of other frameworks: verl's, NeMo-RL's, and any with a mapping of keys.

Files are read a line at a time, so that the numbers of one line alone are Python objects.
"""

from __future__ import annotations

import collections
import functools
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from slime.exceptions import ConfigError, RolloutDataError
from slime.harness.audit.long_lines import Entries, columns_of
from slime.harness.audit.shapes import (
    Part,
    ReadOptions,
    Shape,
    is_evaluation_name,
    lacking,
    open_regular,
    step_in_name,
)
from slime.harness.audit.table import Row, common_prefix, mask_of, reward_of
from slime.harness.audit.values import (
    array_of,
    floats_of,
    ids_of,
    int_of,
    is_number,
    key_of,
    label_of,
    last_message_of,
    number_of,
    text_of,
)

LONG_LINE = 1 << 25  # bytes from which a line is taken apart and not parsed, where a reader can
LONGEST_LINE = 1 << 28  # bytes; what is read of it may take thirty times as much
LEAST_ALIKE = 4  # characters that two contents of one prompt have in common at least
MOVED_MASK = 4  # tokens by which a mask may begin too late, and neighbours still be compared
MAX_PARTS = 64  # reward columns of one sample
COLUMNS = (
    "step", "prompt", "response", "label", "reward", "group", "index", "execution", "advantage",
    "prompt_tokens", "response_tokens", "loss_mask", "rollout_log_probs", "log_probs",
    "truncated", "finish_reason", "weight_version",
)  # fmt: skip
CUT_REASONS = ("length", "max_tokens", "truncated", "max_length")


def parse(line: bytes) -> Any:
    """The value of one JSON text, with the NaN and Infinity that Python writes. RolloutDataError
    for what is none.
    """
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError as error:
        first = error
    try:
        return json.loads(line)
    except RecursionError:
        raise RolloutDataError("nested too deeply to be a record") from None
    except ValueError:
        raise RolloutDataError(f"not JSON ({first})") from None


def read_objects(
    path: Path, options: ReadOptions, *, flat: frozenset[str] | None = None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """The (line number, object) of each line. What is no object is reported, and the rest read.

    `flat`: keys whose lists of lists hold numbers alone. With them, the columns of a long line come
    as `Entries`, to be read while the next line is not asked for.
    """
    first: tuple[int, str] | None = None
    good = bad = 0
    with open_regular(path) as file:
        for number in itertools.count(1):
            begun = file.tell()
            line = file.readline(LONGEST_LINE if flat is None else LONG_LINE)
            if not line:
                break
            if flat is not None and len(line) == LONG_LINE:
                record, end = columns_of(file, begun, parse, flat=flat)
                good += 1
                yield number, record
                file.seek(end)
                continue
            if len(line) == LONGEST_LINE:
                raise RolloutDataError(f"line {number} is longer than {LONGEST_LINE >> 20} MiB")
            if not line.strip():
                continue
            try:
                record = parse(line)
                if not isinstance(record, dict):
                    raise RolloutDataError(f"a {type(record).__name__}, no object")
            except RolloutDataError as error:
                first, bad = first or (number, str(error)), bad + 1
                continue
            good += 1
            yield number, record
    if first is not None:
        number, why = first
        more = f" (and {bad - 1} more lines)" if bad > 1 else ""
        options.report(path, f"line {number}{more}: {why}; {good} lines were read")


def first_object(path: Path) -> Any:
    """The value of the first line that is not blank. RolloutDataError where it is no JSON."""
    with open_regular(path) as file:
        begun = 0
        while line := file.readline(LONG_LINE):
            if len(line) == LONG_LINE:
                return columns_of(file, begun, parse, flat=_NEMO_NUMBERS)[0]
            if line.strip():
                return parse(line)
            begun = file.tell()
    raise RolloutDataError("the file is empty")


@functools.lru_cache(
    maxsize=1
)  # several shapes look at one file, and its first line may be all of it
def _first_keys(path: Path, size: int, changed: int) -> dict[str, None] | str:
    """The keys of the first object; the name of its type where it is none."""
    first = first_object(path)
    return dict.fromkeys(map(str, first)) if isinstance(first, dict) else type(first).__name__


_NEMO_NUMBERS = frozenset(
    ("token_ids", "token_loss_mask", "advantages", "generation_logprobs", "prev_logprobs")
)


def _missing(keys: tuple[str, ...]):
    def missing(path: Path, options: ReadOptions) -> str | None:
        if options.mapping is not None:
            return "--mapping is given"
        entry = path.stat()
        return lacking(_first_keys(path, entry.st_size, entry.st_mtime_ns), keys)

    return missing


def _by_step(steps: dict[int, list[Row]], path: Path) -> Iterator[Part]:
    for step in sorted(steps):
        yield Part(step, steps[step], is_evaluation=is_evaluation_name(path))


# --- verl -----------------------------------------------------------------------------------------

_VERL = ("input", "output", "score")


def _read_verl(path: Path, options: ReadOptions) -> Iterator[Part]:
    steps: dict[int, list[Row]] = {}
    known = {*_VERL, "gts", "step", "uid", "request_id", "data_source"}
    key = options.reward_key or "score"
    for number, record in read_objects(path, options):
        score, has_reward, parts = reward_of(record.get(key), options.reward_key)
        others = {
            name[:80]: number_of(value)
            for name, value in list(record.items())[:MAX_PARTS]
            if name not in known and is_number(value)
        }
        step = int_of(record.get("step"))
        row = Row(
            prompt=text_of(record.get("input")),
            response=text_of(record.get("output")),
            label=label_of(record.get("gts")),
            group=key_of(record.get("uid")),
            index=number - 1,
            reward=score,
            has_reward=has_reward,
            reward_parts={**parts, **others},
        )
        steps.setdefault(step if step is not None else step_in_name(path) or 0, []).append(row)
    yield from _by_step(steps, path)


VERL = Shape(
    "verl",
    "verl's rollout_data_dir: <step>.jsonl, an object per line with input, output, score (and gts, "
    "step)",
    (".jsonl", ".json"),
    _missing(_VERL),
    _read_verl,
)

# --- NeMo-RL --------------------------------------------------------------------------------------

_NEMO = ("content", "rewards")


def _read_nemo(path: Path, options: ReadOptions) -> Iterator[Part]:
    rows: list[Row] = []
    contents: list[str] = []
    ids: list[np.ndarray | None] = []
    for number, record in read_objects(path, options, flat=_NEMO_NUMBERS):
        rewards = record.get("rewards")
        count = len(rewards) if isinstance(rewards, list) else 1
        columns = {
            name: _entries(record.get(name), count, isinstance(rewards, list), name, number)
            for name in (
                "content", "rewards", "input_lengths", "token_ids", "token_loss_mask",
                "sample_loss_mask", "advantages", "generation_logprobs", "prev_logprobs",
            )
        }  # fmt: skip
        for i in range(count):
            one = {name: values[i] for name, values in columns.items() if values is not None}
            contents.append(text_of(one.get("content")))
            ids.append(_ids_of(one))
            rows.append(_nemo_row(one, ids[-1], len(rows)))
    _find_prompts(rows, ids, contents)
    _split_contents(rows, contents)
    yield Part(step_in_name(path) or 0, rows, is_evaluation=is_evaluation_name(path))


def _entries(value: Any, count: int, is_batch: bool, name: str, line: int) -> list | Entries | None:
    if value is None:
        return None
    if not is_batch:
        return [value]
    if not isinstance(value, list | Entries):
        return [value] if count == 1 else None
    if len(value) == count:
        return value
    if count == 1:  # one sample's own list beside a reward in a list
        return [value]
    raise RolloutDataError(f"line {line}: {name} has {len(value)} entries for {count} rewards")


def _ids_of(one: dict[str, Any]) -> np.ndarray | None:
    """Ids of prompt and response, without the padding."""
    tokens, length = ids_of(one.get("token_ids")), int_of(one.get("input_lengths"))
    if tokens is not None and length is not None and 0 <= length <= len(tokens):
        return tokens[:length]
    return tokens


def _nemo_row(one: dict[str, Any], tokens: np.ndarray | None, index: int) -> Row:
    row = Row(index=index)
    row.reward, row.has_reward, row.reward_parts = reward_of(one.get("rewards"), None)
    mask = mask_of(one.get("token_loss_mask"))
    advantage = floats_of(one["advantages"]) if "advantages" in one else None
    if advantage is None and is_number(one.get("advantages")):
        advantage = np.array([number_of(one["advantages"])])
    if mask is None or tokens is None or len(mask) < len(tokens) or not mask.any():
        row.advantage = advantage if advantage is not None and len(advantage) == 1 else None
        if mask is not None and tokens is not None and len(mask) < len(tokens):
            row.problem = f"token_loss_mask has {len(mask)} entries for {len(tokens)} tokens"
        elif mask is not None and tokens is not None:
            row.mask = mask  # nothing trains; where the prompt ends is unknown
        return row
    start, end = int(np.argmax(mask != 0)), len(tokens)
    if start == 0:
        row.problem = "token_loss_mask begins at the first token: the prompt is trained"
    row.tokens, row.response_length = tokens, end - start
    row.mask = mask[start:end]
    weight = one.get("sample_loss_mask")
    if is_number(weight) and number_of(weight) == 0:
        row.mask = np.zeros_like(row.mask)
    columns = {
        "rollout_log_probs": floats_of(one.get("generation_logprobs")),
        "log_probs": floats_of(one.get("prev_logprobs")),
        "advantage": advantage,
    }
    for name, values in columns.items():
        if values is not None and len(values) >= end:
            setattr(row, name, values[start:end])
        elif values is not None and len(values) == 1 and name == "advantage":
            row.advantage = values
        elif values is not None:
            row.problem = f"{name} has {len(values)} entries for {end} tokens"
    return row


def _find_prompts(rows: list[Row], ids: list[np.ndarray | None], contents: list[str]) -> None:
    """Says which rows have the same prompt: those with equal ids before the mask begins. Where a
    wrong mask makes no whole groups of these, neighbours whose beginnings are alike.
    """
    starts = [
        0 if row.tokens is None or row.response_length is None
        else len(row.tokens) - row.response_length
        for row in rows
    ]  # fmt: skip
    known: set[bytes] = set()
    for row, tokens, start in zip(rows, ids, starts, strict=True):
        if tokens is not None and start:
            row.prompt_key = tokens[:start].tobytes()
            known.add(row.prompt_key)
    _place_others(rows, ids, known)
    sizes = collections.Counter(row.prompt_key for row in rows)
    if None not in sizes and len(set(sizes.values())) == 1 and len(rows) > len(sizes):
        return
    alone = sum(count for key, count in sizes.items() if count == 1 or key is None)
    size = None
    if all(starts):
        size = siblings_in_a_row(_alike(ids, starts))
        size = None if size == len(rows) else size
    elif alone == len(rows):
        size = siblings_in_a_row([common_prefix(pair) for pair in itertools.pairwise(contents)])
    for i, row in enumerate(rows):
        if size is not None:
            row.prompt_key = i // size
        elif 2 * alone > len(rows):
            row.prompt_key = None


def _place_others(rows: list[Row], ids: list[np.ndarray | None], known: set[bytes]) -> None:
    """Gives rows without a trained token, or with a trained first one, the prompt of others that
    their ids begin with.
    """
    lengths = sorted({len(key) for key in known}, reverse=True)
    for row, tokens in zip(rows, ids, strict=True):
        if row.prompt_key is not None or tokens is None or row.mask is None:
            continue
        begun = tokens.tobytes()
        size = next((size for size in lengths if begun[:size] in known), None)
        if size is None:
            continue
        row.prompt_key, start = begun[:size], size // tokens.itemsize
        if row.response_length is None:
            row.tokens, row.response_length = tokens, len(tokens) - start
            row.mask = row.mask[start : len(tokens)]


def _alike(ids: list[np.ndarray | None], starts: list[int]) -> list[int]:
    """For each row and the next LEAST_ALIKE if they begin alike nearly as far as their masks begin,
    else 0.
    """
    found = []
    for i in range(len(ids) - 1):
        start = min(starts[i], starts[i + 1])
        start = max(start - MOVED_MASK, start // 2 + 1)
        a, b = ids[i], ids[i + 1]
        found.append(LEAST_ALIKE * np.array_equal(a[:start], b[:start]))  # type: ignore[index]
    return found


def _split_contents(rows: list[Row], contents: list[str]) -> None:
    """Prompt and response of each content, which holds both: what the rows of one prompt begin
    with is the prompt, as far as text can tell.
    """
    members: dict[Any, list[int]] = {}
    for i, row in enumerate(rows):
        members.setdefault(row.prompt_key, []).append(i)
    for key, places in members.items():
        cut = 0
        if key is not None and len(places) > 1:
            cut = common_prefix([contents[i] for i in places])
        for i in places:
            rows[i].prompt, rows[i].response = contents[i][:cut], contents[i][cut:]


def siblings_in_a_row(shared: list[int]) -> int | None:
    """How many rows in a row have the same prompt, of how much each begins like the next one: the
    size for which neighbours within a group share more than neighbours across groups. None where
    no size fits.
    """
    count = len(shared) + 1
    for size in range(2, count + 1):
        if count % size:
            continue
        across = [n for i, n in enumerate(shared) if (i + 1) % size == 0]
        inside = [n for i, n in enumerate(shared) if (i + 1) % size]
        if min(inside) > max(across, default=0) and min(inside) >= LEAST_ALIKE:
            return size
    return None


NEMO = Shape(
    "nemo-rl",
    "NeMo-RL's train_data_step<N>.jsonl: content, rewards (and token_ids, token_loss_mask, "
    "advantages, generation_logprobs, prev_logprobs)",
    (".jsonl", ".json"),
    _missing(_NEMO),
    _read_nemo,
)

# --- any keys, with a mapping ---------------------------------------------------------------------


def check_mapping(value: Any, path: Path) -> dict[str, str]:
    """The mapping of a --mapping file. ConfigError for what is none."""
    if not isinstance(value, dict) or not all(isinstance(one, str) for one in value.values()):
        raise ConfigError(
            f"--mapping {path} must hold one JSON object: our column -> their key, for instance "
            '{"prompt": "question", "response": "text", "reward": "score"}.'
        )
    unknown = sorted(set(value) - set(COLUMNS))
    if unknown:
        raise ConfigError(
            f"--mapping {path}: unknown column {unknown[0]!r}. Columns: {', '.join(COLUMNS)}."
        )
    if "response" not in value:
        raise ConfigError(f"--mapping {path} must map `response` to the key of the response text.")
    return value


def _at(record: dict[str, Any], key: str) -> Any:
    """The value at a key, or below it where the key is a path with dots."""
    if key in record:
        return record[key]
    value: Any = record
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _missing_mapped(path: Path, options: ReadOptions) -> str | None:
    if options.mapping is None:
        return "it needs --mapping FILE"
    record = first_object(path)
    if not isinstance(record, dict):
        return f"the first line is a {type(record).__name__}, no object"
    absent = [key for key in options.mapping.values() if _at(record, key) is None]
    if options.mapping["response"] not in absent:
        return None
    return f"no {', '.join(absent)} in the first line (it has {', '.join(map(str, record))[:300]})"


def _read_mapped(path: Path, options: ReadOptions) -> Iterator[Part]:
    assert options.mapping is not None
    steps: dict[int, list[Row]] = {}
    for number, record in read_objects(path, options):
        one = {name: _at(record, key) for name, key in options.mapping.items()}
        step = int_of(one.get("step"))
        steps.setdefault(step if step is not None else step_in_name(path) or 0, []).append(
            _mapped_row(one, number - 1, options)
        )
    yield from _by_step(steps, path)


def _mapped_row(one: dict[str, Any], number: int, options: ReadOptions) -> Row:
    reward, has_reward, parts = reward_of(one.get("reward"), options.reward_key)
    row = Row(
        prompt=text_of(one.get("prompt")),
        asked=last_message_of(one.get("prompt")),
        response=text_of(one.get("response")),
        label=label_of(one.get("label")),
        group=key_of(one.get("group")),
        index=number if one.get("index") is None else int_of(one["index"]),
        execution=key_of(one.get("execution")),
        reward=reward,
        has_reward=has_reward,
        reward_parts=parts,
    )
    advantage = one.get("advantage")
    row.advantage = (
        np.array([number_of(advantage)]) if is_number(advantage) else array_of(advantage)
    )
    if isinstance(one.get("truncated"), bool | int):
        row.is_cut = bool(one["truncated"])
    elif isinstance(one.get("finish_reason"), str):
        row.is_cut = one["finish_reason"] in CUT_REASONS
    version = int_of(one.get("weight_version"))
    row.versions = () if version is None else (version,)
    prompt, response = ids_of(one.get("prompt_tokens")), ids_of(one.get("response_tokens"))
    if response is not None:
        row.tokens = np.concatenate([np.zeros(0, np.int32) if prompt is None else prompt, response])
        row.response_length = len(response)
    row.mask = mask_of(one.get("loss_mask"))
    row.rollout_log_probs = floats_of(one.get("rollout_log_probs"))
    row.log_probs = floats_of(one.get("log_probs"))
    return row


MAPPED = Shape(
    "json-lines",
    "JSON lines with --mapping FILE (our column -> their key)",
    (".jsonl", ".json"),
    _missing_mapped,
    _read_mapped,
)
