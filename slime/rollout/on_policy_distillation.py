"""On-policy distillation: a teacher behind --rm-url scores the student's tokens; its log-probs are
the signal, not a reward.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from slime.data.sample import Sample
from slime.exceptions import ConfigError, RolloutDataError
from slime.rollout.rm_hub import async_rm
from slime.utils.http_utils import request_with_retries


async def reward_func(args: argparse.Namespace, sample: Sample, **kwargs: object) -> dict[str, Any]:
    """The teacher's reply to the sample's tokens, with the log-prob of every input token at the
    rollout's temperature.
    """
    if not args.rm_url:
        raise ConfigError("on-policy distillation needs --rm-url, the teacher's /generate address.")
    payload = {
        "input_ids": sample.tokens,
        "sampling_params": {
            "temperature": args.rollout_temperature,
            "max_new_tokens": 0,
            "skip_special_tokens": False,
        },
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    return await request_with_retries(
        "POST", args.rm_url, payload, max_retries=10, timeout_s=args.rm_timeout
    )


async def evaluation_reward(args: argparse.Namespace, sample: Sample, **kwargs: object) -> Any:
    """The reward of an evaluated sample: the teacher's log-probs are no score, so --rm-type (or the
    row's rm_type) gives it.
    """
    scored_by_type = argparse.Namespace(**{**vars(args), "custom_rm_path": None})
    return await async_rm(scored_by_type, dataclasses.replace(sample, custom_rm_path=None))


# type: ignores: a function's type has no marks
# by --rm-timeout: a teacher may have long queues
reward_func.bounds_itself = True  # type: ignore[attr-defined]
reward_func.in_evaluation = f"{__name__}.evaluation_reward"  # type: ignore[attr-defined]
evaluation_reward.bounds_itself = True  # type: ignore[attr-defined]  # a built-in scorer


def post_process_rewards(
    args: argparse.Namespace, samples: list[Sample], **kwargs: object
) -> tuple[list[float], list[float]]:
    """Stores `teacher_log_probs` [response_length] on each sample and returns zeros as raw rewards
    and as rewards.

    The first input token has no log-prob; the last `response_length` of the others belong to the
    response. RolloutDataError where the teacher sent too few.
    """
    for sample in samples:
        reply = sample.get_reward_value(args)
        if reply is None:  # failed or invalid: it is not trained
            sample.teacher_log_probs = [0.0] * sample.response_length
            continue
        entries = reply["meta_info"]["input_token_logprobs"][1:]
        if len(entries) < sample.response_length:
            raise RolloutDataError(
                f"sample {sample.index}: the teacher sent {len(entries)} log-probs for "
                f"{sample.response_length} response tokens"
            )
        sample.teacher_log_probs = [
            float(entry[0]) for entry in entries[len(entries) - sample.response_length :]
        ]
    zeros = [0.0] * len(samples)
    return zeros, list(zeros)
