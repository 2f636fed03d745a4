"""What is asked of an engine for one sample, and what its answer does to that sample. Pure: no
HTTP, no `args`.

The prompt is tokenized once and sent as ids. Response ids and log-probs are taken from the reply as
they are, never from its text. A reply whose counts disagree is refused whole, before anything is
stored. Shapes: K = tokens of one reply.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import struct
from collections.abc import Callable
from typing import Any

from slime.data.number_list import known_array, number_list
from slime.data.sample import Sample
from slime.exceptions import RolloutDataError
from slime.files.wire_arrays import decode_response_arrays, has_arrays
from slime.gate.before_rewards import ENGINE_TEXT

# What SGLang reports as weight version when none was set.
UNNAMED_WEIGHT_VERSION = "default"
MAX_SEED = 2**31 - 1
# What a reply's meta_info counts, as far as it is added up.
_COUNTS = (
    "completion_tokens",
    "prompt_tokens",
    "cached_tokens",
    "spec_accept_token_num",
    "spec_draft_token_num",
    "spec_verify_ct",
)


@dataclasses.dataclass(frozen=True)
class Reply:
    """One checked reply: response token ids [K], their log-probs [K] in nats, the text, and the
    engine's meta information.
    """

    token_ids: list[int]
    log_probs: list[float]
    text: str
    meta_info: dict[str, Any]

    @property
    def finish_type(self) -> str | None:
        """stop, length or abort; None where the reply has none."""
        reason = self.meta_info.get("finish_reason")
        return reason.get("type") if isinstance(reason, dict) else reason


def derive_seed(
    base_seed: int,
    *,
    member: int,
    sample_index: int | None,
    rollout_id: int | None,
    segment: int = 0,
) -> int:
    """A sampling seed in [0, 2^31), a function of its arguments alone.

    `base_seed + member` is the seed of the group's member; sample and rollout are mixed in so that
    prompts differ, and the number of response tokens so far (`segment`), so that a continued
    response does not repeat its first random numbers.
    """
    key = struct.pack(
        "<4q",
        base_seed + member,
        -1 if sample_index is None else sample_index,
        -1 if rollout_id is None else rollout_id,
        segment,
    )
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") & MAX_SEED


def response_budget(
    sample: Sample, *, max_response_len: int | None, max_context_len: int | None, prompt_length: int
) -> int | None:
    """Tokens that may still be generated: what is left of the response limit and of the context;
    None without limits.

    Zero or less means that nothing is to be sent. `sample.response_length` counts against both
    limits.
    """
    budgets = []
    if max_response_len is not None:
        budgets.append(max_response_len - sample.response_length)
    if max_context_len is not None:
        budgets.append(max_context_len - prompt_length - sample.response_length)
    return min(budgets) if budgets else None


def build_request(
    sample: Sample,
    sampling_params: dict[str, Any],
    *,
    input_ids: list[int] | None = None,
    text: str | None = None,
    image_data: list[str] | None = None,
    rid: str | None = None,
    return_arrays: bool = False,
    return_routed_experts: bool = False,
) -> dict[str, Any]:
    """The body of one /generate call: the sample's ids so far (or `input_ids`, or `text` with
    images) and how to sample.
    """
    request: dict[str, Any] = {"sampling_params": sampling_params, "return_logprob": True}
    if image_data:
        request.update(text=text, image_data=image_data)
    else:
        request["input_ids"] = sample.tokens if input_ids is None else input_ids
    if rid is not None:
        request["rid"] = rid
    if return_arrays:
        request["return_arrays"] = True
    if return_routed_experts:
        request["return_routed_experts"] = True
    return request


def build_batch_request(requests: list[dict[str, Any]]) -> dict[str, Any]:
    """One /generate body for several requests on ids: per-request values become lists, the answer
    is a list in this order.
    """
    batch: dict[str, Any] = {
        key: [request[key] for request in requests] for key in ("input_ids", "sampling_params")
    }
    if "rid" in requests[0]:
        batch["rid"] = [request["rid"] for request in requests]
    shared = {
        key: value
        for key, value in requests[0].items()
        if key not in ("input_ids", "sampling_params", "rid")
    }
    return {**batch, **shared}


def parse_batch_reply(payload: Any, *, num_requests: int) -> list[dict[str, Any]]:
    """The replies to `build_batch_request`, in its order. RolloutDataError for any other number of
    them.
    """
    replies = payload if isinstance(payload, list) else [payload]
    if len(replies) != num_requests:
        raise RolloutDataError(
            f"the engine sent {len(replies)} replies to {num_requests} requests in one call"
        )
    return replies


def parse_reply(payload: object) -> Reply:
    """The checked reply. RolloutDataError names what does not fit; an aborted reply without tokens
    is a valid empty one.
    """
    if not isinstance(payload, dict) or not isinstance(payload.get("meta_info"), dict):
        raise RolloutDataError(f"the engine's reply has no meta_info: {str(payload)[:200]}")
    meta = payload["meta_info"]
    if problem := _type_problem(payload, meta):
        raise RolloutDataError(f"the engine's reply {meta.get('id')!r} cannot be read: {problem}")
    try:
        token_ids, log_probs = _ids_and_log_probs(payload, meta)
    except (TypeError, LookupError) as error:
        raise RolloutDataError(
            f"the engine's reply {meta.get('id')!r} cannot be read: output_token_logprobs is no "
            f"list of [log-prob, id, text]: {error}"
        ) from error
    reply = Reply(token_ids, log_probs, text=payload.get("text") or "", meta_info=meta)
    if problem := _count_problem(payload, reply):
        raise RolloutDataError(f"the engine's reply {meta.get('id')!r} is inconsistent: {problem}")
    return reply


def _type_problem(payload: dict, meta: dict) -> str | None:
    text, output_ids, reason = (
        payload.get("text"),
        payload.get("output_ids"),
        meta.get("finish_reason"),
    )
    if not isinstance(text, str | None):
        return f"text is {text!r:.40}, no string"
    if not isinstance(output_ids, list | None):
        return f"output_ids is {output_ids!r:.40}, no list"
    if not isinstance(reason.get("type") if isinstance(reason, dict) else reason or "", str):
        return f"finish_reason is {reason!r:.40}, neither a name nor a dictionary with a type"
    wrong = [name for name in _COUNTS if not isinstance(meta.get(name), int | None)]
    return f"{wrong[0]} is {meta[wrong[0]]!r:.40}, no whole number" if wrong else None


def _ids_and_log_probs(payload: dict, meta: dict) -> tuple[list[int], list[float]]:
    if has_arrays(meta):
        token_ids, log_probs = decode_response_arrays(meta)
        if log_probs is None and len(token_ids):
            raise RolloutDataError("the engine's reply has token ids but no log-probs")
        return number_list(token_ids), number_list(log_probs)
    entries = meta.get("output_token_logprobs")
    if entries is None:
        if payload.get("output_ids") or meta.get("completion_tokens"):
            raise RolloutDataError(
                f"the engine's reply has {meta.get('completion_tokens')} tokens but no "
                "output_token_logprobs; "
                "does the server support return_logprob?"
            )
        return [], []
    return [entry[1] for entry in entries], [entry[0] for entry in entries]


def _count_problem(payload: dict, reply: Reply) -> str | None:
    num_ids = len(reply.token_ids)
    completion_tokens = reply.meta_info.get("completion_tokens")
    if completion_tokens is not None and completion_tokens != num_ids:
        return f"completion_tokens is {completion_tokens}, but it has {num_ids} log-probs"
    output_ids = payload.get("output_ids")
    if output_ids is not None and len(output_ids) != num_ids:
        return (
            f"{len(output_ids)} output_ids and {num_ids} log-probs (ids of the prompt among them?)"
        )
    if output_ids is not None and list(output_ids) != reply.token_ids:
        return "output_ids and the ids in output_token_logprobs differ"
    if known_array(reply.log_probs) is None and any(value is None for value in reply.log_probs):
        return f"{sum(value is None for value in reply.log_probs)} of {num_ids} log-probs are null"
    if num_ids == 0 and reply.finish_type not in ("abort", "stop", "length"):
        return f"it has no tokens and the finish reason {reply.meta_info.get('finish_reason')!r}"
    return None


def apply_response(
    sample: Sample, payload: object, *, args: argparse.Namespace | None = None
) -> Sample:
    """The sample, extended by the reply's ids, log-probs and text, with status, finish reason and
    weight version set.

    RolloutDataError leaves it as it was. Per-token payloads that cover the whole sequence (routed
    experts) replace the earlier ones. `args` is only handed on for the shape of routed experts.
    """
    reply = parse_reply(payload)
    meta = {key: value for key, value in reply.meta_info.items() if value is not None}
    if reply.token_ids:
        meta["weight_version"] = str(meta.get("weight_version") or UNNAMED_WEIGHT_VERSION)
    else:
        meta.pop("weight_version", None)
        meta.pop("routed_experts", None)
    if isinstance(meta.get("finish_reason"), str):
        meta["finish_reason"] = {"type": meta["finish_reason"]}
    before = dict(sample.__dict__)
    try:
        sample.append_response_tokens(
            args, tokens=reply.token_ids, log_probs=reply.log_probs, meta_info=meta, text=reply.text
        )
    except (
        TypeError,
        ValueError,
        RuntimeError,
    ) as error:  # torch answers some payloads with the last
        sample.__dict__.update(before)
        raise RolloutDataError(
            f"the engine's reply {meta.get('id')!r} does not fit sample {sample.index}: {error}"
        ) from error
    return sample


def apply_segment(
    sample: Sample,
    payload: object,
    *,
    decode: Callable[[list[int]], str],
    args: argparse.Namespace | None = None,
) -> Sample:
    """`apply_response`, where the text of a response that goes on is that of all its ids together.

    A character may be split between two segments, and many tokenizers leave out a text's first
    space: the texts of the segments do not add up. `decode(ids)` is asked only for responses that
    had begun.
    """
    had, before = sample.response_length, sample.response
    ids_before = sample.tokens[len(sample.tokens) - had :] if had else []
    apply_response(sample, payload, args=args)
    if had and sample.response_length > had:
        ids = sample.tokens[len(sample.tokens) - sample.response_length :]
        sample.response = continue_text(
            before, decode(list(ids_before)), decode(list(ids)), appended=sample.response
        )
    return sample


def continue_text(before: str, decoded_before: str, decoded: str, *, appended: str) -> str:
    """The text `before`, continued so that its end agrees with `decoded`, the text of all ids;
    `decoded_before` is that of the earlier ones.

    What a template or a user wrote in place of earlier ids stays. `appended`, where the end of
    `before` is not the ids' text.
    """
    same = next(
        (i for i, (a, b) in enumerate(zip(decoded_before, decoded, strict=False)) if a != b),
        min(len(decoded_before), len(decoded)),
    )
    changed = decoded_before[same:]
    if not before.endswith(changed):
        return appended
    return before[: len(before) - len(changed)] + decoded[same:]


def cut_untrained_tail(sample: Sample, over: int, *, decode: Callable[[list[int]], str]) -> int:
    """Takes what a template or an environment added last (mask 0) off a response that is `over`
    tokens too long by it; returns the tokens taken off, 0 where the response ends with trained
    tokens, or with fewer of the others than `over`.

    Nothing can be sampled behind them any more, so they would only pass the limit.
    """
    mask = number_list(sample.loss_mask) if sample.loss_mask is not None else []
    length = next((i for i, value in enumerate(reversed(mask)) if value), len(mask))
    if over <= 0 or length < over or length == len(mask):
        return 0
    kept, tail = (
        len(mask) - length,
        [int(token) for token in sample.tokens[len(sample.tokens) - length :]],
    )
    sample.tokens = sample.tokens[: len(sample.tokens) - length]
    sample.loss_mask = mask[:kept]
    sample.response_length = kept
    if sample.rollout_log_probs is not None:
        sample.rollout_log_probs = sample.rollout_log_probs[:kept]
    if sample.rollout_top_p_token_offsets is not None:
        # the tail has no nucleus
        sample.rollout_top_p_token_offsets = sample.rollout_top_p_token_offsets[: kept + 1]
    if sample.rollout_routed_experts is not None:
        sample.rollout_routed_experts = sample.rollout_routed_experts[: len(sample.tokens) - 1]
    sample.response = sample.response.removesuffix(decode(tail))
    return length


def reset_to_prompt(sample: Sample) -> Sample:
    """A new sample with the same prompt and identity and nothing generated: no tokens, masks,
    log-probs, reward or verdict.
    """
    return Sample(
        group_index=sample.group_index,
        index=sample.index,
        rollout_id=sample.rollout_id,
        prompt=sample.prompt,
        label=sample.label,
        metadata={
            key: value for key, value in sample.metadata.items() if key not in GENERATED_METADATA
        },
        multimodal_inputs=sample.multimodal_inputs,
        apply_chat_template_kwargs=sample.apply_chat_template_kwargs,
        generate_function_path=sample.generate_function_path,
        custom_rm_path=sample.custom_rm_path,
        session_id=sample.session_id,
    )


# Metadata that generation, the gate and scoring write; they do not belong to the prompt.
GENERATED_METADATA = frozenset(
    {"start_rollout_id", "failure", "reward_error", "raw_reward", "answer_text", ENGINE_TEXT}
)
