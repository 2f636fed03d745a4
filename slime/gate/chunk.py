"""The columns of one chunk of samples that the checks look at. Legend: N samples of the chunk,
`rows` positions in it.

Scalars are read once per sample; token and log-prob columns are gathered lazily, for the rows that
are still alive, so that a sample that failed a cheap check costs nothing more.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Container, Sequence
from typing import Any

import numpy as np

from slime.data.number_list import NumberList
from slime.data.sample import Sample, Status
from slime.exceptions import RolloutDataError
from slime.gate.alignment import Codec
from slime.gate.config import GateConfig, Level, TaskRules
from slime.gate.stand_ins import identity_problem
from slime.gate.token_columns import (
    Scratch,
    TokenRows,
    length_of,
    log_prob_array,
    missing_positions,
    token_array,
)

FINISH_CODES = {"stop": 1, "length": 2, "abort": 3}  # 0 = unknown: never guessed
FINISH_NAMES = ("unknown", "stop", "length", "abort")
_STATUS_CODES = {
    Status.PENDING: 0,
    Status.COMPLETED: 1,
    Status.TRUNCATED: 2,
    Status.ABORTED: 3,
    Status.FAILED: 4,
}
STATUS_UNKNOWN = 5
STATUS_TRUNCATED, STATUS_ABORTED, STATUS_FAILED = 2, 3, 4
NO_RULES = TaskRules()
TASK_NAME_KEYS = ("source_name", "rm_type")


@dataclasses.dataclass
class Gathered:
    """A ragged column over some rows; `place[row]` is its position in it, -1 where absent."""

    ragged: TokenRows
    place: np.ndarray


class Chunk:
    """N samples seen as columns, plus what the checks leave behind: details, texts, masks, counts.

    The columns are valid until another chunk is made with the same `scratch`.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        config: GateConfig,
        codec: Codec | None,
        *,
        first_position: int = 0,
        scratch: Scratch | None = None,
    ):
        self.samples = samples
        self.config = config
        self.codec = codec
        self.first_position = first_position
        self.num_samples = len(samples)
        self.details: dict[int, str] = {}
        self.texts: dict[int, str] = {}
        self.masks: dict[int, list[int]] = {}
        self.answers: dict[int, str] = {}
        self.penalized = np.zeros(self.num_samples, dtype=bool)
        self.identity_problems: dict[int, str] = {}
        self.counts: collections.Counter = collections.Counter()
        self._text_view: dict[int, str] = {}
        self._scratch = scratch or Scratch()
        self._tokens: Gathered | None = None
        self._log_probs: Gathered | None = None
        self._read_scalars()
        self._read_rules()

    def _read_scalars(self) -> None:
        status, finish, response = [], [], []
        total: list[int] = []
        log_probs: list[int] = []
        mask: list[int] = []
        for position, sample in enumerate(self.samples):
            if not isinstance(sample, Sample):
                raise RolloutDataError(
                    f"Gate input {self.first_position + position} is {type(sample).__name__}, not "
                    "a Sample. "
                    "Give Samples, or name an adapter (GateConfig.adapter) that makes one of this shape."
                )
            status.append(
                _STATUS_CODES[sample.status] if type(sample.status) is Status else STATUS_UNKNOWN
            )
            reason = sample.finish_reason
            finish.append(FINISH_CODES.get(reason, 0) if isinstance(reason, str) else 0)
            length = sample.response_length
            is_count = isinstance(length, int | np.integer) and 0 <= length < 2**31
            response.append(int(length) if is_count else -1)
            for values, lengths in (
                (sample.tokens, total), (sample.rollout_log_probs, log_probs), (sample.loss_mask, mask)
            ):  # fmt: skip
                lengths.append(len(values) if isinstance(values, list) else length_of(values))
            if (problem := identity_problem(sample)) is not None:
                self.identity_problems[position] = problem
        self.status = np.array(status, dtype=np.int8)
        self.finish = np.array(finish, dtype=np.int8)
        self.response_lengths = np.array(response, dtype=np.int64)
        self.total_lengths = np.array(total, dtype=np.int64)
        self.log_prob_lengths = np.array(log_probs, dtype=np.int64)
        self.mask_lengths = np.array(mask, dtype=np.int64)

    def _read_rules(self) -> None:
        tasks = self.config.tasks
        if not tasks:
            self.rules = [NO_RULES]
            self.rule_index = np.zeros(self.num_samples, dtype=np.int32)
            return
        names = list(tasks)
        self.rules = [NO_RULES, *(tasks[name] for name in names)]
        index: dict[str | None, int] = {name: position + 1 for position, name in enumerate(names)}
        self.rule_index = np.array(
            [index.get(task_name(sample), 0) for sample in self.samples], dtype=np.int32
        )

    def per_task(self, field: str, default: int | None, missing: int) -> np.ndarray:
        """[N] the task's number for `field`, `default` where the task sets none, `missing` where
        that is None too.
        """
        if len(self.rules) == 1:
            return np.full(
                self.num_samples, missing if default is None else default, dtype=np.int64
            )
        values = [
            default if getattr(rules, field) is None else getattr(rules, field)
            for rules in self.rules
        ]
        return np.array([missing if value is None else value for value in values], dtype=np.int64)[
            self.rule_index
        ]

    def format_of(self, row: int):
        """The format spec of the row's task, None if it has none."""
        rules = self.rules[self.rule_index[row]]
        if rules.skip_format:
            return None
        return self.config.format if rules.format is None else rules.format

    def level(self, check: str) -> Level:
        return self.config.level_of(check)

    @property
    def gathered_tokens(self) -> Gathered | None:
        """The token column as far as a check needed it, None if none did."""
        return self._tokens

    def tokens(self, rows: np.ndarray) -> Gathered:
        """Token ids (prompt + response) of at least `rows`. Rows whose tokens cannot be read have
        none (see `unreadable`).
        """
        if self._tokens is None:
            self._tokens = self._gather(rows, "tokens", token_array, np.dtype(np.int32))
        return self._tokens

    def log_probs(self, rows: np.ndarray) -> Gathered:
        """Log-probs of at least `rows`; unreadable or absent ones have none."""
        if self._log_probs is None:
            present = rows[self.log_prob_lengths[rows] >= 0]
            self._log_probs = self._gather(
                present, "rollout_log_probs", log_prob_array, np.dtype(np.float32)
            )
        return self._log_probs

    def _gather(
        self, rows: np.ndarray, name: str, read: Callable[[Any], np.ndarray | str], usual: np.dtype
    ) -> Gathered:
        place = np.full(self.num_samples, -1, dtype=np.int64)
        arrays: list[np.ndarray] = []
        for row in rows.tolist():
            values = getattr(self.samples[row], name)
            known = values.array if type(values) is NumberList else None
            array = read(values) if known is None or known.dtype is not usual else known
            if isinstance(array, str):
                self.details[row] = array
            else:
                place[row] = len(arrays)
                arrays.append(array)
        return Gathered(TokenRows.of(arrays, name, self._scratch), place)

    def response_ids(self, row: int) -> np.ndarray:
        """[T] ids of the response. The row's tokens have been gathered and read."""
        assert self._tokens is not None, (
            "a check read response ids before any check gathered tokens"
        )
        ids = self._tokens.ragged.row(self._tokens.place[row])
        return ids[len(ids) - self.response_lengths[row] :]

    def missing_log_probs(self, row: int) -> np.ndarray | None:
        """[T] bool: entries that are None; None if there are none."""
        return missing_positions(self.samples[row].rollout_log_probs)

    def text_of(self, rows: np.ndarray) -> dict[int, str]:
        """Text by row that the checks read: decoded from the ids where a codec is given, else the
        engine's. Decodes in one batch.
        """
        wanted = [row for row in rows.tolist() if row not in self._text_view]
        if not wanted:
            return self._text_view
        if self.codec is not None:
            self.counts["decoded"] += len(wanted)
            texts = self.codec.decode([self.response_ids(row) for row in wanted])
            self._text_view.update(zip(wanted, texts, strict=True))
        else:
            for row in wanted:
                text = self.samples[row].response
                self._text_view[row] = text if isinstance(text, str) else ""
        return self._text_view

    def set_text_view(self, row: int, text: str) -> None:
        self._text_view[row] = text


def task_name(sample: Sample) -> str | None:
    """The name that per-task rules go by: metadata["source_name"], else metadata["rm_type"]."""
    metadata = sample.metadata if isinstance(sample.metadata, dict) else {}
    first, second = TASK_NAME_KEYS
    name = metadata.get(first) or metadata.get(second)
    return name if isinstance(name, str) else None


def rows_in(rows: np.ndarray, chosen: Container[int]) -> np.ndarray:
    """[len(rows)] bool: which of the rows are in `chosen`."""
    return (
        np.array([row in chosen for row in rows.tolist()], dtype=bool)
        if chosen
        else np.zeros(len(rows), dtype=bool)
    )
