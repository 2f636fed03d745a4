"""JSON behind a hash of its bytes, so that one changed bit is an error and never another value.

{"blake2b":"0c6f...","state":{"position":7}}
"""

from __future__ import annotations

import hashlib
from typing import Any

from slime.files import exact_json

_SEAL = '{{"blake2b":"{}","state":'
_HASH_DIGITS = 32


def seal(state: bytes) -> bytes:
    """The JSON text `state` behind its hash: one JSON object, without a newline of its own."""
    digest = hashlib.blake2b(state, digest_size=_HASH_DIGITS // 2).hexdigest()
    return _SEAL.format(digest).encode() + state + b"}"


def unseal(content: bytes) -> Any:
    """The value behind the hash. ValueError where the bytes are not those that were sealed."""
    value = exact_json.loads(content)
    if not isinstance(value, dict):
        raise ValueError(f"it holds a {type(value).__name__}")
    if "state" not in value:
        raise ValueError("it has no hash")
    if content != seal(content[len(_SEAL.format("")) + _HASH_DIGITS : -1]):
        raise ValueError("its hash differs")
    return value["state"]
