"""Other engines' shapes as Samples. The gate is the only place that knows them; a missing field has
a stated meaning, never a guess.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slime.data.sample import STATUS_OF_FINISH_REASON, Sample, Status

_FINISH_ALIASES = {
    "tool_calls": "stop",
    "function_call": "stop",
    "eos": "stop",
    "max_tokens": "length",
    "cancelled": "abort",
}


def sample_from_trajectory(raw: Mapping[str, Any]) -> Sample:
    """A Sample from a generic trajectory.

    Keys: `prompt_tokens` (ids), or `prompt` as an id list; `prompt` as string or messages;
    `response` text; `response_tokens` ids (required); `logprobs` per response token;
    `finish_reason`; `metadata`; `group_id`, `index`, `reward`. KeyError without `response_tokens`
    or prompt ids: text is never tokenized again, because that would not give the sampled ids.
    """
    prompt = raw.get("prompt", "")
    prompt_ids = raw.get("prompt_tokens")
    if prompt_ids is None and _is_id_list(prompt):
        prompt_ids = prompt
    if prompt_ids is None:
        raise KeyError("prompt_tokens (or prompt as a list of ids) is missing")
    ids = raw["response_tokens"]
    log_probs = raw.get("logprobs")
    return _build(
        prompt="" if prompt is prompt_ids else prompt,
        prompt_ids=prompt_ids,
        response_ids=ids,
        log_probs=log_probs,
        text=raw.get("response"),
        finish=raw.get("finish_reason"),
        fields={
            "group_index": raw.get("group_id"),
            "index": raw.get("index"),
            "reward": raw.get("reward"),
            "metadata": dict(raw.get("metadata") or {}),
        },
    )


def sample_from_sglang(raw: Mapping[str, Any]) -> Sample:
    """A Sample from {"request": {"input_ids", "text"?, "group_id"?, "index"?}, "response": SGLang's
    /generate JSON}.

    Ids and log-probs come from meta_info.output_token_logprobs ([log_prob, id, text] per token);
    `output_ids` is used for the ids when log-probs were not asked for. ValueError if
    completion_tokens disagrees with the number of ids.
    """
    request, response = raw["request"], raw["response"]
    meta = response.get("meta_info") or {}
    pairs = meta.get("output_token_logprobs")
    ids = [pair[1] for pair in pairs] if pairs is not None else response.get("output_ids")
    if ids is None:
        ids = []  # aborted before prefill: a valid empty partial
    completion = meta.get("completion_tokens")
    if completion is not None and completion != len(ids):
        raise ValueError(f"completion_tokens is {completion} but {len(ids)} output ids came back")
    finish = meta.get("finish_reason")
    sample = _build(
        prompt=request.get("text", ""),
        prompt_ids=request["input_ids"],
        response_ids=ids,
        log_probs=[pair[0] for pair in pairs] if pairs is not None else None,
        text=response.get("text"),
        finish=finish.get("type") if isinstance(finish, Mapping) else finish,
        fields={"group_index": request.get("group_id"), "index": request.get("index")},
    )
    if meta.get("weight_version") is not None:
        sample.weight_versions = [str(meta["weight_version"])]
    return sample


def sample_from_openai(raw: Mapping[str, Any]) -> Sample:
    """A Sample from {"request": {"prompt" | "messages", "prompt_token_ids"}, "response":
    completions or chat JSON, "choice": 0}.

    The ids are read from the choice's `token_ids` (vLLM, SGLang) or from logprobs.content[*].token
    as "token_id:<id>". KeyError if there are none: the OpenAI shape without ids cannot be trained
    on.
    """
    request, response = raw["request"], raw["response"]
    choice = response["choices"][raw.get("choice", 0)]
    content = (choice.get("logprobs") or {}).get("content")
    legacy = choice.get("logprobs") or {}
    ids = choice.get("token_ids")
    if ids is None and content is not None:
        ids = [_id_of(entry["token"]) for entry in content]
    if ids is None and legacy.get("tokens"):
        ids = [_id_of(token) for token in legacy["tokens"]]
    if ids is None:
        raise KeyError("token_ids: ask the server to return token ids")
    log_probs = (
        [entry["logprob"] for entry in content]
        if content is not None
        else legacy.get("token_logprobs")
    )
    prompt_ids = request.get(
        "prompt_token_ids", response.get("prompt_token_ids", choice.get("prompt_token_ids"))
    )
    if prompt_ids is None:
        raise KeyError("prompt_token_ids")
    message = choice.get("message")
    text = (message.get("content") or "") if message is not None else choice.get("text")
    prompt = request.get("messages", request.get("prompt", ""))
    return _build(
        prompt="" if _is_id_list(prompt) else prompt,
        prompt_ids=prompt_ids,
        response_ids=ids,
        log_probs=log_probs,
        text=text,
        finish=choice.get("finish_reason"),
        fields={"group_index": request.get("group_id"), "index": request.get("index")},
    )


ADAPTERS: dict[str, Callable[[Mapping[str, Any]], Sample]] = {
    "trajectory": sample_from_trajectory,
    "sglang": sample_from_sglang,
    "openai": sample_from_openai,
}


def _build(
    *,
    prompt: str | list[dict],
    prompt_ids: Sequence[int],
    response_ids: Sequence[int],
    log_probs: list[float] | None,
    text: object,
    finish: object,
    fields: dict,
) -> Sample:
    finish = _FINISH_ALIASES.get(finish, finish) if isinstance(finish, str) else None
    known = finish if finish in STATUS_OF_FINISH_REASON else None
    return Sample(
        prompt=prompt,
        tokens=[*prompt_ids, *response_ids],
        response=text if isinstance(text, str) else "",
        response_length=len(response_ids),
        rollout_log_probs=log_probs,
        finish_reason=known,
        status=STATUS_OF_FINISH_REASON[known] if known is not None else Status.COMPLETED,
        **fields,
    )


def _is_id_list(value: object) -> bool:
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str)
        and bool(value)
        and all(isinstance(v, int) for v in value)
    )


def _id_of(token: str) -> int:
    prefix, _, number = str(token).partition(":")
    if prefix != "token_id" or not number:
        raise KeyError(
            f"token id of {token!r}: ask the server for return_tokens_as_token_ids or token_ids"
        )
    return int(number)
