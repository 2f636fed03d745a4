"""Token ids and log-probs as base64 text: what `return_arrays` puts into a JSON response in place
of lists.

The bytes are little-endian int32 (ids) and float32 (log-probs); decoding copies nothing but the
base64 text.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import Any

import numpy as np

from slime.exceptions import EngineError

TOKEN_IDS_KEY = "output_token_ids_b64"
LOG_PROBS_KEY = "output_token_logprobs_b64"
TOKEN_DTYPE = np.dtype("<i4")
LOG_PROB_DTYPE = np.dtype("<f4")


def encode_array(values: Sequence[float | None] | np.ndarray, dtype: np.dtype) -> str:
    """Returns base64 text of `values` [N] as little-endian `dtype`."""
    return (
        base64.b64encode(np.ascontiguousarray(values, dtype=dtype).data).decode("ascii")
        if len(values)
        else ""
    )


def decode_array(text: str, dtype: np.dtype, *, name: str = "array") -> np.ndarray:
    """Returns a read-only array [N]. EngineError if `text` is not base64 or its size is not a whole
    number of elements.
    """
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError, TypeError) as error:
        raise EngineError(f"{name} is not base64 text: {error}") from None
    if len(data) % dtype.itemsize:
        raise EngineError(
            f"{name} has {len(data)} bytes, not a multiple of {dtype.itemsize}: the reply was cut."
        )
    return np.frombuffer(data, dtype=dtype)


def has_arrays(meta_info: dict[str, Any]) -> bool:
    """True if the response was made with `return_arrays`."""
    return TOKEN_IDS_KEY in meta_info


def decode_response_arrays(meta_info: dict[str, Any]) -> tuple[np.ndarray, np.ndarray | None]:
    """Returns (token ids int32 [N], log-probs float32 [N] or None if the request did not ask for
    them).

    EngineError if the two lengths differ from each other or from completion_tokens.
    """
    token_ids = decode_array(meta_info[TOKEN_IDS_KEY], TOKEN_DTYPE, name=TOKEN_IDS_KEY)
    text = meta_info.get(LOG_PROBS_KEY)
    log_probs = None if text is None else decode_array(text, LOG_PROB_DTYPE, name=LOG_PROBS_KEY)
    expected = meta_info.get("completion_tokens", len(token_ids))
    if len(token_ids) != expected or (log_probs is not None and len(log_probs) != expected):
        num_log_probs = "no" if log_probs is None else len(log_probs)
        raise EngineError(
            f"response has {len(token_ids)} token ids and {num_log_probs} log-probs, but "
            f"completion_tokens is {expected}."
        )
    return token_ids, log_probs
