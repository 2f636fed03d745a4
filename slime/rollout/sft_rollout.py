"""Supervised training as a rollout function: conversations become samples with ids and masks;
nothing is generated.
"""

from __future__ import annotations

import argparse
import functools
from typing import TYPE_CHECKING

from slime.data.reasons import InvalidReason
from slime.data.sample import Sample
from slime.exceptions import ConfigError, SlimeError
from slime.prompts.masks import MultiTurnLossMaskGenerator, get_response_lengths, message_pairs
from slime.rollout.base_types import RolloutFnTrainOutput
from slime.rollout.group_loop import report_progress
from slime.utils import processing_utils

if TYPE_CHECKING:
    from slime.prompts.data_source import DataSource


@functools.lru_cache(maxsize=4)
def _generator(hf_checkpoint: str, loss_mask_type: str) -> MultiTurnLossMaskGenerator:
    return MultiTurnLossMaskGenerator(
        processing_utils.shared_tokenizer(hf_checkpoint), loss_mask_type
    )


def generate_rollout(
    args: argparse.Namespace, rollout_id: int, data_buffer: DataSource, evaluation: bool = False
) -> RolloutFnTrainOutput:
    """One batch of conversations with ids, masks from the first trained token on, and reward 0;
    status stays PENDING.

    Rows hold messages, or a prompt whose label is the answer to learn. Conversations longer than
    --rollout-max-context-len are left out and counted. ConfigError for evaluation, for rendered
    prompts, and for conversations without anything to train.
    """
    if evaluation:
        raise ConfigError(
            "supervised training has no evaluation; give --eval-function-path or leave out "
            "--eval-interval."
        )
    if args.apply_chat_template:
        raise ConfigError(
            "supervised training renders conversations itself and needs them as they are: remove "
            "--apply-chat-template."
        )
    groups = data_buffer.get_samples(args.rollout_batch_size)
    samples = [sample for group in groups for sample in group]
    fill_samples(samples, _generator(str(args.hf_checkpoint), args.loss_mask_type))
    limit = args.rollout_max_context_len
    too_long = [
        [s for s in group if limit is not None and len(s.tokens) > limit] for group in groups
    ]
    kept = [[s for s in group if limit is None or len(s.tokens) <= limit] for group in groups]
    kept = [group for group in kept if group]
    num_kept = sum(map(len, kept))
    if not num_kept:
        raise ConfigError(
            f"rollout {rollout_id}: every conversation is longer than --rollout-max-context-len "
            f"{limit}."
        )
    commit = getattr(data_buffer, "commit", None)
    if commit is not None:
        commit(rollout_id, [group[0].group_index for group in groups])
    report_progress("generate", num_kept, num_kept)
    reason = InvalidReason.TOO_LONG.value
    dropped = {reason: len(samples) - num_kept} if num_kept < len(samples) else {}
    dropped_groups = [(reason, group) for group in too_long if group]
    return RolloutFnTrainOutput(samples=kept, dropped=dropped, dropped_groups=dropped_groups)


def _name_culprit(
    samples: list[Sample],
    conversations: list[list[dict]],
    tools: list,
    generator: MultiTurnLossMaskGenerator,
) -> None:
    """ConfigError with the number of the sample whose conversation cannot be rendered
    or located.
    """
    for sample, conversation, tool in zip(samples, conversations, tools, strict=True):
        try:
            generator.render(conversation, tool)
        except SlimeError as error:
            raise ConfigError(
                f"sample {sample.index} (group {sample.group_index}): {error}"
            ) from error


def fill_samples(samples: list[Sample], generator: MultiTurnLossMaskGenerator) -> None:
    """Sets tokens, response length, loss mask and reward 0 on samples that hold a conversation."""
    conversations = [
        message_pairs(
            sample.prompt, sample.label, where=functools.partial("sample {}".format, sample.index)
        )
        for sample in samples
    ]
    tools = [sample.metadata.get("tools") for sample in samples]
    try:
        masks = generator.get_loss_masks(conversations, tools)
    except SlimeError:
        _name_culprit(samples, conversations, tools, generator)
        raise
    lengths = get_response_lengths([mask for _, mask in masks])
    for sample, (token_ids, mask), length in zip(samples, masks, lengths, strict=True):
        if length == 0:
            raise ConfigError(
                f"sample {sample.index}: no token of the conversation is trained: "
                f"{str(sample.prompt)[:200]}"
            )
        sample.tokens = token_ids
        sample.response_length = length
        sample.loss_mask = mask[len(mask) - length :]
        sample.reward = 0
