"""Options of the gate between sampling and training."""

from __future__ import annotations

import dataclasses

from slime.config.option import option


@dataclasses.dataclass(frozen=True)
class GateOptions:
    """The gate: which samples are valid, what happens to the others, what is recorded."""

    gate_level: str = option(
        "strict",
        (
            "Strictness of the quality checks (lengths, truncation, repetition, text, format). "
            "Checks "
            "of integrity always run."
        ),
        choices=("off", "lenient", "strict"),
    )
    gate_levels: dict | None = option(
        None, 'Levels of single checks, e.g. {"bad_format": "lenient", "too_long": "off"}.'
    )
    gate_schedule: list[str] | None = option(
        None,
        (
            "Changes of --gate-level: 100:lenient from rollout 100 on, rate<0.02:lenient once "
            "fewer "
            "than 2 percent have a bad format."
        ),
    )
    gate_policy: str = option(
        "mark",
        "What happens to invalid samples: mark keeps them in the batch outside mean, loss and "
        "metrics; drop removes them; both train identically. penalize "
        "trains on what the model got wrong (cut, too short or long, repetitive, badly formatted) with --gate-failure-reward, and marks the rest.",
        choices=("mark", "drop", "penalize"),
    )
    gate_policies: dict | None = option(
        None,
        'Policies of single reasons, e.g. {"truncated": "penalize", "too_long": "drop", '
        '"repetitive": "keep"}; penalize trains on them as failures, keep '
        "scores and trains them like any other, visibly marked.",
    )
    gate_failure_reward: float = option(
        0.0,
        "Reward of a penalized sample that has none of its own; it counts in its group's baseline.",
    )
    gate_keep_truncated: bool = option(
        False,
        "Train on responses that were cut at the length limit; they stay marked as truncated.",
    )
    gate_min_response_tokens: int = option(
        1,
        "Shorter responses are too_short; `slime gate suggest` proposes a value from a dump.",
        minimum=0,
    )
    gate_max_response_tokens: int | None = option(
        None, "Longer responses are too_long, beside the limit that the context sets.", minimum=1
    )
    gate_context_margin: float = option(
        0.05,
        "Share of --rollout-max-context-len that prompt + response must leave free.",
        minimum=0,
        below=1,
    )
    gate_format: str = option(
        "none",
        "Structure that a response must have; --gate-format-spec defines one of your own.",
        choices=("none", "roles", "think", "answer", "think_answer", "tool_call"),
    )
    gate_format_spec: dict | None = option(
        None,
        (
            'Own structure, e.g. {"pairs": [{"open": "<a>", "close": "</a>", "required": true}], '
            '"end_marker": "<|im_end|>"}.'
        ),
    )
    gate_tasks: dict | None = option(
        None,
        (
            'Rules by metadata source_name (else rm_type), e.g. {"labels": {"min_response_tokens": '
            "1, "
            '"keep_truncated": true, "format": "answer"}}.'
        ),
    )
    gate_text_source: str = option(
        "auto",
        "Where a response's text comes from: tokens decodes it from the ids, engine keeps the "
        "given text; auto is engine when a custom "
        "generate function writes the text, else tokens.",
        choices=("auto", "tokens", "engine"),
    )
    gate_compare_text: str = option(
        "auto",
        "Compare the engine's text with the decoded tokens: auto all samples of evaluations, of a "
        "run's first two rollouts and of debug and CI runs, "
        "about 8 of any other rollout, and all from then on where those have other ids than their text's.",
        choices=("auto", "on", "off"),
    )
    gate_correct_text: bool = option(
        False,
        (
            "Replace a text that differs from its tokens by the decoded one instead of rejecting "
            "the "
            "sample."
        ),
    )
    gate_keep_special_tokens: list[str] | None = option(
        None, "Special tokens that the decoded text shows, e.g. thinking tags."
    )
    gate_missing_log_probs: str = option(
        "auto",
        "Responses without the engine's log-probs: error stops, mark rejects the sample, mask "
        "takes loss off the positions, allow "
        "accepts; auto is error when the loss uses them, else allow.",
        choices=("auto", "error", "mark", "mask", "allow"),
    )
    gate_repetition_window: int = option(
        256,
        "Tokens at the end of a response that are looked at for a loop; 0 turns it off.",
        minimum=0,
    )
    gate_repetition_max_period: int = option(
        64, "Longest repeated phrase that counts as a loop, in tokens.", minimum=1
    )
    gate_window: int = option(5, "Earlier rollouts that drift and alarms compare with.", minimum=1)
    gate_snapshots: int | None = option(
        None,
        "Last rollouts whose raw engine output is kept in <run dir>/gate; 0 keeps none. Default: 3, "
        "and none where --record keeps every rollout, whose samples and schedule hold the same.",
        minimum=0,
    )
    gate_snapshots_max_gib: float = option(
        4.0, "Most space that these snapshots take together, in GiB.", minimum=0
    )
    gate_parallel_above: int = option(
        200000, "Samples in a batch above which the gate uses Ray tasks; 0 never does.", minimum=0
    )
