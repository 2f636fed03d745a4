"""JSON as fast as orjson reads and writes it, with integers of any size kept exact.

orjson reads an integer beyond 64 bits as a float and refuses to write one. Such integers occur as
labels.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import orjson

JSONDecodeError = orjson.JSONDecodeError
# 2^63 has 19 digits; those behind a decimal point are no integer
_LONG_DIGITS = re.compile(rb"(?<![0-9.])[0-9]{19}")


def loads(text: bytes) -> Any:
    """The value of a JSON text. orjson.JSONDecodeError where it is none."""
    value = orjson.loads(text)
    if _LONG_DIGITS.search(text) is None:
        return value
    try:
        return json.loads(text)
    except ValueError:  # more digits than Python converts (4300)
        return value
    except RecursionError:
        raise JSONDecodeError("nested too deep", "", 0) from None


def dumps(
    value: object, *, default: Callable[[Any], Any] | None = None, option: int | None = None
) -> bytes:
    """The JSON text of a value. orjson.JSONEncodeError (a TypeError) for what JSON
    does not have.
    """
    try:
        return orjson.dumps(value, default=default, option=option)
    except orjson.JSONEncodeError as error:
        if "64-bit" not in str(error):
            raise
        return orjson.dumps(_with_long_integers(value), default=default, option=option)


def _with_long_integers(value: object) -> Any:
    if type(value) is int and not -(2**63) <= value < 2**64:
        return orjson.Fragment(str(value).encode())
    if isinstance(value, dict):
        return {key: _with_long_integers(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_with_long_integers(entry) for entry in value]
    return value
