"""Loads a user's function and checks it against its extension point. Does not call it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slime.config.extension_points import EXTENSION_POINTS, problem_of
from slime.exceptions import ConfigError
from slime.utils.misc import load_function


def load_hook(
    option: str, path: str, *, where: str, load: Callable[[str], Any] = load_function
) -> Any:
    """The function at `path`, checked for the extension point of `option`. ConfigError says where
    the path stands (`where`), what is wrong, and what to write.
    """
    point = EXTENSION_POINTS[option]
    try:
        function = load(path)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    problem = problem_of(point, function)
    if problem is not None:
        raise ConfigError(f"{where}: {problem}")
    return function
