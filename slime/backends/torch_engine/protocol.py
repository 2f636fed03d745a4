"""The JSON of /generate, both ways: a body becomes checked requests, finished requests become
SGLang's response objects. Pure.
"""

from __future__ import annotations

import base64
import dataclasses
import itertools
import math
import uuid
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from slime.backends.torch_engine import noise
from slime.backends.torch_engine.request import Request
from slime.backends.torch_engine.sampling_params import (
    BadRequest,
    SamplingParams,
    parse_sampling_params,
    shown,
)
from slime.backends.torch_engine.stop_strings import cut_at_stop
from slime.backends.torch_engine.tokenizer import EngineTokenizer
from slime.files.wire_arrays import (
    LOG_PROB_DTYPE,
    LOG_PROBS_KEY,
    TOKEN_DTYPE,
    TOKEN_IDS_KEY,
    encode_array,
)

MAX_BATCH = 16384
MAX_RID_LENGTH = 256


@dataclasses.dataclass(frozen=True)
class EngineLimits:
    """What bounds a call: sizes of vocabulary and context, the response room that the cache has
    after a prompt of given length, and how many responses the engine can have waiting.
    """

    vocab_size: int
    context_length: int
    longest_response: Callable[[int], int]
    max_responses: int


@dataclasses.dataclass(frozen=True)
class ResponseOptions:
    """How the response is to look."""

    return_logprob: bool
    return_arrays: bool
    return_text_in_logprobs: bool
    stream: bool


@dataclasses.dataclass(frozen=True)
class GenerateCall:
    """A parsed body: requests in response order, and whether the response is a list."""

    requests: list[Request]
    is_list: bool
    options: ResponseOptions


def parse_generate(
    body: object,
    limits: EngineLimits,
    *,
    tokenizer: EngineTokenizer | None,
    next_seed: Callable[[], int],
) -> GenerateCall:
    """Returns the requests of a /generate body. BadRequest names the field that is wrong; unknown
    top-level fields are ignored, because the router adds some.
    """
    if not isinstance(body, dict):
        raise BadRequest(f"the body is a JSON {type(body).__name__}, expected an object.")
    options = _response_options(body)
    name, items, is_batch = _prompt_items(body, tokenizer)
    params = _spread_params(body.get("sampling_params"), len(items), is_batch, limits)
    # Before anything is made per response: a short body can ask for millions.
    _check_total(params, limits)
    prompts = [_token_array(ids, name, limits) for ids in _encoded(name, items, tokenizer, limits)]
    if tokenizer is None and any(param.stop for param in params):
        raise BadRequest(
            "sampling_params.stop needs a tokenizer, and the model folder has no tokenizer.json. "
            "Use stop_token_ids."
        )
    rids = _rids(body.get("rid"), len(prompts), is_batch)
    starts = _score_starts(
        body.get("logprob_start_len"), len(prompts), is_batch, options.return_logprob
    )
    requests = []
    for prompt, param, rid, start in zip(prompts, params, rids, starts, strict=True):
        limit = _checked_limit(len(prompt), param, limits)
        if start is not None and start > len(prompt):
            raise BadRequest(
                f"logprob_start_len is {start}, but the prompt has {len(prompt)} tokens."
            )
        # From its end on, a prompt has nothing to score: the same as not asking.
        score_from = start if start is not None and start < len(prompt) else None
        seed = next_seed() if param.sampling_seed is None else param.sampling_seed
        for index in range(param.n):
            requests.append(
                Request(
                    rid=rid,
                    prompt=prompt,
                    params=param,
                    seed=noise.sibling_seed(seed, index),
                    limit=limit,
                    stream=options.stream,
                    score_from=score_from,
                )
            )
    is_list = is_batch or params[0].n > 1
    if options.stream and is_list:
        raise BadRequest(
            "stream is true for a list of prompts or n > 1; stream one response per request."
        )
    return GenerateCall(requests, is_list=is_list, options=options)


def _response_options(body: dict[str, Any]) -> ResponseOptions:
    names = [field.name for field in dataclasses.fields(ResponseOptions)]
    values = {}
    for name in names:
        value = body.get(name)
        if value is not None and not isinstance(value, bool):
            raise BadRequest(f"{name} is {shown(value)}, expected true or false.")
        values[name] = bool(value)
    return ResponseOptions(**values)


def _prompt_items(
    body: dict[str, Any], tokenizer: EngineTokenizer | None
) -> tuple[str, list[Any], bool]:
    """Returns the field that holds the prompts, the prompts as they came, and whether they came as
    a list.
    """
    ids, text = body.get("input_ids"), body.get("text")
    if (ids is None) == (text is None):
        raise BadRequest("give exactly one of input_ids (token ids) and text.")
    name = "text" if ids is None else "input_ids"
    for unsupported in ("input_embeds", "image_data", "audio_data", "video_data", "lora_path"):
        if body.get(unsupported):
            raise BadRequest(
                f"{unsupported} is not supported by the embedded engine; send text or input_ids "
                "alone."
            )
    value: Any = text if ids is None else ids
    is_batch = isinstance(value, list) and (
        name == "text" or (len(value) > 0 and isinstance(value[0], list))
    )
    items = value if is_batch else [value]
    if not 1 <= len(items) <= MAX_BATCH:
        raise BadRequest(f"{name} is a list of {len(items)} prompts, expected 1 to {MAX_BATCH}.")
    if name == "text":
        if tokenizer is None:
            raise BadRequest(
                "text needs a tokenizer, and the model folder has no tokenizer.json. Send "
                "input_ids."
            )
        for item in items:
            if not isinstance(item, str):
                raise BadRequest(f"text is {shown(item)}, expected a text or a list of texts.")
    return name, items, is_batch


def _encoded(
    name: str, items: list[Any], tokenizer: EngineTokenizer | None, limits: EngineLimits
) -> list[Any]:
    return (
        [tokenizer.encode(item, longest=limits.context_length) for item in items]
        if name == "text" and tokenizer is not None
        else items
    )


def _check_total(params: list[SamplingParams], limits: EngineLimits) -> None:
    total = sum(param.n for param in params)
    if total > limits.max_responses:
        raise BadRequest(
            f"the call asks for {total} responses ({len(params)} prompt(s), n up to "
            f"{max(param.n for param in params)}), and the engine"
            f" takes at most {limits.max_responses} at once. Send fewer prompts or a smaller n per call."
        )


def _token_array(ids: object, name: str, limits: EngineLimits) -> np.ndarray:
    if not isinstance(ids, list) or not ids:
        raise BadRequest(
            f"{name} has an empty prompt or one that is not a list; a prompt needs at least one "
            "token."
        )
    if len(ids) > limits.context_length:
        is_beginning = name == "text" and len(ids) > 2 * limits.context_length
        raise _too_long(f"at least {len(ids)}" if is_beginning else len(ids), limits)
    # bool is an int to Python, and numpy would truncate floats silently.
    if not set(map(type, ids)) <= {int}:
        raise BadRequest(
            f"{name} has {shown(next(i for i in ids if type(i) is not int))}, expected token ids "
            "(whole numbers)."
        )
    if min(ids) < 0 or max(ids) >= limits.vocab_size:
        wrong = next(token for token in ids if not 0 <= token < limits.vocab_size)
        raise BadRequest(
            f"{name} has the token id {wrong}, the vocabulary is 0..{limits.vocab_size - 1}."
        )
    return np.array(ids, dtype=np.int32)


def _spread_params(
    raw: object, count: int, is_batch: bool, limits: EngineLimits
) -> list[SamplingParams]:
    if not isinstance(raw, list):
        return [parse_sampling_params(raw, vocab_size=limits.vocab_size)] * count
    if not is_batch or len(raw) != count:
        raise BadRequest(
            f"sampling_params is a list of {len(raw)} for {count} prompt(s); give one object, or a "
            "list of one per prompt."
        )
    return [parse_sampling_params(item, vocab_size=limits.vocab_size) for item in raw]


def _rids(raw: Any, count: int, is_batch: bool) -> list[str]:
    if raw is None:
        return [uuid.uuid4().hex for _ in range(count)]
    if isinstance(raw, str):
        # A list shares one name with an index, so that each can be told apart.
        rids = [f"{raw}_{index}" for index in range(count)] if is_batch else [raw]
    else:
        rids = raw
    if (
        not isinstance(rids, list)
        or len(rids) != count
        or not all(isinstance(rid, str) for rid in rids)
    ):
        raise BadRequest(
            f"rid is {shown(raw)}, expected a text, or a list of one text for each of the {count} "
            "prompts."
        )
    if any(not 1 <= len(rid) <= MAX_RID_LENGTH for rid in rids):
        raise BadRequest(
            f"rid has a text that is empty or longer than {MAX_RID_LENGTH} characters."
        )
    if len(set(rids)) != count:
        raise BadRequest("rid has the same text twice.")
    return rids


def _score_starts(raw: Any, count: int, is_batch: bool, return_logprob: bool) -> list[int | None]:
    starts = raw if isinstance(raw, list) and is_batch else [raw] * count
    if len(starts) != count:
        raise BadRequest(f"logprob_start_len is a list of {len(starts)} for {count} prompts.")
    for start in starts:
        if start is not None and (type(start) is not int or start < -1):
            raise BadRequest(
                f"logprob_start_len is {shown(start)}, expected -1 (response only) or the index of "
                "a prompt token."
            )
    return [
        start if return_logprob and start is not None and start >= 0 else None for start in starts
    ]


def _too_long(length: int | str, limits: EngineLimits) -> BadRequest:
    return BadRequest(
        f"the prompt has {length} tokens and the context length is {limits.context_length}; with a "
        "response it may have at most"
        f" {limits.context_length - 1}."
    )


def _checked_limit(length: int, params: SamplingParams, limits: EngineLimits) -> int:
    """Returns the response tokens that the request may have: what it asks for, cut at the context
    length.
    """
    room = limits.context_length - length
    if room < 0 or (room == 0 and params.max_new_tokens != 0):
        raise _too_long(length, limits)
    cache_room = limits.longest_response(length)
    if params.max_new_tokens is None:
        limit = min(room, cache_room)
    else:
        limit = min(params.max_new_tokens, room)
    if limit > cache_room or cache_room < 0:
        raise BadRequest(
            f"{length} prompt tokens and max_new_tokens {limit} do not fit into the KV cache, "
            f"which has room for {max(cache_room, 0)} after"
            " this prompt. Ask for fewer, or give the engine more with --sglang-max-total-tokens."
        )
    return limit


def build_responses(
    requests: list[Request], options: ResponseOptions, *, tokenizer: EngineTokenizer | None
) -> list[dict[str, Any]]:
    """Returns SGLang's response object of each finished request."""
    texts = response_texts(requests, tokenizer)
    return [
        build_response(request, options, text=text, tokenizer=tokenizer)
        for request, text in zip(requests, texts, strict=True)
    ]


def response_texts(requests: list[Request], tokenizer: EngineTokenizer | None) -> list[str]:
    """Returns the response texts, without what ended them unless no_stop_trim; empty texts if there
    is no tokenizer.
    """
    texts = [""] * len(requests)
    if tokenizer is None:
        return texts
    for skip in (True, False):
        members = [
            index
            for index, request in enumerate(requests)
            if request.params.skip_special_tokens is skip
        ]
        decoded = tokenizer.decode_batch(
            [_text_ids(requests[index]) for index in members], skip_special_tokens=skip
        )
        for index, text in zip(members, decoded, strict=True):
            texts[index] = _without_stop(text, requests[index], tokenizer)
    return texts


def _text_ids(request: Request) -> list[int]:
    ids = request.output_ids.tolist()
    matched = cast(dict, request.finish_reason).get("matched")
    if isinstance(matched, int) and not request.params.no_stop_trim:
        return ids[:-1]
    return ids


def _without_stop(text: str, request: Request, tokenizer: EngineTokenizer) -> str:
    matched = cast(dict, request.finish_reason).get("matched")
    if not isinstance(matched, str) or request.params.no_stop_trim:
        return text
    skip = request.params.skip_special_tokens
    cut = cut_at_stop(
        request.output_ids.tolist(),
        matched,
        decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=skip),
    )
    return text if cut is None else text[:cut]


def build_response(
    request: Request, options: ResponseOptions, *, text: str, tokenizer: EngineTokenizer | None
) -> dict[str, Any]:
    """Returns one response object; `meta_info` as docs/engine.md lists it."""
    meta = meta_info(
        request,
        len(request.output_ids),
        request.finish_reason,
        ended_at=cast(float, request.finished_at),
    )
    if request.kept_token_ids:
        meta.update(_nucleus(request))
    response: dict[str, Any] = {"text": text, "meta_info": meta}
    if options.return_arrays:
        meta[TOKEN_IDS_KEY] = encode_array(request.output_ids, TOKEN_DTYPE)
        if options.return_logprob:
            meta[LOG_PROBS_KEY] = encode_array(request.output_log_probs, LOG_PROB_DTYPE)
    else:
        ids = request.output_ids.tolist()
        response["output_ids"] = ids
        if options.return_logprob:
            meta["output_token_logprobs"] = triples(
                request.output_log_probs.tolist(), ids, options, tokenizer
            )
    if options.return_logprob and request.input_log_probs is not None:
        scored = request.prompt[request.score_from :].tolist()
        values = [
            None if math.isnan(value) else value for value in request.input_log_probs.tolist()
        ]
        meta["input_token_logprobs"] = triples(values, scored, options, tokenizer)
    return response


def meta_info(
    request: Request, count: int, finish_reason: dict[str, Any] | None, *, ended_at: float
) -> dict[str, Any]:
    """Returns what docs/engine.md lists of a response with `count` tokens."""
    started_at = ended_at if request.started_at is None else request.started_at
    meta: dict[str, Any] = {
        "id": request.rid,
        "finish_reason": finish_reason,
        "prompt_tokens": len(request.prompt),
        "completion_tokens": count,
        "cached_tokens": request.cached_tokens,
        "weight_version": request.versions[0][0],
        "e2e_latency": ended_at - request.submitted_at,
        "queue_time": started_at - request.submitted_at,
    }
    if request.prefilled_at is not None:
        decode_time = ended_at - request.prefilled_at
        meta["prefill_launch_latency"] = request.prefilled_at - started_at
        meta["inference_time"] = ended_at - started_at
        if decode_time > 0:
            meta["decode_throughput"] = count / decode_time
    segments = request.version_segments(count)
    if len(segments) > 1:
        meta["weight_versions"] = segments
    if segments:
        meta["weight_version"] = segments[0][0]
    return meta


def triples(
    log_probs: Sequence[float | None],
    ids: list[int],
    options: ResponseOptions,
    tokenizer: EngineTokenizer | None,
) -> list[tuple[float | None, int, str | None]]:
    """Returns SGLang's [log-prob, id, text] of each token; the text where it was asked for."""
    if options.return_text_in_logprobs and tokenizer is not None:
        texts = tokenizer.decode_batch([[token] for token in ids], skip_special_tokens=False)
        return list(zip(log_probs, ids, texts, strict=True))
    return list(zip(log_probs, ids, itertools.repeat(None)))


def _nucleus(request: Request) -> dict[str, str]:
    """Returns the token ids that truncation left at each position, flat, and the offsets [response
    length + 1] into them.
    """
    sizes = [len(kept) for kept in request.kept_token_ids]
    offsets = np.concatenate(([0], np.cumsum(sizes)))
    flat = np.concatenate(request.kept_token_ids)
    return {
        "top_p_token_ids": base64.b64encode(flat.astype(TOKEN_DTYPE).tobytes()).decode("ascii"),
        "top_p_token_offsets": base64.b64encode(offsets.astype(TOKEN_DTYPE).tobytes()).decode(
            "ascii"
        ),
    }
