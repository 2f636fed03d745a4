"""The gate: `postprocess_output_data` gives every sample a verdict with one reason, and changes no
token.

Pure: samples come out as new objects (token buffers shared), the input is not edited. Work goes
chunk by chunk, so that added memory does not grow with the batch; a chunk's result does not depend
on its neighbours, so parts add up to the whole.

Three samples of 3, 0 and 3 response tokens, the last one cut at the length limit:

    codes                   [0 3 6]     sound, empty, truncated
    checked_no_response     3           every check before it found nothing
    checked_too_short       2           the empty one has its reason, and is not looked at again
    checked_bad_token       1
    verdicts                valid, empty, truncated
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from slime.data.reasons import PENALIZABLE, is_model_failure, reason_of_code
from slime.data.sample import Sample
from slime.exceptions import ConfigError, RolloutDataError
from slime.gate.adapters import ADAPTERS
from slime.gate.alignment import Codec, codec_of
from slime.gate.before_rewards import ResponseTally
from slime.gate.checks import CHECKS, Check, is_kept, is_penalized
from slime.gate.chunk import FINISH_NAMES, Chunk
from slime.gate.config import GateConfig, MissingLogProbs, Policy, Verdict
from slime.gate.integrity_checks import earlier_reason, reward_problem
from slime.gate.stand_ins import stand_ins
from slime.gate.statistics import GateStatistics, describe_samples
from slime.gate.token_columns import Scratch, token_array
from slime.typing import Tokenizer

CHUNK_TOKENS = 1 << 18  # their columns stay in a core's cache
CHUNK_SAMPLES = 8192


def _no_seconds() -> collections.defaultdict[str, float]:
    return collections.defaultdict(float)


@dataclasses.dataclass
class Outcome:
    """What the checks said about N samples. `codes` [N] int8: reason code of invalid samples, 0 =
    valid. `findings` [N] int8: the reason a valid sample was kept in spite of. Sparse by position:
    details, texts (decoded responses), masks, answers, rewards (of penalized samples that have
    none). `counts` and `seconds` are sums.
    """

    codes: np.ndarray
    findings: np.ndarray
    details: dict[int, str] = dataclasses.field(default_factory=dict)
    texts: dict[int, str] = dataclasses.field(default_factory=dict)
    masks: dict[int, list[int]] = dataclasses.field(default_factory=dict)
    answers: dict[int, str] = dataclasses.field(default_factory=dict)
    rewards: dict[int, Any] = dataclasses.field(default_factory=dict)
    counts: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    seconds: collections.defaultdict[str, float] = dataclasses.field(default_factory=_no_seconds)

    @staticmethod
    def concatenate(parts: Sequence[Outcome]) -> Outcome:
        """The outcome of the samples of all `parts`, one after another."""
        if not parts:
            return Outcome(np.zeros(0, dtype=np.int8), np.zeros(0, dtype=np.int8))
        total = Outcome(
            np.concatenate([p.codes for p in parts]), np.concatenate([p.findings for p in parts])
        )
        first = 0
        for part in parts:
            for name in ("details", "texts", "masks", "answers", "rewards"):
                getattr(total, name).update(
                    {first + row: value for row, value in getattr(part, name).items()}
                )
            total.counts.update(part.counts)
            for name, value in part.seconds.items():
                total.seconds[name] += value
            first += len(part.codes)
        return total


@dataclasses.dataclass(frozen=True)
class PostprocessResult:
    """`samples` in input order (dropped ones left out); `raw_rows[i]` is the input position of
    `samples[i]`; one verdict per *input* sample; statistics of the call; alarms are filled by the
    shell that knows the history. `build(row)` makes the marked sample of an input. `config` is what
    decided the verdicts.
    """

    samples: list[Sample]
    statistics: GateStatistics
    verdicts: list[Verdict]
    raw_rows: list[int]
    build: Callable[[int], Sample]
    config: GateConfig
    alarms: tuple = ()

    @functools.cached_property
    def judged(self) -> list[Sample]:
        """Every input sample, marked: `samples`, and those that were dropped."""
        kept = dict(zip(self.raw_rows, self.samples, strict=True))
        return [kept[row] if row in kept else self.build(row) for row in range(len(self.verdicts))]


def postprocess_output_data(
    raw_outputs: Sequence[Any],
    config: GateConfig,
    *,
    tokenizer: Tokenizer | Codec | None = None,
    previous: GateStatistics | Sequence[GateStatistics] | None = None,
) -> PostprocessResult:
    """Verdicts, marked samples and statistics of one batch.

    Args:
        raw_outputs: Samples, or what `config.adapter` turns into one.
        config: all thresholds, policies and levels.
        tokenizer: a fast tokenizer or a `Codec`; without it text checks read the engine's text.
        previous: statistics of earlier rollouts, oldest first, for drift.
    Raises:
        RolloutDataError: an item that is no Sample (naming its position), or missing log-probs
        under policy `error`.
    """
    samples = adapt(raw_outputs, config)
    return assemble(
        samples, judge(samples, config, codec_of(tokenizer, config)), config, previous=previous
    )


def check_responses(
    samples: Sequence[Sample],
    config: GateConfig,
    *,
    tokenizer: Tokenizer | Codec | None = None,
    tally: ResponseTally | None = None,
) -> list[Verdict]:
    """One verdict per sample, before rewards, without statistics. Apply them with `apply_verdicts`.

    tally: the gate's (`Gate.tally`): what is found is added to it, and a schedule of levels follows
    the rollout that the gate reached. Without one the run is at its first rollout.
    """
    if tally is None:
        tally = ResponseTally()
    wall, processor = time.perf_counter(), time.process_time()
    config = config.at(tally.rollout_id, tally.bad_format_rate)
    if tally.compares_all(tally.rollout_id):
        config = dataclasses.replace(config, compare_every=1)
    if config.rewards_expected:
        config = dataclasses.replace(config, rewards_expected=False)
    outcome = judge(adapt(samples, config), config, codec_of(tokenizer, config))
    verdicts = _verdicts(outcome, config)
    # they stay absent, and `Gate.run` counts them
    if config.log_prob_policy is MissingLogProbs.ALLOW:
        outcome.counts.pop("missing_log_probs", None)
    # Engines generate meanwhile: where they use the same cores, waiting for one is their time and
    # not the gate's.
    tally.add(outcome.counts, min(time.perf_counter() - wall, time.process_time() - processor))
    return verdicts


def apply_verdicts(samples: Sequence[Sample], verdicts: Sequence[Verdict]) -> list[Sample]:
    """New samples with `valid` and `invalid_reason` set (and the decoded text or mask a verdict
    carries); token buffers are shared.
    """
    return [_marked(sample, verdict) for sample, verdict in zip(samples, verdicts, strict=True)]


def adapt(raw_outputs: Sequence[Any], config: GateConfig) -> Sequence[Sample]:
    """Samples as they are; other shapes through the adapter that the config names."""
    if config.adapter is None:
        return raw_outputs
    if config.adapter not in ADAPTERS:
        raise ConfigError(f"Gate adapter '{config.adapter}' is unknown. Known: {sorted(ADAPTERS)}.")
    convert = ADAPTERS[config.adapter]
    samples = []
    for position, raw in enumerate(raw_outputs):
        if isinstance(raw, Sample):
            samples.append(raw)
            continue
        try:
            samples.append(convert(raw))
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise RolloutDataError(
                f"Gate input {position} cannot be read by adapter '{config.adapter}': "
                f"{type(error).__name__}: {error}"
            ) from error
    return samples


def judge(
    samples: Sequence[Sample], config: GateConfig, codec: Codec | None, *, first_position: int = 0
) -> Outcome:
    """The outcome of all checks over `samples`, chunk by chunk. `first_position`: of samples[0] in
    the batch, for messages.
    """
    scratch = Scratch()
    return Outcome.concatenate(
        [
            _judge_chunk(
                Chunk(
                    samples[low:high],
                    config,
                    codec,
                    first_position=first_position + low,
                    scratch=scratch,
                )
            )
            for low, high in _chunk_bounds(samples)
        ]
    )


def _chunk_bounds(samples: Sequence[Sample]) -> Iterator[tuple[int, int]]:
    """Consecutive [low, high) with at most CHUNK_TOKENS tokens (one sample may exceed it) and
    CHUNK_SAMPLES samples.
    """
    low = tokens = 0
    for position, sample in enumerate(samples):
        try:
            length = len(sample.tokens)
        except (TypeError, AttributeError):  # the checks say what is wrong with it
            length = 0
        if position > low and (tokens + length > CHUNK_TOKENS or position - low >= CHUNK_SAMPLES):
            yield low, position
            low, tokens = position, 0
        tokens += length
    if len(samples) > low:
        yield low, len(samples)


def _judge_chunk(chunk: Chunk) -> Outcome:
    codes = np.zeros(chunk.num_samples, dtype=np.int8)
    findings = np.zeros(chunk.num_samples, dtype=np.int8)
    seconds = _no_seconds()
    details: dict[int, str] = {}
    if chunk.config.trust_earlier_verdicts:
        for row, sample in enumerate(chunk.samples):
            if sample.valid is not True and (reason := earlier_reason(sample)) is not None:
                codes[row] = reason.code
    alive = np.flatnonzero(codes == 0)
    chunk.counts["judged_earlier"] += chunk.num_samples - len(alive)
    for check in CHECKS:
        if not len(alive):
            break
        if not check.is_on(chunk):
            continue
        start = time.perf_counter()
        rows, settled = _rows_for(chunk, check, alive)
        failed = check.find(chunk, rows)
        chunk.counts[check.counter] += len(rows)
        if np.count_nonzero(failed):  # several times as fast as any()
            rows = _record(chunk, check, rows, failed, codes, findings, details)
            alive = rows if settled is None else np.sort(np.concatenate([rows, settled]))
        seconds[check.name] += time.perf_counter() - start
    _count_finish_reasons(chunk)
    counts = collections.Counter({name: count for name, count in chunk.counts.items() if count})
    keep = {row for row in chunk.masks if codes[row] == 0}
    masks = {row: mask for row, mask in chunk.masks.items() if row in keep}
    return Outcome(
        codes,
        findings,
        details,
        chunk.texts,
        masks,
        chunk.answers,
        _rewards_of_failures(chunk, codes),
        counts,
        seconds,
    )


def _rows_for(
    chunk: Chunk, check: Check, alive: np.ndarray
) -> tuple[np.ndarray, np.ndarray | None]:
    """(rows that the check looks at, rows that it need not look at or None): a penalized sample is
    a failure already, and another failure of the model's does not exclude it. Whether it can be
    trained at all is still looked at.
    """
    if check.reason not in PENALIZABLE or not chunk.penalized.any():
        return alive, None
    settled = chunk.penalized[alive]
    return alive[~settled], alive[settled]


def _rewards_of_failures(chunk: Chunk, codes: np.ndarray) -> dict[int, Any]:
    """{row: reward} of the penalized samples that passed everything else and have no reward of
    their own.
    """
    config = chunk.config
    reward = (
        {config.reward_key: config.failure_reward} if config.reward_key else config.failure_reward
    )
    rows = np.flatnonzero(chunk.penalized & (codes == 0)).tolist()
    return {row: reward for row in rows if chunk.samples[row].reward is None}


def _record(
    chunk: Chunk,
    check: Check,
    alive: np.ndarray,
    failed: np.ndarray,
    codes: np.ndarray,
    findings: np.ndarray,
    details: dict[int, str],
) -> np.ndarray:
    """Writes the reason of the failed rows and returns the rows that go on: the others, and those
    kept by policy.
    """
    rows = alive[failed]
    penalized = is_penalized(chunk, check.reason, rows) & check.may_be_kept
    chunk.penalized[rows[penalized]] = True
    kept = (is_kept(chunk, check.reason, rows) & check.may_be_kept) | penalized
    first_finding = rows[kept & (findings[rows] == 0)]
    findings[first_finding] = check.reason.code
    codes[rows[~kept]] = check.reason.code
    findings[rows[~kept]] = 0
    for row in [*first_finding.tolist(), *rows[~kept].tolist()]:
        details[row] = chunk.details.get(row) or check.describe(chunk, row)
    goes_on = ~failed
    goes_on[failed] = kept
    return alive[goes_on]


def _count_finish_reasons(chunk: Chunk) -> None:
    """Counts finish reasons, and how they agree with the last token: "stop" without an end token,
    "length" with one.
    """
    for code, name in enumerate(FINISH_NAMES):
        chunk.counts[f"finish_{name}"] += int(np.count_nonzero(chunk.finish == code))
    eos = chunk.config.eos_token_ids | (
        chunk.codec.eos_token_ids if chunk.codec is not None else frozenset()
    )
    if not eos:
        return
    rows = np.flatnonzero(
        ((chunk.finish == 1) | (chunk.finish == 2))
        & (chunk.response_lengths > 0)
        & (chunk.total_lengths > 0)
    )
    last = _last_ids(chunk, rows)
    ends = (last[:, None] == np.array(list(eos))).any(axis=1)
    chunk.counts["stop_without_eos"] += int(
        np.count_nonzero((chunk.finish[rows] == 1) & ~ends & (last >= 0))
    )
    chunk.counts["length_with_eos"] += int(np.count_nonzero((chunk.finish[rows] == 2) & ends))


def _last_ids(chunk: Chunk, rows: np.ndarray) -> np.ndarray:
    """[len(rows)] id of the last token, -1 where it cannot be read. A row that failed before any
    token was gathered has one too: most of those with finish reason "length" do.
    """
    last = np.full(len(rows), -1, dtype=np.int64)
    absent = np.ones(len(rows), dtype=bool)
    if (gathered := chunk.gathered_tokens) is not None:
        places = gathered.place[rows]
        absent = places < 0
        last[~absent] = gathered.ragged.values[gathered.ragged.offsets[places[~absent] + 1] - 1]
    for position in np.flatnonzero(absent).tolist():
        tokens = chunk.samples[rows[position]].tokens
        values = token_array(list(tokens[-1:]) if isinstance(tokens, list | tuple) else tokens)
        if not isinstance(values, str):
            last[position] = values[-1]
    return last


def _verdicts(outcome: Outcome, config: GateConfig) -> list[Verdict]:
    plain = Verdict(True)
    verdicts = [plain] * len(outcome.codes)
    special = (
        set(np.flatnonzero((outcome.codes != 0) | (outcome.findings != 0)).tolist())
        | outcome.texts.keys()
        | outcome.masks.keys()
        | outcome.answers.keys()
        | outcome.rewards.keys()
    )
    for row in special:
        reason = reason_of_code(int(outcome.codes[row]))
        valid = reason is None
        verdicts[row] = Verdict(
            valid=valid,
            reason=reason_of_code(int(outcome.findings[row])) if valid else reason,
            detail=outcome.details.get(row, ""),
            text=outcome.texts.get(row) if valid else None,
            keep_mask=outcome.masks.get(row),
            answer=outcome.answers.get(row) if valid else None,
            reward=outcome.rewards.get(row) if valid else None,
            dropped=reason is not None
            and config.policy_of(reason) is Policy.DROP
            and not config.evaluation,
        )
    return verdicts


def _copied(sample: Sample) -> Sample:
    copied = object.__new__(type(sample))  # several times cheaper than copy.copy, and as shallow
    copied.__dict__.update(sample.__dict__)
    return copied


def _marked(sample: Sample, verdict: Verdict) -> Sample:
    marked = _copied(sample)
    fields = marked.__dict__
    fields["valid"] = verdict.valid
    fields["invalid_reason"] = verdict.reason.value if verdict.reason is not None else None
    if verdict.text is not None:
        fields["response"] = verdict.text
    if verdict.answer is not None and isinstance(sample.metadata, dict):
        fields["metadata"] = {**sample.metadata, "answer_text": verdict.answer}
    if verdict.reward is not None:
        fields["reward"] = verdict.reward
    if verdict.keep_mask is not None:
        fields["loss_mask"], fields["rollout_log_probs"] = _masked_columns(
            sample, verdict.keep_mask
        )
    return marked


def _built(
    samples: Sequence[Sample],
    verdicts: Sequence[Verdict],
    is_reward_bad: Callable[[Any], bool],
    row: int,
) -> Sample:
    """The marked sample of an input, with stand-ins for the unreadable fields of an invalid one."""
    marked = _marked(samples[row], verdicts[row])
    if not marked.valid:
        marked.__dict__.update(stand_ins(marked, is_reward_bad))
    return marked


def _is_bad_reward(config: GateConfig, reward: object) -> bool:
    return config.rewards_expected and reward_problem(reward, config.reward_key) is not None


def _masked_columns(sample: Sample, keep_mask: list[int]) -> tuple[list[int], list[float]]:
    """Loss mask and log-probs where missing entries carry no loss. Their log-prob reads 0.0 and is
    never used.
    """
    given = keep_mask if sample.loss_mask is None else [int(value) for value in sample.loss_mask]
    mask = [a & b for a, b in zip(given, keep_mask, strict=True)]
    log_probs = (
        sample.rollout_log_probs if sample.rollout_log_probs is not None else [0.0] * len(keep_mask)
    )
    return mask, [value if value is not None else 0.0 for value in log_probs]


def assemble(
    samples: Sequence[Sample],
    outcome: Outcome,
    config: GateConfig,
    *,
    previous: GateStatistics | Sequence[GateStatistics] | None = None,
) -> PostprocessResult:
    """Builds the output samples and the statistics once all checks have spoken."""
    start = time.perf_counter()
    verdicts = _verdicts(outcome, config)
    raw_rows = [row for row, verdict in enumerate(verdicts) if not verdict.dropped]
    if config.evaluation:
        build: Callable[[int], Sample] = lambda row: _copied(samples[row])  # noqa: E731
    else:
        build = functools.partial(
            _built, samples, verdicts, functools.partial(_is_bad_reward, config)
        )
    built = [build(row) for row in raw_rows]
    outcome.seconds["assemble"] += time.perf_counter() - start
    statistics = describe_samples(samples, outcome, config).with_history(previous)
    return PostprocessResult(built, statistics, verdicts, raw_rows, build, config)


def failures_outside(judged: PostprocessResult, sources: Sequence[int]) -> list[int | None]:
    """`Sample.rollout_id` of the samples that were rejected for what the model wrote and have no
    row in the train data.
    """
    inside = set(sources)
    return [
        s.rollout_id
        for place, s in enumerate(judged.judged)
        if place not in inside and is_model_failure(s)
    ]
