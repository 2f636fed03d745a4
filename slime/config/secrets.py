"""Keys and passwords in values that are written down: in URLs, and in dicts and JSON texts under a
name that says so. What is written has *** in their place, and is refused where it is read back.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

from slime.config.specs import all_specs

SECRET = "***"
STAND_IN = "not-recorded"
_SECRET = (
    r"(?:api|access|secret|private|auth|wandb|openai|anthropic|hf)[_-]?(?:key|token)"
    r"|secret|password|passwd|passphrase|credential|authorization|bearer"
)
_SECRET_NAME = re.compile(rf"(?i){_SECRET}|^token$")
# a name that may be of a secret (judge_token) or of a column or word (reward_key, pad_token): the
# value tells
_PERHAPS = re.compile(r"(?i)(?:^|_)(?:key|token)$")
_RANDOM = re.compile(r"(?=.*[0-9])(?=.*[A-Za-z])[\w+/=.~-]{8,}")
_IN_TEXT = (
    # scheme://user:password@host
    re.compile(r"(?P<before>\w+://[^/\s:@]+:)(?P<secret>[^/\s@]+)(?P<after>@)"),
    # ?api_key=...&
    re.compile(
        r"(?i)(?P<before>[?&][^=&\s]*(?:key|token|secret|password|passwd|auth)[^=&\s]*=)"
        r"(?P<secret>[^&#\s]*)(?P<after>)"
    ),
    # "api_key": "..."
    re.compile(
        rf'(?i)(?P<before>"[^"]*(?:{_SECRET}|"token)[^"]*"\s*:\s*")'
        r'(?P<secret>(?:[^"\\]|\\.)*)(?P<after>")'
    ),
)


def without_secrets(value: object) -> Any:
    """`value` with *** in place of passwords and keys: in URLs, and in dicts and JSON texts under a
    name that says so.
    """
    return _replaced(value, lambda secret: SECRET)


def with_stand_ins(value: object) -> Any:
    """`value` with a word in place of every *** that `without_secrets` left."""
    return _replaced(value, lambda secret: STAND_IN if secret == SECRET else secret)


def is_masked(value: object) -> bool:
    """Whether `without_secrets` has taken a password or key out of the value."""
    return with_stand_ins(value) != value


def _replaced(value: object, swap: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        for pattern in _IN_TEXT:
            value = pattern.sub(
                lambda match: match["before"] + swap(match["secret"]) + match["after"], value
            )
        return value
    if isinstance(value, dict):
        return {
            key: swap(entry) if is_secret(key, entry) else _replaced(entry, swap)
            for key, entry in value.items()
        }
    if isinstance(value, list | tuple):
        return type(value)(_replaced(entry, swap) for entry in value)
    return value


def is_secret(name: object, value: object) -> bool:
    """Whether a value is a password or key by the name under which it stands, or was one."""
    if not isinstance(value, str) or not value or name in _plain_options():
        return False
    if _SECRET_NAME.search(str(name)):
        return True
    return bool(_PERHAPS.search(str(name)) and (value == SECRET or _RANDOM.fullmatch(value)))


@functools.cache
def _plain_options() -> frozenset[str]:
    """Names of options that hold no secret, such as reward_key."""
    return frozenset(spec.name for spec in all_specs() if not spec.is_secret)
