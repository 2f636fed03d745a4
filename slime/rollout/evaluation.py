"""Evaluation: every dataset is generated with its own sampling and scored, on the same path as
training.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterable
from typing import Any

from slime.data.rewards import reward_number, value_problem
from slime.data.sample import Sample, chosen_reward
from slime.data.structure import iter_samples
from slime.exceptions import ConfigError, RolloutDataError
from slime.plugins.failures import FailureCounter, mark_failed
from slime.prompts.data_source import clone_for_group
from slime.prompts.dataset import Dataset
from slime.prompts.eval_config import EvalDatasetConfig, eval_datasets_of
from slime.rollout.base_types import GenerationCalls, RolloutFnEvalOutput
from slime.rollout.group_loop import report_progress
from slime.utils import processing_utils
from slime.utils.misc import load_function

# Samples of one HTTP request in evaluation, where prompts usually have one sample each.
MERGED_SIZE = 32


async def evaluate_datasets(
    args: argparse.Namespace, rollout_id: int, cache: dict[Any, Dataset], calls: GenerationCalls
) -> RolloutFnEvalOutput:
    """Rewards, truncation flags and samples of every evaluation dataset, by name. ConfigError where
    there is none.
    """
    configs = eval_datasets_of(args)
    if not configs:
        raise ConfigError(
            "there is nothing to evaluate: give --eval-prompt-data NAME PATH or --eval-config."
        )
    data: dict[str, dict[str, Any]] = {}
    metrics: dict[str, Any] = {}
    for config in configs:
        data[config.name], failures = await evaluate_dataset(args, config, cache, calls)
        metrics[f"eval/{config.name}/failed_samples"] = failures.count
    return RolloutFnEvalOutput(data=data, metrics=metrics)


async def evaluate_dataset(
    args: argparse.Namespace,
    config: EvalDatasetConfig,
    cache: dict[Any, Dataset],
    calls: GenerationCalls,
) -> tuple[dict[str, list], FailureCounter]:
    """({"rewards", "truncated", "samples"} in order of the dataset, the failures).

    Samples whose generation or reward failed, a reward that is no finite number among them, have no
    reward and stand in none of the lists; they are counted, and too many of them are a
    RolloutDataError.
    """
    groups = build_eval_groups(args, config, cache)
    if not args.group_rm and calls.sends_group_requests(args, groups[0]):
        groups = merge_groups(groups, size=MERGED_SIZE)
    total = sum(map(len, groups))
    failures = FailureCounter(total=total, max_ratio=args.max_failed_ratio)
    calls.GenerateState(args).reset()
    params = eval_sampling_params(args, config)
    done = 0
    results: dict[int, list] = {}

    async def one(number: int, group: list[Sample]) -> None:
        nonlocal done
        results[number] = await calls.generate_and_rm_group(
            args, group, dict(params), evaluation=True
        )
        fail_unusable_rewards(args, iter_samples(results[number]))
        failures.add([list(iter_samples([member])) for member in results[number]])
        done += len(group)
        report_progress("evaluate", done, total)

    tasks = [asyncio.create_task(one(number, group)) for number, group in enumerate(groups)]
    try:
        await asyncio.wait_for(asyncio.gather(*tasks), config.eval_task_timeout)
    except asyncio.TimeoutError as error:
        raise RolloutDataError(
            f"evaluation {config.name!r}: {done} of {total} samples within eval_task_timeout "
            f"{config.eval_task_timeout} s"
        ) from error
    finally:
        for task in tasks:
            task.cancel()
    number_attempts(results[number] for number in range(len(groups)))
    samples = [sample for number in range(len(groups)) for sample in iter_samples(results[number])]
    columns = eval_columns(args, samples)
    if config.min_eval_samples is not None and len(columns["samples"]) < config.min_eval_samples:
        raise RolloutDataError(
            f"evaluation {config.name!r}: {len(columns['samples'])} scored samples, "
            "min_eval_samples is "
            f"{config.min_eval_samples}"
        )
    return columns, failures


def fail_unusable_rewards(args: argparse.Namespace, samples: Iterable[Sample]) -> None:
    """Marks samples FAILED whose reward training would not take: text, a list, NaN.
    RolloutDataError for a dict without the key.
    """
    key = args.eval_reward_key or args.reward_key
    for sample in samples:
        if sample.reward is None:
            continue
        problem = value_problem(chosen_reward(sample.reward, key, index=sample.index))
        if problem is not None:
            mark_failed(sample, "reward", problem)


def number_attempts(groups: Iterable[list]) -> None:
    """Gives the samples of an attempt that emitted several one `rollout_id`, -1, -2, ... in order,
    where they have none: an attempt has one vote.
    """
    attempts = [
        list(iter_samples(member))
        for group in groups
        for member in group
        if not isinstance(member, Sample)
    ]
    for number, samples in enumerate(attempts, start=1):
        for sample in samples:
            if sample.rollout_id is None:
                sample.rollout_id = -number


def merge_groups(groups: list[list[Sample]], *, size: int) -> list[list[Sample]]:
    """Consecutive groups joined while together they have at most `size` samples; the
    order stays.
    """
    merged: list[list[Sample]] = []
    for group in groups:
        if merged and len(merged[-1]) + len(group) <= size:
            merged[-1].extend(group)
        else:
            merged.append(list(group))
    return merged


def build_eval_groups(
    args: argparse.Namespace, config: EvalDatasetConfig, cache: dict[Any, Dataset]
) -> list[list[Sample]]:
    """One group of `n_samples_per_eval_prompt` samples per prompt; group and sample numbers count
    from 0 in each dataset.
    """
    dataset = _dataset(args, config, cache)
    groups = []
    scorer = config.custom_rm_path
    if scorer:  # a function that makes a training signal may name another one that scores
        scorer = getattr(load_function(scorer), "in_evaluation", scorer)
    size = config.n_samples_per_eval_prompt
    for number, prompt in enumerate(dataset.samples):
        group = [clone_for_group(prompt) for _ in range(size)]
        for member, sample in enumerate(group):
            sample.group_index, sample.index = number, number * size + member
            sample.metadata = config.inject_metadata(sample.metadata)
            sample.generate_function_path = config.custom_generate_function_path
            sample.custom_rm_path = scorer
        groups.append(group)
    return groups


def _dataset(
    args: argparse.Namespace, config: EvalDatasetConfig, cache: dict[Any, Dataset]
) -> Dataset:
    key = (
        config.cache_key,
        args.hf_checkpoint,
        args.eval_max_prompt_len,
        config.apply_chat_template,
    )
    if key not in cache:
        max_length = (
            args.rollout_max_prompt_len
            if args.eval_max_prompt_len is None
            else args.eval_max_prompt_len
        )
        cache[key] = Dataset(
            config.path,
            processing_utils.shared_tokenizer(args.hf_checkpoint),
            processing_utils.load_processor(args.hf_checkpoint) if config.multimodal_keys else None,
            max_length,
            prompt_key=config.input_key,
            multimodal_keys=config.multimodal_keys,
            label_key=config.label_key,
            tool_key=config.tool_key,
            metadata_key=config.metadata_key,
            apply_chat_template=config.apply_chat_template,
            apply_chat_template_kwargs=config.apply_chat_template_kwargs,
        )
    return cache[key]


def eval_sampling_params(args: argparse.Namespace, config: EvalDatasetConfig) -> dict[str, Any]:
    """The engine's sampling parameters for one dataset. ConfigError where no limit bounds a
    response.
    """
    limit = config.max_response_len or args.eval_max_context_len or args.rollout_max_context_len
    if limit is None:
        raise ConfigError(
            f"evaluation {config.name!r}: give --eval-max-response-len or "
            "--rollout-max-response-len."
        )
    params = {
        "temperature": config.temperature,
        "top_p": config.top_p,
        "top_k": config.top_k,
        "max_new_tokens": limit,
        "stop": config.stop,
        "stop_token_ids": config.stop_token_ids,
        "skip_special_tokens": config.skip_special_tokens,
        "no_stop_trim": config.no_stop_trim,
        "spaces_between_special_tokens": False,
    }
    optional = {
        "min_new_tokens": config.min_new_tokens,
        "repetition_penalty": config.repetition_penalty,
    }
    return {**params, **{name: value for name, value in optional.items() if value is not None}}


def eval_columns(args: argparse.Namespace, samples: list[Sample]) -> dict[str, list]:
    """Rewards, truncation flags and samples of those that have a reward, as lists of
    equal length.
    """
    scored = [sample for sample in samples if sample.reward is not None]
    key = args.eval_reward_key or args.reward_key
    return {
        "rewards": [reward_number(sample.reward, key, index=sample.index) for sample in scored],
        "truncated": [sample.status is Sample.Status.TRUNCATED for sample in scored],
        "samples": scored,
    }
