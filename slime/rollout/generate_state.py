"""`SharedState`: what every generation task of this process shares - tokenizer, limits, sampling
parameters, running tasks.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import copy
import weakref
from collections.abc import Iterator
from typing import Any, ClassVar

from slime.exceptions import ConfigError
from slime.gate.before_rewards import ResponseTally
from slime.rollout.scoring import build_gate
from slime.utils import http_utils, processing_utils
from slime.utils.misc import SingletonMeta

# A group's members follow each other closely; the fully asynchronous worker never starts over.
MAX_REMEMBERED_PROMPTS = 4096


def rollout_sampling_params(args: argparse.Namespace) -> dict[str, Any]:
    """The engine's sampling parameters of a training rollout. ConfigError where no limit bounds a
    response.
    """
    if args.rollout_max_response_len is None and args.rollout_max_context_len is None:
        raise ConfigError(
            "nothing bounds the length of a response: give --rollout-max-response-len or "
            "--rollout-max-context-len."
        )
    params = {
        "temperature": args.rollout_temperature,
        "top_p": args.rollout_top_p,
        "top_k": args.rollout_top_k,
        "max_new_tokens": args.rollout_max_response_len or args.rollout_max_context_len,
        # copies: a generate function may edit what it is given, and must not edit the options
        "stop": copy.copy(args.rollout_stop),
        "stop_token_ids": copy.copy(args.rollout_stop_token_ids),
        "skip_special_tokens": args.rollout_skip_special_tokens,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }
    if args.rollout_top_p != 1.0:
        # The trainer replays the nucleus, so that both sides normalize over the same tokens.
        params["custom_params"] = {"return_top_p_token_ids": True}
    return params


class SharedState(metaclass=SingletonMeta):
    """One per process; slime.rollout.sglang_rollout.GenerateState adds the tasks. Built on the first
    rollout; `reset` starts the next one. The rollout manager hands its gate's `tally` in.
    """

    tally: ClassVar[ResponseTally] = ResponseTally()

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.tokenizer = processing_utils.shared_tokenizer(args.hf_checkpoint)
        self.processor = (
            processing_utils.load_processor(args.hf_checkpoint) if args.multimodal_keys else None
        )
        self.gate = build_gate(args, self.tokenizer, lambda: SharedState.tally)
        http_utils.init_http_client(args)
        engines = max(1, http_utils.get_rollout_num_engines(args))
        self.max_requests = args.sglang_server_concurrency * engines
        self._semaphores: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict] = (
            weakref.WeakKeyDictionary()
        )
        self.sampling_params = rollout_sampling_params(args)
        self.group_sampling_seeds = [
            args.rollout_seed + member for member in range(args.n_samples_per_prompt)
        ]
        self._prompt_ids: dict[str, list[int]] = {}
        self.reset()

    @property
    def semaphore(self) -> asyncio.Semaphore:
        """Requests in flight, at most, from the running loop."""
        return self._semaphore("samples", self.max_requests)

    @property
    def group_semaphore(self) -> asyncio.Semaphore:
        """The same for requests of whole groups, each of which counts as many samples as it has."""
        return self._semaphore(
            "groups", max(1, self.max_requests // max(1, self.args.n_samples_per_prompt))
        )

    def _semaphore(self, name: str, value: int) -> asyncio.Semaphore:
        # One per loop: the fully asynchronous worker has a loop of its own, and asyncio's
        # primitives belong to one.
        mine = self._semaphores.setdefault(asyncio.get_running_loop(), {})
        return mine.setdefault(name, asyncio.Semaphore(value))

    def reset(self) -> None:
        """Forgets the running tasks and the order to abort."""
        self.remaining_batch_size = 0
        self.pendings: set[asyncio.Task] = set()
        self.aborted = False
        self._prompt_ids.clear()

    @contextlib.contextmanager
    def dp_rank_context(self) -> Iterator[int | None]:
        """The engine rank that a request should go to; None leaves the choice to the engine."""
        yield None

    def encode_prompt(self, text: str) -> list[int]:
        """The ids of a rendered prompt, tokenized once for all members of its group; a new list
        each time.
        """
        ids = self._prompt_ids.get(text)
        if ids is None:
            if len(self._prompt_ids) >= MAX_REMEMBERED_PROMPTS:
                self._prompt_ids.clear()
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            self._prompt_ids[text] = ids
        return list(ids)
