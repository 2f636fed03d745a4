"""Why a sample is not trained: every reason with all its facts, one entry each. No numpy, no torch.

`InvalidReason` is a rejection by the gate; `DropReason` is any other cause for not training. The
name is what stands in `Sample.invalid_reason`, in the ledger and in metric keys. A user's rollout
function may count samples under names of its own beside these.

A new reason is one entry here. The gate's needs a check that finds it (slime/gate/checks.py), and
comes last, because a reason's number travels to the trainer and into recorded statistics. The
tables of docs/gate.md are written from here by tools/generate_docs.py.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any


class Stage(str, enum.Enum):
    """Who decides that a sample does not train."""

    ROLLOUT = "rollout function"
    FILTER = "filter"
    GATE = "gate"
    CONVERTER = "custom converter"
    SPLIT = "split over ranks"
    MANAGER = "rollout manager"
    LEDGER = "ledger of the run"
    TRAINER = "training ranks"
    REPORT = "report"


class InBaseline(str, enum.Enum):
    """Whether the sample's reward shifts the baseline of its group."""

    NO = "no"
    YES = "yes"
    ON_REQUEST = "with `--removed-samples-in-baseline`"
    CONVERTER = "as the converter does"


@dataclasses.dataclass(frozen=True)
class Facts:
    """All that is true of one reason.

    meaning: what happened, or examples, in Markdown. remedy: where to look when there are many.
    stage: who decides. is_model_failure: the model answered badly, which is wrong in pass@k; else its answer
    was lost or left out. can_train: a policy may keep such a sample. has_level: the gate's check
    has a level and can be off. is_cheap: the gate finds it before it reads a token. in_baseline,
    in_denominator: whether its reward counts in its group's baseline, its tokens in the loss
    denominator.
    """

    meaning: str
    remedy: str = "the engine, its version and its tokenizer"
    stage: Stage = Stage.GATE
    is_model_failure: bool = False
    can_train: bool = False
    has_level: bool = False
    is_cheap: bool = False
    in_baseline: InBaseline = InBaseline.NO
    in_denominator: bool = False


class _Reason(str, enum.Enum):
    facts: Facts

    def __new__(cls, value: str, facts: Facts) -> _Reason:
        member = str.__new__(cls, value)
        member._value_ = value
        member.facts = facts
        return member

    @property
    def ledger_key(self) -> str | None:
        """The metric's name below `rollout/ledger/`: of a planned sample that did not train, or of
        one that was dropped before. None for what only the report, or `slime ledger`, tells.
        """
        if self.facts.stage in (Stage.REPORT, Stage.LEDGER):
            return None
        kind = "not_trained" if self.facts.stage is Stage.TRAINER else "dropped"
        return f"{kind}/{self.value}"


class InvalidReason(_Reason):
    """The one primary reason of an invalid sample. Closed: `code` (position + 1) is what travels to
    the trainer, 0 is "none".
    """

    FAILED = (
        "failed",
        Facts(
            "status FAILED: the reward server raised; a group, index or metadata of a wrong type",
            "the engine or the custom generate function",
            is_cheap=True,
        ),
    )
    ABORTED = (
        "aborted",
        Facts(
            "the engine answered `abort`",
            "the engine or the staleness rules",
            can_train=True,
            is_cheap=True,
        ),
    )
    EMPTY = (
        "empty",
        Facts(
            'no token, `"\\n"`, only zero-width, BOM, NBSP, control, soft hyphen, tag characters, '
            "ids beyond the tokenizer's",
            "sampling parameters, stop strings or the chat template",
            is_model_failure=True,
            is_cheap=True,
        ),
    )
    TOO_SHORT = (
        "too_short",
        Facts(
            "2 tokens where `--gate-min-response-tokens 5`",
            "stop strings or an early end of turn",
            is_model_failure=True,
            can_train=True,
            has_level=True,
            is_cheap=True,
        ),
    )
    TOO_LONG = (
        "too_long",
        Facts(
            "prompt 30 + response 66 of a 100-token context with 5 % margin",
            "a loop, or a length limit that is too tight",
            is_model_failure=True,
            can_train=True,
            has_level=True,
            is_cheap=True,
        ),
    )
    TRUNCATED = (
        "truncated",
        Facts(
            "finish reason `length`",
            "a length limit that is too tight, or the model no longer ending its turn",
            is_model_failure=True,
            can_train=True,
            has_level=True,
            is_cheap=True,
        ),
    )
    LOGPROB_MISMATCH = (
        "logprob_mismatch",
        Facts("5 response ids, 4 log-probs", is_cheap=True),
    )
    BAD_TOKEN = (
        "bad_token",
        Facts("id -1, id 151,936 of 151,936, a string among the ids"),
    )
    BAD_LOGPROB = (
        "bad_logprob",
        Facts("NaN, inf, +0.2 (a probability above 1)"),
    )
    REPETITIVE = (
        "repetitive",
        Facts(
            "the last 256 tokens are one phrase of at most 64 tokens again and again",
            "sampling temperature, or a collapsing policy",
            is_model_failure=True,
            can_train=True,
            has_level=True,
        ),
    )
    MISALIGNED = (
        "misaligned",
        Facts(
            'text `"a b"`, tokens `"a  b"`; response length 40 of 30 tokens; mask of another '
            "length, or of something else than 0 and 1",
            can_train=True,
            has_level=True,
        ),
    )
    BAD_FORMAT = (
        "bad_format",
        Facts(
            "`<answer>4`, an answer before the thought, `<\\|im_start\\|>` inside the answer",
            "sampling temperature, the chat template, or a policy that drifts from its format",
            is_model_failure=True,
            can_train=True,
            has_level=True,
        ),
    )
    BAD_REWARD = (
        "bad_reward",
        Facts(
            "None, NaN, a string, a dict without `--reward-key`",
            "the reward function or its server",
        ),
    )
    REJECTED = (
        "rejected",
        Facts(
            "a plug-in set `valid=False` with a word of its own",
            "the plug-in that sets valid=False; the raw snapshot's column detail has its words",
            is_cheap=True,
        ),
    )

    @property
    def code(self) -> int:
        return CODE_OF_REASON[self]

    @property
    def is_model_failure(self) -> bool:
        """True where the model answered badly (counts as wrong in pass@k); False where the
        infrastructure lost the answer.
        """
        return self.facts.is_model_failure


class DropReason(_Reason):
    """Why a sample that the gate did not reject is not trained."""

    DYNAMIC_FILTER = (
        "dynamic_filter",
        Facts(
            "`--dynamic-sampling-filter-path` dropped its group; the name goes on with the "
            "filter's reason, as in `dynamic_filter_zero_std_1.0`",
            "prompts that are too easy or too hard",
            Stage.FILTER,
        ),
    )
    SAMPLE_FILTER = (
        "sample_filter",
        Facts(
            "`--rollout-sample-filter-path` took it out of its group",
            "the filter function",
            Stage.FILTER,
        ),
    )
    RETURNED_PARTIAL = (
        "returned_partial",
        Facts(
            "its group was begun and not used up when the batch was whole; a later rollout continues "
            "it (`--partial-rollout`)",
            "`--over-sampling-batch-size`",
            Stage.ROLLOUT,
        ),
    )
    RETURNED_PRISTINE = (
        "returned_pristine",
        Facts(
            "its group was begun and not used up when the batch was whole; a later rollout generates "
            "it anew",
            "`--over-sampling-batch-size`, or `--partial-rollout` to keep what was generated",
            Stage.ROLLOUT,
        ),
    )
    LEFT_OUT = (
        "left_out_by_converter",
        Facts(
            "`--custom-convert-samples-to-train-data-path` made no row of it",
            "the converter",
            Stage.CONVERTER,
            in_baseline=InBaseline.CONVERTER,
        ),
    )
    INVALID = (
        "invalid",
        Facts(
            "its row has `valid=False` and names no reason",
            "the converter; give `invalid_reason` beside `valid`",
            Stage.CONVERTER,
            in_baseline=InBaseline.CONVERTER,
        ),
    )
    TRAILING = (
        "trailing",
        Facts(
            "its rollout is one of the last, which do not fill a step",
            "a `--global-batch-size` that divides the rollouts, or `--keep-trailing-rollouts`",
            Stage.SPLIT,
            in_baseline=InBaseline.YES,
        ),
    )
    FULLY_MASKED = (
        "fully_masked",
        Facts(
            "its rollout has no token with a loss mask of 1",
            "the loss masks, `remove_sample`, and log-probs that are missing",
            Stage.SPLIT,
            in_baseline=InBaseline.ON_REQUEST,
        ),
    )
    LEFT_OUT_OF_ROLLOUT = (
        "left_out_by_rollout_function",
        Facts(
            "`--rollout-function-path` was given it, and neither returned it, nor gave its group "
            "back, nor named it among the dropped groups",
            "the rollout function",
            Stage.LEDGER,
        ),
    )
    ROLLOUT_ONLY = (
        "rollout_only",
        Facts(
            "`--debug-rollout-only` trains nothing",
            "the option",
            Stage.LEDGER,
        ),
    )
    CRITIC_ONLY = (
        "critic_only",
        Facts(
            "the critic alone trains in this rollout",
            "`--num-critic-only-steps`",
            Stage.MANAGER,
            in_baseline=InBaseline.YES,
            in_denominator=True,
        ),
    )
    MASKED_BY_FUNCTION = (
        "masked_by_function",
        Facts(
            "a hook on the training ranks masked all of its tokens",
            "the hook",
            Stage.TRAINER,
            in_baseline=InBaseline.YES,
            in_denominator=True,
        ),
    )
    UPDATE_SKIPPED = (
        "update_skipped",
        Facts(
            "the gradient of its step was not finite",
            "the reward, the log-probs and the learning rate of that step",
            Stage.TRAINER,
            in_baseline=InBaseline.YES,
            in_denominator=True,
        ),
    )
    UNFINISHED = (
        "training_not_finished",
        Facts(
            "the run ended before the training of its rollout was done",
            "the end of the run's log",
            Stage.REPORT,
            in_baseline=InBaseline.YES,
            in_denominator=True,
        ),
    )


REASONS = tuple(InvalidReason)
CODE_OF_REASON = {reason: position + 1 for position, reason in enumerate(REASONS)}
REASON_OF_VALUE = {reason.value: reason for reason in REASONS}
MODEL_FAILURES = frozenset(reason for reason in REASONS if reason.facts.is_model_failure)
# A sample with one of these cannot enter a gradient, whatever the config.
NEVER_KEPT = frozenset(reason for reason in REASONS if not reason.facts.can_train)
# What may train with the failure's reward: the model wrote it, and there is something to train on.
PENALIZABLE = MODEL_FAILURES - NEVER_KEPT
# Reasons found from scalars alone, before any token is read.
CHEAP_REASONS = frozenset(reason for reason in REASONS if reason.facts.is_cheap)
QUALITY_CHECKS = tuple(reason.value for reason in REASONS if reason.facts.has_level)


def reason_of_code(code: int) -> InvalidReason | None:
    """The reason behind a wire code, None for 0."""
    return REASONS[code - 1] if code else None


def is_model_failure(sample: Any) -> bool:
    """Whether the gate rejected this sample for what the model wrote, and not because its answer
    was lost.
    """
    return not sample.valid and REASON_OF_VALUE.get(sample.invalid_reason) in MODEL_FAILURES
