"""What the `slime gate` commands compute: samples in, findings and lines of text out. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from slime.data.sample import Sample
from slime.gate.alignment import Codec, classify_mismatch
from slime.gate.before_rewards import engine_text_of
from slime.gate.config import MismatchCause
from slime.gate.integrity_checks import reward_problem
from slime.gate.judge import PostprocessResult
from slime.gate.stand_ins import is_identity
from slime.gate.token_columns import as_int, length_of, token_array

ADVICE_OF_CAUSE = {
    MismatchCause.SPECIAL_TOKENS: "the text shows special tokens: decode with skip_special_tokens",
    MismatchCause.MULTIBYTE_CUT: (
        "a character was cut or replaced: check the engine's incremental detokenizer and encodings"
    ),
    MismatchCause.WHITESPACE: (
        "whitespace policies differ: take the text from the tokens "
        "everywhere (--gate-text-source tokens)"
    ),
    MismatchCause.SHIFTED_IDS: (
        "the ids are not this text's: check what the sampler returns as "
        "ids, and the tokenizer's version"
    ),
}
_LENGTHS = ("mean", "p01", "p50", "p99", "max")
HOW_TO_READ_ENDS = (
    "malformed samples at the low end: the checks are too weak; undeserved ones at the high end: "
    "the checks are too loose, "
    "or the reward has a hole"
)


@dataclasses.dataclass(frozen=True)
class Mismatch:
    """One sample whose text is not its tokens. `pieces`: (id, text of the id alone) around the
    first difference at `character`.
    """

    position: int
    index: Any
    cause: MismatchCause
    character: int
    decoded: str
    text: str
    pieces: list[tuple[int, str]]


@dataclasses.dataclass(frozen=True)
class Suggestion:
    """Thresholds in tokens measured on one rollout; margin is a share of the context."""

    num_measured: int
    min_response_tokens: int
    max_response_tokens: int
    margin: float


def reason_table(result: PostprocessResult) -> list[str]:
    """Lines of a table: reason, count, share, one example with its detail."""
    statistics = result.statistics
    lines = [f"{'reason':<18}{'count':>8}{'share':>9}  example"]
    examples: dict[tuple[bool, Any], str] = {}
    for position, verdict in enumerate(result.verdicts):
        if verdict.reason is not None:
            examples.setdefault((verdict.valid, verdict.reason), f"#{position}: {verdict.detail}")
    lines.append(f"{'kept':<18}{statistics.kept:>8}{_share(statistics.kept, statistics.total):>9}")
    for reason, count in statistics.dropped.items():
        if count:
            lines.append(
                f"{reason.value:<18}{count:>8}{_share(count, statistics.total):>9}  "
                f"{examples[False, reason][:100]}"
            )
    for reason, count in statistics.kept_by_policy.items():
        if count:
            name = f"kept: {reason.value}"
            lines.append(
                f"{name:<18}{count:>8}{_share(count, statistics.total):>9}  "
                f"{examples[True, reason][:100]}"
            )
    return [*lines, f"{'total':<18}{statistics.total:>8}"]


def _number_in(reward: Any, reward_key: str | None) -> float:
    return float(reward[reward_key] if reward_key else reward)


def reward_ends(
    samples: Sequence[Sample], num_each: int, *, reward_key: str | None = None
) -> tuple[list[int], list[int]]:
    """(lowest, highest): positions of the valid samples with the smallest and the largest rewards;
    samples without a number are left out.
    """
    scored = [
        (_number_in(sample.reward, reward_key), position)
        for position, sample in enumerate(samples)
        if sample.valid and reward_problem(sample.reward, reward_key) is None
    ]
    scored.sort()
    low = [position for _, position in scored[:num_each]]
    return low, [position for _, position in reversed(scored[max(0, len(scored) - num_each) :])]


def describe_end(position: int, sample: Sample) -> list[str]:
    """Lines that let a reader judge one reward: the end of the prompt, the label, and the beginning
    of the response with its end.
    """
    response = str(sample.response)
    if len(response) > 300:
        response = f"{response[:200]} ... {response[-80:]}"
    return [
        (
            f"  #{position} group {sample.group_index} reward {sample.reward} length "
            f"{sample.response_length} label {sample.label!r:.200}"
        ),
        f"      prompt   {_end_of_prompt(sample.prompt)!r}",
        f"      response {response!r}",
    ]


def _end_of_prompt(prompt: object) -> str:
    """The last 200 characters of a prompt's text, or of the last message of a conversation."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[-1], dict):
        prompt = prompt[-1].get("content")
    return str(prompt)[-200:]


def find_mismatches(
    samples: Sequence[Sample], codec: Codec, *, stop_strings: Sequence[str] = ()
) -> list[Mismatch]:
    """Every sample whose response text, as the engine sent it, differs from its decoded ids, with
    the cause and the tokens around the first difference.

    Samples whose ids cannot be read or lie outside the vocabulary are not compared; the gate names
    those.
    """
    readable = []
    for position, sample in enumerate(samples):
        ids = token_array(sample.tokens)
        length = sample.response_length
        if (
            isinstance(ids, str)
            or as_int(length) is None
            or not 0 < length <= len(ids)
            or not isinstance(engine_text_of(sample), str)
        ):
            continue
        ids = ids[len(ids) - length :]
        if ids.min() >= 0 and ids.max() < codec.vocab_size:
            readable.append((position, ids))
    texts = codec.decode([ids for _, ids in readable], without=codec.all_special)
    shown = codec.decode([ids for _, ids in readable])
    found = []
    for (position, ids), decoded, with_shown in zip(readable, texts, shown, strict=True):
        text = engine_text_of(samples[position])
        cause = classify_mismatch(
            decoded, text, special_strings=codec.special_strings, stop_strings=stop_strings
        )
        if cause is None or classify_mismatch(with_shown, text, stop_strings=stop_strings) is None:
            continue
        character = first_differing_character(decoded.strip(), text.strip())
        found.append(
            Mismatch(
                position,
                samples[position].index,
                cause,
                character,
                decoded,
                text,
                _pieces(ids, codec, decoded, character),
            )
        )
    return found


def first_differing_character(first: str, second: str) -> int:
    """Index of the first character that differs; the shorter length if one is a prefix of the
    other.
    """
    low, high = 0, min(len(first), len(second))
    while low < high:  # the longest common prefix, by halving
        middle = (low + high + 1) // 2
        low, high = (middle, high) if first[:middle] == second[:middle] else (low, middle - 1)
    return low


def _pieces(ids: np.ndarray, codec: Codec, decoded: str, character: int) -> list[tuple[int, str]]:
    """Up to nine (id, text) around the token that produces `character` of the stripped decoded
    text.
    """
    character += len(decoded) - len(decoded.lstrip())
    low, high = 0, len(ids)
    while low < high:  # the first prefix of ids whose text reaches the character
        middle = (low + high) // 2
        low, high = (
            (low, middle)
            if len(codec.decode([ids[: middle + 1]], without=codec.all_special)[0]) > character
            else (middle + 1, high)
        )
    around = ids[max(0, low - 4) : low + 5].tolist()
    return [
        (token_id, codec.tokenizer.decode([token_id], skip_special_tokens=False))
        for token_id in around
    ]


def describe_mismatch(mismatch: Mismatch) -> list[str]:
    """Lines that show one mismatch, token by token."""
    start = max(0, mismatch.character - 20)
    pieces = " ".join(f"{token_id}:{piece!r}" for token_id, piece in mismatch.pieces)
    return [
        (
            f"sample {mismatch.position} (index {mismatch.index}): {mismatch.cause.value} at "
            "character "
            f"{mismatch.character}"
        ),
        f"  from tokens: {mismatch.decoded.strip()[start : start + 60]!r}",
        f"  given text : {mismatch.text.strip()[start : start + 60]!r}",
        f"  tokens     : {pieces}",
        f"  likely     : {ADVICE_OF_CAUSE[mismatch.cause]}",
    ]


def compare_groups(processed: Sequence[Sample], sampled: Sequence[Sample]) -> list[str]:
    """Differences of group membership between processed samples and the sampling groups, joined by
    sample index; [] if none.

    Names samples whose group changed, samples that were never sampled, and indices that appear
    twice.
    """
    group_of = {sample.index: sample.group_index for sample in sampled if is_identity(sample.index)}
    problems, seen = [], set()
    for sample in processed:
        if not is_identity(sample.index):
            problems.append(f"sample index {sample.index!r} is no number")
            continue
        if sample.index in seen:
            problems.append(f"sample index {sample.index} appears twice")
        seen.add(sample.index)
        if sample.index not in group_of:
            problems.append(f"sample index {sample.index} was never sampled")
        elif group_of[sample.index] != sample.group_index:
            problems.append(
                f"sample index {sample.index}: group {group_of[sample.index]} when sampled, "
                f"{sample.group_index} now"
            )
    return problems


def suggest_thresholds(
    samples: Sequence[Sample], *, context_length: int | None = None
) -> Suggestion:
    """Thresholds from responses that ended by themselves: minimum = 1 % quantile, maximum = 99.9 %
    quantile and half as much again.

    The margin is 5 % of the context, or 10 % where more than 1 % of the samples end inside those 5
    %. ValueError without samples.
    """
    ended = [
        s
        for s in samples
        if s.finish_reason != "length"
        and s.status.value != "truncated"
        and s.valid
        and (as_int(s.response_length) or 0) > 0
    ]
    if not ended:
        raise ValueError(
            "no response in the dump ended by itself: thresholds cannot be measured on it."
        )
    lengths = np.array([sample.response_length for sample in ended])
    margin = 0.05
    if context_length is not None:
        totals = np.array([max(length_of(sample.tokens), 0) for sample in samples])
        margin = 0.1 if (totals > context_length * (1 - margin)).mean() > 0.01 else margin
    return Suggestion(
        num_measured=len(ended),
        min_response_tokens=max(1, int(np.quantile(lengths, 0.01))),
        max_response_tokens=math.ceil(1.5 * float(np.quantile(lengths, 0.999))),
        margin=margin,
    )


FEW_REWARDS = 5  # a reward with at most so many values is a grade, not a distribution


def reward_shape(samples: Sequence[Sample], *, reward_key: str | None = None) -> list[str]:
    """Lines about the distribution of kept rewards: share of zeros, the shares of a few values,
    else whether there are two peaks.

    A reward of a few values (0 and 1) has peaks by construction; they are not reported.
    """
    values = np.array(
        [
            _number_in(sample.reward, reward_key)
            for sample in samples
            if sample.valid and reward_problem(sample.reward, reward_key) is None
        ]
    )
    if not len(values):
        return ["no valid sample has a reward"]
    lines = [
        f"{len(values)} rewards, mean {values.mean():.4f}, zeros {100 * (values == 0).mean():.1f} %"
    ]
    distinct, counts = np.unique(values, return_counts=True)
    if 1 < len(distinct) <= FEW_REWARDS:
        shares = ", ".join(
            f"{value:g}: {count / len(values):.1%}"
            for value, count in zip(distinct, counts, strict=True)
        )
        lines.append(f"{len(distinct)} values, {shares}")
    elif len(distinct) > FEW_REWARDS:
        # 5/9 is the bimodality coefficient of a uniform distribution, a little more of a few
        # equally spaced values; 1 of two points.
        centred = (values - values.mean()) / values.std()
        coefficient = ((centred**3).mean() ** 2 + 1) / (centred**4).mean()
        if coefficient > 0.6:
            lines.append(
                f"two peaks (bimodality {coefficient:.2f}): look whether empty, truncated or "
                "malformed samples were kept"
            )
    return lines


def diagnose_records(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """The first two steps when the loss spikes, from the rollouts' records: what changed in the
    drop statistics and in the lengths.
    """
    training: list[Mapping[str, Any]] = []
    for record in records:
        if record.get("evaluation") or not _is_whole(record):
            continue
        # a resume generated it again
        while training and training[-1]["rollout_id"] >= record["rollout_id"]:
            training.pop()
        training.append(record)
    if not training:
        return ["no rollout has been recorded"]
    last, earlier = training[-1], training[:-1][-5:]
    lines = [
        (
            f"(1) drop statistics of rollout {last['rollout_id']}: {100 * last['drop_rate']:.1f} % "
            f"invalid of {last['total']}"
        )
    ]
    total_before = sum(record["total"] for record in earlier)
    for reason, count in last["dropped"].items():
        before = sum(record["dropped"].get(reason, 0) for record in earlier)
        share, share_before = count / max(last["total"], 1), before / max(total_before, 1)
        if count or before:
            mark = "  <-- rose" if share > share_before + 0.02 else ""
            lines.append(
                f"    {reason:<18}{100 * share:6.1f} %   before {100 * share_before:6.1f} %{mark}"
            )
    drift, lengths = last["drift"], last["lengths"]
    lines.append(f"(2) lengths of kept responses: {_lengths(lengths)}")
    if earlier:
        lines.append(f"    rollout before:             {_lengths(earlier[-1]['lengths'])}")
        lines.append(
            f"    PSI {_number(drift['psi_previous'])}, KS {_number(drift['ks_previous'])} (p "
            f"{_number(drift['ks_previous_p'])})"
        )
    for record in training[-6:]:
        lines += [
            f"    rollout {record['rollout_id']} alarm {alarm['name']}: {alarm['message']}"
            for alarm in record["alarms"]
        ]
    return lines


def _is_whole(record: Mapping[str, Any]) -> bool:
    """True for a record that has what `diagnose_records` reads, of the types that the
    gate writes.
    """
    try:
        lengths, drift = record["lengths"], record["drift"]
        numbers = [
            record["drop_rate"],
            record["total"],
            *record["dropped"].values(),
            *(lengths[name] for name in _LENGTHS if lengths),
        ]
        numbers += [
            0 if drift[name] is None else drift[name]
            for name in ("psi_previous", "ks_previous", "ks_previous_p")
        ]
        texts = [alarm[name] for alarm in record["alarms"] for name in ("name", "message")]
    except (TypeError, LookupError, AttributeError):
        return False
    are_numbers = all(isinstance(number, int | float) for number in numbers)
    return (
        are_numbers
        and isinstance(record.get("rollout_id"), int)
        and all(isinstance(text, str) for text in texts)
    )


def _lengths(lengths: Mapping[str, float]) -> str:
    return (
        " ".join(f"{name} {lengths[name]:.0f}" for name in _LENGTHS) if lengths else "nothing kept"
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _share(count: int, total: int) -> str:
    return f"{100 * count / total:.1f} %" if total else "-"
