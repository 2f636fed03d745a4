"""Options of batching: how many samples make an optimizer step, and how they are packed and spread
over ranks.
"""

from __future__ import annotations

import dataclasses

from slime.config.extension_points import help_of
from slime.config.option import option

PACKINGS = ("balanced", "first_fit")


@dataclasses.dataclass(frozen=True)
class BatchingOptions:
    """Batching: optimizer steps, micro-batches, balance over ranks"""

    global_batch_size: int | None = option(
        None,
        (
            "Rollouts (responses) per optimizer step. Default: what --num-steps-per-rollout asks "
            "for, "
            "else all of a rollout batch."
        ),
        minimum=1,
    )
    num_steps_per_rollout: int | None = option(
        None,
        (
            "Optimizer steps per rollout batch, in place of --global-batch-size; if both are given "
            "they must agree."
        ),
        minimum=1,
    )
    keep_trailing_rollouts: bool = option(
        False,
        "Train rollouts that do not fill a last --global-batch-size in one smaller step of their "
        "true size. Off: they are left out, and "
        "counted as trailing.",
    )
    micro_batch_size: int = option(
        1, "Samples per micro-batch when batches are not dynamic.", minimum=1
    )
    use_dynamic_batch_size: bool = option(
        False, "Pack micro-batches by tokens, up to --max-tokens-per-gpu."
    )
    max_tokens_per_gpu: int | None = option(
        None,
        (
            "Tokens that a micro-batch may hold per GPU; times the context-parallel size in all. A "
            "longer sample sits alone."
        ),
        minimum=1,
    )
    log_probs_max_tokens_per_gpu: int | None = option(
        None,
        (
            "The same for passes without gradient. One schedule serves both passes here, so it may "
            "only equal --max-tokens-per-gpu."
        ),
        minimum=1,
    )
    micro_batch_packing: str = option(
        "balanced",
        "How dynamic micro-batches are packed. balanced: as few as the cap allows, with near-equal "
        "work on all ranks; first_fit: in the "
        "order of the samples.",
        choices=PACKINGS,
    )
    balance_data: bool = option(
        False,
        (
            "Deal micro-batches to ranks by work (FLOPs), not in turn. balanced packing does so "
            "anyway."
        ),
    )
    balance_by_flops: bool = option(
        False,
        (
            "Pack dynamic micro-batches by equal FLOPs; --max-tokens-per-gpu then sets only their "
            "number. Turns --balance-data on."
        ),
    )
    data_pad_size_multiplier: int = option(
        128,
        "Packed rows are padded to a multiple of this times the tensor-parallel size, in tokens.",
        minimum=1,
    )
    removed_samples_in_baseline: bool = option(
        False,
        "Let samples that are removed from the loss (Sample.remove_sample) still count in their "
        "group's baseline. Off: what does not train "
        "does not move its siblings either.",
    )
    passrate_threshold: float | None = option(
        None,
        (
            "A response counts as solved for pass@k from this raw reward on. Default: only a raw "
            "reward of exactly 1."
        ),
    )
    custom_rollout_log_function_path: str | None = option(
        None, help_of("custom_rollout_log_function_path")
    )
    custom_eval_rollout_log_function_path: str | None = option(
        None, help_of("custom_eval_rollout_log_function_path")
    )
