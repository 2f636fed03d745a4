"""The gate's checks as anyone would write them first: one Python loop per sample. Oracle of tests
and baseline of the benchmark.

Covers every check that needs no tokenizer, in the gate's order, with plain lists of numbers.
"""

from __future__ import annotations

import math
import unicodedata

from slime.data.sample import Sample, Status
from slime.gate.config import GateConfig, MissingLogProbs

INVISIBLE = set("\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0")
DRAWN_FORMAT_CHARACTERS = set(
    map(chr, [*range(0x600, 0x606), 0x6DD, 0x70F, 0x890, 0x891, 0x8E2, 0x110BD, 0x110CD])
)


def is_invisible(character: str) -> bool:
    """Whether a character shows nothing, from the Unicode database."""
    point = ord(character)
    selector = 0xFE00 <= point <= 0xFE0F or 0xE0100 <= point <= 0xE01EF or 0x180B <= point <= 0x180F
    category = unicodedata.category(character) in ("Zs", "Zl", "Zp", "Cc", "Cf", "Cs")
    return (
        selector
        or character in INVISIBLE
        or (category and character not in DRAWN_FORMAT_CHARACTERS)
    )


def reason_of(sample: Sample, config: GateConfig) -> str | None:
    """The first reason against a well-formed sample, by looping over its tokens."""
    if sample.status is Status.FAILED:
        return "failed"
    if sample.status is Status.ABORTED or sample.finish_reason == "abort":
        return "aborted"
    length, total = sample.response_length, len(sample.tokens)
    if length > total or (sample.loss_mask is not None and len(sample.loss_mask) != length):
        return "misaligned"
    if length == 0:
        return "empty"
    if length < config.min_response_tokens:
        return "too_short"
    limit = math.inf if config.max_response_tokens is None else config.max_response_tokens
    if config.context_length is not None:
        limit = min(
            limit,
            config.context_length
            - (total - length)
            - math.ceil(config.context_length * config.margin),
        )
    if length > limit:
        return "too_long"
    if sample.status is Status.TRUNCATED or sample.finish_reason == "length":
        return "truncated"
    log_probs = sample.rollout_log_probs
    if log_probs is None:
        if config.missing_log_probs is MissingLogProbs.MARK:
            return "logprob_mismatch"
    elif len(log_probs) != length:
        return "logprob_mismatch"
    for token in sample.tokens:
        if token < 0 or (config.vocab_size is not None and token >= config.vocab_size):
            return "bad_token"
    if sample.response and all(is_invisible(character) for character in sample.response):
        return "empty"
    for value in log_probs or ():
        if math.isnan(value) or math.isinf(value) or value > config.log_prob_tolerance:
            return "bad_logprob"
    if config.repetition_window and length >= config.repetition_window:
        tail = list(sample.tokens[total - config.repetition_window :])
        for period in range(
            1, min(config.repetition_max_period, config.repetition_window // 4) + 1
        ):
            if all(tail[i] == tail[i - period] for i in range(period, len(tail))):
                return "repetitive"
    if config.rewards_expected:
        reward = sample.reward
        if not isinstance(reward, int | float) or math.isnan(reward) or math.isinf(reward):
            return "bad_reward"
    return None
