"""Options of evaluation: which datasets, how often, with which sampling."""

from __future__ import annotations

import dataclasses

from slime.config.extension_points import help_of
from slime.config.option import option


@dataclasses.dataclass(frozen=True)
class EvaluationOptions:
    """Evaluation: datasets and their sampling; what is not given is taken from the rollout's
    options.
    """

    eval_interval: int | None = option(
        None, "Rollouts between evaluations; without it there are none.", minimum=1
    )
    skip_eval_before_train: bool = option(
        False, "Leave out the evaluation before the first rollout."
    )
    eval_prompt_data: list[str] | None = option(
        None, "Evaluation sets as pairs: NAME PATH [NAME PATH ...]."
    )
    eval_config: str | None = option(
        None,
        (
            "YAML file with eval.datasets (one entry per set) and eval.defaults, in place of "
            "--eval-prompt-data."
        ),
    )
    eval_function_path: str | None = option(None, help_of("eval_function_path"))
    n_samples_per_eval_prompt: int = option(1, "Responses per evaluation prompt.", minimum=1)
    eval_temperature: float | None = option(
        None, "Temperature in evaluation; 0 is greedy.", minimum=0
    )
    eval_top_p: float | None = option(None, "Nucleus mass in evaluation.", above=0, maximum=1)
    eval_top_k: int | None = option(
        None, "Number of most likely tokens kept in evaluation.", minimum=1, also=(-1,)
    )
    eval_max_response_len: int | None = option(
        None, "Longest response in evaluation, in tokens.", minimum=1
    )
    eval_max_prompt_len: int | None = option(
        None,
        "Longest prompt in evaluation, in tokens; longer ones are left out and counted.",
        minimum=1,
    )
    eval_max_context_len: int | None = option(
        None, "Longest prompt + response in evaluation, in tokens.", minimum=1
    )
    eval_min_new_tokens: int | None = option(
        None, "Shortest response in evaluation, in tokens.", minimum=0
    )
    eval_input_key: str | None = option(None, "Key of the prompt in evaluation rows.")
    eval_label_key: str | None = option(None, "Key of the label in evaluation rows.")
    eval_tool_key: str | None = option(None, "Key of the tool definitions in evaluation rows.")
