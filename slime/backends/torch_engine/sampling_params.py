"""The sampling parameters of one request: SGLang's names, every value checked before the request is
accepted.
"""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Callable
from typing import Any

DEFAULT_MAX_NEW_TOKENS = 128
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_N = 1024
MAX_COUNT = 2**31 - 1  # fits every array that a count travels in
# Below it a division by the temperature or the penalty leaves float32; a temperature is greedy
# there, as SGLang has it.
SMALLEST_DIVISOR = 1e-6
MAX_TEMPERATURE = 1e6
# SGLang parameters that the embedded engine has no answer for; legal only when they are null or
# neutral.
UNSUPPORTED = ("stop_regex", "json_schema", "regex", "ebnf", "structural_tag", "logit_bias")


class BadRequest(ValueError):
    """A request that cannot be served as it is. The message names the field, its value and what is
    allowed.
    """


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How to draw the tokens of one response. temperature 0 is greedy; top_k -1 is off; lengths are
    in tokens.
    """

    max_new_tokens: int | None = DEFAULT_MAX_NEW_TOKENS
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    n: int = 1
    sampling_seed: int | None = None
    return_top_p_token_ids: bool = False

    @property
    def truncates(self) -> bool:
        """True if top_k, top_p or min_p take tokens away."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    @property
    def penalizes(self) -> bool:
        """True if a penalty is not neutral."""
        return (
            self.repetition_penalty != 1.0
            or self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
        )


def parse_sampling_params(raw: object, *, vocab_size: int) -> SamplingParams:
    """Returns the checked parameters of a JSON object (or null). BadRequest names the key that is
    unknown or out of range.
    """
    if raw is None:
        raw = {}
    if not isinstance(raw, dict):
        raise BadRequest(f"sampling_params is {shown(raw)}, expected an object.")
    values: dict[str, Any] = {}
    for name, value in raw.items():
        parser = PARSERS.get(name)
        if parser is None:
            _check_unsupported(name, value)
            continue
        if value is not None or name == "max_new_tokens":
            values.update(parser(name, value))
    params = SamplingParams(**values)
    if params.max_new_tokens is not None and params.min_new_tokens > params.max_new_tokens:
        raise BadRequest(
            f"sampling_params.min_new_tokens is {params.min_new_tokens}, more than max_new_tokens "
            f"{params.max_new_tokens}."
        )
    outside = [token for token in params.stop_token_ids if token >= vocab_size]
    if outside:
        raise BadRequest(
            f"sampling_params.stop_token_ids has {outside[:5]}, the vocabulary is "
            f"0..{vocab_size - 1}."
        )
    return params


def _check_unsupported(name: str, value: object) -> None:
    if name in UNSUPPORTED:
        if value is None or value in ([], {}, ""):
            return
        raise BadRequest(
            f"sampling_params.{name} is {shown(value)}; the embedded engine does not support it, "
            "leave it out."
        )
    known = ", ".join(sorted(PARSERS))
    raise BadRequest(f"sampling_params.{name} is not a sampling parameter. Known are: {known}.")


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 60
_SHORT.maxdict = _SHORT.maxlist = 4


def shown(value: object) -> str:
    """`value` as a message shows it: short, however long or deep it is."""
    return _SHORT.repr(value)


def _bad(name: str, value: object, allowed: str) -> BadRequest:
    return BadRequest(f"sampling_params.{name} is {shown(value)}, expected {allowed}.")


def _number(test: Callable[[float], bool], allowed: str) -> Callable[[str, Any], dict[str, Any]]:
    def parse(name: str, value: object) -> dict[str, Any]:
        # an int may be larger than any float, so it is compared before it is converted
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or value != value
            or not test(value)
        ):
            raise _bad(name, value, allowed)
        return {name: float(value)}

    return parse


def _temperature(name: str, value: object) -> dict[str, Any]:
    parsed = _number(
        lambda number: 0 <= number <= MAX_TEMPERATURE, "a number >= 0 (0 is greedy), at most 1e6"
    )(name, value)
    return {name: 0.0} if parsed[name] < SMALLEST_DIVISOR else parsed


def _count(
    least: int, allowed: str, *, nullable: bool = False
) -> Callable[[str, Any], dict[str, Any]]:
    return _whole(
        lambda count: least <= count <= MAX_COUNT,
        f"{allowed} (at most {MAX_COUNT})",
        nullable=nullable,
    )


def _whole(
    test: Callable[[int], bool], allowed: str, *, nullable: bool = False
) -> Callable[[str, Any], dict[str, Any]]:
    def parse(name: str, value: object) -> dict[str, Any]:
        if value is None and nullable:
            return {name: None}
        if isinstance(value, bool) or not isinstance(value, int) or not test(value):
            raise _bad(name, value, allowed)
        return {name: value}

    return parse


def _flag(name: str, value: object) -> dict[str, Any]:
    if not isinstance(value, bool):
        raise _bad(name, value, "true or false")
    return {name: value}


def _ignored_flag(name: str, value: object) -> dict[str, Any]:
    _flag(name, value)
    return {}


def _stop(name: str, value: object) -> dict[str, Any]:
    strings = (value,) if isinstance(value, str) else value
    allowed = (
        f"a text or a list of at most {MAX_STOP_STRINGS} texts of 1 to {MAX_STOP_LENGTH} characters"
    )
    if not isinstance(strings, list | tuple) or len(strings) > MAX_STOP_STRINGS:
        raise _bad(name, value, allowed)
    if not all(isinstance(text, str) and 0 < len(text) <= MAX_STOP_LENGTH for text in strings):
        raise _bad(name, value, allowed)
    return {name: tuple(strings)}


def _stop_token_ids(name: str, value: object) -> dict[str, Any]:
    if not isinstance(value, list) or not all(type(token) is int and token >= 0 for token in value):
        raise _bad(name, value, "a list of token ids")
    distinct = tuple(dict.fromkeys(value))
    if len(distinct) > MAX_STOP_TOKEN_IDS:
        raise _bad(name, value, f"at most {MAX_STOP_TOKEN_IDS} different token ids")
    return {name: distinct}


def _custom_params(name: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict) or set(value) - {"return_top_p_token_ids"}:
        raise _bad(name, value, "an object with no key but return_top_p_token_ids")
    return _flag("return_top_p_token_ids", value.get("return_top_p_token_ids", False))


def _sampling_seed(name: str, value: object) -> dict[str, Any]:
    return _whole(lambda seed: -(2**63) <= seed < 2**64, "a whole number of 64 bits")(name, value)


PARSERS: dict[str, Callable[[str, Any], dict[str, Any]]] = {
    "max_new_tokens": _count(
        0, "a whole number >= 0, or null for no limit but the context", nullable=True
    ),
    "min_new_tokens": _count(0, "a whole number >= 0"),
    "temperature": _temperature,
    "top_p": _number(lambda value: 0 < value <= 1, "a number in (0, 1]"),
    "top_k": _whole(
        lambda count: count == -1 or 1 <= count <= MAX_COUNT,
        f"-1 (off) or a whole number >= 1 (at most {MAX_COUNT})",
    ),
    "min_p": _number(lambda value: 0 <= value <= 1, "a number in [0, 1]"),
    "repetition_penalty": _number(
        lambda value: SMALLEST_DIVISOR <= value <= 2, "a number in (0, 2], at least 1e-6"
    ),
    "frequency_penalty": _number(lambda value: -2 <= value <= 2, "a number in [-2, 2]"),
    "presence_penalty": _number(lambda value: -2 <= value <= 2, "a number in [-2, 2]"),
    "stop": _stop,
    "stop_token_ids": _stop_token_ids,
    "ignore_eos": _flag,
    "skip_special_tokens": _flag,
    "spaces_between_special_tokens": _ignored_flag,
    "no_stop_trim": _flag,
    "n": _whole(lambda count: 1 <= count <= MAX_N, f"a whole number from 1 to {MAX_N}"),
    "sampling_seed": _sampling_seed,
    "custom_params": _custom_params,
}
