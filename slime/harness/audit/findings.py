"""What an audit says: kinds of findings with their meaning and remedy, one entry each, and the
findings of a run. The table of docs/audit.md is written from `KINDS` by tools/generate_docs.py.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Sequence
from typing import Protocol

from slime.harness.audit.table import UNKNOWN, SampleTable

SHOWN = 160  # characters of a text in evidence
KEPT = 200  # pieces of evidence of one kind that are kept


class Level(enum.IntEnum):
    """How bad a finding is. INFO says what is there, and does not change the exit status."""

    ERROR = 0
    WARNING = 1
    INFO = 2


@dataclasses.dataclass(frozen=True)
class Kind:
    """One kind of finding. meaning: what it says of a run. remedy: what to do. Both Markdown."""

    name: str
    family: str
    meaning: str
    remedy: str


@dataclasses.dataclass(frozen=True)
class Evidence:
    """One place that a finding rests on. `text` is foreign: reports show it as text."""

    where: str
    group: str = ""
    index: int | None = None
    text: str = ""
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that is wrong, or worth knowing. `share`: of the samples, groups or steps that were
    looked at, in [0, 1]; it orders findings of one level.
    """

    kind: Kind
    level: Level
    sentence: str
    evidence: tuple[Evidence, ...] = ()
    share: float = 1.0

    @property
    def name(self) -> str:
        return self.kind.name


class Family(Protocol):
    """Looks at one table after another, and says at the end what it found."""

    def look(self, table: SampleTable) -> None:
        """Takes one step."""

    def findings(self) -> Iterator[Finding]:
        """What all steps gave."""


_K = Kind
# In the order of how much they matter: findings of one level are listed so.
KINDS: tuple[Kind, ...] = (
    _K(
        "misattributed_baseline",
        "advantages",
        "advantages fit the rewards of *other* samples: neighbours in the file, a wrong group size, "
        "rewards shifted or permuted (interleaved data-parallel order)",
        "group by id, never by position; look at what reorders samples between reward and advantage",
    ),
    _K(
        "shifted_log_probs",
        "log-probs",
        "rollout and trainer log-probs agree when one is moved by a token",
        "the offset of response tokens where rollout log-probs are stored or trainer log-probs are cut",
    ),
    _K(
        "trained_unsampled_tokens",
        "log-probs",
        "tokens with mask 1 whose rollout log-prob is exactly 0: a tool, template or prompt wrote "
        "them, and they train",
        "give tokens that nobody sampled mask 0",
    ),
    _K(
        "broken_record",
        "record",
        "a sample's own record contradicts itself, or the trainer has other tokens, another reward "
        "or another word on whether it was cut under its index",
        "the code that moves samples from rollout to trainer",
    ),
    _K(
        "advantage_outliers",
        "advantages",
        "most advantages follow a rule, these samples break it",
        "what treats these samples differently: filters, clipping, padding, a bug of indices",
    ),
    _K(
        "unknown_advantages",
        "advantages",
        "advantages follow no known estimator from the rewards",
        "`--reward-key` where several rewards exist; else compare with the estimator you configured",
    ),
    _K(
        "negated_advantages",
        "advantages",
        "advantages are a known estimator's with the opposite sign",
        "the sign of the reward or of the loss",
    ),
    _K(
        "advantage_not_finite",
        "advantages",
        "an advantage is NaN or infinite",
        "a division by a standard deviation of 0, or a reward that is not finite",
    ),
    _K(
        "reward_not_finite",
        "rewards",
        "a reward is NaN, infinite or missing",
        "the reward function: what it returns where it fails",
    ),
    _K(
        "log_prob_not_finite",
        "log-probs",
        "a log-prob is NaN or infinite",
        "the engine's or trainer's logits at these tokens: overflow, a masked vocabulary entry",
    ),
    _K(
        "positive_log_prob",
        "log-probs",
        "a log-prob above 0, a probability above 1",
        "the array may hold something else (entropy, negated values), or the softmax is not normalized",
    ),
    _K(
        "mixed_groups",
        "groups",
        "a group holds samples of different prompts, so its baseline is of nothing",
        "group ids: a shuffle or an interleaving between generation and reward",
    ),
    _K(
        "batch_baseline",
        "advantages",
        "the baseline is the mean of the whole batch, not of the group",
        "right for REINFORCE++; for GRPO or RLOO the groups were lost (group size 1, wrong ids)",
    ),
    _K(
        "advantage_rule_changes",
        "advantages",
        "steps follow different estimators",
        "a configuration that changed on resume, or a batch that was assembled differently",
    ),
    _K(
        "text_not_of_tokens",
        "text",
        "the response text is not what its token ids decode to (`--tokenizer`)",
        "the ids are trained and the text is scored: take the text from the ids, and use one tokenizer",
    ),
    _K(
        "conflicting_rewards",
        "rewards",
        "equal responses to equal prompts have different rewards",
        "a reward that draws lots or depends on order, time-outs or a shared state",
    ),
    _K(
        "conflicting_answers",
        "rewards",
        "responses to one prompt with the same final answer are both fully right and fully wrong",
        "what the reward reads beside the answer (format, length); whether it parses the answer",
    ),
    _K(
        "grader_disagrees",
        "rewards",
        "a grader of ours (`--grader`) scores the response otherwise, given its label",
        "read the pairs: a wrong positive teaches the wrong answer, a wrong negative punishes a right one",
    ),
    _K(
        "constant_reward",
        "rewards",
        "all rewards are the same number: nothing is learned. Samples that nothing scored "
        "(supervised training) have none",
        "labels that do not reach the reward, answers that are never found, a task too easy or too hard",
    ),
    _K(
        "mask_length",
        "masks",
        "a loss mask has another length than its response",
        "masks cover the response only; one over prompt and response trains the wrong tokens",
    ),
    _K(
        "mask_values",
        "masks",
        "a loss mask holds something else than 0 and 1",
        "the mask may be another array (weights, token types)",
    ),
    _K(
        "column_length",
        "log-probs",
        "log-probs of another length than the response",
        "the offset of response tokens, or a prompt that is included",
    ),
    _K(
        "trained_tool_tokens",
        "masks",
        "tokens inside a tool's answer or another role's turn have mask 1 (`--tokenizer`)",
        "give everything that the model did not write mask 0",
    ),
    _K(
        "all_masked",
        "masks",
        "samples without a trained token",
        "they cost a generation and count in the baseline; find why everything is masked",
    ),
    _K(
        "other_temperature",
        "log-probs",
        "rollout log-probs are the trainer's at another temperature",
        "divide the trainer's logits by the rollout's temperature, or sample at 1",
    ),
    _K(
        "other_weights",
        "log-probs",
        "trainer and engine disagree on nearly every token: different weights, data type or sampling "
        "filter",
        "that weights are updated before sampling; quantization of the engine; top-p and top-k",
    ),
    _K(
        "gap_at_masked_tokens",
        "log-probs",
        "trainer and engine disagree at masked tokens only",
        "nothing, if a tool wrote these tokens; if the model did, the mask is wrong",
    ),
    _K(
        "log_prob_gap",
        "log-probs",
        "trainer and engine disagree, in no pattern known here",
        "`--top` shows the samples; compare one sample's tokens by hand",
    ),
    _K(
        "stale_weights",
        "weights",
        "samples are several weight updates older than the newest of their step",
        "fewer rollouts ahead, a limit on staleness, or an importance correction",
    ),
    _K(
        "versions_go_back",
        "weights",
        "a later step was sampled with older weights than an earlier one",
        "a resume from an older checkpoint, or an engine that missed an update",
    ),
    _K(
        "unreadable_file",
        "record",
        "a file could not be read, or not to its end",
        "a full disk or a crash while it was written; the rest was audited",
    ),
    _K(
        "empty_response",
        "text",
        "responses without a visible character",
        "sampling parameters, stop strings, the chat template",
    ),
    _K(
        "cut_response",
        "text",
        "responses that ended at the length limit, and train",
        "a higher limit, or take them out of the baseline (overlong filtering)",
    ),
    _K(
        "looping_response",
        "text",
        "responses that end in one phrase, repeated",
        "a reward that rewards length, a temperature near 0; reject them, or penalize repetition",
    ),
    _K(
        "duplicate_in_group",
        "text",
        "identical long responses within a group: fewer samples than it seems",
        "a seed shared by the requests of a group, a temperature near 0, a cache of responses",
    ),
    _K(
        "duplicate_across_groups",
        "text",
        "identical long responses to different prompts",
        "responses were attached to the wrong prompts, or the policy collapsed to one text",
    ),
    _K(
        "prompt_in_response",
        "text",
        "responses begin with their whole prompt, or with its last message",
        "cut the prompt off by token count before scoring; a base model that echoes",
    ),
    _K(
        "special_tokens_in_text",
        "text",
        "special tokens or role markers inside a response's text",
        "end token ids of the engine: the model went on after its turn; decode without special tokens",
    ),
    _K(
        "broken_characters",
        "text",
        "responses with U+FFFD, the sign for undecodable bytes",
        "decode all ids of a response at once; a character was cut at a chunk's end",
    ),
    _K(
        "unequal_groups",
        "groups",
        "groups of different sizes",
        "aborted or filtered samples; an estimator by position mixes groups from here on",
    ),
    _K(
        "groups_without_spread",
        "groups",
        "groups in which all rewards are equal: their advantages are 0",
        "prompts that are too easy or too hard; dynamic sampling",
    ),
    _K(
        "collapse",
        "series",
        "a series fell, or rose, from a point on and did not come back",
        "the steps around the point: what changed in lengths, rewards and log-prob gaps first",
    ),
    _K(
        "jump",
        "series",
        "a series jumped from one step to the next and stayed",
        "what changed at that step: a resume, a configuration, the data",
    ),
    _K(
        "metric_not_finite",
        "series",
        "a metric was NaN or infinite",
        "the first such step, and what its samples were",
    ),
    _K(
        "advantage_rule",
        "advantages",
        "which estimator the advantages follow",
        "compare with what you configured",
    ),
    _K(
        "end_token_in_text",
        "text",
        "responses end with their end token as text",
        "fine, if the reward function strips it",
    ),
)
KIND_BY_NAME = {kind.name: kind for kind in KINDS}
_PLACE = {kind.name: place for place, kind in enumerate(KINDS)}


def finding(
    name: str,
    level: Level,
    sentence: str,
    evidence: Sequence[Evidence] = (),
    *,
    share: float = 1.0,
) -> Finding:
    """A finding of the kind with that name."""
    return Finding(KIND_BY_NAME[name], level, sentence, tuple(evidence[:KEPT]), share)


def ranked(findings: Sequence[Finding]) -> list[Finding]:
    """The findings, what matters most first."""
    return sorted(findings, key=lambda one: (one.level, _PLACE[one.name], -one.share))


def evidence_of(table: SampleTable, i: int, text: str | None = None, note: str = "") -> Evidence:
    """The i-th sample of a step as evidence; `text`: what is shown of it, else its response."""
    group = int(table.group_N[i])
    index = int(table.index_N[i])
    return Evidence(
        where=table.where,
        group="" if group == UNKNOWN else table.group_names[group],
        index=None if index == UNKNOWN else index,
        text=shorten(table.responses[i] if text is None else text),
        note=note,
    )


def shorten(text: str, size: int = SHOWN) -> str:
    """The beginning and the end of a text."""
    if len(text) <= size:
        return text
    return f"{text[: size * 2 // 3]} ... {text[-size // 3 :]}"


def percent(part: float, whole: float) -> str:
    """A share for a sentence: 12 %, 0.3 %, 0 %."""
    share = 100 * part / whole if whole else 0.0
    return f"{share:.0f} %" if share >= 10 or share == 0 else f"{share:.2g} %"


def plural(count: int, word: str) -> str:
    """`1 step`, `3 steps`."""
    return f"{count} {word}" if count == 1 else f"{count} {word}s"
