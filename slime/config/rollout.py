"""Options of the rollout: how many prompts, how they are sampled, what happens to slow or failing
requests.
"""

from __future__ import annotations

import dataclasses

from slime.config.extension_points import help_of
from slime.config.option import LONGEST_WAIT, REQUIRED, option


@dataclasses.dataclass(frozen=True)
class RolloutOptions:
    """Rollout: prompts, sampling, failures and its plug-ins."""

    rollout_batch_size: int = option(REQUIRED, "Prompts (groups) per rollout.", minimum=1)
    n_samples_per_prompt: int = option(
        1, "Responses sampled for each prompt; together they are one group.", minimum=1
    )
    over_sampling_batch_size: int | None = option(
        None,
        "Groups fetched at a time while too few are running or kept, with the fully asynchronous "
        "rollout groups in flight; at least "
        "--rollout-batch-size, which is the default.",
        minimum=1,
    )
    num_rollout: int | None = option(
        None,
        (
            "Rollouts (generate + train) to run; this or --num-epoch is needed. With "
            "--eval-interval, "
            "0 evaluates the loaded weights and ends."
        ),
        minimum=0,
    )
    num_epoch: int | None = option(
        None, "Passes over the prompts to run, in place of --num-rollout.", minimum=1
    )
    start_rollout_id: int | None = option(
        None, "First rollout id; default: the one after the loaded checkpoint, else 0.", minimum=0
    )

    rollout_temperature: float = option(
        1.0,
        "Sampling temperature.",
        above=0,
        note="log-probs at temperature 0 do not exist; --eval-temperature 0 is greedy evaluation",
    )
    rollout_top_p: float = option(1.0, "Nucleus mass kept when sampling.", above=0, maximum=1)
    rollout_top_k: int = option(
        -1, "Number of most likely tokens kept when sampling; -1 keeps all.", minimum=1, also=(-1,)
    )
    rollout_max_response_len: int | None = option(
        None,
        "Longest response in tokens; without it the room left in --rollout-max-context-len is "
        "used, so one of "
        "the two is needed.",
        minimum=1,
    )
    rollout_max_prompt_len: int | None = option(
        None,
        (
            "Longest prompt in tokens, chat template included; longer prompts are left out of the "
            "dataset and counted."
        ),
        minimum=1,
    )
    rollout_max_context_len: int | None = option(
        None,
        "Longest prompt + response in tokens, also over several turns of one sample.",
        minimum=1,
    )
    rollout_stop: list[str] | None = option(None, "Strings that end a response.")
    rollout_stop_token_ids: list[int] | None = option(
        None, "Token ids that end a response, beside the model's own.", minimum=0
    )
    rollout_skip_special_tokens: bool = option(
        False, "Leave special tokens out of the decoded response text; token ids keep them."
    )

    partial_rollout: bool = option(
        False, "Keep the tokens of aborted responses and continue them in a later rollout."
    )
    mask_offpolicy_in_partial_rollout: bool = option(
        False, "With --partial-rollout: exclude tokens that earlier policies sampled from the loss."
    )
    rollout_batch_order: str | None = option(
        None,
        "Which groups fill the batch: the first in order of submission (repeatable, no bias to "
        "short responses; the default), "
        "or the first to finish (the only order of the fully asynchronous rollout).",
        choices=("submission", "completion"),
    )
    rollout_group_requests: str = option(
        "auto",
        "Send the members of a group in one HTTP request. auto: yes, except with "
        "--use-sglang-router or a custom "
        "generate function.",
        choices=("auto", "on", "off"),
    )
    rollout_return_arrays: bool = option(
        False,
        (
            "Ask the embedded engine for token ids and log-probs as base64 arrays in place of JSON "
            "numbers."
        ),
    )
    rollout_request_timeout: float = option(
        1800.0,
        "Seconds after which one generation request is given up and tried again.",
        above=0,
        maximum=LONGEST_WAIT,
    )
    rollout_request_retries: int = option(
        5,
        "Further tries after a connection error, a timeout or a 5xx reply, with growing pauses; "
        "4xx replies "
        "are never tried again.",
        minimum=0,
    )
    abort_timeout: float = option(
        60.0,
        (
            "Seconds that aborted requests may take to come back before they are cancelled and "
            "their "
            "groups given back."
        ),
        above=0,
        maximum=LONGEST_WAIT,
    )
    max_engine_aborts: int = option(
        3,
        (
            "How often an engine may end a group's requests by itself, without a new token, before "
            "its "
            "samples count as failed."
        ),
        minimum=0,
    )
    max_dropped_groups: int | None = option(
        None,
        "Groups that --dynamic-sampling-filter-path may drop in one rollout; one more ends the run "
        "with the reasons and examples. "
        "Default: 20 x --rollout-batch-size.",
        minimum=0,
    )
    max_failed_ratio: float = option(
        0.1,
        "Largest share of a rollout's attempts whose generation or reward may fail before the run "
        "stops with the reasons. Groups that a filter "
        "drops count too; of an attempt of several samples, the share of them that failed.",
        minimum=0,
    )
    rollout_data_transport: str = option(
        "object-store",
        (
            "How the rollout batch reaches the trainers: Ray's object store; upstream's nixl is "
            "refused."
        ),
        choices=("object-store", "nixl"),
    )

    rollout_function_path: str = option(
        "slime.rollout.sglang_rollout.generate_rollout", help_of("rollout_function_path")
    )
    custom_generate_function_path: str | None = option(
        None, help_of("custom_generate_function_path")
    )
    generate_timeout: float = option(
        3600.0,
        "Seconds that one call of a custom generate function, or the hooks of one sample, may "
        "take; the sample then fails, with the "
        "reason. A call that holds the event loop for so long ends the run; the message names "
        "function, sample and line.",
        above=0,
        maximum=LONGEST_WAIT,
    )
    rollout_sample_hook_path: list[str] | None = option(
        None, help_of("rollout_sample_hook_path"), repeat=True
    )
    dynamic_sampling_filter_path: str | None = option(None, help_of("dynamic_sampling_filter_path"))
    buffer_filter_path: str | None = option(None, help_of("buffer_filter_path"))
    rollout_sample_filter_path: str | None = option(None, help_of("rollout_sample_filter_path"))
    rollout_all_samples_process_path: str | None = option(
        None, help_of("rollout_all_samples_process_path")
    )
