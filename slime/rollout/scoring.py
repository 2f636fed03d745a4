"""Scores generated samples, usually one group: first the gate's verdict, then the reward."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from slime.data.sample import Sample
from slime.gate import apply_verdicts, check_responses
from slime.gate.before_rewards import ResponseTally, with_engine_text
from slime.gate.gate import gate_config_from_args
from slime.plugins.failures import ENDS_THE_RUN, describe_error, log_cause, mark_failed
from slime.plugins.watched_calls import CallTimeout, call_within
from slime.rollout.rm_hub import async_rm, batched_async_rm, is_immediate
from slime.rollout.rm_hub.outcomes import GraderFailed
from slime.tracking.spans import span
from slime.typing import Tokenizer
from slime.utils.misc import load_function

logger = logging.getLogger(__name__)

UNFINISHED = (Sample.Status.PENDING, Sample.Status.ABORTED, Sample.Status.FAILED)


# Groups that finish within this time are judged in one pass: a pass over 8 short samples costs
# about as much as one over 800.
GATHER_S = 0.03


@dataclasses.dataclass
class ResponseGate:
    """Marks samples as valid or not, in place. `check` returns one verdict per sample, `apply` the
    marked samples.
    """

    check: Callable[[list[Sample]], list]
    apply: Callable[[list[Sample], list], list[Sample]]
    _waiting: list[tuple[list[Sample], asyncio.Future]] = dataclasses.field(default_factory=list)

    def mark(self, samples: list[Sample]) -> None:
        """Sets `valid`, `invalid_reason` and what else a verdict carries. A text that is replaced
        stays in the metadata, for raw snapshots.
        """
        with span("response_gate", samples=len(samples)):
            verdicts = self.check(samples)
            for sample, marked in zip(samples, self.apply(samples, verdicts), strict=True):
                if sample.response and marked.response != sample.response:
                    marked.metadata = with_engine_text(marked.metadata, sample.response)
                sample.__dict__.update(marked.__dict__)

    async def mark_batched(self, samples: list[Sample]) -> None:
        """`mark`, in one pass with the other groups that finish at the same time; a sample's
        verdict does not depend on the other samples of the pass.
        """
        loop = asyncio.get_running_loop()
        marked = loop.create_future()
        self._waiting.append((samples, marked))
        if len(self._waiting) == 1:
            loop.call_later(GATHER_S, self._mark_waiting)
        await marked

    def _mark_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        error: Exception | None = None
        try:
            self.mark([sample for samples, _ in waiting for sample in samples])
        except Exception as raised:  # noqa: BLE001 - each group's task gets it
            error = raised
        for _, marked in waiting:
            if marked.done():  # its task was cancelled meanwhile
                continue
            if error is None:
                marked.set_result(None)
            else:
                marked.set_exception(error)


def build_gate(
    args: argparse.Namespace, tokenizer: Tokenizer | None, tally_of: Callable[[], ResponseTally]
) -> ResponseGate:
    """The response gate of the run's options. tally_of: the tally of the run's gate, asked at each
    pass.
    """
    config = gate_config_from_args(args, tokenizer)
    return ResponseGate(
        lambda samples: check_responses(samples, config, tokenizer=tokenizer, tally=tally_of()),
        apply_verdicts,
    )


def scoring_args(args: argparse.Namespace, sampling_params: dict[str, Any]) -> Any:
    """`args` with the stop strings that these samples were generated with: an evaluation dataset
    may have its own.
    """
    stop = sampling_params.get("stop")
    if stop == getattr(args, "rollout_stop", None):
        return args
    return argparse.Namespace(**{**vars(args), "rollout_stop": stop})


async def score_group(
    args: argparse.Namespace, group: list[Sample], gate: ResponseGate | None
) -> None:
    """Marks the finished samples of `group` and gives the valid ones their reward, in place.

    Invalid and unfinished samples keep reward None and no reward function sees them. A reward call
    that fails, or ends without a number, marks its sample FAILED. Rewards that are there already
    stay.
    """
    finished = [sample for sample in group if sample.status not in UNFINISHED]
    if gate is not None and finished:
        await gate.mark_batched(finished)
    to_score = [sample for sample in finished if sample.valid and sample.reward is None]
    if not to_score:
        return
    try:
        with span("reward", track="rewards", samples=len(to_score)):
            rewards = await _request_rewards(args, to_score)
    except ENDS_THE_RUN:
        raise
    except Exception as error:  # noqa: BLE001 - a user's reward function may raise anything; its samples are marked
        log_cause("reward", to_score[0], error)
        rewards = [error] * len(to_score)
    for sample, reward in zip(to_score, rewards, strict=True):
        store_reward(sample, reward)


async def _request_rewards(args: argparse.Namespace, samples: list[Sample]) -> list[Any]:
    """One reward, or the exception in its place, per sample."""
    if getattr(args, "group_rm", False) and args.custom_rm_path:
        rewards = await _within_limit(
            args, args.custom_rm_path, samples, batched_async_rm(args, samples)
        )
        if len(rewards) != len(samples):
            raise ValueError(
                f"the group reward function returned {len(rewards)} rewards for {len(samples)} "
                "samples"
            )
        return list(rewards)
    # A task per sample only costs time where scoring is plain computation.
    if all(is_immediate(args, sample) for sample in samples):
        return [await _guarded(args, sample) for sample in samples]
    return list(await asyncio.gather(*(_guarded(args, sample) for sample in samples)))


async def _guarded(args: argparse.Namespace, sample: Sample) -> Any:
    try:
        return await _within_limit(
            args, sample.custom_rm_path or args.custom_rm_path, [sample], async_rm(args, sample)
        )
    except ENDS_THE_RUN:
        raise
    except Exception as error:  # noqa: BLE001 - see score_group
        log_cause("reward", sample, error)
        return error


async def _within_limit(
    args: argparse.Namespace,
    path: str | None,
    samples: list[Sample],
    call: Coroutine[Any, Any, Any],
) -> Any:
    """The result of a reward call; a user's function has --reward-timeout for it. Built-in scorers,
    and functions with the attribute `bounds_itself`, have limits of their own.
    """
    if path is None or getattr(load_function(path), "bounds_itself", False):
        return await call
    indices = ", ".join(str(sample.index) for sample in samples[:8]) + (
        ", ..." if len(samples) > 8 else ""
    )
    what = f"the reward function {path} for sample{'s' if len(samples) > 1 else ''} {indices}"
    return await call_within(
        call, what=what, option="--reward-timeout", timeout_s=getattr(args, "reward_timeout", 60.0)
    )


def store_reward(sample: Sample, reward: Any) -> None:
    """Sets the reward, or marks the sample FAILED where there is none: an exception or None."""
    if isinstance(reward, GraderFailed | CallTimeout):
        reason = str(reward)
    elif isinstance(reward, Exception):
        reason = describe_error(reward)
    elif reward is None:
        reason = "the reward function returned None"
    else:
        sample.reward = reward
        return
    mark_failed(sample, "reward", reason)
    sample.metadata["reward_error"] = reason
