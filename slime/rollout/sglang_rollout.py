"""The default rollout function: prompts to scored groups over SGLang's HTTP API, many at a time,
repeatable.

    generate_rollout -> generate_rollout_async (group_loop.py: fetch, filter, keep, abort)
                          -> generate_and_rm_group -> generate_and_rm -> generate -> engine
                                                   -> one request for the whole group, where nothing
                                                   forbids it
                     -> eval_rollout (evaluation.py)

A generation or reward call that fails marks its sample FAILED with a reason; see failures.py for
when that ends the run.
"""

from __future__ import annotations

import argparse
import asyncio
import contextvars
import copy
import dataclasses
import inspect
import logging
import sys
import uuid
from collections.abc import Callable, Coroutine, Iterable
from typing import TYPE_CHECKING, Any, cast

from slime.data.sample import Sample
from slime.data.structure import iter_samples, with_rollout_id
from slime.data.trained_sampling import check_trained_sampling
from slime.data.weight_versions import mask_older_tokens
from slime.exceptions import EngineError, RolloutDataError
from slime.plugins.failures import ENDS_THE_RUN, fail
from slime.plugins.loading import load_hook
from slime.plugins.watched_calls import call_within
from slime.prompts.dataset import prompt_text
from slime.rollout import generation
from slime.rollout.base_types import (
    GenerationCalls,
    RolloutFnEvalOutput,
    RolloutFnTrainOutput,
    require_generated,
)
from slime.rollout.engine_client import abort_engines, choose_url, get_engines, request_generate
from slime.rollout.evaluation import evaluate_datasets
from slime.rollout.generate_state import SharedState
from slime.rollout.group_loop import run_group_loop
from slime.rollout.request_spans import traced_request
from slime.rollout.sample_hooks import (
    apply_rollout_sample_hooks,
    get_current_rollout_id,
    set_current_rollout_id,
)
from slime.rollout.scoring import score_group, scoring_args
from slime.typing import Processor
from slime.utils import processing_utils
from slime.utils.async_utils import run
from slime.utils.misc import load_function

if TYPE_CHECKING:
    from slime.prompts.data_source import DataSource

logger = logging.getLogger(__name__)

# The loops look these functions up here at each call: replacing one of this module's names acts.
_THIS: GenerationCalls = sys.modules[__name__]

# Evaluation datasets by their cache key, read once per process.
EVAL_PROMPT_DATASET: dict[Any, Any] = {}


class GenerateState(SharedState):
    """What every generation task of this process shares. One per process: `GenerateState(args)`
    returns it; `reset` starts the next rollout.
    """

    def submit_generate_tasks(self, groups: list[list[Sample]]) -> list[asyncio.Task]:
        """Starts one task per group and returns them in that order."""
        tasks = [
            asyncio.create_task(
                generate_and_rm_group(
                    self.args, group, dict(self.sampling_params), evaluation=False
                )
            )
            for group in groups
        ]
        self.pendings.update(tasks)
        self.remaining_batch_size += len(groups)
        return tasks


@dataclasses.dataclass
class GroupContext:
    """Set while a group is generated: its members are collected here and scored together once all
    of them are there.
    """

    evaluation: bool
    to_score: list[Sample] = dataclasses.field(default_factory=list)


_group_context: contextvars.ContextVar[GroupContext | None] = contextvars.ContextVar(
    "group_context", default=None
)


def get_model_url(
    args: argparse.Namespace, model_name: str = "default", endpoint: str = "/generate"
) -> str:
    """The address of an endpoint of the engines, for custom generate functions. One model is
    served: any name leads there.
    """
    return choose_url(get_engines(args), None) + endpoint


async def generate(
    args: argparse.Namespace, sample: Sample, sampling_params: dict[str, Any]
) -> Sample:
    """The sample with the engine's tokens, log-probs, text, status and weight version appended.

    `sampling_params["max_new_tokens"]` is reduced in place to what may still be generated; with
    nothing left the sample is TRUNCATED without a request. EngineError and RolloutDataError leave
    the sample as it was.
    """
    state = GenerateState(args)
    request = prepare_request(args, state, sample, sampling_params)
    if request is not None:
        with traced_request([sample]) as note:
            reply = await request_generate(
                args, request, key=sample.group_index, session_id=sample.session_id
            )
            note([reply])
        store_reply(args, state, sample, reply, sampling_params)
    return sample


def store_reply(
    args: argparse.Namespace,
    state: GenerateState,
    sample: Sample,
    reply: object,
    sampling_params: dict[str, Any],
) -> None:
    """Appends the engine's reply to the sample; its text is that of all response ids.
    RolloutDataError leaves the sample as it was.
    """

    def decode(ids: list[int]) -> str:
        return state.tokenizer.decode(
            ids,
            skip_special_tokens=bool(sampling_params.get("skip_special_tokens")),
            spaces_between_special_tokens=False,
            clean_up_tokenization_spaces=False,
        )

    generation.apply_segment(sample, reply, decode=decode, args=args)


def prepare_request(
    args: argparse.Namespace, state: GenerateState, sample: Sample, sampling_params: dict[str, Any]
) -> dict[str, Any] | None:
    """The /generate body of the sample, whose prompt is tokenized here if it was not yet; None
    where no room is left.
    """
    if sample.status not in (Sample.Status.PENDING, Sample.Status.ABORTED):
        raise AssertionError(
            f"sample {sample.index} is {sample.status.value}; only pending and aborted ones are "
            "generated"
        )
    context = _group_context.get()
    if context is not None and not context.evaluation:
        check_trained_sampling(sampling_params, temperature=args.rollout_temperature)
    text = images = None
    if sample.multimodal_inputs:
        text, images = _encode_multimodal_prompt(state, sample)
    elif not sample.tokens:
        sample.tokens = state.encode_prompt(prompt_text(sample, state.tokenizer))
    limit = generation.response_budget(
        sample,
        max_response_len=sampling_params["max_new_tokens"],
        max_context_len=max_context_len(args),
        prompt_length=len(sample.tokens) - sample.response_length,
    )
    budget = cast(int, limit)  # max_new_tokens is one
    sampling_params["max_new_tokens"] = max(0, budget)
    if budget <= 0:
        generation.cut_untrained_tail(
            sample,
            -budget,
            decode=lambda ids: state.tokenizer.decode(ids, skip_special_tokens=False),
        )
        sample.status = Sample.Status.TRUNCATED
        sample.finish_reason = "length"
        return None
    return generation.build_request(
        sample,
        sampling_params,
        text=text,
        image_data=images,
        rid=f"{uuid.uuid4().hex[:12]}-{sample.index}",
        return_arrays=getattr(args, "rollout_return_arrays", False),
        return_routed_experts=getattr(args, "use_rollout_routing_replay", False),
    )


def max_context_len(args: argparse.Namespace) -> int | None:
    """The longest prompt + response in tokens, of evaluation where one is generated."""
    context = _group_context.get()
    limit = getattr(args, "rollout_max_context_len", None)
    if context is not None and context.evaluation:
        return (
            limit
            if getattr(args, "eval_max_context_len", None) is None
            else args.eval_max_context_len
        )
    return limit


def _encode_multimodal_prompt(state: GenerateState, sample: Sample) -> tuple[str, list[str]]:
    """Sets tokens and training inputs of a prompt with media; returns what the engine takes: text
    and image data.
    """
    if sample.response_length:
        raise RolloutDataError(
            f"sample {sample.index}: a response to a prompt with media cannot be continued by ids"
        )
    text = prompt_text(sample, state.tokenizer)
    processor, media = cast(Processor, state.processor), cast(dict, sample.multimodal_inputs)
    encoded = dict(processor(text=text, **processing_utils.build_processor_kwargs(media)))
    sample.tokens = encoded.pop("input_ids")[0].tolist()
    encoded.pop("attention_mask", None)
    sample.multimodal_train_inputs = encoded or None
    return text, [
        processing_utils.encode_image_for_rollout_engine(image)
        for image in media.get("images") or []
    ]


async def generate_and_rm(
    args: argparse.Namespace,
    sample: Sample,
    sampling_params: dict[str, Any],
    evaluation: bool = False,
) -> Sample | list[Sample]:
    """The sample generated and scored; a list where the custom generate function returns one.
    Errors are raised.

    A finished sample is returned as it is. Inside a group, scoring waits until every member is
    there.
    """
    mask_offpolicy_part(args, sample)
    if sample.status in (Sample.Status.COMPLETED, Sample.Status.TRUNCATED):
        assert (
            sample.reward is not None
            or args.group_rm
            or not sample.valid
            or _group_context.get() is not None
        ), f"sample {sample.index} is finished but has no reward"
        return await _score_or_collect(args, sample, evaluation)
    state = GenerateState(args)
    async with state.semaphore:
        if state.aborted:
            sample.status = Sample.Status.ABORTED
            return sample
        with state.dp_rank_context():
            result = await _call_generate(args, sample, sampling_params, evaluation)
    result = await _apply_hooks(args, sample, result, evaluation)
    return await _score_or_collect(args, result, evaluation)


async def _apply_hooks(
    args: argparse.Namespace, sample: Sample, result: object, evaluation: bool
) -> Any:
    """The result after the user's sample hooks, which have --generate-timeout for it."""
    if not getattr(args, "rollout_sample_hook_path", None):
        return result
    call = apply_rollout_sample_hooks(args, result, evaluation=evaluation)
    return await _within_limit(args, f"the sample hooks for sample {sample.index}", call)


async def _within_limit(args: argparse.Namespace, what: str, call: Coroutine[Any, Any, Any]) -> Any:
    """The result of a user's coroutine; CallTimeout after --generate-timeout."""
    limit = getattr(args, "generate_timeout", None)
    return await (
        call
        if limit is None
        else call_within(call, what=what, option="--generate-timeout", timeout_s=limit)
    )


def mask_offpolicy_part(args: argparse.Namespace, sample: Sample) -> None:
    """Excludes what earlier policies sampled from the loss, where that is asked for, whether the
    sample was cut or had ended by itself.
    """
    if args.partial_rollout and args.mask_offpolicy_in_partial_rollout:
        mask_older_tokens(sample, unknown_is_older=True)


async def _call_generate(
    args: argparse.Namespace, sample: Sample, sampling_params: dict[str, Any], evaluation: bool
) -> Any:
    path = sample.generate_function_path or args.custom_generate_function_path
    if path is None:
        return await generate(args, sample, sampling_params)
    if sample.generate_function_path:
        where = f"sample {sample.index}: generate_function_path {path}"
        function = load_hook("custom_generate_function_path", path, where=where, load=load_function)
    else:
        function = load_function(path)
    extra = (
        {"evaluation": evaluation} if "evaluation" in inspect.signature(function).parameters else {}
    )
    call = function(args, sample, sampling_params, **extra)
    index, group_index = sample.index, sample.group_index
    result = await _within_limit(args, f"the generate function {path} for sample {index}", call)
    require_generated(path, result)
    return with_rollout_id(result, index, group_index)


async def _score_or_collect(
    args: argparse.Namespace, result: Sample | list, evaluation: bool
) -> Any:
    """Scores a result, now or with its group. A list with an aborted member is not
    scored at all.
    """
    samples = [result] if isinstance(result, Sample) else list(iter_samples(result))
    if any(sample.status is Sample.Status.ABORTED for sample in samples):
        return result
    context = _group_context.get()
    if context is not None:
        context.to_score.extend(samples)
    elif not args.group_rm:
        gate = None if evaluation else getattr(GenerateState(args), "gate", None)
        await score_group(args, samples, gate)
        raise_failed(samples)
    return result


def raise_failed(samples: Iterable[Sample]) -> None:
    """RolloutDataError for a sample whose reward call failed, for callers that asked for one sample
    alone.
    """
    for sample in samples:
        if sample.status is Sample.Status.FAILED:
            raise RolloutDataError(
                f"sample {sample.index} failed: {sample.metadata.get('failure')}"
            )


async def generate_and_rm_group(
    args: argparse.Namespace,
    group: list[Any],
    sampling_params: dict[str, Any],
    evaluation: bool = False,
) -> list[Any]:
    """The group generated and scored: one Sample, or one list of them (fan-out), per member, in
    order.

    A member of `group` may be the list of an execution that an earlier rollout finished; it stays
    as it is. An execution that an abort ended among several samples cannot be continued: it comes
    back as its prompt, ABORTED, to begin again. Members whose generation or reward failed are
    marked FAILED; ConfigError is raised. With an aborted member the group is unfinished and nothing
    in it is scored under --group-rm.
    """
    state = GenerateState(args)
    if state.aborted:
        return group
    for sample in iter_samples(group):
        if sample.session_id is None:
            sample.session_id = (
                f"{sample.group_index}-{sample.index}"
                if sample.index is not None
                else uuid.uuid4().hex
            )
    params = [
        member_params(args, next(iter_samples([member])), sampling_params, number, evaluation)
        for number, member in enumerate(group)
    ]
    context = GroupContext(evaluation)
    token = _group_context.set(context)
    try:
        if sends_group_requests(args, group):
            results = await _generate_in_one_request(args, state, group, params, evaluation)
        else:
            members = zip(group, params, strict=True)
            results = await asyncio.gather(
                *(_guarded(args, member, one, evaluation) for member, one in members)
            )
    finally:
        _group_context.reset(token)
    results = [_to_continue(member, result) for member, result in zip(group, results, strict=True)]
    is_unfinished = any(sample.status is Sample.Status.ABORTED for sample in iter_samples(results))
    if context.to_score and not (args.group_rm and is_unfinished):
        gate = None if evaluation else getattr(state, "gate", None)
        await score_group(scoring_args(args, sampling_params), context.to_score, gate)
    return results


def _to_continue(member: Sample | list, result: Sample | list) -> Any:
    """A member's result as a later call can go on from it: an execution of several samples with an
    aborted one begins again.
    """
    if isinstance(result, Sample):
        return result
    samples = list(iter_samples(result))
    if not any(sample.status is Sample.Status.ABORTED for sample in samples):
        return result
    if len(samples) == 1:
        return samples[0]
    again = generation.reset_to_prompt(next(iter_samples([member])))
    again.status = Sample.Status.ABORTED
    return again


def member_params(
    args: argparse.Namespace,
    sample: Sample,
    sampling_params: dict[str, Any],
    member: int,
    evaluation: bool,
) -> dict[str, Any]:
    """A member's own copy of the sampling parameters, lists included, with its seed under
    deterministic inference.
    """
    params = copy.deepcopy(sampling_params)
    if getattr(args, "sglang_enable_deterministic_inference", False):
        params["sampling_seed"] = generation.derive_seed(
            args.rollout_seed,
            member=member,
            sample_index=sample.index,
            rollout_id=None if evaluation else get_current_rollout_id(),
            segment=sample.response_length,
        )
    return params


async def _guarded(
    args: argparse.Namespace,
    member: Sample | list,
    sampling_params: dict[str, Any],
    evaluation: bool,
) -> Any:
    """`generate_and_rm` of a sample, where an error marks it FAILED; a finished execution of
    several samples is only scored.
    """
    if not isinstance(member, Sample):
        for sample in iter_samples(member):
            mask_offpolicy_part(args, sample)
        return await _score_or_collect(args, member, evaluation)
    sample = member
    try:
        return await generate_and_rm(args, sample, sampling_params, evaluation=evaluation)
    except ENDS_THE_RUN:
        raise
    except Exception as error:  # noqa: BLE001 - a user's generate function or hook may raise anything
        return fail(sample, "generation", error)


def sends_group_requests(args: argparse.Namespace, group: list[Any]) -> bool:
    """Whether the members go to the engine in one request: nothing but the default generation, and
    no router in between (routers re-write a request's sampling parameters and know only one set of
    them).
    """
    choice = getattr(args, "rollout_group_requests", "off")
    if choice == "off" or args.custom_generate_function_path or generate is not _default_generate:
        return False
    if any(isinstance(member, list) for member in group):
        return False
    if any(sample.generate_function_path or sample.multimodal_inputs for sample in group):
        return False
    return choice == "on" or not get_engines(args).is_router


_default_generate = generate


async def _generate_in_one_request(
    args: argparse.Namespace,
    state: GenerateState,
    group: list[Sample],
    params: list[dict],
    evaluation: bool,
) -> list[Any]:
    """The members' results. A request that is refused as a whole is repeated member by member, to
    find the culprit.
    """
    requests: list[tuple[Sample, dict[str, Any]]] = []
    async with state.group_semaphore:
        for sample, one in zip(group, params, strict=True):
            mask_offpolicy_part(args, sample)
            if sample.status in (Sample.Status.PENDING, Sample.Status.ABORTED):
                if state.aborted:
                    sample.status = Sample.Status.ABORTED
                elif (request := _prepared(args, state, sample, one)) is not None:
                    requests.append((sample, request))
        if requests:
            await _request_batch(args, state, requests, key=group[0].group_index)
    return [await _finish_member(args, sample, evaluation) for sample in group]


def _prepared(
    args: argparse.Namespace, state: GenerateState, sample: Sample, sampling_params: dict[str, Any]
) -> dict[str, Any] | None:
    """`prepare_request`, where an error marks the sample FAILED and leaves nothing to send."""
    try:
        return prepare_request(args, state, sample, sampling_params)
    except ENDS_THE_RUN:
        raise
    except Exception as error:  # noqa: BLE001 - a chat template or tokenizer may raise anything
        fail(sample, "generation", error)
        return None


async def _request_batch(
    args: argparse.Namespace,
    state: GenerateState,
    requests: list[tuple[Sample, dict]],
    *,
    key: int | None,
) -> None:
    session_id = requests[0][0].session_id
    try:
        body = generation.build_batch_request([request for _, request in requests])
        with traced_request([sample for sample, _ in requests]) as note:
            payload = await request_generate(args, body, key=key, session_id=session_id)
            replies = generation.parse_batch_reply(payload, num_requests=len(requests))
            note(replies)
    except (EngineError, RolloutDataError) as error:
        if len(requests) > 1 and getattr(error, "status", 0) // 100 == 4:
            await asyncio.gather(*(_request_batch(args, state, [one], key=key) for one in requests))
        else:
            for sample, _ in requests:
                fail(sample, "generation", error)
        return
    for (sample, request), reply in zip(requests, replies, strict=True):
        try:
            store_reply(args, state, sample, reply, request["sampling_params"])
        except (EngineError, RolloutDataError) as error:
            fail(sample, "generation", error)


async def _finish_member(args: argparse.Namespace, sample: Sample, evaluation: bool) -> Any:
    if sample.status in (Sample.Status.FAILED, Sample.Status.ABORTED):
        return sample
    try:
        result = await _apply_hooks(args, sample, sample, evaluation)
    except ENDS_THE_RUN:
        raise
    except Exception as error:  # noqa: BLE001 - a user's hook may raise anything
        return fail(sample, "sample hook", error)
    return await _score_or_collect(args, result, evaluation)


async def abort(args: argparse.Namespace, rollout_id: int) -> None:
    """Ends every running request; the tasks then finish with what they have."""
    GenerateState(args).aborted = True
    await abort_engines(args)


async def generate_rollout_async(
    args: argparse.Namespace, rollout_id: int, data_source: Callable[[int], list[list[Sample]]]
) -> tuple[RolloutFnTrainOutput, list[list[Sample]]]:
    """(the rollout's groups, the groups that were begun or fetched and are to be given back).

    `data_source(n)` returns n groups.
    """
    outcome = await run_group_loop(args, rollout_id, data_source, _THIS)
    return outcome.output, outcome.returned


async def eval_rollout(
    args: argparse.Namespace, rollout_id: int
) -> tuple[RolloutFnEvalOutput, list]:
    """(results of every evaluation dataset, nothing to give back)."""
    return await evaluate_datasets(args, rollout_id, EVAL_PROMPT_DATASET, _THIS), []


def generate_rollout(
    args: argparse.Namespace, rollout_id: int, data_source: DataSource, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """One rollout for training, or one evaluation.

    `data_source` hands out groups and takes back those that were begun and not used.
    RolloutDataError where more samples failed than --max-failed-ratio allows; ConfigError for what
    the options make impossible.
    """
    set_current_rollout_id(rollout_id)
    if evaluation:
        return run(eval_rollout(args, rollout_id))[0]
    outcome = run(run_group_loop(args, rollout_id, data_source.get_samples, _THIS))
    if outcome.returned:
        data_source.add_samples(outcome.returned)
    commit = getattr(data_source, "commit", None)
    if commit is not None:
        commit(rollout_id, outcome.used_group_ids)
    outcome.selection.process_all(outcome.all_groups, data_source)
    return outcome.output
