"""Rewards from a server: the sample's prompt, response (without end tokens) and label go out, its
JSON answer is the reward.
"""

from __future__ import annotations

import argparse
from typing import Any

from slime.data.sample import Sample
from slime.exceptions import ConfigError
from slime.utils.http_utils import request_with_retries


async def request_remote_reward(
    args: argparse.Namespace, sample: Sample, response: str, max_retries: int = 10
) -> Any:
    """The answer of --rm-url to {"prompt", "response", "label"}. EngineError after the last try."""
    if not args.rm_url:
        raise ConfigError("reward type remote_rm needs --rm-url.")
    payload = {"prompt": sample.prompt, "response": response, "label": sample.label}
    headers = {"X-Session-Id": sample.session_id} if sample.session_id else None
    return await request_with_retries(
        "POST",
        args.rm_url,
        payload,
        max_retries=max_retries,
        headers=headers,
        timeout_s=args.rm_timeout,
    )
