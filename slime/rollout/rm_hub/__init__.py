"""Built-in reward functions and the one door to them; no grader's failure becomes a reward.

`async_rm(args, sample)` returns the reward of one sample. Scorers that evaluate mathematics run in
killable processes (grader_pool.py); when they end without a value GraderFailed is raised, never a
reward of 0 made up. Scorers of text (f1, gpqa, exact_match) run where they are called. All of them
read the response without the tokens that end its turn; a custom function gets the sample as it is,
and `graded_text(args, sample)` is what the built-in ones read.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import random
from typing import Any

from slime.data.sample import Sample
from slime.plugins.loading import load_hook
from slime.rollout.rm_hub import exact_match, f1, gpqa, grader_pool, ifbench
from slime.rollout.rm_hub.answers import boxed_answer
from slime.rollout.rm_hub.end_tokens import special_tokens_of, without_end_tokens
from slime.rollout.rm_hub.outcomes import value_of
from slime.rollout.rm_hub.remote import request_remote_reward
from slime.utils.misc import load_function

__all__ = [
    "RM_TYPES",
    "async_rm",
    "batched_async_rm",
    "get_deepscaler_rule_based_reward",
    "grade_answer_verl",
    "graded_text",
    "is_immediate",
]

# Graders that upstream's callers import from here, loaded when asked for: their patterns take a
# while to compile.
_LATE = {"get_deepscaler_rule_based_reward": "deepscaler", "grade_answer_verl": "math_utils"}

REMOTE_TYPES = frozenset({"remote_rm"})
POOL_TYPES = frozenset({"math", "deepscaler", "dapo", "math_verify", "math_value"})
TEXT_TYPES = frozenset({"exact_match", "f1", "gpqa", "ifbench", "random"})
RM_TYPES = TEXT_TYPES | POOL_TYPES | REMOTE_TYPES
BOXED_PREFIX = "boxed_"
# What a grader that looks for the answer's place reads in place of a bare answer.
_PLACED = {
    "math": "\\boxed{{{}}}",
    "math_verify": "\\boxed{{{}}}",
    "math_value": "\\boxed{{{}}}",
    "deepscaler": "</think>\\boxed{{{}}}",
    "dapo": "Answer: \\boxed{{{}}}",
}


def __getattr__(name: str) -> Any:
    if name in _LATE:
        return getattr(importlib.import_module(f"{__name__}.{_LATE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


async def async_rm(args: argparse.Namespace, sample: Sample, **kwargs: object) -> Any:
    """The sample's reward: a number, or a dict for scorers that return several values.

    In this order: the sample's own `custom_rm_path`, --custom-rm-path, metadata["rm_type"],
    --rm-type. GraderFailed when a grader was killed or broke; NotImplementedError for an unknown
    type.
    """
    if sample.custom_rm_path:
        where = f"sample {sample.index}: custom_rm_path {sample.custom_rm_path}"
        function = load_hook(
            "custom_rm_path", sample.custom_rm_path, where=where, load=load_function
        )
        return await function(args, sample, **kwargs)
    custom = getattr(args, "custom_rm_path", None)
    if custom is not None:
        return await load_function(custom)(args, sample, **kwargs)
    rm_type, response = split_rm_type(args, sample)
    if rm_type in REMOTE_TYPES:
        return await request_remote_reward(args, sample, response)
    if rm_type in POOL_TYPES:
        return await _pool_reward(args, rm_type, response, sample.label)
    return _text_reward(rm_type, response, sample)


async def batched_async_rm(
    args: argparse.Namespace, samples: list[Sample], **kwargs: object
) -> list[Any]:
    """One reward per sample: --custom-rm-path called once with the list, else
    `async_rm` of each.
    """
    custom = getattr(args, "custom_rm_path", None)
    if custom is not None:
        return await load_function(custom)(args, samples, **kwargs)
    return list(await asyncio.gather(*(async_rm(args, sample, **kwargs) for sample in samples)))


def graded_text(args: argparse.Namespace, sample: Sample) -> str:
    """The response as built-in graders read it: without the special tokens of the run's tokenizer
    and --rollout-stop at its end.
    """
    stop = getattr(args, "rollout_stop", None) or ()
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    folder = getattr(args, "hf_checkpoint", None)
    return without_end_tokens(
        sample.response or "", (*stops, *(special_tokens_of(str(folder)) if folder else ()))
    )


def split_rm_type(args: argparse.Namespace, sample: Sample) -> tuple[str, str]:
    """(type without the prefix boxed_, the text to score: the response, or what its last box
    holds).
    """
    rm_type, response = _rm_type_of(args, sample), graded_text(args, sample)
    if rm_type.startswith(BOXED_PREFIX):
        rm_type = rm_type.removeprefix(BOXED_PREFIX)
        answer = boxed_answer(response)
        response = "" if answer is None else _PLACED.get(rm_type, "{}").format(answer)
    return rm_type, response


def _rm_type_of(args: argparse.Namespace, sample: Sample) -> str:
    metadata = sample.metadata if isinstance(sample.metadata, dict) else {}
    return (metadata.get("rm_type") or getattr(args, "rm_type", None) or "").strip()


def is_immediate(args: argparse.Namespace, sample: Sample) -> bool:
    """Whether the reward is plain computation in this process, without waiting for anything."""
    if sample.custom_rm_path or getattr(args, "custom_rm_path", None):
        return False
    return split_rm_type_name(args, sample) in TEXT_TYPES


def split_rm_type_name(args: argparse.Namespace, sample: Sample) -> str:
    """The sample's reward type without the prefix boxed_."""
    return _rm_type_of(args, sample).removeprefix(BOXED_PREFIX)


def _text_reward(rm_type: str, response: str, sample: Sample) -> Any:
    label, metadata = sample.label, sample.metadata
    if rm_type == "exact_match":
        return exact_match.compute_exact_match(response, label)
    if rm_type == "f1":
        return f1.f1_score(response, label)[0]
    if rm_type == "gpqa":
        return gpqa.compute_gpqa_reward(response, label, metadata=metadata)
    if rm_type == "ifbench":
        return ifbench.compute_ifbench_reward(response, label, metadata=metadata)
    if rm_type == "random":
        return random.randint(0, 1)
    if not rm_type:
        raise NotImplementedError(
            f"no reward function: give --rm-type (one of {sorted(RM_TYPES)}), --custom-rm-path, or "
            "rm_type in the metadata, "
            "or set sample.reward in your generate function."
        )
    raise NotImplementedError(
        f"reward type {rm_type!r} is not known; known are {sorted(RM_TYPES)}."
    )


async def _pool_reward(args: argparse.Namespace, rm_type: str, response: str, label: object) -> Any:
    pool = grader_pool.shared_pool(
        grader_pool.PoolSettings(
            num_workers=getattr(args, "grader_workers", 2),
            timeout_s=getattr(args, "grader_timeout", 10.0),
            max_length=getattr(args, "grader_max_length", 2000),
        )
    )
    return value_of(await pool.grade_async(rm_type, response, label))
