"""User functions that see, and may replace, each generated sample before its reward."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable
from typing import Any

from slime.data.sample import Sample
from slime.utils.misc import load_function

_current_rollout_id: int | None = None


def set_current_rollout_id(rollout_id: int | None) -> None:
    """Notes the rollout that is being generated in this process, for hooks and sampling seeds."""
    global _current_rollout_id
    _current_rollout_id = rollout_id


def get_current_rollout_id() -> int | None:
    """The rollout that is being generated in this process."""
    return _current_rollout_id


async def apply_rollout_sample_hooks(
    args: argparse.Namespace, value: object, **kwargs: object
) -> Any:
    """`value` (a Sample, or nested lists of them) after every hook, in order; the very same object
    without hooks.

    A hook gets those of `kwargs` that its signature names, `rollout_id` among them. None keeps the
    sample; anything else but a Sample is a TypeError.
    """
    paths = getattr(args, "rollout_sample_hook_path", None)
    if not paths:
        return value
    hooks = [load_function(path) for path in ([paths] if isinstance(paths, str) else paths)]
    kwargs.setdefault("rollout_id", _current_rollout_id)
    return await _apply(hooks, args, value, kwargs)


async def _apply(
    hooks: list[Callable], args: argparse.Namespace, value: object, kwargs: dict[str, Any]
) -> Any:
    if isinstance(value, list):
        return [await _apply(hooks, args, item, kwargs) for item in value]
    for hook in hooks:
        result = hook(args, value, **accepted_kwargs(hook, kwargs))
        if inspect.isawaitable(result):
            result = await result
        if result is not None and not isinstance(result, Sample):
            name = getattr(hook, "__qualname__", hook)
            raise TypeError(
                f"sample hook {name} returned {type(result).__name__}; expected Sample or None"
            )
        value = value if result is None else result
    return value


def accepted_kwargs(fn: Callable, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Those of `kwargs` that `fn` can take by keyword."""
    parameters = inspect.signature(fn).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return kwargs
    named = {
        parameter.name
        for parameter in parameters
        if parameter.kind
        in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    }
    return {name: value for name, value in kwargs.items() if name in named}
