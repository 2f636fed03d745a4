"""The checks, cheap before costly. A check looks at the rows still alive and returns which of them
fail; one line in CHECKS adds it.

To add a check: write `def find_x(chunk, rows) -> bool array [len(rows)]`, put
`Check(InvalidReason.X, find_x, describe_x)` where its cost belongs in CHECKS, and give `slime gate`
golden samples for it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
from collections.abc import Callable, Container
from typing import TYPE_CHECKING, Any

import numpy as np

from slime.data.number_list import NumberList
from slime.data.reasons import REASON_OF_VALUE, InvalidReason
from slime.data.rewards import value_problem
from slime.exceptions import RolloutDataError
from slime.gate.alignment import TextFinding, classify_mismatch, content_key
from slime.gate.before_rewards import engine_text_of
from slime.gate.chunk import STATUS_ABORTED, STATUS_FAILED, STATUS_TRUNCATED, STATUS_UNKNOWN, Chunk
from slime.gate.config import Level, MismatchCause, MissingLogProbs, Policy
from slime.gate.text import answer_of, format_problem, is_blank
from slime.gate.token_columns import as_int, mask_array

if TYPE_CHECKING:
    from slime.data.sample import Sample

Find = Callable[[Chunk, np.ndarray], np.ndarray]
_LENIENT_PERIOD = 8
_SHORT_MASK = 256


def find_rejected_earlier(chunk: Chunk, rows: np.ndarray) -> np.ndarray:
    """Samples that other code marked invalid with a reason outside the gate's vocabulary, or whose
    mark is no bool.
    """
    if not chunk.config.trust_earlier_verdicts:
        return np.zeros(len(rows), dtype=bool)
    marked = [not _is_true(chunk.samples[row].valid) for row in rows.tolist()]
    return np.array(marked, dtype=bool)


def _is_true(value: object) -> bool:
    return value is True or (isinstance(value, np.bool_) and bool(value))


def _rows_in(rows: np.ndarray, chosen: Container[int]) -> np.ndarray:
    """[len(rows)] bool: which of the rows are in `chosen`."""
    return (
        np.array([row in chosen for row in rows.tolist()], dtype=bool)
        if chosen
        else np.zeros(len(rows), dtype=bool)
    )


def find_failed(chunk: Chunk, rows: np.ndarray) -> np.ndarray:
    return (chunk.status[rows] == STATUS_FAILED) | (chunk.status[rows] == STATUS_UNKNOWN)


def find_no_identity(chunk: Chunk, rows: np.ndarray) -> np.ndarray:
    """Samples whose group, index or metadata is of a wrong type: the group whose baseline they
    belong to is unknown.
    """
    return _rows_in(rows, chunk.identity_problems)


def find_aborted(chunk: Chunk, rows: np.ndarray) -> np.ndarray:
    return (chunk.status[rows] == STATUS_ABORTED) | (chunk.finish[rows] == 3)


def find_broken_lengths(chunk: Chunk, rows: np.ndarray) -> np.ndarray:
    """A response length that is no count or exceeds the tokens, or a mask of another length:
    nothing can be lined up.
    """
    response, total, mask = (
        chunk.response_lengths[rows],
        chunk.total_lengths[rows],
        chunk.mask_lengths[rows],
    )
    return (
        (response < 0)
        | ((total >= 0) & (response > total))
        | (mask == -2)
        | ((mask >= 0) & (mask != response))
    )


def find_broken_mask(chunk: Chunk, rows: np.ndarray) -> np.ndarray:
    """A loss mask that holds something else than 0 and 1."""
    broken = np.zeros(len(rows), dtype=bool)
    for position in np.flatnonzero(chunk.mask_lengths[rows] >= 0).tolist():
        row = int(rows[position])
        mask: Any = chunk.samples[row].loss_mask
        if (
            type(mask) in (list, NumberList)
            and len(mask) < _SHORT_MASK
            and mask.count(1) + mask.count(0) == len(mask)
        ):
            continue  # an array of a few numbers costs more than counting them
        problem = mask_array(mask)
        if isinstance(problem, str):
            broken[position] = True
            chunk.details[row] = problem
    return broken


def find_no_tokens(chunk: Chunk, rows: np.ndarray) -> np.ndarray:
    return chunk.total_lengths[rows] < 0


def find_no_response(chunk: Chunk, rows: np.ndarray) -> np.ndarray:
    return chunk.response_lengths[rows] == 0


def find_too_short(chunk: Chunk, rows: np.ndarray) -> np.ndarray:
    return (
        chunk.response_lengths[rows]
        < chunk.per_task("min_response_tokens", chunk.config.min_response_tokens, 0)[rows]
    )


def usable_lengths(chunk: Chunk) -> np.ndarray:
    """[N] tokens a response may have: min(own maximum, context - prompt - margin). 2^62 where
    nothing limits it.
    """
    limit = chunk.per_task("max_response_tokens", chunk.config.max_response_tokens, 2**62)
    context = chunk.config.context_length
    if context is not None:
        prompts = chunk.total_lengths - chunk.response_lengths
        limit = np.minimum(limit, context - prompts - math.ceil(context * chunk.config.margin))
    return limit


def find_too_long(chunk: Chunk, rows: np.ndarray) -> np.ndarray:
    return chunk.response_lengths[rows] > usable_lengths(chunk)[rows]


def find_truncated(chunk: Chunk, rows: np.ndarray) -> np.ndarray:
    return (chunk.status[rows] == STATUS_TRUNCATED) | (chunk.finish[rows] == 2)


def is_kept(chunk: Chunk, reason: InvalidReason, rows: np.ndarray) -> np.ndarray:
    """[len(rows)] bool: a finding with `reason` is kept by policy; a cut also by level "off" or by
    the rules of the row's task.
    """
    by_policy = chunk.config.policy_of(reason) is Policy.KEEP
    if reason is not InvalidReason.TRUNCATED:
        return np.full(len(rows), by_policy)
    by_policy = by_policy or chunk.level("truncated") is Level.OFF
    return np.array(
        [by_policy if r.keep_truncated is None else r.keep_truncated for r in chunk.rules]
    )[chunk.rule_index[rows]]


def is_penalized(chunk: Chunk, reason: InvalidReason, rows: np.ndarray) -> np.ndarray:
    """[len(rows)] bool: a finding with `reason` is penalized by policy. A task's own rule for cuts,
    and level "off", come before the policy.
    """
    if chunk.config.policy_of(reason) is not Policy.PENALIZE:
        return np.zeros(len(rows), dtype=bool)
    if reason is not InvalidReason.TRUNCATED:
        return np.ones(len(rows), dtype=bool)
    by_policy = chunk.level("truncated") is not Level.OFF
    return np.array([by_policy and r.keep_truncated is None for r in chunk.rules])[
        chunk.rule_index[rows]
    ]


def find_log_prob_mismatch(chunk: Chunk, rows: np.ndarray) -> np.ndarray:
    """Log-probs that are absent under a policy that needs them, or not one per response token."""
    lengths, config = chunk.log_prob_lengths[rows], chunk.config
    missing = lengths == -1
    num_missing = int(np.count_nonzero(missing))
    chunk.counts["missing_log_probs"] += num_missing
    if num_missing:
        if config.log_prob_policy is MissingLogProbs.ERROR:
            position = int(rows[np.flatnonzero(missing)[0]])
            raise RolloutDataError(
                f"Sample {chunk.first_position + position} (index {chunk.samples[position].index}) "
                "has no rollout_log_probs and this "
                "run needs them. Make the engine return log-probs, or set --gate-missing-log-probs to mark, mask or allow."
            )
        if config.log_prob_policy is MissingLogProbs.MASK:
            for row in rows[missing].tolist():
                chunk.masks[row] = [0] * int(chunk.response_lengths[row])
    wrong = (lengths >= 0) & (lengths != chunk.response_lengths[rows])
    return wrong | (missing if config.log_prob_policy is MissingLogProbs.MARK else False)


def find_unreadable_tokens(chunk: Chunk, rows: np.ndarray) -> np.ndarray:
    return chunk.tokens(rows).place[rows] < 0


def find_bad_token(chunk: Chunk, rows: np.ndarray) -> np.ndarray:
    """Ids below zero or outside the vocabulary, in prompt or response."""
    gathered, size = chunk.tokens(rows), _vocab_size(chunk)
    lows, highs = gathered.ragged.row_extremes()
    return ((lows < 0) | (highs >= size))[gathered.place[rows]]


def _vocab_size(chunk: Chunk) -> int:
    """The number of valid ids; without a configured vocabulary size every id of 32 bits is valid,
    as in a list.
    """
    if chunk.config.vocab_size is not None:
        return chunk.config.vocab_size
    return chunk.codec.vocab_size if chunk.codec is not None else 2**31


def find_blank(chunk: Chunk, rows: np.ndarray) -> np.ndarray:
    """Responses with nothing to see: special tokens are nothing, also where the text shows them. A
    visible token among the first few decides most rows; only the others are decoded.
    """
    blank = np.zeros(len(rows), dtype=bool)
    if chunk.codec is None:
        for position, row in enumerate(rows.tolist()):
            text = chunk.samples[row].response
            blank[position] = isinstance(text, str) and text != "" and is_blank(text)
        return blank
    gathered = chunk.tokens(rows)
    places = gathered.place[rows]
    ends = gathered.ragged.offsets[places + 1]
    starts = ends - chunk.response_lengths[rows]
    probe = np.minimum(starts[:, None] + np.arange(8), ends[:, None] - 1)
    seen = chunk.codec.proves_visible(gathered.ragged.values[probe]).any(axis=1)
    undecided = rows[~seen]
    undecided = undecided[
        [
            not chunk.codec.proves_visible(chunk.response_ids(row)).any()
            for row in undecided.tolist()
        ]
    ]
    if len(undecided):
        chunk.counts["decoded"] += len(undecided)
        texts = chunk.codec.decode(
            [chunk.response_ids(row) for row in undecided.tolist()], without=chunk.codec.unseen
        )
        hidden = {
            row for row, text in zip(undecided.tolist(), texts, strict=True) if is_blank(text)
        }
        blank = _rows_in(rows, hidden)
    return blank


def find_bad_log_prob(chunk: Chunk, rows: np.ndarray) -> np.ndarray:
    """NaN, infinite or positive log-probs (a probability above 1), or values that are
    no numbers.
    """
    gathered = chunk.log_probs(rows)
    unreadable = (gathered.place[rows] < 0) & (chunk.log_prob_lengths[rows] != -1)
    unreadable &= ~_repair_by_mask(chunk, rows, unreadable)
    lows, highs = gathered.ragged.row_extremes()
    # The tolerance in double precision, whatever the neighbours' precision makes of the column. NaN
    # fails the first.
    wrong = ~(highs <= np.float64(chunk.config.log_prob_tolerance)) | (lows == -np.inf)
    places = gathered.place[rows]
    # row -1, absent, is the one appended
    return unreadable | ((places >= 0) & np.append(wrong, False)[places])


def _repair_by_mask(chunk: Chunk, rows: np.ndarray, unreadable: np.ndarray) -> np.ndarray:
    """[len(rows)] rows whose only fault is None entries, under policy `mask`: those positions get
    no loss; the rest must be sound.
    """
    repaired = np.zeros(len(rows), dtype=bool)
    for position in np.flatnonzero(unreadable):
        row = int(rows[position])
        missing = chunk.missing_log_probs(row)
        if missing is None:
            continue
        chunk.counts["missing_log_prob_tokens"] += int(missing.sum())
        if chunk.config.log_prob_policy is MissingLogProbs.ERROR:
            raise RolloutDataError(
                f"Sample {chunk.first_position + row} (index {chunk.samples[row].index}) has "
                f"{int(missing.sum())} log-probs that are None, "
                f"the first at response token {int(np.argmax(missing))}. Fix the engine, or set --gate-missing-log-probs to mark or mask."
            )
        rest = [value for value in chunk.samples[row].rollout_log_probs or () if value is not None]
        sound = all(
            _is_number(value) and -math.inf < value <= chunk.config.log_prob_tolerance
            for value in rest
        )
        if chunk.config.log_prob_policy is MissingLogProbs.MASK and sound:
            chunk.masks[row] = (~missing).astype(int).tolist()
            chunk.details.pop(row, None)
            repaired[position] = True
    return repaired


def find_repetitive(chunk: Chunk, rows: np.ndarray) -> np.ndarray:
    """Responses whose last `repetition_window` tokens are one phrase repeated without a difference.

    The phrase has at most `repetition_max_period` tokens (8 under `lenient`) and fits the window
    four times or more.
    """
    window, config = chunk.config.repetition_window, chunk.config
    result = np.zeros(len(rows), dtype=bool)
    long_enough = (
        np.flatnonzero(chunk.response_lengths[rows] >= window)
        if window
        else np.zeros(0, dtype=np.int64)
    )
    if not len(long_enough):
        return result
    longest = min(
        config.repetition_max_period
        if chunk.level("repetitive") is Level.STRICT
        else _LENIENT_PERIOD,
        window // 4,
    )
    gathered = chunk.tokens(rows)
    ends = gathered.ragged.offsets[gathered.place[rows[long_enough]] + 1]
    tails = gathered.ragged.values[ends[:, None] - window + np.arange(window)]
    # The last token of a phrase with period p stands in the tail every p tokens: few rows have it
    # that often.
    often = np.flatnonzero((tails == tails[:, -1:]).sum(axis=1) >= window // max(longest, 1))
    candidates = tails[often]
    for period in range(1, longest + 1):
        same = (candidates[:, period:] == candidates[:, :-period]).all(axis=1)
        result[long_enough[often[same]]] = True
    return result


def needs_text(chunk: Chunk, rows: np.ndarray) -> np.ndarray:
    """[len(rows)] bool: comparing, replacing or filling the text is due for the row."""
    if chunk.codec is None:
        return np.zeros(len(rows), dtype=bool)
    if chunk.config.text_source == "tokens" or (
        chunk.config.compare_text and chunk.level("misaligned") is not Level.OFF
    ):
        return np.ones(len(rows), dtype=bool)
    return np.array([not _has_text(chunk, row) for row in rows.tolist()], dtype=bool)


def _has_text(chunk: Chunk, row: int) -> bool:
    text = chunk.samples[row].response
    return isinstance(text, str) and text != ""


def find_misaligned(chunk: Chunk, rows: np.ndarray) -> np.ndarray:
    """Engine text that differs from the ids' text. Also sets the response text where the tokens are
    its source.
    """
    due = rows[needs_text(chunk, rows)]
    failed = set()
    compared = _compared_rows(chunk, due)
    if chunk.codec is None:  # without a tokenizer there is no text to compare with
        failed = {
            row for row in rows.tolist() if not isinstance(chunk.samples[row].response, str | None)
        }
        chunk.details.update(
            {
                row: f"response is {type(chunk.samples[row].response).__name__}, no text"
                for row in failed
            }
        )
    if len(due):
        findings = _text_findings(chunk, due, compared)
        # in one batch, also where the comparison came from the cache
        if chunk.config.text_source == "tokens":
            chunk.text_of(
                np.array(
                    [row for row, finding in findings.items() if not finding.text_is_response],
                    dtype=np.int64,
                )
            )
        for row, finding in findings.items():
            has_text = _has_text(chunk, row)
            if row in compared and has_text:
                chunk.counts["compared"] += 1
                if finding.cause is not None:
                    chunk.counts[f"cause_{finding.cause.value}"] += 1
                    chunk.counts["mismatched"] += 1
                    lenient = (
                        chunk.level("misaligned") is Level.LENIENT or chunk.config.compare_unasked
                    )
                    if not chunk.config.correct_text and not (
                        lenient and finding.cause is not MismatchCause.SHIFTED_IDS
                    ):
                        failed.add(row)
                        chunk.details[row] = f"text and tokens differ: {finding.cause.value}"
                        continue
            replace = (
                chunk.config.text_source == "tokens"
                or not has_text
                or (row in compared and finding.cause is not None)
            )
            if replace and not finding.text_is_response:
                chunk.texts[row] = chunk.text_of(np.array([row]))[row].strip()
    return _rows_in(rows, failed)


def _compared_rows(chunk: Chunk, rows: np.ndarray) -> Container[int]:
    """Those of `rows` whose text is compared with their tokens: all, or those whose index the
    sampled comparison takes.
    """
    config = chunk.config
    if not config.compare_text or chunk.level("misaligned") is Level.OFF:
        return frozenset()
    if config.compare_every == 1:
        return frozenset(rows.tolist())
    numbers = {row: as_int(chunk.samples[row].index) for row in rows.tolist()}
    return frozenset(
        row
        for row, number in numbers.items()
        if number is None or number % config.compare_every == 0
    )


def _engine_text(chunk: Chunk, row: int, compared: Container[int]) -> Any:
    """The text that a row's decoded ids are compared with: the engine's own, where an earlier pass
    has replaced it.
    """
    sample = chunk.samples[row]
    return engine_text_of(sample) if row in compared else sample.response


def _text_findings(
    chunk: Chunk, rows: np.ndarray, compared: Container[int]
) -> dict[int, TextFinding]:
    """Compares decoded ids with the engine's text for those of `rows` in `compared`; what was
    looked at before (same ids, text, rule) comes from the cache.
    """
    codec, stops = chunk.codec, chunk.config.stop_strings
    assert codec is not None, "needs_text is False for every row without a codec"
    rules = {looked_at: repr((stops, looked_at)).encode() for looked_at in (False, True)}
    ids_of = {row: chunk.response_ids(row) for row in rows.tolist()}
    keys = {
        row: content_key(ids, _engine_text(chunk, row, compared), rules[row in compared])
        for row, ids in ids_of.items()
    }
    # one look each: another thread's check may push an entry out in between
    findings = {
        row: found for row, key in keys.items() if (found := codec.cache.get(key)) is not None
    }
    fresh = np.array([row for row in rows.tolist() if row not in findings], dtype=np.int64)
    chunk.counts["cache_hits"] += len(findings)
    chunk.counts["cache_misses"] += len(fresh)
    for row, finding in findings.items():
        if finding.text_is_response:
            chunk.set_text_view(row, chunk.samples[row].response)
    texts = chunk.text_of(fresh)
    for row in fresh.tolist():
        text, ids = _engine_text(chunk, row, compared), ids_of[row]
        cause = None
        if row in compared and isinstance(text, str) and text:
            cause = classify_mismatch(
                texts[row], text, special_strings=codec.special_strings, stop_strings=stops
            )
            if cause is MismatchCause.SPECIAL_TOKENS and codec.shows_special(ids):
                plain = codec.decode([ids], without=codec.all_special)[0]
                cause = classify_mismatch(
                    plain, text, special_strings=codec.special_strings, stop_strings=stops
                )
        stripped = texts[row].strip()
        findings[row] = TextFinding(
            cause, isinstance(text, str) and text == stripped == chunk.samples[row].response
        )
        codec.remember(keys[row], findings[row])
        if cause is None:  # the second look, after the text was replaced, must not decode again
            codec.remember(
                content_key(ids, stripped, rules[row in compared]), TextFinding(None, True)
            )
    return findings


def find_bad_format(chunk: Chunk, rows: np.ndarray) -> np.ndarray:
    """Responses whose structure is not their task's. Tasks without a structure are
    not looked at.
    """
    result = np.zeros(len(rows), dtype=bool)
    if chunk.config.format is None and not chunk.config.tasks:
        return result
    level = chunk.level("bad_format")
    specs = {row: spec for row in rows.tolist() if (spec := chunk.format_of(row)) is not None}
    texts = chunk.text_of(np.array(list(specs), dtype=np.int64))
    for position, row in enumerate(rows.tolist()):
        spec = specs.get(row)
        if spec is not None:
            chunk.counts["format_checked"] += 1
            problem = format_problem(
                texts[row], spec, level, ends_with_end_token=_ends_with(chunk, row, spec.end_marker)
            )
            if problem is not None:
                result[position] = True
                chunk.details[row] = problem
            elif spec.answer is not None and (answer := answer_of(texts[row], spec)) is not None:
                chunk.answers[row] = answer
    return result


def _ends_with(chunk: Chunk, row: int, marker: str | None) -> bool | None:
    """Whether the last response token decodes to the end marker; None without a codec
    or a marker.
    """
    if chunk.codec is None or marker is None:
        return None
    last = int(chunk.response_ids(row)[-1])
    return chunk.codec.tokenizer.decode([last], skip_special_tokens=False).strip() == marker


def find_bad_reward(chunk: Chunk, rows: np.ndarray) -> np.ndarray:
    """After scoring: a reward that is None, no number, NaN or infinite, or a dict
    without the key.
    """
    result = np.zeros(len(rows), dtype=bool)
    if not chunk.config.rewards_expected:
        return result
    for position, row in enumerate(rows.tolist()):
        if chunk.penalized[row] and chunk.samples[row].reward is None:
            continue  # it gets the reward of a failure
        problem = reward_problem(chunk.samples[row].reward, chunk.config.reward_key)
        if problem is not None:
            result[position] = True
            chunk.details[row] = problem
    return result


def reward_problem(reward: object, reward_key: str | None) -> str | None:
    """A message about what is wrong with a reward; None if it is one finite number."""
    if reward_key:
        if not isinstance(reward, dict):
            return f"reward is {type(reward).__name__}, not a dict with key '{reward_key}'"
        if reward_key not in reward:
            return f"reward has keys {sorted(map(str, reward))}, not '{reward_key}' (--reward-key)"
        reward = reward[reward_key]
    elif isinstance(reward, dict):
        return f"reward is a dict with keys {sorted(map(str, reward))}; name one with --reward-key"
    return value_problem(reward)


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real)


def _lengths(chunk: Chunk, row: int) -> str:
    return (
        f"response_length {chunk.samples[row].response_length!r}, {chunk.total_lengths[row]} "
        "tokens, "
        f"{chunk.log_prob_lengths[row]} log-probs, {chunk.mask_lengths[row]} mask entries (-1: none, -2: no sequence)"
    )


def _describe_too_short(chunk: Chunk, row: int) -> str:
    minimum = chunk.per_task("min_response_tokens", chunk.config.min_response_tokens, 0)[row]
    return f"{chunk.response_lengths[row]} response tokens, at least {minimum} expected"


def _describe_too_long(chunk: Chunk, row: int) -> str:
    prompt = chunk.total_lengths[row] - chunk.response_lengths[row]
    return (
        f"{chunk.response_lengths[row]} response tokens, at most {usable_lengths(chunk)[row]} "
        f"usable after a prompt of {prompt}"
    )


def _describe_bad_token(chunk: Chunk, row: int) -> str:
    ids = chunk.tokens(np.array([row])).ragged.row(chunk.tokens(np.array([row])).place[row])
    size = _vocab_size(chunk)
    wrong = (ids < 0) | (ids >= size)
    return (
        f"token {int(np.argmax(wrong))} has id {int(ids[np.argmax(wrong)])}, vocabulary size {size}"
    )


def _describe_bad_log_prob(chunk: Chunk, row: int) -> str:
    place = chunk.log_probs(np.array([row])).place[row]
    if place < 0:
        return (
            f"log-probs of type {type(chunk.samples[row].rollout_log_probs).__name__} cannot be "
            "read as numbers"
        )
    values = chunk.log_probs(np.array([row])).ragged.row(place)
    wrong = ~(values <= np.float64(chunk.config.log_prob_tolerance)) | (values == -np.inf)
    return (
        f"log-prob of response token {int(np.argmax(wrong))} is {float(values[np.argmax(wrong)])}"
    )


@dataclasses.dataclass(frozen=True)
class Check:
    """One test. `describe(chunk, row)` returns a message about what was found, unless the check
    left a detail itself.
    """

    reason: InvalidReason
    find: Find
    describe: Callable[[Chunk, int], str]
    quality: str | None = None  # the name under which it has a level; None: integrity, always on
    # False where the later checks and the trainer could not read the sample
    may_be_kept: bool = True

    @functools.cached_property
    def name(self) -> str:
        return self.find.__name__.removeprefix("find_")

    @functools.cached_property
    def counter(self) -> str:
        """The count of samples it looked at."""
        return f"checked_{self.name}"

    def is_on(self, chunk: Chunk) -> bool:
        """Whether the check is made. For a cut, `off` means that it trains and is marked; the
        check itself still runs.
        """
        return (
            self.quality in (None, "misaligned", "truncated")
            or chunk.level(self.quality) is not Level.OFF
        )


def _status(chunk: Chunk, row: int) -> str:
    return f"status {chunk.samples[row].status!s}, finish reason {chunk.samples[row].finish_reason}"


CHECKS: tuple[Check, ...] = (
    Check(
        InvalidReason.REJECTED,
        find_rejected_earlier,
        lambda c, r: f"marked before the gate: {c.samples[r].invalid_reason}",
    ),
    Check(InvalidReason.FAILED, find_failed, _status),
    Check(InvalidReason.FAILED, find_no_identity, lambda c, r: c.identity_problems[r]),
    Check(InvalidReason.ABORTED, find_aborted, _status),
    Check(
        InvalidReason.BAD_TOKEN,
        find_no_tokens,
        lambda c, r: f"tokens are {type(c.samples[r].tokens).__name__}, no sequence",
    ),
    Check(InvalidReason.MISALIGNED, find_broken_lengths, _lengths, may_be_kept=False),
    Check(
        InvalidReason.MISALIGNED,
        find_broken_mask,
        lambda c, r: "the loss mask cannot be read",
        may_be_kept=False,
    ),
    Check(InvalidReason.EMPTY, find_no_response, lambda c, r: "no response token"),
    Check(InvalidReason.TOO_SHORT, find_too_short, _describe_too_short, "too_short"),
    Check(InvalidReason.TOO_LONG, find_too_long, _describe_too_long, "too_long"),
    Check(InvalidReason.TRUNCATED, find_truncated, _status, "truncated"),
    Check(InvalidReason.LOGPROB_MISMATCH, find_log_prob_mismatch, _lengths),
    Check(InvalidReason.BAD_TOKEN, find_unreadable_tokens, lambda c, r: "tokens cannot be read"),
    Check(InvalidReason.BAD_TOKEN, find_bad_token, _describe_bad_token),
    Check(InvalidReason.EMPTY, find_blank, lambda c, r: "nothing visible in the response"),
    Check(InvalidReason.BAD_LOGPROB, find_bad_log_prob, _describe_bad_log_prob),
    Check(
        InvalidReason.REPETITIVE,
        find_repetitive,
        lambda c, r: "the response ends in one phrase repeated",
        "repetitive",
    ),
    Check(
        InvalidReason.MISALIGNED,
        find_misaligned,
        lambda c, r: "text and tokens differ",
        "misaligned",
    ),
    Check(InvalidReason.BAD_FORMAT, find_bad_format, lambda c, r: "bad format", "bad_format"),
    Check(InvalidReason.BAD_REWARD, find_bad_reward, lambda c, r: "bad reward"),
)


def earlier_reason(sample: Sample) -> InvalidReason | None:
    """The gate's own earlier verdict on the sample, None if there is none."""
    marked = (
        isinstance(sample.valid, bool | np.bool_)
        and not sample.valid
        and isinstance(sample.invalid_reason, str)
    )
    return REASON_OF_VALUE.get(str(sample.invalid_reason)) if marked else None
