"""What is done about an invalid sample, and the frozen config that decides. The reasons stand in
slime/data/reasons.py. No numpy, no torch.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Mapping
from typing import Any

from slime.data.reasons import NEVER_KEPT, PENALIZABLE, QUALITY_CHECKS, InvalidReason
from slime.exceptions import ConfigError


class Policy(str, enum.Enum):
    """What happens to a sample with a reason: stays with valid=False; leaves the list; stays valid
    with the reason visible, and is scored like any other; or stays valid and has the reward of a
    failure, unless it brings its own.
    """

    MARK = "mark"
    DROP = "drop"
    KEEP = "keep"
    PENALIZE = "penalize"


class Level(str, enum.Enum):
    """Strictness of one check. OFF is possible only for checks of quality, never for those of
    integrity.
    """

    OFF = "off"
    LENIENT = "lenient"
    STRICT = "strict"


class MissingLogProbs(str, enum.Enum):
    """What absent log-probs mean: stop the run, invalid sample, no loss on those positions, or fine
    (the run does not use them).
    """

    ERROR = "error"
    MARK = "mark"
    MASK = "mask"
    ALLOW = "allow"


class MismatchCause(str, enum.Enum):
    """Why text and decoded tokens differ (the four causes a person can act on)."""

    SPECIAL_TOKENS = "special_tokens"
    MULTIBYTE_CUT = "multibyte_cut"
    WHITESPACE = "whitespace"
    SHIFTED_IDS = "shifted_ids"


@dataclasses.dataclass(frozen=True)
class TagPair:
    """An opening and a closing marker, e.g. <answer> </answer>. `required`: at least one;
    `max_count`: None = any number.

    opaque: pair markers inside it are quoted text (reasoning may draft a call). opened_by_prompt:
    the prompt already ended with the opening marker, so that the response holds only the closing
    one.
    """

    open: str
    close: str
    required: bool = False
    max_count: int | None = 1
    opaque: bool = False
    opened_by_prompt: bool = False


@dataclasses.dataclass(frozen=True)
class FormatSpec:
    """The structure a task's responses must have.

    pairs: markers that come in pairs. order: opening markers that must appear in this order.
    forbidden: role markers that never belong into a response; with `forbidden_everywhere` False
    they are refused only inside a pair. end_marker: the text or token a finished response ends with
    (looked at under `strict` only). answer: opening marker of the pair that holds what is scored;
    its content is put into metadata["answer_text"] of the new sample.
    """

    pairs: tuple[TagPair, ...] = ()
    order: tuple[str, ...] = ()
    forbidden: tuple[str, ...] = ()
    forbidden_everywhere: bool = True
    end_marker: str | None = None
    answer: str | None = None

    def __post_init__(self):
        texts = {
            "pairs": [m for p in self.pairs for m in (p.open, p.close)],
            "order": self.order,
            "forbidden": self.forbidden,
        }
        texts.update(
            {
                name: [v]
                for name in ("end_marker", "answer")
                if (v := getattr(self, name)) is not None
            }
        )
        for name, values in texts.items():
            if isinstance(values, str) or not all(isinstance(value, str) for value in values):
                raise ConfigError(f"Gate format: `{name}` must hold strings, got {values!r}.")
        markers = self.markers
        if len(set(markers)) != len(markers) or any(not marker for marker in markers):
            raise ConfigError(
                "Gate format: markers must be non-empty and different from each other, got "
                f"{markers}."
            )
        unknown = [
            marker
            for marker in (*self.order, *([self.answer] if self.answer else []))
            if marker not in {pair.open for pair in self.pairs}
        ]
        if unknown:
            raise ConfigError(
                f"Gate format: `order` or `answer` names {unknown}, which are not opening markers "
                "of any pair."
            )

    @property
    def markers(self) -> tuple[str, ...]:
        """All marker strings the text must show, i.e. pairs and role markers."""
        return tuple(m for pair in self.pairs for m in (pair.open, pair.close)) + self.forbidden

    @staticmethod
    def from_dict(data: Mapping) -> FormatSpec:
        """From {"pairs": [{"open", "close", ...}], "order": [...], ...}. ConfigError for unknown
        keys.
        """
        known = {field.name for field in dataclasses.fields(FormatSpec)}
        unknown = sorted(set(data) - known)
        if unknown:
            raise ConfigError(f"Gate format: unknown keys {unknown}. Known: {sorted(known)}.")
        try:
            pairs = tuple(TagPair(**pair) for pair in data.get("pairs", ()))
        except TypeError as error:
            raise ConfigError(
                f"Gate format: a pair is not understood: {error}. Fields: open, close, required, "
                "max_count."
            ) from error
        rest: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list | tuple) else value
            for key, value in data.items()
            if key != "pairs"
        }
        return FormatSpec(pairs=pairs, **rest)


_THINK = TagPair("<think>", "</think>")
_ANSWER = TagPair("<answer>", "</answer>", required=True)
_ROLE_MARKERS = ("<|im_start|>", "<|start_header_id|>", "<start_of_turn>")
FORMAT_PRESETS: dict[str, FormatSpec | None] = {
    "none": None,
    "roles": FormatSpec(forbidden=_ROLE_MARKERS),
    "think": FormatSpec(pairs=(_THINK,), forbidden=_ROLE_MARKERS),
    "answer": FormatSpec(pairs=(_ANSWER,), forbidden=_ROLE_MARKERS, answer="<answer>"),
    "think_answer": FormatSpec(
        pairs=(dataclasses.replace(_THINK, required=True), _ANSWER),
        order=("<think>", "<answer>"),
        forbidden=_ROLE_MARKERS,
        answer="<answer>",
    ),
    "tool_call": FormatSpec(
        pairs=(
            dataclasses.replace(_THINK, opaque=True),
            TagPair("<tool_call>", "</tool_call>", max_count=None),
        ),
        forbidden=_ROLE_MARKERS,
    ),
}


@dataclasses.dataclass(frozen=True)
class TaskRules:
    """What differs for one task (one data source). None means: as for every other task."""

    min_response_tokens: int | None = None
    max_response_tokens: int | None = None
    keep_truncated: bool | None = None
    format: FormatSpec | None = None
    skip_format: bool = False

    def __post_init__(self):
        for name in ("min_response_tokens", "max_response_tokens"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise ConfigError(
                    f"Gate task rules: {name} is {value!r}, not a whole number of tokens."
                )
        if self.keep_truncated is not None and not isinstance(self.keep_truncated, bool):
            raise ConfigError(
                f"Gate task rules: keep_truncated is {self.keep_truncated!r}, not true or false."
            )


@dataclasses.dataclass(frozen=True)
class ScheduleStep:
    """From `rollout_id` on, or as soon as the measured bad-format rate is below `below_rate`, the
    level is `level`.
    """

    level: Level
    rollout_id: int | None = None
    below_rate: float | None = None


@dataclasses.dataclass(frozen=True)
class GateConfig:
    """All that decides a verdict. Pure code gets this, never `args`.

    Lengths are tokens. `margin` is the share of `context_length` left free. `vocab_size` None:
    taken from the tokenizer where one is given. `eos_token_ids`: ids that end a response, beside
    the tokenizer's own; without any, that part is skipped. `rewards_expected`: the batch has been
    scored. `evaluation`: report only; samples come out unmarked. `compare_every`: above 1, the text
    of every so many samples by `Sample.index` is compared. `compare_unasked`: other ids than the
    text's reject a sample, and smaller differences are only counted.
    """

    policies: Mapping[InvalidReason, Policy] = dataclasses.field(default_factory=dict)
    failure_reward: float = 0.0
    level: Level = Level.STRICT
    levels: Mapping[str, Level] = dataclasses.field(default_factory=dict)
    schedule: tuple[ScheduleStep, ...] = ()
    min_response_tokens: int = 1
    max_response_tokens: int | None = None
    context_length: int | None = None
    margin: float = 0.05
    vocab_size: int | None = None
    eos_token_ids: frozenset[int] = frozenset()
    text_source: str = "tokens"
    compare_text: bool = False
    compare_every: int = 1
    compare_unasked: bool = False
    correct_text: bool = False
    stop_strings: tuple[str, ...] = ()
    hide_special_tokens: bool = True
    keep_special_tokens: tuple[str, ...] = ()
    format: FormatSpec | None = None
    tasks: Mapping[str, TaskRules] = dataclasses.field(default_factory=dict)
    missing_log_probs: MissingLogProbs = MissingLogProbs.ALLOW
    log_prob_tolerance: float = 1e-4
    repetition_window: int = 256
    repetition_max_period: int = 64
    rewards_expected: bool = False
    reward_key: str | None = None
    eval_reward_key: str | None = None
    evaluation: bool = False
    adapter: str | None = None
    trust_earlier_verdicts: bool = True
    engine_version: str | None = None
    tokenizer_version: str | None = None

    def __post_init__(self):
        for reason, policy in self.policies.items():
            if policy is Policy.KEEP and reason in NEVER_KEPT:
                raise ConfigError(
                    f"Gate policy 'keep' for '{reason.value}' is refused: such a sample cannot be "
                    "trained. Use 'mark' or 'drop'."
                )
            if policy is Policy.PENALIZE and reason not in PENALIZABLE:
                raise ConfigError(
                    f"Gate policy 'penalize' for '{reason.value}' is refused: only "
                    f"{sorted(r.value for r in PENALIZABLE)} can be penalized, which the model "
                    "wrote and which can be trained. Use 'mark' or 'drop'."
                )
        if not math.isfinite(self.failure_reward):
            raise ConfigError(
                f"Gate failure reward {self.failure_reward} (--gate-failure-reward) must be a "
                "finite number."
            )
        unknown = sorted(set(self.levels) - set(QUALITY_CHECKS))
        if unknown:
            raise ConfigError(
                f"Gate levels for {unknown}: only {list(QUALITY_CHECKS)} have levels; the other "
                "checks always run."
            )
        if not 0.0 <= self.margin < 1.0:
            raise ConfigError(
                f"Gate margin {self.margin} must be in [0, 1): it is the share of the context left "
                "free."
            )
        if self.compare_every < 1:
            raise ConfigError(
                f"Gate comparison of every {self.compare_every} samples: must be >= 1."
            )
        if self.text_source not in ("tokens", "engine"):
            raise ConfigError(
                f"Gate text source '{self.text_source}' must be 'tokens' or 'engine'."
            )
        if self.min_response_tokens < 0 or (
            self.max_response_tokens is not None and self.max_response_tokens < 1
        ):
            raise ConfigError(
                f"Gate lengths: minimum {self.min_response_tokens} must be >= 0, maximum "
                f"{self.max_response_tokens} >= 1."
            )
        if self.repetition_window < 0 or self.repetition_max_period < 1:
            raise ConfigError(
                f"Gate repetition: window {self.repetition_window} must be >= 0 (0 turns the check "
                "off), "
                f"period {self.repetition_max_period} >= 1."
            )
        self._check_that_some_length_passes("", TaskRules())
        for name, rules in self.tasks.items():
            self._check_that_some_length_passes(f" of task '{name}'", rules)

    def _check_that_some_length_passes(self, where: str, rules: TaskRules) -> None:
        """ConfigError where no response can be long enough and short enough at once: the whole run
        would train on nothing.
        """
        least = (
            self.min_response_tokens
            if rules.min_response_tokens is None
            else rules.min_response_tokens
        )
        most = (
            self.max_response_tokens
            if rules.max_response_tokens is None
            else rules.max_response_tokens
        )
        if most is not None and least > most:
            raise ConfigError(
                f"Gate lengths{where}: minimum {least} exceeds maximum {most}; no response could "
                "be valid."
            )
        if self.context_length is not None:
            room = self.context_length - math.ceil(self.context_length * self.margin)
            if room < max(least, 1):
                raise ConfigError(
                    f"Gate lengths{where}: a context of {self.context_length} tokens with margin "
                    f"{self.margin} leaves {room} for prompt "
                    f"and response, the minimum response is {max(least, 1)}; no response could be valid."
                )

    @property
    def log_prob_policy(self) -> MissingLogProbs:
        """What missing log-probs mean for this call: nothing in an evaluation, which trains on
        none.
        """
        return MissingLogProbs.ALLOW if self.evaluation else self.missing_log_probs

    def policy_of(self, reason: InvalidReason) -> Policy:
        """What happens to samples with `reason`: `mark` unless stated."""
        return self.policies.get(reason, Policy.MARK)

    def level_of(self, check: str) -> Level:
        """The level of a quality check by name."""
        return self.levels.get(check, self.level)

    def at(self, rollout_id: int, bad_format_rate: float | None = None) -> GateConfig:
        """This config with the level that the schedule gives for `rollout_id` and the measured
        bad-format rate in [0, 1].

        A step with a `rollout_id` is reached from that rollout on; one with `below_rate` when the
        measured rate is below it. The last reached step wins.
        """
        if not self.schedule:
            return self
        level = self.level
        for step in self.schedule:
            by_id = step.rollout_id is not None and rollout_id >= step.rollout_id
            by_rate = (
                step.below_rate is not None
                and bad_format_rate is not None
                and bad_format_rate < step.below_rate
            )
            if by_id or by_rate:
                level = step.level
        return dataclasses.replace(self, level=level, schedule=())


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The gate's word on one sample. `reason` with valid=True: found, kept by explicit policy, and
    therefore marked.

    `detail` says where and with which values. `text`: the response text decoded from the tokens
    when it must replace the engine's. `keep_mask`: positions (0/1, [T]) that may carry loss where
    log-probs were missing and the policy is `mask`. `answer`: content of the pair that the task's
    format scores. `reward`: of a sample that is penalized and has none.
    """

    valid: bool
    reason: InvalidReason | None = None
    detail: str = ""
    text: str | None = None
    keep_mask: list[int] | None = None
    answer: str | None = None
    reward: float | dict[str, float] | None = None
    dropped: bool = False
