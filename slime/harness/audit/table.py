"""The samples of one step as columns, whatever framework wrote them.

`Row` is what readers make of one sample; `build_table` gathers rows into a `SampleTable`. Legend:
N samples of the step, in the order of the file; T response tokens. A token column is one array, of
the response only; an entry is empty where the file has none.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from slime.gate.token_columns import TokenRows
from slime.harness.audit.values import ids_of, is_number, number_of

UNKNOWN = -1
MOST_PARTS = 32  # rewards beside the reward, of a step


class TokenColumn(TokenRows):
    """Rows of the gate's columns, and how long they are."""

    @functools.cached_property
    def lengths(self) -> np.ndarray:
        """int64 [N] values of each entry."""
        return np.diff(self.offsets)


@dataclasses.dataclass(slots=True)
class Row:
    """One sample as a reader found it. None: the file says nothing of it.

    `group`: a key that the samples of one group share. `prompt_key`: one that the samples of one
    prompt share, where the file has no group and no text of the prompt alone. `execution`: a key
    that the samples of one execution of the policy share. `asked`: the last message of the prompt,
    where the prompt is messages. `counts`: whether its reward is part of its group's baseline.
    `batch_rewards`: those of the whole batch, of which the file does not say which is this one's.
    `tokens`: ids of prompt and response. `normalized`: the reward minus
    its baseline, where the file has that beside the advantage. `problem`: what is wrong with the
    record itself.
    """

    prompt: str = ""
    asked: str = ""
    response: str = ""
    label: Any = None
    group: Any = None
    prompt_key: Any = None
    index: int | None = None
    execution: Any = None
    reward: float = float("nan")
    has_reward: bool = False
    batch_rewards: np.ndarray | None = None
    reward_parts: dict[str, float] = dataclasses.field(default_factory=dict)
    normalized: float = float("nan")
    advantage: np.ndarray | None = None
    is_cut: bool | None = None
    counts: bool = True
    tokens: np.ndarray | None = None
    response_length: int | None = None
    mask: np.ndarray | None = None
    rollout_log_probs: np.ndarray | None = None
    log_probs: np.ndarray | None = None
    versions: tuple[int, ...] = ()
    rank: int | None = None
    problem: str | None = None


@dataclasses.dataclass(frozen=True)
class SampleTable:
    """One step. `group_N`: a number per group, UNKNOWN where a sample has none; `group_names` says
    what the file calls them. `has_groups`: whether the file, or equal prompts, say which samples
    are siblings; `groups_are_recorded`: whether the file does, which tells two groups of one prompt
    apart. `asked`: last messages of the prompts. `advantage_N`: the mean over a response's trained tokens; `advantage_range_N`:
    largest minus smallest of them. Lengths are UNKNOWN (-1) where the file has none. `order_N`: the
    samples in the order in which the ranks hold them, None where that is not recorded. `run`: the
    folder that the step's file lies in.
    """

    step: int
    is_evaluation: bool
    shape: str
    files: tuple[str, ...]
    run: str
    prompts: list[str]
    asked: list[str]
    responses: list[str]
    labels: list[Any]
    group_names: list[str]
    group_N: np.ndarray
    has_groups: bool
    groups_are_recorded: bool
    index_N: np.ndarray
    execution_N: np.ndarray
    reward_N: np.ndarray
    has_reward_N: np.ndarray
    reward_parts: dict[str, np.ndarray]
    normalized_N: np.ndarray
    advantage_N: np.ndarray | None
    advantage_range_N: np.ndarray | None
    cut_N: np.ndarray
    counts_N: np.ndarray
    response_length_N: np.ndarray
    version_low_N: np.ndarray
    version_high_N: np.ndarray
    tokens: TokenColumn | None
    masks: TokenColumn | None
    rollout_log_probs: TokenColumn | None
    log_probs: TokenColumn | None
    order_N: np.ndarray | None
    problems: list[str | None]

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def where(self) -> str:
        """The step as reports name it."""
        return f"evaluation {self.step}" if self.is_evaluation else f"step {self.step}"

    def response_ids(self, i: int) -> np.ndarray:
        """Ids of the i-th response; empty where they are not recorded or do not fit."""
        length = int(self.response_length_N[i])
        if self.tokens is None or length <= 0 or length > int(self.tokens.lengths[i]):
            return np.zeros(0, dtype=np.int32)
        return self.tokens.row(i)[-length:]

    def text_lengths(self) -> np.ndarray:
        """int64 [N] characters of each response."""
        return np.fromiter(map(len, self.responses), dtype=np.int64, count=len(self))


def _column(rows: Sequence[Row], name: str, dtypes: tuple[str, ...]) -> TokenColumn | None:
    """The rows' entries one after another, as the first of `dtypes` that all of them have, else the
    last. The rows give theirs up: a step's columns are the largest part of what it takes.
    """
    parts = [getattr(row, name) for row in rows]
    if all(part is None for part in parts):
        return None
    for row in rows:
        setattr(row, name, None)
    empty = np.zeros(0, dtype=dtypes[0])
    parts = [empty if part is None else part for part in parts]
    kinds = {dtype.name for dtype in {part.dtype for part in parts if part.size}}
    dtype = next((name for name in dtypes if kinds <= {name}), dtypes[-1])
    offsets = np.zeros(len(parts) + 1, dtype=np.int64)
    np.cumsum([len(part) for part in parts], out=offsets[1:])
    values = np.empty(int(offsets[-1]), dtype=dtype)
    if len(values):
        np.concatenate(parts, out=values, casting="unsafe")
    return TokenColumn(values, offsets)


def _keys(values: Sequence[Any]) -> tuple[np.ndarray, list[str]]:
    """(a number per distinct value, the values' names); None is UNKNOWN."""
    numbers: dict[Any, int] = {}
    found = [
        UNKNOWN if value is None else numbers.setdefault(value, len(numbers)) for value in values
    ]
    return np.array(found, dtype=np.int64), [str(value)[:200] for value in numbers]


def _groups(rows: Sequence[Row]) -> tuple[np.ndarray, list[str], bool]:
    """(a number per group, the groups' names, whether the file says which samples are siblings)."""
    if any(row.group is not None for row in rows):
        return *_keys([row.group for row in rows]), True
    # frameworks that record no group: the samples of one prompt are siblings
    prompts, _ = _keys(
        [row.prompt or None if row.prompt_key is None else row.prompt_key for row in rows]
    )
    names = [f"of prompt {number}" for number in range(int(prompts.max(initial=-1)) + 1)]
    return prompts, names, False


def _advantages(rows: Sequence[Row]) -> tuple[np.ndarray | None, np.ndarray | None]:
    if all(row.advantage is None for row in rows):
        return None, None
    means, ranges = np.full((2, len(rows)), np.nan)
    for i, row in enumerate(rows):
        values = row.advantage
        if values is None or not len(values):
            continue
        if row.mask is not None and len(row.mask) == len(values) and len(values) > 1:
            trained = values[row.mask != 0]
            values = trained if len(trained) else values[:0]
        if len(values):
            with np.errstate(invalid="ignore"):
                means[i] = values.mean(dtype=np.float64)
                ranges[i] = float(values.max()) - float(values.min())
    return means, ranges


def build_table(
    step: int,
    rows: Sequence[Row],
    *,
    shape: str,
    files: Sequence[str],
    run: str = "",
    is_evaluation: bool = False,
) -> SampleTable:
    """The rows as columns, in their order. The rows' token columns are moved out of them."""
    count = len(rows)
    group_N, names, is_recorded = _groups(rows)
    execution_N, _ = _keys([row.execution for row in rows])
    alone = execution_N == UNKNOWN
    execution_N = np.where(alone, count + np.arange(count), execution_N)
    versions = [row.versions or (UNKNOWN,) for row in rows]
    advantage_N, range_N = _advantages(rows)
    named = collections.Counter(name for row in rows for name in row.reward_parts)
    parts = sorted(name for name, _ in named.most_common(MOST_PARTS))
    ranks = [row.rank for row in rows]
    order = None
    if all(rank is not None for rank in ranks) and len(set(ranks)) > 1:
        order = np.argsort(np.array(ranks), kind="stable")

    def numbers(values: list, dtype: str) -> np.ndarray:
        return np.array(values, dtype=dtype)

    def whole(values: list[int | None]) -> np.ndarray:
        return numbers([UNKNOWN if value is None else value for value in values], "int64")

    return SampleTable(
        step=step,
        is_evaluation=is_evaluation,
        shape=shape,
        files=tuple(files),
        run=run,
        prompts=[row.prompt for row in rows],
        asked=[row.asked for row in rows],
        responses=[row.response for row in rows],
        labels=[row.label for row in rows],
        group_names=names,
        group_N=group_N,
        has_groups=bool((group_N != UNKNOWN).any()),
        groups_are_recorded=is_recorded,
        index_N=whole([row.index for row in rows]),
        execution_N=execution_N,
        reward_N=numbers([row.reward for row in rows], "float64"),
        has_reward_N=numbers([row.has_reward for row in rows], "bool"),
        reward_parts={
            name: numbers([row.reward_parts.get(name, np.nan) for row in rows], "float64")
            for name in parts
        },
        normalized_N=numbers([row.normalized for row in rows], "float64"),
        advantage_N=advantage_N,
        advantage_range_N=range_N,
        cut_N=whole([None if row.is_cut is None else int(row.is_cut) for row in rows]),
        counts_N=numbers([row.counts for row in rows], "bool"),
        response_length_N=whole([row.response_length for row in rows]),
        version_low_N=numbers([min(one) for one in versions], "int64"),
        version_high_N=numbers([max(one) for one in versions], "int64"),
        tokens=_column(rows, "tokens", ("int32", "int64")),
        masks=_column(rows, "mask", ("uint8", "float32")),
        rollout_log_probs=_column(rows, "rollout_log_probs", ("float32",)),
        log_probs=_column(rows, "log_probs", ("float32",)),
        order_N=order,
        problems=[row.problem for row in rows],
    )


def reward_of(value: object, key: str | None) -> tuple[float, bool, dict[str, float]]:
    """(reward, whether there is one, its parts by name) of what a file has as a reward: a number,
    or a dictionary of numbers of which `key`, or one of the usual names, is the reward.
    """
    if isinstance(value, dict):
        parts = {str(name)[:80]: number_of(one) for name, one in value.items() if is_number(one)}
        names = [key] if key is not None else ["score", "reward", "total", *parts][:64]
        name = next((name for name in names if name in parts), None)
        if name is None:
            return float("nan"), False, parts
        return parts[name], True, parts
    return number_of(value), value is not None, {}


def mask_of(value: object) -> np.ndarray | None:
    """A loss mask as uint8, or float32 where it holds other numbers than 0 and 1."""
    ids = ids_of(value)
    if ids is not None and (not ids.size or (ids.min() >= 0 and ids.max() <= 1)):
        return ids.astype(np.uint8)
    if ids is not None:
        return ids.astype(np.float32)
    return None


def common_prefix(texts: Sequence[str]) -> int:
    """Characters that all texts begin with."""
    low, high = min(texts), max(texts)
    for i, (a, b) in enumerate(zip(low, high, strict=False)):
        if a != b:
            return i
    return min(len(low), len(high))
