"""Calls users' filters of groups; an error names the option, the function, the groups, and what was
returned.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from slime.data.sample import Sample
from slime.exceptions import RolloutDataError, SlimeError
from slime.plugins.failures import ENDS_THE_RUN, describe_error

logger = logging.getLogger(__name__)
SHOWN = 60


def call_filter(
    option: str, path: str, function: Callable[..., Any], about: Callable[[], str], *args: object
) -> Any:
    """What `function` returns. RolloutDataError where it raises: the option, the path, `about()`
    (which groups), and the exception, whose stack is logged once. A wrong option (ConfigError), an
    engine's error and the debugger's `quit` pass.
    """
    try:
        return function(*args)
    except ENDS_THE_RUN:
        raise
    except RolloutDataError as error:
        raise RolloutDataError(f"{option} {path}, called for {about()}: {error}") from error
    except SlimeError:
        raise
    except Exception as error:  # noqa: BLE001 - a user's function may raise anything
        logger.error(
            "%s %s raised %s; the stack:", option, path, type(error).__name__, exc_info=error
        )
        raise RolloutDataError(
            f"{option} {path} raised {describe_error(error)} for {about()}."
        ) from error


def shown(value: object) -> str:
    """A value's type and the beginning of its text."""
    if value is None:
        return "None"
    text = repr(value)
    return f"{type(value).__name__} ({text if len(text) <= SHOWN else text[:SHOWN] + '...'})"


def require_nothing(option: str, path: str, returned: object, groups: list, advice: str) -> None:
    """RolloutDataError where a function that works in place returned something else than nothing or
    the groups that it was given: it would be ignored.
    """
    if returned is not None and returned is not groups:
        raise RolloutDataError(
            f"{option} {path} returned {shown(returned)}, which nothing reads: {advice}"
        )


def require_samples(option: str, path: str, groups: list) -> None:
    """RolloutDataError unless `groups` still is a list of groups of samples."""
    for group in groups:
        members = (
            [group]
            if isinstance(group, Sample) or not isinstance(group, list | tuple)
            else list(group)
        )
        while members:
            member = members.pop()
            if isinstance(member, list | tuple):
                members += member
            elif not isinstance(member, Sample) or member is group:
                raise RolloutDataError(
                    f"{option} {path} left {shown(member)} where a group, a list of samples, is "
                    "needed."
                )


def require_groups(
    option: str,
    path: str,
    returned: object,
    *,
    buffer: Sequence[Any],
    num_groups: int,
    group_size: int,
) -> list:
    """The groups that a buffer filter returned. RolloutDataError unless they are at most
    `num_groups` groups of `group_size` members, out of the buffer.
    """
    advice = (
        f"It must take at most {num_groups} groups of {group_size} samples out of the buffer "
        "and return them as a list."
    )
    if not isinstance(returned, list):
        raise RolloutDataError(f"{option} {path} returned {shown(returned)}. {advice}")
    for group in returned:
        if not isinstance(group, list) or len(group) != group_size:
            raise RolloutDataError(
                f"{option} {path} returned a list with {shown(group)} in it, which is no group. "
                f"{advice}"
            )
    if len(returned) > num_groups:
        raise RolloutDataError(f"{option} {path} returned {len(returned)} groups. {advice}")
    left = {id(group) for group in buffer}
    if len({id(group) for group in returned}) < len(returned) or any(
        id(group) in left for group in returned
    ):
        raise RolloutDataError(
            f"{option} {path} returned a group that is still in the buffer, or one twice, which "
            f"would train twice. {advice}"
        )
    return returned
